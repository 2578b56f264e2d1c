"""Predicts the peak memory of a program on each device. It takes an architecture, a mesh and a workload, and returns
bytes by purpose. The total predicts the TPU compiler's `peak_memory_in_bytes` from the arrays that the programs of
`ttpu_jax.aot.steps` hold, without compiling anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ttpu_core.quantization.quantize import planned_spec
from ttpu_core.sharding.hardware import Chip
from ttpu_core.sharding.serving import ServedShapes
from ttpu_core.sharding.shares import LANES
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_core.sharding.training_state import ADAMW, fits_over
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, LayerGroup, LayerSpec, MLPSpec, axes
from ttpu_core.spec.arithmetic import BITS, cached_bits, kept_slots
from ttpu_plan.activations import kept_beside_input, needed, normalized, working_set
from ttpu_plan.estimate import MemoryEstimate
from ttpu_plan.optimizer_state import state_bytes
from ttpu_plan.plan import replica_mesh
from ttpu_plan.shards import LayerShards, ModelShards, ParameterShard, Shape, shard_model, tiled_bytes
from ttpu_plan.tokens import axes_of_rows, local_tokens, summed_in_ring
from ttpu_plan.workload import Workload
from ttpu_plan.zero import stage_of, state_strategy, weight_strategy

CACHE_AXES = (axes.BATCH, axes.KV_HEADS, axes.SEQUENCE, axes.HEAD_DIM)
STATE = ADAMW
"""What the training step holds for each parameter: the definition that the step itself reads."""

PROGRAM_BYTES = 32 * 2**20
"""What every program keeps beside the arrays counted here: constants, small temporaries, and room between arrays. The
rest of decode programs, libtpu 0.0.42, is 20 to 110 MiB."""

GATHERED_LAYERS = 2
"""Layers of one turn of a loop whose weights are gathered at once: while one is computed, those of the next come."""

SORTED, SAMPLER_BYTES = 3, 96 * 2**20
"""An engine's sampler takes at most so many copies of a device's logits of a step, in float32, and so many bytes beside
them (libtpu 0.0.42: 15 to 106 MB for 32 and 256 rows of Llama-3.1-8B and gemma-3-12b)."""

STREAMS = 3
"""Copies of the residual stream that exist at once around a layer: its input, its sub-layer's input, its output."""


def estimate_memory(
    spec: ArchitectureSpec,
    mesh: Mapping[str, int],
    workload: Workload,
    strategy: Strategy = DEFAULT_STRATEGY,
    chip: Chip | None = None,
    shapes: ServedShapes | None = None,
) -> MemoryEstimate:
    """Estimate the peak memory of a program on each device.

    Args:
        mesh: mesh axis → devices along it.
        chip: where the program runs, for what not every generation's compiler does.
        shapes: what the engine compiles and keeps on one replica, where `workload` is a step of its.

    Raises:
        UnsupportedError: a parameter that the mesh cannot divide.
    """
    spec = planned_spec(spec, workload.quantization)
    if shapes is not None:
        return _serving(shard_model(spec, replica_mesh(mesh), strategy), workload, shapes)
    if workload.task == "train":
        stage = stage_of(mesh, strategy, workload.settings.zero_stage)
        weights = shard_model(spec, mesh, weight_strategy(mesh, strategy, stage))
        state = shard_model(spec, mesh, state_strategy(spec, mesh, strategy, stage))
        return _training(weights, state, state if stage >= 2 else weights, workload, chip, rounds_all=stage in (1, 2))
    return _inference(shard_model(spec, mesh, strategy), workload, chip)


def cache_bytes(model: ModelShards, workload: Workload) -> int:
    """Return the bytes of keys, values and states of all layers on one device."""
    return sum(kind.count * _layer_cache(model, kind.layer, workload) for kind in model.layers)


def weight_bytes(
    shards: Iterable[ParameterShard], workload: Workload, bits: float | None = None, *, gathered: bool = False
) -> int:
    """Return the bytes of the parameters on one device, padded to tiles; `bits` are those of each element, by default
    the workload's."""
    total = 0
    for one in shards:
        if one.parts and bits is None:
            total += weight_bytes(one.parts, workload, gathered=gathered)
        else:
            each = bits or BITS[one.parameter.dtype or workload.dtype]
            total += tiled_bytes(one.gathered if gathered else one.local, each)
    return total


