"""Replaces `torch.linalg.solve_triangular` for XLA tensors by an operation that torch_xla implements."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ttpu_torch_xla.runtime import is_device


def solve_triangular(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return X of A X = B; A: [..., n, n], B: [..., n, k] (A: [..., k, k] where `left` is False and X A = B is solved).

    torch_xla hands `aten::linalg_solve_triangular` to the host, but lowers the older `aten::triangular_solve`.
    """

    def solve(
        A: torch.Tensor,  # torch's own names, which callers may pass
        B: torch.Tensor,
        *,
        upper: bool,
        left: bool = True,
        unitriangular: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not is_device(A) or out is not None:
            return original(A, B, upper=upper, left=left, unitriangular=unitriangular, out=out)
        if not left:  # (X A)ᵀ = Aᵀ Xᵀ
            solved: torch.Tensor = solve(A.mT, B.mT, upper=not upper, unitriangular=unitriangular)
            return solved.mT
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is the older one
            return torch.triangular_solve(B, A, upper=upper, unitriangular=unitriangular).solution

    return solve


solve_triangular.wraps_original = True  # type: ignore[attr-defined]
