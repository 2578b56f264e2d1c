"""Low-rank adapters train as peft's do, whatever the mesh, beside dense and quantized weights."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU
from ttpu_core import ModelConfig, default_registry
from ttpu_core.errors import CheckpointError, RequestError, UnsupportedError
from ttpu_jax.backend import JaxBackend
from ttpu_jax.params.adapter_sites import reached_tensors
from ttpu_jax.runner.lora import tensor_updates
from ttpu_jax.train.adapter_targets import find_targets
from ttpu_jax.train.runner import JaxTrainRunner
from ttpu_serve.adapters.files import read_adapter
from ttpu_train.adapters import AdapterSettings, adapter_settings
from ttpu_train.checkpoints import Checkpoints
from ttpu_train.export import export_run
from ttpu_train.runner import Batch, CheckpointPolicy, OptimizerSettings, ScheduleSettings, StepSettings

ROWS, SEQ, STEPS = 8, 12, 10
OPTIMIZER = OptimizerSettings(
    learning_rate=3e-3, schedule=ScheduleSettings("constant", total_steps=STEPS), weight_decay=0.1, max_grad_norm=0.5
)
LORA = AdapterSettings(("q_proj", "v_proj", "down_proj"), r=3, lora_alpha=5, use_rslora=True, init_lora_weights=False)
DORA = AdapterSettings("all-linear", r=2, use_dora=True, layers_to_transform=(1,), bias="none")
KINDS = {"lora": LORA, "dora": DORA}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "llama"
    return llama_checkpoint(folder, num_attention_heads=3, num_key_value_heads=3, hidden_size=24, head_dim=8)


@cache
def batch(seed: int) -> Batch:
    random = np.random.default_rng(seed)
    places = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (ROWS, SEQ))
    tokens = random.integers(0, 255, (ROWS, SEQ)).astype(np.int32)
    return Batch(tokens, (places > 0).astype(np.float32), places)


def runner(checkpoint: Path, adapters: AdapterSettings | None, mesh: str | None = None, **given: Any) -> JaxTrainRunner:
    load = {"dtype": "float32", **{name: given.pop(name) for name in ("quantization",) if name in given}}
    model = AutoModelForTPU.from_pretrained(str(checkpoint), mesh=mesh, **load)
    settings = StepSettings(**({"optimizer": OPTIMIZER} | given), adapters=adapters)
    return JaxBackend().train_runner(model, settings)


def trained(one: JaxTrainRunner, first: int, last: int) -> list[list[float]]:
    figures = [one.step(batch(number)) for number in range(first, last)]
    return [[f.loss, f.grad_norm] for f in (each.values() for each in figures)]


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[list[float]], Path]]:
    """Of each kind, the figures on one device, and the folder with the adapter before and after."""
    found = {}
    for name, settings in KINDS.items():
        folder = tmp_path_factory.mktemp(name)
        one = runner(checkpoint, settings)
        one.save_pretrained(folder / "before", "float32")
        figures = trained(one, 0, STEPS)
        one.save_pretrained(folder / "after", "float32")
        np.save(folder / "logits.npy", one.predict(batch(0))[1])
        found[name] = figures, folder
    return found


def trained_by_peft(checkpoint: Path, adapter: Path, steps: int) -> list[list[float]]:
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    weights = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=OPTIMIZER.learning_rate, weight_decay=0.1)
    found = []
    for number in range(steps):
        tokens = torch.tensor(batch(number).tokens).long()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        found.append([loss.item(), torch.nn.utils.clip_grad_norm_(weights, 0.5).item()])
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_those_of_peft(checkpoint: Path, plain: Any, kind: str) -> None:
    import peft
    import torch
    import transformers

    figures, folder = plain[kind]
    np.testing.assert_allclose(figures, trained_by_peft(checkpoint, folder / "before", STEPS), rtol=1e-4)
    own = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    read = peft.PeftModel.from_pretrained(own, folder / "after")
    with torch.no_grad():
        logits = read(torch.tensor(batch(0).tokens).long()).logits.numpy()
    np.testing.assert_allclose(np.load(folder / "logits.npy"), logits, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "mesh", "stage", "accumulation"),
    [("lora", "fsdp=4,tensor=2", 3, 2), ("dora", "data=4,tensor=2", 2, 1)],
)
def test_every_mesh_and_stage_trains_as_one_device(
    checkpoint: Path, plain: Any, kind: str, mesh: str, stage: Any, accumulation: int
) -> None:
    one = runner(checkpoint, KINDS[kind], mesh, zero_stage=stage, accumulation=accumulation)
    np.testing.assert_allclose(trained(one, 0, 4), plain[kind][0][:4], rtol=1e-5)
    path = "groups.0.0.attention.qkv.kernel"
    assert not any(path in name for name in one.stored_arrays()[1])  # no state for the base
    assert all(name in one.adapters.names for name in one.stored_arrays()[0])


def stored(one: JaxTrainRunner) -> dict[str, np.ndarray]:
    params, state = one.stored_arrays()
    return {name: np.asarray(value) for name, value in {**params, **state}.items()}


def assert_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


def test_a_run_of_adapters_resumes_bit_for_bit_and_exports(checkpoint: Path, tmp_path: Path) -> None:
    settings = replace(LORA, lora_dropout=0.2, init_lora_weights="gaussian")
    one = runner(checkpoint, settings, "fsdp=2", zero_stage=1)
    store = Checkpoints(one, tmp_path / "run" / "checkpoints", CheckpointPolicy())
    states = {}
    for step in (1, 2):
        trained(one, step - 1, step)
        store.save(step, {"position": step})
        states[step] = stored(one)
    store.close()
    assert {name.rsplit(".", 1)[-1] for name in one.stored_names} == {"lora_A", "lora_B"}
    again = runner(checkpoint, settings, "fsdp=2", zero_stage=1)
    Checkpoints(again, tmp_path / "run" / "checkpoints", CheckpointPolicy()).restore(1)
    trained(again, 1, 2)
    assert_bits(stored(again), states[2])
    other = runner(checkpoint, settings)
    Checkpoints(other, tmp_path / "run" / "checkpoints", CheckpointPolicy()).restore()
    assert_bits(stored(other), states[2])

    rows = batch(0)
    logits = other.predict(rows)[1]
    for name, merge in (("adapter", False), ("merged", True)):
        assert export_run(tmp_path / "run", tmp_path / name, JaxBackend(), dtype="float32", merge=merge) == 2
    header = tmp_path / "run" / "checkpoints" / "2" / "run.json"
    kept = header.read_text()
    header.write_text(kept.replace(json.loads(kept)["identity"]["adapters"]["files"], "of another base model"))
    with pytest.raises(CheckpointError, match="its files are not those that the run trained beside: put the run's"):
        export_run(tmp_path / "run", tmp_path / "merged", JaxBackend(), merge=True)
    Checkpoints(other, tmp_path / "run" / "checkpoints", CheckpointPolicy()).restore()  # compares with the quantization
    header.write_text(kept)
    merged = AutoModelForTPU.from_pretrained(str(tmp_path / "merged"), dtype="float32")
    np.testing.assert_allclose(merged(rows.tokens).logits, logits, atol=2e-5)
    np.testing.assert_allclose(other.model()(rows.tokens).logits, logits, atol=2e-5)
    begun = runner(checkpoint, replace(settings, start=str(tmp_path / "adapter")))
    np.testing.assert_allclose(begun.predict(rows)[1], logits, atol=1e-6)
    for changed, words in ((replace(settings, r=4), "another peft_config"), (None, "trains the weights")):
        with pytest.raises(CheckpointError, match=words):
            Checkpoints(runner(checkpoint, changed), tmp_path / "run" / "checkpoints", CheckpointPolicy()).restore()
    with pytest.raises(CheckpointError, match="another base model or quantization of it"):
        quantized = runner(checkpoint, settings, quantization="int8")
        Checkpoints(quantized, tmp_path / "run" / "checkpoints", CheckpointPolicy()).restore()


def test_adapters_lower_the_loss_beside_quantized_weights_on_every_mesh(checkpoint: Path) -> None:
    settings = replace(LORA, target_modules="all-linear", init_lora_weights=True)
    one, other = (runner(checkpoint, settings, mesh, quantization="w8a16") for mesh in (None, "fsdp=2,tensor=2"))
    base = {path: value for path, value in one.params.items() if path not in one.adapters.names}
    before = {path: [np.asarray(array) for array in jax.tree.leaves(value)] for path, value in base.items()}
    losses = [one.step(batch(0)).values().loss for _ in range(STEPS)]
    assert losses[-1] < losses[0] - 0.2
    np.testing.assert_allclose([other.step(batch(0)).values().loss for _ in range(3)], losses[:3], rtol=1e-5)
    for path, arrays in before.items():
        assert one.params[path].dtype == base[path].dtype, path
        for old, new in zip(arrays, jax.tree.leaves(one.params[path]), strict=True):
            np.testing.assert_array_equal(old, new, err_msg=path)
    model = one.model()
    np.testing.assert_allclose(model(batch(0).tokens).logits, one.predict(batch(0))[1], atol=1e-4)
    with pytest.raises(RequestError, match="a model beside which adapters are trained"):
        model.save_pretrained("nowhere")


def test_a_model_that_was_used_before_runs_with_its_adapters(checkpoint: Path) -> None:
    """What was compiled for kernels without adapters was called with them, which JAX refuses."""
    model = AutoModelForTPU.from_pretrained(str(checkpoint), dtype="float32")
    before = model(batch(0).tokens).logits
    one = JaxBackend().train_runner(model, StepSettings(adapters=LORA))
    for use in (lambda: model(batch(0).tokens), lambda: model.generate([1, 2]), lambda: model.save_pretrained("no")):
        with pytest.raises(RequestError, match="a trainer has its weights, which updates replace: use the trainer's"):
            use()
    after = one.model()(batch(0).tokens).logits
    np.testing.assert_allclose(after, one.predict(batch(0))[1], atol=2e-5)
    assert np.abs(after - before).max() > 1e-3


def test_the_engine_reads_what_was_trained(plain: Any, checkpoint: Path) -> None:
    folder = plain["lora"][1]
    weights = read_adapter(folder / "after")
    tensors = load_file(folder / "after" / "adapter_model.safetensors")
    for module, update in weights.updates.items():
        factors = [tensors[f"base_model.model.{module}.lora_{name}.weight"] for name in "BA"]
        np.testing.assert_allclose(update.b @ update.a, LORA.scaling * factors[0] @ factors[1], rtol=1e-5)
    assert {module.rsplit(".", 1)[1] for module in weights.updates} == set(LORA.target_modules)
    model = AutoModelForTPU.from_pretrained(str(checkpoint), dtype="float32")
    mapping = model.architecture.mapping
    reached = {path: reached_tensors(path, rule) for path, rule in mapping.rules}
    sites = {path: names for path, names in reached.items() if names is not None}
    assert len(tensor_updates(mapping, sites, weights.updates, "after")) == 6


@pytest.mark.torch
def test_pefts_own_config_is_read() -> None:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, layers_to_transform=2)
    assert adapter_settings(config) == AdapterSettings(("q_proj",), r=4, use_dora=True, layers_to_transform=(2,))
    with pytest.raises(UnsupportedError, match="sets rank_pattern, but adapters are trained with"):
        adapter_settings(peft.LoraConfig(target_modules=["q_proj"], rank_pattern={"q_proj": 2}))
    with pytest.raises(UnsupportedError, match="peft_type 'IA3'"):
        adapter_settings(peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))


@pytest.mark.torch
def test_attention_of_a_mixture_of_experts_is_adapted_as_by_peft(tmp_path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.3,  # the norms of queries and keys divide by sizes well above rounding
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    settings = AdapterSettings(("q_proj", "k_proj", "v_proj", "o_proj"), r=2, init_lora_weights=False)
    one = runner(tmp_path / "moe", settings)
    one.save_pretrained(tmp_path / "before", "float32")
    figures = trained(one, 0, 4)
    np.testing.assert_allclose(figures, trained_by_peft(tmp_path / "moe", tmp_path / "before", 4), rtol=1e-4)
    for target in ("gate", "experts.0.up_proj", "lm_head"):
        with pytest.raises(UnsupportedError, match=r"no experts, routers, embeddings or heads: use k_proj, o_proj"):
            runner(tmp_path / "moe", replace(settings, target_modules=(target,)))


SIZES = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("dora", [False, True])
def test_queries_and_their_gate_share_the_adapter_of_their_module(tmp_path: Path, dora: bool) -> None:
    """Two kernels are made of `q_proj`: each trained an adapter of its own, and one of them was written."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**SIZES, layer_types=["full_attention"] * 2)
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(tmp_path / "gated")
    settings = AdapterSettings(("q_proj", "v_proj"), r=2, use_dora=dora, init_lora_weights=False)
    one = runner(tmp_path / "gated", settings)
    one.save_pretrained(tmp_path / "before", "float32")
    figures = trained(one, 0, 4)
    np.testing.assert_allclose(figures, trained_by_peft(tmp_path / "gated", tmp_path / "before", 4), rtol=1e-4)
    other = runner(tmp_path / "gated", settings, "fsdp=2,tensor=4", zero_stage=1)
    np.testing.assert_allclose(trained(other, 0, 2), figures[:2], rtol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("dora", [False, True])
def test_weights_that_are_stored_with_inputs_first_are_adapted_as_by_peft(tmp_path: Path, dora: bool) -> None:
    """gpt2's, of a class `Conv1D`."""
    peft, torch, transformers = (pytest.importorskip(name) for name in ("peft", "torch", "transformers"))
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3, **dropout
    )
    base = transformers.GPT2LMHeadModel(config)
    base.save_pretrained(tmp_path / "gpt2")
    one = runner(tmp_path / "gpt2", AdapterSettings("all-linear", r=2, use_dora=dora, init_lora_weights=False))
    one.save_pretrained(tmp_path / "before", "float32")
    store = Checkpoints(one, tmp_path / "run" / "checkpoints", CheckpointPolicy())
    figures = trained(one, 0, 4)
    np.testing.assert_allclose(figures, trained_by_peft(tmp_path / "gpt2", tmp_path / "before", 4), rtol=1e-4)
    other = runner(tmp_path / "gpt2", one.settings.adapters, "fsdp=2,tensor=4", zero_stage=1)
    np.testing.assert_allclose(trained(other, 0, 2), figures[:2], rtol=1e-5)

    store.save(4, {"position": 4})
    store.close()
    for name, merge in (("adapter", False), ("merged", True)):
        export_run(tmp_path / "run", tmp_path / name, JaxBackend(), dtype="float32", merge=merge)
    read = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        logits = read(torch.tensor(batch(0).tokens).long()).logits.numpy()
    np.testing.assert_allclose(one.predict(batch(0))[1], logits, atol=1e-4)
    merged = AutoModelForTPU.from_pretrained(str(tmp_path / "merged"), dtype="float32")
    np.testing.assert_allclose(merged(batch(0).tokens).logits, logits, atol=1e-4)
    if not dora:
        mapping = merged.architecture.mapping
        sites = {path: names for path, rule in mapping.rules if (names := reached_tensors(path, rule))}
        assert len(tensor_updates(mapping, sites, read_adapter(tmp_path / "adapter").updates, "adapter")) == 8


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "llama4"])
def test_adapters_of_a_text_part_leave_towers_alone_in_peft(tmp_path: Path, kind: str) -> None:
    """peft used to give modules of the same names in towers for pictures adapters with random numbers."""
    peft, torch, transformers = (pytest.importorskip(name) for name in ("peft", "torch", "transformers"))
    text, tower = {**SIZES}, {**TOWER}
    if kind == "gemma3":
        config = transformers.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4)
    elif kind == "mistral3":
        tower |= {"model_type": "pixtral", "head_dim": 16}
        config = transformers.Mistral3Config(text_config=text | {"model_type": "mistral"}, vision_config=tower)
    else:
        text |= {"num_local_experts": 2, "intermediate_size_mlp": 32, "pad_token_id": 0}
        config = transformers.Llama4Config(text_config=text, vision_config=tower)
    torch.manual_seed(0)
    auto = transformers.AutoModelForImageTextToText
    auto.from_config(config).save_pretrained(tmp_path / "whole")

    def read_by_peft(adapter: Path) -> tuple[Any, np.ndarray]:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys")
            base = auto.from_pretrained(tmp_path / "whole", dtype=torch.float32)
            read = peft.PeftModel.from_pretrained(base, adapter).eval()
        with torch.no_grad():
            return read, read(torch.tensor(batch(0).tokens).long()).logits.numpy()

    settings = AdapterSettings(("q_proj", "o_proj"), r=2, layers_to_transform=(1,), init_lora_weights=False)
    for own in (settings, replace(settings, layers_to_transform=None)):
        one = runner(tmp_path / "whole", own)
        one.save_pretrained(tmp_path / "adapter", "float32")
        read, logits = read_by_peft(tmp_path / "adapter")
        np.testing.assert_allclose(one.predict(batch(0))[1], logits, atol=2e-5)
        adapted = {name for name, module in read.named_modules() if hasattr(module, "lora_A")}
        assert len(adapted) == len(one.adapters.targets) * (1 if own is settings else 2)
        assert all("language_model" in name for name in adapted)
    read.save_pretrained(tmp_path / "pefts")  # by the names of the class, which may be others than the checkpoint's
    begun = runner(tmp_path / "whole", adapter_settings(None, tmp_path / "pefts"))
    np.testing.assert_allclose(begun.predict(batch(0))[1], logits, atol=2e-5)

    base = auto.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    everywhere = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(base, everywhere).save_pretrained(tmp_path / "everywhere")
    with pytest.warns(UserWarning, match="of parts that this model is loaded without"):
        runner(tmp_path / "whole", adapter_settings(None, tmp_path / "everywhere"))


