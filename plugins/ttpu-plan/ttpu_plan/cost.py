"""Predicts how long a program takes. It takes an architecture, a mesh, TPU slices and a workload, and returns seconds
by cause. The model is a roofline with the chip's published rates, which ranks meshes well but does not give absolute
times.

*Overlap.* Memory reads overlap with compute. Sums over `tensor` and `expert`, and gathers of tokens for experts, stand
between two products, so nothing overlaps with them, but where the rows of the residual stream are cut
(`ttpu_core.sharding.stream`): those of dense MLPs go around a ring while their products are computed. Gathering
weights, reducing gradients, and transfers between slices overlap with the layer before or after. So a layer takes
max(compute, memory, background communication) + sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ttpu_core.quantization.quantize import planned_spec
from ttpu_core.sharding.hardware import Topology
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_core.sharding.stream import cuts_rows
from ttpu_core.sharding.training_state import ADAMW
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MoESpec, axes
from ttpu_core.spec.arithmetic import (
    BITS,
    attended_tokens,
    attention_flops,
    expert_shares,
    kept_slots,
    kv_elements,
    product_flops,
)
from ttpu_plan.activations import keeps_attention, kept_share, product_is_needed
from ttpu_plan.estimate import TimeEstimate
from ttpu_plan.links import Links, links_of
from ttpu_plan.memory import layer_cache_shapes, weight_bytes
from ttpu_plan.optimizer_state import state_bytes
from ttpu_plan.plan import replica_mesh
from ttpu_plan.shards import LayerShards, ModelShards, ParameterShard, shard_model, tiled_bytes
from ttpu_plan.tokens import (
    Exchange,
    axes_of_rows,
    busiest_share,
    exchange_for,
    expert_rows,
    expert_tokens,
    gathered_along,
    local_tokens,
    summed_in_ring,
)
from ttpu_plan.workload import Workload

MXU_SHARE = 0.8
"""Of peak that large products reach in the compiler's own schedules: 70 to 90 % (v5e, v5p, v6e)."""

HBM_SHARE = 0.8
"""Of peak that reading weights and cache reaches there: Llama-3.1-8B decode on v5e:2x2 and v6e:1x1."""

PROJECTIONS = ("embed.projection.kernel", "final_projection.kernel")
"""Between the residual stream and tables of fewer features (`EmbeddingSpec.table_features`)."""


def estimate_time(
    spec: ArchitectureSpec,
    mesh: Mapping[str, int],
    topology: Topology,
    workload: Workload,
    strategy: Strategy = DEFAULT_STRATEGY,
    dcn: Mapping[str, int] | None = None,
) -> TimeEstimate:
    """Estimate the time of a program.

    Args:
        mesh: mesh axis → devices along it, over all slices.
        dcn: mesh axis → slices along it; None puts them on the axes that talk least.

    Raises:
        UnsupportedError: a parameter that the mesh cannot divide.
    """
    spec = planned_spec(spec, workload.quantization)
    model = shard_model(spec, replica_mesh(mesh) if workload.step else mesh, strategy)
    program = _Program(model, topology, workload, links_of(mesh, topology, dcn))
    times = workload.settings.gradient_accumulation_steps
    parts = [(times * kind.count, program.layer(kind)) for kind in model.layers]
    parts += [(times, program.ends())]
    if workload.task == "train":
        parts += [(1, program.update())]
    return TimeEstimate(
        compute=sum(count * part.compute for count, part in parts),
        hbm=sum(count * (part.hbm + part.gradient_sums) for count, part in parts),
        ici=sum(count * (part.sums + part.background) for count, part in parts),
        dcn=sum(count * (part.sums_dcn + part.background_dcn) for count, part in parts),
        seconds=sum(count * part.seconds for count, part in parts),
        host=sum(count * part.host for count, part in parts),
    )


@dataclass(slots=True)
class _Part:
    """Seconds of a part of the program by resource."""

    compute: float = 0.0
    hbm: float = 0.0
    gradient_sums: float = 0.0  # of the core, which adds up gradients that go around a ring, in HBM
    sums: float = 0.0  # on the interconnect; between slices
    sums_dcn: float = 0.0
    background: float = 0.0  # the same
    background_dcn: float = 0.0
    host: float = 0.0  # in the background too, to and from the host's memory

    @property
    def seconds(self) -> float:
        on_core = max(self.compute, self.hbm) + self.gradient_sums
        return max(on_core, self.background, self.background_dcn, self.host) + self.sums + self.sums_dcn


