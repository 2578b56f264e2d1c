"""The parameter table: every parameter's Flax path, shape and logical axes, derived from an `ArchitectureSpec`.
Backends allocate, load, shard and count parameters from this table only.

Kernels are stored [out, in], as Hugging Face stores them: the contraction runs over the minor dimension. The TPU
compiler schedules this faster (Llama-3.1-8B decode on v5e:2x4: 4.4 ms against 5.4 ms), and XLA:CPU needs it for fast
bfloat16. Projections that read the same input are fused and grouped by KV head, so that tensor parallelism shards
between groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ttpu_core.errors import PluginError
from ttpu_core.spec import axes
from ttpu_core.spec.attention import AttentionSpec
from ttpu_core.spec.feed_forward import ActivationSpec, MLPSpec, MoESpec
from ttpu_core.spec.norm import NormSpec
from ttpu_core.spec.parts import NO_MIXER, CustomSpec, LayerSpec, MixerSpec, Parameter, SharedSpec

if TYPE_CHECKING:
    from ttpu_core.spec.architecture_spec import ArchitectureSpec

Named = Iterator[tuple[str, Parameter]]
LAYERS = "layers."
SHARED = "shared."
GROUPS = "groups."


def model_parameters(spec: ArchitectureSpec) -> dict[str, Parameter]:
    """Every parameter of the model by its Flax path, in model order."""
    table = _with_axis_overrides(dict(_model(spec)), spec.parameter_axes)
    for path, form in spec.kernel_formats:
        table[path] = replace(table[path], format=form)
    return table


def layer_parameters(layer: LayerSpec, hidden_size: int) -> dict[str, Parameter]:
    """The parameters that one layer uses by their path within the layer."""
    return dict(_block(layer, hidden_size)) | dict(_own(layer, hidden_size))


def layer_paths(layer: LayerSpec, index: int, hidden_size: int) -> dict[str, str]:
    """Path within the layer → path in the model, of the parameters that the layer of this index uses."""
    shared, own = layer.block.shared, f"{LAYERS}{index}."
    block = own if shared is None else f"{SHARED}{shared.block}."
    paths = {path: block + path for path, _ in _block(layer, hidden_size)}
    return paths | {path: own + path for path, _ in _own(layer, hidden_size)}


def fused_slots(attention: AttentionSpec) -> tuple[int, int, int]:
    """How many head-sized slots query, key and value take in one KV head's group of the fused projection.

    Values of another head size have their own kernel. Values that equal the keys have no kernel. A layer that reads
    another layer's keys and values projects only queries."""
    if attention.kv_from_layer is not None:
        return attention.q_per_kv, 0, 0
    fused_value = not attention.value_is_key and attention.value_dim == attention.head_dim
    return attention.q_per_kv, 1, int(fused_value)


def norm_names(layer: LayerSpec) -> tuple[str, ...]:
    """The norms over the residual stream that a layer's placement requires."""
    has_mlp = layer.mlp is not None
    names = {
        "pre": ("input_norm", "mlp_norm"),
        "post": ("post_attention_norm", "post_mlp_norm"),
        "post_residual": ("post_attention_norm", "post_mlp_norm"),
        "sandwich": ("input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"),
        "parallel": ("input_norm",),
        "parallel_two_norms": ("input_norm", "mlp_norm"),
        "none": (),
    }[layer.block.placement]
    if layer.mixer == NO_MIXER:
        names = tuple(name for name in names if "mlp" in name)
    return tuple(name for name in names if has_mlp or "mlp" not in name)


