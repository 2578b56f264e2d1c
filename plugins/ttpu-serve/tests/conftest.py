"""Eight virtual devices, so that sharded runs are tested on one CPU, and no programs kept in the user's home; set
before JAX is imported."""

import os
from typing import Any

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TTPU_COMPILE_CACHE", "off")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer whose tokens are bytes."""
    from fake_core import tokenizer

    return tokenizer(tmp_path_factory.mktemp("tokenizer"))
