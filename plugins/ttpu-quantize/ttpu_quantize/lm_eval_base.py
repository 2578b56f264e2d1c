"""What TTPU's models in the lm-evaluation-harness share: how texts become tokens and windows, as by the harness's own
model `hf`, so that figures of both can be compared."""

from __future__ import annotations

from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

Request = tuple[Any, list[int], list[int]]


class TokenizedLM(TemplateLM):
    """A model with a tokenizer of transformers.

    Args:
        tokenizer: the checkpoint's.
        name: for the harness's cache of requests.
        max_length: most tokens of a request.
        max_gen_toks: most new tokens where a task does not say.
    """

    def __init__(self, tokenizer: Any, name: str, max_length: int, max_gen_toks: int) -> None:
        super().__init__()
        self.tokenizer, self._name = tokenizer, name
        self.max_length, self.max_gen_toks = max_length, max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's cache of requests."""
        return self._name

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as the text of a prompt."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, with special tokens as the tokenizer adds them, unless the text begins with one."""
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return [int(token) for token in self.tokenizer.encode(string, **special)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows of `max_length` tokens that overlap by one."""
        windows: list[Request] = []
        owner: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            cut = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            for context, continuation in map(make_disjoint_window, cut):
                windows.append((None, context, continuation))
                owner.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owner, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[number] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals
