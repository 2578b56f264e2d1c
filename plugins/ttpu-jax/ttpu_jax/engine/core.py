"""The engine's loop. In: requests, at any time; out: after each step, what it added to their answers. One thread calls
it; while the device runs a step, this host decodes the last one's text and schedules the next."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_jax.engine.answer import Answer
from ttpu_jax.engine.costs import StepCosts
from ttpu_jax.engine.guided import GuideFactory, GuideState
from ttpu_jax.engine.logit_rules import Rules
from ttpu_jax.engine.outputs import OutputDelta
from ttpu_jax.engine.request import Request, Status
from ttpu_jax.engine.runner import InFlight, RowRules, Runner
from ttpu_jax.engine.sampler import Level, level_of
from ttpu_jax.engine.sampling_params import SamplingParams
from ttpu_jax.engine.schedule import ScheduledStep
from ttpu_jax.engine.scheduler import Scheduler
from ttpu_jax.engine.stats import EngineStats

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM
    from ttpu_jax.engine.lora import Adapters

Prompt = str | Sequence[int]


class EngineCore:
    """Requests in, tokens out. Made by `ttpu_jax.engine.build.build_engine`.

    Not safe for several threads: `AsyncEngine` gives it one of its own."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Any,
        *,
        model_name: str,
        stop_ids: frozenset[int],
        costs: StepCosts,
        adapters: Adapters | None = None,
        model: JaxCausalLM | None = None,
        proposer: Any = None,
        draft_tokens: int = 0,
        overlap: bool = True,
    ) -> None:
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self.model_name, self.stop_ids = model_name, stop_ids
        self.lora, self.model = adapters, model
        self.proposer, self.draft_tokens = proposer, draft_tokens
        self.overlap, self.costs = overlap, costs
        assert runner.config.max_model_len is not None
        self.max_model_len = runner.config.max_model_len
        self.vocab_size = runner.spec.vocab_size
        self.guides = GuideFactory(tokenizer, self.vocab_size, runner.vocab, stop_ids)
        self.asleep = False
        self._in_flight: deque[InFlight] = deque()
        self._answers: dict[str, Answer] = {}
        self._children: dict[str, list[str]] = {}
        self._held: list[OutputDelta] = []
        self._salt = b""
        self._steps = self._requests = self._prompt_tokens = self._output_tokens = 0
        self._drafted = self._accepted = 0
        self._accepted_at = [0] * draft_tokens
        self._device_seconds, self._busy_since = 0.0, 0.0

    # -- requests --

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        adapter: str | None = None,
        pooling: str | None = None,
    ) -> None:
        """Take a request; its deltas come out of `step` under its id, with an index per answer.

        Raises:
            QueueFullError: too many wait already.
            RequestError: a prompt or value that cannot be served, or an id that is taken.
        """
        if request_id in self._children:
            raise RequestError(f"a request with the id {request_id!r} is being served: choose another id.")
        ids = self.token_ids(prompt)
        self._check(ids, params, pooling)
        if params.seed is None:
            params = replace(params, seed=secrets.randbelow(2**32))
        count = params.n if pooling is None else 1
        made = [
            self._request(request_id, index, count, ids, params, priority, adapter, pooling) for index in range(count)
        ]
        taken: list[Request] = []
        try:
            for answer in made:
                self.scheduler.add(answer.request)
                taken.append(answer.request)
        except BaseException:
            for request in taken:
                self.scheduler.abort(request.id)
            raise
        self._answers |= {answer.request.id: answer for answer in made}
        self._children[request_id] = [answer.request.id for answer in made]
        self._requests += 1
        self._prompt_tokens += len(ids)

    def abort(self, request_id: str) -> None:
        """Forget a request: nothing more is said of it. Unknown ids are no error."""
        for child in self._children.pop(request_id, ()):
            request = self.scheduler.abort(child)
            self._forget(child, request)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """A prompt's tokens: tokenized as the checkpoint says, or as they are.

        Raises:
            RequestError: text without a tokenizer, an empty prompt, or ids outside the vocabulary.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("a prompt was given as text, but the checkpoint has no tokenizer: pass token ids.")
            ids = [int(token) for token in self.tokenizer.encode(prompt)]
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise RequestError("the prompt has no tokens: pass at least one.")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise RequestError(
                f"the prompt holds token id {min(ids) if min(ids) < 0 else max(ids)}, but this model's run from 0 to "
                f"{self.vocab_size - 1}: correct it."
            )
        return ids

    # -- the loop --

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        waiting = bool(self._answers) and not self.asleep
        return bool(self._held or self._in_flight) or waiting

    def step(self) -> list[OutputDelta]:
        """Dispatch what is next and read what is done: at most one step of each."""
        deltas, self._held = self._held, []
        if self.asleep:
            return deltas
        synchronous = not self.overlap or self._waits_for_tokens()
        if synchronous:
            deltas += self._drain()
        if self.proposer is not None:
            self._propose()
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self._dispatch(scheduled)
        if self._in_flight and (synchronous or scheduled is None or len(self._in_flight) > 1):
            deltas += self._collect()
        return deltas

    def _waits_for_tokens(self) -> bool:
        """Whether the next step depends on the last one's tokens: guides and drafts do."""
        return self.proposer is not None or any(answer.guide is not None for answer in self._answers.values())

    def _dispatch(self, scheduled: ScheduledStep) -> None:
        hidden = False
        rules: dict[tuple[int, int], RowRules] = {}
        for index, request in enumerate(scheduled.requests):
            params = request.params
            if request.pooling is None and params.prompt_logprobs is None and level_of(params) is not Level.ALL:
                continue
            hidden |= request.pooling is not None or (
                params.prompt_logprobs is not None and int(scheduled.starts[index]) < len(request.prompt)
            )
            if scheduled.samples[index]:
                self._add_rules(rules, scheduled, index)
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self.costs.count(scheduled)
        self._in_flight.append(
            self.runner.dispatch(scheduled, self.scheduler.tables, rules, hidden=hidden)
        )
        self._steps += 1

    def _add_rules(self, rules: dict[tuple[int, int], RowRules], scheduled: ScheduledStep, index: int) -> None:
        request = scheduled.requests[index]
        answer = self._answers.get(request.id)
        if answer is None or (answer.rules is None and answer.guide is None):
            return
        draft = scheduled.drafts[index] if scheduled.drafts else []
        first = int(scheduled.starts[index] + scheduled.counts[index]) - len(draft) - len(request.prompt)
        masks = answer.guide.masks(draft) if answer.guide is not None else None
        for place in range(len(draft) + 1):
            bias = answer.rules.bias(first + place) if answer.rules is not None else None
            allowed = masks[place] if masks else answer.rules.mask if answer.rules is not None else None
            if bias is not None or allowed is not None:
                rules[index, place] = RowRules(bias, allowed)

    def _drain(self) -> list[OutputDelta]:
        deltas = []
        while self._in_flight:
            deltas += self._collect()
        return deltas

    def _collect(self) -> list[OutputDelta]:
        """Wait for the oldest dispatched step, and give each request its tokens."""
        done = self._in_flight.popleft()
        values = done.read()
        now = time.perf_counter()
        self._device_seconds += now - self._busy_since
        self._busy_since = now
        step = done.step
        rows = np.searchsorted(done.owners, np.arange(len(step.requests)))
        tokens = values["token"]
        kept: list[list[int]] = []
        changed: list[Answer] = []
        for index, request in enumerate(step.requests):
            answer = self._answers.get(request.id)
            if done.hidden is not None and answer is not None:
                self._use_hidden(done, index, answer)
            if not step.samples[index] or answer is None or answer.finished:
                kept.append([])
                continue
            row = int(rows[index])
            draft = step.drafts[index] if step.drafts else []
            sampled = _accepted(tokens[row : row + len(draft) + 1].tolist(), draft)
            if draft:
                self._count_draft(len(draft), len(sampled) - 1)
            kept.append(self._give(answer, sampled, row, values))
            changed.append(answer)
        self.scheduler.update(step, kept)
        deltas = []
        for answer in changed:
            if answer.finished:
                self.scheduler.finish(answer.request, answer.finish_reason or "stop")
            if (delta := answer.delta()) is not None:
                deltas.append(delta)
            if answer.finished:
                self._close(answer)
        return deltas

    def _give(self, answer: Answer, sampled: list[int], row: int, values: Mapping[str, np.ndarray]) -> list[int]:
        """The tokens of one row that count; the answer's text and end are brought up to them."""
        request = answer.request
        if request.pooling is not None:
            self._end_pooling(answer)
            return sampled[:1]
        if answer.guide is not None and answer.guide.error is not None:
            answer.fail(answer.guide.error)
            return []
        if any(token < 0 for token in sampled):
            answer.fail(
                "the model's output is not a number, or no token was allowed: the checkpoint is damaged, it overflows "
                "in this dtype (try float32), or the request forbids every token."
            )
            return []
        logprobs = None
        if request.params.logprobs is not None:
            count = request.params.logprobs
            logprobs = [
                answer.logprobs_of(
                    token,
                    float(values["logprob"][row + place]),
                    values["top_tokens"][row + place],
                    values["top_logprobs"][row + place],
                    count,
                )
                for place, token in enumerate(sampled)
            ]
        counted = sampled[: answer.take(sampled, logprobs)]
        self._output_tokens += len(counted)
        return counted

    def _use_hidden(self, done: InFlight, index: int, answer: Answer) -> None:
        """Prompt log-probabilities and embeddings, from the step's residual stream."""
        request, step = answer.request, done.step
        start, count = int(step.starts[index]), int(step.counts[index])
        if start >= len(request.prompt) or (request.pooling is None and request.params.prompt_logprobs is None):
            return
        begin = int(step.counts[:index].sum())
        assert done.hidden is not None
        if request.pooling is not None:
            stream = np.asarray(done.hidden[begin : begin + count], np.float32)
            if start == 0:
                answer.pooled = None
            if request.pooling == "last":
                answer.pooled = stream[-1]
            else:
                answer.pooled = stream.sum(0) + (0 if answer.pooled is None else answer.pooled)
            return
        targets = request.prompt[start + 1 : start + 1 + count]
        if targets:
            shifted = np.zeros(done.hidden.shape[0], np.int32)
            shifted[begin : begin + len(targets)] = targets
            values = self.runner.prompt_logprobs(done.hidden, shifted)
            part = {name: value[begin : begin + len(targets)] for name, value in values.items()}
            answer.add_prompt_logprobs(start + 1, targets, part)

    def _end_pooling(self, answer: Answer) -> None:
        assert answer.pooled is not None
        request = answer.request
        vector = answer.pooled / (len(request.prompt) if request.pooling == "mean" else 1)
        answer.embedding = (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
        answer.end("stop")

    # -- speculation --

    def _propose(self) -> None:
        """Ask for drafts of the requests that may have some."""
        ready = [answer for answer in self._answers.values() if self._speculates(answer)]
        if not ready:
            return
        drafts = self.proposer.propose([answer.request for answer in ready], self.draft_tokens)
        for answer, draft in zip(ready, drafts, strict=True):
            if draft and answer.guide is not None:
                draft = draft[: answer.guide.legal_prefix(draft)]
            answer.request.draft = list(draft)

    def _speculates(self, answer: Answer) -> bool:
        """Penalties change with every token, so that several cannot be judged at once; prompts have nothing to "
        "guess."""
        request = answer.request
        decodes = request.status is Status.RUNNING and request.pending == 0 and request.computed == request.known - 1
        return decodes and not request.params.has_penalties and request.pooling is None

    def _count_draft(self, drafted: int, accepted: int) -> None:
        self._drafted += drafted
        self._accepted += accepted
        for place in range(accepted):
            self._accepted_at[place] += 1

    # -- state of the whole engine --

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        scheduler, pool = self.scheduler.stats(), self.runner.pool
        names = [group.name for group in self.runner.layout.groups]
        pages = zip(scheduler.pages_in_use, scheduler.pages_total, strict=True)
        usage = [used / max(total, 1) for used, total in pages]
        return EngineStats(
            waiting=scheduler.waiting,
            running=scheduler.running,
            pages_in_use=dict(zip(names, scheduler.pages_in_use, strict=True)),
            pages=dict(zip(names, scheduler.pages_total, strict=True)),
            kv_usage=max(usage, default=0.0),
            prefix_queries=scheduler.prefix_query_tokens,
            prefix_hits=scheduler.prefix_hit_tokens,
            preemptions=scheduler.preemptions,
            drafted=self._drafted,
            accepted=self._accepted,
            accepted_at=tuple(self._accepted_at),
            recompiles=pool.recompiles,
            programs=len(pool.keys),
            compile_seconds=pool.compile_seconds,
            steps=self._steps,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            model_flops=self.costs.flops,
            hbm_bytes=self.costs.bytes,
            device_seconds=self._device_seconds,
            peak_flops=self.costs.peak_flops,
            peak_bytes=self.costs.peak_bytes,
            asleep=self.asleep,
        )

    @property
    def adapters(self) -> dict[str, int]:
        """Loaded LoRA adapters by name, each with its number."""
        return {} if self.lora is None else dict(self.lora.names)

    def load_adapter(self, name: str, directory: str) -> None:
        """Load a LoRA adapter in PEFT's format, in place of one of the same name; requests finish with what they
        started with.

        Raises:
            RequestError: no room (`max_adapters`, `max_lora_rank`), or no adapter there.
            CheckpointError, MappingError, UnsupportedError: an adapter that this model cannot use.
        """
        if self.lora is None or self.asleep:
            why = "it is asleep: wake it up" if self.lora else "it was built without room for them: set max_adapters"
            raise RequestError(f"the adapter {name!r} was to be loaded into this engine, but {why}.")
        busy = {answer.request.adapter for answer in self._answers.values()}
        self.lora.load(self.runner.params, name, directory, busy)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; requests that use it finish with it.

        Raises:
            RequestError: there is none of this name.
        """
        if self.lora is None or name not in self.lora.names:
            known = ", ".join(self.adapters) or "none"
            raise RequestError(f"the adapter {name!r} was to be unloaded, but those loaded are: {known}.")
        self.lora.unload(name)

    def reset_prefix_cache(self) -> None:
        """Forget what prompts have in common with earlier ones."""
        self.scheduler.reset_prefix_cache()

    def sleep(self) -> None:
        """Give the devices' memory back: weights go to the host, cached keys and values are dropped. Requests stay, and
        are computed again after `wake_up`."""
        if not self.asleep:
            self._pause()
            self.runner.sleep()
            if self.proposer is not None:
                self.proposer.sleep()
            self.asleep = True

    def wake_up(self) -> None:
        """Put the weights back on the devices, and go on."""
        if self.asleep:
            self.runner.wake_up()
            self._share_weights()
            if self.proposer is not None:
                self.proposer.wake_up()
            self.asleep = False

    def update_weights(self, update: Callable[[], None]) -> None:
        """Run `update`, which replaces the runner's weights, between two steps; what was computed with the old ones is
        computed again, tokens that were sampled stay."""
        self._pause()
        try:
            update()
        finally:
            self._share_weights()

    def _share_weights(self) -> None:
        """Give the loaded model the runner's arrays: those that it had are gone."""
        if self.model is not None:
            self.model.params.update({path: self.runner.params[path] for path in self.model.params})

    def _pause(self) -> None:
        """Finish what is dispatched, and let every request start over from its tokens."""
        self._held += self._drain()
        self.scheduler.preempt_all()
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Abort everything and give the device's memory back."""
        for request_id in list(self._children):
            self.abort(request_id)
        while self._in_flight:
            self._in_flight.popleft().read()
        if not self.asleep:
            self.runner.release()
            if self.proposer is not None:
                self.proposer.close()

    # -- bookkeeping --

    def _check(self, ids: list[int], params: SamplingParams, pooling: str | None) -> None:
        if pooling not in (None, "last", "mean"):
            raise RequestError(f"pooling is {pooling!r}, but last and mean are known: use one of them.")
        room = self.max_model_len - len(ids)
        if room < (0 if pooling else 1):
            raise RequestError(
                f"the prompt has {len(ids):,} tokens, but this engine's sequences have at most {self.max_model_len:,}, "
                "answer included: shorten the prompt."
            )
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but after the prompt's {len(ids):,} tokens only {room:,} fit into "
                f"the {self.max_model_len:,} of this engine's sequences: lower it, or shorten the prompt."
            )
        config = self.runner.config
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.runner.max_logprobs:
                raise RequestError(
                    f"{name} is {value}, but this engine reports at most {self.runner.max_logprobs}: lower it, or "
                    "raise max_logprobs where the engine is built."
                )
        if params.prompt_logprobs is not None and not config.prompt_logprobs:
            raise RequestError("prompt_logprobs was asked for, but this engine was built without: leave it out.")
        if params.has_penalties and not config.penalties:
            raise RequestError("penalties were asked for, but this engine was built without: leave them out.")
        if level_of(params) > self.runner.highest_level:
            raise RequestError(
                f"the request needs the sampling level {level_of(params).name.lower()!r}, but this engine was built "
                "with "
                f"sampling_level={config.sampling_level!r}: ask for less, or raise it where the engine is built."
            )
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop strings were given, but the checkpoint has no tokenizer: use stop_token_ids instead."
            )

    def _request(
        self,
        request_id: str,
        index: int,
        count: int,
        ids: list[int],
        params: SamplingParams,
        priority: int,
        adapter: str | None,
        pooling: Any,
    ) -> Answer:
        own = params.answer(index) if count > 1 else params
        if adapter is not None and adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise RequestError(f"the adapter {adapter!r} was asked for, but those loaded are: {known}.")
        room = self.max_model_len - len(ids)
        request = Request(
            request_id if count == 1 else f"{request_id}/{index}",
            ids,
            own,
            priority=priority,
            adapter=self.adapters[adapter] if adapter else 0,
            salt=self._salt + (self.lora.salt(adapter) if self.lora and adapter else b""),
            pooling=pooling,
            stop_ids=frozenset() if own.ignore_eos else self.stop_ids,
            max_output=1 if pooling else min(own.max_tokens or room, room),
        )
        if own.prompt_logprobs is not None or pooling == "mean":
            request.salt = secrets.token_bytes(16)  # every token of it has to pass, so nothing may be found in a cache
        else:
            request.salt += self.runner.length_salt(len(ids))
        answer = Answer(request, request_id, index, self.tokenizer)
        rules = Rules.for_request(request, self.vocab_size, self.runner.vocab)
        if rules.mask is not None or rules.early is not None or rules.always is not None:
            answer.rules = rules
        if own.guided is not None:
            guide = self.guides.compile(own.guided)
            answer.guide = GuideState(
                guide, allowed=rules.mask, min_tokens=own.min_tokens, stop_ids=request.stop_ids | {*own.stop_token_ids}
            )
        return answer

    def _close(self, answer: Answer) -> None:
        children = self._children.get(answer.request_id)
        if children is not None:
            children.remove(answer.request.id)
            if not children:
                del self._children[answer.request_id]
        self._forget(answer.request.id, answer.request)

    def _forget(self, child: str, request: Request | None) -> None:
        self._answers.pop(child, None)
        if self.proposer is not None and request is not None:
            self.proposer.on_finish(request)


def _accepted(sampled: list[int], draft: list[int]) -> list[int]:
    """The tokens that hold: the first that was sampled, and after each draft token that it equals the next one."""
    count = 1
    for guess, token in zip(draft, sampled, strict=False):
        if guess != token:
            break
        count += 1
    return sampled[:count]


