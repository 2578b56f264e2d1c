"""`generate` on the device returns what transformers' own returns on the host, from two programs per shape."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla")

from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from xla_spmd import said
from xla_tiny import Tiny, prompt, tiny

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_torch_xla.checkpointing import checkpoint_layers
from ttpu_torch_xla.generation import install, stock
from ttpu_torch_xla.generation.cache import FixedCache
from ttpu_torch_xla.generation.choice import DeviceChoice, drawn
from ttpu_torch_xla.generation.prompt import answer_bucket, padded, prompt_bucket

pytestmark = pytest.mark.torch

NEW, PROGRAMS = 24, 3
IDS, MASK = prompt(3, 21, left={1: 8})
SHORT, SHORT_MASK = prompt(3, 18, seed=1, left={2: 3})  # of the same bucket


class Pair:
    """The same llama on the host and on the device."""

    def __init__(self, host: Any, made: Tiny) -> None:
        self.host, self.made, self.device_model = host, made, made.model

    def both(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Results of the stock generate and of ours."""
        return self.host.generate(*args, **kwargs), self.device_model.generate(*args, **kwargs)


@pytest.fixture(scope="module")
def llama() -> Iterator[Pair]:
    with tiny("llama") as host, tiny("llama") as made:
        made.move()
        install(made.model)
        yield Pair(host.model, made)


def ending(pair: Pair) -> int:
    """A token that the greedy answer to the second prompt holds early, and that thus ends it early."""
    return int(pair.host.generate(IDS, attention_mask=MASK, do_sample=False, max_new_tokens=NEW)[1, 21 + 5])


def test_sixty_four_tokens_take_three_programs_and_a_second_run_none(llama: Pair) -> None:
    runtime = llama.made.runtime
    ids, mask = prompt(5, 21, left={1: 8})  # five rows, of which no other test compiles anything
    host = llama.host.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=64).tolist()
    for programs in ({1, 2, 3}, {0}):
        runtime.reset_counters()
        ours = llama.device_model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=64)
        assert ours.tolist() == host
        assert runtime.counters().compiles in programs
        assert not runtime.counters().fallbacks


@pytest.mark.parametrize("model_type", ["falcon_h1", "lfm2", "mamba2"])  # beside attention, between, and no attention
def test_states_are_in_the_static_cache(model_type: str) -> None:
    with tiny(model_type) as host, tiny(model_type) as made:
        expected = host.model.generate(IDS, attention_mask=MASK, do_sample=False, max_new_tokens=8).tolist()
        made.move()
        install(made.model)
        for programs in ({1, 2, 3}, {0}):
            made.runtime.reset_counters()
            ours = made.model.generate(IDS, attention_mask=MASK, do_sample=False, max_new_tokens=8)
            assert ours.tolist() == expected
            assert made.runtime.counters().compiles in programs
            assert not made.runtime.counters().fallbacks


def test_padding_is_kept_out_of_convolutions_whose_inputs_have_a_bias() -> None:
    with tiny("falcon_h1") as host, tiny("falcon_h1") as made:
        for model in (host.model, made.model):
            for layer in model.model.layers:
                features = layer.mamba.in_proj.out_features
                layer.mamba.in_proj.bias = torch.nn.Parameter(torch.linspace(-3.0, 3.0, features))
        made.move()
        install(made.model)
        ours = made.model.generate(IDS, attention_mask=MASK, do_sample=False, max_new_tokens=8)
        for row, tokens in enumerate(ours.tolist()):
            begin = int((MASK[row] == 0).sum())
            alone = host.model.generate(IDS[row : row + 1, begin:], do_sample=False, max_new_tokens=8)
            assert tokens[begin:] == alone[0].tolist()
        assert not any(module._forward_hooks for module in made.model.modules())


def test_sequences_end_at_their_end_token_and_are_padded_from_there(llama: Pair) -> None:
    end = ending(llama)
    host, ours = llama.both(
        IDS, attention_mask=MASK, do_sample=False, max_new_tokens=NEW, eos_token_id=[end, 7], pad_token_id=0
    )
    assert ours.tolist() == host.tolist()
    assert end in ours[1, 21:] and ours[1, -1] == 0