def _inference(model: ModelShards, workload: Workload, chip: Chip | None) -> MemoryEstimate:
    """Weights and cache, once, since the updated cache lies where the given one was; on top of them what the largest
    layer has at once, and logits of one token a row, as the head gives them and as they are searched."""
    rows, tokens = local_tokens(model, workload)
    item = workload.bytes_per_element
    logits = 2 * tiled_bytes((rows, model.head.gathered[0]), 32)
    activations = max((working_set(model, kind, workload) for kind in model.layers), default=0)
    if workload.task == "decode":
        # Scores of attention without a kernel, as some layers have it: float32 logits and their softmax, over all slots
        # that are kept.
        activations += max((_scores(model, kind.layer, workload) for kind in model.layers), default=0)
    activations += STREAMS * rows * tokens * model.spec.hidden_size * item
    return MemoryEstimate(
        weights=_stored(model, workload),
        cache=cache_bytes(model, workload),
        activations=activations,
        logits=logits,
        temporaries=PROGRAM_BYTES + _gathered_for_inference(model, workload) + _relaid(model, workload, chip),
    )


def _serving(model: ModelShards, workload: Workload, shapes: ServedShapes) -> MemoryEstimate:
    """Weights, and the pages of all sequences, once: a step writes them where they are. On top of them what the largest
    layer has at once, the residual stream, which a step gives back, and the logits of the wanted rows."""
    assert workload.step is not None
    decode = replace(workload, task="decode", step=shapes.decode)
    mixed = replace(workload, task="mixed", step=shapes.mixed)
    activations = _of_step(model, workload)
    logits = tiled_bytes((workload.step.rows, model.head.gathered[0]), 32)
    rows = max(shapes.decode.rows, shapes.mixed.rows)
    sampler = SORTED * tiled_bytes((rows, model.head.gathered[0]), 32) + SAMPLER_BYTES
    step = max(_of_step(model, decode), _of_step(model, mixed))
    stream = shapes.mixed.tokens * model.spec.hidden_size * workload.bytes_per_element
    before = stream + tiled_bytes((shapes.mixed.rows, model.head.gathered[0]), 32)
    return MemoryEstimate(
        weights=_stored(model, workload),
        cache=shapes.cache_bytes,
        activations=activations,
        logits=logits,
        temporaries=PROGRAM_BYTES,
        sampling=shapes.state_bytes + before + max(0, sampler - step) + step - activations,
    )


def _of_step(model: ModelShards, workload: Workload) -> int:
    _, tokens = local_tokens(model, workload)
    widest = max((working_set(model, kind, workload) for kind in model.layers), default=0)
    return widest + STREAMS * tokens * model.spec.hidden_size * workload.bytes_per_element


def _stored(model: ModelShards, workload: Workload) -> int:
    return sum(count * weight_bytes(shards, workload) for count, shards in _parts(model))


def _parts(model: ModelShards) -> list[tuple[int, tuple[ParameterShard, ...]]]:
    """The model's ends, and what is in its layers with how many there are."""
    return [(1, model.ends), *_inner(model)]


def _inner(model: ModelShards) -> list[tuple[int, tuple[ParameterShard, ...]]]:
    """Shared blocks, and each kind of layer with how many there are."""
    return [(1, model.shared), *((kind.count, kind.parameters) for kind in model.layers)]


def _gathered_for_inference(model: ModelShards, workload: Workload) -> int:
    """Weights that are sharded along the tokens' axes are gathered, quantized ones as they are stored. In a loop over
    layers that is a layer's, while those of the next are on their way; unrolled, the compiler (libtpu 0.0.42) gathers
    those of all layers at once."""
    layers = []
    for kind in model.layers:
        whole = [one for one in kind.used if one.local != one.gathered]
        layers.append((kind.count, weight_bytes(whole, workload, gathered=True)))
    head = weight_bytes([model.head], workload, gathered=True) if model.head.local != model.head.gathered else 0
    if workload.layers == "unrolled":
        return sum(count * size for count, size in layers) + head
    return max(2 * max((size for _, size in layers), default=0), head)


