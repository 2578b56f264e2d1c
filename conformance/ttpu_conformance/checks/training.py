"""Checks of gradients against torch, by checkpoint tensor."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.checks.checkpoints import saved_tensors
from ttpu_conformance.errors import fail
from ttpu_conformance.measure import FLOAT32, Measured

GRADIENT = 1e-4
"""Of each tensor's largest gradient: a backward pass adds its roundings to the forward pass's, and sums over all
tokens. What is found is near 2e-6, and 5e-5 for gemma4 and Gated DeltaNet."""

SMALL = 1e-2
"""A tensor whose gradient is below this share of the largest one is held to that scale instead of its own: what is left
of sums that cancel has the rounding of their terms."""


@check("numerics", scope="heavy")
def check_gradients(case: Case) -> Measured:
    """The loss and its gradient for every checkpoint tensor are those of torch."""
    ids = case.reference.token_ids
    loss, theirs = _torch_gradients(case, ids)
    our_loss, ours = case.model.loss_and_gradients(ids)
    if abs(our_loss - loss) > FLOAT32 * loss:
        fail(f"the loss is {our_loss:.6f}, but torch computes {loss:.6f}: see float32_logits, which says what differs.")
    names = case.architecture.mapping.resolve({name: g.shape for name, g in theirs.items()}, "the gradients of torch")
    largest = max(float(np.abs(g).max()) for g in theirs.values() if not np.isnan(g).any())
    worst = 0.0
    for name, actual in names.items():
        wanted = theirs[actual]
        if np.isnan(wanted).all():
            continue  # a buffer, which torch does not train
        scale = max(float(np.abs(wanted).max()), SMALL * largest)
        error = float(np.abs(ours[name] - wanted).max()) / scale
        if not error <= GRADIENT:
            fail(
                f"the gradient of {actual!r} differs from torch's by {error:.1e} of its scale, where {GRADIENT:.0e} is "
                "allowed, though the loss agrees: look for something that stops or rounds a gradient on its way there.",
                error=error,
                tolerance=GRADIENT,
            )
        worst = max(worst, error)
    return Measured(worst, GRADIENT)


def _torch_gradients(case: Case, ids: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """The mean next-token cross entropy, and its gradients under the names that tensors have on disk.

    transformers holds some weights under other names and shapes than it saves them, so the gradients take the weights'
    places and are saved; buffers become NaN, to be told apart."""
    import torch

    model: Any = case.reference.model
    model.zero_grad(set_to_none=True)
    tokens = torch.tensor(ids)
    logits = model(input_ids=tokens).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in holder.named_parameters():
            gradient = gradients[name]
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
        saved = holder.state_dict().keys()
        for name, buffer in holder.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.fill_(float("nan"))
    with tempfile.TemporaryDirectory(prefix="ttpu-conformance-") as folder:
        holder.save_pretrained(folder)
        tensors = {name: tensor.numpy() for name, tensor in saved_tensors(Path(folder)).items()}
    return float(loss.detach()), tensors