def test_generation_stops_with_the_last_sequence(llama: Pair) -> None:
    host, ours = llama.both(
        IDS[1:2], attention_mask=MASK[1:2], do_sample=False, max_new_tokens=NEW, eos_token_id=ending(llama)
    )
    assert ours.tolist() == host.tolist()
    assert ours.shape[1] < 21 + NEW


@pytest.mark.parametrize(
    "asked",
    [
        {"max_length": 30},
        {"min_new_tokens": 12, "max_new_tokens": NEW},
        {"min_length": 33, "max_new_tokens": NEW},
        {"repetition_penalty": 3.0, "max_new_tokens": NEW},
        {"suppress_tokens": [5, 9, 60], "max_new_tokens": NEW},
        {"use_cache": False, "max_new_tokens": 5},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_changes_greedy_tokens_changes_them_alike(llama: Pair, asked: dict[str, Any]) -> None:
    end = ending(llama)
    runtime = llama.made.runtime
    runtime.reset_counters()
    host, ours = llama.both(IDS, attention_mask=MASK, do_sample=False, eos_token_id=end, pad_token_id=0, **asked)
    assert ours.tolist() == host.tolist()
    assert runtime.counters().compiles <= PROGRAMS
    assert not runtime.counters().fallbacks


def test_a_generation_config_is_honoured(llama: Pair) -> None:
    config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=ending(llama), pad_token_id=3)
    host, ours = llama.both(IDS, attention_mask=MASK, generation_config=config)
    assert ours.tolist() == host.tolist()


def test_without_a_mask_padding_is_inferred_as_transformers_does(llama: Pair) -> None:
    host, ours = llama.both(IDS, do_sample=False, max_new_tokens=6, pad_token_id=0)
    assert ours.tolist() == host.tolist()


def test_an_output_object_has_scores_and_logits_of_each_step(llama: Pair) -> None:
    host, ours = llama.both(
        IDS,
        attention_mask=MASK,
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=ending(llama),
        repetition_penalty=1.5,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert type(ours) is type(host)
    assert ours.sequences.tolist() == host.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(host[name])
        for one, other in zip(ours[name], host[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_results_are_where_the_prompt_was(llama: Pair) -> None:
    asked = {"do_sample": False, "max_new_tokens": 4}
    assert llama.device_model.generate(IDS, **asked).device.type == "cpu"
    assert llama.device_model.generate(IDS.to(llama.made.device), **asked).device.type == "xla"


def test_a_seed_repeats_a_sample_and_other_settings_compile_nothing(llama: Pair) -> None:
    runtime = llama.made.runtime
    asked = {"attention_mask": MASK, "do_sample": True, "max_new_tokens": NEW, "top_k": 20, "top_p": 0.9, "min_p": 0.01}

    def sample(seed: int, temperature: float) -> list[list[int]]:
        torch.manual_seed(seed)
        tokens: list[list[int]] = llama.device_model.generate(IDS, temperature=temperature, **asked).tolist()
        return tokens

    first = sample(0, 0.7)
    assert not runtime.counters().fallbacks
    runtime.reset_counters()
    assert sample(0, 0.7) == first
    assert sample(1, 0.7) != first
    sample(1, 1.3)
    assert runtime.counters().compiles == 0


def test_samples_are_within_what_the_settings_leave(llama: Pair) -> None:
    """With the likeliest token alone left, a sample is the greedy answer."""
    host, _ = llama.both(IDS, attention_mask=MASK, do_sample=False, max_new_tokens=8)
    for asked in ({"top_k": 1}, {"top_p": 1e-6, "top_k": 0}, {"min_p": 1.0, "top_k": 0}):
        ours = llama.device_model.generate(IDS, attention_mask=MASK, do_sample=True, max_new_tokens=8, **asked)
        assert ours.tolist() == host.tolist(), asked


def test_draws_have_the_distribution_of_the_scores() -> None:
    scores = torch.tensor([2.0, -float("inf"), 0.5, 1.0, -float("inf")])
    count = 20_000
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(0))
    drawn_counts = drawn(scores.expand(count, -1), uniform).bincount(minlength=5)
    expected = scores.softmax(-1)
    assert drawn_counts[1] == drawn_counts[4] == 0
    # Five standard deviations of a binomial count.
    assert ((drawn_counts / count - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()
    assert drawn(scores[None], torch.tensor([1 - 2**-24])).item() == 3, "the last token of probability above zero"
    assert drawn(scores[None], torch.zeros(1)).item() == 0


def test_draws_on_the_device_are_possible_tokens_at_every_level_of_the_distribution(llama: Pair) -> None:
    """Sums of prefixes rise at tokens of probability zero too there, so the levels are where a draw might hit them."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.full((1, 32_000), -float("inf"))
    possible = torch.randperm(32_000, generator=generator)[:50]
    scores[0, possible] = torch.randn(50, generator=generator)
    on_device = scores.to(llama.made.device)
    below = on_device.softmax(-1).cumsum(-1).cpu()[0]
    levels = below.unique() / below[-1]
    below_one = 1 - 2**-24
    uniform = torch.cat([levels, torch.nextafter(levels, torch.tensor(0.0))]).clamp(0, below_one)
    tokens = drawn(on_device.expand(len(uniform), -1), uniform.to(llama.made.device)).cpu()
    assert set(tokens.tolist()) == set(possible.tolist())


def test_several_answers_per_prompt(llama: Pair) -> None:
    ours = llama.device_model.generate(
        IDS, attention_mask=MASK, do_sample=True, max_new_tokens=5, num_return_sequences=2
    )
    assert ours.shape == (6, 26)


class Streamed:
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.ended = 0

    def put(self, tokens: torch.Tensor) -> None:
        self.given.append(tokens.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("ends", [False, True])
def test_a_streamer_gets_prompt_and_tokens_as_they_come(llama: Pair, ends: bool) -> None:
    asked: dict[str, Any] = {"attention_mask": MASK[1:2], "do_sample": False, "max_new_tokens": 10}
    asked |= {"eos_token_id": ending(llama)} if ends else {}
    host, ours = Streamed(), Streamed()
    llama.host.generate(IDS[1:2], streamer=host, **asked)
    llama.device_model.generate(IDS[1:2], streamer=ours, **asked)
    assert ours.given == host.given
    assert ours.ended == host.ended == 1


class NoEvenTokens(LogitsProcessor):
    """A caller's own, which looks at the sequences too."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, ::2] = -float("inf")
        return scores.scatter(1, input_ids[:, -1:], -float("inf"))


class AfterNine(StoppingCriteria):
    """Ends each row at its own length."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.arange(input_ids.shape[0]) + input_ids.shape[1] >= 30


def test_a_callers_processors_and_criteria_are_run_with_the_tokens_so_far(llama: Pair) -> None:
    runtime = llama.made.runtime
    runtime.reset_counters()
    for asked in (
        {"logits_processor": [NoEvenTokens()]},
        {"stopping_criteria": [AfterNine()]},
        {"logits_processor": [NoEvenTokens()], "stopping_criteria": [AfterNine()], "eos_token_id": 7},
        {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [8, 9]]},
    ):
        host, ours = llama.both(IDS, attention_mask=MASK, do_sample=False, max_new_tokens=12, pad_token_id=0, **asked)
        assert ours.tolist() == host.tolist(), asked
    assert runtime.counters().compiles <= 2 * PROGRAMS, "tokens chosen on the device, or logits given to the host"
    assert not runtime.counters().fallbacks


class NeverWithAttribute(StoppingCriteria):
    """Has an attribute of the name that transformers' criterion of end tokens has, and of another type."""

    eos_token_id = 5

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.arange(input_ids.shape[0]) + input_ids.shape[1] >= 30


def test_only_end_tokens_of_transformers_own_criterion_end_sequences(llama: Pair) -> None:
    asked = {"stopping_criteria": [NeverWithAttribute()], "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    host, ours = llama.both(IDS, attention_mask=MASK, **asked)
    assert ours.tolist() == host.tolist()


def test_what_the_host_samples_is_what_transformers_samples_for_the_seed(llama: Pair) -> None:
    results = []
    for model in (llama.host, llama.device_model):
        torch.manual_seed(3)
        asked = {"do_sample": True, "max_new_tokens": 12, "logits_processor": [NoEvenTokens()]}
        results.append(model.generate(IDS, attention_mask=MASK, **asked).tolist())
    assert results[0] == results[1]


def words() -> Any:
    """A tokenizer whose token n is the word n."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {f"w{index}": index for index in range(1, 200)} | {"abcdef": 0}  # what transformers probes a tokenizer with
    made = Tokenizer(models.WordLevel(known, unk_token="abcdef"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="abcdef")


def test_stop_strings_end_generation(llama: Pair) -> None:
    answer = llama.host.generate(IDS[:1], do_sample=False, max_new_tokens=12)[0, 21:]
    stop = f"w{answer[5]}"
    host, ours = llama.both(
        IDS[:1], do_sample=False, max_new_tokens=12, stop_strings=[stop], tokenizer=words(), pad_token_id=0
    )
    assert ours.tolist() == host.tolist()
    assert ours.shape[1] < 21 + 12


def test_beams_are_left_to_transformers_with_one_warning(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "_warned", set())
    asked = {"attention_mask": MASK, "do_sample": False, "max_new_tokens": 3, "num_beams": 2}
    with pytest.warns(UserWarning, match="the generation mode beam_search"):
        ours = llama.device_model.generate(IDS, **asked)
    assert ours.tolist() == llama.host.generate(IDS, **asked).tolist()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llama.device_model.generate(IDS[:, :16], **(asked | {"attention_mask": None, "max_new_tokens": 1}))
    assert not [one for one in caught if "generation mode" in str(one.message)]


def test_guidance_is_left_to_transformers_on_the_device(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "_warned", set())
    asked = {"do_sample": False, "max_new_tokens": 4, "guidance_scale": 1.5}
    with pytest.warns(UserWarning, match=r"guidance_scale=1\.5"):
        host, ours = llama.both(IDS, attention_mask=MASK, **asked)
    assert ours.device.type == "cpu"
    assert ours.tolist() == host.tolist()


@pytest.mark.parametrize("assistant", ["on the host", "on the device", "the prompt"])
@pytest.mark.filterwarnings("ignore:.*compiled decoding loop:UserWarning")
def test_an_assistants_candidates_leave_the_tokens_as_they_are(llama: Pair, assistant: str) -> None:
    """The assistant is wrong once, and has nothing to say before the last token."""
    ids = torch.cat([IDS[:1, :6], IDS[:1, :6]], 1)
    asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}
    plain = llama.host.generate(ids, **asked).tolist()
    if assistant == "the prompt":
        asked["prompt_lookup_num_tokens"] = 2
    else:
        other = copy.deepcopy(llama.host if assistant == "on the host" else llama.device_model)
        with torch.no_grad():
            other.lm_head.weight[int(plain[0][12 + 1])] = 0
        asked["assistant_model"] = other
    assert llama.device_model.generate(ids, **asked).tolist() == plain


def test_offloading_is_refused(llama: Pair) -> None:
    with pytest.raises(UnsupportedError, match=r"cache_implementation='offloaded' was asked for, but .*: leave it out"):
        llama.device_model.generate(IDS[:1], max_new_tokens=3, cache_implementation="offloaded")


@pytest.mark.filterwarnings("ignore:.*compiled decoding loop:UserWarning")
def test_inference_mode_changes_nothing(llama: Pair) -> None:
    asked = {"do_sample": False, "max_new_tokens": 4}
    with torch.inference_mode():
        ids, mask = IDS.clone(), MASK.clone()
        host, ours = llama.both(ids, attention_mask=mask, **asked)
        guided = llama.device_model.generate(ids, attention_mask=mask, guidance_scale=1.5, **asked)
    assert ours.tolist() == host.tolist()
    assert guided.tolist() == llama.host.generate(IDS, attention_mask=MASK, guidance_scale=1.5, **asked).tolist()


def test_generation_in_training_mode_needs_keys_and_values(llama: Pair) -> None:
    model = copy.deepcopy(llama.device_model)
    checkpoint_layers(model)
    asked = {"do_sample": False, "max_new_tokens": 4}
    host = llama.host.generate(IDS, **asked)
    assert model.eval().generate(IDS, **asked).tolist() == host.tolist()
    with pytest.raises(RequestError, match=r"gradient checkpointing.*call model.eval\(\) first"):
        model.train().generate(IDS, **asked)


def test_a_model_that_was_moved_away_generates_where_it_is(llama: Pair) -> None:
    model = copy.deepcopy(llama.device_model).to("cpu")
    host = llama.host.generate(IDS, attention_mask=MASK, do_sample=False, max_new_tokens=4)
    assert model.generate(IDS, attention_mask=MASK, do_sample=False, max_new_tokens=4).tolist() == host.tolist()


def test_a_deleted_model_is_gone_at_once_with_all_that_generation_made(llama: Pair) -> None:
    model = copy.deepcopy(llama.device_model)
    gone, weights = weakref.ref(model), weakref.ref(model.lm_head.weight)
    gc.collect()
    gc.disable()
    try:
        model.generate(IDS, attention_mask=MASK, do_sample=False, max_new_tokens=3, repetition_penalty=1.5)
        made = [one for one in gc.get_objects() if type(one) in (DeviceChoice, FixedCache)]
        del model
        assert (made, gone(), weights()) == ([], None, None)
    finally:
        gc.enable()


def test_other_models_of_the_class_are_as_they_were(llama: Pair) -> None:
    assert type(llama.host) is type(llama.device_model)
    assert inspect.signature(llama.device_model.generate) == inspect.signature(llama.host.generate)
    llama.made.runtime.reset_counters()
    llama.host.generate(IDS, do_sample=False, max_new_tokens=3)
    assert llama.made.runtime.counters().executions == 0


def test_a_mistaken_argument_is_refused_as_transformers_does(llama: Pair) -> None:
    with pytest.raises(ValueError, match="not used by the model"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llama.device_model.generate(IDS, max_new_token=3)
    with pytest.raises(ValueError, match="Input length"):
        llama.device_model.generate(IDS, max_length=5)


def test_a_prompt_is_padded_on_its_left_to_its_bucket() -> None:
    made = padded(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 1]]), None, 3)
    assert made.ids.tolist() == [[0] * 13 + [5, 6, 7]]
    assert made.mask[0, :16].tolist() == [False] * 14 + [True, True]
    assert made.mask[0, 16:].all() and made.mask.shape[1] == made.length == 16 + answer_bucket(3)
    assert made.positions.tolist() == [[0] * 14 + [0, 1]]
    assert (torch.arange(16) + made.shift).tolist() == [0] * 13 + [0, 1, 2]


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 16), (16, 16), (17, 32), (1024, 1024), (1025, 2048)])
def test_prompt_buckets_are_few(tokens: int, bucket: int) -> None:
    assert prompt_bucket(tokens) == bucket


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 64), (64, 64), (65, 96), (97, 128), (200, 256), (160, 192)])
def test_answer_buckets_are_few(tokens: int, bucket: int) -> None:
    assert answer_bucket(tokens) == bucket


@pytest.mark.slow
def test_sharded_models_generate_the_same_from_two_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    results = said(tmp_path_factory)["generated"]
    assert len(results) == 4
    for name, result in results.items():
        assert result == {"same": [True, True, True], "compiles": [2, 0], "fallbacks": []}, name


def test_a_copied_model_generates_by_itself(llama: Pair) -> None:
    copied = copy.deepcopy(llama.device_model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    ours = copied.generate(IDS[:1], do_sample=False, max_new_tokens=3)
    assert ours[0, 21:].tolist() == [0, 0, 0]
