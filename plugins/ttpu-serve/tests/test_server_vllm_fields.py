"""Bad words, beams and the best of several sequences: by `LLM` and over HTTP, by OpenAI's own client, with a small
trained checkpoint whose tokens transformers confirms. The engine drafts tokens, which must change none."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from serving import Running, running, until

from ttpu import LLM, BeamSearchParams, SamplingParams
from ttpu_serve.execution.bad_words import sequences_of
from ttpu_serve.server import ServerSettings
from ttpu_serve.server.beams import BeamStream, beam_params
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.protocol import CompletionRequest

openai = pytest.importorskip("openai")

CHECKPOINT = Path(__file__).parents[3] / "examples/checkpoints/pydoc-llama"
PROMPTS = ['def read(self, path):\n    """Return', "The function returns", "import os\n\nclass Server:"]
ENDS = [2, 203, 30, 16]
NEW, WIDTH, LENGTH = 24, 3, 10
BEAMS: dict[str, dict[str, Any]] = {
    "no ends": {"ignore_eos": True},
    "ends": {},
    "short ones": {"length_penalty": 0.0},
    "the first to end": {"length_penalty": -1.0, "early_stopping": True},
    "only ended ones": {"length_penalty": 3.0, "early_stopping": True},
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 8,
    "sequence_buckets": (4,),
    "token_buckets": (64,),
    "speculative": "ngram:3",
    "penalties": False,
    "strict_compile": True,
    "progress": None,
}


@dataclass
class Answers:
    """What `LLM` answers to the prompts: their ids, greedily, the words that were forbidden then, without these, and
    beams."""

    ids: list[list[int]]
    plain: list[list[int]]
    words: list[str]
    without: list[list[int]]
    beams: dict[str, list[Any]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """With a checkpoint in which some frequent tokens end a sequence as well, so that beams end."""
    folder = tmp_path_factory.mktemp("checkpoint") / "pydoc-llama"
    folder.mkdir()
    for file in CHECKPOINT.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return LLM(str(folder), **OPTIONS)


@pytest.fixture(scope="module")
def answers(llm: LLM) -> Answers:
    """Computed before a server owns the engine."""

    def generated(**params: Any) -> list[list[int]]:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, **params))
        return [output.outputs[0].token_ids for output in outputs]

    plain = generated()
    written = llm.get_tokenizer().decode
    words = [written(tokens[at:end]) for tokens in plain for at, end in ((0, 2), (2, 4), (9, 10))]
    beams = {
        name: llm.beam_search(PROMPTS, BeamSearchParams(WIDTH, LENGTH, **options)) for name, options in BEAMS.items()
    }
    ids = [llm.engine.token_ids(prompt) for prompt in PROMPTS]
    return Answers(ids, plain, words, generated(bad_words=words), beams)


@pytest.fixture(scope="module")
def model() -> Any:
    """The checkpoint in transformers."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def server(llm: LLM, answers: Answers) -> Iterator[Running]:
    with running(llm.engine, ServerSettings(model_names=("m",), max_choices=20)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return server.client(timeout=60)


def complete(client: Any, prompt: Any, **fields: Any) -> Any:
    """A completion; fields beyond OpenAI's go into the body."""
    known = {"n", "best_of", "logprobs", "max_tokens", "seed", "stream", "echo", "temperature", "stop", "logit_bias"}
    extra = {name: fields.pop(name) for name in list(fields) if name not in known}
    asked = {"max_tokens": LENGTH, **fields}
    return client.completions.create(model="m", prompt=prompt, extra_body={"return_token_ids": True, **extra}, **asked)


def tokens_of(answer: Any) -> list[list[int]]:
    return [choice.token_ids for choice in answer.choices]


def free(server: Running) -> bool:
    """Whether the engine serves nothing and all pages are free."""
    stats = server.http().get("/stats").json()["engine"]
    return stats["running"] == stats["waiting"] == 0 and not any(stats["pages_in_use"].values())


# Bad words


def test_bad_words_leave_the_tokens_that_transformers_leaves(llm: LLM, answers: Answers, model: Any) -> None:
    import torch

    bad = sequences_of(answers.words, llm.get_tokenizer())
    assert {1, 2, 3} <= {len(word) for word in bad}, "words of one token and of several"
    for prompt, plain, without in zip(answers.ids, answers.plain, answers.without, strict=True):
        options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found = model.generate(torch.tensor([prompt]), bad_words_ids=[list(word) for word in bad], **options)
        assert without == found[0, len(prompt) :].tolist() != plain
    assert llm.engine.stats().drafted > 0, "drafts were checked with the same rule"


