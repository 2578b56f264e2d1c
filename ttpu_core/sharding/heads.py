"""Padding of attention heads for a number of devices that does not divide them. `head_splits` decides for each
attention layer whether KV heads are repeated and heads of zeros are added; a `HeadSplit` then pads the layer and
its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ttpu_core.mapping.padding import Padding, Run, merged_runs
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, NormSpec, Parameter
from ttpu_core.spec.parameters import fused_slots


@dataclass(frozen=True)
class HeadSplit:
    """How heads are padded. There are `kv` KV heads in all: each original KV head `replicas` times, in order, then
    KV heads of zeros.

    The replicas share the query heads of the original head, in order. Query heads of zeros fill up the groups; their
    columns of the output projection are zeros too."""

    replicas: int
    kv: int

    def apply(self, spec: AttentionSpec) -> AttentionSpec:
        """The padded attention layer."""
        features = None
        if _over_all_heads(spec):
            # Zeros add nothing to a sum of squares, and key replicas multiply it by the number of replicas.
            features = spec.num_heads * spec.head_dim, self.replicas * spec.num_kv_heads * spec.head_dim
        heads = self.kv * self.group(spec)
        return replace(spec, num_heads=heads, num_kv_heads=self.kv, norm_features=features)

    def padding(self, path: str, spec: AttentionSpec, before: Parameter, after: Parameter) -> Padding:
        """The padding of one of the layer's parameters.

        Args:
            path: the parameter's path within the layer, `attention.…`.
            spec: the original attention layer.
            before: the parameter before padding.
            after: the parameter after padding.
        """
        role, shape = path.split(".")[1], before.shape
        view: tuple[int, ...]
        if role == "output":
            view = shape[0], spec.num_heads, spec.value_dim
            return Padding(shape, after.shape, view, 1, merged_runs(self._queries(spec)))
        if role in ("value", "k_norm"):
            return Padding(shape, after.shape, shape, 0, merged_runs(self._keys(spec)))
        beside = sum(fused_slots(spec)[1:]) if role == "qkv" else 0
        view = (spec.num_kv_heads * (spec.q_per_kv + beside), *shape[2:])
        return Padding(shape, after.shape, view, 0, merged_runs(self._queries(spec, beside)))

    def group(self, spec: AttentionSpec) -> int:
        """Query heads per KV head."""
        return -(-spec.q_per_kv // self.replicas)

    def slots(self, spec: AttentionSpec) -> int:
        """Number of head-sized slots for the queries, keys and values of all heads."""
        beside = 0 if spec.kv_from_layer is not None else 1 if spec.value_is_key else 2
        return self.kv * (self.group(spec) + beside)

    def _keys(self, spec: AttentionSpec) -> Iterator[Run]:
        for number in range(self.kv):
            head = number // self.replicas
            yield (head, 1) if head < spec.num_kv_heads else (-1, 1)

    def _queries(self, spec: AttentionSpec, beside: int = 0) -> Iterator[Run]:
        """The query heads of each KV head, followed by `beside` key and value heads if these are fused."""
        group, width = self.group(spec), spec.q_per_kv + beside
        for number, (head, _) in enumerate(self._keys(spec)):
            if head < 0:
                yield -1, group + beside
                continue
            begin = number % self.replicas * group
            count = max(0, min(group, spec.q_per_kv - begin))
            yield head * width + begin, count
            yield -1, group - count
            yield head * width + spec.q_per_kv, beside


def head_splits(spec: ArchitectureSpec, devices: int) -> dict[int, HeadSplit]:
    """Padding by layer index for `devices` devices. Only layers that need padding and allow it are included. A layer
    that reads another layer's keys and values is padded together with it."""
    together: dict[int, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, AttentionSpec):
            source = layer.mixer.kv_from_layer
            together.setdefault(index if source is None else source, []).append(index)
    chosen: dict[tuple[AttentionSpec, ...], HeadSplit | None] = {}
    result: dict[int, HeadSplit] = {}
    for layers in together.values():
        mixers = tuple(dict.fromkeys(spec.layers[index].mixer for index in layers))
        if mixers not in chosen:
            chosen[mixers] = _split(mixers, devices)  # type: ignore[index, arg-type]
        split = chosen[mixers]  # type: ignore[index]
        if split is not None:
            result |= dict.fromkeys(layers, split)
    return result


def _split(mixers: Sequence[AttentionSpec], devices: int) -> HeadSplit | None:
    """The split with the fewest head slots. Among equals, the one with the fewest KV heads, which keeps the cache
    small."""
    heads = {mixer.num_kv_heads for mixer in mixers}
    if all(count % devices == 0 for count in heads) or len(heads) > 1 or any(map(_keeps_heads, mixers)):
        return None
    kv = heads.pop()
    splits = [
        HeadSplit(replicas, -(-kv * replicas // devices) * devices)
        for replicas in range(1, max(mixer.q_per_kv for mixer in mixers) + 1)
    ]
    return min(splits, key=lambda split: (sum(map(split.slots, mixers)), split.kv))


def _keeps_heads(spec: AttentionSpec) -> bool:
    """Whether padded heads would change the result: through a norm's statistics or ALiBi's slopes."""
    of_all_heads = [spec.output_norm]
    if spec.qk_norm_scope == "full":
        of_all_heads += [norm for norm in (spec.q_norm, spec.k_norm) if norm is not None and norm.kind == "layer"]
    return spec.alibi is not None or any(map(_counts, of_all_heads))


def _over_all_heads(spec: AttentionSpec) -> bool:
    return spec.qk_norm_scope == "full" and (_counts(spec.q_norm) or _counts(spec.k_norm))


def _counts(norm: NormSpec | None) -> bool:
    return norm is not None and norm.kind != "none"
