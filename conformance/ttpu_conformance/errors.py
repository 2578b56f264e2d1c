"""The exceptions of checks: a failure with its measurements, and the reasons why a check does not apply or cannot run.
"""

from __future__ import annotations

from typing import Any

from ttpu_core.errors import TTPUError


class DeclarationError(TTPUError):
    """A plugin's conformance.toml holds something that the kit does not know."""


class CheckFailure(AssertionError):
    """A promise that does not hold. The message says what is wrong and which hook to correct.

    Attributes:
        error: what was measured, if anything was.
        tolerance: the most that `error` may be.
    """

    def __init__(self, message: str, *, error: float | None = None, tolerance: float | None = None) -> None:
        super().__init__(message)
        self.error, self.tolerance = error, tolerance


class NotApplicable(Exception):
    """The check does not apply to this case; the message says why. It counts neither for nor against the plugin."""


class NotProven(Exception):
    """The check could not run here (no such device, no such library); the promise is neither kept nor broken."""


class NoReference(NotProven):
    """A library that makes the reference model is not installed."""


def fail(sentence: str, *, error: float | None = None, tolerance: float | None = None) -> Any:
    """Fail a check.

    Raises:
        CheckFailure: always.
    """
    raise CheckFailure(sentence, error=error, tolerance=tolerance)
