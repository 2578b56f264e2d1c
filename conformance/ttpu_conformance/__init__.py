"""Conformance of TTPU family plugins. `parametrize_with_checks` is the door for pytest; the other one is the command
`ttpu conformance`. Importing this imports neither torch nor jax."""

from ttpu_conformance.pytest_door import parametrize_with_checks

__all__ = ["parametrize_with_checks"]