def test_bad_words_over_http_are_those_of_the_engine(client: Any, answers: Answers) -> None:
    asked = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True, "bad_words": answers.words}
    assert tokens_of(complete(client, PROMPTS, **asked)) == answers.without
    assert tokens_of(complete(client, answers.ids, **asked)) == answers.without
    chunks = list(complete(client, PROMPTS[0], stream=True, **asked))
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == answers.without[0]


def test_a_bad_word_is_not_said_however_often_it_is_drawn(client: Any, llm: LLM) -> None:
    asked = {"n": 8, "temperature": 1.5, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    words = ["the", "function", "async def"]
    bad = sequences_of(words, llm.get_tokenizer())

    def said(tokens: list[int]) -> bool:
        return any(tokens[at : at + len(word)] == list(word) for word in bad for at in range(len(tokens)))

    assert sum(map(said, tokens_of(complete(client, PROMPTS[1], **asked)))) > 4
    assert not any(map(said, tokens_of(complete(client, PROMPTS[1], bad_words=words, **asked))))


def test_bad_words_hold_within_a_form(client: Any) -> None:
    asked = {"temperature": 0, "guided_choice": ["return value", "other value"]}
    first = complete(client, PROMPTS[0], **asked).choices[0].text
    (other,) = {"return value", "other value"} - {first}
    # all ways to write it begin with one of its first letter's tokens
    words = [first.split()[0][:end] for end in range(1, len(first.split()[0]) + 1)]
    assert complete(client, PROMPTS[0], bad_words=words, **asked).choices[0].text == other
    with pytest.raises(openai.BadRequestError, match="bad_words leave no token that the request's guide allows"):
        complete(client, PROMPTS[0], bad_words=["x"], guided_regex="x")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([""], "should have at least 1 character"),
        (["x"] * 1025, "at most 1,024 are allowed"),
        (["x" * 257], "at most 256 characters"),
        (["\U0001f600" * 30], "but it may have 1 to 64"),
        ([3], "should be a valid string"),
    ],
    ids=["empty", "many", "long", "of many tokens", "a number"],
)
def test_words_that_are_none_or_too_much_are_refused(client: Any, words: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        complete(client, "x", bad_words=words)
    assert refused.value.param.startswith("bad_words")


# Beams


def reference(model: Any, prompt: list[int], ends: set[int], options: dict[str, Any]) -> list[tuple[list[int], float]]:
    """Beam search as vLLM defines it, over the logits of whole sequences: (new tokens, sum of log-probabilities)."""
    import torch

    penalty, running, ended = options.get("length_penalty", 1.0), [([], 0.0)], []

    def score(beam: tuple[list[int], float]) -> float:
        stopped = bool(beam[0]) and beam[0][-1] in ends
        return beam[1] / float(len(prompt) + len(beam[0]) - stopped) ** penalty

    for _ in range(LENGTH):
        grown = []
        for tokens, total in running:
            logprobs = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0, -1], -1)
            values, likeliest = logprobs.topk(2 * WIDTH)
            pairs = zip(likeliest.tolist(), values.tolist(), strict=True)
            grown += [([*tokens, token], total + value) for token, value in pairs]
        ended += [beam for beam in grown if beam[0][-1] in ends]
        running = sorted((beam for beam in grown if beam[0][-1] not in ends), key=score, reverse=True)[:WIDTH]
        if options.get("early_stopping") and len(ended) >= WIDTH:
            running = []
            break
    return sorted([*ended, *running], key=score, reverse=True)[:WIDTH]


@pytest.mark.parametrize("name", BEAMS)
def test_beams_are_the_likeliest_sequences(answers: Answers, model: Any, name: str) -> None:
    ends = set() if BEAMS[name].get("ignore_eos") else set(ENDS)
    for prompt, output in zip(answers.ids, answers.beams[name], strict=True):
        expected = reference(model, prompt, ends, BEAMS[name])
        assert [beam.tokens[len(prompt) :] for beam in output.sequences] == [tokens for tokens, _ in expected]
        sums = [beam.cum_logprob for beam in output.sequences]
        np.testing.assert_allclose(sums, [total for _, total in expected], atol=1e-3)
        for beam in output.sequences:
            assert (beam.finish_reason == "stop") == (beam.tokens[-1] in ends)
            told = [each[token].logprob for each, token in zip(beam.logprobs, beam.tokens[len(prompt) :], strict=True)]
            assert sum(told) == pytest.approx(beam.cum_logprob)


