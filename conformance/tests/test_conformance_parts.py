"""A plugin's own classes and layouts, deliberately wrong in ways that whole logits on one device do not show: each is
caught by the check that is there for it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

from broken import LLAMA, MIXTRAL, OWN_BLOCK, cases

from ttpu_conformance.runner import run
from ttpu_conformance.selection import checks_for

pytestmark = [pytest.mark.torch, pytest.mark.slow]


class Breach(NamedTuple):
    """The check that must fail, with this in its message; a plugin's hooks for a type, and the class that they name."""

    check: str
    message: str
    part: str = ""
    source: str = LLAMA + OWN_BLOCK
    model_type: str = "llama"


def block(method: str) -> str:
    return "class Block(DecoderLayer):\n" + textwrap.indent(textwrap.dedent(method).strip(), "    ")


MIX = "def mix(self, x, step, cache, inputs=None):\n    "

RULES = """
@hookimpl
def ttpu_sharding_rules():
    return {rules!r}
"""
NAMES_OF_ITS_OWN = """
@hookimpl
def ttpu_flax_mapping(spec):
    mapping = layout.standard_mapping(spec, layout.CheckpointNames().below("decoder."))
    return replace(mapping, prefixes=(("model.", "decoder."),))
"""

BREACHES = {
    "a block drops its state after a single token": Breach(
        "cached_decode",
        "token by token the logits differ",
        block(
            MIX
            + """mixed, updated, kv = super().mix(x, step, cache, inputs)
    return mixed, cache if x.shape[1] == 1 else updated, kv"""
        ),
    ),
    "a block takes every part for the first": Breach(
        "chunked_prefill",
        "in chunks the logits differ",
        block(
            MIX
            + """if hasattr(cache, "fresh") and x.shape[1] > 1:
        cache = replace(cache, fresh=True, positions=step.query_positions)
    return super().mix(x, step, cache, inputs)"""
        ),
    ),
    "a block attends to padding": Breach(
        "padding_invariance",
        "with padding on the left a row's logits change",
        block(
            MIX
            + """cache = replace(cache, positions=jnp.maximum(cache.positions, 0))
    return super().mix(x, step, cache, inputs)"""
        ),
    ),
    "a block stops a gradient": Breach(
        "gradients",
        "differs from torch's .* though the loss agrees",
        block("def feed_forward(self, x):\n    return super().feed_forward(jax.lax.stop_gradient(x))"),
    ),
    "a block rounds further than bfloat16": Breach(
        "bfloat16_logits",
        "in bfloat16 the logits miss the exact ones",
        block(
            """def leave(self, x, inputs):
    return x if x.dtype == jnp.float32 else x.astype(jnp.float8_e4m3fn).astype(x.dtype)"""
        ),
    ),
    "a block computes otherwise on a mesh": Breach(
        "sharded_tensor",
        "on the mesh .* the logits differ from those of one device",
        block("def leave(self, x, inputs):\n    return x if self.runtime.placement.mesh is None else x + 0.01"),
    ),
    "a block keeps a function that it makes": Breach(
        "decode_compiles_once",
        "layer 0 made anew does not equal itself",
        block(
            """def __init__(self, spec, values, runtime):
    super().__init__(spec, values, runtime)
    self.activate = lambda x: x"""
        ),
    ),
    "a block draws a number while it is traced": Breach(
        "decode_compiles_once",
        "the decode program traced anew is another: .* became",
        block("def leave(self, x, inputs):\n    return x + 1e-6 * random.random()"),
    ),
    "a checkpoint is saved under names of its own": Breach(
        "checkpoint_round_trip",
        "transformers finds missing keys in what we save .* correct `ttpu_flax_mapping`",
        source=LLAMA + NAMES_OF_ITS_OWN,
    ),
    "MLP and vocabulary are not sharded along tensor": Breach(
        "sharded_tensor",
        r"\d\d% of the kernels' elements are not sharded along 'tensor', .* layers.\*.mlp.gate_up.kernel .* "
        "`ttpu_sharding_rules`",
        source=LLAMA
        + RULES.format(
            rules=[
                (".*gate_up.kernel", (None, None, "embed")),
                (".*down.kernel", ("embed", None)),
                ("embed.embedding|head.kernel", (None, "embed")),
            ]
        ),
    ),
    "gate and up of experts are not sharded along expert": Breach(
        "sharded_experts",
        r"67% of the kernels' elements are not sharded along 'expert', .* layers.\*.moe.experts.gate_up.kernel .*"
        r"`ttpu_sharding_rules`",
        source=MIXTRAL + RULES.format(rules=[(".*experts.gate_up.kernel", (None, "gate_up", "mlp", "embed"))]),
        model_type="mixtral",
    ),
    "experts are not sharded along expert": Breach(
        "sharded_experts",
        "2 devices along 'expert', but nothing of this mixtral is sharded along it",
        source=MIXTRAL
        + RULES.format(
            rules=[
                (".*experts.gate_up.kernel", (None, "gate_up", "mlp", "embed")),
                (".*experts.down.kernel", (None, "embed", "mlp")),
            ]
        ),
        model_type="mixtral",
    ),
}
"""What whole float32 logits do not show."""

VISIBLE = {
    "a block mixes the rows of a batch": Breach(
        "batch_invariance",
        "change with its place and its neighbours in the batch",
        block("def leave(self, x, inputs):\n    return x + 0.01 * x.mean(0)"),
    ),
    "a block takes its layer's number from its path": Breach(
        "stacked_layers",
        "with layers stacked the logits differ",
        block(
            """def __init__(self, spec, values, runtime):
    super().__init__(spec, values, runtime)
    self.factor = 1.1 if values.prefix == "layers.1." else 1.0

def feed_forward(self, x):
    return super().feed_forward(x) * self.factor"""
        ),
    ),
    "equal layers are built differently": Breach(
        "decode_compiles_once",
        "layers 0 and 1 have equal specs, but their modules differ",
        block(
            """def __init__(self, spec, values, runtime):
    super().__init__(spec, values, runtime)
    self.path = values.prefix"""
        ),
    ),
}


def failures(folder: Path, breach: Breach, *only: str) -> dict[str, str]:
    """Check id → reason, of those that fail."""
    made = cases(folder, breach.model_type, breach.source, "wrong_part", part=breach.part)
    results = run(checks_for(made, only=only))
    return {result.check: result.reason for result in results if result.status == "failed"}


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_that_logits_do_not_show_is_caught_by_its_check(tmp_path: Path, name: str) -> None:
    breach = BREACHES[name]
    found = failures(tmp_path, breach, "float32_logits", breach.check)
    assert set(found) == {breach.check}, found
    assert re.search(breach.message, found[breach.check])


@pytest.mark.parametrize("name", VISIBLE)
def test_a_breach_is_caught_by_the_check_that_is_there_for_it(tmp_path: Path, name: str) -> None:
    breach = VISIBLE[name]
    assert re.search(breach.message, failures(tmp_path, breach, breach.check)[breach.check])


def test_a_block_of_the_plugins_own_that_is_right_passes(tmp_path: Path) -> None:
    right = Breach("", "", block("def leave(self, x, inputs):\n    return x"))
    checks = {breach.check for breach in (*BREACHES.values(), *VISIBLE.values())}
    assert failures(tmp_path, right, *checks) == {}
