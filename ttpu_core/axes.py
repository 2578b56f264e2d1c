"""The old import path of `ttpu_core.spec.axes`, kept for plugins that were written for it."""

from ttpu_core.spec.axes import *  # noqa: F403