def test_the_cases_of_beams_differ(answers: Answers) -> None:
    """Or the test above would not see what an option does."""
    found = [[[beam.tokens for beam in output.sequences] for output in beams] for beams in answers.beams.values()]
    assert len({str(beams) for beams in found}) == len(found)


def test_beams_without_ends_are_those_of_transformers(answers: Answers, model: Any) -> None:
    import torch

    options: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for prompt, output in zip(answers.ids, answers.beams["no ends"], strict=True):
        found = model.generate(torch.tensor([prompt]), num_beams=WIDTH, num_return_sequences=WIDTH, **options)
        assert [beam.tokens for beam in output.sequences] == found.tolist()


@pytest.mark.parametrize("name", BEAMS)
def test_beams_over_http_are_those_of_the_engine(client: Any, llm: LLM, answers: Answers, name: str) -> None:
    answer = complete(client, PROMPTS, n=WIDTH, use_beam_search=True, logprobs=2, **BEAMS[name])
    expected = [
        (beam, len(prompt))
        for prompt, output in zip(answers.ids, answers.beams[name], strict=True)
        for beam in output.sequences
    ]
    said, tokenizer = 0, llm.get_tokenizer()
    for choice, (beam, prompt) in zip(answer.choices, expected, strict=True):
        stopped = beam.finish_reason == "stop"
        new = beam.tokens[prompt:]
        said += len(new)
        assert (choice.token_ids, choice.finish_reason) == (new, beam.finish_reason)
        before, whole = (
            tokenizer.decode(beam.tokens[:prompt]),
            tokenizer.decode(beam.tokens[: len(beam.tokens) - stopped]),
        )
        assert choice.text == whole[len(before) :]
        values = [each[token].logprob for each, token in zip(beam.logprobs, new, strict=True)]
        assert choice.logprobs.token_logprobs == pytest.approx(values, abs=1e-3)
        assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < answer.usage.prompt_tokens and cached % 8 == 0, "pages of 8 tokens of the prompts alone"
    assert answer.usage.prompt_tokens == sum(map(len, answers.ids)) and answer.usage.completion_tokens == said


