"""The body of a request for a batch, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ttpu_serve.server.batches.file_store import EXPIRY
from ttpu_serve.server.protocol import Body, at_most

MOST_METADATA = 16
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], at_most(MOST_METADATA)
]


class ExpiresAfter(Body):
    """When the files that a batch writes expire."""

    place: ClassVar[str] = "output_expires_after"

    anchor: Literal["created_at"]
    seconds: int = Field(ge=EXPIRY[0], le=EXPIRY[1])


class BatchRequest(Body):
    """The body of /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
