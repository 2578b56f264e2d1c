"""Engine options that `ttpu serve` and `ttpu compile` share, so that compiled programs match the served ones, and their
conversion to the options that `ttpu_serve.api.open_engine.read_options` takes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ttpu_core.errors import RequestError

ENGINE = "Engine"
GIB = 2**30

MaxModelLen = Annotated[
    int | None, typer.Option(min=2, metavar="N", help="Tokens of a prompt and its output.", rich_help_panel=ENGINE)
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Requests that run at once.", rich_help_panel=ENGINE)
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Tokens of one step.", rich_help_panel=ENGINE)
]
KvCacheDtype = Annotated[
    str, typer.Option(metavar="DTYPE", help="auto, bfloat16, float32, fp8, int8.", rich_help_panel=ENGINE)
]
KvCacheMemory = Annotated[
    float | None, typer.Option(metavar="GIB", help="Of each device, else what is free.", rich_help_panel=ENGINE)
]
PageSize = Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens of a page.", rich_help_panel=ENGINE)]
NoPrefixCaching = Annotated[
    bool, typer.Option("--no-prefix-caching", help="Compute every prompt anew.", rich_help_panel=ENGINE)
]
NoChunkedPrefill = Annotated[
    bool, typer.Option("--no-chunked-prefill", help="Compute each prompt in one step.", rich_help_panel=ENGINE)
]
Speculative = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help="Guess tokens ahead: ngram:4 from the text so far, or a smaller checkpoint's path.",
        rich_help_panel=ENGINE,
    ),
]
EnableLora = Annotated[
    list[str] | None,
    typer.Option(
        "--enable-lora",
        "--lora-modules",
        metavar="NAME=PATH",
        help="Serve a LoRA adapter as a model of that name; repeat for more.",
        rich_help_panel=ENGINE,
    ),
]
MaxAdapters = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="LoRA adapters at once; else those given.", rich_help_panel=ENGINE),
]
MaxLoraRank = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Of adapters that are loaded later.", rich_help_panel=ENGINE)
]


def engine_arguments(
    *,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    kv_cache_dtype: str,
    kv_cache_memory: float | None,
    page_size: int | None,
    no_prefix_caching: bool,
    no_chunked_prefill: bool,
    speculative: str | None,
    enable_lora: Sequence[str] | None,
    max_adapters: int | None = None,
    max_lora_rank: int | None = None,
    dtype: str,
    parallelism_strategy: str | None,
    plan: str | None,
    attn_implementation: str,
    quantization: str | None = None,
    patch_pack: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the given options by the names that `read_options` takes.

    Args:
        max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache_dtype, page_size, speculative: the `EngineConfig`
            fields of the same names.
        kv_cache_memory: GiB per device for the KV cache.
        no_prefix_caching, no_chunked_prefill: turn the feature off.
        enable_lora: NAME=PATH texts of LoRA adapters.
        max_adapters, max_lora_rank: room for LoRA adapters.
        dtype, parallelism_strategy, plan, attn_implementation, quantization: the `LoadOptions` fields of the same
            names.
        patch_pack: names of patch packs.

    Raises:
        RequestError: an adapter is not NAME=PATH, or the memory is not positive and finite.
    """
    if kv_cache_memory is not None and not 0 < kv_cache_memory < float("inf"):
        raise RequestError(
            f"--kv-cache-memory {kv_cache_memory:g} was given, but GiB above 0 are needed, as in 4.5: correct it."
        )
    arguments = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_dtype": kv_cache_dtype,
        "kv_cache_memory": None if kv_cache_memory is None else max(1, int(kv_cache_memory * GIB)),
        "page_size": page_size,
        "enable_prefix_caching": not no_prefix_caching,
        "enable_chunked_prefill": not no_chunked_prefill,
        "speculative": speculative,
        "adapters": adapters(enable_lora),
        "max_adapters": max_adapters,
        "max_lora_rank": max_lora_rank,
        "dtype": dtype,
        "parallelism_strategy": parallelism_strategy,
        "plan": plan,
        "attn_implementation": None if attn_implementation == "auto" else attn_implementation,
        "quantization": quantization,
        "patch_packs": patch_pack,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def words(arguments: Mapping[str, Any]) -> list[str]:
    """Return the options of `engine_arguments` as command line words, without defaults."""
    typed: list[str] = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if name in ("enable_prefix_caching", "enable_chunked_prefill"):
            typed += [] if value else [option.replace("--enable", "--no")]
        elif name == "kv_cache_memory":
            typed += [option, f"{value / GIB:.10g}"]
        elif name == "patch_packs":
            typed += [word for pack in value for word in ("--patch-pack", shlex.quote(pack))]
        elif name == "adapters":
            pairs = [f"{adapter}={path}" for adapter, path in value.items()]
            typed += [word for pair in pairs for word in ("--enable-lora", shlex.quote(pair))]
        elif value != "auto":
            typed += [option, shlex.quote(str(value))]
    return typed


def adapters(given: Sequence[str] | None) -> dict[str, str] | None:
    """Convert `name=path` texts to a mapping, or None if there are none.

    Raises:
        RequestError: a text is not NAME=PATH, or a name occurs twice.
    """
    if not given:
        return None
    found: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in found:
            raise RequestError(
                f"--enable-lora {text} was given, but NAME=PATH with a name of its own is needed, as in "
                "poet=./poet-lora: correct it."
            )
        found[name] = path
    return found
