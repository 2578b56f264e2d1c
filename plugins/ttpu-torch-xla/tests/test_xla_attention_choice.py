"""Which attention a stock model gets, and what is refused before it is loaded."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

pytest.importorskip("torch_xla")
pytest.importorskip("ttpu_jax")

from ttpu_core import ModelConfig, default_registry
from ttpu_core.architecture import Architecture
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_torch_xla.attention import KERNELS, patches, transformers_name
from ttpu_torch_xla.attention.choice import attention_for, kernels
from ttpu_torch_xla.patches.patch import applied

pytestmark = pytest.mark.torch

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip


def architecture(model_type: str = "llama", **config: Any) -> Architecture:
    return default_registry().architecture(ModelConfig.from_dict({"model_type": model_type, **SIZES, **config}))


def test_auto_is_splash_on_a_tpu_and_the_models_own_code_elsewhere() -> None:
    assert attention_for(architecture(), "auto", "tpu") == ("splash_attention", ())
    assert attention_for(architecture(), "auto", "cpu") == ("eager", ())


@pytest.mark.parametrize(
    ("installed", "name"), [("0.0.21", "eager"), ("0.0.42", "splash_attention"), ("0.1", "splash_attention")]
)
def test_auto_is_splash_only_where_libtpu_reads_what_jax_writes(
    monkeypatch: pytest.MonkeyPatch, installed: str, name: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    monkeypatch.setattr(metadata, "requires", lambda _: ["numpy", 'libtpu==0.0.42.*; extra == "tpu"'])
    assert attention_for(architecture(), "auto", "tpu")[0] == name


def test_settings_come_in_one_order_for_every_layer() -> None:
    name, options = attention_for(
        architecture(), "splash_attention", "cpu", {"sa_block_q": 256, "sa_block_kv": 512, "sa_block_q_dq": None}
    )
    assert (name, options) == ("splash_attention", (("sa_block_kv", 512), ("sa_block_q", 256)))


@pytest.mark.parametrize("asked", ["splash_attention", "auto"])
def test_a_misspelt_setting_is_refused(asked: str) -> None:
    with pytest.raises(RequestError, match=r"the key 'sa_blokc_q', but the splash kernel takes sa_block_q, .* correct"):
        attention_for(architecture(), asked, "cpu", {"sa_blokc_q": 1024})


def test_a_block_that_is_no_multiple_of_128_is_refused() -> None:
    with pytest.raises(RequestError, match=r"sa_block_q=100, but a block of the splash kernel is a positive multiple"):
        attention_for(architecture(), "splash_attention", "cpu", {"sa_block_q": 100})


@pytest.mark.parametrize("asked", ["xla_flash_attention", "eager", "sdpa"])
def test_settings_for_an_attention_without_any_are_refused(asked: str) -> None:
    with pytest.raises(RequestError, match=r"attention_config sets sa_block_q, but .* no settings"):
        attention_for(architecture(), asked, "cpu", {"sa_block_q": 1024})


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(RequestError, match=r"'flashy' was asked for, but there is none: use auto, eager, splash_atten"):
        attention_for(architecture(), "flashy", "cpu")


def test_a_kernel_that_serves_no_layer_is_refused() -> None:
    capped = architecture("gemma2", sliding_window=16, attn_logit_softcapping=5.0)
    with pytest.raises(UnsupportedError, match=r"'xla_flash_attention' was asked for, but it serves no layer"):
        attention_for(capped, "xla_flash_attention", "tpu")


def test_info_says_what_serves_each_kind_of_layer() -> None:
    told = kernels(architecture("gemma2", sliding_window=16))
    assert set(told) == {"full attention", "sliding attention"}
    assert all("splash_attention for prefill and training" in one for one in told.values())


@pytest.mark.parametrize("name", KERNELS)
def test_transformers_knows_a_kernel_and_its_mask_while_its_patches_are_in_place(name: str) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    known = transformers_name(name)
    with applied(patches(name)):
        assert known in FUNCTIONS and known in MASKS
    assert known not in FUNCTIONS and known not in MASKS
    assert patches("sdpa") == ()
