"""Model types without a plugin run as transformers' own code: same logits, same tokens, wrong ones refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

from ttpu_any.steps import Manner
from ttpu_core.auto import AutoModelForTPU
from ttpu_core.errors import RequestError, UnsupportedError

TINY: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
XGLM = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}


GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
DECODER = {"is_decoder": True, "pad_token_id": 1, "bos_token_id": 0}


def write(folder: Path, model_type: str, **keys: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**TINY | keys)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model_type", "keys"),
    [("biogpt", {}), ("xglm", XGLM), ("camembert", DECODER), ("openai-gpt", GPT)],
    ids=["biogpt", "xglm", "camembert", "without a cache"],
)
def test_logits_and_greedy_tokens_equal_transformers(model_type: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """CamemBERT counts positions from the one after padding's, which transformers' `generate` passes as 0: so the
    expected tokens are those of the model alone."""
    expected = write(tmp_path, model_type, **keys)
    model = AutoModelForTPU.from_pretrained(tmp_path, backend="jax")
    ids = np.random.default_rng(1).integers(3, 61, (2, 11))
    with torch.no_grad():
        logits = expected(torch.tensor(ids)).logits.numpy()
        tokens = torch.tensor(ids)
        for _ in range(6):
            tokens = torch.cat([tokens, expected(tokens).logits[:, -1:].argmax(-1)], 1)
    np.testing.assert_allclose(model(ids).logits, logits, atol=5e-5)
    np.testing.assert_array_equal(model.generate(ids, max_new_tokens=6, ignore_eos=True), tokens.numpy())


@pytest.mark.torch
def test_the_rules_of_generate_hold_for_a_stock_model(tmp_path: Path) -> None:
    expected = write(tmp_path, "biogpt")
    model = AutoModelForTPU.from_pretrained(tmp_path, backend="jax")
    ids = torch.tensor(np.random.default_rng(1).integers(3, 61, (2, 11)))
    arguments = {"no_repeat_ngram_size": 1, "suppress_tokens": [7], "max_new_tokens": 6, "pad_token_id": 1}
    for beams in (1, 2):
        arguments |= {"num_beams": beams, "eos_token_id": 60}
        tokens = expected.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **arguments)
        np.testing.assert_array_equal(model.generate(ids.numpy(), **arguments), tokens.numpy())


@pytest.mark.torch
@pytest.mark.parametrize("model_type", ["biogpt", "bert"])
def test_each_of_several_processes_can_read_the_results(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, model_type)
    """What a program computes for the host is asked for whole on every device."""
    asked: list[Any] = []
    jit = jax.jit

    def recorded(function: Any, **options: Any) -> Any:
        if "out_shardings" in options:
            out = options["out_shardings"]
            asked.append(out if isinstance(out, tuple) else (out,))
        return jit(function, **options)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "jit", recorded)
    model = AutoModelForTPU.from_pretrained(tmp_path, backend="jax")
    model(np.full((1, 11), 5))
    if model_type == "biogpt":
        model.generate(np.full((1, 11), 5), max_new_tokens=2)
    assert len(asked) > 2
    assert all(model.programs.placement.whole() in each for each in asked)


@pytest.mark.torch
def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.BartConfig(
        vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    transformers.BartForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"'bart' has an encoder and a decoder"):
        AutoModelForTPU.from_pretrained(tmp_path, backend="jax")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model_type", "keys", "manner"),
    [("bert-generation", {}, Manner("none", decode_mask=False)), ("camembert", DECODER, Manner())],
    ids=["ahead", "positions"],
)
def test_a_model_that_would_be_wrong_is_refused(
    model_type: str, keys: dict[str, Any], manner: Manner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder looks ahead, and CamemBERT is given positions that are not its own."""
    write(tmp_path, model_type, **keys)
    monkeypatch.setattr("ttpu_any.steps.position_offset", lambda model: 0)
    monkeypatch.setattr("ttpu_any.steps.MANNERS", (manner,))  # the others fail too, and take time
    with pytest.raises(UnsupportedError, match=r"a prefill gives logits that are \d\.\d+ standard deviations"):
        AutoModelForTPU.from_pretrained(tmp_path, backend="jax")


@pytest.mark.torch
def test_what_needs_a_plugin_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "biogpt")
    with pytest.raises(RequestError, match=r"quantization='int8' was asked for, but no plugin describes"):
        AutoModelForTPU.from_pretrained(tmp_path, backend="jax", quantization="int8")
    with pytest.raises(RequestError, match=r"without=\('rope_product',\) was asked for, but no plugin describes"):
        AutoModelForTPU.from_pretrained(tmp_path, backend="jax", without="rope_product")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("biogpt", {}),
        ("aria_text", {"num_key_value_heads": 4, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    ],
    ids=["layer norm", "experts"],
)
def test_bfloat16_weights_stay_in_bfloat16(model_type: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """The operations that torch uses differ with the dtype: its norms' statistics, its grouped products."""
    expected = write(tmp_path, model_type, **keys).to(torch.bfloat16)
    expected.save_pretrained(tmp_path)
    model = AutoModelForTPU.from_pretrained(tmp_path, backend="jax")
    assert model.dtype == "bfloat16"
    ids = np.random.default_rng(1).integers(3, 61, (2, 11))
    with torch.no_grad():
        logits = expected.float()(torch.tensor(ids)).logits.numpy()
    found = np.asarray(model(ids).logits, np.float32)
    assert np.abs(found - logits).mean() < 0.05 * logits.std()
