"""TTPU as a model of EleutherAI's lm-evaluation-harness, under the name `ttpu`:

    python -m ttpu_quantize.lm_eval run --model ttpu --model_args pretrained=./llama,quantization=w8a16 --tasks piqa

The harness finds models in a table of its own and not by entry points, so its own `lm_eval` command does not know the
name; this module adds it and then is that command. In Python, import this module before `simple_evaluate`.

Requests are tokenized, cut and scored as by the harness's own model `hf`, so that figures of both can be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval import models  # noqa: F401  fills the harness's table, which is not filled once it holds a model
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from ttpu_core.backend import Scores
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.loading import LoadOptions, open_model
from ttpu_core.registry import default_registry
from ttpu_quantize.lm_eval_base import Request, TokenizedLM

SMALLEST = 32
"""Tokens to which short requests are padded; others are padded to a power of two, so that few programs compile."""


@register_model("ttpu")
class TTPULM(TokenizedLM):
    """A checkpoint that a TTPU backend runs.

    Args:
        pretrained: a checkpoint's directory or Hub id.
        dtype: "auto", float32, bfloat16 or float16.
        quantization: how weights are quantized while they are loaded, as in "w4a16-g128".
        parallelism_strategy: how the model is sharded over devices.
        backend: the name of an installed backend.
        batch_size: number of requests that run together.
        max_length: most tokens of a request; None for the model's context.
        max_gen_toks: most new tokens where a task does not say.
        max_batch_size: not used; the harness passes it.
        device: must be None, because backends choose their devices.

    Raises:
        RequestError: a device, or a batch size that is not a number; or the checkpoint has no tokenizer.
        UnsupportedError: the backend gives no logits of texts.
    """

    def __init__(
        self,
        pretrained: str,
        dtype: str = "auto",
        quantization: str | None = None,
        parallelism_strategy: str | None = None,
        backend: str | None = None,
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        if device is not None:
            raise RequestError(
                f"device={device!r} was given, but a backend chooses its devices: leave it out, and set JAX_PLATFORMS "
                "or parallelism_strategy."
            )
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise RequestError(
                f"batch_size={batch_size!r} was given, but a number from 1 on is needed: pass 8, for one."
            )
        runs = default_registry().backend(backend)
        if not isinstance(runs, Scores):
            raise UnsupportedError(
                f"tasks were to be run, but the backend {runs.name!r} gives no logits of texts: use another backend."
            )
        options = LoadOptions(dtype=dtype, quantization=quantization, parallelism_strategy=parallelism_strategy)
        model: Any = open_model(pretrained, options, backend=backend)
        if model.tokenizer is None:
            raise RequestError(
                f"tasks were to be run with {pretrained}, but it has no tokenizer files: copy tokenizer.json into it."
            )
        name, longest = str(Path(pretrained)).replace("/", "__"), min(max_length or model.context, model.context)
        super().__init__(model.tokenizer, name, longest, max_gen_toks)
        self.runs, self.model, self.batch_size = runs, model, int(batch_size)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop sequences, the end of text, or its most new tokens."""
        answers = [""] * len(requests)
        alike: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            alike[repr(request.args[1])].append(number)
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests")
        for numbers in alike.values():
            asked = dict(normalize_gen_kwargs(requests[numbers[0]].args[1], self.max_gen_toks))
            until, most = asked.pop("until"), min(int(asked.pop("max_gen_toks")), self.max_length - 1)
            asked = {name: value for name, value in asked.items() if asked.get("do_sample") or name != "temperature"}
            room = self.max_length - most
            prompts = {number: self.tok_encode(requests[number].args[0])[-room:] for number in numbers}
            for together in _chunks(sorted(numbers, key=lambda number: -len(prompts[number])), self.batch_size):
                output = self.model.generate(
                    [prompts[number] for number in together],
                    max_new_tokens=most,
                    stop_strings=[stop for stop in until if stop] or None,
                    return_dict_in_generate=True,
                    **asked,
                )
                for number, done in zip(together, output.completions, strict=True):
                    answers[number] = postprocess_generated_text(done.text, until, None)
                    self.cache_hook.add_partial("generate_until", requests[number].args, answers[number])
                bar.update(len(together))
        bar.close()
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether each of its tokens is the likeliest."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number][1]) - len(requests[number][2]))
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests")
        for together in _chunks(order, self.batch_size):
            rows = [(requests[number][1] + requests[number][2])[-(self.max_length + 1) :] for number in together]
            size = min(self.max_length, max(SMALLEST, 1 << (max(map(len, rows)) - 2).bit_length()))
            tokens, targets = np.zeros((2, self.batch_size, size), np.int32)
            lengths = np.ones(self.batch_size, np.int32)
            for row, ids in enumerate(rows):
                lengths[row] = len(ids) - 1
                tokens[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
            scores = self.runs.token_scores(self.runs.text_logits(self.model, tokens, lengths), targets)
            for row, number in enumerate(together):
                key, _context, continuation = requests[number]
                own = slice(max(0, int(lengths[row]) - len(continuation)), int(lengths[row]))
                loss, best = scores.loss[row, own], scores.is_best[row, own]
                results[number] = -float(loss.sum(dtype=np.float64)), bool(best.all())
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, results[number])
            bar.update(len(together))
        bar.close()
        return results


def _chunks(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(numbers), size):
        yield numbers[start : start + size]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
