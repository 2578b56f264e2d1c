"""Serving models that no plugin describes: every request gets the tokens of transformers' model alone, whatever runs
beside it; what needs a plugin is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("ttpu_any")

from serving import Running, running  # noqa: E402

from ttpu import LLM, SamplingParams  # noqa: E402
from ttpu_any.runner import StockRunner  # noqa: E402
from ttpu_any.steps import Manner  # noqa: E402
from ttpu_core.errors import RequestError, UnsupportedError  # noqa: E402
from ttpu_serve.api.engine_config import EngineConfig  # noqa: E402
from ttpu_serve.api.open_engine import open_engine, read_options  # noqa: E402

pytestmark = pytest.mark.torch

VOCAB, NEW = 61, 8
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_key_value_heads": 4, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
LENGTHS = (5, 1, 17, 40, 9)


@dataclass(frozen=True)
class Stock:
    """A checkpoint of a type without a plugin, and transformers' own model of it."""

    folder: Path
    reference: Any

    def alone(self, prompt: list[int], count: int = NEW) -> list[int]:
        """The likeliest tokens after a prompt, each by reading the whole text."""
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(count):
                ids = torch.cat([ids, self.reference(ids).logits[:, -1:].argmax(-1)], 1)
        return [int(token) for token in ids[0, len(prompt) :]]


def make(folder: Path, model_type: str, **keys: Any) -> Stock:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type](**CONFIG | keys))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.eval().save_pretrained(folder)
    return Stock(folder, model)


def prompts(seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[int(token) for token in random.integers(3, VOCAB, length)] for length in LENGTHS]


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def biogpt(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return make(tmp_path_factory.mktemp("biogpt"), "biogpt")


@pytest.fixture(scope="module")
def llm(biogpt: Stock) -> Any:
    """An engine with two slots, so that requests wait for those before them and take over their slots."""
    return LLM(str(biogpt.folder), backend="jax", dtype="float32", max_num_seqs=2, progress=None)


def test_requests_that_share_slots_get_the_tokens_of_the_model_alone(biogpt: Stock, llm: Any) -> None:
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], greedy())
    assert [list(each.outputs[0].token_ids) for each in found] == [biogpt.alone(prompt) for prompt in prompts()]


def test_experts_are_multiplied_once_for_all_slots(tmp_path: Path) -> None:
    stock = make(tmp_path, "aria_text", **EXPERTS)
    engine = LLM(
        str(tmp_path), backend="jax", dtype="float32", max_num_seqs=3, mesh="data=3,tensor=2", progress=None,
        sampling_level="greedy",
    )  # fmt: skip
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts()], greedy())
    assert [list(each.outputs[0].token_ids) for each in found] == [stock.alone(prompt) for prompt in prompts()]


def test_penalties_rules_and_log_probabilities_are_those_of_any_engine(biogpt: Stock, llm: Any) -> None:
    prompt = prompts(1)[2]
    with torch.no_grad():
        logits = biogpt.reference(torch.tensor([prompt])).logits[0, -1]
    best = [int(token) for token in logits.argsort(descending=True)[:3]]
    asked = greedy(logprobs=2, logit_bias={best[0]: -100.0}, presence_penalty=0.1)
    first = llm.generate([{"prompt_token_ids": prompt}], asked)[0].outputs[0]
    assert first.token_ids[0] == best[1]
    found = first.logprobs[0]  # of the model itself, before rules
    assert found[best[1]].logprob == pytest.approx(float(logits.log_softmax(-1)[best[1]]), abs=1e-4)
    again = llm.generate([{"prompt_token_ids": prompt}], greedy())[0].outputs[0]
    assert list(again.token_ids) == biogpt.alone(prompt), "a slot keeps nothing of the request before"


def test_sleep_and_wake_up_keep_the_weights(biogpt: Stock, llm: Any) -> None:
    core = llm.engine.core if hasattr(llm.engine, "core") else llm.engine
    core.sleep()
    core.wake_up()
    prompt = prompts(2)[0]
    assert list(llm.generate([{"prompt_token_ids": prompt}], greedy())[0].outputs[0].token_ids) == biogpt.alone(prompt)


@pytest.fixture(scope="module")
def served(biogpt: Stock) -> Iterator[Running]:
    pytest.importorskip("openai")
    given = {"dtype": "float32", "max_num_seqs": 2, "sampling_level": "draw"}
    load, config = read_options(str(biogpt.folder), given, "jax")
    with running(open_engine(str(biogpt.folder), load, config, backend="jax", progress=None)) as server:
        yield server


def test_a_client_that_leaves_disturbs_nobody(biogpt: Stock, served: Running) -> None:
    client = served.client()
    extra = {"ignore_eos": True, "return_token_ids": True}
    options: Any = {"model": client.models.list().data[0].id, "temperature": 0, "extra_body": extra}
    stream = client.completions.create(prompt=prompts()[2], max_tokens=40, stream=True, **options)
    next(iter(stream))
    stream.close()
    for prompt in prompts(3):
        answer = client.completions.create(prompt=prompt, max_tokens=NEW, **options)
        assert answer.choices[0].model_dump()["token_ids"] == biogpt.alone(prompt)
        assert answer.usage.prompt_tokens == len(prompt)


def test_an_embedding_is_refused(served: Running) -> None:
    import openai

    client = served.client()
    with pytest.raises(openai.BadRequestError, match="an embedding was asked for, but no plugin describes"):
        client.embeddings.create(model=client.models.list().data[0].id, input=[prompts()[0]])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"page_size": 16}, "page_size=16 was given, but no plugin describes this model"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' was given"),
        ({"speculative": "ngram"}, "speculative='ngram' was given"),
        ({"max_model_len": 65}, "max_model_len is 65, but this model's context holds 64"),
        ({"kv_cache_memory": 10_000}, r"1 sequences of 64 tokens need 0\.00 GiB"),
    ],
)
def test_what_needs_pages_is_refused(biogpt: Stock, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        LLM(str(biogpt.folder), backend="jax", dtype="float32", progress=None, **options)


@pytest.mark.parametrize(
    ("manner", "said"),
    [
        (Manner(cache=False), "its cache cannot be kept, so that each token would read the whole text again"),
        (Manner("none", decode_mask=False), "it computes something else for padded prompts"),
    ],
)
def test_models_without_a_cache_of_fixed_size_are_refused(manner: Manner, said: str) -> None:
    programs: Any = SimpleNamespace(manner=manner, steps=SimpleNamespace(model=None))
    with pytest.raises(UnsupportedError, match=said):
        StockRunner(programs, {}, EngineConfig())
