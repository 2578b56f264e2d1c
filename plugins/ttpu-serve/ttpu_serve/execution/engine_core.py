"""The engine's loop. In: requests, at any time; out: after each step, what it added to their answers. One thread calls
it; while the device runs a step, this host decodes the last one's text and schedules the next."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_jax.runner.runner import InFlight, RowRules, Runner
from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.execution.inbox import Inbox
from ttpu_serve.execution.input_processor import Intake, Prompt
from ttpu_serve.execution.prompt_outputs import NOT_A_NUMBER, finish_pooling, read_prompts
from ttpu_serve.execution.sequence_output import Answer
from ttpu_serve.execution.stats import EngineStats
from ttpu_serve.execution.utilization import StepCosts
from ttpu_serve.scheduling.request import Request, Status
from ttpu_serve.scheduling.scheduler import Scheduler
from ttpu_serve.scheduling.scheduler_output import ScheduledStep

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM
    from ttpu_jax.runner.lora import Adapters

log = logging.getLogger("ttpu.engine")


class EngineCore:
    """Requests in, tokens out. Made by `ttpu_jax.runner.build.build_engine`.

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
        self.intake = Intake(runner, tokenizer, stop_ids, adapters)
        self.model_name, self.stop_ids = model_name, stop_ids
        self.lora, self.model = adapters, model
        self.proposer, self.draft_tokens = proposer, draft_tokens
        self.overlap, self.costs = overlap, costs
        self.max_model_len, self.vocab_size = self.intake.max_model_len, self.intake.vocab_size
        self.guides = self.intake.guides
        self.asleep = self.closed = False
        self.inboxes: dict[str, Inbox] = {}
        self._in_flight: deque[InFlight] = deque()
        self._answers: dict[str, Answer] = {}
        self._guided: dict[str, Answer] = {}
        self._special: set[str] = set()  # answers whose rows need more than tokens and parameters
        self._children: dict[str, list[str]] = {}
        self._held: list[OutputDelta] = []
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
        cache_salt: str | None = None,
    ) -> None:
        """Take a request; its deltas come out of `step` under its id, with an index per answer.

        Args:
            cache_salt: only requests with the same one share prefixes with it.

        Raises:
            QueueFullError: too many wait already.
            RequestError: a prompt or value that cannot be served, or an id that is taken.
        """
        if self.closed:
            raise RequestError("a request was made, but the engine is closed: open another one.")
        if request_id in self._children:
            raise RequestError(f"a request with the id {request_id!r} is being served: choose another id.")
        made = self.intake.answers(
            request_id, prompt, params, priority=priority, adapter=adapter, pooling=pooling, cache_salt=cache_salt
        )
        taken: list[Request] = []
        try:
            for answer in made:
                self.scheduler.add(answer.request)
                taken.append(answer.request)
        except BaseException:
            for request in taken:
                self.scheduler.abort(request.id)
            raise
        for answer in made:
            name = answer.request.id
            answer.request.answer = answer
            self._answers[name] = answer
            if answer.guide is not None:
                self._guided[name] = answer
            if answer.guide is not None or answer.rules is not None or answer.wants_prompt:
                self._special.add(name)
        self._children[request_id] = [answer.request.id for answer in made]
        self._requests += 1
        self._prompt_tokens += len(made[0].request.prompt)

    def abort(self, request_id: str) -> None:
        """Forget a request: nothing more is said of it. Unknown ids are no error."""
        self._held = [delta for delta in self._held if delta.request_id != request_id]
        for child in self._children.pop(request_id, ()):
            self._forget(child, self.scheduler.abort(child))

    def token_ids(self, prompt: Prompt) -> list[int]:
        """A prompt's tokens, see `Intake.token_ids`."""
        return self.intake.token_ids(prompt)

    def inbox(self, request_ids: Iterable[str]) -> Inbox:
        """A place of their own for the deltas of some requests, which `step` then does not return."""
        return Inbox(self, request_ids)

    def hold(self, delta: OutputDelta) -> None:
        """Keep a delta for the next call of `step`."""
        self._held.append(delta)

    # -- the loop --

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        waiting = bool(self._answers) and not self.asleep
        return bool(self._held or self._in_flight) or waiting

    def step(self) -> list[OutputDelta]:
        """Dispatch what is next and read what is done: at most one step of each.

        Whatever it raises, pages and requests are accounted for, and a later call goes on."""
        deltas, self._held = self._held, []
        try:
            if not self.asleep:
                self._advance(deltas)
        except BaseException:
            self._held = deltas + self._held
            raise
        if not self.inboxes:
            return deltas
        for delta in deltas:
            if (inbox := self.inboxes.get(delta.request_id)) is not None:
                inbox.put(delta)
        return [delta for delta in deltas if delta.request_id not in self.inboxes]

    def _advance(self, deltas: list[OutputDelta]) -> None:
        synchronous = not self.overlap or self._waits_for_tokens()
        while synchronous and self._in_flight:
            self._collect(deltas)
        if self.proposer is not None:
            self._propose()
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self._dispatch(scheduled)
        if self._in_flight and (synchronous or scheduled is None or len(self._in_flight) > 1):
            self._collect(deltas)

    def _waits_for_tokens(self) -> bool:
        """Whether the next step depends on the last one's tokens: guides and drafts do."""
        guided = (answer.request.status is Status.RUNNING for answer in self._guided.values())
        return self.proposer is not None or any(guided)

    def _dispatch(self, scheduled: ScheduledStep) -> None:
        hidden = self.proposer is not None and self.proposer.wants_hidden
        rules: dict[tuple[int, int], RowRules] = {}
        try:
            for index, request in enumerate(scheduled.requests if self._special else ()):
                answer: Answer = request.answer
                hidden |= answer.wants_prompt and int(scheduled.starts[index]) < len(request.prompt)
                if scheduled.samples[index] and (answer.rules is not None or answer.guide is not None):
                    self._add_rules(rules, scheduled, index)
            in_flight = self.runner.dispatch(scheduled, self.scheduler.tables, rules, hidden=hidden)
        except BaseException:
            self.scheduler.update(scheduled, [[] for _ in scheduled.requests])
            raise
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight.append(in_flight)
        self.costs.count(scheduled)
        self._steps += 1

    def _add_rules(self, rules: dict[tuple[int, int], RowRules], scheduled: ScheduledStep, index: int) -> None:
        request = scheduled.requests[index]
        answer: Answer = request.answer
        draft = scheduled.drafts[index] if scheduled.drafts else []
        first = int(scheduled.starts[index] + scheduled.counts[index]) - len(draft) - len(request.prompt)
        masks = answer.guide.masks(draft) if answer.guide is not None else None
        for place in range(len(draft) + 1):
            bias = answer.rules.bias(first + place) if answer.rules is not None else None
            allowed = masks[place] if masks else answer.rules.mask if answer.rules is not None else None
            if bias is not None or allowed is not None:
                rules[index, place] = RowRules(bias, allowed)

    def _collect(self, deltas: list[OutputDelta]) -> None:
        """Wait for the oldest dispatched step, and give each request its tokens."""
        done = self._in_flight.popleft()
        step = done.step
        try:
            values = done.read()
        except BaseException:
            self.scheduler.update(step, [[] for _ in step.requests])
            raise
        now = time.perf_counter()
        self._device_seconds += now - self._busy_since
        self._busy_since = now
        answers = [self._live(request) for request in step.requests]
        if done.hidden is not None:
            read_prompts(done, answers, self.runner)
        tokens: list[int] = values["token"].tolist()
        samples, rows = step.samples.tolist(), np.searchsorted(done.owners, np.arange(len(answers))).tolist()
        kept: list[list[int]] = []
        changed: list[Answer] = []
        for index, answer in enumerate(answers):
            if answer is None or not samples[index]:
                kept.append([])
                continue
            row, draft = rows[index], step.drafts[index] if step.drafts else []
            sampled = _accepted(tokens[row : row + len(draft) + 1], draft)
            if draft:
                self._count_draft(len(draft), len(sampled) - 1)
            kept.append(self._give(answer, sampled, row, values))
            changed.append(answer)
        self.scheduler.update(step, kept)
        if self.proposer is not None and self.proposer.wants_hidden:
            self._observe(done, kept)
        for answer in changed:
            if answer.finished:
                self.scheduler.finish(answer.request, answer.finish_reason or "stop")
            if (delta := answer.delta()) is not None:
                deltas.append(delta)
            if answer.finished:
                self._close(answer)

    def _live(self, request: Request) -> Answer | None:
        """The answer of a request that still wants one."""
        answer: Answer = request.answer
        return answer if self._answers.get(request.id) is answer and not answer.finished else None

    def _give(self, answer: Answer, sampled: list[int], row: int, values: Mapping[str, np.ndarray]) -> list[int]:
        """The tokens of one row that count; the answer's text and end are brought up to them. What goes wrong here is
        one request's affair."""
        try:
            counted = self._take(answer, sampled, row, values)
        except Exception as error:
            log.exception("request %s failed", answer.request_id)
            answer.fail(f"this request met an error of the engine ({type(error).__name__}: {error}): report it.")
            return []
        self._output_tokens += 0 if answer.request.pooling else len(counted)
        return counted

    def _take(self, answer: Answer, sampled: list[int], row: int, values: Mapping[str, np.ndarray]) -> list[int]:
        request = answer.request
        if request.pooling is not None:
            finish_pooling(answer)
            return sampled[:1]
        if answer.guide is not None and answer.guide.error is not None:
            answer.fail(answer.guide.error, answer.guide.fault)
            return []
        if min(sampled) < 0:
            answer.fail(NOT_A_NUMBER)
            return []
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = [
                answer.logprobs_of(
                    token,
                    float(values["logprob"][row + place]),
                    values["top_tokens"][row + place],
                    values["top_logprobs"][row + place],
                    request.params.logprobs,
                )
                for place, token in enumerate(sampled)
            ]
        return sampled[: answer.take(sampled, logprobs)]

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
        """Whether drafts can be judged: penalties change with every token, and prompts have nothing to guess."""
        request = answer.request
        decodes = request.status is Status.RUNNING and request.pending == 0 and request.computed == request.known - 1
        return decodes and not request.params.has_penalties and request.pooling is None

    def _observe(self, done: InFlight, kept: list[list[int]]) -> None:
        """Show the proposer the stream from which each request's newest token was drawn."""
        step = done.step
        sampled = [index for index, tokens in enumerate(kept) if tokens]
        if not sampled or done.hidden is None:
            return
        ends = np.cumsum(step.counts)
        drafts = step.drafts or [[] for _ in kept]
        places = [int(ends[index]) - 1 - len(drafts[index]) + len(kept[index]) - 1 for index in sampled]
        self.proposer.observe([step.requests[index] for index in sampled], np.asarray(done.hidden)[places])

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
        self.prepare_adapter(name, directory)()

    def prepare_adapter(self, name: str, directory: str) -> Callable[[], None]:
        """The slow half of `load_adapter`, which reads files and may run in another thread than the engine's; what it
        returns is the other half, for the engine's.

        Raises:
            RequestError, CheckpointError, MappingError, UnsupportedError: as `load_adapter`, which the other half does
                for what depends on the engine's state.
        """
        lora = self._lora_for(name)
        updates = lora.read(directory)

        def put() -> None:
            busy = {answer.request.adapter for answer in self._answers.values()}
            self._lora_for(name).put(self.runner.params, name, updates, busy)

        return put

    def _lora_for(self, name: str) -> Adapters:
        if self.lora is None or self.asleep:
            why = "it is asleep: wake it up" if self.lora else "it was built without room for them: set max_adapters"
            raise RequestError(f"the adapter {name!r} was to be loaded into this engine, but {why}.")
        return self.lora

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
        while self._in_flight:
            self._collect(self._held)
        self.scheduler.preempt_all()
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Abort everything and give the device's memory back."""
        for request_id in list(self._children):
            self.abort(request_id)
        while self._in_flight:
            self._in_flight.popleft().read()
        if not self.asleep and not self.closed:
            self.runner.release()
            if self.proposer is not None:
                self.proposer.close()
        self.closed = True

    # -- bookkeeping --

    def _close(self, answer: Answer) -> None:
        children = self._children.get(answer.request_id)
        if children is not None:
            children.remove(answer.request.id)
            if not children:
                del self._children[answer.request_id]
        self._forget(answer.request.id, answer.request)

    def _forget(self, child: str, request: Request | None) -> None:
        self._answers.pop(child, None)
        self._guided.pop(child, None)
        self._special.discard(child)
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