def _relaid(model: ModelShards, workload: Workload, chip: Chip | None) -> int:
    """Prefill in a loop over layers on tpu7x: the compiler (libtpu 0.0.42) wants the stacked dense kernels in another
    order of dimensions than they are given, and copies them whole before the loop."""
    if chip is None or chip.name != "tpu7x" or workload.task != "prefill" or workload.layers != "scan":
        return 0
    return sum(
        kind.count * weight_bytes([one for one in kind.parameters if one.is_matrix and not one.of_experts], workload)
        for kind in model.layers
    )


def _training(
    model: ModelShards,
    state: ModelShards,
    given: ModelShards,
    workload: Workload,
    chip: Chip | None,
    *,
    rounds_all: bool,
) -> MemoryEstimate:
    """Master weights and moments, in place, and the largest of some moments of the step. Stages of ZeRO divide what is
    held between steps (`state`) and the gradients (`given`) otherwise than the weights (`model`).

    Where an update has parts, their gradients are summed in float32, all the while. Of an optimizer's state on the host
    that of the embedding and the head is brought to the devices whole, and that of others layer by layer.

    *The loss*, for which the devices that share the head divide the vocabulary, each having the tokens of all of
    them: what is kept of the layers; the head as it is stored, and as the vocabulary is divided; its gradient in
    float32, of a part of the tokens and the sum so far; these tokens' streams and their gradients; their logits in
    float32. *The backward pass of a turn*: what is kept of the layers; the gradients of all layers, rounded, but
    for those that are written over what is kept of layers; the weights of two of the turn's layers gathered, and all
    that the gradients of the turn need; the gradient of the largest kernel that devices do not sum in a ring,
    rounded, before it is scattered. *The embedding's gradient*, after the layers: all gradients, and that of the
    table's own features in float32, and as it is given to the optimizer. *The update*, where the optimizer's state
    is on the host, so that it goes layer by layer: all gradients in float32, the head's also as the vocabulary is
    divided; and the new state of the embedding and the head.

    Args:
        model: the weights that the step computes with.
        state: the master weights.
        given: the gradients.
        workload: the step.
        chip: of the devices.
        rounds_all: the weights of all layers are rounded at once, as in stages 1 and 2, instead of each where it is
            used.
    """
    item, bits = workload.bytes_per_element, BITS[workload.dtype]
    settings = workload.settings
    rows, tokens = local_tokens(model, workload)
    stream = STREAMS * rows * tokens * model.spec.hidden_size * item
    weights = sum(count * weight_bytes(shards, workload, BITS[STATE.master_dtype]) for count, shards in _parts(state))
    held_by_layers = [(one, count) for count, parameters in _inner(state) for one in parameters]
    of_ends = sum(state_bytes(one, 1, settings) for one in state.ends)
    held = of_ends + sum(state_bytes(one, count, settings) for one, count in held_by_layers)
    brought = of_ends + max((state_bytes(one, 1, settings) for one, _ in held_by_layers), default=0)
    summed, of_sum = 0, BITS[STATE.gradient_dtype]
    if settings.gradient_accumulation_steps > 1:
        summed = sum(count * weight_bytes(shards, workload, of_sum) for count, shards in _parts(given))
    rounded = relaid = 0
    if not rounds_all:
        rounded, relaid = _rounded_before_loop(state, workload), _relaid_table(state, workload)
    else:
        rounded = sum(count * weight_bytes(parameters, workload, bits) for count, parameters in _inner(model))
    head, table = model.head, model.end("embed.embedding")
    assert table is not None
    gradients = sum(count * weight_bytes(parameters, workload, bits) for count, parameters in _inner(given))
    stored_head, head_gradient = (weight_bytes([one.head], workload, bits) for one in (model, given))

    kept, turn = _kept(model, workload), _largest_backward(model, workload, chip)
    of_head = {axis for each in head.mesh_axes for axis in each}
    of_rows = axes_of_rows(model, workload)
    together = rows * min(tokens, STATE.loss_tokens) * prod(model.mesh[axis] for axis in of_head & of_rows)
    words = head.parameter.shape[0] // prod(model.mesh[axis] for axis in of_head)
    in_loss = {
        "gradients": 2 * 32 // bits * stored_head,
        "activations": kept + stream + 2 * together * model.spec.hidden_size * item,
        "logits": tiled_bytes((together, words), 32),
        "temporaries": rounded + 2 * stored_head,
    }
    in_turn = {
        "gradients": gradients + head_gradient - _over_activations(model, workload),
        "activations": kept + turn.saved + stream,
        "temporaries": rounded + turn.gathered + turn.gradient,
    }
    at_table = {
        "gradients": gradients + 2 * head_gradient,
        "activations": stream,
        "temporaries": 2 * weight_bytes([table], workload, 32),
    }
    in_update = {
        "gradients": sum(count * weight_bytes(shards, workload, 32) for count, shards in _parts(given)),
        "activations": 0,
        "temporaries": of_ends + 32 // bits * stored_head,
    }
    moments = (in_loss, in_turn, at_table, *((in_update,) if settings.offload_optimizer else ()))
    peak = max(moments, key=lambda moment: sum(moment.values()))
    return MemoryEstimate(
        weights=weights,
        optimizer=0 if settings.offload_optimizer else held,
        gradients=peak["gradients"] + summed,
        activations=peak["activations"],
        logits=peak.get("logits", 0),
        temporaries=peak["temporaries"] + relaid + PROGRAM_BYTES + (brought if settings.offload_optimizer else 0),
    )


