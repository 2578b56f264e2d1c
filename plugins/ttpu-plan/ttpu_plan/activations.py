"""The activations of a layer on one device: what its products need at once, what their gradients need, and what a
training step keeps of it for the backward pass."""

from __future__ import annotations

from math import prod

from ttpu_core.sharding.training_state import ATTENTION, GATE, SAVED, UP
from ttpu_core.spec import AttentionSpec, LayerSpec, MoESpec, axes
from ttpu_core.spec.latent_attention import LatentAttentionSpec
from ttpu_core.spec.parameters import norm_names
from ttpu_plan.shards import LayerShards, ModelShards, ParameterShard
from ttpu_plan.tokens import exchange_for, expert_rows, local_tokens
from ttpu_plan.workload import Workload

FLOAT32_BYTES = 4


def working_set(model: ModelShards, kind: LayerShards, workload: Workload) -> int:
    """What the widest product of a layer gives, in float32; of a mixture's experts also the rows given to them, their
    results and their sum, each of a token's experts having a row, and the rows that devices send each other."""
    rows, tokens = local_tokens(model, workload)
    widest = experts = 0
    for one in kind.used:
        if one.of_experts and one.is_matrix:
            assert isinstance(kind.layer.mlp, MoESpec)
            given = expert_rows(model, kind.used, workload, kind.layer.mlp)
            inner = prod(one.gathered[1:-1])
            if not one.path.endswith("down.kernel"):
                row = model.spec.hidden_size * workload.bytes_per_element
                experts = given * (3 * row + 4 * inner)
                if exchange_for(model, kind.used, workload):  # what is sent and what comes back
                    experts += rows * tokens * kind.layer.mlp.experts_per_token * (2 + (workload.task == "train")) * row
        elif one.is_matrix:
            widest = max(widest, 4 * rows * tokens * prod(one.gathered[:-1]))
    return max(widest, experts)


def needed(model: ModelShards, kind: LayerShards, workload: Workload) -> int:
    """What the gradients of a layer's products need: the input and the result of each, rounded; of a mixture's experts
    what `working_set` counts."""
    rows, tokens = local_tokens(model, workload)
    item = workload.bytes_per_element
    experts = products = 0
    for one in kind.used:
        if one.of_experts:
            experts = working_set(model, kind, workload)
        elif one.is_matrix:
            products += item * (one.gathered[-1] + prod(one.gathered[:-1]))
    return rows * tokens * products + experts


def normalized(model: ModelShards, kind: LayerShards, workload: Workload) -> int:
    """The inputs of a layer's norms, in float32."""
    rows, tokens = local_tokens(model, workload)
    return FLOAT32_BYTES * rows * tokens * len(norm_names(kind.layer)) * model.spec.hidden_size


def kept_beside_input(model: ModelShards, kind: LayerShards, workload: Workload) -> int:
    """What a training step keeps of a layer beside its input, as its `remat` says."""
    remat = workload.settings.remat
    if remat == "none":
        return needed(model, kind, workload) + normalized(model, kind, workload)
    rows, tokens = local_tokens(model, workload)
    read = [one for one in kind.used if product_is_needed(one, kind)]
    widths = sum(kept_share(one, kind.layer, remat) * prod(one.gathered[:-1]) for one in read)
    size = widths * workload.bytes_per_element
    if isinstance(kind.layer.mixer, AttentionSpec | LatentAttentionSpec) and keeps_attention(remat):
        size += _of_kernel(model, kind.layer.mixer, workload)
    return round(rows * tokens * size)


def kept_share(one: ParameterShard, layer: LayerSpec, remat: str) -> float:
    """The share of a product's results that are kept for the backward pass. Those of a mixture's experts are another
    operation's, and only kept where everything is."""
    names = SAVED.get(remat, ())
    if remat == "none" or (remat == "dots" and not one.of_experts):
        return 1.0
    if one.of_experts:
        return 0.0
    if one.path.endswith("gate_up.kernel"):
        return ((GATE in names) + (UP in names)) / 2
    if one.path.endswith("mlp.up.kernel"):
        return float(UP in names)
    latent = isinstance(layer.mixer, LatentAttentionSpec) and one.path.startswith("mixer.")
    return float(ATTENTION in names and (latent or one.path.startswith("attention.")))


def keeps_attention(remat: str) -> bool:
    """Whether the result of attention before its output projection is kept, and its kernel's statistics."""
    return remat == "none" or ATTENTION in SAVED.get(remat, ())


def product_is_needed(one: ParameterShard, kind: LayerShards) -> bool:
    """Whether a product is one whose result the backward pass reads. That of a dense MLP's last product goes to the
    residual stream alone where no norm follows."""
    last = one.path.endswith("mlp.down.kernel") and "post_mlp_norm" not in norm_names(kind.layer)
    return one.is_matrix and not last


def _of_kernel(model: ModelShards, mixer: AttentionSpec | LatentAttentionSpec, workload: Workload) -> int:
    """Bytes of a token's result of attention, and of its statistics: a float32 for each head."""
    attention = isinstance(mixer, AttentionSpec)
    groups = mixer.num_kv_heads if isinstance(mixer, AttentionSpec) else mixer.num_heads
    dim = mixer.value_dim if isinstance(mixer, AttentionSpec) else mixer.v_head_dim
    heads = mixer.num_heads // model.devices(axes.KV_HEADS if attention else axes.Q_HEADS, groups)
    return heads * (dim * workload.bytes_per_element + FLOAT32_BYTES)
