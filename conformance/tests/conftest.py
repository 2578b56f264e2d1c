"""Eight virtual devices, one thread for torch; set before JAX is imported."""

from ttpu_conformance.environment import prepare

prepare()
