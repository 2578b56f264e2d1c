"""A plan that `ttpu plan --save` wrote says how the engine cuts a model, as far as the engine cuts it so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from ttpu import LLM, AutoModelForTPU, SamplingParams
from ttpu_core.checkpoint import open_config
from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.registry import default_registry
from ttpu_core.sharding.hardware import parse_topology
from ttpu_plan.given_plan import plan_for
from ttpu_plan.plan_file import save_plan
from ttpu_plan.planner import Request, best_plan, plans

pytestmark = pytest.mark.slow  # together they take long; the lane of the newest jax does without

SMALL: dict[str, Any] = {
    "max_model_len": 32,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "sequence_buckets": (2,),
    "token_buckets": (8,),
    "page_size": 4,
    "num_pages": 20,
    "sampling_level": "greedy",
    "prompt_logprobs": False,
    "progress": None,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans") / "llama"
    return tiny.llama_checkpoint(
        folder, num_attention_heads=8, num_key_value_heads=4, head_dim=8, num_hidden_layers=1
    )


def plan(checkpoint: Path, topology: str, batch: int, file: Path) -> Path:
    """What `ttpu plan --topology … --batch … --save` writes."""
    spec = default_registry().architecture(open_config(checkpoint)).spec
    save_plan(best_plan(spec, parse_topology(topology), Request("inference", batch, 32, dtype="float32")), file)
    return file


def answer(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return list(llm.generate("hello", params)[0].outputs[0].token_ids)


@pytest.mark.parametrize(("topology", "devices"), [("v5e:2x4", 8), ("v5e:2x2", 4)])
def test_a_plan_that_cuts_weights_alone_is_served_with_the_same_tokens(
    checkpoint: Path, tmp_path: Path, topology: str, devices: int
) -> None:
    file = plan(checkpoint, topology, 1, tmp_path / "plan.json")
    with LLM(str(checkpoint), **SMALL) as llm:
        alone = answer(llm)
    with LLM(str(checkpoint), **SMALL, plan=str(file)) as llm:
        assert dict(llm.engine.runner.runtime.placement.mesh.shape) == {"tensor": devices}
        assert answer(llm) == alone


def test_auto_chooses_a_mesh_that_the_engine_takes(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **SMALL, parallelism_strategy="auto") as llm:
        assert dict(llm.engine.runner.runtime.placement.mesh.shape) == {"tensor": 8}
        assert len(answer(llm)) == 6


def test_of_a_plan_with_replicas_an_engine_is_one(checkpoint: Path, tmp_path: Path) -> None:
    spec = default_registry().architecture(open_config(checkpoint)).spec
    found = plans(spec, parse_topology("v5e:2x4"), Request("inference", 32, 32, dtype="float32"))
    two = next(one for one in found if one.replicas == 2)
    save_plan(two, tmp_path / "plan.json")
    with pytest.warns(UserWarning, match=r"2 replicas × tensor=4: this engine is one of the replicas"):
        llm = LLM(str(checkpoint), **SMALL, plan=str(tmp_path / "plan.json"))
    with llm:
        assert dict(llm.engine.runner.runtime.placement.mesh.shape) == {"tensor": 4}
        assert len(answer(llm)) == 6


def test_a_plan_for_another_purpose_that_shards_the_batch_is_refused_before_weights_are_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = default_registry().architecture(open_config(checkpoint)).spec
    request = Request("generation", 32, 32, dtype="float32")
    one = next(one for one in plans(spec, parse_topology("v5e:2x4"), request) if dict(one.mesh) == {"data": 8})
    save_plan(one, tmp_path / "plan.json")
    monkeypatch.setattr("ttpu_jax.backend.load_parameters", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UnsupportedError, match=r"a plan for data=8, .* make a plan to serve with `ttpu plan"):
        LLM(str(checkpoint), **SMALL, plan=str(tmp_path / "plan.json"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of one layer with eight experts, saved by transformers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plans") / "mixture"
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tiny.write_tokenizer(folder)
    return folder


def test_devices_that_divide_the_experts_give_the_same_tokens(mixture: Path) -> None:
    with LLM(str(mixture), **SMALL, dtype="float32") as llm:
        alone = answer(llm)
    with LLM(str(mixture), **SMALL, dtype="float32", tensor_parallel_size=4, enable_expert_parallel=True) as llm:
        kernel = llm.engine.runner.params["layers.0.moe.experts.down.kernel"]
        assert kernel.sharding.shard_shape(kernel.shape)[0] == 2
        assert answer(llm) == alone
    with LLM(str(mixture), **SMALL, dtype="float32", enable_expert_parallel=True) as llm:
        assert answer(llm) == alone, "one device has all experts"
    given: dict[str, Any] = {"sharding_rules": {"expert": "tensor"}, "plan": "plan.json"}
    for name, value in given.items():
        with pytest.raises(RequestError, match=f"enable_expert_parallel and {name} were both given"):
            LLM(str(mixture), **{name: value}, enable_expert_parallel=True)


def test_a_plan_with_whole_experts_is_served_with_the_same_tokens(mixture: Path, tmp_path: Path) -> None:
    spec = default_registry().architecture(open_config(mixture)).spec
    found = plans(spec, parse_topology("v5e:2x2"), Request("inference", 2, 32, dtype="float32"))
    save_plan(next(one for one in found if one.layout == "tensor=4; expert=tensor"), tmp_path / "plan.json")
    with LLM(str(mixture), **SMALL, dtype="float32") as llm:
        alone = answer(llm)
    with LLM(str(mixture), **SMALL, dtype="float32", plan=str(tmp_path / "plan.json")) as llm:
        kernel = llm.engine.runner.params["layers.0.moe.experts.down.kernel"]
        assert kernel.sharding.shard_shape(kernel.shape)[0] == 2
        assert answer(llm) == alone


def test_a_loaded_model_has_its_experts_where_they_are(mixture: Path) -> None:
    model = AutoModelForTPU.from_pretrained(mixture, dtype="float32")
    with pytest.raises(RequestError, match="a loaded model was given with sharding_rules"):
        LLM(model, **SMALL, enable_expert_parallel=True)


def test_tokens_that_fill_a_step_up_have_no_experts(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax
    import numpy as np

    from ttpu_jax.model import moe

    seen: list[np.ndarray] = []
    run = moe.run_local

    def recorded(x: Any, chosen: Any, *rest: Any) -> Any:
        jax.debug.callback(lambda found: seen.append(np.asarray(found)), chosen)
        return run(x, chosen, *rest)

    monkeypatch.setattr(moe, "run_local", recorded)
    jax.clear_caches()
    with LLM(str(mixture), **SMALL, dtype="float32", tensor_parallel_size=4, enable_expert_parallel=True) as llm:
        seen.clear()
        answer(llm)  # five tokens in steps of eight
        jax.effects_barrier()
    jax.clear_caches()
    real = {int((each < 8).all(1).sum()) for each in seen if len(each) == 8}
    assert real == {5}
    assert all(bool((each[5:] == 8).all()) for each in seen if len(each) == 8)


def test_an_engine_refuses_a_plan_that_shards_experts_along_the_rows(tmp_path: Path) -> None:
    config = {
        "model_type": "mixtral", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 1, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    spec = default_registry().architecture(ModelConfig.from_dict(config)).spec
    found = plans(spec, parse_topology("v5e:2x4"), Request("generation", 32, 32))
    plan = next(one for one in found if one.rules)
    with pytest.raises(UnsupportedError, match=r"a plan for data=.*, but an engine shards a model along expert and"):
        plan_for(plan, spec, dtype="bfloat16", quantization=None, purpose="serve", backend="JAX")
