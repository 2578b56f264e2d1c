"""A serving engine as a model of the lm-evaluation-harness:

    lm_eval.simple_evaluate(model=EngineLM(llm.engine, llm.get_tokenizer(), max_model_len=2048), tasks=["piqa"])
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from ttpu_core.errors import TTPUError, UnsupportedError
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_core.services import RolloutEngine
from ttpu_quantize.lm_eval_base import Request, TokenizedLM

SAMPLED = ("temperature", "top_p", "top_k", "min_p")
"""What tasks may ask for of the choice of tokens, where they sample."""
BEYOND = 2
"""Tokens of an engine's sequences beyond a request's `max_length`: the last one that is scored, and the one that an
engine adds."""


class EngineLM(TokenizedLM):
    """A model that an engine serves.

    Args:
        engine: a `ttpu_core.services.RolloutEngine` with prompt_logprobs, such as `LLM.engine`.
        tokenizer: of its model.
        max_model_len: tokens of the engine's sequences.
        max_gen_toks: most new tokens where a task does not say.
        quiet: show no progress.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        max_model_len: int,
        max_gen_toks: int = 256,
        *,
        quiet: bool = False,
    ) -> None:
        super().__init__(tokenizer, "ttpu-engine", max_model_len - BEYOND, max_gen_toks)
        self._engine, self._quiet = engine, quiet

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop sequences, the end of text, or its most new tokens.

        Raises:
            UnsupportedError: options that an engine does not have.
        """
        asked: dict[str, tuple[list[int], SamplingParams]] = {}
        stops: list[list[str]] = []
        for number, request in enumerate(requests):
            context, given = request.args
            until, params = self._sampling(given)
            assert params.max_tokens is not None
            asked[str(number)] = self.tok_encode(context)[-(self.max_length - params.max_tokens) :], params
            stops.append(until)
        texts: dict[str, str] = defaultdict(str)

        def take(delta: Any) -> None:
            texts[delta.request_id] += delta.text

        self._run(asked, take, "generate_until", disable_tqdm)
        answers = [
            postprocess_generated_text(texts[name], until, None) for name, until in zip(asked, stops, strict=True)
        ]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _sampling(self, given: Mapping[str, Any]) -> tuple[list[str], SamplingParams]:
        """The stop sequences of a request, and how its tokens are chosen: the likeliest, unless it says otherwise."""
        asked: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), self.max_gen_toks))
        until, most = [stop for stop in asked.pop("until") if stop], min(asked.pop("max_gen_toks"), self.max_length - 1)
        draws = asked.pop("do_sample")
        if asked.get("num_beams") == 1:
            del asked["num_beams"]
        chosen = {name: asked.pop(name) for name in SAMPLED if name in asked}
        if asked:
            raise UnsupportedError(
                f"a task generates with {', '.join(asked)}, but an engine samples by {', '.join(SAMPLED)}: take it out "
                "of the task's generation_kwargs."
            )
        chosen = {"temperature": 1.0, **chosen, "seed": 0} if draws else {"temperature": 0.0}
        return until, SamplingParams(max_tokens=most, stop=tuple(until), **chosen)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether each of its tokens is the likeliest."""
        asked: dict[str, tuple[list[int], SamplingParams]] = {}
        scored: list[int] = []
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        for number, (_key, context, continuation) in enumerate(requests):
            tokens = (context + continuation)[-(self.max_length + 1) :]
            asked[str(number)] = tokens, params
            scored.append(min(len(continuation), len(tokens) - 1))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)

        def take(delta: Any) -> None:
            if delta.prompt_logprobs is None:
                return
            number = int(delta.request_id)
            tokens, count = asked[delta.request_id][0], scored[number]
            found = [own[token] for own, token in zip(delta.prompt_logprobs[-count:], tokens[-count:], strict=True)]
            results[number] = sum(one.logprob for one in found), all(one.rank == 1 for one in found)

        self._run(asked, take, "loglikelihood", disable_tqdm)
        for (key, _context, _continuation), result in zip(requests, results, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def _run(
        self,
        asked: Mapping[str, tuple[list[int], SamplingParams]],
        take: Callable[[Any], None],
        kind: str,
        disable_tqdm: bool,
    ) -> None:
        """Serve requests by name, and give what the engine adds to each to `take`.

        Raises:
            TTPUError: a request failed in the engine.
        """
        left = set(asked)
        hidden = True if self._quiet or disable_tqdm else None  # None shows it on terminals alone
        with tqdm(total=len(asked), disable=hidden, desc=f"Running {kind} requests") as bar:
            try:
                for name, (tokens, params) in asked.items():
                    self._engine.add(name, tokens, params)
                while left:
                    for delta in self._engine.step():
                        if delta.error is not None:
                            raise TTPUError(delta.error)
                        take(delta)
                        if delta.finish_reason is not None:
                            left.discard(delta.request_id)
                            bar.update()
            except BaseException:
                for name in left:
                    self._engine.abort(name)
                raise
