"""Small changes to a description, each of which corrects one common mistake. Each hypothesis names the hook to correct,
and says how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ttpu_core.architecture import Architecture
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import Concat, Expression, FlaxMapping, Stack
from ttpu_core.spec import (
    ActivationSpec,
    ArchitectureSpec,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    Placement,
    QueryTemperature,
)
from ttpu_core.spec.rope import NO_ROPE

PLACEMENTS: tuple[Placement, ...] = ("pre", "post", "post_residual", "sandwich", "parallel", "parallel_two_norms")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
THETAS = (10_000.0, 500_000.0, 1_000_000.0)
NORMS = ("input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm")

Numbers = dict[str, float]
"""Every number of a config by its own key, sections included."""

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Hypothesis:
    """One change: to the spec, or to the mapping alone."""

    hook: str
    change: str
    spec: ArchitectureSpec | None = None
    mapping: FlaxMapping | None = None


def hypotheses(architecture: Architecture) -> Iterator[Hypothesis]:
    """Return every change worth trying, by hook, without changes that have no effect."""
    spec, numbers = architecture.spec, numbers_of(architecture)
    for maker in (_embedding, _norm, _attention, _rope, _mlp, _block, _head):
        for one in maker(spec, numbers):
            if one.spec != spec:
                yield one
    yield from _mapping(architecture)


def _embedding(spec: ArchitectureSpec, numbers: Numbers) -> Iterator[Hypothesis]:
    for scale in dict.fromkeys([None, spec.hidden_size**0.5, *_named(numbers, "multiplier", "scal")]):
        embedding = replace(spec.embedding, scale=scale)
        yield Hypothesis("ttpu_embedding", f"EmbeddingSpec(scale={_short(scale)})", replace(spec, embedding=embedding))


def _norm(spec: ArchitectureSpec, numbers: Numbers) -> Iterator[Hypothesis]:
    offset = 0.0 if spec.layers[0].norm.offset else 1.0
    text = f"NormSpec(offset={offset:g})"
    yield Hypothesis("ttpu_norm", text, _with_norms(spec, _setting(offset=offset)))
    both = _with_norms(_with_attention(spec, _head_norms(_setting(offset=offset))), _setting(offset=offset))
    yield Hypothesis("ttpu_norm", f"{text}, in the norms of queries and keys too,", both)
    for eps in dict.fromkeys([*_named(numbers, "eps"), 1e-6, 1e-5]):
        every = _with_norms(_with_attention(spec, _head_norms(_setting(eps=eps))), _setting(eps=eps))
        yield Hypothesis("ttpu_norm", f"NormSpec(eps={eps:g})", every)
    for flag in (True, False):
        yield Hypothesis("ttpu_norm", f"NormSpec(bias={flag})", _with_norms(spec, _setting(bias=flag)))
        layered = _with_norms(spec, _setting(bias=flag, kind="layer"))
        yield Hypothesis("ttpu_norm", f"NormSpec(kind='layer', bias={flag})", layered)
    for kind in ("rms", "layer"):
        yield Hypothesis("ttpu_norm", f"NormSpec(kind={kind!r})", _with_norms(spec, _setting(kind=kind)))
    if spec.final_norm is not None:
        final = replace(spec, final_norm=replace(spec.final_norm, offset=offset))
        yield Hypothesis("ttpu_final_norm", text, final)


def _attention(spec: ArchitectureSpec, numbers: Numbers) -> Iterator[Hypothesis]:
    def change(text: str, **fields: Any) -> Hypothesis:
        return Hypothesis("ttpu_attention", f"AttentionSpec({text})", _with_attention(spec, _setting(**fields)))

    for bias in (True, False):
        yield change(f"qkv_bias={bias}", qkv_bias=bias)
        yield change(f"output_bias={bias}", output_bias=bias)
        yield change(f"qkv_bias={bias}, output_bias={bias}", qkv_bias=bias, output_bias=bias)
    yield from _reach(spec, numbers)
    for cap in (None, *_named(numbers, "softcap")):
        yield change(f"logit_softcap={_short(cap)}", logit_softcap=cap)
    powers = (value**-0.5 for value in _named(numbers, "scal") if value > 0)
    for scale in (None, 1.0, *powers, *_named(numbers, "multiplier")):
        yield change(f"scale={_short(scale)}", scale=scale)
    norm = spec.layers[0].norm
    unscaled = replace(norm, scale=False, bias=False, offset=0.0)
    yield change("q_norm=norm, k_norm=norm", q_norm=norm, k_norm=norm)
    yield change("q_norm=None, k_norm=None", q_norm=None, k_norm=None)
    for offset in (0.0, 1.0):
        changed = _with_attention(spec, _head_norms(_setting(offset=offset)))
        yield Hypothesis("ttpu_attention", f"NormSpec(offset={offset:g}) as q_norm and k_norm", changed)
    for scope in ("head", "full"):
        yield change(f"qk_norm_scope={scope!r}", qk_norm_scope=scope)
    for after in (True, False):
        yield change(f"qk_norm_after_rope={after}", qk_norm_after_rope=after)
    yield change("q_norm=norm, k_norm=norm, v_norm=norm without scale", q_norm=norm, k_norm=norm, v_norm=unscaled)
    yield change("v_norm=norm without scale", v_norm=unscaled)
    yield change("query_temperature=None", query_temperature=None)
    for factor in _named(numbers, "beta", "attn_scale"):
        for period in dict.fromkeys(_named(numbers, "original_max", "floor_scale")):
            for shift in (0.0, 1.0) if period > 0 else ():
                temperature = QueryTemperature(factor, period, shift=shift)
                yield change(f"query_temperature={temperature!r}", query_temperature=temperature)


def _reach(spec: ArchitectureSpec, numbers: Numbers) -> Iterator[Hypothesis]:
    """Other windows and chunks: one more or less, none, or the config's, in all layers or in every other one."""
    attentions = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    for field in ("window", "chunk"):
        found = sorted({getattr(attention, field) for attention in attentions} - {None})
        for step in (1, -1):
            text = ", ".join(f"{field}={value + step} instead of {value}" for value in found)
            yield Hypothesis("ttpu_attention", f"AttentionSpec({text})", _with_attention(spec, _stepped(field, step)))
        for value in (None, *map(int, _named(numbers, field))):
            here, elsewhere = _setting(**{field: value}), _setting(**{field: None})
            for where, choose in (
                ("", lambda index: True),
                (" in even layers only", lambda index: index % 2 == 0),
                (" in odd layers only", lambda index: index % 2 == 1),
            ):
                changed = _with_attention(spec, here, elsewhere, choose)
                yield Hypothesis("ttpu_attention", f"AttentionSpec({field}={value}){where}", changed)