@dataclass(frozen=True, slots=True)
class _Program:
    model: ModelShards
    topology: Topology
    workload: Workload
    links: Links

    @property
    def trains(self) -> bool:
        return self.workload.task == "train"

    @property
    def remat(self) -> str:
        """What a training step computes again."""
        return "full" if self.workload.settings.remat == "auto" else self.workload.settings.remat

    def forwards(self, one: ParameterShard, kind: LayerShards) -> float:
        """How often a product is computed forwards: again for the gradient where its result is read and not kept."""
        again = self.trains and product_is_needed(one, kind)
        return 1 + again * (1 - kept_share(one, kind.layer, self.remat))

    def layer(self, kind: LayerShards) -> _Part:
        """One layer, forwards and back."""
        part = _Part()
        rows, tokens = local_tokens(self.model, self.workload)
        item, bits = self.workload.bytes_per_element, BITS[self.workload.dtype]
        flops = traffic = 0.0
        for one in kind.used:
            read = float(weight_bytes([one], self.workload, gathered=True))
            times = self.forwards(one, kind) + 2 * self.trains if one.is_matrix else 1 + 2 * self.trains
            if one.is_matrix and one.of_experts:
                share, products, given = self._of_experts(kind, one)
                read *= share
                flops += times * products
                traffic += times * given
            elif one.is_matrix:
                flops += times * product_flops(prod(one.gathered), rows * tokens)
                traffic += times * rows * tokens * (one.gathered[-1] + prod(one.gathered[:-1])) * item
            traffic += times * read
            self._gather(part, one, bits)
            part.gradient_sums += self._gradient_sums(one, bits)
        self._exchange_for_experts(part, kind)
        for one in kind.used:
            if one.is_matrix and not one.of_experts and one.gathered[-1] < one.parameter.shape[-1]:
                by, size = one.multiplied_axes[-1], rows * tokens * prod(one.gathered[:-1]) * item
                if self._in_ring(one, rows, tokens, by):
                    self._in_background(part, "all-reduce", size, by)
                else:
                    self._sum(part, size, by, self.forwards(one, kind))
        flops += (1 + self.trains * (3 - keeps_attention(self.remat))) * self._attention_flops(kind, rows, tokens)
        if self.workload.task != "train":
            traffic += self._cache_traffic(kind)
        self._exchange_keys(part, kind, rows)
        part.compute = flops / (self.topology.chip.bf16_flops * MXU_SHARE)
        part.hbm = traffic / (self.topology.chip.hbm_bytes_per_second * HBM_SHARE)
        return part

    def _of_experts(self, kind: LayerShards, one: ParameterShard) -> tuple[float, float, float]:
        """Of a kernel of experts, on the device whose experts are chosen most often: the share of it that is read, the
        FLOPs of its products, and the bytes of their operands and results, each of a token's experts having a row."""
        mlp, tokens = kind.layer.mlp, expert_tokens(self.model, kind.used, self.workload)
        assert isinstance(mlp, MoESpec)
        used, active = expert_shares(mlp, tokens)
        most = busiest_share(mlp, tokens, prod(self.model.mesh[axis] for axis in one.multiplied_axes[0]))
        ends = one.gathered[-1] + prod(one.gathered[1:-1])
        given = expert_rows(self.model, kind.used, self.workload, mlp) * ends * self.workload.bytes_per_element
        return min(1.0, used * most), product_flops(active * most * prod(one.gathered), tokens), given

    def ends(self) -> _Part:
        """Looking tokens up, what projects between tables and stream, and the logits: of a row's last token, or of all
        in training."""
        part = _Part()
        rows, tokens = local_tokens(self.model, self.workload)
        item, bits = self.workload.bytes_per_element, BITS[self.workload.dtype]
        head = self.model.head
        scored = self.workload.step.rows if self.workload.step else rows * (tokens if self.trains else 1)
        # Logits of some tokens at a time are computed again for the gradient (ttpu_jax.model.loss).
        flops = product_flops(prod(head.gathered), scored)
        between = [one for path in PROJECTIONS if (one := self.model.end(path)) is not None]
        flops += sum(product_flops(prod(one.gathered), rows * tokens) for one in between)
        part.compute = (4 if self.trains else 1) * flops
        part.compute /= self.topology.chip.bf16_flops * MXU_SHARE
        traffic = weight_bytes([head, *between], self.workload, gathered=True) + scored * head.gathered[0] * 4
        part.hbm = (3 if self.trains else 1) * traffic / (self.topology.chip.hbm_bytes_per_second * HBM_SHARE)
        table = self.model.end("embed.embedding")
        assert table is not None
        for one in {one.path: one for one in (head, table, *between)}.values():
            self._gather(part, one, bits)
        self._sum(part, rows * tokens * table.gathered[1] * item, table.multiplied_axes[0])
        looked_up = rows * tokens * table.parameter.shape[1] * item
        self._between(part, "all-gather", looked_up, table.multiplied_axes[1])
        return part

    def update(self) -> _Part:
        """Master weights and the optimizer's state are read and written, gradients read, rounded as the layers leave
        them. State on the host comes and goes over its bus, both ways at once."""
        settings, held = self.workload.settings, [(1, self.model.ends), (1, self.model.shared)]
        held += [(kind.count, kind.parameters) for kind in self.model.layers]
        elements = sum(count * prod(one.local) for count, ends in held for one in ends)
        state = sum(state_bytes(one, count, settings) for count, ends in held for one in ends)
        traffic = elements * (2 * BITS[ADAMW.master_dtype] // 8 + self.workload.bytes_per_element) + 2 * state
        chip = self.topology.chip
        host = state / chip.host_bytes_per_second if settings.offload_optimizer else 0.0
        return _Part(hbm=traffic / (chip.hbm_bytes_per_second * HBM_SHARE), host=host)

    def _token_axes(self) -> set[str]:
        return {a for axis in (axes.BATCH, axes.SEQUENCE) for a in dict(self.model.strategy.rules).get(axis, ())}

    def _in_ring(self, one: ParameterShard, rows: int, tokens: int, by: tuple[str, ...]) -> bool:
        """Whether the sums of an MLP's product go around a ring, during the products."""
        dense = self.workload.quantization is None and one.path.endswith("mlp.down.kernel")
        whole = not self.model.axes_of(axes.SEQUENCE, self.workload.tokens)
        if not dense or not whole or self.trains or len(by) != 1:
            return False
        return cuts_rows(rows, tokens, self.model.mesh[by[0]], self.topology.chip)

    def _gather(self, part: _Part, one: ParameterShard, bits: int) -> None:
        """Weights sharded along the tokens' axes are gathered each time a layer is run; in training their gradients are
        scattered back, and summed over the tokens' other axes."""
        sharding, staying = ({a for by in of for a in by} for of in (one.mesh_axes, one.multiplied_axes))
        over = tuple(a for a in self.model.mesh if a in sharding - staying)
        stored = weight_bytes([one], self.workload) if not self.trains else tiled_bytes(one.local, bits)
        if over:
            whole = stored * prod(self.model.mesh[a] for a in over)
            self._in_background(part, "all-gather", whole * (1 + self.trains), over)
            if self.trains:
                self._in_background(part, "reduce-scatter", stored, over)
        if self.trains:
            others = tuple(a for a in self.model.mesh if a in self._token_axes() - sharding)
            self._in_background(part, "all-reduce", stored, others)

    def _gradient_sums(self, one: ParameterShard, bits: int) -> float:
        """Seconds in which the core adds what arrives of a kernel's gradient to what it has: it reads two sums and
        writes one."""
        chip = self.topology.chip
        if not self.trains or not one.is_matrix or one.of_experts:
            return 0.0
        if not summed_in_ring(one, axes_of_rows(self.model, self.workload), chip):
            return 0.0
        return 3 * tiled_bytes(one.gathered, bits) / (chip.hbm_bytes_per_second * HBM_SHARE)

    def _exchange_for_experts(self, part: _Part, kind: LayerShards) -> None:
        """Each device adds what its experts, and its part of each, give to all of their tokens, in float32. Tokens that
        are sharded along the experts' axes are gathered before, or sent to their experts and back."""
        if exchange := exchange_for(self.model, kind.used, self.workload):
            self._send_to_experts(part, kind, exchange)
            return
        gathered = gathered_along(self.model, kind.used, self.workload)
        features = expert_tokens(self.model, kind.used, self.workload) * self.model.spec.hidden_size
        for one in kind.used:
            if one.of_experts and one.path.endswith("down.kernel"):
                by, times = (*one.multiplied_axes[0], *one.multiplied_axes[-1]), self.forwards(one, kind)
                self._sum(part, features * 4, by, times)
                self._between(part, "all-gather", features * self.workload.bytes_per_element, gathered, times)

    def _send_to_experts(self, part: _Part, kind: LayerShards, exchange: Exchange) -> None:
        """A row for each of a token's experts goes there and back; for the gradient rows go there again, and gradients
        both ways. What devices with the same tokens give them is added."""
        rows, tokens = local_tokens(self.model, self.workload)
        mlp, features = kind.layer.mlp, rows * tokens * self.model.spec.hidden_size
        assert isinstance(mlp, MoESpec)
        sent = features * mlp.experts_per_token / exchange.same * self.workload.bytes_per_element
        ici, dcn = self.links.seconds("ragged-all-to-all", sent, exchange.along)
        times = 2 + 3 * self.trains
        part.sums += times * ici
        part.sums_dcn += times * dcn
        for one in kind.used:
            if one.of_experts and one.path.endswith("down.kernel"):
                adding = (*one.multiplied_axes[0], *one.multiplied_axes[-1])
                by = tuple(axis for axis in adding if axis not in exchange.along)
                self._sum(part, features * 4, by, self.forwards(one, kind))

    def _sum(self, part: _Part, size: float, by: tuple[str, ...], forwards: float = 1) -> None:
        """An all-reduce forwards, as often as given, and one for the gradient of the product's input."""
        self._between(part, "all-reduce", size, by, forwards)

    def _between(self, part: _Part, op: str, size: float, by: tuple[str, ...], forwards: float = 1) -> None:
        """An exchange between two products, as often forwards as given, and one like it for the gradient."""
        if by:
            ici, dcn = self.links.seconds(op, size, by)
            part.sums += (forwards + self.trains) * ici
            part.sums_dcn += (forwards + self.trains) * dcn

    def _in_background(self, part: _Part, op: str, size: float, by: tuple[str, ...]) -> None:
        if by:
            ici, dcn = self.links.seconds(op, size, by)
            part.background += ici
            part.background_dcn += dcn

    def _exchange_keys(self, part: _Part, kind: LayerShards, rows: int) -> None:
        """Where the sequence is sharded, every device sees all keys and values of its rows, forwards and back."""
        mixer = kind.layer.mixer
        by = self.model.axes_of(axes.SEQUENCE, self.workload.tokens)
        if not by or not isinstance(mixer, AttentionSpec):
            return
        size = rows * self.workload.context * kv_elements(mixer)
        size //= self.model.devices(axes.KV_HEADS, mixer.num_kv_heads)
        times = 1 + (3 - keeps_attention(self.remat)) * self.trains
        self._in_background(part, "all-gather", times * size * self.workload.bytes_per_element, by)

    def _cache_traffic(self, kind: LayerShards) -> float:
        """What is read of a layer's cache: all of a contiguous one; of pages those that sequences attend to."""
        shapes = layer_cache_shapes(self.model, kind.layer, self.workload)
        size = float(sum(tiled_bytes(shape, kept) for shape, kept in shapes))
        if self.workload.step is None or not isinstance(kind.layer.mixer, AttentionSpec):
            return size
        return size * attended_tokens(kind.layer.mixer, self.workload.context) / self.workload.context

    def _attention_flops(self, kind: LayerShards, rows: int, tokens: int) -> float:
        """Scores and sums of softmax attention; of a causal one over the same tokens, half, but of a sequence that is
        sharded what its last part has, for which the others wait."""
        mixer = kind.layer.mixer
        if not isinstance(mixer, AttentionSpec):
            return 0.0
        heads = mixer.num_heads // self.model.devices(axes.KV_HEADS, mixer.num_kv_heads)
        seen = self.workload.context
        if self.workload.step is not None:
            # Each sequence decodes; what tokens are left are those of a prompt, from its begin on.
            reach, decoding = attended_tokens(mixer, seen), self.workload.step.sequences
            read = max(0, tokens - decoding)
            return attention_flops(heads, mixer, decoding * reach + read * min(reach, (read + 1) / 2))
        if self.workload.task == "decode":
            seen = kept_slots(mixer, seen)
        else:
            reach = attended_tokens(mixer, seen)
            parts = self.model.devices(axes.SEQUENCE, self.workload.tokens)
            seen = reach - reach // (2 * parts) if mixer.causal and reach == seen else reach
        return attention_flops(heads, mixer, rows * tokens * seen)


