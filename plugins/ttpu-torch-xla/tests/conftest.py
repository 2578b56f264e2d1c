"""Set before torch_xla is imported: the CPU as its device, and a compiler that optimises little, since tests compile
many programs and run each for milliseconds. And the device is started before any test of this process runs a backward
pass on the host, because torch counts the devices at the first one."""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
for flag in ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"):
    if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

from ttpu_torch_xla.adapter import current  # noqa: E402

current().device()
