"""`LLM` with the names that scripts for vLLM use: beams, scores, adapters by request, arguments as one value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from ttpu import LLM, AutoModelForTPU, BeamSearchParams, EngineArgs, LoRARequest, SamplingParams
from ttpu_core.errors import RequestError, UnsupportedError

PROMPTS = [[5, 9, 11], [7, 8, 9, 10, 11, 12, 13]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("names") / "llama")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    given: Any = asdict(EngineArgs(model=str(checkpoint), dtype="float32", max_model_len=64, max_num_seqs=8))
    with LLM(**given, progress=None) as made:
        yield made


def logprob(llm: LLM, prompt: list[int], tokens: list[int]) -> float:
    """The sum of the log-probabilities of what follows a prompt."""
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    known = llm.generate([tokens], asked)[0].prompt_logprobs
    assert known is not None
    return sum(each[token].logprob for each, token in zip(known[len(prompt) :], tokens[len(prompt) :], strict=True))


def test_beams_are_those_of_the_backend(llm: LLM, checkpoint: Path) -> None:
    """Which are transformers'. Without ends, lengths are equal, so that ranks are those of the sums."""
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    model = AutoModelForTPU.from_pretrained(checkpoint, dtype="float32")
    for prompt, output in zip(PROMPTS, found, strict=True):
        expected = model.generate(
            [prompt], max_new_tokens=5, num_beams=3, num_return_sequences=3, ignore_eos=True, do_sample=False
        )
        assert [beam.tokens for beam in output.sequences] == np.asarray(expected).tolist()
        for beam in output.sequences:
            assert beam.tokens[: len(prompt)] == prompt and beam.finish_reason == "length"
            assert beam.cum_logprob == pytest.approx(logprob(llm, prompt, beam.tokens), abs=1e-4)
            assert beam.text == llm.get_tokenizer().decode(beam.tokens)


def test_beams_end_and_are_ranked_by_their_length(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=2, max_tokens=1, ignore_eos=True))[0]
    ends = frozenset({first.sequences[0].tokens[-1]})
    monkeypatch.setattr(llm.engine.input_processor, "stop_ids", ends)
    for penalty in (0.0, 1.0, 4.0):
        params = BeamSearchParams(beam_width=2, max_tokens=4, length_penalty=penalty)
        beams = llm.beam_search(PROMPTS[0], params)[0].sequences
        stopped = [beam.finish_reason == "stop" for beam in beams]
        assert [beam.tokens[-1] in ends for beam in beams] == stopped
        lengths = [len(beam.tokens) - end for beam, end in zip(beams, stopped, strict=True)]
        scores = [beam.cum_logprob / length**penalty for beam, length in zip(beams, lengths, strict=True)]
        assert scores == sorted(scores, reverse=True) and len(beams) == 2
    assert stopped != [True, True], "a high penalty prefers long ones"
    params = BeamSearchParams(beam_width=2, max_tokens=4, length_penalty=0.0)
    assert llm.beam_search(PROMPTS[0], params)[0].sequences[0].finish_reason == "stop"


def test_beams_that_cannot_be_searched_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"needs 2000 log-probabilities"):
        llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1000, max_tokens=2))
    with pytest.raises(RequestError, match=r"the context of 64 leaves 57"):
        llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=58))
    for wrong in ({"beam_width": 0, "max_tokens": 2}, {"beam_width": 2, "max_tokens": 2, "temperature": 1.0}):
        with pytest.raises(RequestError):
            BeamSearchParams(**wrong)  # type: ignore[arg-type]


def test_prompts_may_be_ids_by_name(llm: LLM) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    for given in ({"prompt_token_ids": PROMPTS}, {"prompts": [{"prompt_token_ids": each} for each in PROMPTS]}):
        assert [output.outputs[0].token_ids for output in llm.generate(sampling_params=GREEDY, **given)] == expected
    assert llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=GREEDY)[0].outputs[0].token_ids == expected[0]
    for given in ({}, {"prompts": "a", "prompt_token_ids": [1]}):
        with pytest.raises(RequestError, match="not both"):
            llm.generate(**given)  # type: ignore[arg-type]


def test_code_of_checkpoints_is_refused_with_the_reason(checkpoint: Path) -> None:
    with pytest.raises(RequestError, match="trust_remote_code was given, but code from checkpoints is never run here"):
        LLM(str(checkpoint), trust_remote_code=True)
    with pytest.raises(RequestError, match="max_sequences"):  # the next mistake
        LLM(str(checkpoint), trust_remote_code=False, max_sequences=2)


def test_scores_are_cosines(llm: LLM) -> None:
    one, several = "abc", ["abc", "xyz", "abd"]
    scores = [output.score for output in llm.score(one, several, pooling="mean")]
    vectors = [output.embedding for output in llm.encode([one, *several], pooling="mean")]
    np.testing.assert_allclose(scores, [vectors[0] @ vector for vector in vectors[1:]], atol=1e-6)
    assert scores[0] == pytest.approx(1.0) and scores[1] < 0.999
    assert len(llm.score(several, several, pooling="mean")) == 3
    with pytest.raises(RequestError, match="2 texts were to be compared with 3"):
        llm.score(["a", "b"], several, pooling="mean")
    with pytest.raises(RequestError, match="no embedding model"):
        llm.score(one, several)
    with pytest.raises(UnsupportedError, match="classes were asked for"):
        llm.classify(several)


def test_an_adapter_is_loaded_when_a_request_names_it(checkpoint: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapted.save_pretrained(tmp_path / "poet")
    given: Any = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "progress": None}
    with LLM(str(checkpoint), enable_lora=True, **given) as llm:
        poet = LoRARequest("poet", 1, str(tmp_path / "poet"))
        plain, poem = (
            [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, lora_request=each)]
            for each in (None, poet)
        )
        assert plain != poem and list(llm.engine.adapters) == ["poet"]
        mixed = llm.generate(PROMPTS, GREEDY, lora_request=[None, LoRARequest("poet")])
        assert [output.outputs[0].token_ids for output in mixed] == [plain[0], poem[1]]
        with pytest.raises(RequestError, match="two names of one setting"):
            llm.generate(PROMPTS, GREEDY, adapter="poet", lora_request=poet)
        with pytest.raises(RequestError, match="its lora_path is empty"):
            llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("singer"))
