"""Speculative decoding: guesses change how many steps an answer takes, never its tokens or their distribution."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from ttpu_core.auto import AutoModelForTPU
from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding, SamplingParams
from ttpu_serve.api.build_engine import build_engine, serving_backend
from ttpu_serve.api.engine_config import EngineConfig
from ttpu_serve.scheduling.request import Request
from ttpu_serve.speculative.config import SpeculativeConfig, speculative_config
from ttpu_serve.speculative.draft_model import DraftModelProposer
from ttpu_serve.speculative.load_draft import load_draft, prepare_draft
from ttpu_serve.speculative.make import make_proposer
from ttpu_serve.speculative.ngram import NgramProposer

# What callers write


@pytest.mark.parametrize(
    "asked,meant",
    [
        ("ngram", SpeculativeConfig()),
        ("ngram:7", SpeculativeConfig(num_speculative_tokens=7)),
        ("some/model", SpeculativeConfig("draft_model", model="some/model")),
        ("/some:3/model:2", SpeculativeConfig("draft_model", 2, model="/some:3/model")),
        ({"model": "m"}, SpeculativeConfig("draft_model", model="m")),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 3}, SpeculativeConfig("ngram", 4, 3, 3)),
        (SpeculativeConfig("ngram", 2), SpeculativeConfig("ngram", 2)),
    ],
    ids=str,
)
def test_settings_are_read_in_every_form(asked, meant):
    assert speculative_config(asked) == meant


@pytest.mark.parametrize(
    "asked,said",
    [
        ({"method": "crystal ball"}, "ngram and draft_model are known"),
        ({"num_speculative_tokens": 0}, "whole number, 1 or more"),
        ("ngram:0", "whole number, 1 or more"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_max is 4"),
        ({"method": "draft_model"}, "none was named"),
        ({"method": "ngram", "model": "m"}, "needs no model"),
        ({"depth": 3}, "speculative was given depth, but it takes method"),
        (4, "speculative is 4"),
        ("", "speculative is ''"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(asked, said):
    with pytest.raises(RequestError, match=said):
        speculative_config(asked)


# N-grams


def request_of(prompt, output=(), **params):
    return Request("r", list(prompt), SamplingParams(**params), output=list(output), max_output=1000)


def looked_up(tokens, k, least, most):
    """The rule, written down: the longest n-gram that is found again, at its latest earlier place."""
    for length in range(most, least - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:] and length < len(tokens):
                grown = list(tokens)
                for place in range(start + length, start + length + k):
                    grown.append(grown[place])
                return grown[len(tokens) :]
    return []


# Ids whose bytes look alike when they are read between two tokens.
alike = st.lists(st.sampled_from([0, 1, 256, 65536, 2**24, 257]), min_size=1, max_size=40)


@settings(max_examples=300, deadline=None)
@given(alike, alike, st.integers(1, 5), st.integers(1, 3), st.integers(0, 2))
def test_the_longest_then_latest_match_is_continued(prompt, output, k, least, more):
    proposer = NgramProposer(least, least + more)
    request = request_of(prompt)
    for token in output:  # the proposer is asked after every few tokens
        request.output.append(token)
        if token % 2 == 0:
            expected = looked_up(prompt + request.output, k, least, least + more)
            assert proposer.propose([request], k) == [expected]


def test_a_repetition_shorter_than_the_draft_goes_on():
    assert NgramProposer(1, 4).propose([request_of([5, 8, 7, 7, 8, 7, 7, 8])], 5) == [[7, 7, 8, 7, 7]]


def test_another_request_under_the_same_name_is_another_request():
    proposer = NgramProposer()
    assert proposer.propose([request_of([1, 2, 3, 1, 2])], 1) == [[3]]
    assert proposer.propose([request_of([1, 2, 4, 1, 2])], 1) == [[4]]


def test_finished_requests_are_forgotten():
    proposer = NgramProposer()
    request = request_of([1, 2, 3, 1, 2])
    proposer.propose([request], 1)
    proposer.on_finish(request)
    proposer.on_finish(request)
    assert not proposer._texts


def test_looking_up_in_a_long_context_takes_microseconds():
    """The bar is 20 µs; five times that leaves room for a busy machine."""
    random = np.random.default_rng(0)
    for vocab in (2, 100, 128_000):
        requests = [request_of(random.integers(0, vocab, 2000).tolist()) for _ in range(16)]
        for index, request in enumerate(requests):
            request.id = str(index)
        proposer, seconds = NgramProposer(), []
        proposer.propose(requests, 4)
        for _ in range(20):
            for request in requests:
                request.output.append(int(random.integers(0, vocab)))
            began = time.perf_counter()
            proposer.propose(requests, 4)
            seconds.append((time.perf_counter() - began) / len(requests))
        assert min(seconds) < 100e-6


# Exactness, with a target small enough to know its distribution

VOCAB, LENGTH, DEPTH = 4, 3, 2


class Target:
    """A Markov chain that samples by the Gumbel-max trick, with noise keyed by (seed, position) as the engine's is."""

    def __init__(self, seed):
        self.table = np.random.default_rng(seed).standard_normal((VOCAB, VOCAB)) * 1.5

    def probabilities(self, last):
        exponents = np.exp(self.table[last])
        return exponents / exponents.sum()

    def sample(self, last, seed, position):
        noise = np.random.default_rng([seed, position]).gumbel(size=VOCAB)
        return int(np.argmax(self.table[last] + noise))


