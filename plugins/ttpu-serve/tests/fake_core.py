"""An engine core without a model, for tests of what lies around one: it answers with what the prompt's last line asks
for, one byte at a time, and keeps the promises of the real one about stops, lengths and log-probabilities."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny

from ttpu_core.errors import RequestError
from ttpu_core.generation.detokenizer import TextStream
from ttpu_core.generation.sampling_params import GuidedDecoding, SamplingParams
from ttpu_serve.api.outputs import Logprob, OutputDelta
from ttpu_serve.execution.errors import QueueFullError
from ttpu_serve.execution.stats import EngineStats

EOS = 257


def tokenizer(folder: Path, template: str | None = tiny.CHAT_TEMPLATE) -> Any:
    """The byte tokenizer of tiny checkpoints."""
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tiny.write_tokenizer(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = template
    return loaded


@dataclass
class FakeOutput:
    """One answer that is still told."""

    id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    tokens: list[int]  # of the whole answer
    text: TextStream | None
    told: int = 0


class FakeGuides:
    """Takes every grammar, which the fake core does not follow."""

    def compile(self, guided: GuidedDecoding, seconds: float | None = None) -> None:
        """Compile nothing."""

    def is_compiled(self, guided: GuidedDecoding) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class FakeLimits:
    """How many sequences run at once, as the server is told; the fake core runs any number."""

    max_num_seqs: int = 8
    max_waiting: int | None = None


@dataclass(frozen=True)
class FakeScheduler:
    """Has the scheduler's settings, and schedules nothing."""

    config: FakeLimits = FakeLimits()


