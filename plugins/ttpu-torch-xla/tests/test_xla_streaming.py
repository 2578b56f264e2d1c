"""Answers as the command line streams them: as long as was asked for, within the context, and refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla")

from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from ttpu import AutoModelForTPU
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_torch_xla.generation.length import new_tokens
from ttpu_torch_xla.streaming import StreamingModel

pytestmark = pytest.mark.torch

PROMPT, TOKENS, CONTEXT = "w1 w2 w3 w4 w5", 5, 32


def save_tokenizer(directory: Path) -> None:
    """One whose token n is the word n."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(directory)


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamingModel]:
    directory = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)
    model = AutoModelForTPU.from_pretrained(directory, backend="torch_xla")
    yield StreamingModel(model, 0.0)
    model.ttpu.close()


def tokens(streaming: StreamingModel, **arguments: Any) -> list[int]:
    """Those of one answer, greedy unless asked otherwise."""
    return [event.token_id for event in streaming.stream(PROMPT, **{"do_sample": False, **arguments})]


def greedy(streaming: StreamingModel, length: int) -> list[int]:
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    answer: list[int] = streaming.model.generate(ids, do_sample=False, max_new_tokens=length)[0, TOKENS:].tolist()
    return answer


@pytest.mark.parametrize(
    ("checkpoint", "given", "length"),
    [
        ({}, {"max_new_tokens": 7}, 7),
        ({}, {"max_length": 9}, 4),
        ({}, {"max_length": 90}, CONTEXT - TOKENS),
        ({}, {"max_length": 9, "max_new_tokens": 7}, 7),
        ({"max_new_tokens": 6}, {}, 6),
        ({"max_new_tokens": 6}, {"max_length": 9}, 4),
        ({"max_new_tokens": 90}, {}, CONTEXT - TOKENS),
        ({"max_length": 11}, {}, 6),
        ({"max_length": 11, "max_new_tokens": 7}, {}, 7),
        ({"max_length": 11}, {"max_new_tokens": 3}, 3),
        ({"max_length": 11}, {"generation_config": GenerationConfig(max_new_tokens=3)}, 3),
    ],
)
def test_the_caller_then_the_checkpoint_say_how_long_an_answer_is(
    checkpoint: dict[str, int], given: dict[str, Any], length: int
) -> None:
    assert new_tokens(TOKENS, given, GenerationConfig(**checkpoint), CONTEXT) == length


def test_an_answer_has_128_tokens_where_nobody_says_otherwise() -> None:
    assert new_tokens(TOKENS, {}, GenerationConfig(), 1000) == 128
    assert new_tokens(TOKENS, {}, GenerationConfig(), CONTEXT) == CONTEXT - TOKENS


def test_streams_are_as_long_as_that_and_equal_generate(
    streaming: StreamingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming.model, "generation_config", GenerationConfig(max_new_tokens=6, pad_token_id=0))
    assert tokens(streaming, max_length=9) == greedy(streaming, 4)
    monkeypatch.setattr(streaming.model, "generation_config", GenerationConfig(max_length=9, pad_token_id=0))
    assert tokens(streaming) == greedy(streaming, 4)
    assert tokens(streaming, max_length=CONTEXT + 9) == greedy(streaming, CONTEXT - TOKENS)


def test_an_end_of_a_generation_config_is_a_stop(streaming: StreamingModel) -> None:
    end = greedy(streaming, 8)[3]
    config = GenerationConfig(eos_token_id=end, pad_token_id=0, max_new_tokens=8)
    last = list(streaming.stream(PROMPT, do_sample=False, generation_config=config))[-1]
    assert (last.token_id, last.finish_reason, last.text) == (end, "stop", "")


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"type": "default", "factor": 4.0}, CONTEXT),
        ({"type": "linear", "factor": 4.0}, 4 * CONTEXT),
        ({"type": "dynamic", "factor": 1.5}, 48),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}, CONTEXT),
    ],
)
def test_a_rope_may_stretch_the_context(streaming: StreamingModel, rope: dict[str, Any], context: int) -> None:
    spec = streaming.model.ttpu.architecture.spec
    first = spec.layers[0]
    mixer = replace(first.mixer, rope=replace(first.mixer.rope, **rope))
    assert replace(spec, layers=(replace(first, mixer=mixer), *spec.layers[1:])).context == context


