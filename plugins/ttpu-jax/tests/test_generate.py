"""Generation on JAX: arguments, forms of prompts and results, streaming, stops, seeds, compiles. No torch needed."""

from __future__ import annotations

import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU
from ttpu_core.config import ModelConfig
from ttpu_core.errors import CheckpointError, MissingDependencyError, RequestError, TTPUError
from ttpu_core.generation.options import options_from
from ttpu_jax.generation.programs import PREFILL_CHUNK, cache_bucket, prompt_bucket
from ttpu_jax.generation.special_tokens import SpecialTokens

PROMPT = list(b"The quick brown fox")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoModelForTPU.from_pretrained(llama_checkpoint(tmp_path_factory.mktemp("generate") / "llama", chat=True))


def new_tokens(model: Any, prompt: Any, **arguments: Any) -> list[int]:
    arguments = {"max_new_tokens": 12, "ignore_eos": True, **arguments}
    return model.generate(prompt, return_dict_in_generate=True, **arguments).completions[0].token_ids


# Forms of prompts and results


def test_text_gives_text_and_ids_give_ids(model: Any) -> None:
    text = model.generate("The quick", max_new_tokens=8)
    assert isinstance(text, str)
    assert model.generate(["The quick", "A"], max_new_tokens=8)[0] == text
    ids = np.array([list(b"The quick")])
    whole = model.generate(ids, max_new_tokens=8, ignore_eos=True)
    assert whole.shape == (1, 17) and (whole[:, :9] == ids).all()
    assert model.generate(list(b"The quick"), max_new_tokens=8, ignore_eos=True).tolist() == whole.tolist()
    ragged = model.generate([list(b"The quick"), list(b"A")], max_new_tokens=8, ignore_eos=True)
    assert ragged.shape == (2, 17) and ragged[1, :9].tolist() == [258] * 8 + list(b"A")


def test_a_tokenizers_mapping_and_a_chat_are_prompts_too(model: Any) -> None:
    encoded = model.tokenizer(["The quick"], return_tensors="np")
    assert model.generate(encoded, max_new_tokens=4, ignore_eos=True).shape == (1, 13)
    chat = [{"role": "user", "content": "hi"}]
    templated = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert model.generate(chat, max_new_tokens=8) == model.generate(templated, max_new_tokens=8)


def test_a_tokenizers_answer_is_taken_whole_or_as_arguments_and_its_padding_is_no_prompt(model: Any) -> None:
    short = new_tokens(model, "A", max_new_tokens=4)
    for kind in (None, "np"):  # lists, arrays
        encoded = model.tokenizer(["The quick", "A"], padding=True, return_tensors=kind)
        whole = model.generate(encoded, max_new_tokens=4, ignore_eos=True)
        assert whole[1, 9:].tolist() == short
        assert (model.generate(**encoded, max_new_tokens=4, ignore_eos=True) == whole).all()
        logits = model(encoded).logits
        assert (np.asarray(logits) == np.asarray(model(**encoded).logits)).all()
        assert int(np.asarray(logits)[1, 0].argmax()) == short[0]


def test_vectors_of_different_lengths_are_prompts(model: Any) -> None:
    ragged = model.generate([np.array(PROMPT), np.array(PROMPT[:4])], max_new_tokens=4, ignore_eos=True)
    assert (ragged == model.generate([PROMPT, PROMPT[:4]], max_new_tokens=4, ignore_eos=True)).all()


