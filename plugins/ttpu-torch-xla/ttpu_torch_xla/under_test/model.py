"""A prepared stock model under the conformance kit. It uses the public interface only: the model's call, `generate`,
`loss.backward()` and `save_pretrained`."""

from __future__ import annotations

import gc
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_map_only
from transformers import LogitsProcessor

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.errors import UnsupportedError
from ttpu_torch_xla.backend import TorchXlaBackend
from ttpu_torch_xla.load import stock_model
from ttpu_torch_xla.load_options import TorchXlaLoadOptions
from ttpu_torch_xla.patches.patch import active
from ttpu_torch_xla.runtime import Counters
from ttpu_torch_xla.sharding.apply import parameter_partition_specs


class TorchModel:
    """A loaded model.

    Attributes:
        model: what a user gets from `AutoModelForTPU.from_pretrained`.
        recorded: operations are recorded one by one; see `ttpu_conformance.model_under_test.RecordsPrograms`.
        runs_reference_code: it runs transformers' code; see `ttpu_conformance.model_under_test.RunsReferenceCode`.
    """

    recorded = True
    runs_reference_code: Literal[True] = True

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        *,
        dtype: str = "float32",
        mesh: str | None = None,
        attn_implementation: str = "auto",
        scan_layers: bool = False,
    ) -> None:
        """Load it.

        Args:
            architecture: what the plugin says of the checkpoint's config.
            checkpoint: as transformers saved it.
            dtype: of weights and activations.
            mesh: such as "fsdp=2,tensor=4"; None for one device.
            attn_implementation: as `from_pretrained` takes it.
            scan_layers: as `from_pretrained` takes it.
        """
        if active():
            gc.collect()  # models that are gone may hold patches; it takes seconds in a process that holds much
        self.architecture, self.checkpoint = architecture, checkpoint
        options = TorchXlaLoadOptions(
            dtype=dtype, mesh=mesh, attn_implementation=attn_implementation, scan_layers=scan_layers
        )
        self.model = TorchXlaBackend().open(architecture, checkpoint, options)
        self.runtime = self.model.ttpu.runtime

    def logits(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """float32 [batch, seq, vocab] of token `ids` [batch, seq]; with a `mask` [batch, seq] positions count what is
        no padding, as `generate` has them."""
        given: dict[str, torch.Tensor] = {"input_ids": torch.tensor(ids)}
        if mask is not None:
            held = torch.tensor(mask)
            given |= {"attention_mask": held, "position_ids": (held.cumsum(-1) - 1).clamp(min=0)}
        with torch.no_grad():
            return self._fetched(self.model(**self._there(given), use_cache=False).logits)

    def logits_in_parts(self, ids: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """float32 [batch, seq, vocab] when the token `ids` [batch, seq] come in parts: single tokens after a prompt by
        the two programs of `generate`, other parts with transformers' own cache, which grows.

        Raises:
            UnsupportedError: a rope depends on the sequence's length, which transformers takes from the tokens so far.
        """
        ropes = [layer.mixer.rope for layer in self.architecture.spec.layers]
        if any(rope is not None and rope.depends_on_length for rope in ropes):
            raise UnsupportedError(
                "a prompt was to be read in parts, but transformers turns each part by the length that the sequence "
                "has then, so that its logits are not those of the whole: read it whole."
            )
        if len(lengths) > 1 and set(lengths[1:]) == {1}:
            return self._logits_of_forced_tokens(ids, lengths[0])
        tokens, parts, cache, begin = torch.tensor(ids), [], None, 0
        for length in lengths:
            with torch.no_grad():
                part = self._there({"input_ids": tokens[:, begin : begin + length]})
                output = self.model(**part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(self._fetched(output.logits))
            begin += length
        return np.concatenate(parts, axis=1)

    def _logits_of_forced_tokens(self, ids: np.ndarray, prompt: int) -> np.ndarray:
        """The logits with which `generate` would choose each token after a prompt, where these tokens are chosen."""
        first = self.logits(ids[:, :prompt])[:, : prompt - 1]
        output = self.model.generate(
            torch.tensor(ids[:, :prompt]),
            attention_mask=torch.ones(len(ids), prompt, dtype=torch.long),
            logits_processor=[_Forced(torch.tensor(ids))],
            max_new_tokens=ids.shape[1] - prompt + 1,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        steps = [step.float().numpy()[:, None] for step in output.logits]
        return np.concatenate([first, *steps], axis=1)

    def stacked_logits(self, ids: np.ndarray) -> np.ndarray:
        """float32 [batch, seq, vocab] of token `ids` [batch, seq], with the layers in one loop, as in a training step.

        Raises:
            UnsupportedError: the layers differ.
        """
        looped = TorchModel(
            self.architecture, self.checkpoint, attn_implementation=self.model.ttpu.attention, scan_layers=True
        )
        return looped._fetched(looped.model(**looped._there({"input_ids": torch.tensor(ids)}), use_cache=False).logits)

    def greedy_tokens(self, ids: np.ndarray, mask: np.ndarray, new_tokens: int) -> np.ndarray:
        """int64 [batch, new_tokens] after left-padded prompts, `ids` [batch, seq] with a `mask` [batch, seq]."""
        whole = self.model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return np.asarray(whole[:, ids.shape[1] :].numpy())

    def loss_and_gradients(self, ids: np.ndarray) -> tuple[float, Mapping[str, np.ndarray]]:
        """The mean next-token cross entropy of token `ids` [batch, seq], and its gradients by checkpoint tensor."""
        given = self._there({"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)})
        self.model.zero_grad(set_to_none=True)
        loss = self.model(**given, use_cache=False).loss
        loss.backward()
        self.runtime.sync(wait=True)
        gradients = {name: one.grad.cpu() for name, one in self.model.named_parameters() if one.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach().cpu()), self._by_checkpoint_name(gradients)

    def _by_checkpoint_name(self, values: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """Values of the parameters under the names and in the shapes that tensors have in the checkpoint: transformers
        writes some otherwise than it holds them."""
        holder = stock_model(self.checkpoint, "float32", "eager", quiet=True)
        with torch.no_grad():
            for name, parameter in holder.named_parameters():
                parameter.copy_(values[name]) if name in values else parameter.zero_()
        with tempfile.TemporaryDirectory() as folder:
            holder.save_pretrained(folder)
            files = [load_file(file) for file in Path(folder).glob("*.safetensors")]
        tensors = {name: one for file in files for name, one in file.items()}
        names = self.architecture.mapping.resolve({name: tuple(one.shape) for name, one in tensors.items()})
        return {canonical: tensors[actual].numpy() for canonical, actual in names.items()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint by `save_pretrained`."""
        self.model.save_pretrained(folder)

    def programs_of(self, run: Callable[[], Any]) -> Counters:
        """Count the programs that calling `run` compiles and the operations that it leaves to the host."""
        self.runtime.sync(wait=True)
        self.runtime.reset_counters()
        run()
        return self.runtime.counters()

    def replicated_share(self) -> float:
        """Return the share of the parameters' elements that are replicated on every device."""
        sizes = {name: one.numel() for name, one in self.model.named_parameters()}
        return sum(size for name, size in sizes.items() if not self._axes_of(name)) / sum(sizes.values())

    def sharded_share(self, axis: str, within: str = "") -> tuple[float | None, Mapping[str, float]]:
        """Return how much of the matrices whose names contain `within` is sharded along a mesh axis, and the names of
        those that are not."""
        kernels = {n: one.numel() for n, one in self.model.named_parameters() if one.ndim > 1 and within in n}
        if not kernels:
            return None, {}
        whole: dict[str, float] = defaultdict(float)
        for name, size in kernels.items():
            if axis not in self._axes_of(name):
                whole[re.sub(r"\.\d+\.", ".*.", name)] += size / sum(kernels.values())
        return 1 - sum(whole.values()), dict(sorted(whole.items(), key=lambda one: -one[1]))

    def _axes_of(self, name: str) -> set[str]:
        """The mesh axes along which a parameter lies on the devices in parts."""
        parameter = self.model.get_parameter(name)
        if "devices=" not in self.runtime.sharding_of(parameter):
            return set()
        partition_specs = parameter_partition_specs(self.model, self.architecture, self.model.ttpu.parallelism)
        return {axis for by in partition_specs.get(name, ()) for axis in by}

    def _there(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return tree_map_only(torch.Tensor, lambda one: one.to(self.model.device), dict(values))

    def _fetched(self, tensor: torch.Tensor) -> np.ndarray:
        self.runtime.sync()
        return tensor.detach().float().cpu().numpy()


class _Forced(LogitsProcessor):
    """Leaves no token but the one that `ids` [batch, seq] has next."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = min(input_ids.shape[1], self.ids.shape[1] - 1)
        following = self.ids[:, at : at + 1].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, following, 0.0)
