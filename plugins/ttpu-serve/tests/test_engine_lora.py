"""LoRA adapters: a request with an adapter gets what a model with the adapter merged into its weights would say, next
to requests with others and with none, and adapters come and go while the engine serves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from engine_cases import NEW, PROMPTS, Oracle, add, answers, collect, finish, small_engine, with_weights
from safetensors.numpy import load_file, save_file
from test_padded import LAYERS, architecture

from ttpu import AutoModelForTPU
from ttpu_core.errors import BusyError, CheckpointError, MappingError, RequestError, TTPUError, UnsupportedError
from ttpu_core.mapping import gather
from ttpu_core.mapping.layout import standard_mapping
from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.spec import Parameter, axes
from ttpu_jax.aot.compile import compile_for
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.model.modules import Linear, Parameters, Runtime
from ttpu_jax.ops.kernels import LowRankKernel, dense, map_arrays, quantize, with_adapters
from ttpu_jax.params.adapter_sites import make_site, reached_tensors
from ttpu_jax.params.placement import Placement
from ttpu_jax.runner.lora import tensor_updates
from ttpu_serve.adapters.files import read_adapter
from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.execution.engine_core import EngineCore
from ttpu_serve.runner import LowRankUpdate
from ttpu_serve.server.errors import as_api_error

pytestmark = pytest.mark.slow  # together they take long; the lane of the newest jax does without

ALL = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
       "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
RANK = 4


@dataclass(frozen=True)
class Adapter:
    """An adapter's directory, and a checkpoint with it merged."""

    path: Path
    merged: Path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("lora") / "base")