def _model(spec: ArchitectureSpec) -> Named:
    embedding, hidden = spec.embedding, spec.hidden_size
    features = embedding.features
    of_rows = axes.VOCAB if spec.head.tied else axes.LOOKED_UP
    yield "embed.embedding", Parameter((embedding.rows, features), (of_rows, axes.EMBED))
    if embedding.table_features is not None:
        yield "embed.projection.kernel", Parameter((hidden, features), (axes.EMBED, None))
    if embedding.positions is not None:
        rows = embedding.positions + embedding.position_offset
        yield "embed.positions", Parameter((rows, hidden), (axes.POSITION, axes.EMBED))
    if embedding.norm is not None:
        yield from _prefixed("embed.norm", _norm(embedding.norm, (hidden,), (axes.NORM,)))
    if embedding.custom is not None:
        yield from _prefixed("embed", _custom(embedding.custom))
    for number, block in _shared_blocks(spec).items():
        yield from _prefixed(f"{SHARED}{number}", iter(block.items()))
    for index, layer in enumerate(spec.layers):
        if layer.block.shared is None:
            yield from _prefixed(f"{LAYERS}{index}", _block(layer, hidden))
        yield from _prefixed(f"{LAYERS}{index}", _own(layer, hidden))
    if spec.final_norm is not None:
        yield from _prefixed("final_norm", _norm(spec.final_norm, (hidden,), (axes.NORM,)))
    if embedding.table_features is not None:
        yield "final_projection.kernel", Parameter((features, hidden), (None, axes.EMBED))
    if not spec.head.tied:
        yield "head.kernel", Parameter((embedding.rows, features), (axes.VOCAB, axes.EMBED))
    if spec.head.bias:
        yield "head.bias", Parameter((embedding.rows,), (axes.VOCAB,), "zeros")


def _shared_blocks(spec: ArchitectureSpec) -> dict[int, dict[str, Parameter]]:
    """The parameters of each shared block by its number."""
    blocks: dict[int, dict[str, Parameter]] = {}
    for index, layer in enumerate(spec.layers):
        if layer.block.shared is None:
            continue
        found = dict(_block(layer, spec.hidden_size))
        if blocks.setdefault(layer.block.shared.block, found) != found:
            raise PluginError(
                f"layer {index} of this {spec.model_type} was described to use the shared block "
                f"{layer.block.shared.block}, but with other parameters than the layers before it: describe norms, "
                "mixer and MLP alike, or give it another block."
            )
    return blocks


def _block(layer: LayerSpec, hidden: int) -> Named:
    """The norms, the mixer and the MLP of a layer, which it may share."""
    if layer.block.reads_embedding and (layer.block.placement == "parallel" or layer.block.normed_residual):
        raise PluginError(
            "a layer was described whose mixer reads the embedding too, but whose MLP or residual begins at the norm "
            "before the mixer: use another placement than 'parallel', and no normed_residual."
        )
    for name in norm_names(layer):
        size = layer.mixer_inputs(hidden) if name == "input_norm" else hidden
        yield from _prefixed(name, _norm(layer.norm, (size,), (axes.NORM,)))
    if isinstance(layer.mixer, MixerSpec):
        yield from _prefixed("mixer", _custom(layer.mixer))
    else:
        yield from _prefixed("attention", _attention(layer.mixer, layer.mixer_inputs(hidden), hidden))
    if isinstance(layer.mlp, MLPSpec):
        yield from _prefixed("mlp", _mlp(layer.mlp, hidden))
    elif isinstance(layer.mlp, MoESpec):
        yield from _prefixed("moe", _moe(layer.mlp, hidden))


def _own(layer: LayerSpec, hidden: int) -> Named:
    """What a layer never shares."""
    if layer.block.beside is not None:
        yield from _prefixed("mixer", _custom(layer.block.beside))
    if layer.block.layer_scalar:
        yield "layer_scalar", Parameter((1,), (None,), "ones", trained=False)
    if layer.block.custom is not None:
        yield from _custom(layer.block.custom)
    if layer.block.shared is not None:
        yield from _updates(layer, layer.block.shared, hidden)


