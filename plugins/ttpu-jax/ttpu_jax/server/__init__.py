"""The OpenAI-compatible server: `create_app` makes a FastAPI application of an `AsyncEngine` and `ServerSettings`."""

from ttpu_jax.server.app import create_app
from ttpu_jax.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