@pytest.mark.parametrize(
    ("inputs", "mask", "message"),
    [
        ("The quick", [[1] * 9], "given for text"),
        ([PROMPT, PROMPT], [1] * 19, r"shape \(1, 19\), but input_ids has \(2, 19\)"),
        (np.array([PROMPT]), [[1] * 19, [1]], "an array of the shape of input_ids"),
        (np.array([PROMPT]), [[1] * 18 + [7]], "1 at real tokens and 0 at padding"),
        (np.array([PROMPT]), "x", "an array of the shape of input_ids"),
        ([PROMPT, PROMPT[:4]], [[1] * 19, [1] * 19], "differ in length"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(model: Any, inputs: Any, mask: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.generate(inputs, attention_mask=mask)


def test_a_hole_in_the_mask_is_no_token(model: Any) -> None:
    mask = np.ones((1, len(PROMPT)), int)
    mask[0, 3:5] = 0
    whole = model.generate(np.array([PROMPT]), attention_mask=mask, max_new_tokens=4, ignore_eos=True)
    assert whole[0, len(PROMPT) :].tolist() == new_tokens(model, PROMPT[:3] + PROMPT[5:], max_new_tokens=4)


def test_calling_the_model_gives_logits(model: Any) -> None:
    logits = model(np.array([PROMPT, PROMPT])).logits
    assert logits.shape == (2, len(PROMPT), 259) and logits.dtype == np.float32
    greedy = int(np.asarray(logits)[0, -1].argmax())
    assert new_tokens(model, PROMPT, max_new_tokens=1) == [greedy]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "shape"),
        ([[1], []], "empty"),
        ([[300]], "token id 300, but ids of this model run from 0 to 258"),
        ([[-1]], "token id -1"),
        (np.array([[0.5]]), "integer ids"),
        (3.0, "integer ids"),
        ([["a"]], "token id is needed"),
    ],
)
def test_what_is_no_prompt_is_refused(model: Any, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.generate(prompt)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"pad_token_id": "<pad>"}, "pad_token_id of config.json is '<pad>', but an integer"),
        ({"eos_token_id": "</s>"}, "eos_token_id of config.json is '</s>', but an integer"),
        ({"eos_token_id": [2, True]}, "eos_token_id of config.json is True, but an integer"),
    ],
)
def test_special_ids_of_a_config_are_checked(tmp_path: Path, named: dict[str, Any], said: str) -> None:
    checkpoint = llama_checkpoint(tmp_path / "llama")
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    config = checkpoint / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **named}))
    with pytest.raises(RequestError, match=said):
        AutoModelForTPU.from_pretrained(checkpoint).generate([[1, 2], [3, 4, 5]], max_new_tokens=2)
    config.write_text(json.dumps({**json.loads(config.read_text()), "pad_token_id": -1, "eos_token_id": -1}))
    AutoModelForTPU.from_pretrained(checkpoint).generate([[1, 2], [3, 4, 5]], max_new_tokens=2)


def test_a_streamer_a_checkpoint_and_a_folder_are_what_they_should_be(model: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"streamer is 5, but an object with put\(\) and end\(\)"):
        model.generate(PROMPT, streamer=5)
    with pytest.raises(RequestError, match="was to be saved in None, but a directory"):
        model.save_pretrained(None)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="that directory cannot be made"):
        model.save_pretrained(tmp_path / "file" / "folder")
    with pytest.raises(CheckpointError, match="5 was asked for as a checkpoint, but a directory"):
        AutoModelForTPU.from_pretrained(5)


def test_text_without_a_tokenizer_and_a_chat_without_a_template_are_refused(tmp_path: Path) -> None:
    bare = AutoModelForTPU.from_pretrained(llama_checkpoint(tmp_path / "bare", tokenizer=False))
    with pytest.raises(MissingDependencyError, match="no tokenizer"):
        bare.generate("text")
    assert new_tokens(bare, PROMPT, max_new_tokens=3)
    plain = AutoModelForTPU.from_pretrained(llama_checkpoint(tmp_path / "plain"))
    with pytest.raises(RequestError, match="no chat template"):
        plain.generate([{"role": "user", "content": "hi"}])


