"""The old import path of `ttpu_core.spec.latent_attention`, kept for plugins that were written for it."""

from ttpu_core.spec.latent_attention import *  # noqa: F403
