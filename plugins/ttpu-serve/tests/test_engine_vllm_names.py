"""`LLM` with the names that scripts for vLLM use: beams, scores, adapters by request, arguments as one value."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from ttpu import (
    LLM,
    AutoModelForTPU,
    BeamSearchParams,
    EngineArgs,
    GuidedDecoding,
    LoRARequest,
    SamplingParams,
    StructuredOutputsParams,
)
from ttpu_core.errors import CheckpointError, RequestError, UnsupportedError
from ttpu_serve.api.default_sampling import default_sampling, within

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


def test_prompts_share_a_prefix_with_those_of_their_salt_alone(llm: LLM) -> None:
    tokens = [*range(100, 140)]

    def cached(salt: str | None) -> int:
        (output,) = llm.generate({"prompt_token_ids": tokens, "cache_salt": salt}, GREEDY)
        return output.num_cached_tokens

    assert cached(None) == 0 and (found := cached(None)) > 0
    assert [cached("mine"), cached("mine"), cached("yours")] == [0, found, 0]
    before = llm.engine.stats().prefix_hits
    beams = BeamSearchParams(beam_width=2, max_tokens=1)
    llm.beam_search([{"prompt_token_ids": tokens, "cache_salt": salt} for salt in ("mine", "ours")], beams)
    assert llm.engine.stats().prefix_hits == before + found
    with pytest.raises(RequestError, match="cache_salt is 3, but a text is needed"):
        cached(3)  # type: ignore[arg-type]


def test_outputs_have_the_text_of_their_prompts(llm: LLM) -> None:
    """vLLM's prompts as mappings, and conversations."""
    tokens = llm.get_tokenizer()("ab")["input_ids"]
    for prompt, text in (("ab", "ab"), ({"prompt": "ab"}, "ab"), ({"prompt_token_ids": tokens}, None)):
        output = llm.generate(prompt, GREEDY)[0]  # type: ignore[arg-type]
        assert (output.prompt, output.prompt_token_ids) == (text, tokens)
    template = (
        "{% for message in messages %}{{ mood }}{{ message.role[0] }}{{ message.content }};{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    chat = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "assistant", "content": "yz"}]
    for more, text in (
        ({}, "ux;ayz;a"),
        ({"add_generation_prompt": False}, "ux;ayz;"),
        ({"continue_final_message": True}, "ux;ayz"),
        ({"chat_template_kwargs": {"mood": "!"}, "lora_request": None}, "!ux;!ayz;a"),
    ):
        answer = llm.chat(chat, GREEDY, chat_template=template, **more)[0]  # type: ignore[arg-type]
        assert answer.prompt == text
        assert answer.prompt_token_ids == llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokenize": True}, "has 'tokenize', but only variables"),
        ({"add_generation_prompt": False}, "has 'add_generation_prompt', but only variables"),
        ([1], "is .1., but a mapping"),
    ],
)
def test_variables_of_templates_are_no_arguments_of_rendering(llm: LLM, given: Any, said: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs {said}"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, chat_template="x", chat_template_kwargs=given)


def test_templates_get_arguments_of_tool_calls_as_values(llm: LLM) -> None:
    """Or as text where they add them to one."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "x"}]
    for written in ("{{ arguments | tojson }}", "{{ '' + arguments }}"):
        template = "{% set arguments = messages[0].tool_calls[0].function.arguments %}" + written
        assert llm.chat(chat, GREEDY, chat_template=template)[0].prompt == '{"a": 1}'
    with pytest.raises(RequestError, match="no cats"):
        llm.chat(chat, GREEDY, chat_template="{{ raise_exception('no cats') }}")


def test_sampling_is_the_checkpoints_where_none_is_given(
    llm: LLM, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    shutil.copytree(checkpoint, said)
    file = said / "generation_config.json"
    for text, params in (
        ('{"do_sample": true, "temperature": 0.5, "top_k": 1, "top_p": null}', {"temperature": 0.5, "top_k": 1}),
        ('{"do_sample": false, "temperature": 0.5}', {}),
    ):
        file.write_text(text)
        assert default_sampling(str(said)) == params
    monkeypatch.setattr(llm, "_default_sampling", {"temperature": 0.5, "top_k": 1})
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=1)
    expected = llm.generate(PROMPTS, SamplingParams(temperature=0.0))  # the likeliest token alone
    assert [each.outputs for each in llm.generate(PROMPTS)] == [each.outputs for each in expected]


def test_default_sampling_is_read_once_and_asks_for_nothing_that_the_engine_lacks(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    shutil.copytree(checkpoint, said)
    (said / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.05}')
    given: Any = {"dtype": "float32", "max_model_len": 32, "max_num_seqs": 2, "progress": None, "penalties": False}
    with LLM(str(said), **given, sampling_level="draw") as made:
        said.rename(tmp_path / "moved")
        assert made.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=3)
        assert len(made.generate([[5, 6]])[0].outputs[0].token_ids) == SamplingParams().max_tokens
    with pytest.raises(RequestError, match="generation_config is 'some', but it is auto"):
        LLM(str(said), generation_config="some")
    asked = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.05}
    assert within(asked, penalties=True, sampling_level="all") == asked
    assert within(asked, penalties=False, sampling_level="all") == {"temperature": 0.5, "top_k": 3}
    assert within(asked, penalties=True, sampling_level="draw") == {"temperature": 0.5, "top_k": 3}
    assert within(asked, penalties=True, sampling_level="greedy") == {}


@pytest.mark.parametrize(
    ("asked", "same"),
    [
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"json": {"type": "integer"}}, {"json": {"type": "integer"}}),
        ({"json_object": True}, {"json": True}),
        ({"regex": "[0-9]"}, {"regex": "[0-9]"}),
        ({"grammar": "start: /a/"}, {"grammar": "start: /a/"}),
    ],
)
def test_structured_outputs_are_guided_decoding(asked: dict[str, Any], same: dict[str, Any]) -> None:
    for given in (StructuredOutputsParams(**asked), asked):
        params = SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
        assert params.guided == GuidedDecoding(**same)
        assert replace(params, seed=1).guided == params.of_sequence(1).guided == params.guided
    for wrong in ({}, {**asked, "regex": "b", "choice": ["c"]}, {"json": {}, "json_object": True}):
        with pytest.raises(RequestError):
            StructuredOutputsParams(**wrong)


def test_the_text_of_a_stop_token_is_included_where_that_is_asked_for(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], replace(GREEDY, ignore_eos=True))[0].outputs[0]
    stop = whole.token_ids[0]
    for included in (False, True):
        asked = replace(GREEDY, stop_token_ids=(stop,), include_stop_str_in_output=included)
        found = llm.generate(PROMPTS[0], asked)[0].outputs[0]
        assert (found.token_ids, found.finish_reason, found.stop_reason) == ([stop], "stop", stop)
        assert found.text == (llm.get_tokenizer().decode([stop]) if included else "")


def test_pooled_outputs_are_where_vllm_has_them(llm: LLM) -> None:
    embedded, scored = llm.embed("ab")[0], llm.score("ab", "ab", pooling="mean")[0]
    assert embedded.outputs.embedding is embedded.embedding and embedded.outputs.data is embedded.embedding
    assert scored.outputs.score == scored.score


def test_an_engine_sleeps_at_vllms_first_level(llm: LLM) -> None:
    for refused in (lambda: llm.sleep(level=2), lambda: llm.wake_up(tags=["weights"])):
        with pytest.raises(RequestError, match="leave it out"):
            refused()
    llm.sleep(level=1)
    llm.wake_up()
    assert llm.generate(PROMPTS, GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"enforce_eager": True}, "programs are always compiled"),
        ({"seed": 0}, "pass seed in SamplingParams"),
        ({"block_size": 16, "page_size": 16}, "two names of one setting"),
    ],
)
def test_options_of_vllm_without_effect_are_refused_with_the_reason(checkpoint: Path, option: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        LLM(str(checkpoint), **option)


def test_a_loaded_model_has_a_tokenizer_of_its_own(llm: LLM, checkpoint: Path) -> None:
    with pytest.raises(RequestError, match="a loaded model was given with tokenizer"):
        LLM(llm.engine.model, tokenizer=str(checkpoint))
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(str(checkpoint), tokenizer="nowhere")


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
    assert len({output.request_id for output in llm.score(several, several, pooling="mean")}) == 3
    assert len({output.request_id for output in llm.score(one, several, pooling="mean")}) == 3
    with pytest.raises(RequestError, match="2 texts were to be compared with 3"):
        llm.score(["a", "b"], several, pooling="mean")
    with pytest.raises(RequestError, match="no embedding model"):
        llm.score(one, several)
    with pytest.raises(UnsupportedError, match="classes were asked for"):
        llm.classify(several)


def test_an_adapter_is_loaded_when_a_request_names_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.5)
        adapted.save_pretrained(tmp_path / "later")
        later = LoRARequest("poet", 1, str(tmp_path / "later"))
        with pytest.raises(RequestError, match=r"'poet' at .* give each its own lora_name"):
            llm.generate(PROMPTS, GREEDY, lora_request=[poet, later])
        loaded: list[str] = []
        load = llm.load_adapter
        monkeypatch.setattr(llm, "load_adapter", lambda name, path: (loaded.append(path), load(name, path)))
        asked = (later, later, LoRARequest("poet"), poet)
        found = [
            [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, lora_request=one)] for one in asked
        ]
        assert found[0] == found[1] == found[2] != poem == found[3], "an adapter of another path is loaded"
        assert loaded == [later.lora_path, poet.lora_path]
        add, inbox, lock = llm.engine.add, llm.engine.inbox, llm.engine.turns.lock

        def replace_poet() -> None:
            if lock.acquire(blocking=False):
                try:
                    load("poet", later.lora_path)
                finally:
                    lock.release()

        def add_late(*given: Any, **more: Any) -> None:
            with ThreadPoolExecutor(1) as other:
                other.submit(replace_poet).result()
            add(*given, **more)

        with monkeypatch.context() as patched:
            patched.setattr(llm.engine, "add", add_late)
            disturbed = llm.generate(PROMPTS, GREEDY, lora_request=poet)
        assert [output.outputs[0].token_ids for output in disturbed] == poem, "other threads wait until all are added"

        def inbox_late(names: Any) -> Any:
            replace_poet()
            return inbox(names)

        search = BeamSearchParams(beam_width=2, max_tokens=3)
        alone = llm.beam_search(PROMPTS, search, lora_request=poet)
        with monkeypatch.context() as patched:
            patched.setattr(llm.engine, "inbox", inbox_late)
            for one in (LoRARequest("poet"), poet):
                found = llm.beam_search(PROMPTS, search, lora_request=one)
                for output, expected in zip(found, alone, strict=True):
                    assert [beam.tokens for beam in output.sequences] == [beam.tokens for beam in expected.sequences]
