"""The old import path of `ttpu_core.spec.rope`, kept for plugins that were written for it."""

from ttpu_core.spec.rope import *  # noqa: F403