def _over_activations(model: ModelShards, workload: Workload) -> int:
    """The gradients that a loop over layers writes over what is kept of the layers (`ttpu_jax.train.backward_loop`): in
    each kind of layer those of a kernel as wide as its input, and of one as wide as an MLP's products where these are
    kept. The features of both are sharded over the whole mesh as rows are."""
    rows, tokens = local_tokens(model, workload)
    of_rows = model.axes_of(axes.BATCH, workload.rows_at_once)
    if workload.layers != "scan" or prod(model.mesh[axis] for axis in of_rows) != prod(model.mesh.values()):
        return 0

    def fits(one: ParameterShard, width: int) -> bool:
        features, *rest = one.local
        lies_as_rows = tuple(axis for axis in one.mesh_axes[0] if model.mesh[axis] > 1) == of_rows
        return one.is_matrix and rest == [width] and lies_as_rows and fits_over(features, rows, tokens)

    bits, found = BITS[workload.dtype], 0
    for kind in model.layers:
        widths = {model.spec.hidden_size}
        if isinstance(kind.layer.mlp, MLPSpec) and workload.settings.remat in ("gate", "mlp"):
            widths.add(kind.layer.mlp.intermediate_size)
        for width in widths:
            fitting = [one for one in kind.parameters if fits(one, width) and _fills_lanes(one)]
            found += kind.count * weight_bytes(fitting[:1], workload, bits)
    return found


def _rounded_before_loop(state: ModelShards, workload: Workload) -> int:
    """The rounded copy of the weights of all layers whose features on a device do not fill lanes, which a training step
    makes before its loop over layers (`ttpu_jax.train.step`). Not of an MLP's fused kernel, which its module takes
    apart before it rounds it."""
    bits = BITS[workload.dtype]
    return sum(
        kind.count * weight_bytes([one], workload, bits)
        for kind in state.layers
        for one in kind.parameters
        if one.is_matrix and not _fills_lanes(one) and not one.path.endswith("mlp.gate_up.kernel")
    )


def _relaid_table(state: ModelShards, workload: Workload) -> int:
    """The table of tokens with its moments where its features on a device do not fill lanes: the compiler (libtpu
    0.0.42) wants them in another order of dimensions than they are given, and copies them."""
    table = state.end("embed.embedding")
    if table is None or _fills_lanes(table):
        return 0
    moments = 0 if workload.settings.offload_optimizer else state_bytes(table, 1, workload.settings)
    return weight_bytes([table], workload, BITS[STATE.master_dtype]) + moments


def _fills_lanes(one: ParameterShard) -> bool:
    return one.local[-1] % LANES == 0


@dataclass(frozen=True, slots=True)
class _Backward:
    """Bytes in the backward pass of one turn of a loop over layers, or of one layer where they are unrolled."""

    gathered: int = 0
    gradient: int = 0  # of the largest kernel that is whole before it is scattered
    saved: int = 0  # of all layers of the turn, whose inputs are there at once

    @property
    def total(self) -> int:
        return self.gathered + self.gradient + self.saved