def test_whole_modules_and_biases_are_trained_beside_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llama_checkpoint(tmp_path / "llama", num_hidden_layers=1)
    settings = replace(LORA, modules_to_save=("lm_head",))
    one = runner(folder, settings, "tensor=2")
    assert one.stored_names == {"head.kernel", *one.adapters.names}
    before = one.evaluate(batch(0)).values().cross_entropy
    trained(one, 0, 1)
    one.save_pretrained(tmp_path / "adapter", "float32")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert tensors["base_model.model.lm_head.weight"].shape == (259, 32)
    begun = runner(folder, replace(settings, start=str(tmp_path / "adapter")))
    after = one.evaluate(batch(0)).values().cross_entropy
    assert begun.evaluate(batch(0)).values().cross_entropy == pytest.approx(after, rel=1e-6) and after != before

    def files() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (tmp_path / "adapter").iterdir()}

    def stops(tensors: Any, file: Path, **_: Any) -> None:
        file.write_bytes(b"half of")
        raise OSError(28, "No space left on device")

    written = files()
    modes = {file.stat().st_mode for file in (tmp_path / "adapter").iterdir()}
    (tmp_path / "plain").touch()
    assert modes == {(tmp_path / "plain").stat().st_mode}
    monkeypatch.setattr("ttpu_jax.train.adapter_files.save_file", stops)
    with pytest.raises(OSError, match="No space left"):
        one.save_pretrained(tmp_path / "adapter", "float32")
    assert files() == written