def test_a_prompt_longer_than_the_context_is_refused(model: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt has 256 tokens, but this model's context holds 256"):
        model.generate([[1] * 256])
    with pytest.raises(RequestError, match=r"100 new tokens.*200.*ask for at most 56"):
        model.generate([[1] * 200], max_new_tokens=100)
    with pytest.raises(RequestError, match="257 tokens, but this model's context holds 256"):
        model(np.ones((1, 257), int))
    # without a number, the context is the end
    assert model.generate([[1] * 250], ignore_eos=True).shape == (1, 256)


# Options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.nan, "do_sample": False}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_length": 3}, "max_length=3 counts the prompt"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"num_return_sequences": 2}, "num_return_sequences=2"),
        ({"no_such_option": 1}, "no_such_option=1"),
        ({"do_samples": False}, "do_samples=False"),
        ({"do_sample": "no"}, "do_sample is 'no'"),
        ({"pad_token_id": "x"}, "pad_token_id is 'x'"),
        ({"stop_strings": [""]}, "stop_strings"),
        ({"stop_strings": 3}, "stop_strings"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"seed": -1, "temperature": 1.0}, "seed"),
        ({"logprobs": -2}, "logprobs"),
    ],
    ids=str,
)
def test_bad_options_are_refused_before_anything_runs(model: Any, arguments: dict[str, Any], message: str) -> None:
    compiled = model.programs.compiles
    with pytest.raises(RequestError, match=message):
        model.generate(PROMPT, **arguments)
    assert model.programs.compiles == compiled


def test_options_that_ask_for_nothing_are_taken() -> None:
    assert options_from(
        {"num_beams": 1, "use_cache": True, "length_penalty": 1.0, "output_scores": False, "bad_words_ids": []}
    ) == options_from({})


def test_numpy_integers_are_integers() -> None:
    options = options_from({"max_new_tokens": np.int64(3), "eos_token_id": np.array([1, 2]), "seed": np.uint32(7)})
    assert (options.max_new_tokens, options.eos_token_id, options.seed) == (3, (1, 2), 7)


def test_the_largest_seed_serves_a_batch(model: Any) -> None:
    assert model.generate([PROMPT, PROMPT], do_sample=True, seed=np.uint32(2**32 - 1), max_new_tokens=2).shape[0] == 2


def test_a_generation_config_may_ask_for_the_dictionary(model: Any) -> None:
    output = model.generate(PROMPT, {"return_dict_in_generate": True}, max_new_tokens=2, ignore_eos=True)
    assert output.sequences.shape == (1, len(PROMPT) + 2)


def test_arguments_win_over_the_config_which_wins_over_the_checkpoint() -> None:
    from transformers import GenerationConfig

    checkpoint = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [1, 2], "num_beams": 4}
    config = GenerationConfig(temperature=0.7, max_new_tokens=5)
    options = options_from({"max_new_tokens": 9}, config, checkpoint)
    assert (options.temperature, options.top_p, options.max_new_tokens, options.eos_token_id) == (0.7, 0.9, 9, (1, 2))
    assert options_from({"max_length": 30}, {"max_new_tokens": 5}).max_length == 30
    lengths = {"max_length": 20, "max_new_tokens": 50}
    assert options_from({}, None, lengths).limit(10, 1000) == 50
    assert options_from({"max_length": 30}, None, lengths).limit(10, 1000) == 20


def test_sampling_is_on_when_asked_for_in_any_way() -> None:
    def temperature(**arguments: Any) -> float:
        return options_from(arguments).sampling().temperature

    assert temperature() == 0.0
    assert temperature(do_sample=True) == 1.0
    assert temperature(temperature=0.5) == 0.5
    assert temperature(top_p=0.9) == 1.0
    assert temperature(temperature=0.0, top_p=0.9) == 0.0
    assert temperature(top_p=1.0, top_k=0, min_p=0.0) == 0.0  # filters that are off ask for nothing
    assert temperature(temperature=0.5, do_sample=False) == 0.0
    checkpoint = {"do_sample": True, "temperature": 0.6}
    assert options_from({}, None, checkpoint).sampling().temperature == 0.6
    assert options_from({"temperature": 0}, None, checkpoint).sampling().temperature == 0.0
    assert options_from({}, None, {"temperature": 0.6, "top_p": 0.9}).sampling().temperature == 0.0


