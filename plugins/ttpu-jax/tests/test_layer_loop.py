"""Layers of a prompt in a loop compute what unrolled ones do, and on TPUs fetch their kernels in the background."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ring_cases import LAYERS, NORM, ROPE, SEQ, Model, architecture, assert_close, tokens

from ttpu_core.spec import (
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
)
from ttpu_core.spec.rope import RopeSpec
from ttpu_jax.aot import hlo
from ttpu_jax.aot.compile import CompiledProgram, compile_for
from ttpu_jax.aot.hbm import in_hbm
from ttpu_jax.aot.steps import inference_step
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.model import layer_loop
from ttpu_jax.model.layer_loop import LayerLoop, layer_loops
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.optimizations import Optimization
from ttpu_jax.params.placement import Placement

UNROLLED = frozenset({Optimization.LAYER_LOOP})
PLAIN = LayerSpec(AttentionSpec(8, 4, 8, rope=ROPE), MLPSpec(16), NORM)
WINDOW = replace(PLAIN, mixer=AttentionSpec(8, 4, 8, rope=ROPE, window=5, qkv_bias=True))
LOOPED = [
    "fewer KV heads than devices, with biases",
    "norms behind the sub-layers too, and soft caps",
    "norms of heads and an MLP without a gate",
    "sub-layers side by side",
]
MODELS = {name: architecture(*(LAYERS[name],) * 5) for name in LOOPED} | {
    "several groups": architecture(*(WINDOW,) * 4, *(PLAIN,) * 4),
    "layers around the loop": architecture(LAYERS["no MLP"], *(PLAIN,) * 4, LAYERS["no MLP"]),
    "norms behind the sub-layers alone": architecture(*(replace(PLAIN, block=BlockSpec("post")),) * 4),
}


WITH_BIASES = LayerSpec(
    AttentionSpec(8, 4, 128, rope=RopeSpec(rotary_dim=128), qkv_bias=True, window=256), MLPSpec(1024), NORM
)


def loops(spec: ArchitectureSpec, *, last_only: bool = True, seq: int = SEQ, **options: Any) -> dict[int, LayerLoop]:
    found = Model(spec, "tensor=4", **options)
    runtime = found.model.runtime
    decoder = found.model.module(found.params)
    x = jax.ShapeDtypeStruct((2, seq, spec.hidden_size), jnp.float32)
    return layer_loops(found.spec, list(decoder.layers), x, runtime, last_only=last_only)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_prompts_have_the_values_of_unrolled_layers(name: str) -> None:
    looped, unrolled = Model(MODELS[name], "tensor=4"), Model(MODELS[name], "tensor=4", without=UNROLLED)
    last, held, following = looped.prefill(tokens())
    expected_last, expected_held, expected_following = unrolled.prefill(tokens())
    assert_close(last, expected_last, 2e-6)
    assert_close(following, expected_following, 2e-6)
    for one, other in zip(held, expected_held, strict=True):
        assert_close(one, other, 2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_the_last_layer_is_in_a_loop_where_all_tokens_are_wanted(name: str) -> None:
    found, without_last = ({start: loop.turns for start, loop in loops(MODELS[name], last_only=last).items()}
                           for last in (False, True))
    layers = len(MODELS[name].layers)
    if name == "several groups":
        assert found == {0: 4, 4: 4} and without_last == {0: 4, 4: 3}
    elif "around" in name:
        assert found == without_last == {1: 4}
    else:
        assert found == {0: layers} and without_last == {0: layers - 1}


def test_layers_are_traced_once() -> None:
    spec = MODELS["several groups"]

    def calls(without: frozenset[Optimization]) -> int:
        found = Model(spec, "tensor=4", without=without)
        cache = found.model.empty_cache(2, SEQ, np.dtype(np.float32))
        run = jax.make_jaxpr(lambda params, tokens, cache: found.model.forward(params, tokens, cache=cache, fresh=True))
        return str(run(found.params, tokens(), cache)).count("name=_apply_layer")

    assert calls(UNROLLED) == 8 and calls(frozenset()) == 0


@pytest.mark.parametrize(
    "name", ["experts", "a norm of inner features", "values of another size and gates of features", "no MLP"]
)
def test_layers_without_rings_of_their_own_are_unrolled(name: str) -> None:
    assert not loops(architecture(*(LAYERS[name],) * 5))


def test_what_is_not_a_prompt_on_a_ring_is_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MODELS["sub-layers side by side"]
    assert loops(spec)
    assert not loops(spec, stream="whole") and not loops(spec, without=UNROLLED) and not loops(spec, seq=1)
    assert not loops(architecture(*(PLAIN,) * 3)), "of two layers and the last one"
    assert loops(architecture(*(PLAIN,) * 3), last_only=False)
    reads = replace(PLAIN, mixer=AttentionSpec(8, 4, 8, rope=ROPE, kv_from_layer=4))
    (loop,) = loops(architecture(*(PLAIN,) * 5, *(reads,) * 4)).values()
    assert loop.turns == 4, "a layer whose keys others read, and those that read them"
    assert not loops(architecture(*(WINDOW, PLAIN) * 4)), "layers of two kinds alternate"
    share = 4 * 12 * ((2 + 2) * 8 + 2 * 8 + 3 * 4)  # of a device: float32 qkv and output of a KV head, and the MLP
    share += 4 * 2 * SEQ * 12  # and all rows of attention's product
    for room in (share, share - 1):
        monkeypatch.setattr(layer_loop, "_VMEM_BYTES", room)
        assert bool(loops(architecture(*(PLAIN,) * 5))) == (room == share)


def test_keys_and_values_of_all_turns_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 4 * 2 * SEQ * 4 * (8 + 8)  # of four turns, two rows, one KV head of a device: float32 keys and values
    for room in (kept, kept - 1):
        monkeypatch.setattr(layer_loop, "_STACKED_BYTES", room)
        assert bool(loops(architecture(*(PLAIN,) * 5))) == (room == kept)


@pytest.mark.parametrize(
    ("chip", "fetches"), [("v5e", True), ("v6e", True), ("v5p", False), ("tpu7x", False), (None, False)]
)
def test_chips_have_room_for_a_layer(chip: str | None, fetches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = None if chip is None else SimpleNamespace(name=chip)
    monkeypatch.setattr(layer_loop, "ring_of", lambda *_: SimpleNamespace(chip=found))
    assert loops(MODELS["sub-layers side by side"]), "devices that are no TPUs"
    monkeypatch.setattr("ttpu_jax.params.placement.Placement.platform", "tpu")
    assert bool(loops(MODELS["sub-layers side by side"])) == fetches


def test_a_prompt_behind_others_and_rows_of_sequences_are_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttpu_jax.model.decoder.layer_loops", lambda *_, **__: pytest.fail("a loop"))
    found = Model(MODELS["sub-layers side by side"], "tensor=4")
    cache = found.model.empty_cache(2, 2 * SEQ, np.dtype(np.float32))
    jax.eval_shape(lambda params: found.model.forward(params, tokens(), cache=cache), found.params)
    jax.eval_shape(lambda params: found.model.forward(params, tokens(), tokens()), found.params)


@pytest.fixture(scope="module")
def programs() -> dict[bool, CompiledProgram]:
    """A prompt of a bfloat16 model for four v5e chips, whose layers are in a loop, or unrolled."""
    topology, kind = tpu_topology("v5e:2x2"), np.dtype(jnp.bfloat16)
    spec = ArchitectureSpec("tiny", EmbeddingSpec(1024, 512), (WITH_BIASES,) * 5, NORM, HeadSpec(), 1024)
    found = {}
    for without in (frozenset[Optimization](), UNROLLED):
        runtime = Runtime(
            Placement(make_mesh(topology, {"tensor": 4})),
            "splash_attention",
            different_ropes(spec.layers),
            dtype=kind,
            stream="auto",
            without=without,
        )
        step = inference_step(spec, runtime, kind, batch=1, tokens=512, context=512, stacked=False)
        found[not without] = compile_for(topology, step.function, *step.arguments, donate_argnums=step.donated)
    return found


@pytest.mark.tpu_compile
class TestOnTPUs:
    def turn(self, program: CompiledProgram) -> tuple[hlo.Instruction, ...]:
        """The instructions of a turn of the program's only loop."""
        module = hlo.parse(program.hlo_text)
        (loop,) = (one for one in module.body(module.entry) if one.op == "while")
        assert module.trip_count(loop) == 4, "all but the last layer"
        return module.body(loop.attribute("body"))

    def test_a_turn_fetches_what_a_layer_reads(self, programs: dict[bool, CompiledProgram]) -> None:
        turn, unrolled = self.turn(programs[True]), hlo.parse(programs[False].hlo_text)
        assert not any(one.name.startswith("fetch") for one in unrolled.body(unrolled.entry))
        assert sum(one.name.startswith("fetch_end") for one in turn) == 2
        (begin,) = (one for one in turn if one.name.startswith("fetch_begin"))
        *arrays, first, second = (one.strip() for one in hlo.tuple_elements(begin.shape))
        # qkv and output; gate and up, and down; the scales of the next layer's two norms.
        assert sorted(re.sub(r".*/|[{].*| ", "", one) for one in arrays) == [
            "bf16[1,4,128,512]", "bf16[2,256,512]", "bf16[512,256]", "bf16[512,256]", "bf16[512]", "bf16[512]",
        ]  # fmt: skip
        assert all("S(1)" in one for one in arrays) and first == second == "s32[]{:S(2)}"
        made = {one.name: one for one in turn}
        sources = [made[name] for name in begin.operand_names[1:]]
        assert len(sources) == 4 * 6 and all(in_hbm(one.shape) for one in sources), "layers' own arrays, in HBM"

    def test_products_read_what_was_fetched(self, programs: dict[bool, CompiledProgram]) -> None:
        turn = self.turn(programs[True])
        made, module = {one.name: one for one in turn}, hlo.parse(programs[True].hlo_text)

        def source(name: str) -> str:
            while made[name].op in ("get-tuple-element", "bitcast"):
                (name,) = made[name].operand_names
            return name

        products = [
            one
            for one in turn
            if one.op == "fusion" and any(x.op == "convolution" for x in module.body(module.callee(one)))
        ]
        weights = [shape for one in products if (shape := {source(name) for name in one.operand_names})]
        assert len(products) >= 16, "4 + 2 of queries, 1 of rope, 1 of the output, 3 turns and the own rows of the MLP"
        # Of rope's own product none is: it multiplies by a constant.
        assert sum(any(name.startswith("fetch_end") for name in of_one) for of_one in weights) >= len(products) - 2

    def test_memory_is_that_of_unrolled_layers(self, programs: dict[bool, CompiledProgram]) -> None:
        looped, unrolled = programs[True], programs[False]
        assert looped.alias_bytes == unrolled.alias_bytes, "the cache is updated in place"
        assert looped.peak_bytes < 1.1 * unrolled.peak_bytes

    def test_the_core_waits_for_copies_no_longer_than_for_links(self, programs: dict[bool, CompiledProgram]) -> None:
        looped, unrolled = (programs[loop].estimate for loop in (True, False))
        assert looped.total_seconds < 1.15 * unrolled.total_seconds
