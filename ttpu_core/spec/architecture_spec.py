"""A whole decoder as data. `ttpu_core.architecture` joins the parts from family hooks into an `ArchitectureSpec`,
which is frozen, hashable (a static jit argument) and printable. Backends read nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from ttpu_core.spec import axes
from ttpu_core.spec.arithmetic import kept_elements
from ttpu_core.spec.attention import AttentionSpec
from ttpu_core.spec.feed_forward import MoESpec
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_core.spec.norm import NormSpec
from ttpu_core.spec.parameters import LAYERS, SHARED, model_parameters
from ttpu_core.spec.parts import EmbeddingSpec, HeadSpec, KernelChoice, LayerSpec, Parameter, TorchPatch


@dataclass(frozen=True)
class LayerGroup:
    """`repeats` copies of a run of layers. The first copy starts at layer `start`."""

    start: int
    unit: tuple[LayerSpec, ...]
    repeats: int


@dataclass(frozen=True)
class ArchitectureSpec:
    """A whole decoder.

    `parameter_axes` overrides logical axes by parameter path pattern (from `ttpu_sharding_rules`). `kernels` and
    `torch_patches` come from the family and from patch packs. `kernel_formats` holds the format of each quantized
    kernel by parameter path; `ttpu_core.quantization` sets it."""

    model_type: str
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    head: HeadSpec
    max_position_embeddings: int
    parameter_axes: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    kernels: tuple[KernelChoice, ...] = ()
    torch_patches: tuple[TorchPatch, ...] = ()
    kernel_formats: tuple[tuple[str, KernelFormat], ...] = ()

    def __hash__(self) -> int:
        """A hash of the fields, computed once: jit asks for it at every call, and hashing 126 layers takes 160 µs."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(_fields(self))

    def __getstate__(self) -> dict[str, Any]:
        """The fields without cached values: caches can be recomputed, and string hashes differ between processes."""
        return {name: value for name, value in vars(self).items() if name in self.__dataclass_fields__}

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.embedding.vocab_size

    @property
    def context(self) -> int:
        """Maximum sequence length in tokens: the config's number, or the length to which rope scaling extends it."""
        context = self.max_position_embeddings
        for rope in {layer.mixer.rope for layer in self.layers}:
            if rope is not None and rope.type in ("linear", "dynamic"):
                context = max(context, int(self.max_position_embeddings * (rope.factor or 1.0)))
            elif rope is not None and rope.type == "yarn":
                context = max(context, int((rope.original_max_position_embeddings or 0) * (rope.factor or 1.0)))
        return context

    @property
    def longest(self) -> int | None:
        """The longest sequence in tokens that the model can be run with: `context`. None where nothing in it depends on
        a token's position and its layers keep states of one size, so that no position is the last."""
        if self.embedding.positions is not None or any(map(_keeps_tokens, self.layers)):
            return self.context
        return None

    @property
    def hidden_size(self) -> int:
        """Features of the residual stream."""
        return self.embedding.hidden_size

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """Every parameter by its Flax path, in model order. It cannot be changed: copy it with `dict`."""
        return MappingProxyType(model_parameters(self))

    @cached_property
    def num_parameters(self) -> int:
        """Number of elements of all parameters. A tied head counts once."""
        return sum(parameter.size for parameter in self.parameters.values())

    @cached_property
    def num_active_parameters(self) -> int:
        """Number of parameter elements that one token uses. Only the experts that a token is routed to count. Where
        some return their input, it is the mean of tokens that choose each expert as often."""
        return sum(self._active(path) for path in self.parameters)

    @cached_property
    def num_multiplied_parameters(self) -> int:
        """As `num_active_parameters`, with those of a shared block counted for each layer that uses it: half the FLOPs
        of one token's products."""
        return sum(self._active(path) * max(1, len(self.layers_of(path))) for path in self.parameters)

    def layers_of(self, path: str) -> tuple[LayerSpec, ...]:
        """The layers that use a parameter: one, or those that share it; none of embedding, final norm and head."""
        kind, number, *_ = path.split(".")
        if f"{kind}." == LAYERS:
            return (self.layers[int(number)],)
        users = ((layer.block.shared, layer) for layer in self.layers) if f"{kind}." == SHARED else ()
        return tuple(layer for shared, layer in users if shared is not None and shared.block == int(number))

    def _active(self, path: str) -> int:
        """The elements of a parameter that one token uses."""
        size = self.parameters[path].size
        if ".moe.experts." not in path:
            return size
        moe = self.layers_of(path)[0].mlp
        assert isinstance(moe, MoESpec)
        return size - size * (moe.choices - moe.experts_per_token) // moe.choices

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes that one more token adds to the KV cache of one sequence. Layers with windows count like other
        layers."""
        return sum(kept_elements(layer.mixer) for layer in self.layers) * bytes_per_element

    @cached_property
    def kv_sources(self) -> frozenset[int]:
        """Indices of the layers whose keys and values later layers read too."""
        mixers = (layer.mixer for layer in self.layers)
        sources = (mixer.kv_from_layer for mixer in mixers if isinstance(mixer, AttentionSpec))
        return frozenset(source for source in sources if source is not None)

    def groups(self) -> tuple[LayerGroup, ...]:
        """Runs of repeated layers: the shortest unit that repeats, then the remaining layers.

        Equal layers share one traced body, and a stacked parameter holds one group's copies of one layer. A layer
        whose keys and values another layer reads forms its own group. Layers with different kernel formats differ."""
        formats: dict[int, list[tuple[str, KernelFormat]]] = {}
        for path, form in self.kernel_formats:
            if path.startswith(LAYERS):
                _, index, rest = path.split(".", 2)
                formats.setdefault(int(index), []).append((rest, form))
        kinds = [
            (layer, index if index in self.kv_sources else None, frozenset(formats.get(index, ())))
            for index, layer in enumerate(self.layers)
        ]
        return tuple(_groups(self.layers, kinds))


_fields = attrgetter(*ArchitectureSpec.__dataclass_fields__)


def _keeps_tokens(layer: LayerSpec) -> bool:
    """Whether a layer keeps something of each token."""
    states = (state for mixer in layer.mixers for state in mixer.state)
    return isinstance(layer.mixer, AttentionSpec) or any(axes.SEQUENCE in state.axes for state in states)


def _groups(layers: tuple[LayerSpec, ...], different: list[Any]) -> Iterator[LayerGroup]:
    """Groups of `layers`; layers with equal entries of `different` are equal."""
    numbers: dict[Any, int] = {}  # numbers compare faster than layers
    kinds = [numbers.setdefault(kind, len(numbers)) for kind in different]
    start = 0
    while start < len(kinds):
        rest = kinds[start:]
        unit, copies = 1, 1
        for period in range(1, len(rest) // 2 + 1):
            repeats = 1
            while rest[repeats * period : (repeats + 1) * period] == rest[:period]:
                repeats += 1
            if repeats > 1 and repeats * period > unit * copies:
                unit, copies = period, repeats
        yield LayerGroup(start, layers[start : start + unit], copies)
        start += unit * copies