@pytest.mark.torch
def test_peft_reads_trained_biases_and_its_own_are_trained_on(tmp_path: Path) -> None:
    """Of modules that have an adapter, and of those that have none."""
    peft, torch, transformers = (pytest.importorskip(name) for name in ("peft", "torch", "transformers"))
    folder = tmp_path / "qwen2"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(vocab_size=259, num_hidden_layers=2, **sizes)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    settings = AdapterSettings(("q_proj", "v_proj"), r=2, bias="all")
    one = runner(folder, settings)
    trained(one, 0, 3)
    one.save_pretrained(tmp_path / "trained", "float32")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    read = peft.PeftModel.from_pretrained(base, tmp_path / "trained").eval()
    biases = {name: value for name, value in read.named_parameters() if name.endswith(".bias")}
    assert len(biases) == 6 and all(value.abs().max() > 0 for value in biases.values())
    ours = one.predict(batch(0))[1]
    with torch.no_grad():
        logits = read(torch.tensor(batch(0).tokens).long()).logits.numpy()
    np.testing.assert_allclose(ours, logits, atol=2e-5)
    read.save_pretrained(tmp_path / "pefts")
    begun = runner(folder, replace(settings, start=str(tmp_path / "pefts")))
    np.testing.assert_allclose(begun.predict(batch(0))[1], ours, atol=1e-5)


