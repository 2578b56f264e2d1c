"""What the survey finds: a row for each model type, kept as JSON, so that an interrupted walk goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ttpu_core.errors import RequestError

Way = Literal["native", "fallback", "torch_xla", "refused", "not tried"]
WAYS: tuple[Way, ...] = ("native", "fallback", "torch_xla", "refused", "not tried")

ALLOWED: Mapping[str, float] = {"native": 2e-5, "fallback": 5e-5, "torch_xla": 5e-5}
"""Of the largest difference of logits from torch's in float32."""


@dataclass(frozen=True)
class Row:
    """What the survey knows of one model type.

    Attributes:
        model_type: of the config.
        class_name: transformers' class.
        way: what runs it: a plugin ("native"), transformers' own code on JAX ("fallback") or on torch_xla, nothing
            ("refused"), or "not tried" where no tiny model could be made.
        reason: why it is refused or not tried, or what went wrong.
        error: the largest difference of logits from torch's, in their standard deviations where these exceed 1; None
            where nothing was computed.
        decodes: whether the tokens that are generated with a cache are the most likely ones for torch; None where
            nothing was generated.
        padded: whether prompts of different lengths were generated from together.
        compiles: whether the TPU compiler takes the prefill and the decoding of the tiny model; None if not tried.
        compile_reason: why it does not.
        seconds: how long it took.
    """

    model_type: str
    class_name: str
    way: Way
    reason: str = ""
    error: float | None = None
    decodes: bool | None = None
    padded: bool | None = None
    compiles: bool | None = None
    compile_reason: str = ""
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether its logits are torch's."""
        return self.error is not None and self.error <= ALLOWED[self.way]

    @property
    def wrong(self) -> bool:
        """Whether it runs, and computes something else than torch does."""
        return self.way in ALLOWED and (not self.equal or self.decodes is False)


@dataclass(frozen=True)
class Survey:
    """Rows by model type, and the versions that they were made with."""

    versions: Mapping[str, str]
    rows: Mapping[str, Row]

    def with_row(self, row: Row) -> Survey:
        """The survey with one more row, or with another one for its type."""
        return replace(self, rows={**self.rows, row.model_type: row})

    def to_json(self) -> str:
        """The survey as JSON, types in alphabetical order."""
        rows = {name: asdict(self.rows[name]) for name in sorted(self.rows)}
        return json.dumps({"versions": dict(self.versions), "rows": rows}, indent=1, allow_nan=False) + "\n"

    @staticmethod
    def read(file: Path, versions: Mapping[str, str]) -> Survey:
        """The survey of a file, which is empty if there is no file, or one of another transformers.

        Raises:
            RequestError: the file holds something else.
        """
        if not file.exists():
            return Survey(versions, {})
        try:
            content: Any = json.loads(file.read_text(encoding="utf-8"))
            rows = {name: Row(**row) for name, row in content["rows"].items()}
            before = content["versions"]["transformers"]
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(
                f"{file} was to be the survey's earlier results, but it holds something else ({error}): name another "
                "file, or remove it."
            ) from error
        return Survey(versions, rows if before == versions["transformers"] else {})
