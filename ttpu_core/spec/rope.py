"""Rotary position embedding. `rope_from_config` reads a config's rope parameters, in the old or the new JSON form,
into a `RopeSpec`; `inverse_frequencies` computes its frequencies. The formulas are those of
`transformers.modeling_rope_utils`, computed in float32 in the same order, so that every backend rotates by the
same angles."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from ttpu_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    import numpy as np

    from ttpu_core.config import ModelConfig

RopeType = Literal["none", "default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
ROPE_TYPES: tuple[str, ...] = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")

_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}

_SMALLEST, _LARGEST = 1e-37, 1e37
"""Bases and factors between these stay finite in float32, and so do their inverses."""


@dataclass(frozen=True)
class RopeSpec:
    """How queries and keys of one layer are rotated.

    Args:
        rotary_dim: number of leading features of a head that are rotated (`head_dim` unless the factor is partial).
        layout: "half" pairs feature i with i + rotary_dim/2; "interleaved" pairs 2i with 2i + 1.
        max_position_embeddings: context length in tokens.
        original_max_position_embeddings: context length in tokens before rope scaling.
        long_attention_factor: attention factor for sequences beyond the original context, if longrope has two
            (phimoe).
        proportion: share of pairs that "proportional" rope rotates; the angle of the other pairs is zero.
        sign: -1 for models that rotate in the other direction.
        fp32: keep cos and sin in float32 when queries and keys have a lower precision.
    """

    type: RopeType = "default"
    theta: float = 10_000.0
    rotary_dim: int = 0
    layout: Literal["half", "interleaved"] = "half"
    factor: float | None = None
    max_position_embeddings: int = 0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    long_attention_factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    proportion: float = 1.0
    sign: float = 1.0
    fp32: bool = False

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the length of the sequence (dynamic and longrope)."""
        return self.type in ("dynamic", "longrope")


NO_ROPE = RopeSpec(type="none")
"""The answer of `ttpu_rope` for a layer without positions (NoPE)."""


