"""Padding changes no result: logits, tokens, gradients and saved checkpoints are those of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import padded
import pytest
from devices import xla_flags
from padded import assert_equal, assert_same_as_one_device, load, qwen_checkpoint
from safetensors.numpy import load_file
from torchless import torchless

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.spec import (
    ActivationSpec,
    ArchitectureSpec,
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    OutputGate,
    RouterSpec,
)
from ttpu_core.spec.latent_attention import latent_attention
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_core.spec.rope import RopeSpec
from ttpu_jax.aot import steps
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.decoder import Decoder
from ttpu_jax.model.loss import next_token_loss
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.params.padding import pad_for, project_gradients
from ttpu_jax.params.placement import local_placement

ROPE = RopeSpec(rotary_dim=8)
NORM = NormSpec()
TOKENS = np.random.default_rng(0).integers(0, 67, (4, 9)).astype(np.int32)

GQA = AttentionSpec(14, 2, 8, rope=ROPE, qkv_bias=True, output_bias=True, sinks=True)
LAYERS = {
    "biases and sinks": LayerSpec(GQA, MLPSpec(21, bias=True), NORM),
    "norms over all heads": LayerSpec(
        AttentionSpec(6, 3, 8, rope=ROPE, q_norm=NORM, k_norm=NORM, qk_norm_scope="full"),
        MLPSpec(10, ActivationSpec("gelu"), gated=False, bias=True),
        NORM,
    ),
    "norms per head": LayerSpec(
        AttentionSpec(
            5, 1, 8, rope=ROPE, q_norm=NORM, k_norm=replace(NORM, bias=True), v_norm=NORM, qk_norm_scope="per_head"
        ),
        None,
        NORM,
    ),
    "values of another size and gates of features": LayerSpec(
        AttentionSpec(6, 2, 8, v_head_dim=6, rope=ROPE, qkv_bias=True, output_gate=OutputGate(bias=True)),
        MLPSpec(9),
        NORM,
    ),
    "values that are keys and gates of heads": LayerSpec(
        AttentionSpec(10, 2, 8, rope=ROPE, value_is_key=True, output_gate=OutputGate("softplus", "head")),
        MLPSpec(9),
        NORM,
    ),
    "experts": LayerSpec(
        AttentionSpec(3, 3, 8, rope=ROPE),
        MoESpec(4, 2, 11, router=RouterSpec(), expert_bias=True, shared=MLPSpec(7), shared_gate=True, dense=MLPSpec(5)),
        NORM,
    ),
    "latent attention": LayerSpec(
        latent_attention(
            hidden_size=12,
            num_heads=5,
            kv_lora_rank=6,
            qk_nope_head_dim=4,
            qk_rope_head_dim=8,
            v_head_dim=6,
            rope=ROPE,
        ),
        MLPSpec(9),
        NORM,
    ),
}


def architecture(*layers: LayerSpec, **changes: Any) -> ArchitectureSpec:
    head = changes.pop("head", HeadSpec(bias=True))
    return ArchitectureSpec("tiny", EmbeddingSpec(67, 12, **changes), layers, NORM, head, 64)


class Model:
    """A decoder over random parameters, which are the same on every mesh."""

    def __init__(self, spec: ArchitectureSpec, mesh: str | None = None, *, stacked: bool = False) -> None:
        self.placement, self.stacked = local_placement(mesh), stacked
        self.spec, self.paddings = pad_for(spec, self.placement)
        self.table = stacked_parameters(self.spec) if stacked else self.spec.parameters
        self.runtime = Runtime(self.placement, ropes=different_ropes(spec.layers))
        self.model = causal_model(self.spec, self.runtime, stacked=stacked)
        random = np.random.default_rng(3)
        arrays = {}
        for path, parameter in spec.parameters.items():
            value = random.standard_normal(parameter.shape).astype(np.float32) * 0.3
            value = 1 + 0.1 * value if parameter.init == "ones" else value
            arrays[path] = self.paddings[path].pad(value) if path in self.paddings else value
        if stacked:
            arrays = self._stack(arrays)
        self.params = {
            path: jax.device_put(arrays[path], self.placement.parameter(path, parameter))
            for path, parameter in self.table.items()
        }

    def _stack(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for number, group in enumerate(self.spec.groups()):
            for place in range(len(group.unit)):
                layers = range(
                    group.start + place, group.start + place + len(group.unit) * group.repeats, len(group.unit)
                )
                first = f"layers.{layers[0]}."
                for path in [path for path in arrays if path.startswith(first)]:
                    rest = path.removeprefix(first)
                    copies = [arrays[f"layers.{layer}.{rest}"] for layer in layers]
                    arrays[f"groups.{number}.{place}.{rest}"] = np.stack(copies)
        return arrays

    def decoder(self, params: Any) -> Decoder:
        return self.model.module(params)

    def logits(self) -> np.ndarray:
        positions = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)
        run = jax.jit(lambda params, tokens, positions: self.decoder(params)(tokens, positions)[0])
        return np.asarray(run(self.params, TOKENS, positions))[..., : self.spec.vocab_size]

    def gradients(self) -> dict[str, jax.Array]:
        """Of the loss, projected."""

        @jax.jit
        def run(params: Any) -> Any:
            gradients = jax.grad(lambda params: next_token_loss(self.model, params, TOKENS))(params)
            return project_gradients(gradients, self.spec, self.paddings, stacked=self.stacked)

        return run(self.params)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_logits_and_gradients_of_every_kind_of_layer_are_those_of_one_device(layer: str) -> None:
    spec = architecture(LAYERS[layer])
    one, cut = Model(spec), Model(spec, "tensor=8")
    assert any(path.startswith("layers.") for path in cut.paddings)
    assert_equal(cut.logits(), one.logits())
    assert_equal(Model(spec, "fsdp=2,tensor=3").logits(), one.logits())
    expected, found = one.gradients(), cut.gradients()
    for path, gradient in found.items():
        value = np.asarray(gradient)
        if path in cut.paddings:
            padding = cut.paddings[path]
            np.testing.assert_array_equal(padding.pad(padding.unpad(value)), value)
            value = padding.unpad(value)
        np.testing.assert_allclose(value, expected[path], atol=2e-5 * max(1.0, float(np.abs(value).max())))


def test_a_layer_that_reads_anothers_keys_is_padded_as_that_one_is() -> None:
    reader = replace(GQA, num_heads=6, kv_from_layer=0, sinks=False)
    spec = architecture(LAYERS["biases and sinks"], LayerSpec(reader, MLPSpec(9), NORM), head=HeadSpec(tied=True))
    assert_equal(Model(spec, "tensor=8").logits(), Model(spec).logits())
    assert_equal(Model(spec, "tensor=8", stacked=True).logits(), Model(spec).logits())


def test_layers_that_padding_makes_equal_are_stacked_together() -> None:
    layers = [LayerSpec(GQA, MLPSpec(inner), NORM) for inner in (21, 22, 21)]
    spec = architecture(*layers)
    one, cut = Model(spec), Model(spec, "tensor=8", stacked=True)
    assert len(cut.spec.groups()) == 1
    assert_equal(cut.logits(), one.logits())
    found, expected = cut.gradients(), one.gradients()
    for number in range(3):
        path = f"layers.{number}.mlp.down.kernel"
        stacked = np.asarray(found["groups.0.0.mlp.down.kernel"])[number]
        np.testing.assert_allclose(cut.paddings[path].unpad(stacked), expected[path], atol=2e-5)
        assert not stacked[:, layers[number].mlp.intermediate_size :].any()  # type: ignore[union-attr]


@pytest.mark.slow
def test_gradients_are_projected_as_the_core_says() -> None:
    random = np.random.default_rng(4)
    for devices in (3, 8):
        for layer in LAYERS.values():
            spec, paddings = pad_architecture(architecture(layer), {"tensor": devices})
            given = {path: random.standard_normal(p.shape).astype(np.float32) for path, p in paddings.items()}
            projected = jax.jit(partial(project_gradients, padded=spec, paddings=paddings))(given)
            for path, value in projected.items():
                np.testing.assert_allclose(value, paddings[path].project_gradient(given[path]), atol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_training_step_leaves_the_model_that_one_device_has(stacked: bool) -> None:
    # Not AdamW, whose steps have no size: it would make a gradient of a rounding error one of the learning rate.
    descent = optax.sgd(0.5)
    spec = architecture(*[LAYERS["biases and sinks"]] * 2)

    def step(mesh: str | None) -> tuple[Model, dict[str, np.ndarray]]:
        model = Model(spec, mesh, stacked=stacked)
        program = steps.train_step(
            spec,
            model.runtime,
            np.dtype(np.float32),
            batch=4,
            tokens=TOKENS.shape[1],
            stacked=stacked,
            optimizer=descent,
        )
        after, _, _ = jax.jit(program.function)(model.params, descent.init(model.params), TOKENS)
        return model, {path: np.asarray(value) for path, value in after.items()}

    (_, expected), (cut, found) = step(None), step("tensor=8")
    for path, value in found.items():
        name = path.replace("groups.0.0.", "layers.0.")
        padding = cut.paddings.get(name)
        copies = value if path.startswith("groups.") else value[None]
        wanted = expected[path] if path.startswith("groups.") else expected[path][None]
        for copy, other in zip(copies, wanted, strict=True):
            original = copy if padding is None else padding.unpad(copy)
            np.testing.assert_allclose(original, other, atol=2e-5)
            if padding is not None:
                np.testing.assert_allclose(padding.pad(original), copy, atol=1e-7)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_checkpoint(tmp_path_factory.mktemp("padded") / "qwen", num_hidden_layers=1)


@pytest.mark.slow
def test_qwen2_5_7bs_heads_on_eight_devices(qwen: Path) -> None:
    assert_same_as_one_device(qwen, "tensor=8")


@pytest.mark.slow
def test_qwen2_5_7bs_heads_on_thirty_two_devices(qwen: Path) -> None:
    meshes = "tensor=32", "data=8,tensor=4"
    flags = {"XLA_FLAGS": xla_flags(32), "JAX_PLATFORMS": "cpu"}
    folders = [str(Path(padded.__file__).parent), *sys.path]
    environment = torchless({**os.environ, **flags, "PYTHONPATH": os.pathsep.join(folders)})
    code = f"import pathlib, padded; padded.assert_same_as_one_device(pathlib.Path({str(qwen)!r}), *{meshes!r})"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("mesh", ["tensor=8", "data=2,tensor=4", "fsdp=4,tensor=2"])
def test_a_padded_model_is_saved_as_it_was(qwen: Path, tmp_path: Path, mesh: str) -> None:
    model = load(qwen, mesh)
    assert model.spec.vocab_size == 1003 and model.params["embed.embedding"].shape[0] > 1003
    saved = model.save_pretrained(tmp_path / "saved")
    before, after = load_file(qwen / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_what_cannot_be_padded_is_refused_with_the_counts_that_fit() -> None:
    mlp, placement = MLPSpec(10, inner_norm=NORM), local_placement("tensor=4")
    spec, _ = pad_for(architecture(LayerSpec(GQA, mlp, NORM)), placement)
    with pytest.raises(UnsupportedError, match=r"'tensor' has 4 devices.*has 10 mlp: use 1, 2, 5, 10 devices"):
        placement.parameter("mlp.down.kernel", spec.parameters["layers.0.mlp.down.kernel"])
