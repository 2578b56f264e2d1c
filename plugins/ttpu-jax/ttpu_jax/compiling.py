"""Lowers programs for one partitioner, and compiles them with our options, as far as the compiler knows them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from ttpu_jax.compiler_flags import DISABLED_PASSES, CompilerOption, fetch_options, refused_option
from ttpu_jax.ops.fetched import FETCH_BEGIN

logger = logging.getLogger(__name__)


@contextmanager
def _partitioned_by_shardy() -> Iterator[None]:
    """Use the Shardy partitioner, in this thread and for this time. torch_xla turns it off for the whole process when
    it calls JAX, and the older partitioner holds gradients that begin unset whole on every device."""
    from jax._src import config  # the switch has no public form that is not global

    with config.use_shardy_partitioner(True):
        yield


def lower(jitted: Any, *arguments: Any) -> jax.stages.Lowered:
    """Trace a function under `jax.jit` for arguments, abstract ones or arrays, and lower it for Shardy."""
    with _partitioned_by_shardy():
        found: jax.stages.Lowered = jitted.lower(*arguments)
    return found


def compiled_with(program: jax.stages.Lowered, options: Mapping[str, CompilerOption]) -> jax.stages.Compiled:
    """The program of a lowered function. An option that the compiler does not know, as another release of libtpu may
    not, is left out with a warning. A program that cannot be compiled without a pass is compiled with it. Options
    that kernels of the program need are added.

    Args:
        program: what is compiled.
        options: XLA options by name.
    """
    of_kernels = fetch_options() if FETCH_BEGIN in program.as_text() else {}
    known: Any = {**options, **of_kernels}  # Any: JAX's annotation omits numbers
    while True:
        try:
            with _partitioned_by_shardy():
                return program.compile(compiler_options=known)
        except jax.errors.JaxRuntimeError as error:
            refused = refused_option(str(error))
            if refused not in known:
                passes = known.pop(DISABLED_PASSES, None)
                if passes is None:
                    raise
                logger.info("compiled with %s, without which the compiler failed: the program may be slower", passes)
                continue
            warnings.warn(
                f"the installed compiler does not know the option {refused}, so that the program may compile or run "
                "slower: install the libtpu that this release of ttpu-jax names",
                stacklevel=2,
            )
            known = {name: value for name, value in known.items() if name != refused}
