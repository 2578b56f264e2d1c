"""Products of activations with kernels: what they are rounded to, and what is done where XLA:CPU is slow."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny

from ttpu import LLM
from ttpu_jax.ops.linear import linear
from ttpu_jax.runner.build import WIDEN_ROWS


def arrays(rows: int, dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(rows)
    return tuple(draw.standard_normal(shape).astype(dtype) for shape in ((rows, 24), (3, 5, 24), (3, 5)))  # type: ignore[return-value]


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("widen_rows", [None, 4])
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_a_product_is_rounded_once(rows: int, widen_rows: int | None, flatten: bool) -> None:
    x, kernel, bias = arrays(rows, ml_dtypes.bfloat16)
    product = linear(jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(bias), flatten=flatten, widen_rows=widen_rows)
    exact = np.einsum("ri,abi->rab", x.astype(np.float64), kernel.astype(np.float64)) + bias.astype(np.float64)
    assert product.dtype == jnp.bfloat16 and product.shape == (rows, 3, 5)
    np.testing.assert_allclose(np.asarray(product, np.float64), exact, rtol=2**-8, atol=1e-6)


def test_only_bfloat16_of_many_rows_is_widened() -> None:
    def operands(rows: int, dtype: type, **options: int) -> str:
        program = jax.jit(partial(linear, **options)).lower(*map(jnp.asarray, arrays(rows, dtype)[:2])).as_text()
        (line,) = (line for line in program.splitlines() if "dot_general" in line)
        return line.rpartition(" : ")[2]

    assert "bf16" not in operands(4, ml_dtypes.bfloat16, widen_rows=4)
    assert operands(3, ml_dtypes.bfloat16, widen_rows=4).count("bf16") == 2
    assert operands(4, ml_dtypes.bfloat16).count("bf16") == 2
    assert operands(9, np.float32, widen_rows=4).count("f32") == 3


@pytest.mark.parametrize("native", [False, True])
def test_an_engine_widens_one_kernel_after_another_where_the_processor_has_no_bfloat16(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttpu_jax.runner.build.multiplies_bfloat16", lambda: native)
    sizes = {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 512}
    folder = tiny.llama_checkpoint(tmp_path / "llama", tokenizer=False, dtype="bfloat16", **sizes)
    llm = LLM(
        str(folder), dtype="bfloat16", max_model_len=64, max_num_seqs=8, max_num_batched_tokens=WIDEN_ROWS,
        sequence_buckets=(8,), token_buckets=(WIDEN_ROWS,), num_pages=20, sampling_level="greedy",
        penalties=False, prompt_logprobs=False, progress=None,
    )  # fmt: skip
    pool = llm.engine.runner.pool
    (key,) = (key for key in pool.keys if key[0] == "step" and key[1].tokens == WIDEN_ROWS)  # type: ignore[index]
    program = pool.executable(key)
    assert ("f32[1024,128]" in program.as_text()) != native, "the kernel of gate and up"
    widened = 4 * sum(value.size for path, value in llm.engine.runner.params.items() if path.endswith(".kernel"))
    assert program.memory_analysis().temp_size_in_bytes < widened / 3


@pytest.mark.parametrize(
    ("rows", "dtype", "platform", "turned"),
    [
        (1, "float32", "cpu", False),
        (2, "float32", "cpu", True),
        (64, "float32", "cpu", True),
        (65, "float32", "cpu", False),
        (8, "bfloat16", "cpu", False),
        (8, "float32", "tpu", False),
    ],
)
def test_few_rows_of_float32_are_multiplied_with_the_kernel_on_the_left_on_cpus(
    rows: int, dtype: str, platform: str, turned: bool
) -> None:
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.standard_normal((rows, 48)), dtype)
    kernel = jnp.asarray(generator.standard_normal((3, 8, 48)), dtype)

    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return linear(x, kernel, platform=platform, out_dtype=jnp.dtype(jnp.float32))

    assert ("optimization_barrier" in str(jax.make_jaxpr(product)(x, kernel))) == turned
    expected = np.einsum("ri,abi->rab", *(np.asarray(each, np.float64) for each in (x, kernel)))
    np.testing.assert_allclose(jax.jit(product)(x, kernel), expected, rtol=1e-5, atol=1e-4)
    gradient = jax.grad(lambda kernel: product(x, kernel).sum())(kernel)
    row = np.broadcast_to(np.asarray(x, np.float64).sum(0), kernel.shape)
    np.testing.assert_allclose(np.asarray(gradient, np.float64), row, rtol=2e-2, atol=2e-2)
