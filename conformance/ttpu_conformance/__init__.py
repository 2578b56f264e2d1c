"""Conformance checks for TTPU family plugins. They run under pytest by `parametrize_with_checks`, or by the command
`ttpu conformance`. Importing this package imports neither torch nor jax."""

from ttpu_conformance.pytest_door import parametrize_with_checks

__all__ = ["parametrize_with_checks"]
