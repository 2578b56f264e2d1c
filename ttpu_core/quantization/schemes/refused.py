"""Checkpoint schemes that are not read, each with what to do instead."""

from __future__ import annotations

from ttpu_core.errors import RequestError, UnsupportedError

ELSEWHERE = {
    "bitsandbytes": "its weights are stored for CUDA kernels",
    "bitnet": "its ternary weights need kernels of their own",
    "quark": "its files are written for AMD's kernels",
    "hqq": "its files hold pickled meta data",
    "eetq": "its weights are stored for CUDA kernels",
    "quanto": "its files hold pickled tensors",
    "aqlm": "its codebooks need kernels of their own",
    "quip": "its codebooks need kernels of their own",
    "higgs": "its lattices need kernels of their own",
    "vptq": "its codebooks need kernels of their own",
    "spqr": "its sparse outliers need kernels of their own",
    "fbgemm_fp8": "its weights are stored for CUDA kernels",
    "torchao": "its files hold pickled tensors",
    "auto-round": "its own layout is not documented",
    "gguf": "GGUF files are read by llama.cpp",
}
"""Scheme → why it is not read."""

READ = "compressed-tensors, gptq, awq, fp8, mxfp4"


def refuse(source: str, method: str) -> UnsupportedError:
    """The error for a scheme that is not read."""
    reason = ELSEWHERE.get(method, "this scheme is not known here")
    return UnsupportedError(
        f"{source} is quantized by {method!r}, but {READ} are read ({reason}): take one of those, or the original "
        "weights with quantization='w4a16-g128' (or another format), which quantizes them while they are loaded."
    )


def refuse_again(source: str, scheme: str, asked: object) -> RequestError:
    """The error for quantizing a checkpoint that is quantized in this scheme."""
    return RequestError(
        f"quantization={str(asked)!r} was asked for, but {source} is quantized already ({scheme}): leave it out, or "
        "take the original weights."
    )
