"""The old import path of `ttpu_core.config.text_part`, kept for plugins that were written for it."""

from ttpu_core.config.text_part import *  # noqa: F403
from ttpu_core.mapping.text_part import *  # noqa: F403
