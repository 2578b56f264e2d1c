"""Stock models whose attention is a kernel: equal to the stock model on the host, whatever the mask."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla")
pytest.importorskip("ttpu_jax")

from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from xla_spmd import said

from ttpu_core.errors import UnsupportedError
from ttpu_torch_xla.attention import KERNELS, interface, patches, transformers_name
from ttpu_torch_xla.attention.interface import attention
from ttpu_torch_xla.attention.mask import kernel_mask, meaning_of
from ttpu_torch_xla.attention.reference import reference
from ttpu_torch_xla.patches.patch import applied
from ttpu_torch_xla.runtime import current

pytestmark = pytest.mark.torch

SEQ = 136  # more than one block of 128, and no multiple of it
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    current().device()
    with applied([patch for name in KERNELS for patch in patches(name)]):
        yield


@dataclass
class Calls:
    """Which way attention went."""

    kernel: list[str] = field(default_factory=list)
    reference: int = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen, attend, torch_reference = Calls(), interface.attend, interface.reference

    def kernel(name: str, *arguments: Any, **named: Any) -> Any:
        seen.kernel.append(name)
        return attend(name, *arguments, **named)

    def plain(*arguments: Any, **named: Any) -> Any:
        seen.reference += 1
        return torch_reference(*arguments, **named)

    monkeypatch.setattr(interface, "attend", kernel)
    monkeypatch.setattr(interface, "reference", plain)
    return seen


def pair(kind: Any, config: Any) -> tuple[Any, Any]:
    """The stock model on the host, and its copy on the XLA device."""
    torch.manual_seed(0)
    stock = kind(config).eval()
    other = kind(deepcopy(config)).eval()
    other.load_state_dict(stock.state_dict())
    other.to(current().device())
    other.tie_weights()
    return stock, other


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    return pair(LlamaForCausalLM, LlamaConfig(**SIZES))


@pytest.fixture(scope="module")
def gemma2() -> tuple[Any, Any]:
    # Windows of 50 on the first layer, full attention on the second, a cap that is felt, and a scale of its own.
    return pair(
        Gemma2ForCausalLM,
        Gemma2Config(**SIZES, sliding_window=50, attn_logit_softcapping=3.0, query_pre_attn_scalar=17),
    )


@pytest.fixture(scope="module")
def qwen3() -> tuple[Any, Any]:
    return pair(Qwen3ForCausalLM, Qwen3Config(**SIZES))


@pytest.fixture(scope="module")
def llama4() -> tuple[Any, Any]:
    sizes = {**SIZES, "intermediate_size_mlp": 96, "num_local_experts": 2}
    config = Llama4TextConfig(**sizes, attention_chunk_size=40, no_rope_layers=[1, 0], moe_layers=[])
    return pair(Llama4ForCausalLM, config)


@pytest.fixture(scope="module")
def models(llama: Any, gemma2: Any, qwen3: Any, llama4: Any) -> dict[str, tuple[Any, Any]]:
    return {"llama": llama, "gemma2": gemma2, "qwen3": qwen3, "llama4": llama4}


def tokens(batch: int = 2, seq: int = SEQ) -> torch.Tensor:
    return torch.randint(1, 128, (batch, seq), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> torch.Tensor:
    mask = torch.ones(2, SEQ, dtype=torch.long)
    mask[0, slice(0, 37) if side == "left" else slice(SEQ - 37, SEQ)] = 0
    return mask


def logits(models: tuple[Any, Any], name: str, ids: torch.Tensor, **given: torch.Tensor) -> tuple[Any, Any]:
    """Of the stock model and of the other one with the attention of that name."""
    stock, other = models
    device = current().device()
    other.set_attn_implementation(transformers_name(name))
    with torch.no_grad():
        expected = stock(ids, use_cache=False, **given).logits
        there = {key: value.to(device) for key, value in given.items()}
        found = other(ids.to(device), use_cache=False, **there).logits.cpu()
    return expected, found


def assert_equal(expected: torch.Tensor, found: torch.Tensor, real: torch.Tensor | None = None) -> None:
    if real is not None:
        expected, found = expected[real.bool()], found[real.bool()]
    error = (expected - found).abs().max() / expected.abs().max()
    assert error < 1e-5, f"relative error {error:.2e}"


@pytest.mark.parametrize(
    ("family", "pad"),
    [("llama", "right"), ("gemma2", "none"), ("gemma2", "left"), ("qwen3", "left"), ("llama4", "left")],
)
def test_logits_with_splash_equal_the_stock_models(models: Any, calls: Calls, family: str, pad: str) -> None:
    mask = None if pad == "none" else padding(pad)
    given = {} if mask is None else {"attention_mask": mask}
    expected, found = logits(models[family], "splash_attention", tokens(), **given)
    assert calls == Calls(["splash_attention"] * 2, 0)
    assert_equal(expected, found, mask)


def test_flash_serves_the_layers_that_it_can(gemma2: Any, llama: Any, calls: Calls) -> None:
    assert_equal(*logits(llama, "xla_flash_attention", tokens(), attention_mask=padding("left")), padding("left"))
    assert calls == Calls(["xla_flash_attention"] * 2, 0)
    assert_equal(*logits(gemma2, "xla_flash_attention", tokens()))
    assert calls == Calls(["xla_flash_attention"] * 2, 2)


def packed_positions() -> torch.Tensor:
    lengths = [(70, 66), (50, 86)]
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


@pytest.mark.parametrize("family", ["gemma2", "llama4"])
def test_sequences_packed_into_a_row_do_not_see_each_other(models: Any, calls: Calls, family: str) -> None:
    expected, found = logits(models[family], "splash_attention", tokens(), position_ids=packed_positions())
    assert calls == Calls(["splash_attention"] * 2, 0)
    assert_equal(expected, found)


def test_segment_ids_say_the_same_as_positions_that_restart(llama: Any, calls: Calls) -> None:
    stock, other = llama
    ids, positions = tokens(), packed_positions()
    segments = (positions == 0).cumsum(-1)
    everything = torch.ones_like(ids)  # with it, transformers does not look for packed sequences
    device = current().device()
    with torch.no_grad():
        expected = stock(ids, position_ids=positions, use_cache=False).logits
        for name in ("splash_attention", "eager"):
            other.set_attn_implementation(name)
            found = other(
                ids.to(device),
                position_ids=positions.to(device),
                attention_mask=everything.to(device),
                segment_ids=segments.to(device),
                use_cache=False,
            ).logits.cpu()
            if name == "splash_attention":
                assert_equal(expected, found)
            else:  # without the kernel's interface they are dropped: the test would see it
                assert (expected - found).abs().max() > 1e-3
    assert calls == Calls(["splash_attention"] * 2, 0)


def test_a_mask_of_the_users_own_is_read(llama: Any, calls: Calls) -> None:
    own = torch.rand(2, 1, SEQ, SEQ, generator=torch.Generator().manual_seed(2)) < 0.5
    own = own | torch.eye(SEQ, dtype=torch.bool)
    additive = torch.where(own, 0.0, torch.finfo(torch.float32).min)
    stock, other = llama
    other.set_attn_implementation("splash_attention")
    with torch.no_grad():
        expected = stock(tokens(), attention_mask=additive, use_cache=False).logits
        for mask in (own, additive):
            found = other(tokens().to("xla"), attention_mask=mask.to("xla"), use_cache=False).logits
            assert_equal(expected, found.cpu())
    assert calls == Calls([], 4)


def test_a_mask_loses_its_meaning_where_it_is_changed() -> None:
    mask = kernel_mask(1, 8, 8, device="cpu")
    assert meaning_of(mask) is not None
    assert meaning_of(mask[:, :, -1:]) is None
    mask |= torch.ones_like(mask)
    assert meaning_of(mask) is None


def test_a_mask_function_that_is_not_known_is_read() -> None:
    from transformers.masking_utils import causal_mask_function, or_masks

    function = or_masks(causal_mask_function, lambda batch, head, query, key: key == 3)
    mask = kernel_mask(1, 8, 8, mask_function=function, device="xla")
    assert meaning_of(mask) is None
    assert bool(mask[0, 0, 0, 3])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_prefill_is_the_kernels_and_decoding_the_references(models: Any, calls: Calls, family: str) -> None:
    stock, other = models[family]
    other.set_attn_implementation("splash_attention")
    ids, device, mask = tokens(), current().device(), padding("left")
    more = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    with torch.no_grad():
        expected = stock(torch.cat([ids, ids[:, :1]], 1), attention_mask=more, use_cache=False).logits
        first = other(ids.to(device), attention_mask=mask.to(device), use_cache=True)
        assert calls == Calls(["splash_attention"] * 2, 0)
        second = other(ids[:, :1].to(device), attention_mask=more.to(device), past_key_values=first.past_key_values)
    assert calls == Calls(["splash_attention"] * 2, 2)
    assert_equal(expected, torch.cat([first.logits, second.logits], 1).cpu(), more)


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_gradients_with_splash_equal_the_stock_models(models: Any, calls: Calls, family: str) -> None:
    stock, other = models[family]
    other.set_attn_implementation("splash_attention")
    ids, mask = tokens(), padding("right")
    labels = ids.masked_fill(mask == 0, -100)
    device = current().device()
    stock(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    there = {"attention_mask": mask.to(device), "labels": labels.to(device)}
    other(ids.to(device), **there, use_cache=False).loss.backward()
    assert calls == Calls(["splash_attention"] * 2, 0)
    current().sync()
    found = dict(other.named_parameters())
    for name, one in stock.named_parameters():
        assert one.grad is not None
        error = (found[name].grad.cpu() - one.grad).abs().max() / one.grad.abs().max()
        assert error < 1e-4, f"{name}: relative error {error:.2e}"
    stock.zero_grad()
    other.zero_grad()


@dataclass
class Layer:
    """What an attention module is to an attention function."""

    ttpu: Any = None
    layer_idx: int = 0
    is_causal: bool = True


def arrays(queries: int = SEQ, keys: int = SEQ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(2, 4, queries, 32, generator=generator),
        torch.randn(2, 2, keys, 32, generator=generator),
        torch.randn(2, 2, keys, 24, generator=generator),
    )


def attend(mask: torch.Tensor | None, *tensors: torch.Tensor, layer: Any = None, **given: Any) -> torch.Tensor:
    """Splash attention on the device, of queries, keys and values on the host."""
    query, key, value = on_device(*tensors)
    return attention("splash_attention", layer or Layer(), query, key, value, mask, **given).cpu()


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(current().device()) for tensor in tensors]


def test_inference_mode_takes_the_kernel_too(calls: Calls) -> None:
    query, key, value = arrays()
    with torch.inference_mode():
        attend(kernel_mask(2, SEQ, SEQ, device=current().device()), query, key, value)
    assert calls == Calls(["splash_attention"], 0)


def test_the_reference_is_torchs_own_attention() -> None:
    query, key, value = arrays()
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=0.3
    )
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    found = reference(query, key, value, causal[None, None], scale=0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize("window", [None, 20])
def test_sinks_and_values_of_another_width_are_the_kernels_too(calls: Calls, window: int | None) -> None:
    query, key, value = arrays()
    sinks = torch.tensor([-1.0, 0.5, 1.0, 2.0])
    seen = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    expected = reference(query, key, value, seen[None, None], scale=0.2, softcap=5.0, sinks=sinks)
    found = attend(
        None, query, key, value, scaling=0.2, softcap=5.0, s_aux=sinks.to("xla"), sliding_window=window
    )
    assert calls == Calls(["splash_attention"], 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_empty_rest_of_a_cache_is_left_out(calls: Calls) -> None:
    query, key, value = arrays(SEQ, SEQ + 24)
    mask = kernel_mask(2, SEQ, SEQ + 24, attention_mask=padding("left").bool().to("xla"), device="xla")
    found = attend(mask, query, key, value)
    assert calls == Calls(["splash_attention"], 0)
    expected = reference(query, key, value, mask.cpu(), scale=32**-0.5)
    real = padding("left").bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)


def test_a_prefill_at_a_place_that_only_a_tensor_knows_is_the_references(calls: Calls) -> None:
    query, key, value = arrays(SEQ, SEQ + 24)
    mask = kernel_mask(2, SEQ, SEQ + 24, q_offset=torch.tensor(7, device="xla"), device="xla")
    found = attend(mask, query, key, value)
    assert calls == Calls([], 1)
    seen = torch.ones(SEQ, SEQ + 24, dtype=torch.bool).tril(7)
    torch.testing.assert_close(
        found, reference(query, key, value, seen[None, None], scale=32**-0.5), rtol=1e-5, atol=1e-5
    )


def test_cumulative_lengths_of_a_packed_row_are_segments(calls: Calls) -> None:
    query, key, value = arrays()
    cumulative = torch.tensor([0, 50, 90, SEQ])
    places = torch.bucketize(torch.arange(SEQ), cumulative, right=True)
    seen = places[:, None] == places[None, :]
    found = attend(None, query, key, value, layer=Layer(is_causal=False), cu_seq_lens_q=cumulative.to("xla"))
    assert calls == Calls(["splash_attention"], 0)
    torch.testing.assert_close(
        found, reference(query, key, value, seen[None, None], scale=32**-0.5), rtol=1e-5, atol=1e-5
    )


def test_segments_are_kept_where_the_mask_has_to_be_read(calls: Calls) -> None:
    query, key, value = arrays()
    own = torch.ones(2, 1, SEQ, SEQ, dtype=torch.bool).tril()
    segments = (torch.arange(SEQ)[None] >= 60).long().expand(2, -1)
    found = attend(own.to("xla"), query, key, value, segment_ids=segments.to("xla"))
    assert calls == Calls([], 1)
    seen = own & (segments[:, None, :, None] == segments[:, None, None, :])
    torch.testing.assert_close(
        found, reference(query, key, value, seen, scale=32**-0.5), rtol=1e-5, atol=1e-5
    )


def test_what_would_change_the_result_is_refused() -> None:
    query, key, value = on_device(*arrays(1, SEQ))
    with pytest.raises(UnsupportedError, match="segment_ids of 1 tokens were given with 136 keys"):
        attention("splash_attention", Layer(), query, key, value, None, segment_ids=torch.zeros(2, 1, device="xla"))
    with pytest.raises(UnsupportedError, match="sparse attention to chosen keys"):
        attention("splash_attention", Layer(), query, key, value, None, indices=torch.zeros(1))


def test_each_device_of_a_mesh_computes_its_rows_and_heads(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Forward and gradients over eight simulated devices; a process has as many as it started with."""
    told = said(tmp_path_factory)["attention"]
    assert (told["devices"], told["kernel_calls"]) == (8, len(told["errors"]))
    assert told["errors"] and all(error < 1e-5 for mesh in told["errors"].values() for error in mesh.values()), told