@pytest.mark.parametrize(
    ("given", "checkpoint", "top_k"),
    [
        ({}, {}, 0),
        ({"do_sample": True}, {}, 50),
        ({"temperature": 0.5}, {}, 50),
        ({"top_p": 0.9}, {}, 50),
        ({"do_sample": True, "top_k": 0}, {}, 0),
        ({"do_sample": True}, {"top_k": 7}, 7),
        ({}, {"do_sample": True}, 50),
        ({"do_sample": False}, {"do_sample": True}, 0),
    ],
)
def test_tokens_are_drawn_from_the_50_likeliest_unless_another_number_is_said(
    given: dict[str, Any], checkpoint: dict[str, Any], top_k: int
) -> None:
    assert options_from(given, None, checkpoint).sampling().top_k == top_k


# Sampling


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(model: Any) -> None:
    arguments = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 7, "max_new_tokens": 20}
    alone = new_tokens(model, PROMPT, **arguments)
    assert new_tokens(model, PROMPT, **arguments) == alone
    assert new_tokens(model, [PROMPT, PROMPT[:5], PROMPT[3:]], **arguments) == alone
    assert new_tokens(model, PROMPT, **{**arguments, "seed": 8}) != alone


def test_prompts_of_one_batch_draw_differently(model: Any) -> None:
    first, second = model.generate([PROMPT, PROMPT], temperature=1.0, seed=1, max_new_tokens=20, ignore_eos=True)[
        :, 19:
    ]
    assert first.tolist() != second.tolist()


def test_without_a_seed_two_runs_differ(model: Any) -> None:
    runs = [new_tokens(model, PROMPT, temperature=1.5, max_new_tokens=20) for _ in range(2)]
    assert runs[0] != runs[1]


def test_a_repetition_penalty_changes_what_repeats(model: Any) -> None:
    plain = new_tokens(model, PROMPT, max_new_tokens=40)
    assert len(set(new_tokens(model, PROMPT, max_new_tokens=40, frequency_penalty=2.0))) > len(set(plain))


def test_more_logprobs_than_the_vocabulary_has_are_refused(model: Any) -> None:
    with pytest.raises(RequestError, match=r"260 likeliest.*the vocabulary has 259"):
        model.generate(PROMPT, max_new_tokens=1, logprobs=260)


def test_a_prompt_that_is_too_long_is_refused_without_the_tokenizers_own_warning(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [_Recorder(warnings)])
    monkeypatch.setattr(model.tokenizer, "model_max_length", 8)
    for prompt in ("x" * 300, [{"role": "user", "content": "x" * 300}]):
        with pytest.raises(RequestError, match="context holds 256"):
            model.generate(prompt)
    assert warnings == []


