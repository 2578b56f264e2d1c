"""Eight virtual devices, one thread for torch; set before JAX is imported."""

from ttpu_conformance.case import Options
from ttpu_conformance.session import prepare

prepare(Options())
