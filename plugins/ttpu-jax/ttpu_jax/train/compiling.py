"""Compiles an update with the options of its devices."""

from __future__ import annotations

import warnings
from typing import Any

import jax

from ttpu_core.sharding.hardware import chip_of_device_kind
from ttpu_jax.compiler_flags import refused_option, training_options


def compiled_update(lowered: Any, device: jax.Device) -> Any:
    """The program of a lowered update. An option that the compiler does not know is left out, with a warning: another
    release of libtpu may not have it.

    Args:
        lowered: a `jax.stages.Lowered`.
        device: one of those that the update runs on.
    """
    options = training_options(device.platform, chip_of_device_kind(device.device_kind))
    while True:
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            refused = refused_option(str(error))
            if not options or refused not in options:
                raise
            warnings.warn(f"this libtpu does not know the option {refused}: updates may take longer", stacklevel=2)
            options = {name: value for name, value in options.items() if name != refused}