def _updates(layer: LayerSpec, shared: SharedSpec, hidden: int) -> Named:
    """A layer's own updates b @ a of shared kernels: a [projections, rank, in] and b [*out, rank]. Each of the
    projections that are fused in a kernel has an a of its own."""
    block = dict(_block(layer, hidden))
    fused = sum(map(bool, fused_slots(layer.mixer))) if isinstance(layer.mixer, AttentionSpec) else 0
    up = "mlp.gate_up" if "mlp.gate_up.kernel" in block else "mlp.up"
    for path, projections, rank in (("attention.qkv", fused, shared.qkv_rank), (up, 1, shared.mlp_rank)):
        if rank is None:
            continue
        kernel = block.get(f"{path}.kernel")
        if kernel is None:
            raise PluginError(
                f"an update of rank {rank} of the shared {path}.kernel was described, but the layer has no such "
                "kernel: correct the ranks of `SharedSpec`, or the layer's mixer and MLP."
            )
        yield f"{path}.update.a", Parameter((projections, rank, kernel.shape[-1]), (None, None, axes.EMBED))
        yield f"{path}.update.b", Parameter((*kernel.shape[:-1], rank), (*kernel.axes[:-1], axes.LATENT))


def _custom(spec: CustomSpec) -> Named:
    """The parameters that a plugin's own mixer, block or embedding declares."""
    for name, parameter in spec.parameters:
        if not _fits(parameter.axes, parameter.shape):
            raise PluginError(
                f"the part {spec.name!r} gives the axes {parameter.axes} to {name} of shape {parameter.shape}, but "
                f"it needs {len(parameter.shape)} of {', '.join(sorted(axes.PARAMETER_AXES))} or None: correct them."
            )
        yield name, parameter


def _fits(logical: tuple[str | None, ...], shape: tuple[int, ...]) -> bool:
    known = all(axis is None or axis in axes.PARAMETER_AXES for axis in logical)
    return known and len(logical) == len(shape)


def _attention(spec: AttentionSpec, inputs: int, hidden: int) -> Named:
    kv, group, dim, value_dim = spec.num_kv_heads, spec.q_per_kv, spec.head_dim, spec.value_dim
    slots = sum(fused_slots(spec))
    yield "qkv.kernel", Parameter((kv, slots, dim, inputs), (axes.KV_HEADS, axes.QKV, axes.HEAD_DIM, axes.EMBED))
    if spec.qkv_bias:
        yield "qkv.bias", Parameter((kv, slots, dim), (axes.KV_HEADS, axes.QKV, axes.HEAD_DIM), "zeros")
    own_keys = spec.kv_from_layer is None
    if own_keys and not spec.value_is_key and value_dim != dim:
        yield "value.kernel", Parameter((kv, value_dim, inputs), (axes.KV_HEADS, axes.HEAD_DIM, axes.EMBED))
        if spec.qkv_bias:
            yield "value.bias", Parameter((kv, value_dim), (axes.KV_HEADS, axes.HEAD_DIM), "zeros")
    if spec.output_gate is not None:
        each: tuple[int, ...] = (kv, group)
        each_axes: tuple[str, ...] = (axes.KV_HEADS, axes.Q_PER_KV)
        if spec.output_gate.per == "feature":
            each, each_axes = (*each, value_dim), (*each_axes, axes.HEAD_DIM)
        yield "gate.kernel", Parameter((*each, inputs), (*each_axes, axes.EMBED))
        if spec.output_gate.bias:
            yield "gate.bias", Parameter(each, each_axes, "zeros")
    head = (axes.HEAD_DIM,)
    each_q, each_k = (axes.KV_HEADS, axes.Q_PER_KV, axes.HEAD_DIM), (axes.KV_HEADS, axes.HEAD_DIM)
    shared = spec.qk_norm_scope == "head"
    if spec.q_norm is not None:
        yield from _prefixed(
            "q_norm", _norm(spec.q_norm, (dim,) if shared else (kv, group, dim), head if shared else each_q)
        )
    if spec.k_norm is not None and own_keys:
        yield from _prefixed("k_norm", _norm(spec.k_norm, (dim,) if shared else (kv, dim), head if shared else each_k))
    if spec.v_norm is not None and own_keys:
        yield from _prefixed("v_norm", _norm(spec.v_norm, (value_dim,), head))
    if spec.differential is not None:
        for part in ("query", "key"):
            yield f"lambda.{part}", Parameter((2, spec.map_dim), (None, axes.HEAD_DIM))
    if spec.sinks:
        yield "sinks", Parameter((kv, group), (axes.KV_HEADS, axes.Q_PER_KV), "zeros")
    if spec.output_norm is not None:
        yield from _prefixed("output_norm", _norm(spec.output_norm, (kv, group, value_dim), each_q))
    # One merged minor dimension, KV heads outermost: a TPU would pad (q_per_kv, head_dim) to whole tiles.
    yield "output.kernel", Parameter((hidden, kv * group * value_dim), (axes.EMBED, axes.KV_HEADS))
    if spec.output_bias:
        yield "output.bias", Parameter((hidden,), (axes.NORM,), "zeros")


