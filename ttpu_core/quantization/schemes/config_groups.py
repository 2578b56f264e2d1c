"""The config groups of compressed-tensors: which modules have weights in which format, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from ttpu_core.config import ModelConfig
from ttpu_core.errors import UnsupportedError
from ttpu_core.quantization.schemes.section import BLOCK, block, choice_of, group_size_of_config, patterns_of

FORMATS = ("int-quantized", "pack-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
TYPES = ("int", "float")
STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")


@dataclass(frozen=True)
class WeightArguments:
    """How weights are quantized.

    Args:
        bits: 4 or 8.
        floating: whether the numbers are floats.
        strategy: which weights share a scale; None if the config does not say.
        group_size: inputs that share a scale by the strategy "group"; None for all.
        block: outputs and inputs that share a scale by the strategy "block".
        symmetric: whether there are no zero points.
        ordered: whether groups were formed in the order of the inputs' activations.
    """

    bits: int
    floating: bool
    strategy: str | None
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    ordered: bool


@dataclass(frozen=True)
class InputArguments:
    """How the inputs of products are quantized.

    Args:
        bits: of a number; None if the config does not say.
        floating: whether the numbers are floats.
        strategy: which inputs share a scale; None if the config does not say.
        symmetric: whether there are no zero points.
        dynamic: whether the scales are computed at run time.
    """

    bits: int | None
    floating: bool
    strategy: str | None
    symmetric: bool
    dynamic: bool

    @property
    def coarse(self) -> bool:
        """Whether a scale is shared by more than a part of a token. Inputs with finer scales stay in the model's
        dtype, which is more exact."""
        return self.strategy not in ("group", "tensor_group", "block")


@dataclass(frozen=True)
class ConfigGroup:
    """Modules with one format.

    Args:
        format: of their weights, one of `FORMATS`.
        targets: names of modules, patterns after "re:", and classes.
        weights: how weights are quantized.
        inputs: how inputs are quantized; None if they are not.
    """

    format: str
    targets: tuple[str, ...]
    weights: WeightArguments
    inputs: InputArguments | None


def config_groups(source: str, section: ModelConfig) -> tuple[ConfigGroup, ...]:
    """The config groups that have weights.

    Args:
        source: the checkpoint's name, for error messages.
        section: the `quantization_config`.

    Raises:
        ConfigError: a key has a value of another kind.
        UnsupportedError: a format that is not read.
    """
    sparse = section.section("sparsity_config")
    sparsity = "dense" if sparse is None else sparse.text("format", default="dense")
    if sparsity != "dense":
        raise UnsupportedError(
            f"{source} holds sparse weights in the format {sparsity!r}, but dense ones are read: take a checkpoint "
            "without sparsity."
        )
    written = section.section("config_groups")
    if written is None:
        return ()
    found: list[ConfigGroup] = []
    for name in written:
        group = written.require(name, ModelConfig)
        form = group.text("format", default=None) or section.text("format", default=None) or "dense"
        weights = group.section("weights")
        if weights is None:
            continue
        if form not in FORMATS:
            raise UnsupportedError(
                f"{source} holds weights in the format {form!r} of compressed-tensors, but {', '.join(FORMATS)} are "
                "read: take such a checkpoint, or quantize the original weights with `ttpu quantize`."
            )
        inputs = group.section("input_activations")
        read = _inputs(inputs) if inputs else None
        found.append(ConfigGroup(form, patterns_of(group, "targets"), _weights(source, weights), read))
    return tuple(found)


def _weights(source: str, arguments: ModelConfig) -> WeightArguments:
    bits = arguments.positive_int("num_bits")
    if bits not in (4, 8):
        raise UnsupportedError(
            f"{source} holds weights of {bits} bits, but those of 4 and 8 bits are read: take such a checkpoint."
        )
    strategy = choice_of(arguments, "strategy", STRATEGIES, None)
    size = group_size_of_config(arguments, "group_size")
    blocks = arguments.converted("block_structure", BLOCK, _block, None)
    return WeightArguments(
        bits,
        floating=choice_of(arguments, "type", TYPES, "int") == "float",
        strategy=strategy,
        group_size=size if strategy == "group" else None,
        block=blocks if strategy == "block" else None,
        symmetric=arguments.flag("symmetric", default=True),
        ordered=arguments.get("actorder") in ("group", "dynamic", True),
    )


def _inputs(arguments: ModelConfig) -> InputArguments:
    return InputArguments(
        arguments.positive_int("num_bits", default=None),
        floating=choice_of(arguments, "type", TYPES, "int") == "float",
        strategy=choice_of(arguments, "strategy", STRATEGIES, None),
        symmetric=arguments.flag("symmetric", default=True),
        dynamic=arguments.converted("dynamic", "true, false or 'local'", _dynamic, True),
    )


def _block(value: object) -> tuple[int, int]:
    """A block as a list, or as old files write it: "128x128"."""
    return block(tuple(map(int, value.split("x"))) if isinstance(value, str) else value)


def _dynamic(value: object) -> bool:
    """Whether scales are computed at run time; "local" means that those of groups are."""
    if value not in (True, False, "local"):
        raise ValueError
    return bool(value)
