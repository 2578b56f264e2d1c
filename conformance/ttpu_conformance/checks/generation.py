"""Checks of generation by the public interface: greedy tokens equal those of transformers, and one program decodes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.errors import NotApplicable, fail
from ttpu_conformance.model_under_test import CountsPrograms, TracesDecoding
from ttpu_conformance.rope_length import rope_of, short_context

NEW_TOKENS = 24
PROMPTS = (11, 8, 5)  # tokens; with the new ones they pass every tiny window


@check("numerics", scope="heavy", quick="base")
def check_greedy_tokens(case: Case) -> None:
    """Greedy generation in float32, of prompts of several lengths at once, gives transformers' tokens."""
    import torch

    padded, mask = _prompts(case.architecture.spec.vocab_size)
    width = padded.shape[1]
    ours = _generate(case, padded, mask)
    for row, length in enumerate(PROMPTS):
        prompt = torch.tensor(padded[row : row + 1, width - length :])
        # Without a mask transformers takes real tokens that equal pad_token_id for padding.
        whole = case.reference.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        tokens = whole[0, length:].numpy()  # fewer where a tiny model's eos_token_id came first
        if not np.array_equal(ours[row][: len(tokens)], tokens):
            at = int(np.argmax(ours[row][: len(tokens)] != tokens))
            fail(
                f"after a prompt of {length} tokens the greedy token number {at + 1} is {ours[row][at]}, but "
                f"transformers generates {tokens[at]}: see float32_logits and cached_decode, which say what differs."
                + _of_longrope(case, length, at)
            )


def _of_longrope(case: Case, prompt: int, at: int) -> str:
    """What transformers does where a longrope switches to its long factors, if that may explain another token."""
    for index, layer in enumerate(case.architecture.spec.layers):
        rope = rope_of(layer)
        if rope is not None and rope.type == "longrope" and prompt <= short_context(rope) < prompt + at + 1:
            return (
                f" Layer {index} has a longrope, whose {short_context(rope)} tokens of short context end here. "
                "From there on transformers turns new tokens by the long factors, and some models (phi3, phimoe) "
                "drop their cache at that step and read the whole sequence again."
            )
    return ""


@check("numerics", scope="heavy", quick="base")
def check_decode_compiles_once(case: Case) -> None:
    """Decoding is one program: made anew it is the same to the letter, its equal layers are traced once, and generating
    again compiles nothing.

    The last part guards the backend, whose programs are kept by shape; what a plugin's own mixer or block can spoil are
    the first two.

    Raises:
        NotApplicable: the backend can say neither.
    """
    model = case.model
    if not isinstance(model, TracesDecoding | CountsPrograms):
        raise NotApplicable("this backend neither shows its decode program nor counts what it compiles")
    if isinstance(model, TracesDecoding):
        _refuse_changing_program(case, model)
    if isinstance(model, CountsPrograms):
        _refuse_compiling_again(case, model)


def _refuse_changing_program(case: Case, model: TracesDecoding) -> None:
    _refuse_changing_layers(case, model)
    first, again = (model.decode_program(len(PROMPTS), max(PROMPTS) + NEW_TOKENS) for _ in range(2))
    if first != again:
        lines = zip(first.splitlines(), again.splitlines(), strict=False)
        one, other = next(((a, b) for a, b in lines if a != b), ("", ""))
        fail(
            f"the decode program traced anew is another: {_short(one)!r} became {_short(other)!r}; a mixer, block or "
            "embedding must depend on nothing but its spec, and draw no number while it is traced."
        )


def generated(case: Case) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts of these checks, without padding, and what is generated after each."""
    padded, _ = prompts = _prompts(case.architecture.spec.vocab_size)
    width = padded.shape[1]
    ids = [padded[row, width - length :].tolist() for row, length in enumerate(PROMPTS)]
    return ids, _generate(case, *prompts).tolist()


def _refuse_changing_layers(case: Case, model: TracesDecoding) -> None:
    layers = case.architecture.spec.layers
    first, again = model.layer_definitions(), model.layer_definitions()
    for index, (one, other) in enumerate(zip(first, again, strict=True)):
        if one != other or hash(one) != hash(other):
            fail(
                f"layer {index} made anew does not equal itself, so that every program traces it again: the class that "
                "`ttpu_mixer` or `ttpu_block` names must keep only modules, specs and plain values, and no function or "
                "object that it makes."
            )
        equal = next(other for other in range(index + 1) if layers[other] == layers[index])
        if first[equal] != one:
            fail(
                f"layers {equal} and {index} have equal specs, but their modules differ, so that each is traced by "
                "itself: the class that `ttpu_mixer` or `ttpu_block` names must build the same from the same spec."
            )


def _refuse_compiling_again(case: Case, model: CountsPrograms) -> None:
    padded, mask = _prompts(case.architecture.spec.vocab_size)
    _generate(case, padded, mask)
    count = model.programs_of(lambda: _generate(case, padded // 2, mask))
    if count.compiles:
        fail(
            f"generating again with the same shapes compiled {count.compiles} programs: something outside the decode "
            "program depends on the values of tokens, or makes a new function at each call."
        )
    if count.fallbacks:
        fail(f"generating leaves {', '.join(sorted(count.fallbacks))} to the host: replace them by a torch patch.")


def _generate(case: Case, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The new tokens [rows, NEW_TOKENS]."""
    return np.asarray(case.model.greedy_tokens(ids, mask, NEW_TOKENS))


def _short(line: str) -> str:
    return line.strip()[:120]


@lru_cache
def _prompts(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Left-padded token ids and their mask."""
    width = max(PROMPTS)
    ids = np.random.default_rng(2).integers(0, vocab_size, (len(PROMPTS), width))
    mask = np.arange(width)[None] >= width - np.array(PROMPTS)[:, None]
    return np.where(mask, ids, 0), mask.astype(np.int64)
