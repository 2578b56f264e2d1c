"""The cache: however a sequence is cut into parts, the logits are those of the whole."""

from __future__ import annotations

from ttpu_conformance.case import Case
from ttpu_conformance.check import Measured, check, fail
from ttpu_conformance.measure import FLOAT32, hold, relative_error
from ttpu_conformance.tiny import SEQUENCE

CHUNK = 8
COMPILED = "/jax/core/compile/backend_compile_duration"
"""What JAX reports when it has compiled a program."""


@check("numerics", quick="base")
def check_cached_decode(case: Case) -> Measured:
    """A prefill followed by single tokens gives the logits of the whole sequence."""
    begin = CHUNK
    return _in_parts(case, [begin] + [1] * (SEQUENCE - begin), "token by token")


@check("numerics")
def check_chunked_prefill(case: Case) -> Measured:
    """A prefill in chunks gives the logits of the whole sequence."""
    return _in_parts(case, [CHUNK] * (SEQUENCE // CHUNK), "in chunks")


def _in_parts(case: Case, lengths: list[int], how: str) -> Measured:
    ours = case.model.logits_in_parts(case.reference.token_ids, lengths, fresh=True)
    return hold(relative_error(ours, case.logits), FLOAT32, f"{how} the logits differ from those of the whole sequence")


@check("numerics", quick="base")
def check_decode_compiles_once(case: Case) -> None:
    """Once a shape was generated with, generating with it again compiles nothing, whatever the tokens are."""
    import jax

    compiled: list[str] = []

    def listen(name: str, seconds: float, **about: object) -> None:
        if name == COMPILED:
            compiled.append(name)

    ids = case.reference.token_ids[:2, :5]
    case.model.model.generate(ids, max_new_tokens=6)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        case.model.model.generate(ids[::-1] // 2, max_new_tokens=6)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    if compiled:
        fail(
            f"generating again with the same shapes compiled {len(compiled)} programs: something in the model depends "
            "on the values of tokens, or makes a new function at each call (a mixer's implementation?)."
        )
