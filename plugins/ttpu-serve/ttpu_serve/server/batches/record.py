"""What is known of a batch, in OpenAI's form and as a file keeps it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ttpu_serve.server.batches.file_store import new_file_id

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass
class Usage:
    """Tokens of all answers of a batch."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def add(self, usage: Mapping[str, Any] | None) -> None:
        """Add the `usage` of an answer, of any endpoint."""
        if usage is None:
            return
        self.input += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.output += usage.get("completion_tokens", usage.get("output_tokens", 0))
        of_prompt = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        of_output = usage.get("output_tokens_details") or {}
        self.cached += of_prompt.get("cached_tokens", 0)
        self.reasoning += of_output.get("reasoning_tokens", 0)

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's `usage` of a batch."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


@dataclass
class Batch:
    """A batch. Times are Unix timestamps in seconds.

    owner: the client. output_seconds: after which the files that it writes expire; None is never. order: when it was
    made, in nanoseconds. times: when it came into a status. output_id, error_id: ids of the files that it writes, of
    which those in `written` exist. problems: why it failed. total, succeeded, failed: lines, and those of them with
    such an answer.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    output_seconds: int | None
    created_at: int
    expires_at: int
    order: int = field(default_factory=time.time_ns)
    status: Status = "validating"
    times: dict[str, int] = field(default_factory=dict)
    output_id: str = field(default_factory=new_file_id)
    error_id: str = field(default_factory=new_file_id)
    written: list[str] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    succeeded: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)

    def enter(self, status: Status) -> None:
        """Enter a status."""
        self.status = status
        self.times[status] = int(time.time())

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.problems} if self.problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_id if self.output_id in self.written else None,
            "error_file_id": self.error_id if self.error_id in self.written else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in _TIMES},
            "request_counts": {"total": self.total, "completed": self.succeeded, "failed": self.failed},
            "usage": self.usage.as_json(),
            "metadata": self.metadata,
        }

    def kept(self) -> dict[str, Any]:
        """Return what a file keeps of it."""
        return asdict(self)

    @classmethod
    def read(cls, kept: dict[str, Any]) -> Batch:
        """Return the batch of `kept`.

        Raises:
            TypeError: it is none.
        """
        return cls(**{**kept, "usage": Usage(**kept["usage"])})