@pytest.mark.torch
def test_an_adapter_is_trained_on_as_peft_reads_it_or_not_at_all(checkpoint: Path, tmp_path: Path) -> None:
    """peft_config used to replace the file's settings, and to drop the tensors that it does not choose."""
    peft, torch, transformers = (pytest.importorskip(name) for name in ("peft", "torch", "transformers"))
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    given = {"r": 3, "lora_alpha": 12, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}
    made = peft.get_peft_model(base, peft.LoraConfig(**given, init_lora_weights=False, task_type="CAUSAL_LM")).eval()
    made.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = made(torch.tensor(batch(0).tokens).long()).logits.numpy()
    for asked in (None, {"lora_dropout": 0.5}, {"target_modules": r".*\.(q|down)_proj"}, peft.LoraConfig(**given)):
        begun = runner(checkpoint, adapter_settings(asked, tmp_path / "adapter"))
        np.testing.assert_allclose(begun.predict(batch(0))[1], expected, atol=2e-5)
    for asked, words in (
        ({"target_modules": ["q_proj"]}, r"it holds .*mlp\.down_proj\.lora_A\.weight and 3 more, which neither"),
        ({"layers_to_transform": [1]}, r"it holds .*layers\.0\..* and 3 more, which neither"),
        ({"target_modules": "all-linear"}, r"its .* is not there where peft_config"),
    ):
        with pytest.raises(CheckpointError, match=words):
            runner(checkpoint, adapter_settings(asked, tmp_path / "adapter"))
    given["modules_to_save"] = ["norm", "lm_head"]  # by the ends of names, so that norms of layers are meant too
    made = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), peft.LoraConfig(**given)
    )
    made.save_pretrained(tmp_path / "norms")
    begun = runner(checkpoint, adapter_settings(None, tmp_path / "norms"))
    begun.step(batch(0))
    begun.save_pretrained(tmp_path / "after", "float32")
    own = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    read = peft.PeftModel.from_pretrained(own, tmp_path / "after").eval()
    with torch.no_grad():
        logits = read(torch.tensor(batch(1).tokens).long()).logits.numpy()
    np.testing.assert_allclose(begun.predict(batch(1))[1], logits, atol=2e-5)
    with pytest.raises(RequestError, match=r"lora_alpha=8, but the adapter .* was trained with lora_alpha=12"):
        adapter_settings(peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=3), tmp_path / "adapter")


