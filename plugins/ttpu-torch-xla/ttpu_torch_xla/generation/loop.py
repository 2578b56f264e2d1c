"""The decoding loop. It takes the inputs that transformers' `generate` prepared, and returns the results of
transformers' own loop. Two programs are compiled per shape, prefill and decode step, and the host reads tokens while
the device computes the next ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ttpu_torch_xla.generation.cache import FixedCache
from ttpu_torch_xla.generation.choice import DeviceChoice, runs_on_device
from ttpu_torch_xla.generation.padding import padding_kept_out_of_states
from ttpu_torch_xla.generation.placement import ONE_DEVICE, Placement
from ttpu_torch_xla.generation.prompt import Prompt, padded
from ttpu_torch_xla.runtime import TorchRuntime

LOOK_EVERY = 4
"""Steps between two looks at whether all sequences have ended; each waits for the step before the running one."""


@dataclass(frozen=True)
class _State:
    """What one step hands to the next, all on the device.

    Attributes:
        token: int64 [batch], the newest. ended: bool [batch]. tokens: int64 [batch, answer], all new ones.
        step: int64 [1], how many those are. slot: int64 [1], where the newest one's keys go.
        positions: int64 [..., batch or 1, 1], the newest one's. mask: bool [batch, length].
        seen: bool [batch, vocab], the tokens so far, where a processor looks at them.
        logits, scores: float32 [batch, vocab] that the newest one was chosen by.
    """

    token: torch.Tensor
    ended: torch.Tensor
    tokens: torch.Tensor
    step: torch.Tensor
    slot: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    seen: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    scores: torch.Tensor | None = None


class Decoding:
    """One call of `generate`, after transformers prepared it on the host.

    Args:
        model: a causal language model on the device of `runtime`.
        runtime: puts tensors on the device.
        input_ids: int64 [batch, tokens] on the host.
        processors: transformers' logits processors. Those without a form of fixed shape run on the host between two
            steps, so that the device waits for them.
        criteria: transformers' stopping criteria; the same holds for them.
        config: the prepared generation config, which has its special tokens as tensors.
        attention_mask: [batch, tokens], 0 at padding; None where there is none.
        position_ids: [..., batch or 1, tokens], as transformers counts them; None to count from the mask.
        streamer: gets each new token, or None.
        placement: how the cache and the results are sharded.
        forward: further arguments of the model's `forward`.
    """

    def __init__(
        self,
        model: Any,
        runtime: TorchRuntime,
        input_ids: torch.Tensor,
        processors: Any,
        criteria: Any,
        config: Any,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        streamer: Any = None,
        placement: Placement = ONE_DEVICE,
        **forward: Any,
    ) -> None:
        self.model, self.runtime, self.device = model, runtime, runtime.device()
        self.ids, self.processors, self.criteria, self.config = input_ids, processors, criteria, config
        self.streamer, self.placement, self.forward = streamer, placement, forward
        self.keeps_no_keys = "cache_params" in signature(model.forward).parameters  # as transformers calls states
        lengths = [one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)]
        self.limit = max(1, min([config.max_length, *lengths]) - input_ids.shape[1])
        ends = [one.eos_token_id.reshape(-1).cpu() for one in criteria if type(one) is EosTokenCriteria]
        self.ends = torch.cat(ends) if ends else None
        # As transformers' loop does, which takes a caller's criterion of this attribute for one of end tokens.
        pad = config._pad_token_tensor if any(hasattr(one, "eos_token_id") for one in criteria) else None
        self.pad = None if pad is None else pad.reshape(()).cpu()
        self.prompt = padded(input_ids, attention_mask, position_ids, self.limit)
        self.chooses_on_host = not runs_on_device(processors)
        self.ends_on_host = any(type(one) not in (EosTokenCriteria, MaxLengthCriteria) for one in criteria)
        self.wants_logits = bool(config.return_dict_in_generate and config.output_logits)
        self.wants_scores = bool(config.return_dict_in_generate and config.output_scores)
        self.kept_logits: list[torch.Tensor] = []
        self.kept_scores: list[torch.Tensor] = []

    def run(self) -> Any:
        """Run the loop and return int64 [batch, tokens + new tokens] on the host, or transformers' output object."""
        self.runtime.sync()  # what the caller recorded is no part of the programs below
        self.choose = None
        if not self.chooses_on_host:
            self.choose = DeviceChoice(self.processors, self.ids, self.limit, self.config.do_sample, self.device)
        self.device_ends = None if self.ends is None else self.ends.to(self.device)
        self.device_pad = None if self.pad is None else self.pad.to(self.device)
        state, cache = self._prefill(self.prompt)
        decode = self._in_step if self.chooses_on_host or self.ends_on_host else self._ahead
        new_tokens = decode(state, cache)
        if self.streamer is not None:
            self.streamer.end()
        return self._result(new_tokens)

    def _ahead(self, state: _State, cache: FixedCache) -> torch.Tensor:
        """All on the device, which is one step ahead of what the host looks at."""
        ended = torch.zeros(len(self.ids), dtype=torch.bool)
        for step in range(1, self.limit + 1):
            seen = state
            self._keep(state.logits, state.scores)
            if step < self.limit:
                state = self._decode(state, cache)
            if self.streamer is not None:
                token = seen.token.cpu()
                self.streamer.put(token)
                ended = ended if self.ends is None else ended | torch.isin(token, self.ends)
            elif self.ends is not None and step % LOOK_EVERY == 0:
                ended = seen.ended.cpu()
            if bool(ended.all()):
                break
        tokens = state.tokens.cpu()[:, : self.limit]
        if self.ends is None:
            return tokens
        stops = torch.isin(tokens, self.ends)
        lengths = torch.where(stops.any(-1), stops.int().argmax(-1) + 1, self.limit)
        return tokens[:, : int(lengths.max())]

    def _in_step(self, state: _State, cache: FixedCache) -> torch.Tensor:
        """Between two steps the host runs transformers' own processors and criteria, exactly as its loop does."""
        ids, unfinished = self.ids, torch.ones(len(self.ids), dtype=torch.long)
        for step in range(1, self.limit + 1):
            if self.chooses_on_host:
                assert state.logits is not None
                logits = state.logits.cpu()
                processed = self.processors(ids, logits)
                token = _likeliest_or_drawn(processed, self.config.do_sample)
                self._keep(logits, processed)
            else:
                token = state.token.cpu()
                self._keep(state.logits, state.scores)
            if self.pad is not None:
                token = token * unfinished + self.pad * (1 - unfinished)
            ids = torch.cat([ids, token[:, None]], -1)
            scores = tuple(one.cpu() for one in self.kept_scores) if self.wants_scores else None
            unfinished = unfinished & ~self.criteria(ids, scores)
            if self.streamer is not None:
                self.streamer.put(token)
            if not bool(unfinished.any()):
                break
            if step < self.limit:
                state = replace(state, token=token.to(self.device), ended=(unfinished == 0).to(self.device))
                state = self._decode(state, cache)
        return ids[:, self.ids.shape[1] :]

    def _prefill(self, prompt: Prompt) -> tuple[_State, FixedCache]:
        """The first program, for a prompt's width and an answer's."""
        batch, answer = len(prompt.ids), prompt.length - prompt.width
        shift = torch.tensor(-prompt.added)
        host = (
            torch.zeros(batch, dtype=torch.long),
            torch.zeros(batch, dtype=torch.bool),
            torch.zeros(batch, answer, dtype=torch.long),
            torch.zeros(1, dtype=torch.long),
            torch.full((1,), prompt.width - 1),
            prompt.positions[..., -1:].clone(),
            prompt.mask,
        )
        state = _State(*(tensor.to(self.device) for tensor in host))
        cache = FixedCache(self.model.config, prompt.length, prompt.shift.to(self.device))
        ids, mask = prompt.ids.to(self.device), prompt.mask[:, : prompt.width].contiguous().to(self.device)
        with padding_kept_out_of_states(self.model, mask):
            logits = self._logits(ids, mask, prompt.positions.to(self.device), cache)
        self.placement.shard(cache)
        cache.clock.begin_decode(state.slot, shift.to(self.device))
        state = self._chosen(state, logits)
        self.runtime.sync()
        return state, cache

    def _decode(self, state: _State, cache: FixedCache) -> _State:
        """The second program: the newest token's keys are written, and the next token is chosen."""
        state = replace(state, slot=state.slot + 1, positions=state.positions + 1)
        cache.clock.slot = state.slot
        self.placement.whole(state.slot, state.positions)
        logits = self._logits(state.token[:, None], state.mask, state.positions, cache)
        self.placement.shard(cache)
        state = self._chosen(state, logits)
        self.runtime.sync()
        return state

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """float32 [batch, vocab] after the last column."""
        if self.keeps_no_keys:  # no positions, and no mask but that of a prompt
            given = {"cache_params": cache, "attention_mask": mask if ids.shape[1] > 1 else None}
        else:
            given = {"past_key_values": cache, "attention_mask": mask, "position_ids": positions}
        out = self.model(input_ids=ids, use_cache=True, return_dict=True, **given, **self.forward)
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits

    def _chosen(self, state: _State, logits: torch.Tensor) -> _State:
        """With the next token, unless the host will choose it."""
        if self.choose is None:
            self.placement.whole(logits)
            return replace(state, logits=logits)
        seen = self.choose.seen_in_prompt(logits.shape[-1]) if state.seen is None else state.seen
        token, scores = self.choose(logits, state.step, seen)
        ended = state.ended
        if self.device_ends is not None and self.device_pad is not None:
            token = torch.where(ended, self.device_pad, token)
            ended = ended | (token[:, None] == self.device_ends).any(-1)
        seen = None if seen is None else seen.scatter(1, token[:, None], True)
        self.placement.whole(token, ended)
        tokens = state.tokens.index_copy(1, state.step, token[:, None])
        step = state.step + 1
        self.placement.whole(tokens, step, seen)
        return replace(
            state,
            token=token,
            ended=ended,
            tokens=tokens,
            step=step,
            seen=seen,
            logits=logits if self.wants_logits else None,
            scores=scores if self.wants_scores else None,
        )

    def _keep(self, logits: torch.Tensor | None, scores: torch.Tensor | None) -> None:
        if self.wants_logits and logits is not None:
            self.kept_logits.append(logits)
        if self.wants_scores and scores is not None:
            self.kept_scores.append(scores)

    def _result(self, new_tokens: torch.Tensor) -> Any:
        sequences = torch.cat([self.ids, new_tokens.to(self.ids.dtype)], -1)
        if not self.config.return_dict_in_generate:
            return sequences
        kept = [
            tuple(one.cpu() for one in values[: new_tokens.shape[1]]) if wanted else None
            for values, wanted in ((self.kept_scores, self.wants_scores), (self.kept_logits, self.wants_logits))
        ]
        output: Any = GenerateDecoderOnlyOutput  # declared with tuples of one tensor
        return output(sequences=sequences, scores=kept[0], logits=kept[1])


def _likeliest_or_drawn(scores: torch.Tensor, draw: bool) -> torch.Tensor:
    """As transformers' own loop chooses, so that a seed gives the tokens that it gives there."""
    if draw:
        return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
    return scores.argmax(-1)
