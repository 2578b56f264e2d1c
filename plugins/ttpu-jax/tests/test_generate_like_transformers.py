"""`generate` with transformers' other arguments: the tokens, scores and ends are those of transformers, in float32, for
a batch of prompts of different lengths. One checkpoint serves all tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU
from ttpu_core.errors import RequestError, TTPUError
from ttpu_core.generation.options import options_from

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PROMPT = list(b"The quick brown fox")
PAD = 258
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
WIDTH, NEW = len(PROMPT), 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The model, transformers' own, a padded batch, and the greedy tokens of its rows."""
    from transformers import LlamaForCausalLM

    path = llama_checkpoint(tmp_path_factory.mktemp("like") / "llama", num_hidden_layers=1)
    both = SimpleNamespace(ours=AutoModelForTPU.from_pretrained(path), theirs=LlamaForCausalLM.from_pretrained(path))
    rows = [PROMPT, PROMPT[:7], PROMPT[2:]]
    both.ids = np.array([[PAD] * (WIDTH - len(row)) + row for row in rows])
    both.mask = (np.arange(WIDTH) >= np.array([[WIDTH - len(row)] for row in rows])).astype(int)
    both.greedy = new_tokens(both, ignore_eos=True)
    return both


def ours(pair: SimpleNamespace, **arguments: Any) -> Any:
    arguments = {"max_new_tokens": NEW, "pad_token_id": PAD, "return_dict_in_generate": True} | arguments
    return pair.ours.generate(pair.ids, attention_mask=pair.mask, **arguments)


def theirs(pair: SimpleNamespace, **arguments: Any) -> Any:
    arguments = {"max_new_tokens": NEW, "pad_token_id": PAD, "return_dict_in_generate": True} | arguments
    arguments = {"do_sample": False} | arguments
    return pair.theirs.generate(torch.tensor(pair.ids), attention_mask=torch.tensor(pair.mask), **arguments)


def new_tokens(pair: SimpleNamespace, **arguments: Any) -> list[list[int]]:
    return ours(pair, **arguments).sequences[:, WIDTH:].tolist()


def equal(pair: SimpleNamespace, **arguments: Any) -> Any:
    """Our output, after a look at whether its sequences are transformers'."""
    found = ours(pair, **arguments)
    assert found.sequences.tolist() == theirs(pair, **arguments).sequences.tolist()
    return found


# Rules on the device