class _Recorder(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self.emit = records.append  # type: ignore[method-assign]


def test_logprobs_are_those_of_the_logits(model: Any) -> None:
    output = model.generate(PROMPT, max_new_tokens=4, ignore_eos=True, logprobs=3, return_dict_in_generate=True)
    done = output.completions[0]
    logits = np.asarray(model(output.sequences).logits, np.float64)[0]
    for step, token in enumerate(done.token_ids):
        row = logits[len(PROMPT) - 1 + step]
        expected = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert done.logprobs[step] == pytest.approx(expected[token], abs=1e-4)
        assert set(done.top_logprobs[step]) == set(np.argsort(-row)[:3].tolist())


def test_logits_that_are_not_numbers_are_reported(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = llama_checkpoint(tmp_path / "broken")
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(TTPUError, match="not a number"):
        AutoModelForTPU.from_pretrained(path).generate(PROMPT, max_new_tokens=2)


# Ends


def test_a_stop_id_ends_a_sequence_and_the_rest_is_padded(model: Any) -> None:
    greedy = new_tokens(model, PROMPT, max_new_tokens=12)
    end = greedy[5]
    output = model.generate(
        [PROMPT, PROMPT[:4]], max_new_tokens=12, eos_token_id=end, return_dict_in_generate=True, pad_token_id=0
    )
    done = output.completions[0]
    at = greedy.index(end)
    assert (done.finish_reason, done.token_ids, done.stop_id) == ("stop", greedy[:at], end)
    assert output.sequences[0, len(PROMPT) :][: at + 1].tolist() == greedy[: at + 1]
    assert (output.sequences[0, len(PROMPT) + at + 1 :] == 0).all()


def test_without_a_pad_token_the_first_end_pads() -> None:
    def special(config: dict[str, Any], checkpoint: dict[str, Any], **given: Any) -> SpecialTokens:
        read = ModelConfig.from_dict({"model_type": "llama", **config})
        return SpecialTokens.of(options_from(given, None, checkpoint), read, checkpoint, None)

    assert special({"eos_token_id": [9, 3]}, {}).pad == 9
    assert special({"eos_token_id": [9, 3]}, {"eos_token_id": [7, 2]}).pad == 7
    assert special({}, {"eos_token_id": [7, 2]}, eos_token_id=[8, 1], stop_token_ids=[0]).pad == 8
    unending = special({"eos_token_id": [9, 3]}, {}, ignore_eos=True)
    assert (unending.pad, unending.stop_ids) == (9, frozenset())
    assert special({"eos_token_id": -1}, {}, stop_token_ids=[5]).pad == 0
    assert special({"eos_token_id": 9, "pad_token_id": 4}, {}).pad == 4


def test_padding_of_prompts_comes_from_the_file_that_transformers_reads() -> None:
    def padding(config: dict[str, Any], checkpoint: dict[str, Any], **given: Any) -> int | None:
        read = ModelConfig.from_dict({"model_type": "llama", **config})
        return SpecialTokens.of(options_from(given, None, checkpoint), read, checkpoint, None).padding_of_prompts

    assert padding({"pad_token_id": 4}, {}) == 4
    assert padding({"pad_token_id": 4, "eos_token_id": [9, 4]}, {}) is None
    assert padding({"pad_token_id": 4}, {"eos_token_id": 9}) is None
    assert padding({"pad_token_id": 4}, {"pad_token_id": 5}) == 5
    assert padding({"pad_token_id": 4}, {}, pad_token_id=6, eos_token_id=4) == 6


def test_a_stop_string_ends_the_text_before_it(model: Any) -> None:
    text = model.generate("The quick", max_new_tokens=40)
    stop = text[6:9]
    events = list(model.stream("The quick", max_new_tokens=40, stop_strings=[stop]))
    assert "".join(event.text for event in events) == text[: text.index(stop)]
    assert events[-1].finish_reason == "stop" and all(event.finish_reason is None for event in events[:-1])


def test_a_stream_left_early_disturbs_no_other(model: Any) -> None:
    expected = [model.generate(text, max_new_tokens=12, ignore_eos=True) for text in ("The quick", "Another")]
    left = model.stream("The quick", max_new_tokens=30, ignore_eos=True)
    next(left)
    left.close()
    both = [model.stream(text, max_new_tokens=12, ignore_eos=True) for text in ("The quick", "Another")]
    events = list(zip(*both, strict=True))
    assert ["".join(event.text for event in column) for column in zip(*events, strict=True)] == expected


@pytest.mark.parametrize("beams", [1, 2])
def test_calls_of_several_threads_keep_their_own_timings(tmp_path: Path, beams: int) -> None:
    """A call used to hand out the timings of another that began after it, and to take that one's compiling for its
    own."""
    model = AutoModelForTPU.from_pretrained(llama_checkpoint(tmp_path / "llama"))
    model.generate(PROMPT, max_new_tokens=6, ignore_eos=True, num_beams=beams, stopping_criteria=[lambda *_: False])

    def timings(prompt: list[int], tokens: int, **arguments: Any) -> Any:
        arguments |= {"max_new_tokens": tokens, "ignore_eos": True, "return_dict_in_generate": True}
        return model.generate(prompt, **arguments).timings

    inner: list[Any] = []
    with ThreadPoolExecutor(1) as other:

        def calls(*_: Any) -> bool:
            if not inner:  # of another shape, so that it compiles
                inner.append(other.submit(timings, PROMPT * 4, 3).result())
            return False

        outer = timings(PROMPT, 6, num_beams=beams, stopping_criteria=[calls])
    assert inner[0].prefill_tokens == 4 * len(PROMPT) and inner[0].decode_tokens == 2
    assert inner[0].compile_seconds > 0
    assert outer.prefill_tokens == len(PROMPT) and outer.decode_tokens == 5 * beams
    assert outer.compile_seconds == 0 and outer.decode_seconds > inner[0].compile_seconds


def test_a_stream_refuses_a_prompt_before_its_first_event_is_asked_for(model: Any) -> None:
    with pytest.raises(RequestError, match="context holds 256"):
        model.stream([[1] * 256])


def test_every_event_has_its_logprobs_and_the_completion_those_of_its_tokens(model: Any) -> None:
    end = new_tokens(model, PROMPT)[2]
    arguments = {"max_new_tokens": 12, "eos_token_id": end, "logprobs": 2}
    events = list(model.stream(PROMPT, **arguments))
    assert events[-1].token_id == end and events[-1].finish_reason == "stop"
    assert all(event.logprob is not None and len(event.top_logprobs) == 2 for event in events)
    done = model.generate(PROMPT, return_dict_in_generate=True, **arguments).completions[0]
    assert len(done.token_ids) == len(done.logprobs) == len(done.top_logprobs) == len(events) - 1


def test_the_stream_is_the_text(model: Any) -> None:
    events = list(model.stream("The quick", max_new_tokens=30))
    assert "".join(event.text for event in events) == model.generate("The quick", max_new_tokens=30)
    assert events[-1].finish_reason in ("stop", "length")


def test_a_stream_takes_what_generate_takes(model: Any) -> None:
    def tokens(*prompt: Any, **arguments: Any) -> list[int]:
        return [event.token_id for event in model.stream(*prompt, max_new_tokens=6, ignore_eos=True, **arguments)]

    expected = new_tokens(model, "The quick", max_new_tokens=6)
    assert tokens(**model.tokenizer("The quick", return_tensors="np")) == expected
    padded = np.array([[258, 258, *b"The quick"]])
    assert tokens(padded, attention_mask=(padded != 258).astype(int)) == expected
    assert tokens(input_ids=list(b"The quick"), assistant_model=model, tokenizer=model.tokenizer) == expected
    with pytest.raises(RequestError, match="both prompt and input_ids"):
        model.stream("The quick", input_ids=[1])


def test_a_transformers_streamer_is_fed(model: Any) -> None:
    seen: list[Any] = []

    class Streamer:
        def put(self, ids: Any) -> None:
            seen.append(np.asarray(ids).reshape(-1).tolist())

        def end(self) -> None:
            seen.append("end")

    whole = model.generate(PROMPT, max_new_tokens=5, ignore_eos=True, streamer=Streamer())
    assert seen == [PROMPT, *[[token] for token in whole[0, len(PROMPT) :].tolist()], "end"]


# Compiled programs


def test_decode_compiles_once_and_values_never_cause_a_compile(tmp_path: Path) -> None:
    model = AutoModelForTPU.from_pretrained(llama_checkpoint(tmp_path / "llama"))
    new_tokens(model, PROMPT, max_new_tokens=20)
    assert model.programs.compiles == 2  # prefill and decode
    for length in (17, 20, 30):
        new_tokens(model, (PROMPT * 2)[:length])
    assert model.programs.compiles == 2
    new_tokens(model, PROMPT, temperature=0.5, seed=1)
    new_tokens(model, PROMPT, temperature=1.5, seed=2)
    assert model.programs.compiles == 4  # sampling is another program, its values are not


def test_the_cache_is_donated(model: Any) -> None:
    import jax

    from ttpu_core.generation.token_choice import TokenChoice
    from ttpu_jax.ops.sampling import features_of, sampling_inputs

    params = [TokenChoice()]
    state = model.programs.start(np.zeros(1, np.int32), 16, 64)
    before = state.cache.layers[0].key
    model.programs.prefill(state, np.ones((1, 16), np.int32), sampling_inputs(params), features_of(params), fresh=True)
    assert before.is_deleted()
    assert isinstance(before, jax.Array)


def test_buckets_hold_what_they_are_asked_to() -> None:
    for length in range(1, 5000):
        assert prompt_bucket(length) >= length and cache_bucket(length) >= length
        assert prompt_bucket(length) <= max(16, 2 * length)
        for platform, share in (("cpu", 4), ("tpu", 2)):
            slots = cache_bucket(length, platform)
            assert slots % 128 == 0 and slots < length + max(128, length / share)
    assert len({cache_bucket(length, "cpu") for length in range(1, 4097)}) == 16
    assert len({cache_bucket(length, "tpu") for length in range(1, 4097)}) == 10
    assert prompt_bucket(PREFILL_CHUNK + 1) == 2 * PREFILL_CHUNK


def test_a_prompt_longer_than_a_chunk_is_prefilled_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ttpu_jax.generation import programs

    path = llama_checkpoint(tmp_path / "llama")
    prompt = (PROMPT * 8)[:100]
    whole = new_tokens(AutoModelForTPU.from_pretrained(path), prompt)
    monkeypatch.setattr(programs, "PREFILL_CHUNK", 32)
    model = AutoModelForTPU.from_pretrained(path)
    assert new_tokens(model, prompt) == whole
    assert new_tokens(model, [prompt, prompt[:40]]) == whole


def test_parts_of_a_prompt_share_the_frequencies_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic rope takes them from the length of the prompt, not of what has been read of it."""
    from ttpu_jax.generation import programs

    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    path = llama_checkpoint(tmp_path / "llama", rope_parameters=dynamic, max_position_embeddings=40)
    arguments = {"max_new_tokens": 3, "ignore_eos": True, "logprobs": 0, "return_dict_in_generate": True}
    prompts = [(PROMPT * 8)[:100], PROMPT]
    whole = AutoModelForTPU.from_pretrained(path).generate(prompts, **arguments).completions
    monkeypatch.setattr(programs, "PREFILL_CHUNK", 32)
    parts = AutoModelForTPU.from_pretrained(path).generate(prompts, **arguments).completions
    for one, other in zip(whole, parts, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


BATCHES = [PROMPT], [PROMPT, PROMPT[:7], PROMPT[2:], PROMPT], [PROMPT, PROMPT[:7], PROMPT[2:]]
SAMPLED = {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2, "max_new_tokens": 20}


def generated(path: Path, mesh: str | None = None) -> list[Any]:
    """Greedy and sampled tokens of every batch."""
    model = AutoModelForTPU.from_pretrained(path, mesh=mesh)
    return [new_tokens(model, prompts, **arguments) for prompts in BATCHES for arguments in ({}, SAMPLED)]


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    path = llama_checkpoint(tmp_path_factory.mktemp("mesh") / "llama", num_hidden_layers=1, vocab_size=260)
    return path, generated(path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=4", "data=2,tensor=2"])
def test_a_mesh_generates_the_same_tokens(on_one_device: tuple[Path, list[Any]], mesh: str) -> None:
    path, expected = on_one_device
    assert generated(path, mesh) == expected


def test_a_jax_mesh_on_other_devices_generates_the_same_tokens(tmp_path: Path) -> None:
    import jax

    path = llama_checkpoint(tmp_path / "llama", vocab_size=260)
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[2:4])  # of explicit axes, JAX's default
    cut, alone = (AutoModelForTPU.from_pretrained(path, mesh=m) for m in (mesh, None))
    assert new_tokens(cut, PROMPT, presence_penalty=1.0) == new_tokens(alone, PROMPT, presence_penalty=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"tensor": 2}}, "mesh is the dict.*'data=2,tensor=4'"),
        ({"dtype": 3}, "dtype 3.*float32, bfloat16, float16"),
        ({"attn_implementation": "math:pi"}, "not a function"),
        ({"attn_implementation": ":attend"}, "package.module:function"),
    ],
    ids=str,
)
def test_loading_options_of_the_wrong_kind_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = llama_checkpoint(tmp_path / "llama", tokenizer=False)
    with pytest.raises(TTPUError, match=message):
        AutoModelForTPU.from_pretrained(path, **options)


def test_unknown_loading_options_are_refused(tmp_path: Path) -> None:
    path = llama_checkpoint(tmp_path / "llama")
    with pytest.raises(RequestError, match="device_map"):
        AutoModelForTPU.from_pretrained(path, device_map="auto")
