"""An architecture is data: frozen, equal for equal configs, and complete, in that every parameter that a backend will
ask for stands in one table with its shape and its logical axes."""

import copy
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from ttpu_core import Architecture, ModelConfig, default_registry
from ttpu_core.errors import ConfigError, MappingError, PluginError
from ttpu_core.mapping.layout import standard_mapping
from ttpu_core.spec import (
    ActivationSpec,
    AlibiSpec,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    CustomSpec,
    DifferentialSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    OutputGate,
    Parameter,
    RouterSpec,
)
from ttpu_core.spec.arithmetic import expert_shares
from ttpu_core.spec.axes import PARAMETER_AXES
from ttpu_core.spec.rope import RopeSpec

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
}
VOCAB, HIDDEN, KV, GROUP, DIM, INNER, EXPERTS = 11, 16, 2, 3, 4, 5, 6
RMS_NORM, LAYER_NORM = NormSpec(), NormSpec("layer", bias=True)
ATTENTION = AttentionSpec(KV * GROUP, KV, DIM, rope=RopeSpec(rotary_dim=DIM))
MLP = MLPSpec(INNER)


def llama(**changes: Any) -> Architecture:
    return default_registry().architecture(ModelConfig.from_dict(CONFIG | changes), [])


def layer_of(
    mixer: AttentionSpec | MixerSpec = ATTENTION, mlp: Any = MLP, norm: NormSpec = RMS_NORM, **block: Any
) -> LayerSpec:
    return LayerSpec(mixer, mlp, norm, BlockSpec(**block))


def spec_of(*layers: LayerSpec, **changes: Any) -> ArchitectureSpec:
    plain = ArchitectureSpec("any", EmbeddingSpec(VOCAB, HIDDEN), layers, NormSpec(), HeadSpec(), 64)
    return replace(plain, **changes)


# -- a value ---------------------------------------------------------------------------------------------------------


def test_equal_configs_give_equal_specs_and_different_ones_different_specs() -> None:
    one, other = llama().spec, llama().spec
    assert one is not other and one == other and hash(one) == hash(other) and repr(one) == repr(other)
    assert llama().mapping == llama().mapping
    for changes in ({"rms_norm_eps": 1e-5}, {"num_hidden_layers": 2}, {"rope_parameters": None}, {"vocab_size": 33}):
        assert llama(**changes).spec != one and len({one, other, llama(**changes).spec}) == 2


def test_a_spec_is_frozen_to_the_last_part() -> None:
    spec = llama().spec
    parts: list[Any] = [spec, spec.embedding, spec.layers[0], spec.layers[0].mixer, spec.layers[0].mlp, spec.head]
    for part in [*parts, spec.final_norm, spec.layers[0].block, spec.parameters["embed.embedding"]]:
        with pytest.raises(FrozenInstanceError):
            part.anything = 1
    with pytest.raises(TypeError):
        spec.parameters["head.kernel"] = Parameter((1,), (None,))  # type: ignore[index]


def test_a_spec_prints_every_field_of_every_layer() -> None:
    text = repr(llama().spec)
    assert text.startswith("ArchitectureSpec(model_type='llama', embedding=EmbeddingSpec(vocab_size=32, hidden_size=16")
    assert text.count("AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4") == 3 and "_hash" not in text
    assert eval(text, vars(sys.modules["ttpu_core.spec"])) == llama().spec  # so nothing is left out


def test_copies_and_pickles_are_equal_and_carry_nothing_that_was_cached() -> None:
    spec = llama().spec
    assert hash(spec) and spec.parameters  # both are remembered now
    for again in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert again == spec and hash(again) == hash(spec) and again.parameters == spec.parameters
    assert hash(replace(spec, model_type="other")) != hash(spec)


def test_a_pickle_hashes_rightly_in_a_process_that_hashes_strings_otherwise() -> None:
    spec = llama().spec
    assert hash(spec)
    code = (
        "import pickle, sys; one = pickle.load(sys.stdin.buffer); from dataclasses import replace;"
        "assert hash(one) == hash(replace(one)), 'the hash came with the pickle'"
    )
    finished = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(spec), capture_output=True, timeout=60)
    assert finished.returncode == 0, finished.stderr.decode()


