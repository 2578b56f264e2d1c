"""Mapping rules for checkpoints in the usual layout: one tensor per projection, named as in most transformers
models. `standard_mapping` builds them from an `ArchitectureSpec`; a family passes other `CheckpointNames` or
replaces single rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from ttpu_core.errors import ConfigError
from ttpu_core.mapping import Concat, Expression, FlaxMapping, Stack, Tensor
from ttpu_core.mapping.recurrent import selective_scan_rules, short_convolution_rules, state_space_rules
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, LayerSpec, MixerSpec, MLPSpec, MoESpec, NormSpec
from ttpu_core.spec.latent_attention import LatentAttentionSpec
from ttpu_core.spec.parameters import fused_slots, layer_paths, norm_names
from ttpu_core.spec.selective_scan import SelectiveScanSpec
from ttpu_core.spec.short_convolution import ShortConvolutionSpec
from ttpu_core.spec.state_space import StateSpaceSpec

Rules = Iterator[tuple[str, Expression]]


@dataclass(frozen=True)
class CheckpointNames:
    """Checkpoint tensor names by role. `{layer}` and `{expert}` stand for numbers. `base` is the prefix that
    checkpoints of the base model alone leave out; `short_convolution` and `state_space` are prefixes within a
    layer.

    If `mlp_norm` is None, the name is "pre_feedforward_layernorm" for sandwich placement and
    "post_attention_layernorm" for any other placement."""

    base: str = "model."
    layer: str = "model.layers.{layer}."
    embedding: str = "model.embed_tokens.weight"
    positions: str = "model.embed_positions.weight"
    embedding_projection: str = "model.project_in"
    embedding_norm: str = "model.embed_norm"
    final_norm: str = "model.norm"
    final_projection: str = "model.project_out"
    head: str = "lm_head"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    v_norm: str = "self_attn.v_norm"
    output_norm: str = "self_attn.attn_sub_norm"
    output_gate: str = "self_attn.gate_proj"
    sinks: str = "self_attn.sinks"
    lambdas: str = "self_attn.lambda_"
    query_down: str = "self_attn.q_a_proj"
    query_down_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_down_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"
    short_convolution: str = "conv."
    state_space: str = "mamba."
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    inner_norm: str = "mlp.ffn_sub_norm"
    activation: str = "mlp.act_fn"
    router: str = "mlp.gate"
    router_norm: str = "mlp.gate.norm"
    router_scale: str = "mlp.gate.scale"
    router_expert_scale: str = "mlp.gate.per_expert_scale"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    expert_gate: str = "mlp.experts.{expert}.gate_proj"
    expert_up: str = "mlp.experts.{expert}.up_proj"
    expert_down: str = "mlp.experts.{expert}.down_proj"
    shared_gate_up_down: tuple[str, str, str] = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    )
    shared_gate: str = "mlp.shared_expert_gate"
    input_norm: str = "input_layernorm"
    mlp_norm: str | None = None
    post_attention_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = "post_feedforward_layernorm"
    layer_scalar: str = "layer_scalar"

    def below(self, base: str, head: str = "lm_head") -> CheckpointNames:
        """These names with the base model's tensors under the prefix `base` instead of "model."."""
        return replace(
            self,
            layer=f"{base}layers.{{layer}}.",
            embedding=f"{base}embed_tokens.weight",
            final_norm=f"{base}norm",
            head=head,
        )

    def norm(self, layer: LayerSpec, role: str) -> str:
        """The checkpoint name of one of a layer's norms over the residual stream."""
        if role == "mlp_norm" and self.mlp_norm is None:
            sandwich = layer.block.placement == "sandwich"
            return "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        name: str = getattr(self, role)
        return name


NO_LAYERS: Mapping[int, CheckpointNames] = MappingProxyType({})
IGNORED_TENSORS: tuple[str, ...] = (r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)", r".*\.masked_bias")
"""Buffers in old checkpoints that can be computed from the config."""


