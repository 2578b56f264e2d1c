"""The old import path of `ttpu_core.spec.parameters`, kept for plugins that were written for it."""

from ttpu_core.spec.parameters import *  # noqa: F403