def test_a_deep_models_hash_is_computed_once() -> None:
    """jit hashes a static argument at every call; 126 layers (Llama 3.1 405B) take 160 µs to hash."""
    counted: list[int] = []

    class Counted(str):
        def __hash__(self) -> int:
            counted.append(1)
            return super().__hash__()

    spec = spec_of(*(layer_of(),) * 126, model_type=Counted("deep"))
    assert len({hash(spec) for _ in range(5)}) == 1 and len(counted) == 1


def test_query_heads_that_the_kv_heads_cannot_share_are_refused() -> None:
    for heads, kv_heads in ((28, 5), (4, 8), (4, 0), (0, 4)):
        with pytest.raises(ConfigError, match=f"{heads} query heads for {kv_heads} key/value heads"):
            AttentionSpec(heads, kv_heads, 8)
    with pytest.raises(ConfigError, match=r"config\.json has 4 query heads for 3"):
        llama(num_key_value_heads=3)


@pytest.mark.parametrize("activation", ["silu", None])
def test_an_activation_that_is_no_spec_is_refused(activation: Any) -> None:
    words = f"the activation {activation!r}, but an ActivationSpec is needed: write"
    with pytest.raises(ConfigError, match=words):
        MLPSpec(INNER, activation)
    with pytest.raises(ConfigError, match=words):
        MoESpec(2, 1, INNER, activation)


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({"num_hidden_layers": 20_000}, None, "20,000 layers, but at most 2,000 layers are described"),
        ({"num_hidden_layers": 10**9}, None, "1,000,000,000 layers, but at most 2,000"),
        ({"num_hidden_layers": 10**9}, 10**5, "1,000,000,000 layers, but at most 2,000"),
        ({"num_hidden_layers": 1_345}, 21, "1,345 layers, but the checkpoint has 21 tensors, which so many layers"),
        ({"model_type": "gpt2", "n_layer": 10**9}, None, "1,000,000,000 layers, but at most 2,000"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}, None, "1,000,000,000 layers, but at"),
    ],
)
def test_more_layers_than_there_can_be_are_refused_at_once(
    config: dict[str, Any], tensors: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        default_registry().architecture(ModelConfig.from_dict(CONFIG | config), [], tensors=tensors)
    assert str(caught.value).startswith("config.json asks for") and "correct `num_hidden_layers`" in str(caught.value)


def test_experts_that_return_their_input_are_chosen_in_place_of_others() -> None:
    few, many = MoESpec(6, 4, INNER), MoESpec(6, 4, INNER, identity_experts=2)
    active = [spec_of(layer_of(mlp=mlp)).num_active_parameters for mlp in (few, many)]
    expert, router = 3 * INNER * HIDDEN, 2 * HIDDEN
    assert active[1] - active[0] == router - expert  # half of 6 experts instead of 4
    assert expert_shares(many, 1) == (0.5, 0.5)
    assert MoESpec(2, 4, INNER, router=RouterSpec(groups=3, top_groups=2), identity_experts=4).choices == 6
    with pytest.raises(ConfigError, match=r"gives each token 9 of 8 experts, but .* from 1 to 8"):
        replace(many, experts_per_token=9)
    with pytest.raises(ConfigError, match="-1 experts that return their input, but their number must be 0 or more"):
        replace(many, identity_experts=-1)


def test_sizes_follow_from_the_layers() -> None:
    shared = replace(ATTENTION, kv_from_layer=0)
    spec = spec_of(layer_of(replace(ATTENTION, v_head_dim=6)), layer_of(shared))
    assert spec.kv_bytes_per_token(2) == KV * (DIM + 6) * 2  # the second layer keeps none of its own
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (VOCAB, HIDDEN, 2)
    tied = replace(spec, head=HeadSpec(tied=True))
    assert spec.num_parameters - tied.num_parameters == VOCAB * HIDDEN
    assert ATTENTION.softmax_scale == 0.5 and replace(ATTENTION, scale=3.0).softmax_scale == 3.0
    kinds = [ATTENTION, replace(ATTENTION, window=2), replace(ATTENTION, chunk=2)]
    assert [attention.kind for attention in kinds] == ["full", "sliding", "chunked"]


# -- groups of equal layers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("F", ["F×1"]),
        ("F" * 32, ["F×32"]),
        ("sssssF" * 4 + "ss", ["sssssF×4", "s×2"]),  # gemma3 1B: 26 layers
        ("sF" * 21, ["sF×21"]),  # gemma2
        ("LLLF" * 12, ["LLLF×12"]),  # llama4, qwen3-next
        ("D" + "M" * 26, ["D×1", "M×26"]),  # deepseek v2 lite: the first layer is dense
        ("DDD" + "M" * 58, ["D×3", "M×58"]),  # deepseek v3
        ("Fssss" * 9 + "Fss", ["Fssss×9", "F×1", "s×2"]),
        ("abcd", ["a×1", "b×1", "c×1", "d×1"]),
    ],
)
def test_layers_are_grouped_by_the_shortest_unit_that_repeats(pattern: str, expected: list[str]) -> None:
    kinds = {letter: layer_of(replace(ATTENTION, window=ord(letter))) for letter in set(pattern)}
    spec = spec_of(*(kinds[letter] for letter in pattern))
    letters = {layer: letter for letter, layer in kinds.items()}
    groups = spec.groups()
    assert ["".join(letters[layer] for layer in g.unit) + f"×{g.repeats}" for g in groups] == expected
    rebuilt = tuple(layer for g in groups for layer in g.unit * g.repeats)
    assert rebuilt == spec.layers  # nothing lost, nothing moved
    starts = [sum(len(g.unit) * g.repeats for g in groups[:index]) for index in range(len(groups))]
    assert [g.start for g in groups] == starts