@pytest.mark.parametrize(
    ("given", "context"), [({}, TOKENS), ({"max_new_tokens": 28}, CONTEXT), ({"max_length": TOKENS}, CONTEXT)]
)
def test_a_length_that_cannot_be_is_refused_as_the_jax_backend_does(given: dict[str, int], context: int) -> None:
    loop = pytest.importorskip("ttpu_jax.generation.loop")
    from ttpu_core.generation.options import options_from

    with pytest.raises(RequestError) as theirs:
        loop._row([1] * TOKENS, options_from(given), None, context)
    with pytest.raises(RequestError) as ours:
        new_tokens(TOKENS, given, GenerationConfig(), context)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("value", [0, -3, 2.5, "many", True])
def test_a_length_is_a_number_of_tokens(value: Any) -> None:
    with pytest.raises(RequestError, match=f"max_new_tokens is {value!r}, but an integer of at least 1"):
        new_tokens(TOKENS, {"max_new_tokens": value}, GenerationConfig(), CONTEXT)


def test_a_refusal_comes_when_a_stream_is_asked_for(streaming: StreamingModel) -> None:
    with pytest.raises(RequestError, match=f"{TOKENS} tokens already"):
        streaming.stream(PROMPT, max_length=2)
    with pytest.raises(RequestError, match="shorten the prompt"):
        streaming.stream("w1 " * CONTEXT)
    with pytest.raises(RequestError, match=f"ask for at most {CONTEXT - TOKENS}"):
        streaming.stream(PROMPT, max_new_tokens=CONTEXT)


@pytest.mark.parametrize(
    "given", [{"logprobs": 0}, {"logprobs": 2}, {"presence_penalty": 0.5}, {"frequency_penalty": -1.0}]
)
def test_what_transformers_has_not_is_refused(streaming: StreamingModel, given: dict[str, Any]) -> None:
    [name] = given
    with pytest.raises(UnsupportedError, match=f"{name} was asked for"):
        streaming.stream(PROMPT, **given)


def test_penalties_of_nothing_and_arguments_of_none_are_taken(streaming: StreamingModel) -> None:
    given = {"presence_penalty": 0.0, "frequency_penalty": 0, "logprobs": None, "top_k": None}
    assert tokens(streaming, max_new_tokens=4, **given) == greedy(streaming, 4)


@pytest.mark.filterwarnings("ignore:.*compiled decoding loop:UserWarning")
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"nonsense": 3}, "not used by the model"),
        ({"num_beams": 2}, "beam search"),
        ({"do_sample": True, "temperature": -1.0}, "strictly positive"),
        ({"seed": "x"}, "invalid literal"),
    ],
)
def test_what_transformers_refuses_is_refused_in_one_sentence(
    streaming: StreamingModel, given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        tokens(streaming, max_new_tokens=4, **given)
    assert f"{list(given)[-1]}={list(given.values())[-1]!r}" in str(refused.value)
    assert "\n" not in str(refused.value) and str(refused.value).endswith("): correct it.")


def test_a_bug_in_the_middle_of_an_answer_is_not_called_a_bad_argument(
    streaming: StreamingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, streamer: Any, **kwargs: Any) -> None:
        for value in ([1, 2], [7], [8]):
            streamer.put(torch.tensor(value))
        raise ValueError("a bug")

    model = {**vars(streaming.model), "generate": broken, "can_generate": lambda: True}
    monkeypatch.setattr(streaming, "model", SimpleNamespace(**model))
    with pytest.raises(ValueError, match=r"^a bug$"):
        tokens(streaming, max_new_tokens=4)


def test_a_seed_repeats_an_answer_whenever_it_is_iterated_and_leaves_the_callers_random_numbers(
    streaming: StreamingModel,
) -> None:
    sampled: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "temperature": 2.0}
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first, second = streaming.stream(PROMPT, seed=5, **sampled), streaming.stream(PROMPT, seed=7, **sampled)
    five = [event.token_id for event in first]
    seven = [event.token_id for event in second]
    assert five != seven
    assert tokens(streaming, seed=7, **sampled) == seven
    assert tokens(streaming, seed=5, **sampled) == five
    assert torch.equal(torch.rand(1), expected)


def test_a_stop_string_may_stand_alone(streaming: StreamingModel) -> None:
    answer = greedy(streaming, 12)
    index = next(index for index in range(3, 12) if answer[index] not in answer[:index])
    stop = f"w{answer[index]} "
    for asked in (stop, [stop], (stop, "never")):
        events = list(streaming.stream(PROMPT, do_sample=False, max_new_tokens=12, stop_strings=asked))
        assert events[-1].finish_reason == "stop"
        assert len("".join(event.text for event in events).split()) == index
    with pytest.raises(RequestError, match="stop_strings is 3"):
        streaming.stream(PROMPT, stop_strings=3)
