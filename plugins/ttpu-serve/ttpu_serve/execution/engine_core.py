"""The engine core: requests may be added at any time, and each step returns the deltas of their outputs. Threads call
it in turn. While the device runs a step, the host decodes the previous step's text and schedules the next step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_core.generation.events import StreamEvent, Timings
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.adapters.of_engine import EngineAdapters
from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.execution.declared_pooling import LAST, DeclaredPooling
from ttpu_serve.execution.guide_follower import GuideFollower
from ttpu_serve.execution.inbox import Inbox
from ttpu_serve.execution.input_processor import InputProcessor, PromptInput
from ttpu_serve.execution.prompt_outputs import read_prompts
from ttpu_serve.execution.row_results import accepted, take_row
from ttpu_serve.execution.sequence_output import SequenceOutput
from ttpu_serve.execution.speculation import Speculation
from ttpu_serve.execution.stats import EngineStats
from ttpu_serve.execution.step_builder import StepBuilder
from ttpu_serve.execution.streaming import stream_events
from ttpu_serve.execution.turns import Turns, in_turn
from ttpu_serve.execution.utilization import StepCosts
from ttpu_serve.guided.guides import GuidePlace
from ttpu_serve.runner import InFlight, ModelRunner, RowRules, RunnerStep, ServedModel
from ttpu_serve.scheduling.request import AskedPooling, Request, Status
from ttpu_serve.scheduling.scheduler import Scheduler
from ttpu_serve.scheduling.scheduler_output import ScheduledStep


@dataclass(frozen=True)
class _Dispatched:
    """A dispatched step: as scheduled, as passed to the runner, and its pending results."""

    scheduled: ScheduledStep
    step: RunnerStep
    in_flight: InFlight


class EngineCore:
    """Serves requests with any `ModelRunner`. `ttpu_serve.api.build_engine` makes it.

    Several threads may call it: requests of all of them share steps, which one thread runs while the others wait.
    `AsyncEngine` gives it a thread of its own.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        tokenizer: Any,
        *,
        model_name: str,
        stop_ids: frozenset[int] = frozenset(),
        costs: StepCosts | None = None,
        model: ServedModel | None = None,
        speculation: Speculation | None = None,
        overlap: bool = True,
        pooling: DeclaredPooling = LAST,
        guides: GuidePlace = "inline",
    ) -> None:
        """Args:
            runner: the runner, with allocated pages and compiled programs.
            scheduler: made with the runner's limits and page groups.
            tokenizer: the model's transformers tokenizer, or None.
            model_name: the model's name in responses.
            stop_ids: tokens that end a sequence.
            costs: counts FLOPs and bytes; None counts nothing.
            model: the loaded model that shares the runner's weights.
            speculation: makes and counts drafts; None turns speculation off.
            overlap: schedule a step before the tokens of the previous one are known.
            pooling: what the checkpoint says of its embeddings.
            guides: where grammars are compiled and masks computed: one of `ttpu_serve.guided.guides.PLACES`.
        """
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self.input_processor = InputProcessor(runner, tokenizer, stop_ids, pooling, guides)
        self.model_name, self.stop_ids, self.model = model_name, stop_ids, model
        self.speculation = speculation or Speculation()
        self.overlap, self.costs = overlap, costs
        self._followed = GuideFollower(guides)
        self.max_model_len = self.input_processor.max_model_len
        self.vocab_size = self.input_processor.vocab_size
        self.guides = self.input_processor.guides
        self.embeds = pooling.of_embeddings
        self.asleep = self.closed = False
        self.turns = Turns(self.abort)
        self._adapters = EngineAdapters(runner.adapters)
        self.failures = 0  # steps that raised, one after another, in calls of several threads
        self._steps_for = StepBuilder(runner)
        self._in_flight: deque[_Dispatched] = deque()
        self._outputs: dict[str, SequenceOutput] = {}
        self._following: dict[str, SequenceOutput] = {}  # whose next token depends on the one before it
        self._special: set[str] = set()  # outputs whose rows need more than tokens and parameters
        self._children: dict[str, list[str]] = {}
        self._held: list[OutputDelta] = []
        self._failed: Sequence[Request] = ()  # of the last step that raised
        self._taking: list[SequenceOutput] = []  # whose tokens the scheduler is not told of yet
        self._steps = self._requests = self._prompt_tokens = self._output_tokens = 0
        self._device_seconds, self._busy_since = 0.0, 0.0
        self._step_seconds = 0.0  # of the last steps

    # -- requests --

    @in_turn
    def add(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        priority: int = 0,
        adapter: str | None = None,
        pooling: AskedPooling | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Add a request. `step` returns its deltas under its id, with an index per sequence.

        Args:
            request_id: an id that no running or waiting request has.
            prompt: a text, token ids, or a mapping with one of them.
            params: sampling parameters.
            priority: requests with lower values run first.
            adapter: name of a loaded LoRA adapter; None uses the base model.
            pooling: asks for the prompt's embedding instead of generated tokens.
            cache_salt: only requests with the same salt share cached prefixes.

        Raises:
            QueueFullError: too many requests wait already.
            RequestError: the prompt or a value cannot be served, or the id is taken.
        """
        self._check_open()
        if request_id in self._children:
            raise RequestError(f"a request with the id {request_id!r} is being served: choose another id.")
        made = self.input_processor.outputs(
            request_id, prompt, params, priority=priority, adapter=adapter, pooling=pooling, cache_salt=cache_salt
        )
        taken: list[Request] = []
        try:
            for output in made:
                self.scheduler.add(output.request)
                taken.append(output.request)
        except BaseException:
            for request in taken:
                self.scheduler.abort(request.id)
            raise
        for output in made:
            name = output.request.id
            self._outputs[name] = output
            if output.guide is not None or (output.rules is not None and output.rules.follows_output):
                self._following[name] = output
                output.guide_beside = self._followed.beside and not self._synchronous
            if output.guide is not None or output.rules is not None or output.wants_prompt:
                self._special.add(name)
        self._children[request_id] = [output.request.id for output in made]
        self._requests += 1
        self._prompt_tokens += len(made[0].request.prompt)

    @in_turn
    def take_back(self, request_id: str) -> None:
        """Drop a request that was added after the last step, because others that belong to it are refused. It is not
        counted as a request."""
        prompt = self._outputs[self._children[request_id][0]].request.prompt
        self._requests -= 1
        self._prompt_tokens -= len(prompt)
        self.abort(request_id)

    @in_turn
    def abort(self, request_id: str) -> None:
        """Drop a request; no more deltas of it are returned. Unknown ids are ignored."""
        self._held = [delta for delta in self._held if delta.request_id != request_id]
        for child in self._children.pop(request_id, ()):
            self._forget(child, self.scheduler.abort(child))

    @in_turn
    def token_ids(self, prompt: PromptInput) -> list[int]:
        """Return a prompt's token ids; see `InputProcessor.token_ids`."""
        return list(self.input_processor.read(prompt).token_ids)

    def stream(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], timings: Timings
    ) -> Iterator[StreamEvent]:
        """Yield events of several prompts, one per token, as they come; see `stream_events`.

        Raises:
            RequestError: a prompt or a value cannot be served; raised at once.
        """
        return stream_events(self, prompts, params, timings)

    def inbox(self, request_ids: Iterable[str]) -> Inbox:
        """Return a separate queue for the deltas of some requests; `step` no longer returns these."""
        return Inbox(self, request_ids)

    def hold(self, delta: OutputDelta) -> None:
        """Keep a delta for the next call of `step`."""
        self._held.append(delta)

    # -- the loop --

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        waiting = bool(self._outputs) and not self.asleep
        return bool(self._held or self._in_flight or self.turns.has_dropped) or waiting

    @in_turn
    def step(self) -> list[OutputDelta]:
        """Dispatch the next step if one can be scheduled, collect the oldest finished step, and return its deltas.

        If it raises, a later call continues: requests are computed again from their tokens, and those whose tokens were
        being taken end.
        """
        deltas, self._held = self._held, []
        try:
            if not self.asleep:
                self._advance(deltas)
        except BaseException as error:
            self._start_over(error)
            self._held = deltas + self._held
            raise
        inboxes = self.turns.inboxes
        if not inboxes:
            return deltas
        for delta in deltas:
            if (inbox := inboxes.get(delta.request_id)) is not None:
                inbox.put(delta)
        return [delta for delta in deltas if delta.request_id not in inboxes]

    def _advance(self, deltas: list[OutputDelta]) -> None:
        synchronous = self._synchronous
        while synchronous and self._in_flight:
            self._collect(deltas)
        if self._followed:
            self._take_followed(deltas)
        self.speculation.propose(self._outputs.values())
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self._dispatch(scheduled)
        if self._in_flight and (synchronous or scheduled is None or len(self._in_flight) > 1):
            self._collect(deltas)
        elif scheduled is None and self._followed:
            self._take_followed(deltas, idle=True)

    @in_turn
    def end_failed(self, error: Exception) -> None:
        """End the requests of the step that raised last; the next `step` returns their deltas."""
        for request in self._failed:
            if (output := self._live(request)) is not None:
                output.fail(_failure(error))
                self._tell(output, self._held)
                self.scheduler.finish(request, "error")
                self._close(output)
        self._failed = ()

    def _start_over(self, error: BaseException) -> None:
        """Put the engine in order after an error, which may have come between any two lines of a step. Steps in flight
        are dropped, and what they, or the failed one, should have written is computed again."""
        outputs = list(self._outputs.values())
        running = [output.request for output in outputs if output.request.status is Status.RUNNING]
        self._failed = self._failed or running or [output.request for output in outputs]
        self._in_flight.clear()
        for output in self._taking:
            if not output.finished:
                output.fail(_failure(error))
        self._taking = []
        for output in outputs:
            if output.finished:
                self._tell(output, self._held)
                self._close(output)
        live = [output.request for output in self._outputs.values()]
        self.scheduler.restart(live)
        self._steps_for.reset()
        self.speculation.forget(live)

    @property
    def _synchronous(self) -> bool:
        """Whether every step waits for the tokens of the one before it, as drafts do."""
        return not self.overlap or self.speculation.proposer is not None

    def _take_followed(self, deltas: list[OutputDelta], *, idle: bool = False) -> None:
        """Let outputs go on, or end, whose guides are done. `idle`: nothing else can run."""
        for output in self._followed.done(self._step_seconds, idle=idle):
            output.take_followed()
            self._go_on(output, deltas)

    def _go_on(self, output: SequenceOutput, deltas: list[OutputDelta]) -> None:
        """Return what is new of an output, and end it or let it take part in the next step."""
        self._tell(output, deltas)
        if output.finished:
            self.scheduler.finish(output.request, output.finish_reason or "stop")
            self._close(output)
        elif output.request.id in self._following and not output.request.pending:  # of a step after a preemption
            self.scheduler.release(output.request)

    def _dispatch(self, scheduled: ScheduledStep) -> None:
        self._failed = scheduled.requests
        hidden = self.speculation.wants_hidden
        rules: dict[tuple[int, int], RowRules] = {}
        for index, request in enumerate(scheduled.requests if self._special else ()):
            output = self._outputs[request.id]
            hidden |= output.wants_prompt and int(scheduled.starts[index]) < len(request.prompt)
            if scheduled.samples[index] and (output.rules is not None or output.guide is not None):
                try:
                    _add_rules(rules, output, scheduled, index)
                except Exception as error:  # of a guide, for example: it ends no other request
                    output.break_by(error)
        dispatched = self._steps_for.dispatch(scheduled, self.scheduler.tables, rules, hidden=hidden)
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight.append(_Dispatched(scheduled, *dispatched))
        if self.costs is not None:
            self.costs.count(scheduled)
        self._steps += 1
        if self._following:  # whose next token depends on this step's: they sit out until it is known
            for request, samples in zip(scheduled.requests, scheduled.samples.tolist(), strict=True):
                if samples and request.id in self._following:
                    self.scheduler.hold(request)
        self._failed = ()

    def _collect(self, deltas: list[OutputDelta]) -> None:
        """Wait for the oldest dispatched step and give each request its tokens."""
        done = self._in_flight.popleft()
        scheduled = done.scheduled
        self._failed = scheduled.requests
        values = done.in_flight.read()
        now = time.perf_counter()
        self._device_seconds += now - self._busy_since
        self._step_seconds += (now - self._busy_since - self._step_seconds) / 8
        self._busy_since = now
        outputs = [self._live(request) for request in scheduled.requests]
        if done.step.hidden:
            read_prompts(scheduled, done.in_flight, outputs, self.runner)
        tokens: list[int] = values.token.tolist()
        samples = scheduled.samples.tolist()
        rows = np.searchsorted(done.step.owners, np.arange(len(outputs))).tolist()
        kept: list[list[int]] = []
        self._taking = changed = []
        for index, output in enumerate(outputs):
            if output is None or not samples[index]:
                kept.append([])
                continue
            row, draft = rows[index], scheduled.drafts[index] if scheduled.drafts else []
            sampled = accepted(tokens[row : row + len(draft) + 1], draft)
            if draft:
                self.speculation.count(len(draft), len(sampled) - 1)
            changed.append(output)
            counted = take_row(output, sampled, row, values)
            self._output_tokens += 0 if output.request.pooling else len(counted)
            kept.append(counted)
        self.scheduler.update(scheduled, kept)
        self._taking = []
        if self.speculation.wants_hidden and done.step.hidden:
            self.speculation.observe(scheduled, done.in_flight, kept)
        for output in changed:
            if output.guide_beside and not output.finished and output.guide is not None:
                self._tell(output, deltas)
                self._followed.follow(output)
            else:
                self._go_on(output, deltas)
        self._failed = ()

    def _live(self, request: Request) -> SequenceOutput | None:
        """Return the output of an unfinished request, or None. A later request may have taken its id."""
        output = self._outputs.get(request.id)
        return output if output is not None and output.request is request and not output.finished else None

    # -- state of the whole engine --

    def stats(self) -> EngineStats:
        """Return counters and gauges."""
        scheduler, compiled, speculation = self.scheduler.stats(), self.runner.compile_stats(), self.speculation
        names = [group.name for group in self.runner.page_groups]
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
            drafted=speculation.drafted,
            accepted=speculation.accepted,
            accepted_at=tuple(speculation.accepted_at),
            recompiles=compiled.recompiles,
            programs=compiled.programs,
            programs_pending=compiled.pending,
            programs_cached=compiled.cached,
            compile_seconds=compiled.seconds,
            steps=self._steps,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            model_flops=0.0 if self.costs is None else self.costs.flops,
            hbm_bytes=0.0 if self.costs is None else self.costs.bytes,
            device_seconds=self._device_seconds,
            peak_flops=None if self.costs is None else self.costs.peak_flops,
            peak_bytes=None if self.costs is None else self.costs.peak_bytes,
            asleep=self.asleep,
        )

    @property
    def adapters(self) -> dict[str, int]:
        """Names of the loaded LoRA adapters, each with its number."""
        return self._adapters.names

    @in_turn
    def load_adapter(self, name: str, directory: str) -> None:
        """Load a LoRA adapter in PEFT's format. It replaces an adapter of the same name; running requests finish with
        the adapter they started with.

        Raises:
            RequestError: the limits `max_adapters` or `max_lora_rank` do not suffice, or the directory holds no
                adapter.
            CheckpointError, MappingError, UnsupportedError: this model cannot use the adapter.
        """
        self.prepare_adapter(name, directory)()

    def prepare_adapter(self, name: str, directory: str) -> Callable[[], None]:
        """Do the slow half of `load_adapter`, which reads files and may run in any thread. Return the fast half, a
        function for the engine's thread.

        Raises:
            RequestError, CheckpointError, MappingError, UnsupportedError: as `load_adapter`; the returned function
                raises those that depend on the engine's state.
        """
        self._check_open()
        load = self._adapters.prepare(name, directory, asleep=self.asleep)

        def finish() -> None:
            self._check_open()
            load({output.request.adapter for output in self._outputs.values()}, asleep=self.asleep)

        return finish

    @in_turn
    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; running requests that use it finish with it.

        Raises:
            RequestError: no adapter of this name is loaded.
        """
        self._adapters.unload(name)

    @in_turn
    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        self.scheduler.reset_prefix_cache()

    @in_turn
    def sleep(self) -> None:
        """Free the devices' memory: move the weights to the host and drop the KV cache. Requests are kept and computed
        again after `wake_up`.

        Raises:
            RequestError: the engine is closed.
        """
        self._check_open()
        if not self.asleep:
            self._pause()
            self.runner.sleep()
            self._steps_for.reset()
            if self.speculation.proposer is not None:
                self.speculation.proposer.sleep()
            self.asleep = True

    @in_turn
    def wake_up(self) -> None:
        """Move the weights back to the devices and continue.

        Raises:
            RequestError: the engine is closed.
        """
        self._check_open()
        if self.asleep:
            self.runner.wake_up()
            if self.speculation.proposer is not None:
                self.speculation.proposer.wake_up()
            self.asleep = False

    @in_turn
    def update_weights(self, weights: str | Path | Mapping[str, Any]) -> None:
        """Replace some or all weights, awake or asleep. Running requests keep their tokens and continue with the new
        weights; keys and values of the old weights are dropped.

        Args:
            weights: a directory (a checkpoint, or only safetensors files), or a mapping from the checkpoint's tensor
                names to arrays of the model's shapes.

        Raises:
            RequestError, MappingError, CheckpointError: the weights do not fit, or the engine is closed; nothing is
                replaced then.
        """
        self._check_open()
        with self.runner.weight_update(weights) as replace:
            self._pause()
            replace()

    def _check_open(self) -> None:
        if self.closed:
            raise RequestError("the engine was asked to work, but it is closed: open another one.")

    def _pause(self) -> None:
        """Collect all dispatched steps and preempt every request."""
        try:
            while self._in_flight:
                self._collect(self._held)
        except BaseException as error:
            self._start_over(error)
            raise
        self.scheduler.preempt_all()
        self.scheduler.reset_prefix_cache()

    @in_turn
    def close(self) -> None:
        """Abort all requests and free the devices' memory."""
        for request_id in list(self._children):
            self.abort(request_id)
        while self._in_flight:
            self._in_flight.popleft().in_flight.read()
        if not self.asleep and not self.closed:
            self.runner.release()
            if self.speculation.proposer is not None:
                self.speculation.proposer.close()
        self._followed.close()
        self.guides.close()
        self.closed = True

    # -- bookkeeping --

    def _tell(self, output: SequenceOutput, deltas: list[OutputDelta]) -> None:
        """Add an output's delta. One that cannot be told ends its request."""
        try:
            delta = output.delta()
        except Exception as error:
            output.break_by(error)
            output.fail(output.broken)
            delta = OutputDelta(output.request_id, output.index, "", [], None, "error", error=output.broken)
        if delta is not None:
            deltas.append(delta)

    def _close(self, output: SequenceOutput) -> None:
        children = self._children.get(output.request_id)
        if children is not None:
            children.remove(output.request.id)
            if not children:
                del self._children[output.request_id]
        self._forget(output.request.id, output.request)

    def _forget(self, child: str, request: Request | None) -> None:
        self._outputs.pop(child, None)
        self._following.pop(child, None)
        self._followed.forget(child)
        self._special.discard(child)
        if request is not None:
            self.speculation.forget([request])


def _failure(error: BaseException) -> str:
    return f"the engine failed at this request or at one beside it ({type(error).__name__}): try again."


def _add_rules(
    rules: dict[tuple[int, int], RowRules], output: SequenceOutput, scheduled: ScheduledStep, index: int
) -> None:
    """Add the rules for the rows of request `index`."""
    draft = scheduled.drafts[index] if scheduled.drafts else []
    first = int(scheduled.starts[index] + scheduled.counts[index]) - len(draft) - len(output.request.prompt)
    own = output.rules
    masks: list[np.ndarray | None] = [None] * (len(draft) + 1)
    if own is not None:
        masks = own.masks(output.request.output, draft)
    if output.guide is not None:
        masks = [*output.guide.masks(draft, masks)]
    for place, allowed in enumerate(masks):
        bias = own.bias(first + place) if own is not None else None
        if bias is not None or allowed is not None:
            rules[index, place] = RowRules(bias, allowed)