# -- the parameter table ---------------------------------------------------------------------------------------------

Table = dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]
QKV = ("kv_heads", "qkv", "head_dim", "embed")
OUTPUT: Table = {"attention.output.kernel": ((HIDDEN, KV * GROUP * DIM), ("embed", "kv_heads"))}
PROJECTIONS: Table = {"attention.qkv.kernel": ((KV, GROUP + 2, DIM, HIDDEN), QKV), **OUTPUT}
DENSE: Table = {
    "mlp.gate_up.kernel": ((2, INNER, HIDDEN), ("gate_up", "mlp", "embed")),
    "mlp.down.kernel": ((HIDDEN, INNER), ("embed", "mlp")),
}
RESIDUAL = ((HIDDEN,), ("norm",))
EACH_HEAD = ("kv_heads", "q_per_kv", "head_dim")


def attention(**changes: Any) -> LayerSpec:
    return layer_of(replace(ATTENTION, **changes), None)


def expert_kernels(experts: int) -> Table:
    return {
        "moe.router.kernel": ((experts, HIDDEN), ("routed", "embed")),
        "moe.experts.gate_up.kernel": ((experts, 2, INNER, HIDDEN), ("expert", "gate_up", "mlp", "embed")),
        "moe.experts.down.kernel": ((experts, HIDDEN, INNER), ("expert", "embed", "mlp")),
    }


