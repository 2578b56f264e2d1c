"""How attention heads are shared out among devices that do not divide them. In: the attention layers that have keys and
values in common, and a number of devices; out: a `HeadSplit`, which pads the layers and their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ttpu_core.mapping.padding import Padding, Run, merged_runs
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, NormSpec, Parameter
from ttpu_core.spec.parameters import fused_slots


@dataclass(frozen=True)
class HeadSplit:
    """`kv` KV heads: each of the original ones `replicas` times, in order, then heads of zeros. The queries of an
    original head are shared out among its replicas, in order; where they do not suffice stand queries of zeros, whose
    columns of the output projection are zeros too."""

    replicas: int
    kv: int

    def apply(self, spec: AttentionSpec) -> AttentionSpec:
        """The padded attention."""
        features = None
        if _over_all_heads(spec):
            # Zeros add nothing to a sum of squares, and replicas of keys add all of them as often.
            features = spec.num_heads * spec.head_dim, self.replicas * spec.num_kv_heads * spec.head_dim
        heads = self.kv * self.group(spec)
        return replace(spec, num_heads=heads, num_kv_heads=self.kv, norm_features=features)

    def padding(self, path: str, spec: AttentionSpec, before: Parameter, after: Parameter) -> Padding:
        """Of one of the layer's parameters by its path within it, `attention.…`; `spec` is the original."""
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
        """Query heads of each KV head."""
        return -(-spec.q_per_kv // self.replicas)

    def slots(self, spec: AttentionSpec) -> int:
        """Queries, keys and values of all heads, in heads."""
        beside = 0 if spec.kv_from_layer is not None else 1 if spec.value_is_key else 2
        return self.kv * (self.group(spec) + beside)

    def _keys(self, spec: AttentionSpec) -> Iterator[Run]:
        for number in range(self.kv):
            head = number // self.replicas
            yield (head, 1) if head < spec.num_kv_heads else (-1, 1)

    def _queries(self, spec: AttentionSpec, beside: int = 0) -> Iterator[Run]:
        """The queries of each KV head and, where they are fused, the `beside` keys and values after them."""
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
    """Layer → how its heads are padded for so many devices, of the layers whose heads need it and can be. A layer that
    reads another's keys and values is padded with it."""
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
    """The split with the fewest head slots; of equal ones that with the fewest KV heads, for the sake of the cache."""
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
    """Whether padded heads would change the result: they would count in statistics, or shift ALiBi's slopes."""
    of_all_heads = [spec.output_norm]
    if spec.qk_norm_scope == "full":
        of_all_heads += [norm for norm in (spec.q_norm, spec.k_norm) if norm is not None and norm.kind == "layer"]
    return spec.alibi is not None or any(map(_counts, of_all_heads))


def _over_all_heads(spec: AttentionSpec) -> bool:
    return spec.qk_norm_scope == "full" and (_counts(spec.q_norm) or _counts(spec.k_norm))


def _counts(norm: NormSpec | None) -> bool:
    return norm is not None and norm.kind != "none"