def standard_mapping(
    spec: ArchitectureSpec, names: CheckpointNames | None = None, of_layers: Mapping[int, CheckpointNames] = NO_LAYERS
) -> FlaxMapping:
    """The mapping of a checkpoint in the usual layout. A shared block is stored with the first layer that uses it.
    Parameters of custom parts, and updates of shared kernels, have no usual names: add rules for them with
    `replace_rules`.

    Args:
        spec: of the model.
        names: of the checkpoint's tensors, if they are not the usual ones.
        of_layers: the names of layers that have others, by their index.
    """
    names = names or CheckpointNames()
    embedding, hidden, vocab = spec.embedding, spec.hidden_size, spec.vocab_size
    features = embedding.features
    rules: list[tuple[str, Expression]] = [("embed.embedding", Tensor(names.embedding, (vocab, features)))]
    if embedding.table_features is not None:
        rules.append(("embed.projection.kernel", Tensor(f"{names.embedding_projection}.weight", (hidden, features))))
        rules.append(("final_projection.kernel", Tensor(f"{names.final_projection}.weight", (features, hidden))))
    if embedding.positions is not None:
        rows = embedding.positions + embedding.position_offset
        rules.append(("embed.positions", Tensor(names.positions, (rows, hidden))))
    rules += norm_rules("embed.norm", embedding.norm, names.embedding_norm, hidden)
    by_path: dict[str, Expression] = {}
    for index, layer in enumerate(spec.layers):
        own, paths = of_layers.get(index, names), layer_paths(layer, index, hidden)
        for path, rule in layer_rules(layer, hidden, own, own.layer.format(layer=index)):
            by_path.setdefault(paths[path], rule)
    rules += by_path.items()
    rules += norm_rules("final_norm", spec.final_norm, names.final_norm, hidden)
    if not spec.head.tied:
        rules.append(("head.kernel", Tensor(f"{names.head}.weight", (vocab, features))))
    if spec.head.bias:
        rules.append(("head.bias", Tensor(f"{names.head}.bias", (vocab,))))
    tied = (f"{names.head}.weight",) if spec.head.tied else ()
    return FlaxMapping(tuple(rules), tied=tied, ignored=IGNORED_TENSORS, prefixes=(("", names.base),))


def layer_rules(layer: LayerSpec, hidden: int, names: CheckpointNames, prefix: str) -> Rules:
    """Rules of one layer by path within it. `prefix` is the prefix of the layer's tensor names."""
    inputs = layer.mixer_inputs(hidden)
    for role in norm_names(layer):
        size = inputs if role == "input_norm" else hidden
        yield from norm_rules(role, layer.norm, prefix + names.norm(layer, role), size)
    if isinstance(layer.mixer, AttentionSpec):
        yield from attention_rules(layer.mixer, hidden, names, prefix, inputs)
    for mixer in layer.mixers:
        if not mixer.implementations:
            yield from _mixer_rules(mixer, names, prefix)
    if isinstance(layer.mlp, MLPSpec):
        yield from mlp_rules("mlp", layer.mlp, hidden, _mlp_names(names, prefix))
        yield from norm_rules(
            "mlp.inner_norm", layer.mlp.inner_norm, prefix + names.inner_norm, layer.mlp.intermediate_size
        )
        if layer.mlp.activation.name == "xielu":
            for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
                yield f"mlp.activation.{name}", Tensor(f"{prefix}{names.activation}.{name}", shape).reshape(1)
    elif layer.mlp is not None:
        yield from moe_rules(layer.mlp, hidden, names, prefix)
    if layer.block.layer_scalar:
        yield "layer_scalar", Tensor(prefix + names.layer_scalar, (1,))


def _mixer_rules(mixer: MixerSpec, names: CheckpointNames, prefix: str) -> Rules:
    """Rules of a mixer of the core's vocabulary."""
    if isinstance(mixer, LatentAttentionSpec):
        yield from latent_attention_rules(mixer, names, prefix)
    elif isinstance(mixer, ShortConvolutionSpec):
        yield from short_convolution_rules(mixer, prefix + names.short_convolution)
    elif isinstance(mixer, SelectiveScanSpec):
        yield from selective_scan_rules(mixer, prefix + names.state_space)
    elif isinstance(mixer, StateSpaceSpec):
        yield from state_space_rules(mixer, prefix + names.state_space)


