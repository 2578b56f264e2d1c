"""The OpenAI-compatible server: `create_app` makes a FastAPI application from an `AsyncEngine` and `ServerSettings`."""

from ttpu_serve.server.app import create_app
from ttpu_serve.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