@dataclass
class FakeCore:
    """Answers `say: WORDS` in the prompt's last line with WORDS, and anything else with the prompt again and again.

    replies: prompt text that an answer is given for → the answer. seconds: each step takes. fail_at: the step that
    raises. max_running: answers under way, beyond which a request is refused."""

    tokenizer: Any
    model_name: str = "fake"
    max_model_len: int = 256
    adapters: dict[str, int] = field(default_factory=dict)
    replies: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    fail_at: int | None = None
    max_running: int = 1000
    max_logprobs: int = 20
    outputs: list[FakeOutput] = field(default_factory=list)
    seen: list[SamplingParams] = field(default_factory=list)
    pooled: list[tuple[str, list[int]]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    counts: EngineStats = field(default_factory=EngineStats)
    guides: FakeGuides = field(default_factory=FakeGuides)
    closed: bool = False
    embeds: bool = False
    scheduler: FakeScheduler = field(default_factory=FakeScheduler)

    @property
    def has_work(self) -> bool:
        return bool(self.outputs or self.pooled)

    def add(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        adapter: str | None = None,
        pooling: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        ids = self.token_ids(prompt)
        if any(output.id == request_id for output in self.outputs):
            raise RequestError(f"a request with the id {request_id!r} is being served: choose another id.")
        if self.counts.asleep:
            raise RequestError("the engine sleeps: wake it up.")
        if max(ids) > 258:
            raise RequestError(f"prompt has the token id {max(ids)}, but this model has 259: use its tokenizer.")
        if (params.logprobs or 0) > self.max_logprobs:
            raise RequestError(f"logprobs is {params.logprobs}, but this engine reports at most {self.max_logprobs}.")
        if len(self.outputs) + params.n > self.max_running:
            raise QueueFullError(f"{len(self.outputs)} requests wait, which is as many as may: try again later.")
        self.seen.append(params)
        self.counts = replace(
            self.counts, requests=self.counts.requests + 1, prompt_tokens=self.counts.prompt_tokens + len(ids)
        )
        if pooling is not None:
            self.pooled.append((request_id, ids))
            return
        for index in range(params.n):
            whole = [*self._reply(ids, params).encode(), EOS]
            if params.ignore_eos:
                whole = list(itertools.islice(itertools.cycle(whole[:-1] or [65]), self.max_model_len))
            whole = whole[: min(params.max_tokens or self.max_model_len, self.max_model_len - len(ids))]
            skip = params.skip_special_tokens
            text = TextStream(self.tokenizer, ids, params.stop, skip_special_tokens=skip) if params.detokenize else None
            self.outputs.append(FakeOutput(request_id, index, ids, params, whole, text))

    def token_ids(self, prompt: str | list[int]) -> list[int]:
        return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.outputs = [output for output in self.outputs if output.id != request_id]

    def take_back(self, request_id: str) -> None:
        prompt = next(output.prompt for output in self.outputs if output.id == request_id)
        self.counts = replace(
            self.counts, requests=self.counts.requests - 1, prompt_tokens=self.counts.prompt_tokens - len(prompt)
        )
        self.abort(request_id)

    def step(self) -> list[OutputDelta]:
        time.sleep(self.seconds)
        self.counts = replace(self.counts, steps=self.counts.steps + 1)
        if self.fail_at is not None and self.counts.steps >= self.fail_at:
            raise RuntimeError("the device is on fire")
        deltas = [self._pool(*self.pooled.pop(0))] if self.pooled else []
        for output in list(self.outputs):
            deltas.append(self._next(output))
            if deltas[-1].finish_reason:
                self.outputs.remove(output)
        self.counts = replace(self.counts, output_tokens=self.counts.output_tokens + len(deltas))
        return deltas

    def end_failed(self, error: Exception) -> None:
        """Nothing: every step fails."""

    def stats(self) -> EngineStats:
        return replace(self.counts, running=len(self.outputs))

    def sleep(self) -> None:
        self.counts = replace(self.counts, asleep=True)

    def wake_up(self) -> None:
        self.counts = replace(self.counts, asleep=False)

    def reset_prefix_cache(self) -> None:
        self.counts = replace(self.counts, prefix_queries=0)

    def prepare_adapter(self, name: str, path: str) -> Callable[[], None]:
        if not Path(path).is_dir():
            raise RequestError(f"the adapter {path!r} was to be loaded, but there is no such directory: correct it.")
        return lambda: self.adapters.update({name: len(self.adapters) + 1})

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    def close(self) -> None:
        self.closed = True

    def _reply(self, ids: list[int], params: SamplingParams) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        if params.guided is not None:
            return guided_reply(params.guided)
        for asked, reply in self.replies.items():
            if asked in text:
                return reply
        lines = [line for line in text.splitlines() if "say: " in line]
        return lines[-1].split("say: ", 1)[1] if lines else text

    def _next(self, output: FakeOutput) -> OutputDelta:
        token = output.tokens[output.told]
        output.told += 1
        reason = "stop" if token == EOS else "length" if output.told == len(output.tokens) else None
        text, stopped_by = "", None
        if output.text is not None:
            text = output.text.push(token) if token != EOS else ""
            stopped_by = output.text.stopped_by
            reason = "stop" if stopped_by is not None else reason
            text += output.text.finish() if reason and stopped_by is None else ""
        wanted = output.params
        return OutputDelta(
            output.id,
            output.index,
            text,
            [token],
            None if wanted.logprobs is None else [self._logprobs(token, wanted.logprobs)],
            reason,
            stopped_by,
            num_prompt_tokens=len(output.prompt),
            num_output_tokens=output.told,
            prompt_logprobs=self._of_prompt(output) if output.told == 1 and output.index == 0 else None,
        )

    def _of_prompt(self, output: FakeOutput) -> list[dict[int, Logprob] | None] | None:
        count = output.params.prompt_logprobs
        return None if count is None else [None, *(self._logprobs(token, count) for token in output.prompt[1:])]

    def _logprobs(self, token: int, count: int) -> dict[int, Logprob]:
        """The token's own, then of the tokens after it; the last of five is impossible."""
        values = [-0.5, -1.5, -2.5, -3.5, float("-inf")]
        ids = [token, *(other % 256 for other in range(token + 1, token + max(count, 1)))]
        return {one: Logprob(value, rank + 1) for rank, (one, value) in enumerate(zip(ids, values, strict=False))}

    def _pool(self, request_id: str, ids: list[int]) -> OutputDelta:
        vector = np.array([len(ids), sum(ids), 1.0], np.float32)
        vector /= np.linalg.norm(vector)
        return OutputDelta(request_id, 0, "", [], None, "stop", num_prompt_tokens=len(ids), embedding=vector)


def guided_reply(guided: GuidedDecoding) -> str:
    """The first text that matches: of a choice, or of a JSON schema as far as the tests need it."""
    if guided.choice:
        return guided.choice[0]
    schema = json.loads(guided.json) if isinstance(guided.json, str) else guided.json
    return json.dumps({} if schema is True or schema is None else _example(schema))


def _example(schema: Any) -> Any:
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0])
    if schema.get("type") == "array":
        return [_example(schema["items"])] * schema.get("minItems", 1)
    if schema.get("type") == "object":
        return {name: _example(value) for name, value in schema.get("properties", {}).items()}
    return {"string": "x", "integer": 1, "number": 1.5, "boolean": True}.get(schema.get("type"))
