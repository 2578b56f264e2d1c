"""The CPU is torch_xla's device, which is set before it is imported. It is started before any test of this process runs
a backward pass on the host, because torch counts the devices at the first one."""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from ttpu_torch_xla.runtime import current

current().device()