def test_an_adapter_with_a_head_is_refused_by_the_heads_name(tmp_path: Path) -> None:
    """Of a model whose head is tied: the error named the embedding, which the file does not hold."""
    folder = llama_checkpoint(tmp_path / "tied", tie_word_embeddings=True, num_hidden_layers=1)
    runner(folder, LORA).save_pretrained(tmp_path / "adapter", "float32")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.lm_head.weight": np.zeros((259, 32), np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"it holds base_model\.model\.lm_head\.weight, which neither its config"):
        runner(folder, adapter_settings(None, tmp_path / "adapter"))


def test_what_cannot_be_adapted_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"'c_attn' was asked for.*use down_proj, gate_proj, k_proj, o_proj, q_proj"):
        runner(checkpoint, replace(LORA, target_modules=("c_attn",)))
    with pytest.raises(RequestError, match=r"target_modules=.* was asked for, but exclude_modules, .* leave none of"):
        runner(checkpoint, replace(LORA, layers_to_transform=(7,)))
    with pytest.raises(RequestError, match="modules_to_save='score' was asked for"):
        runner(checkpoint, replace(LORA, modules_to_save=("score",)))
    with pytest.raises(UnsupportedError, match=r"lora_dropout=0.1 was given on a mesh that pads the inputs"):
        runner(checkpoint, replace(LORA, target_modules=("o_proj",), lora_dropout=0.1), "tensor=2")
    with pytest.raises(UnsupportedError, match=r"quantized model was to be trained.*peft_config="):
        runner(checkpoint, None, quantization="w8a16")
    with pytest.raises(RequestError, match=r"there is no adapter_model.safetensors"):
        runner(checkpoint, replace(LORA, start=str(tmp_path)))
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "state_size": 4}
    mamba = default_registry().architecture(ModelConfig.from_dict({"model_type": "mamba", **sizes}))
    for targets in ("all-linear", ("in_proj",)):
        with pytest.raises(UnsupportedError, match="this mamba model has none: train its weights, without peft_conf"):
            find_targets(AdapterSettings(targets), mamba.mapping, mamba.spec, {})
