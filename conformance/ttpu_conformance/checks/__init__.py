"""The checks, by subject, in the order in which they run; importing this registers them."""

# isort: off
from ttpu_conformance.checks import contract
from ttpu_conformance.checks import raw_json
from ttpu_conformance.checks import numerics
from ttpu_conformance.checks import knobs
from ttpu_conformance.checks import casting
from ttpu_conformance.checks import caching
from ttpu_conformance.checks import generation
from ttpu_conformance.checks import serving
from ttpu_conformance.checks import checkpoints
from ttpu_conformance.checks import training
from ttpu_conformance.checks import parallel
from ttpu_conformance.checks import compilation
from ttpu_conformance.checks import kernels

__all__ = [
    "caching",
    "casting",
    "checkpoints",
    "compilation",
    "contract",
    "generation",
    "kernels",
    "knobs",
    "numerics",
    "parallel",
    "raw_json",
    "serving",
    "training",
]