# Name → layer, and what the table holds beside the input norm's scale.
LAYERS: dict[str, tuple[LayerSpec, Table]] = {
    "llama": (layer_of(), {**PROJECTIONS, **DENSE, "mlp_norm.scale": RESIDUAL}),
    "attention alone": (attention(), PROJECTIONS),
    "layer norm with bias": (
        layer_of(norm=LAYER_NORM, mlp=None),
        {**PROJECTIONS, "input_norm.bias": RESIDUAL},
    ),
    "parallel": (layer_of(placement="parallel"), {**PROJECTIONS, **DENSE}),
    "parallel with two norms": (
        layer_of(placement="parallel_two_norms"),
        {**PROJECTIONS, **DENSE, "mlp_norm.scale": RESIDUAL},
    ),
    "sandwich": (
        layer_of(placement="sandwich"),
        {
            **PROJECTIONS,
            **DENSE,
            "post_attention_norm.scale": RESIDUAL,
            "mlp_norm.scale": RESIDUAL,
            "post_mlp_norm.scale": RESIDUAL,
        },
    ),
    "biases": (
        layer_of(replace(ATTENTION, qkv_bias=True, output_bias=True), replace(MLP, bias=True)),
        {
            **PROJECTIONS,
            **DENSE,
            "mlp_norm.scale": RESIDUAL,
            "attention.qkv.bias": ((KV, GROUP + 2, DIM), QKV[:3]),
            "attention.output.bias": RESIDUAL,
            "mlp.gate_up.bias": ((2, INNER), ("gate_up", "mlp")),
            "mlp.down.bias": RESIDUAL,
        },
    ),
    "norm of each head": (
        attention(q_norm=NormSpec(), k_norm=NormSpec(), v_norm=NormSpec(scale=False)),
        {
            **PROJECTIONS,
            "attention.q_norm.scale": ((DIM,), ("head_dim",)),
            "attention.k_norm.scale": ((DIM,), ("head_dim",)),
        },
    ),
    "norm over all heads": (
        attention(q_norm=LAYER_NORM, k_norm=NormSpec(), qk_norm_scope="full"),
        {
            **PROJECTIONS,
            "attention.q_norm.scale": ((KV, GROUP, DIM), EACH_HEAD),
            "attention.q_norm.bias": ((KV, GROUP, DIM), EACH_HEAD),
            "attention.k_norm.scale": ((KV, DIM), ("kv_heads", "head_dim")),
        },
    ),
    "norm with a scale per head": (
        attention(q_norm=NormSpec(), k_norm=NormSpec(), qk_norm_scope="per_head"),
        {
            **PROJECTIONS,
            "attention.q_norm.scale": ((KV, GROUP, DIM), EACH_HEAD),
            "attention.k_norm.scale": ((KV, DIM), ("kv_heads", "head_dim")),
        },
    ),
    "values of another size": (
        attention(v_head_dim=6, qkv_bias=True),
        {
            "attention.qkv.kernel": ((KV, GROUP + 1, DIM, HIDDEN), QKV),
            "attention.qkv.bias": ((KV, GROUP + 1, DIM), QKV[:3]),
            "attention.value.kernel": ((KV, 6, HIDDEN), ("kv_heads", "head_dim", "embed")),
            "attention.value.bias": ((KV, 6), ("kv_heads", "head_dim")),
            "attention.output.kernel": ((HIDDEN, KV * GROUP * 6), ("embed", "kv_heads")),
        },
    ),
    "values that are the keys": (
        attention(value_is_key=True),
        {"attention.qkv.kernel": ((KV, GROUP + 1, DIM, HIDDEN), QKV), **OUTPUT},
    ),
    "keys and values of an earlier layer": (
        attention(kv_from_layer=0, q_norm=NormSpec(), k_norm=NormSpec(), v_norm=NormSpec()),
        {
            "attention.qkv.kernel": ((KV, GROUP, DIM, HIDDEN), QKV),
            **OUTPUT,
            "attention.q_norm.scale": ((DIM,), ("head_dim",)),
        },
    ),
    "gate per feature": (
        attention(output_gate=OutputGate(), v_head_dim=6),
        {
            "attention.qkv.kernel": ((KV, GROUP + 1, DIM, HIDDEN), QKV),
            "attention.value.kernel": ((KV, 6, HIDDEN), ("kv_heads", "head_dim", "embed")),
            "attention.gate.kernel": ((KV, GROUP, 6, HIDDEN), (*EACH_HEAD, "embed")),
            "attention.output.kernel": ((HIDDEN, KV * GROUP * 6), ("embed", "kv_heads")),
        },
    ),
    "gate per head": (
        attention(output_gate=OutputGate(per="head")),
        {**PROJECTIONS, "attention.gate.kernel": ((KV, GROUP, HIDDEN), ("kv_heads", "q_per_kv", "embed"))},
    ),
    "sinks and a norm on the output": (
        attention(sinks=True, output_norm=NormSpec()),
        {
            **PROJECTIONS,
            "attention.sinks": ((KV, GROUP), ("kv_heads", "q_per_kv")),
            "attention.output_norm.scale": ((KV, GROUP, DIM), EACH_HEAD),
        },
    ),
    "two softmax maps a head": (
        attention(differential=DifferentialSpec(0.2, NormSpec(scale=False))),
        {
            **PROJECTIONS,
            "attention.lambda.query": ((2, DIM // 2), (None, "head_dim")),
            "attention.lambda.key": ((2, DIM // 2), (None, "head_dim")),
        },
    ),
    "plain mlp with xielu, an inner norm and a learned scalar": (
        layer_of(
            mlp=MLPSpec(INNER, ActivationSpec("xielu"), gated=False, bias=True, inner_norm=NormSpec()),
            layer_scalar=True,
        ),
        {
            **PROJECTIONS,
            "mlp_norm.scale": RESIDUAL,
            "mlp.up.kernel": ((INNER, HIDDEN), ("mlp", "embed")),
            "mlp.up.bias": ((INNER,), ("mlp",)),
            "mlp.inner_norm.scale": ((INNER,), ("mlp",)),
            "mlp.activation.alpha_p": ((1,), (None,)),
            "mlp.activation.alpha_n": ((1,), (None,)),
            "mlp.activation.beta": ((1,), (None,)),
            "mlp.activation.eps": ((1,), (None,)),
            "mlp.down.kernel": ((HIDDEN, INNER), ("embed", "mlp")),
            "mlp.down.bias": RESIDUAL,
            "layer_scalar": ((1,), (None,)),
        },
    ),
    "experts": (
        layer_of(mlp=MoESpec(EXPERTS, 2, INNER)),
        {**PROJECTIONS, **expert_kernels(EXPERTS), "mlp_norm.scale": RESIDUAL},
    ),
    "experts with everything": (
        layer_of(
            mlp=MoESpec(
                EXPERTS,
                2,
                INNER,
                router=RouterSpec(
                    correction_bias=True, bias=True, norm=NormSpec(), input_scale=0.5, expert_scale=True
                ),
                expert_bias=True,
                shared=MLPSpec(7),
                shared_gate=True,
                dense=MLPSpec(9, gated=False),
            )
        ),
        {
            **PROJECTIONS,
            **expert_kernels(EXPERTS),
            "mlp_norm.scale": RESIDUAL,
            "moe.router.bias": ((EXPERTS,), ("routed",)),
            "moe.router.correction_bias": ((EXPERTS,), ("routed",)),
            "moe.router.expert_scale": ((EXPERTS,), ("routed",)),
            "moe.router.norm.scale": RESIDUAL,
            "moe.router.scale": RESIDUAL,
            "moe.experts.gate_up.bias": ((EXPERTS, 2, INNER), ("expert", "gate_up", "mlp")),
            "moe.experts.down.bias": ((EXPERTS, HIDDEN), ("expert", "norm")),
            "moe.shared.gate_up.kernel": ((2, 7, HIDDEN), ("gate_up", "mlp", "embed")),
            "moe.shared.down.kernel": ((HIDDEN, 7), ("embed", "mlp")),
            "moe.shared_gate.kernel": ((1, HIDDEN), (None, "embed")),
            "moe.dense.up.kernel": ((9, HIDDEN), ("mlp", "embed")),
            "moe.dense.down.kernel": ((HIDDEN, 9), ("embed", "mlp")),
        },
    ),
    "experts that return their input": (
        layer_of(
            mlp=MoESpec(
                EXPERTS,
                2,
                INNER,
                router=RouterSpec(correction_bias=True, bias=True, expert_scale=True),
                identity_experts=3,
            )
        ),
        {
            **PROJECTIONS,
            **expert_kernels(EXPERTS),
            "mlp_norm.scale": RESIDUAL,
            "moe.router.kernel": ((EXPERTS + 3, HIDDEN), ("routed", "embed")),
            "moe.router.bias": ((EXPERTS + 3,), ("routed",)),
            "moe.router.correction_bias": ((EXPERTS + 3,), ("routed",)),
            "moe.router.expert_scale": ((EXPERTS + 3,), ("routed",)),
        },
    ),
    "a mixer of a plugin's own": (
        layer_of(MixerSpec("mamba", (("jax", "a:b"),), (("a_log", Parameter((3,), ("mlp",), dtype="float32")),)), None),
        {"mixer.a_log": ((3,), ("mlp",))},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_has_the_parameters_that_its_knobs_ask_for(name: str) -> None:
    layer, expected = LAYERS[name]
    table = spec_of(layer).parameters
    assert next(iter(table)) == "embed.embedding" and list(table)[-2:] == ["final_norm.scale", "head.kernel"]
    found = {
        path.removeprefix("layers.0."): (parameter.shape, parameter.axes)
        for path, parameter in table.items()
        if path.startswith("layers.0.")
    }
    assert found == {**expected, "input_norm.scale": RESIDUAL}


@pytest.mark.parametrize("placement", ["post", "post_residual"])
def test_post_norm_layers_have_no_norm_before(placement: str) -> None:
    table = spec_of(layer_of(placement=placement)).parameters
    norms = [path for path in table if "norm" in path]
    assert norms == ["layers.0.post_attention_norm.scale", "layers.0.post_mlp_norm.scale", "final_norm.scale"]


def test_tables_of_fewer_features_than_the_stream_are_projected_on_either_side() -> None:
    spec = spec_of(layer_of())
    table = replace(spec, embedding=replace(spec.embedding, table_features=5)).parameters
    assert {path: one.shape for path, one in table.items() if not path.startswith("layers.")} == {
        "embed.embedding": (spec.vocab_size, 5),
        "embed.projection.kernel": (HIDDEN, 5),
        "final_norm.scale": (HIDDEN,),
        "final_projection.kernel": (5, HIDDEN),
        "head.kernel": (spec.vocab_size, 5),
    }


def test_a_block_of_a_plugins_own_adds_its_parameters_to_those_of_the_layers_parts() -> None:
    block = CustomSpec("odd", (("jax", "a:b"),), (("weight", Parameter((2, 3), (None, "embed"))),))
    plain, own = spec_of(layer_of(placement="none")), spec_of(layer_of(placement="none", custom=block))
    assert own.parameters.keys() - plain.parameters.keys() == {"layers.0.weight"}
    assert not any("norm" in path for path in own.parameters if path.startswith("layers."))


def test_an_embedding_of_a_plugins_own_adds_its_parameters_to_the_table() -> None:
    custom = CustomSpec("streams", parameters=(("streams.kernel", Parameter((2, 3), (None, "embed"))),))
    table = spec_of(layer_of(), embedding=EmbeddingSpec(VOCAB, HIDDEN, custom=custom)).parameters
    assert [path for path in table if path.startswith("embed")] == ["embed.embedding", "embed.streams.kernel"]


def test_a_layer_whose_keys_others_read_stands_alone_among_the_groups() -> None:
    own, reader = layer_of(), layer_of(replace(ATTENTION, kv_from_layer=2))
    spec = spec_of(own, own, own, reader, reader)
    assert spec.kv_sources == {2}
    assert [(group.start, group.repeats) for group in spec.groups()] == [(0, 2), (2, 1), (3, 2)]


def test_embedding_and_head_have_the_parameters_that_they_ask_for() -> None:
    embedding = EmbeddingSpec(VOCAB, HIDDEN, norm=LAYER_NORM, positions=20, position_offset=2)
    table = spec_of(layer_of(), embedding=embedding, head=HeadSpec(tied=True, bias=True), final_norm=None).parameters
    outside = {path: (p.shape, p.axes) for path, p in table.items() if not path.startswith("layers.")}
    assert outside == {
        "embed.embedding": ((VOCAB, HIDDEN), ("vocab", "embed")),
        "embed.positions": ((22, HIDDEN), ("position", "embed")),
        "embed.norm.scale": RESIDUAL,
        "embed.norm.bias": RESIDUAL,
        "head.bias": ((VOCAB,), ("vocab",)),
    }


def test_every_parameter_has_one_known_axis_per_dimension() -> None:
    table = spec_of(*(layer for layer, _ in LAYERS.values())).parameters
    assert len(table) == 3 + sum(len(expected) + 1 for _, expected in LAYERS.values())
    for path, parameter in table.items():
        assert len(parameter.axes) == len(parameter.shape), path
        assert {*parameter.axes} <= PARAMETER_AXES | {None}, path
        named = [axis for axis in parameter.axes if axis is not None]
        assert len(named) == len(set(named)), path  # a mesh axis cannot cut one array twice
        assert min(parameter.shape) > 0 and parameter.size > 0


def test_a_scale_that_is_added_to_one_starts_at_zero() -> None:
    table = spec_of(layer_of(norm=NormSpec(offset=1.0)), final_norm=LAYER_NORM).parameters
    assert table["layers.0.input_norm.scale"].init == "zeros"
    assert table["final_norm.scale"].init == "ones" and table["final_norm.bias"].init == "zeros"


# -- sharding rules --------------------------------------------------------------------------------------------------


def test_a_sharding_rule_replaces_the_axes_of_the_parameters_that_it_matches() -> None:
    rules = ((r"layers\.\d+\.mlp\.down\.kernel", (None, "mlp")), (r"layers\.1\..*down\.kernel", ("embed", None)))
    table = spec_of(layer_of(), layer_of(), parameter_axes=rules).parameters
    assert table["layers.0.mlp.down.kernel"].axes == (None, "mlp")
    assert table["layers.1.mlp.down.kernel"].axes == ("embed", None)  # the last rule that matches
    plain = spec_of(layer_of(), layer_of()).parameters
    assert {path for path in plain if plain[path] != table[path]} == {f"layers.{i}.mlp.down.kernel" for i in (0, 1)}


@pytest.mark.parametrize(
    ("pattern", "logical", "words"),
    [
        ("mlp.down.kernel", ("embed", "mlp"), "matches no parameter"),  # a pattern is of the whole path
        (r".*down\.kernel", ("mlp",), "needs 2 of"),
        (r".*down\.kernel", ("embed", "tensor"), "needs 2 of"),  # a mesh axis is not a logical one
        (r".*down\.kernel", ("batch", "mlp"), "needs 2 of"),  # an activation's axis
        (r".*down(\.kernel", ("embed", "mlp"), "not a regular expression"),
    ],
)
def test_a_sharding_rule_that_cannot_hold_is_refused(pattern: str, logical: tuple[str, ...], words: str) -> None:
    with pytest.raises(PluginError, match=words) as caught:
        _ = spec_of(layer_of(), parameter_axes=((pattern, logical),)).parameters
    assert repr(pattern) in str(caught.value) and "`ttpu_sharding_rules`" in str(caught.value)


@pytest.mark.parametrize("logical", [("tensor",), ("mlp", "embed")])
def test_a_mixers_parameters_are_held_to_the_same_axes(logical: tuple[str, ...]) -> None:
    mixer = MixerSpec("mamba", (("jax", "a:b"),), (("a_log", Parameter((3,), logical)),))
    with pytest.raises(PluginError, match="part 'mamba' gives the axes"):
        _ = spec_of(layer_of(mixer)).parameters


# -- the standard mapping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in LAYERS if "mixer" not in name])
def test_the_standard_mapping_serves_every_layer_without_a_mixer_of_its_own(name: str) -> None:
    spec = spec_of(LAYERS[name][0])
    standard_mapping(spec).check_parameters(spec.parameters)


def test_the_standard_mapping_serves_a_layer_that_reads_an_earlier_ones_keys() -> None:
    layer = attention(kv_from_layer=0, q_norm=NormSpec(), k_norm=NormSpec())
    spec = spec_of(layer)
    standard_mapping(spec).check_parameters(spec.parameters)


def test_a_mixers_parameters_need_rules_of_the_plugins_own() -> None:
    mixer = MixerSpec("mamba", (("jax", "a:b"),), (("a_log", Parameter((3,), ("mlp",))),))
    spec = spec_of(layer_of(mixer))
    with pytest.raises(MappingError, match=r"no rule for the parameter 'layers\.0\.mixer\.a_log'"):
        standard_mapping(spec).check_parameters(spec.parameters)


def test_the_slopes_of_alibi_are_those_of_its_paper_and_of_bloom_between_powers_of_two() -> None:
    assert AlibiSpec().slopes(8) == tuple(2.0**-power for power in range(1, 9))
    assert AlibiSpec(max_bias=4.0).slopes(2) == (0.25, 0.0625)
    assert AlibiSpec().slopes(6) == (0.25, 0.0625, 2.0**-6, 2.0**-8, 0.5, 0.125)
    assert AlibiSpec().slopes(1) == (2.0**-8,)