def plain(target, seed):
    tokens = [0]
    for position in range(LENGTH):
        tokens.append(target.sample(tokens[-1], seed, position))
    return tokens[1:]


def speculated(target, seed, propose, accept):
    """The engine's rule: sample at every drafted position, keep what was sampled while the drafts agree with it."""
    tokens, steps = [0], 0
    while len(tokens) <= LENGTH:
        steps += 1
        draft = propose(tokens, seed)
        for position in range(len(tokens) - 1, len(tokens) + len(draft)):
            token = target.sample(tokens[-1], seed, position)
            guess = draft.pop(0) if draft else None
            tokens.append(token if guess is None or not accept(guess, token) else guess)
            if guess is None or not accept(guess, token):
                break
    return tokens[1 : LENGTH + 1], steps


def equal(guess, token):
    return guess == token


def drafter(table_seed, *, same_noise):
    """A small model: another chain, which draws with the request's noise or with its own."""
    model = Target(table_seed)
    model.table = 0.5 * model.table + 0.5 * Target(0).table

    def propose(tokens, seed):
        guesses = [tokens[-1]]
        for ahead in range(DEPTH):
            guesses.append(model.sample(guesses[-1], seed if same_noise else seed + 2**20, len(tokens) - 1 + ahead))
        return guesses[1:]

    return propose


def by_ngrams(tokens, seed):
    return NgramProposer(1, 2).propose([request_of(tokens)], DEPTH)[0]


def off(answers):
    """Pearson's statistic of whole answers against the chain's exact distribution, in standard deviations."""
    target, counts = Target(0), np.zeros((VOCAB,) * LENGTH)
    for answer in answers:
        counts[tuple(answer)] += 1
    expected = np.ones((VOCAB,) * LENGTH) * len(answers)
    for cell in np.ndindex(expected.shape):
        for last, token in zip((0, *cell), cell, strict=False):
            expected[cell] *= target.probabilities(last)[token]
    freedom = expected.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


PROPOSERS = {
    "n-grams": by_ngrams,
    "a draft model": drafter(1, same_noise=False),
    "a draft model with the same noise": drafter(1, same_noise=True),
    "always wrong or right by chance": lambda tokens, seed: [seed % VOCAB] * DEPTH,
}


@pytest.mark.parametrize("name", PROPOSERS)
def test_speculation_gives_the_tokens_and_the_distribution_of_plain_sampling(name):
    target, seeds = Target(0), range(3000)
    answers = [speculated(target, seed, PROPOSERS[name], equal)[0] for seed in seeds]
    assert answers == [plain(target, seed) for seed in seeds]
    assert abs(off(answers)) < 4


def test_the_statistic_would_notice_a_wrong_rule():
    """Taking guesses that were not sampled gives the guesser's distribution."""
    target = Target(0)
    answers = [speculated(target, seed, PROPOSERS["a draft model"], lambda *_: True)[0] for seed in range(3000)]
    assert off(answers) > 20


def test_a_draft_model_with_the_same_noise_is_right_more_often():
    target = Target(0)

    def steps(name):
        return sum(speculated(target, seed, PROPOSERS[name], equal)[1] for seed in range(500))

    assert steps("a draft model with the same noise") < 0.9 * steps("a draft model")


# Draft models in the engine

in_engine = pytest.mark.slow  # compiling its programs takes most of the time

PROMPTS = [[1, 2, 3] * 4, list(range(37)), [7], [100, 101] * 6]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.3, top_p=0.95, max_tokens=14, ignore_eos=True, seed=5)
PARAMS = [GREEDY, SAMPLED, replace(SAMPLED, seed=6, max_tokens=1), GREEDY]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    # The same embeddings, which are also the head, so that the two are of one mind at times.
    tied = {"tie_word_embeddings": True}
    tiny.llama_checkpoint(folder / "large", vocab_size=272, **tied)
    tiny.llama_checkpoint(folder / "small", vocab_size=264, num_hidden_layers=1, max_position_embeddings=40, **tied)
    tiny.llama_checkpoint(folder / "foreign", vocab_size=128, tokenizer=False, num_hidden_layers=1)
    return folder


@pytest.fixture(scope="module")
def model(checkpoints):
    return AutoModelForTPU.from_pretrained(checkpoints / "large", backend="jax")


@pytest.fixture(scope="module")
def engine(model, checkpoints):
    """An engine whose draft model is the model itself."""
    config = EngineConfig(
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=64,
        page_size=8,
        num_pages=24,
        sequence_buckets=(2,),
        token_buckets=(16,),
        penalties=False,
        prompt_logprobs=False,
        max_logprobs=1,
        strict_compile=True,
        speculative={"model": str(checkpoints / "large"), "num_speculative_tokens": 3},
    )
    engine = build_engine(model, config)
    yield engine
    engine.close()