def attention_rules(
    spec: AttentionSpec, hidden: int, names: CheckpointNames, prefix: str, inputs: int | None = None
) -> Rules:
    """Rules for separate query, key, value and output projections, fused by KV head.

    Args:
        spec: the attention.
        hidden: features of the residual stream.
        names: of the checkpoint's tensors.
        prefix: of the names of the layer's tensors.
        inputs: features that attention reads, if they are not `hidden`.
    """
    inputs = inputs or hidden
    kv, group, dim, value_dim = spec.num_kv_heads, spec.q_per_kv, spec.head_dim, spec.value_dim
    slots = [
        (prefix + name, count)
        for name, count in zip((names.query, names.key, names.value), fused_slots(spec), strict=True)
        if count
    ]

    def by_head(name: str, count: int, *rest: int) -> Expression:
        """A projection's tensor as [kv, count, dim, *rest]."""
        whole = Tensor(name, (kv * count * dim, *rest))
        if spec.differential is None:
            return whole.reshape(kv, count, dim, *rest)
        halves = whole.reshape(2, kv, count, dim // 2, *rest)
        return Concat((halves[0], halves[1]), axis=2)

    yield "attention.qkv.kernel", Concat(tuple(by_head(f"{n}.weight", c, inputs) for n, c in slots), axis=1)
    if spec.qkv_bias:
        yield "attention.qkv.bias", Concat(tuple(by_head(f"{n}.bias", c) for n, c in slots), axis=1)
    if spec.differential is not None:
        for part, letter in (("query", "q"), ("key", "k")):
            vectors = tuple(Tensor(f"{prefix}{names.lambdas}{letter}{half}", (spec.map_dim,)) for half in (1, 2))
            yield f"attention.lambda.{part}", Stack(vectors)
    own_keys = spec.kv_from_layer is None
    if own_keys and not spec.value_is_key and value_dim != dim:
        kernel = Tensor(f"{prefix}{names.value}.weight", (kv * value_dim, inputs))
        yield "attention.value.kernel", kernel.reshape(kv, value_dim, inputs)
        if spec.qkv_bias:
            bias = Tensor(f"{prefix}{names.value}.bias", (kv * value_dim,))
            yield "attention.value.bias", bias.reshape(kv, value_dim)
    if spec.output_gate is not None:
        each = (kv, group, value_dim) if spec.output_gate.per == "feature" else (kv, group)
        gate = Tensor(f"{prefix}{names.output_gate}.weight", (prod(each), inputs))
        yield "attention.gate.kernel", gate.reshape(*each, inputs)
        if spec.output_gate.bias:
            yield "attention.gate.bias", Tensor(f"{prefix}{names.output_gate}.bias", (prod(each),)).reshape(*each)
    q_shape, k_shape = ((dim,), (dim,)) if spec.qk_norm_scope == "head" else ((kv, group, dim), (kv, dim))
    yield from norm_rules("attention.q_norm", spec.q_norm, prefix + names.q_norm, q_shape)
    if own_keys:
        yield from norm_rules("attention.k_norm", spec.k_norm, prefix + names.k_norm, k_shape)
        yield from norm_rules("attention.v_norm", spec.v_norm, prefix + names.v_norm, value_dim)
    if spec.sinks:
        yield "attention.sinks", Tensor(prefix + names.sinks, (kv * group,)).reshape(kv, group)
    output_shape = (kv, group, value_dim)
    yield from norm_rules("attention.output_norm", spec.output_norm, prefix + names.output_norm, output_shape)
    yield "attention.output.kernel", Tensor(f"{prefix}{names.output}.weight", (hidden, spec.num_heads * value_dim))
    if spec.output_bias:
        yield "attention.output.bias", Tensor(f"{prefix}{names.output}.bias", (hidden,))


def latent_attention_rules(mixer: LatentAttentionSpec, names: CheckpointNames, prefix: str) -> Rules:
    """Rules for the parameters of `ttpu_core.spec.latent_attention`, as DeepSeek's checkpoints store them: one
    tensor holds, for each head, the key's rows and then the value's rows."""
    shapes = {name: parameter.shape for name, parameter in mixer.parameters}

    def linear(path: str, name: str) -> Rules:
        *out, inner = shapes[f"{path}.kernel"]
        yield f"mixer.{path}.kernel", Tensor(f"{prefix}{name}.weight", (prod(out), inner)).reshape(*out, inner)
        if f"{path}.bias" in shapes:
            yield f"mixer.{path}.bias", Tensor(f"{prefix}{name}.bias", (prod(out),))

    norm = mixer.norm
    if mixer.q_lora_rank is None:
        yield from linear("query", names.query)
    else:
        yield from linear("query_down", names.query_down)
        yield from norm_rules("mixer.query_norm", norm, prefix + names.query_down_norm, mixer.q_lora_rank)
        yield from linear("query_up", names.query_up)
    yield from linear("kv_down", names.kv_down)
    yield from norm_rules("mixer.kv_norm", norm, prefix + names.kv_down_norm, mixer.kv_lora_rank)
    heads, key, rank = shapes["key_up.kernel"]
    both = key + mixer.v_head_dim
    kernel = Tensor(f"{prefix}{names.kv_up}.weight", (heads * both, rank)).reshape(heads, both, rank)
    yield "mixer.key_up.kernel", kernel[:, :key]
    yield "mixer.value_up.kernel", kernel[:, key:]
    yield from linear("output", names.output)


def mlp_rules(path: str, spec: MLPSpec, hidden: int, tensors: tuple[str, str, str]) -> Rules:
    """Rules for a dense MLP whose gate, up and down projections are separate tensors. `tensors` holds their names.

    Args:
        path: Flax path of the MLP.
        spec: the MLP.
        hidden: features of the residual stream.
        tensors: names of the gate, up and down projections.
    """
    gate, up, down = tensors
    inner = spec.intermediate_size
    if spec.gated:
        yield f"{path}.gate_up.kernel", Stack(tuple(Tensor(f"{n}.weight", (inner, hidden)) for n in (gate, up)))
        if spec.bias:
            yield f"{path}.gate_up.bias", Stack(tuple(Tensor(f"{n}.bias", (inner,)) for n in (gate, up)))
    else:
        yield f"{path}.up.kernel", Tensor(f"{up}.weight", (inner, hidden))
        if spec.bias:
            yield f"{path}.up.bias", Tensor(f"{up}.bias", (inner,))
    yield f"{path}.down.kernel", Tensor(f"{down}.weight", (hidden, inner))
    if spec.bias:
        yield f"{path}.down.bias", Tensor(f"{down}.bias", (hidden,))


def moe_rules(spec: MoESpec, hidden: int, names: CheckpointNames, prefix: str) -> Rules:
    """Rules for a mixture of experts whose experts are separate tensors."""
    experts = range(spec.num_experts)
    router = prefix + names.router
    yield "moe.router.kernel", Tensor(f"{router}.weight", (spec.choices, hidden))
    if spec.router.bias:
        yield "moe.router.bias", Tensor(f"{router}.bias", (spec.choices,))
    if spec.router.correction_bias:
        yield "moe.router.correction_bias", Tensor(prefix + names.correction_bias, (spec.choices,))
    if spec.router.expert_scale:
        yield "moe.router.expert_scale", Tensor(prefix + names.router_expert_scale, (spec.choices,))
    yield from norm_rules("moe.router.norm", spec.router.norm, prefix + names.router_norm, hidden)
    if spec.router.input_scale is not None:
        yield "moe.router.scale", Tensor(prefix + names.router_scale, (hidden,))
    each = MLPSpec(spec.intermediate_size, spec.activation, spec.gated, spec.expert_bias)
    per_expert = [
        dict(mlp_rules("moe.experts", each, hidden, _numbered(names, prefix, expert))) for expert in experts
    ]
    for path in per_expert[0]:
        yield path, Stack(tuple(rules[path] for rules in per_expert))
    if spec.shared is not None:
        gate, up, down = names.shared_gate_up_down
        yield from mlp_rules("moe.shared", spec.shared, hidden, (prefix + gate, prefix + up, prefix + down))
        if spec.shared_gate:
            yield "moe.shared_gate.kernel", Tensor(f"{prefix}{names.shared_gate}.weight", (1, hidden))
    if spec.dense is not None:
        yield from mlp_rules("moe.dense", spec.dense, hidden, _mlp_names(names, prefix))


def fused_gate_up(
    spec: ArchitectureSpec, names: CheckpointNames | None = None, tensor: str = "mlp.gate_up_proj.weight"
) -> dict[str, Expression]:
    """Rules by Flax path for the dense gated MLPs of all layers, where each layer stores gate and up in one tensor
    [2 * inner, hidden], gate first. `tensor` is its name within a layer."""
    names, hidden = names or CheckpointNames(), spec.hidden_size
    inner = {i: layer.mlp.intermediate_size for i, layer in enumerate(spec.layers) if isinstance(layer.mlp, MLPSpec)}
    return {
        f"layers.{index}.mlp.gate_up.kernel": Tensor(
            names.layer.format(layer=index) + tensor, (2 * size, hidden)
        ).reshape(2, size, hidden)
        for index, size in inner.items()
    }


def fused_qkv(
    spec: ArchitectureSpec,
    names: CheckpointNames | None = None,
    tensor: str = "self_attn.qkv_proj",
    *,
    by_group: bool = False,
    transposed: bool = False,
) -> dict[str, Expression]:
    """Rules by Flax path for the attention of all layers, where each layer stores queries, keys and values in one
    tensor [rows, hidden], with a bias [rows] if the attention has one.

    Args:
        spec: of the model; queries, keys and values have heads of one size.
        names: of the checkpoint's tensors, if they are not the usual ones.
        tensor: its name within a layer, without ".weight".
        by_group: whether the rows are, for each KV head, those of its queries, then of its key, then of its value
            (gpt_neox, falcon; multi-query attention either way). Otherwise all queries come first, then all keys,
            then all values (gpt2, phi3).
        transposed: whether the kernel is stored [hidden, rows], as gpt2's Conv1D does.
    """
    names, rules = names or CheckpointNames(), dict[str, Expression]()
    for index, layer in enumerate(spec.layers):
        mixer = layer.mixer
        if not isinstance(mixer, AttentionSpec):
            continue
        name, path = names.layer.format(layer=index) + tensor, f"layers.{index}.attention.qkv"
        kv, counts, dim = mixer.num_kv_heads, fused_slots(mixer), mixer.head_dim
        rows, hidden = kv * sum(counts) * dim, spec.hidden_size
        kernel = Tensor(f"{name}.weight", (hidden, rows)).transpose(1, 0) if transposed else None
        whole = {f"{path}.kernel": kernel or Tensor(f"{name}.weight", (rows, hidden))}
        if mixer.qkv_bias:
            whole[f"{path}.bias"] = Tensor(f"{name}.bias", (rows,))
        for role, rule in whole.items():
            inner = rule.result_shape[1:]
            if by_group:
                rules[role] = rule.reshape(kv, sum(counts), dim, *inner)
                continue
            ends = [kv * dim * sum(counts[: part + 1]) for part in range(len(counts))]
            parts = [
                rule[end - kv * dim * count : end].reshape(kv, count, dim, *inner)
                for end, count in zip(ends, counts, strict=True)
            ]
            rules[role] = Concat(tuple(parts), axis=1)
    return rules


def transposed_kernels(mapping: FlaxMapping, *paths: str) -> FlaxMapping:
    """The mapping with the kernels at these paths within a layer stored [in, out], as gpt2's Conv1D stores them."""
    rules: dict[str, Expression | None] = {}
    for path, rule in mapping.rules:
        if path.startswith("layers.") and path.endswith(paths) and isinstance(rule, Tensor):
            rules[path] = Tensor(rule.name, rule.shape[::-1]).transpose(1, 0)
    return replace_rules(mapping, rules)


def stacked_experts(
    spec: ArchitectureSpec,
    names: CheckpointNames | None = None,
    experts: str = "mlp.experts.",
    *,
    transposed: bool = False,
    tensors: tuple[str, str] = ("gate_up_proj", "down_proj"),
) -> dict[str, Expression]:
    """Rules by Flax path for the gated experts of all layers, where each layer stores its experts in two stacked
    tensors. See `stacked_expert_rules`.

    Args:
        spec: of the model.
        names: of the checkpoint's tensors, if they are not the usual ones.
        experts: the prefix of the tensors' names within a layer.
        transposed: whether the tensors hold inputs before outputs.
        tensors: the names of the two, gate and up first.
    """
    names = names or CheckpointNames()
    return {
        f"layers.{index}.{path}": rule
        for index, layer in enumerate(spec.layers)
        if isinstance(layer.mlp, MoESpec)
        for path, rule in stacked_expert_rules(
            layer.mlp,
            spec.hidden_size,
            names.layer.format(layer=index) + experts,
            transposed=transposed,
            tensors=tensors,
        )
    }


def stacked_expert_rules(
    spec: MoESpec,
    hidden: int,
    prefix: str,
    *,
    transposed: bool = False,
    tensors: tuple[str, str] = ("gate_up_proj", "down_proj"),
) -> Rules:
    """Rules for one layer's gated experts in two stacked tensors.

    Args:
        spec: the mixture of experts.
        hidden: features of the residual stream.
        prefix: prefix of the names in `tensors`.
        transposed: whether the last two dimensions of both tensors are swapped.
        tensors: names of the tensors [experts, 2 * inner, hidden], gates first, and [experts, hidden, inner].
    """
    experts, inner = spec.num_experts, spec.intermediate_size
    gate_up, down = (prefix + name for name in tensors)
    if transposed:
        both = Tensor(gate_up, (experts, hidden, 2 * inner)).reshape(experts, hidden, 2, inner)
        yield "moe.experts.gate_up.kernel", both.transpose(0, 2, 3, 1)
        yield "moe.experts.down.kernel", Tensor(down, (experts, inner, hidden)).transpose(0, 2, 1)
    else:
        both = Tensor(gate_up, (experts, 2 * inner, hidden))
        yield "moe.experts.gate_up.kernel", both.reshape(experts, 2, inner, hidden)
        yield "moe.experts.down.kernel", Tensor(down, (experts, hidden, inner))


def norm_rules(path: str, norm: NormSpec | None, name: str, size: int | tuple[int, ...]) -> Rules:
    """Rules for a norm's scale and bias, which are flat in checkpoints. No rules if the norm is None or of kind
    "none"."""
    if norm is None or norm.kind == "none":
        return
    shape = (size,) if isinstance(size, int) else size
    for role, tensor, present in (("scale", "weight", norm.scale), ("bias", "bias", norm.bias)):
        if present:
            flat = Tensor(f"{name}.{tensor}", (prod(shape),))
            yield f"{path}.{role}", flat if len(shape) == 1 else flat.reshape(*shape)


def replace_rules(mapping: FlaxMapping, rules: Mapping[str, Expression | None]) -> FlaxMapping:
    """The mapping with rules replaced or added by Flax path. A value of None removes a rule."""
    known = {path for path, _ in mapping.rules}
    kept = [(path, rules.get(path, rule)) for path, rule in mapping.rules]
    added = [(path, rule) for path, rule in rules.items() if path not in known]
    changed = tuple((path, rule) for path, rule in (*kept, *added) if rule is not None)
    return replace(mapping, rules=changed)


def with_alternative(mapping: FlaxMapping, rules: Mapping[str, Expression]) -> FlaxMapping:
    """The mapping extended to checkpoints that hold the tensors of `rules` (by Flax path) in place of the usual
    ones."""
    return replace(mapping, alternatives=(*mapping.alternatives, tuple(rules.items()))) if rules else mapping


def without_further_layers(mapping: FlaxMapping, spec: ArchitectureSpec, count: int) -> FlaxMapping:
    """The mapping without `count` layers after the last one, which predict further tokens (multi-token prediction,
    arXiv 2412.19437, section 2.2). A checkpoint's tensors of them are ignored.

    Raises:
        ConfigError: a negative count.
    """
    if count < 0:
        raise ConfigError(f"{count} layers that predict further tokens were asked for: give 0 or more.")
    further = range(spec.num_layers, spec.num_layers + count)
    return replace(mapping, ignored=(*mapping.ignored, *(rf"model\.layers\.{layer}\..*" for layer in further)))


def _mlp_names(names: CheckpointNames, prefix: str) -> tuple[str, str, str]:
    return prefix + names.gate, prefix + names.up, prefix + names.down


def _numbered(names: CheckpointNames, prefix: str, expert: int) -> tuple[str, str, str]:
    gate, up, down = (prefix + name for name in (names.expert_gate, names.expert_up, names.expert_down))
    return gate.format(expert=expert), up.format(expert=expert), down.format(expert=expert)
