"""Operations bear the name of their part, which changes neither values nor programs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from ttpu_jax.aot.schedule import estimate
from ttpu_jax.ops.parts import OTHER, Part, part, part_of


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("jit(decode)/part=mlp/dot_general", "mlp"),
        ("jit(decode)/part=attention_projections/part=rope/mul", "rope"),
        ("jit(train)/transpose(jvp(part=loss))/part=head/dot_general", "head (backward)"),
        ("jit(decode)/while/body/add", OTHER),
        ("", OTHER),
    ],
)
def test_an_operation_belongs_to_the_innermost_part_of_its_name(operation: str, expected: str) -> None:
    assert part_of(operation) == expected


def test_names_of_parts_survive_in_a_compiled_program_with_gradients() -> None:
    @part(Part.MLP)
    def mlp(x: jax.Array, kernel: jax.Array) -> jax.Array:
        with part(Part.NORM):
            x = x / jnp.linalg.norm(x)
        return x @ kernel

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(mlp(x, kernel) ** 2)

    x, kernel = jnp.ones((8, 4)), jnp.ones((4, 4))
    text = jax.jit(jax.grad(loss, argnums=1)).lower(x, kernel).compile().as_text()
    names = {part_of(line.split('op_name="')[1].split('"')[0]) for line in text.splitlines() if 'op_name="' in line}
    assert {"mlp", "norm", "mlp (backward)"} <= names


def test_parts_change_no_program() -> None:
    def plain(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x)

    def lines(function: Callable[[jax.Array], jax.Array]) -> list[str]:
        text = jax.jit(function).lower(jnp.ones((4, 4))).as_text()
        return [line for line in text.splitlines() if "@jit_" not in line and "module" not in line]

    assert lines(plain) == lines(part(Part.MLP)(plain))


def line(name: str, made: str, rest: str = "", operation: str = "", config: str = "") -> str:
    """An instruction of a scheduled program."""
    metadata = f', metadata={{op_name="jit(f)/{operation}"}}' if operation else ""
    return f"  {name} = {made}{rest}{metadata}{f', backend_config={{{config}}}' if config else ''}"


FUSED = ", kind=kLoop, calls=%g"
PROGRAM = "\n".join(
    (
        "HloModule m, is_scheduled=true, num_partitions=4",
        "",
        "ENTRY %main (p: f32[8]) -> f32[8] {",
        line("%p", "f32[8] parameter(0)"),
        line("%a", "f32[8] fusion(%p)", FUSED, "part=mlp/mul", '"estimated_cycles":"1500"'),
        line("%b", "f32[8] fusion(%a)", FUSED, "part=mlp/add", '"estimated_cycles":"3000"'),
        line(
            "%k",
            "f32[8] custom-call(%b)",
            ', custom_call_target="tpu_custom_call"',
            "part=attention/call",
            '"cost_estimate":{"flops":"0","bytes_accessed":"819000000"}',
        ),
        line("%r", "f32[8388608] all-reduce(%k)", ", replica_groups={{0,1,2,3}}, to_apply=%g", "part=residual/add"),
        line("ROOT %c", "f32[8] fusion(%r)", FUSED, config='"estimated_cycles":"750"'),
        "}",
        "",
    )
)


def test_an_estimate_is_divided_among_parts() -> None:
    result = estimate(PROGRAM, "v5e")
    parts = {one.part: one for one in result.parts}
    assert set(parts) == {"mlp", "attention", "residual", OTHER}
    assert parts["mlp"].breakdown.compute == parts["mlp"].seconds == pytest.approx(4500 / 1.5e9)
    assert parts["attention"].kernels == parts["attention"].seconds == pytest.approx(1e-3)
    assert parts["residual"].breakdown.collective == pytest.approx(result.breakdown.collective)
    assert parts[OTHER].seconds == pytest.approx(750 / 1.5e9)
    assert sum(one.seconds for one in result.parts) == pytest.approx(result.seconds_with_kernels)
    assert result.parts[0].part in ("attention", "residual") and result.parts[-1].part == OTHER


SPLASH = (
    ', custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,BLOCKS,4]{2,1,0}, s8[1,BLOCKS,4]{2,1,0}, '
    "bf16[4,2048,128]{2,1,0}, bf16[1,2048,128]{2,1,0}, bf16[1,2048,128]{2,1,0}}"
)
ALONE = "HloModule m, is_scheduled=true\n\nENTRY %main (p: f32[]) -> f32[] {{\n  %p = f32[] parameter(0)\n{}\n}}\n"


@pytest.mark.parametrize(("name", "products"), [("splash_mha_fwd", 2), ("splash_mha_dq", 3), ("splash_mha_dkv", 4)])
@pytest.mark.parametrize(("blocks", "share"), [(1, 1.0), (4, 5 / 8)])
def test_splash_attention_takes_what_its_blocks_multiply(name: str, products: int, blocks: int, share: float) -> None:
    operands = SPLASH.replace("BLOCKS", str(blocks))
    kernel = line(f"ROOT %{name}_residuals.1", "bf16[4,2048,128] custom-call(%p)", operands)
    text = ALONE.format(kernel)
    (found,) = estimate(text, "v5e").unmodelled
    assert found.roofline_seconds == pytest.approx(2 * products * share * 4 * 2048 * 2048 * 128 / 197e12)


def test_other_kernels_have_no_estimate() -> None:
    kernel = line("ROOT %mine.1", "bf16[4,2048,128] custom-call(%p)", SPLASH.replace("BLOCKS", "1"))
    text = ALONE.format(kernel)
    (found,) = estimate(text, "v5e").unmodelled
    assert found.roofline_seconds is None


@pytest.mark.parametrize(("scope", "share"), [("", 1.0), ("part=experts/filled=0.2500/", 0.25)])
def test_flops_of_kernels_count_for_the_rows_that_are_there_on_average(scope: str, share: float) -> None:
    stated = (
        ', custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/transpose(jvp(SCOPE))/mine"}, '
        'backend_config={"cost_estimate":{"flops":"197000000000","transcendentals":"0","bytes_accessed":"8"}}'
    )
    text = ALONE.format(line("ROOT %mine.1", "bf16[4,128] custom-call(%p)", stated.replace("SCOPE", scope)))
    (found,) = estimate(text, "v5e").unmodelled
    assert found.roofline_seconds == pytest.approx(share * 1e-3)