def rope_from_config(
    config: ModelConfig,
    *,
    head_dim: int,
    layer_type: str | None = None,
    theta: float = 10_000.0,
    theta_key: str = "rope_theta",
    partial: bool = False,
    **overrides: Any,
) -> RopeSpec:
    """Read a config's rope parameters in either JSON form.

    The new form is `rope_parameters` (flat, or keyed by layer type). The old form is `rope_theta`, `rope_scaling`
    with `type` or `rope_type`, and `partial_rotary_factor`. `overrides` set fields of the result that a family knows
    and the config does not state (`layout`, `fp32`, ...).

    Args:
        config: the model's config.
        head_dim: features per head.
        layer_type: key into `rope_parameters` if they are keyed by layer type.
        theta: the family's default base.
        theta_key: key of the base in the old form, for layers that have their own base.
        partial: whether the model rotates only the share `partial_rotary_factor` of a head's features. Most model
            classes never read this key.

    Raises:
        ConfigError: an unknown rope type, a missing parameter that the type needs, or a value out of range.
        PluginError: an override that is no field of the result.
    """
    _refuse_unknown(overrides)
    section = _section(config, layer_type)
    if section is None:
        return NO_ROPE
    older = section.text("type", default="default")  # some files write both keys
    rope_type = section.text("rope_type", default=older)
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"{config.source} asks for rope type {rope_type!r}, but the known types are {', '.join(ROPE_TYPES)}: "
            "correct `rope_parameters`, or install a plugin that describes this rope."
        )
    for key in _REQUIRED.get(rope_type, ()):
        section.require(key)
    share = 1.0
    if partial or rope_type == "proportional":
        share = section.number("partial_rotary_factor", default=config.number("partial_rotary_factor", default=1.0))
    if not 0 < share <= 1:
        raise ConfigError(
            f"{config.source} sets 'partial_rotary_factor' to {share:g}, but it must be above 0 and at most 1, a share "
            "of a head's features: correct it."
        )
    # "proportional" turns only a share of the pairs, yet spans the whole head (transformers, gemma 4).
    rotary_dim = head_dim if rope_type == "proportional" else int(head_dim * share)
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ConfigError(
            f"{config.source} rotates {rotary_dim} of {head_dim} features per head, but rotary embeddings need a "
            "positive even number: correct `head_dim` or `partial_rotary_factor`."
        )
    max_positions = config.positive_int("max_position_embeddings", default=2048)
    # transformers lets a top-level `original_max_position_embeddings` win (phi3 writes it there)
    in_section = section.positive_int("original_max_position_embeddings", default=None)
    original = config.positive_int("original_max_position_embeddings", default=None) or in_section
    factor = section.number("factor", default=None)
    if rope_type == "yarn" and original is None:
        section.require("factor", float)
    if rope_type in ("llama3", "yarn", "longrope"):
        original = original or max_positions
        factor = max_positions / original if factor is None else factor
    spec = RopeSpec(
        type=rope_type,  # type: ignore[arg-type]
        theta=section.number("rope_theta", default=config.number(theta_key, default=theta)),
        rotary_dim=rotary_dim,
        factor=factor,
        max_position_embeddings=max_positions,
        original_max_position_embeddings=original,
        attention_factor=section.number("attention_factor", default=None),
        low_freq_factor=section.number("low_freq_factor", default=None),
        high_freq_factor=section.number("high_freq_factor", default=None),
        beta_fast=section.number("beta_fast", default=32.0),
        beta_slow=section.number("beta_slow", default=1.0),
        mscale=section.number("mscale", default=None),
        mscale_all_dim=section.number("mscale_all_dim", default=None),
        truncate=section.flag("truncate", default=True),
        short_factor=_factors(section, "short_factor", rotary_dim // 2) if rope_type == "longrope" else (),
        long_factor=_factors(section, "long_factor", rotary_dim // 2) if rope_type == "longrope" else (),
        proportion=share if rope_type == "proportional" else 1.0,
    )
    _check(config, spec)
    return replace(spec, **overrides)


def inverse_frequencies(rope: RopeSpec, length: int | None = None) -> tuple[np.ndarray, float]:
    """Inverse frequencies [rotary_dim / 2] in float32, and the factor that scales cos and sin.

    `length` (tokens) matters only if `rope.depends_on_length`; None means a sequence within the original context.

    Sources: RoFormer (arXiv 2104.09864); NTK-aware scaling; YaRN (arXiv 2309.00071); LongRoPE (arXiv 2402.13753);
    Llama 3.1's smoothed interpolation; all as in `transformers.modeling_rope_utils`.

    Raises:
        ConfigError: the rope type has no frequencies ("none").
    """
    import numpy as np

    dim = rope.rotary_dim
    base = rope.theta
    if rope.type == "dynamic":
        base = dynamic_base(rope, max(length or 0, rope.max_position_embeddings))
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = np.power(np.float32(base), exponent, dtype=np.float32)
    plain = np.float32(1.0) / powers
    if rope.type in ("default", "dynamic"):
        return plain, 1.0
    if rope.type == "linear":
        return plain / np.float32(rope.factor), 1.0
    if rope.type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.type == "yarn":
        return _yarn(rope, powers), _yarn_attention_factor(rope)
    if rope.type == "longrope":
        original = rope.original_max_position_embeddings or rope.max_position_embeddings
        beyond = length is not None and length > original
        extension = np.asarray(rope.long_factor if beyond else rope.short_factor, np.float32)
        return np.float32(1.0) / (extension * powers), _longrope_attention_factor(rope, beyond=beyond)
    if rope.type == "proportional":
        rotated = int(rope.proportion * dim // 2)
        kept = np.where(np.arange(dim // 2) < rotated, plain, np.float32(0.0))
        return (kept / np.float32(rope.factor or 1.0)).astype(np.float32), 1.0
    raise ConfigError(f"rope type {rope.type!r} has no frequencies: the known types are {', '.join(ROPE_TYPES)}.")


def dynamic_base(rope: RopeSpec, length: Any) -> Any:
    """The base of dynamic NTK scaling for a sequence of `length` tokens (a number, or a traced array)."""
    factor, limit, dim = rope.factor or 1.0, rope.max_position_embeddings, rope.rotary_dim
    return rope.theta * ((factor * length / limit) - (factor - 1)) ** (dim / (dim - 2))


def _section(config: ModelConfig, layer_type: str | None) -> ModelConfig | None:
    """The flat rope parameters of one layer type, or None if the config states that the layer has no rope."""
    # where a config has both forms, transformers takes the old one
    parameters = config.section("rope_scaling") or config.section("rope_parameters")
    if parameters is None:
        return type(config).from_dict({}, config.source)
    nested = [key for key in parameters if key.endswith("_attention")]
    if not nested:
        return parameters
    if layer_type not in nested:
        raise ConfigError(
            f"{config.source} gives rope parameters for {', '.join(nested)}, but a layer is of type {layer_type!r}: "
            "add an entry of that name to `rope_parameters`."
        )
    return parameters.section(layer_type)


def _factors(section: ModelConfig, key: str, length: int) -> tuple[float, ...]:
    values = section.items(key)
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if not (len(values) == len(numbers) == length and all(0 < number < math.inf for number in numbers)):
        raise ConfigError(
            f"{section.source} gives {len(values)} values as the rope parameter {key!r}, but longrope needs {length} "
            "positive numbers, one per rotated pair: correct it."
        )
    return tuple(numbers)


def _refuse_unknown(overrides: dict[str, Any]) -> None:
    allowed = [field.name for field in fields(RopeSpec)]
    unknown = [name for name in overrides if name not in allowed]
    if unknown:
        raise PluginError(
            f"rope_from_config was asked to set {', '.join(map(repr, unknown))}, but the fields of RopeSpec are "
            f"{', '.join(allowed)}: name one of those, or pass partial=True for a model that turns a part of each head."
        )


def _check(config: ModelConfig, spec: RopeSpec) -> None:
    """Refuse values that make a formula undefined: a base or factor of zero or less, a division by zero, a range whose
    ends are swapped."""
    positive = {"rope_theta": spec.theta, "factor": spec.factor, "attention_factor": spec.attention_factor}
    if spec.type == "llama3":
        positive |= {"low_freq_factor": spec.low_freq_factor, "high_freq_factor": spec.high_freq_factor}
    if spec.type == "yarn":
        positive |= {"beta_fast": spec.beta_fast, "beta_slow": spec.beta_slow}
    for key, value in positive.items():
        if value is not None and not _SMALLEST <= value <= _LARGEST:
            raise ConfigError(
                f"{config.source} sets the rope parameter {key!r} to {value:g}, but a number above 0"
                f"{' that float32 can hold' if value > 0 else ''} is needed: correct it."
            )
    if spec.type == "yarn" and spec.theta <= 1:
        raise ConfigError(
            f"{config.source} sets the rope parameter 'rope_theta' to {spec.theta:g}, but yarn divides by its "
            "logarithm, so that a number above 1 is needed: correct it."
        )
    if spec.type == "yarn":
        for key, value in (("mscale", spec.mscale), ("mscale_all_dim", spec.mscale_all_dim)):
            if value is not None and value < 0:
                raise ConfigError(
                    f"{config.source} sets the rope parameter {key!r} to {value:g}, but 0 or more is needed: correct "
                    "it."
                )
    ends = {"yarn": ("beta_slow", "beta_fast"), "llama3": ("low_freq_factor", "high_freq_factor")}
    if spec.type in ends:
        smaller, larger = ends[spec.type]
        low, high = getattr(spec, smaller), getattr(spec, larger)
        if low > high:
            raise ConfigError(
                f"{config.source} sets the rope parameter {smaller!r} to {low:g} and {larger!r} to {high:g}, but the "
                "first must not be more than the second: correct them."
            )
    if spec.type == "longrope" and spec.attention_factor is None and spec.original_max_position_embeddings == 1:
        raise ConfigError(
            f"{config.source} stretches a context of 1 token by longrope, whose attention factor divides by its "
            "logarithm: correct 'original_max_position_embeddings'."
        )
    if spec.type == "dynamic" and spec.rotary_dim <= 2:
        raise ConfigError(
            f"{config.source} rotates {spec.rotary_dim} features per head by dynamic rope, whose formula needs 4 or "
            "more: correct `head_dim` or `partial_rotary_factor`."
        )


def _llama3(rope: RopeSpec, plain: np.ndarray) -> np.ndarray:
    import numpy as np

    context = rope.original_max_position_embeddings or rope.max_position_embeddings
    factor, low, high = rope.factor or 1.0, rope.low_freq_factor or 1.0, rope.high_freq_factor or 4.0
    wavelength = np.float32(2 * math.pi) / plain
    scaled = np.where(wavelength > context / low, plain / np.float32(factor), plain)
    if low == high:  # a step without an interpolated range (llama 4)
        return scaled.astype(np.float32)
    smooth = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    smoothed = (1 - smooth) * scaled / np.float32(factor) + smooth * scaled
    medium = ~(wavelength < context / high) & ~(wavelength > context / low)
    return np.where(medium, smoothed, scaled).astype(np.float32)


def _yarn(rope: RopeSpec, powers: np.ndarray) -> np.ndarray:
    import numpy as np

    dim, context = rope.rotary_dim, rope.original_max_position_embeddings or rope.max_position_embeddings

    def correction(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    extrapolation = 1 - ramp
    interpolated = np.float32(1.0) / (np.float32(rope.factor) * powers)
    return (interpolated * (1 - extrapolation) + (np.float32(1.0) / powers) * extrapolation).astype(np.float32)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(scale: float, multiplier: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * multiplier * math.log(scale) + 1.0

    factor = rope.factor or 1.0
    if rope.mscale and rope.mscale_all_dim:
        return mscale(factor, rope.mscale) / mscale(factor, rope.mscale_all_dim)
    return mscale(factor)


def _longrope_attention_factor(rope: RopeSpec, *, beyond: bool) -> float:
    if beyond and rope.long_attention_factor is not None:
        return rope.long_attention_factor
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor, context = rope.factor or 1.0, rope.original_max_position_embeddings or rope.max_position_embeddings
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