def _rope(spec: ArchitectureSpec, numbers: Numbers) -> Iterator[Hypothesis]:
    def change(text: str, function: Change) -> Hypothesis:
        def rotated(attention: AttentionSpec) -> AttentionSpec:
            rotates = attention.rope is not None and attention.rope.type != "none"
            return replace(attention, rope=function(attention.rope)) if rotates else attention

        return Hypothesis("ttpu_rope", text, _with_attention(spec, rotated))

    for layout in ("half", "interleaved"):
        yield change(f"RopeSpec(layout={layout!r})", _setting(layout=layout))
    for theta in dict.fromkeys([*_named(numbers, "theta"), *THETAS]):
        yield change(f"RopeSpec(theta={theta:g})", _setting(theta=theta))
    head_dims = {layer.mixer.head_dim for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)}
    for rotary_dim in sorted({head_dim // share // 2 * 2 for head_dim in head_dims for share in (1, 2, 4)} - {0}):
        yield change(f"RopeSpec(rotary_dim={rotary_dim})", _setting(rotary_dim=rotary_dim))
    yield change("RopeSpec(type='default')", _setting(type="default", factor=None))
    yield change("RopeSpec(sign=-1)", _setting(sign=-1.0))
    yield change("NO_ROPE", lambda rope: NO_ROPE)
    for every in (2, 3, 4):
        without = _with_attention(spec, _setting(rope=NO_ROPE), choose=_each(every))
        yield Hypothesis("ttpu_rope", f"NO_ROPE in every layer of which (layer + 1) % {every} == 0", without)


def _mlp(spec: ArchitectureSpec, numbers: Numbers) -> Iterator[Hypothesis]:
    def change(text: str, kind: Any, function: Change) -> Hypothesis:
        layers = (replace(one, mlp=function(one.mlp)) if isinstance(one.mlp, kind) else one for one in spec.layers)
        return Hypothesis("ttpu_mlp", text, replace(spec, layers=tuple(layers)))

    def router(text: str, **fields: Any) -> Hypothesis:
        return change(f"RouterSpec({text})", MoESpec, lambda moe: replace(moe, router=replace(moe.router, **fields)))

    for name in ACTIVATIONS:
        yield change(f"ActivationSpec({name!r})", MLPSpec | MoESpec, _setting(activation=ActivationSpec(name)))
    for flag in (True, False):
        yield change(f"MLPSpec(bias={flag})", MLPSpec, _setting(bias=flag))
        yield router(f"renormalize={flag}", renormalize=flag)
        yield change(f"MoESpec(shared_gate={flag})", MoESpec, _setting(shared_gate=flag))
    for score in ("softmax", "sigmoid", "topk_softmax"):
        yield router(f"score={score!r}", score=score)
    for weight_on in ("output", "input"):
        yield router(f"weight_on={weight_on!r}", weight_on=weight_on)
    for factor in dict.fromkeys([1.0, *_named(numbers, "scaling_factor")]):
        yield router(f"scaling_factor={factor:g}", scaling_factor=factor)
    counts = dict.fromkeys(int(value) for value in _named(numbers, "per_tok", "top_k", "topk", "moe_k"))
    for count in counts:
        yield change(f"MoESpec(experts_per_token={count})", MoESpec, _allowed(experts_per_token=count))
    sizes = dict.fromkeys([1, *(int(value) for value in _named(numbers, "group"))])
    for groups, top in product(sizes, sizes):
        for score in ("max", "top2_sum"):
            text = f"RouterSpec(groups={groups}, top_groups={top}, group_score={score!r})"
            yield change(text, MoESpec, _grouped(groups, top, score))


def _block(spec: ArchitectureSpec, numbers: Numbers) -> Iterator[Hypothesis]:
    def change(text: str, **fields: Any) -> Hypothesis:
        layers = tuple(replace(layer, block=replace(layer.block, **fields)) for layer in spec.layers)
        return Hypothesis("ttpu_block", f"BlockSpec({text})", replace(spec, layers=layers))

    for placement in PLACEMENTS:
        yield change(f"placement={placement!r}", placement=placement)
    for multiplier in dict.fromkeys([1.0, *_named(numbers, "multiplier")]):
        yield change(f"residual_multiplier={multiplier:g}", residual_multiplier=multiplier)
    for flag in (True, False):
        yield change(f"normed_residual={flag}", normed_residual=flag)


def _head(spec: ArchitectureSpec, numbers: Numbers) -> Iterator[Hypothesis]:
    def change(text: str, **fields: Any) -> Hypothesis:
        return Hypothesis("ttpu_head", f"HeadSpec({text})", replace(spec, head=replace(spec.head, **fields)))

    for cap in (None, *_named(numbers, "softcap")):
        yield change(f"softcap={_short(cap)}", softcap=cap)
    for flag in (True, False):
        yield change(f"tied={flag}", tied=flag)
        yield change(f"bias={flag}", bias=flag)
    factors = _named(numbers, "logit", "multiplier")
    for multiplier in dict.fromkeys([1.0, *factors, *(1 / value for value in factors if value)]):
        yield change(f"multiplier={_short(multiplier)}", multiplier=multiplier)


def _mapping(architecture: Architecture) -> Iterator[Hypothesis]:
    mapping = architecture.mapping
    rules = dict(mapping.rules)

    def change(text: str, changed: dict[str, Expression]) -> Iterator[Hypothesis]:
        if changed != rules:
            replaced = replace(mapping, rules=tuple(changed.items()))
            yield Hypothesis("ttpu_flax_mapping", f"{text} changed over", mapping=replaced)

    pairs = {path: _reversed(rule) if ".gate_up." in path else rule for path, rule in rules.items()}
    yield from change("the tensors of gate and up", pairs)
    for first, second, names in ((0, 1, "query and key"), (1, 2, "key and value")):
        parts = {p: _exchanged(rule, first, second) if ".qkv." in p else rule for p, rule in rules.items()}
        yield from change(f"the tensors of {names}", parts)
    for index, one in enumerate(NORMS):
        for other in NORMS[index + 1 :]:
            partner = {one: other, other: one}
            swapped = {path: ".".join(partner.get(part, part) for part in path.split(".")) for path in rules}
            if all(path in rules for path in swapped.values()):
                yield from change(f"the tensors of {one} and {other}", {path: rules[swapped[path]] for path in rules})


def _reversed(rule: Expression) -> Expression:
    """A pair the other way round, or every expert's pair."""
    if not isinstance(rule, Stack | Concat):
        return rule
    if all(isinstance(part, Stack | Concat) for part in rule.parts):
        return replace(rule, parts=tuple(_reversed(part) for part in rule.parts))
    return replace(rule, parts=rule.parts[::-1])


def _exchanged(rule: Expression, first: int, second: int) -> Expression:
    if not isinstance(rule, Concat) or len(rule.parts) <= second:
        return rule
    parts = list(rule.parts)
    if parts[first].result_shape != parts[second].result_shape:
        return rule
    parts[first], parts[second] = parts[second], parts[first]
    return replace(rule, parts=tuple(parts))


def _setting(**fields: Any) -> Change:
    """A function that sets fields of a frozen value."""
    return lambda value: replace(value, **fields)


def _each(every: int) -> Callable[[int], bool]:
    """Whether a layer is the last of so many."""
    return lambda layer: (layer + 1) % every == 0


def _grouped(groups: int, top: int, score: str) -> Change:
    """A function that lets a mixture choose experts within the best groups."""

    def changed(moe: MoESpec) -> Any:
        fields: dict[str, Any] = {"groups": groups, "top_groups": top, "group_score": score}
        return _allowed(router=replace(moe.router, **fields))(moe)

    return changed


def _allowed(**fields: Any) -> Change:
    """A function that sets fields of a frozen value, and leaves it where it refuses them."""

    def changed(value: Any) -> Any:
        try:
            return replace(value, **fields)
        except ConfigError:
            return value

    return changed


def _stepped(field: str, step: int) -> Change:
    """A function that adds `step` to a field that has a value."""
    return lambda value: (
        value if getattr(value, field) is None else _setting(**{field: getattr(value, field) + step})(value)
    )


def _head_norms(change: Change) -> Change:
    """A function that changes an attention's norms of queries, keys and values, where it has them."""

    def changed(attention: AttentionSpec) -> AttentionSpec:
        norms = {name: getattr(attention, name) for name in ("q_norm", "k_norm", "v_norm")}
        fields: dict[str, Any] = {name: change(norm) for name, norm in norms.items() if norm is not None}
        return replace(attention, **fields)

    return changed


def _with_attention(
    spec: ArchitectureSpec,
    change: Change,
    elsewhere: Change = lambda attention: attention,
    choose: Callable[[int], bool] = lambda index: True,
) -> ArchitectureSpec:
    """The spec with attention changed in the chosen layers, and in the others by `elsewhere`."""

    def layer(index: int, one: LayerSpec) -> LayerSpec:
        if not isinstance(one.mixer, AttentionSpec):
            return one
        return replace(one, mixer=change(one.mixer) if choose(index) else elsewhere(one.mixer))

    return replace(spec, layers=tuple(layer(index, one) for index, one in enumerate(spec.layers)))


def _with_norms(spec: ArchitectureSpec, change: Change) -> ArchitectureSpec:
    """The spec with other norms on the residual stream, the final one included."""
    layers = tuple(replace(layer, norm=change(layer.norm)) for layer in spec.layers)
    final: NormSpec | None = change(spec.final_norm) if spec.final_norm else None
    return replace(spec, layers=layers, final_norm=final)


def numbers_of(architecture: Architecture) -> Numbers:
    """Every number of the architecture's config by its key."""
    return dict(_numbers(architecture.config.to_dict()))


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, float(value)


def _named(numbers: Numbers, *parts: str) -> list[float]:
    """The numbers whose keys contain one of these words."""
    return [value for key, value in numbers.items() if any(part in key for part in parts)]


def _short(value: float | None) -> str:
    return "None" if value is None else f"{value:.6g}"