def _mlp(spec: MLPSpec, hidden: int, expert: tuple[int, ...] = ()) -> Named:
    """A dense MLP; `expert` is (number of experts,) when each has its own copy."""
    inner, lead = spec.intermediate_size, (axes.EXPERT,) * len(expert)
    if spec.gated:
        up_axes: tuple[str | None, ...] = (*lead, axes.GATE_UP, axes.MLP, axes.EMBED)
        up_name, up_shape = "gate_up", (*expert, 2, inner, hidden)
    else:
        up_axes, up_name, up_shape = (*lead, axes.MLP, axes.EMBED), "up", (*expert, inner, hidden)
    yield f"{up_name}.kernel", Parameter(up_shape, up_axes)
    if spec.bias:
        yield f"{up_name}.bias", Parameter(up_shape[:-1], up_axes[:-1], "zeros")
    if spec.inner_norm is not None:
        yield from _prefixed("inner_norm", _norm(spec.inner_norm, (inner,), (axes.MLP,)))
    yield from _activation(spec.activation)
    yield "down.kernel", Parameter((*expert, hidden, inner), (*lead, axes.EMBED, axes.MLP))
    if spec.bias:
        yield "down.bias", Parameter((*expert, hidden), (*lead, axes.NORM), "zeros")


def _activation(spec: ActivationSpec) -> Named:
    if spec.name == "xielu":
        yield "activation.alpha_p", Parameter((1,), (None,), "ones")
        yield "activation.alpha_n", Parameter((1,), (None,), "ones")
        yield "activation.beta", Parameter((1,), (None,), "ones", trained=False)
        yield "activation.eps", Parameter((1,), (None,), "zeros", trained=False)


def _moe(spec: MoESpec, hidden: int) -> Named:
    experts, router = spec.choices, spec.router
    dtype = "float32" if router.fp32 else None
    # Every device routes all of its tokens, to experts elsewhere too: a router that is sharded like experts is gathered
    # for each use.
    yield "router.kernel", Parameter((experts, hidden), (axes.ROUTED, axes.EMBED), dtype=dtype)
    if router.bias:
        yield "router.bias", Parameter((experts,), (axes.ROUTED,), "zeros")
    if router.correction_bias:
        # Tiny steps on scores near 1, lost in bfloat16: transformers keeps it in float32, and so do checkpoints.
        yield "router.correction_bias", Parameter((experts,), (axes.ROUTED,), "zeros", "float32", trained=False)
    if router.expert_scale:
        yield "router.expert_scale", Parameter((experts,), (axes.ROUTED,), "ones")
    if router.norm is not None:
        yield from _prefixed("router.norm", _norm(router.norm, (hidden,), (axes.NORM,)))
    if router.input_scale is not None:
        yield "router.scale", Parameter((hidden,), (axes.NORM,), "ones")
    expert = MLPSpec(spec.intermediate_size, spec.activation, spec.gated, spec.expert_bias)
    yield from _prefixed("experts", _mlp(expert, hidden, (spec.num_experts,)))
    if spec.shared is not None:
        yield from _prefixed("shared", _mlp(spec.shared, hidden))
        if spec.shared_gate:
            yield "shared_gate.kernel", Parameter((1, hidden), (None, axes.EMBED))
    if spec.dense is not None:
        yield from _prefixed("dense", _mlp(spec.dense, hidden))