def _kept(model: ModelShards, workload: Workload) -> int:
    """What stays of the layers until their backward pass: the input of each, and what is not computed again of all that
    its gradients need."""
    rows, tokens = local_tokens(model, workload)
    stream = rows * tokens * model.spec.hidden_size * workload.bytes_per_element
    return sum(kind.count * (stream + kept_beside_input(model, kind, workload)) for kind in model.layers)


def _largest_backward(model: ModelShards, workload: Workload, chip: Chip | None) -> _Backward:
    bits, of_rows = BITS[workload.dtype], axes_of_rows(model, workload)
    found = [_Backward()]
    for layers in _turns(model, workload):
        gathered = gradient = saved = in_norms = 0
        of_experts: list[int] = []
        for place, kind in enumerate(layers):
            of_experts = [tiled_bytes(one.gathered, bits) for one in kind.used if one.of_experts]
            others = [one for one in kind.used if not one.of_experts]
            if place >= len(layers) - GATHERED_LAYERS:
                gathered += weight_bytes(others, workload, bits, gathered=True) + sum(of_experts)
            scattered = [one for one in others if one.local != one.gathered and not summed_in_ring(one, of_rows, chip)]
            gradient = max(gradient, *of_experts, *(tiled_bytes(one.gathered, bits) for one in scattered), 0)
            if workload.settings.remat != "none":
                saved += needed(model, kind, workload) - kept_beside_input(model, kind, workload)
            in_norms = max(in_norms, normalized(model, kind, workload))
        # The layer whose gradient is computed first has the kernels of its mixture one after the other.
        gathered -= sum(of_experts) - max(of_experts, default=0)
        kept = workload.settings.remat == "none"
        found.append(_Backward(gathered, gradient, saved + (0 if kept else in_norms)))
    return max(found, key=lambda turn: turn.total)


def _turns(model: ModelShards, workload: Workload) -> list[list[LayerShards]]:
    """The layers of one turn of each loop over layers, in which the compiler gathers ahead; unrolled, each layer."""
    if workload.layers == "unrolled":
        return [[kind] for kind in model.layers]
    kinds = {kind.layer: kind for kind in reversed(model.layers)}
    return [[kinds[layer] for layer in group.unit] for group in layer_groups(model.spec)]


@lru_cache(maxsize=256)
def layer_groups(spec: ArchitectureSpec) -> tuple[LayerGroup, ...]:
    """Return `spec.groups()`, cached because it compares many layers."""
    return spec.groups()


def layer_cache_shapes(model: ModelShards, layer: LayerSpec, workload: Workload) -> Iterable[tuple[Shape, float]]:
    """Return the shape on one device and the bits per element, scales included, of each array in a layer's cache."""
    batch, slots, mixer = workload.batch, workload.context, layer.mixer
    if isinstance(mixer, AttentionSpec) and mixer.kv_from_layer is None:
        # Of pages, what is attended to is counted elsewhere.
        tokens = kept_slots(mixer, slots) if workload.step is None else slots
        for dim in (mixer.head_dim, mixer.value_dim):
            shape = (batch, mixer.num_kv_heads, tokens, dim)
            yield model.local_shape(CACHE_AXES, shape), cached_bits(workload.cache_dtype, dim)
    for state in (state for mixer in layer.mixers for state in mixer.state):
        sizes = (slots if axis == axes.SEQUENCE else size for size, axis in zip(state.shape, state.axes, strict=True))
        kept = state.dtype or (workload.cache_dtype if axes.SEQUENCE in state.axes else workload.dtype)
        yield model.local_shape((axes.BATCH, *state.axes), (batch, *sizes)), BITS[kept]


def _layer_cache(model: ModelShards, layer: LayerSpec, workload: Workload) -> int:
    return sum(tiled_bytes(shape, bits) for shape, bits in layer_cache_shapes(model, layer, workload))


def _scores(model: ModelShards, layer: LayerSpec, workload: Workload) -> int:
    if not isinstance(layer.mixer, AttentionSpec):
        return 0
    slots = kept_slots(layer.mixer, workload.context)
    shape = (workload.batch, layer.mixer.num_kv_heads, slots, layer.mixer.q_per_kv)
    return 2 * tiled_bytes(model.local_shape(CACHE_AXES, shape), 32)
