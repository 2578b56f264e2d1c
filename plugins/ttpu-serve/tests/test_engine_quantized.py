"""An engine serves quantized weights: the tokens are those of the model's own `generate`, and a configuration may ask
for a quantized cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import llama_checkpoint

from ttpu import LLM, AutoModelForTPU, SamplingParams
from ttpu_core.errors import RequestError
from ttpu_core.loading import LoadOptions
from ttpu_core.quantization import QuantizationConfig
from ttpu_serve.api.engine_config import EngineConfig
from ttpu_serve.api.open_engine import with_quantized_cache


def test_an_engine_serves_what_generate_generates(tmp_path: Path) -> None:
    path = llama_checkpoint(tmp_path / "llama")
    prompt = [65, 66, 67, 68, 69]
    model = AutoModelForTPU.from_pretrained(path, dtype="float32", quantization="w4a16-g16-asym")
    alone = np.asarray(model.generate(np.array([prompt]), max_new_tokens=6, ignore_eos=True))[0, len(prompt) :]
    llm = LLM(
        path, dtype="float32", quantization="w4a16-g16-asym", max_model_len=32, max_num_seqs=2,
    max_num_batched_tokens=32 )
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == alone.tolist()


def test_a_quantized_cache_is_the_engines(tmp_path: Path) -> None:
    config = QuantizationConfig(kv_cache="int8")
    settings = with_quantized_cache(None, LoadOptions(quantization=config))
    assert settings is not None and settings.kv_cache_dtype == "int8"
    chosen = EngineConfig(kv_cache_dtype="fp8")
    assert with_quantized_cache(chosen, LoadOptions(quantization=config)) is chosen
    with pytest.raises(RequestError, match="only a serving engine quantizes keys and values"):
        AutoModelForTPU.from_pretrained(llama_checkpoint(tmp_path / "llama"), quantization=config)