def _norm(spec: NormSpec, shape: tuple[int, ...], logical: tuple[str | None, ...]) -> Named:
    if spec.kind == "none":
        return
    if spec.scale:
        yield "scale", Parameter(shape, logical, "zeros" if spec.offset else "ones")
    if spec.bias:
        yield "bias", Parameter(shape, logical, "zeros")


def _prefixed(prefix: str, named: Named) -> Named:
    for name, parameter in named:
        yield f"{prefix}.{name}", parameter


def _with_axis_overrides(
    table: dict[str, Parameter], overrides: tuple[tuple[str, tuple[str | None, ...]], ...]
) -> dict[str, Parameter]:
    for pattern, logical in overrides:
        try:
            matched = [path for path in table if re.fullmatch(pattern, path)]
        except re.error as error:
            raise PluginError(
                f"the sharding rule {pattern!r} is not a regular expression ({error}): correct the pattern in "
                "`ttpu_sharding_rules`."
            ) from error
        if not matched:
            raise PluginError(
                f"the sharding rule {pattern!r} matches no parameter: correct the pattern in `ttpu_sharding_rules` "
                f"(the first parameters are {', '.join(list(table)[:3])})."
            )
        for path in matched:
            shape = table[path].shape
            if not _fits(logical, shape):
                raise PluginError(
                    f"the sharding rule {pattern!r} gives the axes {logical} to {path} of shape {shape}, but it needs "
                    f"{len(shape)} of {', '.join(sorted(axes.PARAMETER_AXES))} or None: correct `ttpu_sharding_rules`."
                )
            table[path] = replace(table[path], axes=logical)
    return table


def stacked_parameters(spec: ArchitectureSpec) -> dict[str, Parameter]:
    """The parameter table of a decoder that scans over layers: `groups.<g>.<position>.<path>` with a leading layers
    axis instead of `layers.<i>.<path>`. `ttpu_core.mapping.stack_layers` maps these parameters."""
    table = {path: parameter for path, parameter in spec.parameters.items() if not path.startswith(LAYERS)}
    for path, copies in stacked_paths(spec, spec.parameters):
        one = spec.parameters[copies[0]]
        table[path] = replace(one, shape=(len(copies), *one.shape), axes=(axes.LAYERS, *one.axes))
    return table


def stacked_layers(spec: ArchitectureSpec) -> Iterator[tuple[str, LayerSpec, range]]:
    """Each position of each group of repeated layers: the prefix `groups.<g>.<position>`, the layer, and the indices
    of the layers that are stacked there."""
    for number, group in enumerate(spec.groups()):
        period = len(group.unit)
        for place, layer in enumerate(group.unit):
            first = group.start + place
            yield f"{GROUPS}{number}.{place}", layer, range(first, first + group.repeats * period, period)


def stacked_paths(spec: ArchitectureSpec, paths: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """For all `paths` within layers, the stacked path and the paths of its copies in layer order."""
    names: dict[str, list[str]] = {}
    for path in paths:
        if path.startswith(LAYERS):
            _, index, rest = path.split(".", 2)
            names.setdefault(index, []).append(rest)
    for prefix, _, layers in stacked_layers(spec):
        for rest in names.get(str(layers[0]), ()):
            yield f"{prefix}.{rest}", tuple(f"{LAYERS}{layer}.{rest}" for layer in layers)
