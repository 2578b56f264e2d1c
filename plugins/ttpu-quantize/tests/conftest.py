"""Eight virtual devices, so that calibration is tested on a mesh; set before JAX is imported."""

import os

from devices import DEVICE_COUNT, xla_flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if DEVICE_COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = xla_flags(8)
