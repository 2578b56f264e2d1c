"""Options that commands share which open an engine, and their conversion to the options that
`ttpu_serve.api.open_engine.read_options` takes. `ttpu serve` and `ttpu compile` take the same, so that compiled
programs match the served ones."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ttpu_core.errors import RequestError
from ttpu_core.sharding.parallelism import written_rules

ENGINE = "Engine"
GIB = 2**30


def _engine(metavar: str, text: str, **other: Any) -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=ENGINE, **other)


def _switch(name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=ENGINE)


@dataclass(frozen=True)
class StepOptions:
    """The size and kind of an engine's steps."""

    max_model_len: Annotated[int | None, _engine("N", "Tokens of a prompt and its output.", min=2)] = None
    max_num_seqs: Annotated[int | None, _engine("N", "Requests that run at once.", min=1)] = None
    max_num_batched_tokens: Annotated[int | None, _engine("N", "Tokens of one step.", min=1)] = None
    kv_cache_dtype: Annotated[str, _engine("DTYPE", "auto, bfloat16, float32, fp8, int8.")] = "auto"
    speculative: Annotated[
        str | None,
        _engine("METHOD", "Guess tokens ahead: ngram:4 from the text so far, or a smaller checkpoint's path."),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The `EngineConfig` fields that were given, by name."""
        given = {
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_dtype": self.kv_cache_dtype,
            "speculative": self.speculative,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class EngineOptions(StepOptions):
    """Everything of an engine that decides which programs it compiles."""

    kv_cache_memory: Annotated[float | None, _engine("GIB", "Of each device, else what is free.")] = None
    memory_utilization: Annotated[float | None, _engine("SHARE", "Of the free memory, for pages: 0.9.")] = None
    page_size: Annotated[int | None, _engine("N", "Tokens of a page.", min=1)] = None
    no_prefix_caching: Annotated[bool, _switch("--no-prefix-caching", "Compute every prompt anew.")] = False
    no_chunked_prefill: Annotated[bool, _switch("--no-chunked-prefill", "Compute each prompt in one step.")] = False
    enable_lora: Annotated[
        list[str] | None,
        typer.Option(
            "--enable-lora",
            "--lora-modules",
            metavar="NAME=PATH",
            help="Serve a LoRA adapter as a model of that name; repeat for more.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    max_adapters: Annotated[int | None, _engine("N", "LoRA adapters at once; else those given.", min=1)] = None
    max_lora_rank: Annotated[int | None, _engine("N", "Of adapters that are loaded later.", min=1)] = None
    max_logprobs: Annotated[int | None, _engine("N", "Log-probabilities of a token, at most.", min=1)] = None
    residual_stream: Annotated[
        str,
        _engine("FORM", "auto cuts the rows of long inputs over the tensor axis; whole keeps them on every device."),
    ] = "auto"

    def arguments(self) -> dict[str, Any]:
        """The fields of `EngineConfig` and of the backend's `LoadOptions` that were given, by name.

        Raises:
            RequestError: an adapter is not NAME=PATH, or the memory is not positive and finite.
        """
        memory = self.kv_cache_memory
        if memory is not None and not 0 < memory < float("inf"):
            raise RequestError(
                f"--kv-cache-memory {memory:g} was given, but GiB above 0 are needed, as in 4.5: correct it."
            )
        given = {
            "kv_cache_memory": None if memory is None else max(1, int(memory * GIB)),
            "memory_utilization": self.memory_utilization,
            "page_size": self.page_size,
            "enable_prefix_caching": not self.no_prefix_caching,
            "enable_chunked_prefill": not self.no_chunked_prefill,
            "adapters": adapters(self.enable_lora),
            "max_adapters": self.max_adapters,
            "max_lora_rank": self.max_lora_rank,
            "max_logprobs": self.max_logprobs,
            "residual_stream": None if self.residual_stream == "auto" else self.residual_stream,
        }
        return super().arguments() | {name: value for name, value in given.items() if value is not None}


def words(arguments: Mapping[str, Any]) -> list[str]:
    """Return `arguments` of engine and loading as command line words, without defaults."""
    typed: list[str] = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if name in ("enable_prefix_caching", "enable_chunked_prefill"):
            typed += [] if value else [option.replace("--enable", "--no")]
        elif name == "kv_cache_memory":
            typed += [option, f"{value / GIB:.10g}"]
        elif name == "sharding_rules":
            typed += [option, written_rules(value)]
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
