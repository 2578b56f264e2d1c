"""The JAX backend of TTPU: loads, runs and compiles what a family plugin describes."""

from ttpu_jax import compiler_flags as compiler_flags  # reads them before other libraries add to them
from ttpu_jax.platform import prepare

prepare()