def serve(engine, prompts=PROMPTS, params=PARAMS):
    answers = {str(index): [] for index in range(len(prompts))}
    for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(index), prompt, wanted)
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            answers[delta.request_id] += delta.token_ids
    return answers


@pytest.fixture(scope="module")
def plain_answers(engine):
    proposer, engine.speculation.proposer = engine.speculation.proposer, None
    answers = serve(engine)
    engine.speculation.proposer = proposer
    assert [len(answer) for answer in answers.values()] == [14, 14, 1, 14]
    assert engine.stats().drafted == 0
    return answers


@in_engine
def test_a_model_that_drafts_for_itself_is_always_right(engine, plain_answers):
    """Its guesses are drawn with the noise with which tokens are drawn, so even sampled ones all come true."""
    assert serve(engine) == plain_answers
    stats = engine.stats()
    assert stats.accepted == stats.drafted > 20
    assert stats.recompiles == 0


@in_engine
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_guided_answers_are_the_same_with_drafts(engine, method):
    """JSON, by greedy and by drawing: drafts are cut where the guide forbids them, and each has a mask of its own."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["xxxx", "xxxy"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99999}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    guided = GuidedDecoding(json=schema)
    params = [SamplingParams(0, guided=guided, max_tokens=40)]
    params += [SamplingParams(1.0, guided=guided, max_tokens=40, seed=seed, min_tokens=30) for seed in range(2)]
    prompts = [[*b'{"a":"xxxx","b":1}', 10]] * 3
    proposer, engine.speculation.proposer = engine.speculation.proposer, None
    plain = serve(engine, prompts, params)
    engine.speculation.proposer = NgramProposer() if method == "ngram" else proposer
    before = engine.stats()
    assert serve(engine, prompts, params) == plain
    engine.speculation.proposer = proposer
    assert engine.stats().accepted > before.accepted
    for answer in plain.values():
        read = json.loads(bytes(answer))  # its tokens are bytes, and the end of its grammar its own
        assert read["a"] in ("xxxx", "xxxy") and 0 <= read["b"] <= 99999


@in_engine
def test_nothing_of_a_finished_or_aborted_request_is_kept(engine):
    engine.add("aborted", PROMPTS[0], GREEDY)
    for _ in range(4):
        engine.step()
    proposer = engine.speculation.proposer
    assert sum(proposer.pages.pages_in_use) > 0
    engine.abort("aborted")
    serve(engine, PROMPTS[:1], PARAMS[:1])
    assert proposer.pages.pages_in_use == (0,)
    assert len(proposer._free) == 2 and not proposer._followed


@in_engine
def test_drafts_survive_sleep(engine, plain_answers):
    engine.sleep()
    engine.wake_up()
    before = engine.stats()
    assert serve(engine) == plain_answers
    after = engine.stats()
    assert after.accepted - before.accepted == after.drafted - before.drafted > 20


@in_engine
def test_few_pages_cost_drafts_and_nothing_else(engine, plain_answers):
    """Only 3 of the draft model's pages are left: not enough for two requests at once."""
    proposer = engine.speculation.proposer
    pool = proposer.pages.pools[0]
    kept = pool.take(pool.available - 3)
    before = engine.stats().drafted
    assert serve(engine) == plain_answers
    assert engine.stats().drafted > before
    pool.release(kept)
    assert proposer.pages.pages_in_use == (0,)


@in_engine
def test_a_different_draft_model_changes_nothing_but_the_number_of_steps(engine, model, checkpoints, plain_answers):
    """Fewer layers, a smaller vocabulary, and a context that ends before the answers do."""
    small = SpeculativeConfig("draft_model", model=str(checkpoints / "small"))
    draft = load_draft(small, model, engine.runner.config, engine.runner.limits, serving_backend("jax"))
    prepare_draft(draft, 24)
    original, engine.speculation.proposer = engine.speculation.proposer, DraftModelProposer(draft, 272)
    before = engine.stats()
    assert serve(engine) == plain_answers
    after = engine.stats()
    assert 0 < after.accepted - before.accepted < after.drafted - before.drafted
    assert max(len(prompt) for prompt in PROMPTS) + 14 > engine.speculation.proposer._length == 40
    engine.speculation.proposer.close()
    engine.speculation.proposer = original


@in_engine
def test_a_draft_model_of_other_tokens_is_refused(engine, model, checkpoints):
    with pytest.raises(RequestError, match=r"'foreign'.*tokens are not those of 'large'"):
        foreign = SpeculativeConfig("draft_model", model=str(checkpoints / "foreign"))
        load_draft(foreign, model, EngineConfig(), engine.runner.limits, serving_backend("jax"))


def test_a_draft_model_must_be_loaded_by_whoever_makes_its_proposer():
    with pytest.raises(RequestError, match="build_engine"):
        make_proposer(SpeculativeConfig("draft_model", model="m"))
