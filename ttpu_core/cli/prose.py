"""Describes an `ArchitectureSpec` in plain words. The text mentions every setting that is not at its usual value, so
that a reader can compare the model with its paper."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ttpu_core.spec import (
    NO_MIXER,
    ActivationSpec,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    CustomSpec,
    LayerGroup,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    QueryTemperature,
    RopeSpec,
    RouterSpec,
    SharedSpec,
)

ACTIVATION_NAMES = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU (tanh)", "relu": "ReLU", "relu2": "squared ReLU",
                    "xielu": "xIELU", "clamped_swiglu": "clamped SwiGLU", "identity": "linear"}  # fmt: skip
QK_NORM_SCOPES = {"head": "shared by the heads", "full": "over all heads at once", "per_head": "per head"}
PLACEMENTS = {
    "pre": "{norm} before each sub-layer",
    "post": "{norm} after each sub-layer",
    "post_residual": "{norm} of the residual stream after each sub-layer",
    "sandwich": "{norm} before and after each sub-layer",
    "parallel": "attention and MLP side by side behind one {norm}",
    "parallel_two_norms": "attention and MLP side by side, each behind its own {norm}",
}


def architecture_lines(spec: ArchitectureSpec) -> list[str]:
    """Embedding, layers (equal ones once, with their number), final norm and head: one line each."""
    lines = [_embedding(spec)]
    for group in spec.groups():
        lines += _group_lines(group, spec.num_layers)
    final = f"{norm_words(spec.final_norm)}, then " if spec.final_norm else ""
    if spec.embedding.table_features is not None:
        final += f"a projection to {spec.embedding.features:,} features, then "
    lines.append(f"{final}{head_words(spec)}")
    return lines


def layer_words(layer: LayerSpec) -> str:
    """One layer: mixer, norms, MLP."""
    if isinstance(layer.mixer, AttentionSpec):
        mixer = attention_words(layer.mixer)
    else:
        mixer = "no mixer" if layer.mixer == NO_MIXER else _mixer(layer.mixer)
    parts = [mixer, *_block(layer.block, layer.norm)]
    if isinstance(layer.mlp, MLPSpec):
        parts.append(mlp_words(layer.mlp))
    elif layer.mlp is not None:
        parts.append(moe_words(layer.mlp))
    else:
        parts.append("no MLP")
    if layer.block.custom is not None:
        parts.append(f"in a block: {_custom(layer.block.custom)}")
    return ", ".join(parts)


def attention_words(spec: AttentionSpec) -> str:
    """Heads, window, rope, and whatever is unusual about the scores or the output."""
    return ", ".join(_attention(spec))


def rope_words(rope: RopeSpec | None, head_dim: int) -> str:
    """`rope llama3 θ=500000 ×8 (from 8192 tokens)`."""
    if rope is None or rope.type == "none":
        return "no rope"
    words = ["rope"] if rope.type == "default" else ["rope", rope.type]
    words.append(f"θ={rope.theta:.10g}")
    if rope.factor is not None:
        words.append(f"×{rope.factor:g}")
    if rope.original_max_position_embeddings:
        words.append(f"(from {rope.original_max_position_embeddings:,} tokens)")
    if rope.rotary_dim != head_dim:
        words.append(f"on {rope.rotary_dim} of {head_dim} features")
    if rope.proportion != 1.0:
        words.append(f"turning {rope.proportion:.0%} of the pairs")
    if rope.layout == "interleaved":
        words.append("interleaved")
    if rope.sign != 1.0:
        words.append("backwards")
    if rope.attention_factor is not None:
        words.append(f"with scores scaled by {rope.attention_factor:g}")
    if rope.fp32:
        words.append("in float32")
    return " ".join(words)


def norm_words(norm: NormSpec) -> str:
    """`RMSNorm`, `LayerNorm with bias`, with what is unusual."""
    name = "RMSNorm" if norm.kind == "rms" else "LayerNorm"
    if not norm.scale:
        name += " without scale"
    if norm.bias:
        name += " with bias"
    if norm.offset:
        name += f" (scale + {norm.offset:g})"
    return f"{name} ε={norm.eps:g}"


def mlp_words(spec: MLPSpec) -> str:
    """`gated SiLU MLP 14,336`."""
    words = f"{'gated' if spec.gated else 'plain'} {_activation(spec.activation)} MLP {spec.intermediate_size:,}"
    if spec.bias:
        words += " with biases"
    if spec.gate_multiplier != 1.0:
        words += f" with gates × {spec.gate_multiplier:g}"
    if spec.inner_norm is not None:
        words += f" with an inner {norm_words(spec.inner_norm)}"
    if spec.sparsity:
        words += f", {spec.sparsity:.0%} of its features sparse"
    return words


def moe_words(spec: MoESpec) -> str:
    """Experts, router, shared and dense parts."""
    expert = MLPSpec(spec.intermediate_size, spec.activation, spec.gated, spec.expert_bias)
    others = f" and {spec.identity_experts} that return their input" if spec.identity_experts else ""
    words = f"mixture of {spec.num_experts} experts{others}, {spec.experts_per_token} per token, "
    words += f"each a {mlp_words(expert)}"
    words += f" ({', '.join(_router(spec.router))})"
    if spec.shared is not None:
        words += f", plus a shared {mlp_words(spec.shared)}{' behind a gate' if spec.shared_gate else ''}"
    if spec.dense is not None:
        words += f", beside a dense {mlp_words(spec.dense)}"
    return f"{words}, with the experts' output added behind the next layer" if spec.shortcut else words


def head_words(spec: ArchitectureSpec) -> str:
    """`untied head`, with bias, softcap and multiplier."""
    head = spec.head
    words = "head tied to the embedding" if head.tied else "untied head"
    if head.bias:
        words += " with bias"
    if head.multiplier != 1.0:
        words += f", logits × {head.multiplier:g}"
    if head.softcap is not None:
        words += f", logits capped at ±{head.softcap:g}"
    return words


def _embedding(spec: ArchitectureSpec) -> str:
    embedding = spec.embedding
    words = f"embedding of {embedding.vocab_size:,} tokens × {embedding.hidden_size:,}"
    if embedding.table_features is not None:
        words += f", projected from {embedding.features:,} features"
    if embedding.scale is not None:
        words += f", scaled by {embedding.scale:g}"
    if embedding.norm is not None:
        words += f", {norm_words(embedding.norm)}"
    if embedding.positions is not None:
        words += f", {embedding.positions:,} learned positions"
        words += f" from row {embedding.position_offset}" if embedding.position_offset else ""
    if embedding.custom is not None:
        words += f", {_custom(embedding.custom)}"
    return words


def _group_lines(group: LayerGroup, num_layers: int) -> Iterator[str]:
    """A unit of one layer takes one line; a longer one a heading, then its runs of equal layers."""
    total = group.repeats * len(group.unit)
    where = "" if total == num_layers else f" (from layer {group.start} on)"
    layers = f"{total} layer{'s' if total > 1 else ''}{where}"
    if len(group.unit) == 1:
        yield f"{layers}: {layer_words(group.unit[0])}"
        return
    yield f"{layers}, {group.repeats} times these {len(group.unit)}:"
    for layer, run in groupby(group.unit):
        yield f"  {len(list(run))} × {layer_words(layer)}"


def _attention(spec: AttentionSpec) -> Iterator[str]:
    yield from _heads(spec)
    if spec.window is not None:
        yield f"a sliding window of {spec.window:,} tokens"
    if spec.chunk is not None:
        yield f"in chunks of {spec.chunk:,} tokens"
    if not spec.causal:
        yield "seeing later tokens too"
    yield rope_words(spec.rope, spec.head_dim)
    if spec.alibi:
        yield "ALiBi"
    if spec.qkv_bias or spec.output_bias:
        yield f"biases on {' and '.join(n for n, b in (('qkv', spec.qkv_bias), ('output', spec.output_bias)) if b)}"
    norms = {"query": spec.q_norm, "key": spec.k_norm, "value": spec.v_norm}
    scope = QK_NORM_SCOPES[spec.qk_norm_scope]
    order = ", after rope" if spec.qk_norm_after_rope else ""
    for norm, group in groupby((pair for pair in norms.items() if pair[1]), key=lambda pair: pair[1]):
        if norm is not None:
            yield f"{norm_words(norm)} on {' and '.join(name for name, _ in group)} ({scope}{order})"
    if spec.scale is not None:
        yield f"scores × {spec.scale:g}"
    if spec.logit_softcap is not None:
        yield f"scores capped at ±{spec.logit_softcap:g}"
    if spec.clip_qkv is not None:
        yield f"qkv clipped at ±{spec.clip_qkv:g}"
    if spec.sinks:
        yield "attention sinks"
    if spec.differential is not None:
        yield f"differential: two softmax maps a head, lambda from {spec.differential.initial:.3g}"
    if spec.query_temperature is not None:
        yield _temperature(spec.query_temperature)
    if spec.value_scale != 1.0:
        yield f"values × {spec.value_scale:g}"
    if spec.output_norm is not None:
        yield f"{norm_words(spec.output_norm)} on the output"
    if spec.output_gate is not None:
        gate = f"a {spec.output_gate.activation} output gate per {spec.output_gate.per}"
        yield f"{gate} with bias" if spec.output_gate.bias else gate


def _heads(spec: AttentionSpec) -> Iterator[str]:
    if spec.num_heads == spec.num_kv_heads:
        yield f"multi-head attention, {spec.num_heads} heads of {spec.head_dim}"
    else:
        kind = "multi-query" if spec.num_kv_heads == 1 else "grouped-query"
        heads = f"{spec.num_heads} query / {spec.num_kv_heads} key-value head{'s' if spec.num_kv_heads > 1 else ''}"
        yield f"{kind} attention, {heads} of {spec.head_dim}"
    if spec.value_dim != spec.head_dim:
        yield f"values of {spec.value_dim}"
    if spec.value_is_key:
        yield "keys serve as values"
    if spec.kv_from_layer is not None:
        yield f"keys and values of layer {spec.kv_from_layer}"


def _temperature(spec: QueryTemperature) -> str:
    steps = f"{spec.offset:g} + ⌊(position + {spec.shift:g}) / {spec.period:g}⌋"
    return f"queries × (1 + {spec.scale:g}·log({steps}))"


def _mixer(spec: MixerSpec) -> str:
    words = [_custom(spec)]
    if spec.rope is not None:
        words.append(rope_words(spec.rope, spec.rope.rotary_dim))
    words += [_temperature(value) for _, value in spec.options if isinstance(value, QueryTemperature)]
    return ", ".join(words)


def _custom(spec: CustomSpec) -> str:
    """A part that the shared decoder does not know, without options that hold whole specs."""
    plain = [(name, value) for name, value in spec.options if isinstance(value, int | float | str)]
    options = ", ".join(f"{name}={f'{value:g}' if isinstance(value, float) else value}" for name, value in plain)
    backends = ", ".join(name for name, _ in spec.implementations)
    whose = f"of the plugin's own, for {backends}" if backends else "of the backend's own"
    return f"{spec.name.replace('_', ' ')}{f' ({options})' if options else ''} {whose}"


def _block(block: BlockSpec, norm: NormSpec) -> Iterator[str]:
    yield PLACEMENTS[block.placement].format(norm=norm_words(norm))
    if block.residual_multiplier != 1.0:
        yield f"sub-layers' outputs × {block.residual_multiplier:g}"
    if block.mlp_residual_multiplier is not None:
        yield f"the MLP's output × {block.mlp_residual_multiplier:g}"
    if block.skip_multipliers != (1.0, 1.0):
        mixer, mlp = block.skip_multipliers
        yield f"the residual stream × {mixer:g} before the mixer's output, × {mlp:g} before the MLP's"
    if block.normed_residual:
        yield "outputs added to the norms' outputs"
    if block.layer_scalar:
        yield "a learned factor on the layer's output"
    if block.beside is not None:
        yield f"beside attention {_mixer(block.beside)}"
    if block.reads_embedding:
        yield "the mixer also reading the embedding"
    if block.shared is not None:
        yield from _shared(block.shared)


def _shared(shared: SharedSpec) -> Iterator[str]:
    yield f"norms, mixer and MLP those of shared block {shared.block}"
    ranks = {"queries, keys and values": shared.qkv_rank, "the MLP's inputs": shared.mlp_rank}
    for what, rank in ranks.items():
        if rank is not None:
            yield f"an update of rank {rank} of its own for {what}"


def _activation(spec: ActivationSpec) -> str:
    constants = [f"{name}={value:g}" for name, value in (("α", spec.alpha), ("limit", spec.limit)) if value is not None]
    return ACTIVATION_NAMES.get(spec.name, spec.name) + (f" ({', '.join(constants)})" if constants else "")


def _router(spec: RouterSpec) -> Iterator[str]:
    yield f"{spec.score.replace('_', ' ')} router" + (" in float32" if spec.fp32 else "")
    if spec.score == "sparsemixer":
        yield f"jitter {spec.jitter:g}"
    if spec.renormalize:
        yield "weights renormalised" + (f" (ε={spec.renormalize_eps:g})" if spec.renormalize_eps else "")
    if spec.renormalize_min:
        yield f"divided by {spec.renormalize_min:g} or more"
    if spec.bias:
        yield "with bias"
    if spec.correction_bias:
        yield "with a correction bias on the choice"
    if spec.groups > 1:
        yield f"the best {spec.top_groups} of {spec.groups} groups by {spec.group_score.replace('_', ' ')}"
    if spec.scaling_factor != 1.0:
        yield f"weights × {spec.scaling_factor:g}"
    if spec.weight_on == "input":
        yield "weights applied to the experts' input"
    if spec.logit_softcap is not None:
        yield f"logits capped at ±{spec.logit_softcap:g}"
    if spec.norm is not None:
        yield f"behind {norm_words(spec.norm)}"
    if spec.input_scale is not None:
        yield f"input × {spec.input_scale:g}"
    if spec.expert_scale:
        yield "a learned scale per expert"
