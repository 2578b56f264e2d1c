"""Parameters without a checkpoint: abstract ones for ahead-of-time compilation, random ones for training from
scratch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.sharding.padding import Paddings
from ttpu_core.spec import Parameter
from ttpu_jax.ops.kernels import kernel_from_parts
from ttpu_jax.params.placement import Placement
from ttpu_jax.params.quantized import held_parts, round_dense, shardings_of


def abstract_parameters(
    parameters: Mapping[str, Parameter], placement: Placement, dtype: np.dtype[Any]
) -> dict[str, Any]:
    """Shapes, dtypes and shardings of the parameters, without memory."""

    def abstract(path: str, parameter: Parameter) -> Any:
        if parameter.format is not None:
            held = held_parts(parameter, placement).items()
            parts = {name: abstract(f"{path}.{name}", part) for name, part in held}
            return kernel_from_parts(parameter.format, parts)
        kind = jnp.dtype(parameter.dtype) if parameter.dtype else dtype
        return jax.ShapeDtypeStruct(parameter.shape, kind, sharding=placement.parameter(path, parameter))

    return {path: abstract(path, parameter) for path, parameter in parameters.items()}


def random_parameters(
    parameters: Mapping[str, Parameter],
    placement: Placement,
    dtype: np.dtype[Any],
    seed: int = 0,
    standard_deviation: float = 0.02,
    paddings: Paddings | None = None,
) -> dict[str, Any]:
    """Fresh parameters, each created on its devices: normal, ones or zeros as the table says. Quantized kernels are
    rounded from normal ones.

    A parameter's values depend on the seed and its place in the table, not on the mesh.

    Args:
        parameters: the parameter table.
        placement: the devices.
        dtype: dtype of the parameters, except for those that have their own.
        seed: seed of the random numbers.
        standard_deviation: standard deviation of normal parameters.
        paddings: path → padding: these parameters are drawn in their original shapes, on the host, and then padded.
    """
    key = jax.random.key(seed)
    programs: dict[Parameter, Any] = {}  # equal parameters, such as those of equal layers, share one that is compiled
    result = {}
    for index, (path, parameter) in enumerate(parameters.items()):
        padding = (paddings or {}).get(path)
        drawn = parameter if padding is None else replace(parameter, shape=padding.original)
        if drawn not in programs:
            kind = np.dtype(parameter.dtype) if parameter.dtype else dtype

            def make(key: jax.Array, drawn: Parameter = drawn, kind: np.dtype[Any] = kind) -> Any:
                if drawn.init != "normal":
                    return jnp.full(drawn.shape, 1 if drawn.init == "ones" else 0, kind)
                normal = (jax.random.normal(key, drawn.shape, jnp.float32) * standard_deviation).astype(kind)
                return normal if drawn.format is None else round_dense(normal, drawn, placement)

            where = shardings_of(placement, path, parameter) if padding is None else None
            programs[drawn] = jax.jit(make, out_shardings=where)
        result[path] = programs[drawn](jax.random.fold_in(key, index))
        if padding is not None:
            whole = padding.pad(np.asarray(result[path]))
            sharding = placement.parameter(path, parameter)
            result[path] = jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
    return result
