"""The old import path of `ttpu_core.mapping.layout`, kept for plugins that were written for it."""

from ttpu_core.mapping.layout import *  # noqa: F403
