"""Granite MoE (`model_type` "granitemoe" and "granitemoeshared"): granite with a mixture of experts in each layer, and
a shared expert beside it if the config has one."""

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import Expression, FlaxMapping, Tensor
from ttpu_core.mapping.layout import CheckpointNames, replace_rules, stacked_experts, standard_mapping
from ttpu_core.spec import ArchitectureSpec, MLPSpec, MoESpec, RouterSpec
from ttpu_zoo import granite

CONFIG_DEFAULTS = {
    **granite.CONFIG_DEFAULTS,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 0,
}
NAMES = CheckpointNames(router="block_sparse_moe.router.layer")
STACKED = ("input_linear.weight", "output_linear.weight")

ttpu_embedding, ttpu_attention = granite.ttpu_embedding, granite.ttpu_attention  # hooks of this module too
ttpu_block, ttpu_head = granite.ttpu_block, granite.ttpu_head


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `GraniteMoeSharedConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MoESpec:
    """Experts weighted by a softmax over the chosen ones."""
    shared, activation = config.require("shared_intermediate_size", int), defaults.activation(config)
    return MoESpec(
        num_experts=config.positive_int("num_local_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=config.positive_int("intermediate_size"),
        activation=activation,
        router=RouterSpec(score="topk_softmax"),
        shared=MLPSpec(shared, activation) if shared else None,
    )


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Names of its own."""
    return mapping(spec, NAMES)


def mapping(spec: ArchitectureSpec, names: CheckpointNames) -> FlaxMapping:
    """The mapping of layers that store their experts in two tensors, and gate and up of the shared expert in one, gate
    first."""
    rules: dict[str, Expression | None] = {**stacked_experts(spec, names, "block_sparse_moe.", tensors=STACKED)}
    hidden = spec.hidden_size
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MoESpec) and layer.mlp.shared is not None:
            inner, name = layer.mlp.shared.intermediate_size, f"model.layers.{index}.shared_mlp."
            gate_up = Tensor(f"{name}input_linear.weight", (2 * inner, hidden))
            rules[f"layers.{index}.moe.shared.gate_up.kernel"] = gate_up.reshape(2, inner, hidden)
            rules[f"layers.{index}.moe.shared.down.kernel"] = Tensor(f"{name}output_linear.weight", (hidden, inner))
    return replace_rules(standard_mapping(spec, names), rules)