def rules(greedy: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Arguments that change the tokens of a greedy batch."""
    first, second = greedy[0], greedy[1]
    return {
        "min_new_tokens": {"eos_token_id": [first[1], second[2]], "min_new_tokens": 5},
        "min_length": {"eos_token_id": first[1], "min_length": WIDTH + 4},
        "suppress_tokens": {"suppress_tokens": [first[0], second[1]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [first[0], second[0]]},
        "bad_words_ids": {"bad_words_ids": [[first[2]], first[:2], second[1:5], [PROMPT[-1], second[0]]]},
        "a bad word that is the end": {"bad_words_ids": [[first[1]]], "eos_token_id": first[1]},
        "sequence_bias": {"sequence_bias": [[[first[0], first[1]], -9.0], [[7], 99.0], [[first[3]], -2.0], [[7], 3.0]]},
        "n-grams": {"no_repeat_ngram_size": 2},
        "single tokens": {"no_repeat_ngram_size": 1},
        "forced_eos_token_id": {"forced_eos_token_id": 65, "eos_token_id": 65},
        "a forced end beats a suppressed one": {"forced_eos_token_id": [65], "eos_token_id": 65, "min_new_tokens": NEW},
        "all at once": {
            "repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "bad_words_ids": [[first[0]]], "min_new_tokens": 3,
            "eos_token_id": first[1], "suppress_tokens": [7], "sequence_bias": [[[second[0]], -1.0]],
        },
    }  # fmt: skip


@pytest.mark.parametrize("name", rules([list(range(NEW))] * 2))
def test_a_rule_gives_transformers_tokens(pair: SimpleNamespace, name: str) -> None:
    arguments = rules(pair.greedy)[name]
    found = equal(pair, **arguments)
    ends = {key: value for key, value in arguments.items() if key == "eos_token_id"}
    if name != "a bad word that is the end":
        assert found.sequences.tolist() != ours(pair, **ends).sequences.tolist()


def test_scores_and_logits_are_transformers(pair: SimpleNamespace) -> None:
    arguments = {"output_scores": True, "output_logits": True, "suppress_tokens": pair.greedy[0][:2]}
    for renormalize in (False, True):
        found = ours(pair, renormalize_logits=renormalize, **arguments)
        expected = theirs(pair, renormalize_logits=renormalize, **arguments)
        for name in ("scores", "logits"):
            assert len(found[name]) == len(expected[name]) == NEW
            for one, other in zip(found[name], expected[name], strict=True):
                np.testing.assert_allclose(one, other.numpy(), atol=1e-4)
    assert ours(pair).scores is None and ours(pair).logits is None


def test_hidden_states_are_transformers(pair: SimpleNamespace) -> None:
    arguments = {"output_hidden_states": True, "eos_token_id": pair.greedy[1][3], "max_new_tokens": 5}
    found, expected = ours(pair, **arguments), theirs(pair, **arguments)
    new = [len(done.all_ids) for done in found.completions]
    assert len(found.hidden_states) == len(expected.hidden_states) == max(new) > min(new)
    for step, (one, other) in enumerate(zip(found.hidden_states, expected.hidden_states, strict=True)):
        assert len(one) == len(other) == 2  # before the only layer, and after the final norm
        real = (pair.mask if step == 0 else np.array(new)[:, None] > step).astype(bool)
        for state, theirs_ in zip(one, other, strict=True):
            assert state.shape == theirs_.shape
            np.testing.assert_allclose(state[real], theirs_.detach().numpy()[real], atol=1e-4)
    ragged = pair.ours.generate(
        [PROMPT, PROMPT[:7]], output_hidden_states=True, return_dict_in_generate=True, max_new_tokens=2, ignore_eos=True
    ).hidden_states
    np.testing.assert_allclose(ragged[0][1][1, -7:], found.hidden_states[0][1][1, -7:], atol=1e-5)


@pytest.mark.parametrize("mass", [0.2, 0.9])
def test_typical_p_keeps_what_transformers_keeps(pair: SimpleNamespace, mass: float) -> None:
    arguments = {"do_sample": True, "typical_p": mass, "temperature": 0.7, "top_k": 100, "output_scores": True}
    arguments["max_new_tokens"] = 1
    one, other = ours(pair, **arguments).scores[0], theirs(pair, **arguments).scores[0].numpy()
    assert (np.isfinite(one) == np.isfinite(other)).all() and 0 < np.isfinite(one).sum() < one.size
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_rules_that_forbid_nothing_change_no_draw(pair: SimpleNamespace) -> None:
    drawn = {"do_sample": True, "seed": 5, "temperature": 1.3, "top_p": 0.9, "ignore_eos": True}
    assert new_tokens(pair, **drawn, sequence_bias={(7,): 0.0}) == new_tokens(pair, **drawn)


def test_sampling_draws_from_as_many_tokens_as_transformers(pair: SimpleNamespace) -> None:
    arguments = {"do_sample": True, "output_scores": True, "max_new_tokens": 1}
    for asked, kept in (({}, 50), ({"top_k": 0}, 259), ({"top_k": 3}, 3)):
        one, other = ours(pair, **arguments, **asked).scores[0], theirs(pair, **arguments, **asked).scores[0].numpy()
        assert (np.isfinite(one) == np.isfinite(other)).all() and (np.isfinite(one).sum(axis=1) == kept).all()


@pytest.mark.parametrize(
    "asked",
    [{"pad_token_id": PAD}, {"pad_token_id": PAD, "eos_token_id": [65, PAD]}, {}],
    ids=["padding", "an end is no padding", "the tokenizer's padding does not count"],
)
def test_padding_without_a_mask_is_what_transformers_takes_for_it(pair: SimpleNamespace, asked: dict[str, Any]) -> None:
    found = pair.ours.generate(pair.ids, max_new_tokens=NEW, **asked)
    expected = pair.theirs.generate(torch.tensor(pair.ids), max_new_tokens=NEW, do_sample=False, **asked)
    assert found.tolist() == expected.tolist()
    assert (found[1, WIDTH:].tolist() == pair.greedy[1]) is (asked == {"pad_token_id": PAD})
    if asked == {"pad_token_id": PAD}:  # in lists it is a token like any other
        assert pair.ours.generate(pair.ids.tolist(), max_new_tokens=NEW, **asked).tolist() != expected.tolist()


def test_an_n_gram_longer_than_any_sequence_forbids_nothing(pair: SimpleNamespace) -> None:
    assert new_tokens(pair, no_repeat_ngram_size=2048, ignore_eos=True) == pair.greedy


# Several sequences of a prompt


def test_several_sequences_of_a_prompt_are_drawn_apart_and_follow_each_other(pair: SimpleNamespace) -> None:
    drawn = {"do_sample": True, "seed": 5, "ignore_eos": True}
    found = ours(pair, num_return_sequences=3, **drawn)
    assert found.sequences[:, :WIDTH].tolist() == np.repeat(pair.ids, 3, axis=0).tolist()
    rows = found.sequences[:, WIDTH:].tolist()
    assert len({tuple(row) for row in rows}) == len(rows) == 9
    assert rows[0] == new_tokens(pair, **drawn)[0]
    assert [done.token_ids for done in found.completions] == rows
    texts = pair.ours.generate("The quick", num_return_sequences=2, do_sample=True, seed=1, max_new_tokens=4)
    assert isinstance(texts, list) and len(texts) == 2 and texts[0] != texts[1]


# The caller's code


class ForbidLast:
    """A processor that needs both its arguments: no token follows itself."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        scores[torch.arange(len(scores)), input_ids[:, -1]] = -float("inf")
        return scores


def test_logits_processors_see_and_change_what_transformers_shows_them(pair: SimpleNamespace) -> None:
    seen: dict[str, list[Any]] = {"ours": [], "theirs": []}

    def watching(kind: str) -> Any:
        def watch(input_ids: Any, scores: Any) -> Any:
            seen[kind].append((input_ids.tolist(), scores.numpy().copy()))
            return scores

        return watch

    arguments = {"eos_token_id": pair.greedy[1][3], "bad_words_ids": [pair.greedy[0][:1]]}
    found = ours(pair, logits_processor=[watching("ours"), ForbidLast()], **arguments)
    from transformers import LogitsProcessorList

    expected = theirs(pair, logits_processor=LogitsProcessorList([watching("theirs"), ForbidLast()]), **arguments)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert len(seen["ours"]) == len(seen["theirs"])
    for (one, scores), (other, others) in zip(seen["ours"], seen["theirs"], strict=True):
        assert one == other
        going = [row for row in range(3) if PAD not in one[row][WIDTH:]]
        np.testing.assert_allclose(scores[going], others[going], atol=1e-4)


def test_stopping_criteria_end_rows_where_transformers_ends_them(pair: SimpleNamespace) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    last = pair.greedy[0][3]
    others = [token for token in pair.greedy[1] if token not in pair.greedy[0][:4]]

    class Follows(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            assert scores is None
            return input_ids[:, -1] == last

    found = equal(pair, stopping_criteria=StoppingCriteriaList([Follows()]), eos_token_id=others[0])
    assert found.completions[0].finish_reason == "stop" and found.completions[0].stop_id is None
    assert {len(done.token_ids) for done in found.completions} != {NEW}
    second = lambda ids, _: ids.shape[1] == WIDTH + 2  # noqa: E731
    events = list(pair.ours.stream(PROMPT, max_new_tokens=NEW, stopping_criteria=second))
    assert [event.finish_reason for event in events] == [None, "stop"]


def test_a_criterion_of_all_rows_and_the_time_end_a_call(pair: SimpleNamespace) -> None:
    assert len(new_tokens(pair, stopping_criteria=lambda ids, _: ids.shape[1] == WIDTH + 3)[0]) == 3
    several = [lambda ids, _: ids.shape[1] == WIDTH + 2, lambda ids, _: np.zeros(3)]
    assert len(new_tokens(pair, stopping_criteria=several)[0]) == 2
    assert len(new_tokens(pair, max_time=1e-9)[0]) == 1


def test_without_torch_the_callers_code_gets_numpy(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from ttpu_jax.generation import host_calls

    monkeypatch.setattr(host_calls, "find_spec", lambda name: None)
    kinds = set()

    def only_seven(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        kinds.update((type(ids), type(scores)))
        return np.where(np.arange(scores.shape[1]) == 7, scores, -np.inf)

    assert new_tokens(pair, logits_processor=only_seven, max_new_tokens=2) == [[7, 7]] * 3
    assert kinds == {np.ndarray}


def test_code_that_returns_the_wrong_shape_is_named(pair: SimpleNamespace) -> None:
    with pytest.raises(RequestError, match=r"scores of shape \(3, 5\), but \(3, 259\)"):
        ours(pair, logits_processor=lambda ids, scores: scores[:, :5])
    with pytest.raises(RequestError, match=r"returned shape \(2,\) for 3 rows"):
        ours(pair, stopping_criteria=lambda ids, scores: np.zeros(2))
    with pytest.raises(TTPUError, match="forbids every token"):
        ours(pair, logits_processor=lambda ids, scores: scores - np.inf)


# Beam search


def ends(pair: SimpleNamespace) -> list[int]:
    """Tokens that end some beams early and leave others."""
    return sorted({token for row in pair.greedy for token in row})[1:6]


BEAMS: dict[str, dict[str, Any]] = {
    "two": {"num_beams": 2},
    "some of four": {"num_beams": 4, "num_return_sequences": 3},
    "early": {"num_beams": 4, "early_stopping": True, "num_return_sequences": 4},
    "never early": {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0, "num_return_sequences": 3},
    "short": {"num_beams": 3, "length_penalty": -1.0, "num_return_sequences": 2},
    "no penalty": {"num_beams": 3, "length_penalty": 0.0, "num_return_sequences": 3},
    "rules": {"num_beams": 3, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "a forced end": {"num_beams": 2, "forced_eos_token_id": 65},
}


@pytest.mark.parametrize("name", BEAMS)
@pytest.mark.parametrize("ending", [False, True], ids=["to the limit", "with ends"])
def test_beams_are_transformers(pair: SimpleNamespace, name: str, ending: bool) -> None:
    arguments = {**BEAMS[name], "output_scores": True} | ({"eos_token_id": ends(pair)} if ending else {})
    found, expected = ours(pair, **arguments), theirs(pair, **arguments)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.beam_indices.tolist() == expected.beam_indices.tolist()
    np.testing.assert_allclose(found.sequences_scores, expected.sequences_scores.numpy(), atol=1e-4)
    assert len(found.scores) == len(expected.scores)
    np.testing.assert_allclose(found.scores[-1], expected.scores[-1].numpy(), atol=1e-4)


def test_beams_run_the_callers_code(pair: SimpleNamespace) -> None:
    from transformers import LogitsProcessorList

    def lower(ids: Any, scores: Any) -> Any:
        return scores - (torch.arange(scores.shape[1]) + ids[:, -1:]) % 3

    equal(
        pair,
        num_beams=3,
        num_return_sequences=2,
        logits_processor=LogitsProcessorList([lower]),
        stopping_criteria=[lambda ids, scores, **_: ids[:, -1] % 17 == 5],
    )
    assert ours(pair, num_beams=2, max_time=1e-9).sequences.shape == (3, WIDTH + 1)


def test_beams_of_a_text_are_texts(pair: SimpleNamespace) -> None:
    asked = {"num_beams": 3, "max_new_tokens": NEW}
    texts = pair.ours.generate("The quick", num_return_sequences=3, **asked)
    assert len(texts) == 3 and pair.ours.generate("The quick", **asked) == texts[0]


@pytest.mark.parametrize("beams", [1, 3])
def test_stop_strings_end_what_transformers_ends(pair: SimpleNamespace, beams: int) -> None:
    letters = [chr(token) for row in pair.greedy for token in row if 32 < token < 127]
    found = equal(pair, num_beams=beams, stop_strings=letters[:2], tokenizer=pair.ours.tokenizer)
    assert any(len(done.token_ids) < NEW for done in found.completions)
    assert not any(letter in done.text for letter in letters[:2] for done in found.completions)


def test_beams_are_drawn_by_seed(pair: SimpleNamespace) -> None:
    asked = {"num_beams": 3, "do_sample": True, "temperature": 1.5, "top_p": 0.9, "ignore_eos": True}
    first, again, other = (new_tokens(pair, seed=seed, **asked) for seed in (1, 1, 2))
    assert first == again != other
    coldest = {**asked, "temperature": 0.02, "top_p": 1.0}
    assert new_tokens(pair, seed=1, **coldest)[0][0] == pair.greedy[0][0]


def test_filters_leave_drawn_beams_as_many_tokens_as_transformers_leaves_them(pair: SimpleNamespace) -> None:
    asked = {"num_beams": 2, "do_sample": True, "top_k": 1, "output_scores": True, "max_new_tokens": 1}
    for stops in ([5], [5, 6, 7]):
        found = ours(pair, eos_token_id=stops, **asked).scores[0]
        expected = theirs(pair, eos_token_id=stops, **asked).scores[0].numpy()
        assert (np.isfinite(found) == np.isfinite(expected)).all() and np.isfinite(found).sum() == 6 * (len(stops) + 1)


@pytest.mark.parametrize("limit", [{"max_new_tokens": NEW}, {"max_length": WIDTH + 3}], ids=["one limit", "its own"])
def test_beams_of_one_prompt_are_those_of_a_batch(pair: SimpleNamespace, limit: dict[str, int]) -> None:
    rows = [PROMPT, PROMPT[:7], PROMPT[2:]]
    asked = {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": ends(pair)[0], **limit}
    batch = pair.ours.generate(rows, return_dict_in_generate=True, **asked)
    for index, row in enumerate(rows):
        alone = pair.ours.generate([row], return_dict_in_generate=True, **asked)
        assert alone.completions == batch.completions[3 * index : 3 * index + 3]
        np.testing.assert_allclose(alone.sequences_scores, batch.sequences_scores[3 * index :][:3], atol=1e-4)


@pytest.mark.slow
def test_a_mesh_finds_the_same_beams_and_follows_the_same_rules(tmp_path: Path) -> None:
    path = llama_checkpoint(tmp_path / "llama", num_hidden_layers=1)  # whose vocabulary two devices pad
    asked = [
        {"logits_processor": lambda ids, scores: scores - 1000.0},
        {"num_beams": 3, "num_return_sequences": 2, "repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 1, "do_sample": True, "seed": 3, "num_return_sequences": 2},
    ]

    def tokens(mesh: str | None) -> list[Any]:
        model = AutoModelForTPU.from_pretrained(path, mesh=mesh)
        common = {"max_new_tokens": 6, "ignore_eos": True}
        return [model.generate([PROMPT, PROMPT[:5]], **common, **each).tolist() for each in asked]

    assert tokens("data=2,tensor=2") == tokens(None)


# Speculation


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that guesses badly."""
    folder = tmp_path_factory.mktemp("small") / "llama"
    return AutoModelForTPU.from_pretrained(llama_checkpoint(folder, num_hidden_layers=1, hidden_size=16, seed=3))


LONG = PROMPT * 2 + PROMPT[:5]
DRAWN = {"do_sample": True, "seed": 3, "temperature": 0.5}
RULES = {**DRAWN, "no_repeat_ngram_size": 2, "repetition_penalty": 1.1}


@pytest.mark.parametrize("asked", [{}, DRAWN, RULES], ids=["greedy", "drawn", "rules"])
def test_guesses_change_no_token_and_no_score(
    pair: SimpleNamespace, small: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[tuple[int, ...]] = []
    asked = {"max_new_tokens": 21, "ignore_eos": True, "return_dict_in_generate": True, "logprobs": 1} | asked
    asked |= {"output_scores": True, "output_logits": True}
    plain = pair.ours.generate(LONG, **asked)
    block = type(pair.ours.programs).block_logits

    def counted(self: Any, state: Any, tokens: np.ndarray) -> Any:
        passes.append(tokens.shape)
        return block(self, state, tokens)

    monkeypatch.setattr(type(pair.ours.programs), "block_logits", counted)
    guessers = [
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": small},
        {"assistant_model": pair.ours, "num_assistant_tokens": 3},
    ]
    for guesser in guessers:
        passes.clear()
        found = pair.ours.generate(LONG, **asked, **guesser)
        assert found.sequences.tolist() == plain.sequences.tolist()
        np.testing.assert_allclose(found.completions[0].logprobs, plain.completions[0].logprobs, atol=1e-4)
        for one, other in zip(found.scores + found.logits, plain.scores + plain.logits, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
    # 20 tokens come after the first, 4 at once where all guesses are right. Guesses know no rules.
    assert 5 <= passes.count((1, 4)) <= (19 if "repetition_penalty" in asked else 5)


def test_a_lookup_guesses_what_followed_the_latest_time() -> None:
    from ttpu_jax.generation.speculation import PromptLookup

    lookup = PromptLookup(4, 2)
    assert list(lookup.guess([1, 2, 3, 9, 1, 2, 7, 8, 1, 2], 5)) == [7, 8, 1, 2]
    assert list(lookup.guess([5, 6, 7, 4, 9, 7], 2)) == [4, 9, 7] and list(lookup.guess([1, 2, 3], 1)) == []


def test_assisted_tokens_and_their_end_are_transformers(pair: SimpleNamespace) -> None:
    expected = pair.theirs.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, WIDTH, dtype=torch.long), assistant_model=pair.theirs,
        do_sample=False, max_new_tokens=NEW, eos_token_id=pair.greedy[0][4], pad_token_id=PAD,
    )  # fmt: skip
    found = pair.ours.generate(
        [PROMPT], assistant_model=pair.ours, max_new_tokens=NEW, eos_token_id=pair.greedy[0][4], pad_token_id=PAD
    )
    assert found.tolist() == expected.tolist() and found.shape[1] < WIDTH + NEW
    short = pair.ours.generate([[5]], assistant_model=pair.ours, max_new_tokens=4, ignore_eos=True)
    assert short.tolist() == pair.ours.generate([[5]], max_new_tokens=4, ignore_eos=True).tolist()


def test_what_cannot_check_guesses_is_refused(pair: SimpleNamespace, tmp_path: Path) -> None:
    from ttpu_core.spec import axes
    from ttpu_jax.generation.programs import Programs

    other = AutoModelForTPU.from_pretrained(
        llama_checkpoint(tmp_path / "llama", num_hidden_layers=1, vocab_size=300, rope_parameters=DYNAMIC)
    )
    for arguments, message in [
        ({"assistant_model": other}, "depends on the length"),
        ({"assistant_model": pair.theirs}, "is a LlamaForCausalLM, but a model of this backend"),
        ({"assistant_model": pair.ours, "prompt_lookup_num_tokens": 3}, "pass one of them"),
        ({"assistant_model": pair.ours, "logits_processor": print}, "with logits_processor"),
        ({"prompt_lookup_num_tokens": 3, "num_beams": 2}, "num_beams=2 was given with assistant_model"),
        ({"prompt_lookup_num_tokens": 3, "do_sample": True, "num_return_sequences": 2}, "for 2 sequences"),
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens is 0"),
    ]:
        with pytest.raises(TTPUError, match=message):
            pair.ours.generate(PROMPT, **arguments)
    other.programs.runtime = pair.ours.programs.runtime
    with pytest.raises(RequestError, match="has 300 tokens, but this model 259"):
        pair.ours.generate(PROMPT, assistant_model=other)

    def reason(axis: str) -> str | None:
        mixer = SimpleNamespace(state=[SimpleNamespace(axes=(axis, axes.HEAD_DIM))])
        spec = SimpleNamespace(model_type="m", layers=[SimpleNamespace(mixers=[mixer])])
        return Programs.keeps_tokens.fget(SimpleNamespace(spec=spec, runtime=SimpleNamespace(ropes=())))

    assert reason(axes.SEQUENCE) is None and "m keeps recurrent states" in reason(axes.KV_HEADS)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 .* at most 8 new tokens are generated"),
        ({"min_new_tokens": 200}, "min_new_tokens=200 .* at most 128 new tokens are generated"),
        ({"min_length": 21, "max_length": 20}, "min_length=21 .* but max_length is 20"),
        ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size is 1.5"),
        ({"typical_p": 0.0}, "typical_p is 0.0"),
        ({"bad_words_ids": [3]}, "list of non-empty lists of token ids"),
        ({"bad_words_ids": [[]]}, "list of non-empty lists of token ids"),
        ({"bad_words_ids": [[300]]}, "bad_words_ids has the token id 300"),
        ({"suppress_tokens": [259]}, "suppress_tokens has the token id 259"),
        ({"sequence_bias": [[[1], "much"]]}, "sequence_bias adds 'much'"),
        ({"sequence_bias": 3}, "sequence_bias is 3"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'"),
        ({"output_scores": 1}, "output_scores is 1"),
        ({"num_return_sequences": 2}, "greedy decoding gives one"),
        ({"num_return_sequences": 3, "num_beams": 2}, "num_return_sequences=3 were asked for of num_beams=2"),
        ({"num_beams": 2, "output_hidden_states": True}, "output_hidden_states was asked for with num_beams=2"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"num_beams": 2, "logprobs": 1}, "logprobs=1 was asked for with num_beams=2"),
        ({"num_beams": 2, "streamer": SimpleNamespace(put=print, end=print)}, "a streamer was given with num_beams=2"),
        ({"logits_processor": [3]}, "a callable, or a list of them"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(pair: SimpleNamespace, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pair.ours.generate(PROMPT, **arguments)


def test_a_generation_config_of_transformers_asks_for_the_same(pair: SimpleNamespace) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(no_repeat_ngram_size=2, min_new_tokens=3, bad_words_ids=[[65]], length_penalty=2.0)
    options = options_from({}, config)
    assert (options.no_repeat_ngram_size, options.min_new_tokens, options.bad_words_ids) == (2, 3, ((65,),))
    assert options.length_penalty == 2.0
