"""The JAX backend of TTPU: loads, runs and compiles what a family plugin describes."""

from ttpu_jax.platform import prepare

prepare()