def test_a_stream_of_beams_says_them_at_its_end(client: Any, server: Running) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 6, "n": 2}
    extra = {"use_beam_search": True, "return_token_ids": True}
    whole = client.chat.completions.create(extra_body=extra, **asked)
    chunks = list(client.chat.completions.create(extra_body=extra, stream=True, **asked))
    for choice in whole.choices:
        own = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(each.delta.content or "" for each in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason
    until(lambda: free(server))


def test_what_says_how_to_draw_is_told_to_have_no_effect(server: Running) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 3, "use_beam_search": True, "n": 2, "top_p": 1, "seed": 3}
    with server.http() as http:
        plain = http.post("/v1/completions", json=body)
        drawn = http.post("/v1/completions", json={**body, "temperature": 1.5, "top_k": 3})
    assert plain.status_code == 200 and "x-ttpu-warning" not in plain.headers
    assert drawn.json()["choices"] == plain.json()["choices"]
    assert drawn.headers["x-ttpu-warning"].endswith("temperature, top_k")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 11, "use_beam_search": True}, "needs 22 log-probabilities of each token, but this engine reports"),
        ({"n": 3, "prompt": ["x"] * 7, "use_beam_search": True}, "21 sequences, but one request may have 20"),
        (
            {"n": 9, "prompt": ["x"] * 2, "max_tokens": 125, "use_beam_search": True},
            "may have 2,048, 16 times the context",
        ),
        ({"bad_words": ["x"], "use_beam_search": True}, "bad_words was given with use_beam_search"),
        ({"stop": ["x"], "use_beam_search": True}, "stop was given with use_beam_search"),
        ({"logit_bias": {"1": 1}, "use_beam_search": True}, "logit_bias was given with use_beam_search"),
        ({"allowed_token_ids": [1], "use_beam_search": True}, "allowed_token_ids was given with use_beam_search"),
        ({"guided_regex": "x", "use_beam_search": True}, "which beams do not follow"),
        ({"echo": True, "logprobs": 1, "use_beam_search": True}, "no log-probabilities of prompts"),
        ({"n": 2, "best_of": 3, "use_beam_search": True}, "best_of is 3 and n 2"),
        ({"length_penalty": 0.5}, "'length_penalty' was given without use_beam_search"),
        ({"early_stopping": "never"}, "'early_stopping' was given without use_beam_search"),
        ({"length_penalty": 1e9, "use_beam_search": True}, "less than or equal to 10"),
        ({"n": 3, "best_of": 2}, "best_of is 2, but n is 3"),
        ({"best_of": 3, "stream": True}, "a stream cannot be ranked"),
        ({"best_of": 7, "prompt": ["x"] * 3}, "best_of is 7 with 3 prompts"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_go_together_or_takes_too_much_is_refused(client: Any, fields: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        complete(client, fields.pop("prompt", "x"), **fields)
    assert refused.value.param in {*fields, "n"}


def test_beams_that_never_fit_into_the_queue_are_refused_at_once(
    server: Running, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a step whose beams are too many."""
    scheduler = server.core.scheduler
    monkeypatch.setattr(scheduler, "config", replace(scheduler.config, max_num_seqs=2, max_waiting=3))
    for prompt, n in (("x", 6), (["x"] * 2, 3)):
        with pytest.raises(openai.BadRequestError, match="6 sequences, but at most 2 run at once"):
            complete(client, prompt, n=n, max_tokens=2, use_beam_search=True)
    assert len(complete(client, "x", n=6, max_tokens=1, use_beam_search=True).choices) == 6


def test_a_server_that_keeps_no_prefixes_refuses_beams(
    server: Running, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = server.core.scheduler
    monkeypatch.setattr(scheduler, "config", replace(scheduler.config, enable_prefix_caching=False))
    with pytest.raises(openai.BadRequestError, match="this server keeps no prefixes"):
        complete(client, "x", use_beam_search=True)


def test_strict_fields_refuse_what_has_no_effect_on_beams() -> None:
    body = {"model": "m", "prompt": "x", "use_beam_search": True, "top_k": 3}
    request, params = CompletionRequest.model_validate(body), SamplingParams(n=2)
    with pytest.raises(ApiError, match="top_k was given with use_beam_search, but beams are not drawn"):
        beam_params(request, params, 3)
    asked = beam_params(request.model_copy(update={"top_k": -1}), params, 3)
    assert asked == BeamSearchParams(beam_width=2, max_tokens=3)


def test_a_search_whose_client_leaves_is_aborted(server: Running) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 120, "use_beam_search": True, "n": 4, "ignore_eos": True}
    before = server.core.stats().requests
    place, told = httpx.URL(server.url), json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    with socket.create_connection((place.host, place.port)) as client:
        client.sendall(f"{head}\r\nContent-Length: {len(told)}\r\n\r\n{told}".encode())
        until(lambda: server.engine.ongoing)
    until(lambda: not server.engine.ongoing and free(server))
    began = server.core.stats().requests - before
    assert 0 < began < 4 * 120 - 8, "it did not run to its end"
    time.sleep(0.1)
    assert server.core.stats().requests == before + began


def test_a_search_that_is_closed_closes_its_streams() -> None:
    closed: list[int] = []

    class Step:
        request_id = "one"

        def __init__(self, number: int) -> None:
            self.number = number

        def close(self) -> None:
            closed.append(self.number)

    engine: Any = SimpleNamespace(ongoing=set())
    first: Any = Step(1)
    submit: Any = None
    stream = BeamStream(engine, [1], BeamSearchParams(2, 2), first, submit, submit, False)
    assert engine.ongoing == {stream}
    stream._running.append(Step(2))  # type: ignore[arg-type]
    stream.close()
    assert closed == [1, 2] and not engine.ongoing


def test_a_drain_waits_for_a_search(server: Running, client: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        searching = pool.submit(complete, client, PROMPTS[1], n=2, use_beam_search=True, ignore_eos=True, max_tokens=30)
        until(lambda: server.engine.ongoing)
        server.engine._closing = True
        try:
            with pytest.raises(openai.APIStatusError, match="shutting down"):
                complete(client, PROMPTS[1], n=2, use_beam_search=True)
            assert len(searching.result(60).choices[0].token_ids) == 30
        finally:
            server.engine._closing = False


# The best of several


def test_the_best_sequences_are_those_of_the_highest_log_probability(client: Any) -> None:
    asked = {"temperature": 1.0, "seed": 11, "logprobs": 0}
    every = complete(client, PROMPTS[:2], n=5, **asked)
    best = complete(client, PROMPTS[:2], n=2, best_of=5, **asked)
    expected: list[list[int]] = []
    for begin in (0, 5):
        ranked = sorted(every.choices[begin : begin + 5], key=lambda one: -sum(one.logprobs.token_logprobs))
        expected += [choice.token_ids for choice in ranked[:2]]
    assert tokens_of(best) == expected != [*tokens_of(every)[:2], *tokens_of(every)[5:7]]
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage == every.usage, "all of them were generated"
    plain = complete(client, PROMPTS[:2], n=2, best_of=5, temperature=1.0, seed=11)
    assert tokens_of(plain) == expected and plain.choices[0].logprobs is None


def test_each_choice_has_the_prompts_log_probabilities(client: Any) -> None:
    asked = {"echo": True, "logprobs": 1, "temperature": 1.0, "seed": 11, "max_tokens": 3}
    answer = complete(client, PROMPTS[1], n=2, best_of=5, **asked)
    alone = complete(client, PROMPTS[1], **asked).choices[0].logprobs
    prompt = len(alone.tokens) - 3
    for choice in answer.choices:
        assert choice.text.startswith(PROMPTS[1])
        assert choice.logprobs.tokens[:prompt] == alone.tokens[:prompt]
        assert choice.logprobs.token_logprobs[1:prompt] == pytest.approx(alone.token_logprobs[1:prompt], abs=1e-4)


# Names of tokens, and what is said again


def test_log_probabilities_name_tokens_by_their_ids(client: Any) -> None:
    extra = {"return_tokens_as_token_ids": True}
    asked = {"temperature": 0, "max_tokens": 4}
    choice = complete(client, PROMPTS[0], logprobs=2, **asked, **extra).choices[0]
    plain = complete(client, PROMPTS[0], logprobs=2, **asked).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert all(name.startswith("token_id:") for top in choice.logprobs.top_logprobs for name in top)
    assert choice.logprobs.text_offset == plain.logprobs.text_offset and choice.text == plain.text
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, **asked}
    content = client.chat.completions.create(extra_body=extra, **chat).choices[0].logprobs.content
    named = client.chat.completions.create(**chat).choices[0].logprobs.content
    chunks = list(client.chat.completions.create(extra_body=extra, stream=True, **chat))
    streamed = [entry for chunk in chunks for each in chunk.choices if each.logprobs for entry in each.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    for entry, other in zip(content, named, strict=True):
        assert entry.token.startswith("token_id:") and entry.bytes == other.bytes
        assert [top.token[:9] for top in entry.top_logprobs] == ["token_id:"] * 2


def test_text_may_be_left_out(client: Any) -> None:
    asked = {"temperature": 0, "max_tokens": 4}
    answer = complete(client, PROMPTS[0], detokenize=False, **asked)
    assert answer.choices[0].text == "" and tokens_of(answer) == tokens_of(complete(client, PROMPTS[0], **asked))


@pytest.mark.parametrize(
    ("last", "echoed"),
    [({"role": "assistant", "content": "A list is"}, "A list is"), ({"role": "user", "content": "And now?"}, "")],
    ids=["its own role", "another role"],
)
def test_a_reply_repeats_a_message_of_its_role(client: Any, last: Any, echoed: str) -> None:
    extra = {"add_generation_prompt": not echoed, "continue_final_message": bool(echoed)}
    messages = [{"role": "user", "content": "What is a list?"}, last]
    asked: Any = {"model": "m", "messages": messages, "max_tokens": 5, "temperature": 0, "n": 2}
    plain = client.chat.completions.create(extra_body=extra, **asked)
    whole = client.chat.completions.create(extra_body={**extra, "echo": True}, **asked)
    chunks = list(client.chat.completions.create(extra_body={**extra, "echo": True}, stream=True, **asked))
    for choice, other in zip(whole.choices, plain.choices, strict=True):
        assert choice.message.content == echoed + other.message.content
        own = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(each.delta.content or "" for each in own) == choice.message.content
