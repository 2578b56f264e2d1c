"""A loaded model under the conformance kit: logits by every way of running the shared decoder, and gradients by
checkpoint tensor name."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.mapping import pad_mapping
from ttpu_core.spec import ArchitectureSpec, HeadSpec
from ttpu_core.spec.parameters import stacked_paths
from ttpu_jax.aot.steps import inference_step
from ttpu_jax.backend import JaxBackend
from ttpu_jax.causal_lm import JaxCausalLM
from ttpu_jax.load_options import JaxLoadOptions
from ttpu_jax.model.cache import BothCaches, LayerCache
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.params.export import export_tensors
from ttpu_jax.params.padding import project_gradients

COMPILED = "/jax/core/compile/backend_compile_duration"
"""What JAX reports when it has compiled a program."""

_tracing, _traces = jax.make_user_context(default_value=0), itertools.count(1)
"""JAX keeps what it traced by the value of this context: under a new one it traces a program, and its layers, anew."""


@dataclass(frozen=True)
class ProgramCount:
    """The number of compiled programs. JAX leaves no operation to the host."""

    compiles: int
    fallbacks: Mapping[str, int] = field(default_factory=dict)


class JaxModel:
    """A loaded model.

    Attributes:
        model: what a user gets from `AutoModelForTPU.from_pretrained`.
    """

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        *,
        dtype: str = "float32",
        mesh: str | None = None,
        attn_implementation: str = "auto",
    ) -> None:
        """Load it.

        Args:
            architecture: what the plugin says of the checkpoint's config.
            checkpoint: as transformers saved it.
            dtype: of weights and activations.
            mesh: such as "fsdp=2,tensor=4"; None for one device.
            attn_implementation: as `from_pretrained` takes it.
        """
        self.architecture = architecture
        self.model: JaxCausalLM = JaxBackend().open(
            architecture,
            checkpoint,
            JaxLoadOptions(dtype=dtype, mesh=mesh, attn_implementation=attn_implementation),
        )

    @property
    def spec(self) -> ArchitectureSpec:
        """The architecture."""
        return self.architecture.spec

    def logits(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """float32 [batch, seq, vocab] of whole sequences `ids` [batch, seq], by calling the model as a user does;
        `mask` [batch, seq] is 0 at padding."""
        return np.asarray(self.model(ids, attention_mask=mask).logits, np.float32)

    def logits_in_parts(self, ids: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """float32 [batch, seq, vocab] when the token `ids` [batch, seq] come in parts of these lengths, each written
        into the cache after the one before; the first one finds it empty, as a prefill does."""
        slots = -(-ids.shape[1] // 8) * 8 + 8  # a few more than are used
        state = self.model.programs.start(np.zeros(len(ids), np.int32), ids.shape[1], slots)
        cache, parts, begin = state.cache, [], 0
        for length in lengths:
            part, cache = self._step(
                self.model.params, ids[:, begin : begin + length].astype(np.int32), cache, begin == 0
            )
            parts.append(np.asarray(part, np.float32)[..., : self.spec.vocab_size])
            begin += length
        return np.concatenate(parts, axis=1)

    def stacked_logits(self, ids: np.ndarray) -> np.ndarray:
        """float32 [batch, seq, vocab] of token `ids` [batch, seq], with equal layers stacked and scanned over, instead
        of unrolled."""
        spec = self.model.programs.spec
        params = stack(spec, self.model.params)
        model = causal_model(spec, self.model.programs.runtime, stacked=True)
        run = jax.jit(lambda params, ids, positions: model.forward(params, ids, positions)[0])
        logits = np.asarray(run(params, ids.astype(np.int32), _positions(ids)), np.float32)
        return logits[..., : self.spec.vocab_size]

    def loss_and_gradients(self, ids: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """Mean next-token cross entropy of token `ids` [batch, seq], and its gradient for each checkpoint tensor by
        name."""

        def loss(params: dict[str, jax.Array], ids: jax.Array, positions: jax.Array) -> jax.Array:
            logits = self.model.programs.model.forward(params, ids, positions)[0]
            logged = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.take_along_axis(logged, ids[:, 1:, None], axis=-1).mean()

        value, gradients = jax.jit(jax.value_and_grad(loss))(self.model.params, ids.astype(np.int32), _positions(ids))
        gradients = project_gradients(gradients, self.model.programs.spec, self.model.paddings)
        mapping = pad_mapping(self.architecture.mapping, self.model.paddings)
        return float(value), export_tensors(mapping, gradients)

    def greedy_tokens(self, ids: np.ndarray, mask: np.ndarray, new_tokens: int) -> np.ndarray:
        """int [batch, new_tokens] after left-padded prompts, `ids` [batch, seq] with a `mask` [batch, seq]."""
        whole = self.model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, ignore_eos=True)
        return np.asarray(whole)[:, ids.shape[1] :]

    def save(self, folder: Path) -> None:
        """Write a checkpoint by `save_pretrained`."""
        self.model.save_pretrained(folder)

    def for_engine(self) -> JaxCausalLM:
        """The model itself."""
        return self.model

    def programs_of(self, run: Callable[[], Any]) -> ProgramCount:
        """Count the programs that calling `run` compiles, as JAX reports them."""
        compiled: list[str] = []

        def listen(event: str, duration_secs: float, **about: str | int) -> None:
            if event == COMPILED:
                compiled.append(event)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            run()
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        return ProgramCount(len(compiled))

    def replicated_share(self) -> float:
        """Return the share of the parameters' elements that are replicated on every device."""
        arrays = self.model.params.values()
        return sum(a.size for a in arrays if a.sharding.is_fully_replicated) / sum(a.size for a in arrays)

    def sharded_share(self, axis: str, within: str = "") -> tuple[float | None, dict[str, float]]:
        """Return how much of the kernels whose paths contain `within` is sharded along a mesh axis.

        Returns:
            The share of their elements that is, None where there are no such kernels; and the shares of those that are
            not, by path without its layer's number, the largest first."""
        kernels = {p: a for p, a in self.model.params.items() if a.ndim > 1 and within in p}
        if not kernels:
            return None, {}
        elements = sum(array.size for array in kernels.values())
        whole: dict[str, float] = defaultdict(float)
        for path, array in kernels.items():
            if axis not in jax.tree.leaves(tuple(array.sharding.spec)):
                whole[re.sub(r"\.\d+\.", ".*.", path)] += array.size / elements
        return 1 - sum(whole.values()), dict(sorted(whole.items(), key=lambda one: -one[1]))

    def residual_stream(self, ids: np.ndarray, layers: int, *, several: bool = False) -> np.ndarray:
        """The residual stream [batch, seq, hidden] of token `ids` [batch, seq] after so many layers; after all of them,
        with the final norm. Where a model has `several`, all of them [batch, seq, streams, hidden], without that norm.

        The model is truncated there, so that no module needs to be opened."""
        spec, runtime = self.spec, self.model.programs.runtime
        truncated = replace(
            spec,
            layers=spec.layers[:layers],
            head=HeadSpec(tied=True),
            final_norm=spec.final_norm if layers == spec.num_layers and not several else None,
            parameter_axes=(),
        )
        model = causal_model(truncated, runtime)
        params = {path: array for path, array in self.model.params.items() if path in model.parameters}

        def run(params: Any, ids: jax.Array, positions: jax.Array) -> jax.Array:
            decoder = model.module(params)
            if several:
                decoder.embed.collapse = lambda x: x  # type: ignore[method-assign]
            return decoder.hidden(ids, positions)[0]

        return np.asarray(jax.jit(run)(params, ids.astype(np.int32), _positions(ids)), np.float32)

    def keys(self, ids: np.ndarray, layer: int) -> np.ndarray:
        """What one layer's attention keeps of token `ids` [batch, seq]: [batch, kv_heads, seq, head_dim]. The model
        ends with that layer."""
        model = causal_model(
            replace(self.spec, layers=self.spec.layers[: layer + 1], head=HeadSpec(tied=True), parameter_axes=()),
            self.model.programs.runtime,
        )
        params = {path: array for path, array in self.model.params.items() if path in model.parameters}
        length = ids.shape[1]
        cache = model.empty_cache(len(ids), length, self.model.programs.cache_dtype, rewound=length)  # no ring
        run = jax.jit(lambda params, ids, cache: model.forward(params, ids, cache=cache, fresh=True)[1])
        kept = run(params, ids.astype(np.int32), cache).layers[layer]
        if isinstance(kept, BothCaches):
            kept = kept.keys
        assert isinstance(kept, LayerCache)
        return np.asarray(kept.key, np.float32)

    def layer_definitions(self) -> list[Any]:
        """Return the definitions by which jit distinguishes the layers' traced bodies, from a newly made decoder."""
        return [nnx.split(layer)[0] for layer in self.model.module.layers]

    def decode_program(self, rows: int, slots: int) -> str:
        """The text of the decode program before the compiler sees it, traced anew with a decoder that is made anew."""
        programs = self.model.programs
        step = inference_step(
            self.spec, programs.runtime, programs.cache_dtype, batch=rows, tokens=1, context=slots, stacked=False
        )
        with _tracing(next(_traces)):
            return str(jax.jit(step.function, donate_argnums=step.donated).lower(*step.arguments).as_text())

    @cached_property
    def _step(self) -> Any:
        def step(params: Any, ids: jax.Array, cache: Any, fresh: bool) -> Any:
            return self.model.programs.model.forward(params, ids, cache=cache, fresh=fresh)

        return jax.jit(step, static_argnums=3)


def stack(spec: ArchitectureSpec, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Parameters as a decoder that scans over layers holds them."""
    stacked = {path: array for path, array in params.items() if not path.startswith("layers.")}
    for path, copies in stacked_paths(spec, params):
        stacked[path] = jnp.stack([params[copy] for copy in copies])
    return stacked


def _positions(ids: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