def write(folder: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    """An adapter as PEFT saves it; `tensors` without PEFT's prefix."""
    folder.mkdir(parents=True)
    named = {f"base_model.model.{name}": np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def make(base: Path, folder: Path, seed: int, targets: tuple[str, ...] = ALL, **config: Any) -> Adapter:
    """A random adapter; what it adds is worked out here from the words of PEFT's documentation."""
    random, weights = np.random.default_rng(seed), load_file(base / "model.safetensors")
    tensors, changes = {}, {}
    for layer in range(2):
        for target in targets:
            module = f"model.layers.{layer}.{target}"
            weight = weights[f"{module}.weight"]
            rank = config.get("rank_pattern", {}).get(target.split(".")[1], RANK)
            alpha = config.get("alpha_pattern", {}).get(target.split(".")[1], 8)
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            a = random.standard_normal((rank, weight.shape[1])).astype(np.float32)
            b = random.standard_normal((weight.shape[0], rank)).astype(np.float32) * 0.1
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b
            changes[f"{module}.weight"] = weight + scale * b @ a
    return Adapter(write(folder / "adapter", tensors, **config), with_weights(base, folder / "merged", changes))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    some = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    patterns = {"rank_pattern": {"q_proj": 2, "down_proj": 1}, "alpha_pattern": {"v_proj": 3}}
    return {
        "all": make(base, folder / "all", 1),
        "some": make(base, folder / "some", 2, some, use_rslora=True),
        "patterns": make(base, folder / "patterns", 3, some[1:], **patterns),
        "other": make(base, folder / "other", 4, ALL[3:5]),
    }


@pytest.fixture(scope="module")
def oracle(base: Path) -> Oracle:
    return Oracle(base)


@pytest.fixture(scope="module")
def engine(base: Path, adapters: dict[str, Adapter]) -> EngineCore:
    """On one device, with room for three adapters, of which two are there from the start."""
    given = {name: str(adapters[name].path) for name in ("all", "some")}
    return small_engine(base, adapters=given, max_adapters=3, max_lora_rank=RANK)


@pytest.fixture(autouse=True)
def _only_the_first_two(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests leave the engine that they share as they found it."""
    yield
    if "engine" in request.fixturenames:
        core = request.getfixturevalue("engine")
        for name in set(core.adapters) - {"all", "some"}:
            core.unload_adapter(name)


def steps(core: EngineCore) -> Iterator[OutputDelta]:
    while core.has_work:
        yield from core.step()


def assert_merged(oracle: Oracle, merged: Path, prompts: list[list[int]], tokens: list[list[int]]) -> None:
    oracle.uses(merged)
    assert all(oracle.agrees(prompt, answer) for prompt, answer in zip(prompts, tokens, strict=True))


def assert_all_merged(core: EngineCore, base: Path, adapters: dict[str, Adapter], oracle: Oracle) -> None:
    """Four requests in one batch, of which one uses no adapter."""
    names = ["all", "some", None, "all"]
    tokens = answers(core, PROMPTS, names)
    for name, prompt, answer in zip(names, PROMPTS, tokens, strict=True):
        assert_merged(oracle, adapters[name].merged if name else base, [prompt], [answer])
    assert len({tuple(answer) for answer in answers(core, PROMPTS[:1] * 3, names[:3])}) == 3  # they do change something
    assert core.stats().recompiles == 0


def test_adapters_in_one_batch_answer_as_merged_weights(
    engine: EngineCore, base: Path, adapters: dict[str, Adapter], oracle: Oracle
) -> None:
    assert_all_merged(engine, base, adapters, oracle)


@pytest.mark.parametrize("residual_stream", ["whole", "rings"])
def test_adapters_in_one_batch_answer_as_merged_weights_on_eight_devices(
    base: Path, adapters: dict[str, Adapter], oracle: Oracle, residual_stream: str
) -> None:
    """Eight devices need more heads than there are, so that kernels and adapters are padded."""
    given = {name: str(adapters[name].path) for name in ("all", "some")}
    core = small_engine(base, adapters=given, parallelism_strategy="tensor=8", residual_stream=residual_stream)
    assert_all_merged(core, base, adapters, oracle)
    held = core.runner.params["layers.0.mlp.down.kernel"].a
    assert held.addressable_shards[0].data.size * 8 == held.size


def test_adapters_are_served_on_top_of_quantized_kernels(base: Path, adapters: dict[str, Adapter]) -> None:
    """Paged, next to requests without an adapter: the tokens are those of the kernels dequantized."""
    given = {name: str(adapters[name].path) for name in ("all", "some")}
    told = []
    for hold in (quantize, lambda kernel: dense(quantize(kernel))):
        model = AutoModelForTPU.from_pretrained(base)
        kernels = [path for path in model.params if path.startswith("layers.") and path.endswith(".kernel")]
        model.params.update({path: jax.jit(hold)(model.params[path]) for path in kernels})
        core = small_engine(model, adapters=given)
        assert isinstance(core.runner.params["layers.0.mlp.down.kernel"], LowRankKernel)
        told.append(answers(core, PROMPTS, ["all", None, "some", None]))
    assert told[0] == told[1]


def test_adapters_are_loaded_and_unloaded_while_serving_without_compiling(
    engine: EngineCore, adapters: dict[str, Adapter], oracle: Oracle
) -> None:
    engine.load_adapter("third", str(adapters["patterns"].path))
    assert sorted(engine.adapters) == ["all", "some", "third"]
    names = ["third", "all", "third", "some"]
    tokens = answers(engine, PROMPTS, names)
    for name, prompt, answer in zip(names, PROMPTS, tokens, strict=True):
        assert_merged(oracle, adapters.get(name, adapters["patterns"]).merged, [prompt], [answer])
    with pytest.raises(RequestError, match="room for 3"):
        engine.load_adapter("fourth", str(adapters["other"].path))
    engine.unload_adapter("third")
    with pytest.raises(RequestError, match="'third' was asked for"):
        add(engine, PROMPTS[0], adapter="third")
    engine.load_adapter("fourth", str(adapters["other"].path))  # which changes other kernels than "third" in its place
    assert_merged(oracle, adapters["other"].merged, PROMPTS, answers(engine, PROMPTS, ["fourth"] * 4))
    with pytest.raises(RequestError, match="those loaded are: all, some, fourth"):
        engine.unload_adapter("third")
    assert engine.stats().recompiles == 0


def test_an_adapter_of_the_same_name_does_not_find_what_the_earlier_one_cached(
    engine: EngineCore, adapters: dict[str, Adapter], oracle: Oracle
) -> None:
    def ask() -> tuple[list[int], int]:
        hits = engine.stats().prefix_hits
        (tokens,) = answers(engine, [PROMPTS[1]], ["again"])
        return tokens, engine.stats().prefix_hits - hits

    engine.load_adapter("again", str(adapters["patterns"].path))
    first, _ = ask()
    assert ask() == (first, 32)
    engine.load_adapter("again", str(adapters["other"].path))
    second, cached = ask()
    assert cached == 0
    assert_merged(oracle, adapters["other"].merged, [PROMPTS[1]], [second])


def test_a_running_request_finishes_with_the_adapter_that_it_started_with(
    engine: EngineCore, adapters: dict[str, Adapter], oracle: Oracle
) -> None:
    engine.unload_adapter("some")  # one is kept, and two change places
    engine.load_adapter("changing", str(adapters["patterns"].path))
    early, tokens = add(engine, PROMPTS[0], adapter="changing"), {}
    while len(tokens.get(early, ())) < 2:
        collect(engine, tokens)
    engine.load_adapter("changing", str(adapters["other"].path))
    late = add(engine, PROMPTS[0], adapter="changing")
    with pytest.raises(BusyError, match="requests still use") as refused:
        engine.load_adapter("some", str(adapters["some"].path))
    assert as_api_error(refused.value).status == 409
    before, after = finish(engine, [early, late], tokens)
    assert_merged(oracle, adapters["patterns"].merged, [PROMPTS[0]], [before])
    assert_merged(oracle, adapters["other"].merged, [PROMPTS[0]], [after])
    engine.unload_adapter("changing")
    engine.load_adapter("some", str(adapters["some"].path))


def test_embeddings_are_those_of_merged_weights(
    engine: EngineCore, adapters: dict[str, Adapter], oracle: Oracle
) -> None:
    add(engine, PROMPTS[0])
    name = add(engine, PROMPTS[1], adapter="all", pooling="last")
    found = [delta.embedding for delta in steps(engine) if delta.request_id == name]
    ids = np.array([PROMPTS[1]], np.int32)
    decoder = oracle.uses(adapters["all"].merged).model.module
    state = np.asarray(decoder.hidden(ids, np.arange(ids.size, dtype=np.int32)[None])[0])[0, -1]
    np.testing.assert_allclose(found[-1], state / np.linalg.norm(state), atol=1e-5)


def test_adapters_survive_sleep(engine: EngineCore, adapters: dict[str, Adapter]) -> None:
    before = answers(engine, PROMPTS[:2], ["all", "some"])
    engine.sleep()
    with pytest.raises(RequestError, match="asleep"):
        engine.load_adapter("third", str(adapters["other"].path))
    engine.wake_up()
    assert answers(engine, PROMPTS[:2], ["all", "some"]) == before


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "latent attention"])
def test_low_rank_kernels_are_those_of_the_tensors_updates(name: str, devices: int) -> None:
    """b @ a of each fused, reshaped and padded kernel is what its rule makes of each tensor's b @ a."""
    spec = architecture(LAYERS[name])
    mapping = standard_mapping(spec)
    _, paddings = pad_architecture(spec, {"tensor": devices})
    random = np.random.default_rng(0)
    reached = {path: tensors for path, rule in mapping.rules if (tensors := reached_tensors(path, rule))}
    assert {"layers.0.attention.qkv.kernel", "layers.0.attention.output.kernel"} <= set(reached)
    for path, tensors in reached.items():
        shapes = {leaf.name: leaf.shape for leaf in mapping[path].leaves()}
        updates = {
            tensor: LowRankUpdate(random.standard_normal((2, shape[1])), random.standard_normal((shape[0], 2)))
            for tensor, shape in shapes.items()
        }
        a, b = make_site(path, tensors, mapping[path], 3 * len(tensors), paddings.get(path)).matrices(updates, 3)
        whole = np.empty(mapping[path].result_shape)
        gather(mapping[path], {tensor: update.b @ update.a for tensor, update in updates.items()}.__getitem__, whole)
        expected = paddings[path].pad(whole) if path in paddings else whole
        np.testing.assert_allclose(b @ a, expected, atol=1e-5)


def one_module(module: str = "model.layers.0.self_attn.q_proj", out: int = 32, **factors: Any) -> dict[str, np.ndarray]:
    shapes = {"lora_A": (RANK, 32), "lora_B": (out, RANK), **factors}
    return {f"{module}.{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}


REFUSED: dict[str, tuple[type[TTPUError], str, dict[str, np.ndarray], dict[str, Any]]] = {
    "DoRA": (UnsupportedError, "DoRA", one_module(), {"use_dora": True}),
    "biases": (UnsupportedError, "bias='lora_only'", one_module(), {"bias": "lora_only"}),
    "whole modules": (UnsupportedError, "modules_to_save", one_module(), {"modules_to_save": ["lm_head"]}),
    "tokens": (UnsupportedError, "trainable_token_indices", one_module(), {"trainable_token_indices": [3]}),
    "fused experts": (UnsupportedError, "target_parameters", one_module(), {"target_parameters": ["experts"]}),
    "changed weights": (UnsupportedError, "'pissa'", one_module(), {"init_lora_weights": "pissa"}),
    "another method": (UnsupportedError, "'IA3'", one_module(), {"peft_type": "IA3"}),
    "other tensors": (UnsupportedError, "lm_head.weight", {**one_module(), "lm_head.weight": np.ones(1)}, {}),
    "the head": (UnsupportedError, "output head", one_module("lm_head", 259), {}),
    "a norm": (UnsupportedError, "input_norm", one_module("model.layers.0.input_layernorm"), {}),
    "another model's module": (MappingError, "layers.9", one_module("model.layers.9.self_attn.q_proj"), {}),
    "another model's sizes": (MappingError, r"\(64, 32\)", one_module(out=64), {}),
    "half of it": (CheckpointError, "only lora_A", dict(list(one_module().items())[:1]), {}),
    "another rank than it says": (CheckpointError, "says 8", one_module(), {"r": 8}),
    "no tensors": (CheckpointError, "no tensors", {}, {}),
    "a rank above the room": (RequestError, "max_lora_rank=8", one_module(lora_A=(8, 32), lora_B=(32, 8)), {"r": 8}),
    "values that are not finite": (
        CheckpointError, "not finite", {name: value * np.inf for name, value in one_module().items()}, {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(what: str, engine: EngineCore, tmp_path: Path) -> None:
    error, words, tensors, config = REFUSED[what]
    loaded = dict(engine.adapters)
    with pytest.raises(error, match=words):
        engine.load_adapter("refused", str(write(tmp_path / "adapter", tensors, **config)))
    assert engine.adapters == loaded


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_directory_without_an_adapter_is_refused(missing: str, tmp_path: Path) -> None:
    path = write(tmp_path / "adapter", one_module())
    (path / missing).unlink()
    with pytest.raises(RequestError, match=missing):
        read_adapter(path)


def test_routed_experts_are_refused() -> None:
    mapping = standard_mapping(architecture(LAYERS["experts"]))
    reached = {path for path, rule in mapping.rules if reached_tensors(path, rule)}
    update = LowRankUpdate(np.zeros((1, 12)), np.zeros((11, 1)))
    module = "model.layers.0.mlp.experts.2.gate_proj"
    with pytest.raises(UnsupportedError, match="routed experts"):
        tensor_updates(mapping, dict.fromkeys(reached), {module: update}, "adapter")


@pytest.mark.tpu_compile
def test_adapters_need_no_exchange_of_their_own_on_a_tpu() -> None:
    """Where devices have a part of a projection's inputs each, what adapters add is exchanged with the product."""
    tokens, topology = 64, tpu_topology("v5e:2x4")
    placement = Placement(make_mesh(topology, {"tensor": 8}))
    table = {"kernel": Parameter((256, 2048), (None, axes.MLP))}

    def abstract(shape: tuple[int, ...], cut: tuple[str | None, ...], dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding(cut, shape, "an argument"))

    def project(kernel: LowRankKernel, x: jax.Array, adapters: jax.Array) -> jax.Array:
        arrays = {"kernel": with_adapters(kernel, adapters)}
        return placement.constrain(Linear(Parameters(arrays, table), Runtime(placement))(x), None, None, None)

    shapes = LowRankKernel(*(jax.ShapeDtypeStruct(s, "bfloat16") for s in ((256, 2048), (4, 16, 2048), (256, 4, 16))))
    kernel = map_arrays(shapes, (None, axes.MLP), lambda array, cut: abstract(array.shape, cut))
    x = abstract((1, tokens, 2048), (None, None, axes.MLP))
    program = compile_for(topology, project, kernel, x, abstract((tokens,), (None,), "int32"))
    assert [(each.op, each.count) for each in program.collectives] == [("all-reduce", 1)]


@pytest.mark.torch
def test_answers_are_those_of_peft(engine: EngineCore, base: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=6,
        use_rslora=True,
        target_modules=[name.split(".")[1] for name in ALL],
        rank_pattern={"o_proj": 2},
        alpha_pattern={"layers.1.mlp.up_proj": 9},
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path / "peft")
    engine.load_adapter("peft", str(tmp_path / "peft"))
    for prompt, answer in zip(PROMPTS, answers(engine, PROMPTS, ["peft"] * 4), strict=True):
        expected = model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert expected[0, len(prompt) :].tolist() == answer


@pytest.mark.torch
def test_an_adapter_of_weights_stored_with_inputs_first_answers_as_in_peft(tmp_path: Path) -> None:
    """peft sets `fan_in_fan_out` for gpt2's `Conv1D`, which was refused."""
    torch, transformers, peft = (pytest.importorskip(name) for name in ("torch", "transformers", "peft"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    base.save_pretrained(tmp_path / "gpt2")
    config = peft.LoraConfig(r=2, target_modules=["c_attn", "c_proj"], init_lora_weights=False, fan_in_fan_out=True)
    model = peft.get_peft_model(base, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    core = small_engine(tmp_path / "gpt2", dtype="float32", adapters={"peft": str(tmp_path / "adapter")})
    for prompt, answer in zip(PROMPTS, answers(core, PROMPTS, ["peft"] * 4), strict=True):
        expected = model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert expected[0, len(prompt) :].tolist() == answer
