"""Options that commands share: typer turns each alias below into an option, and `with_option_groups` each field of
`Loading` and `Decoding`. Values that cannot be are refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.errors import RequestError
from ttpu_core.generation.ranges import FILTERS_OFF, RANGES
from ttpu_core.sharding.parallelism import parse_rules

if TYPE_CHECKING:
    from ttpu_core.loading import LoadOptions

SAMPLING, MODEL = "Sampling", "Model and devices"

CheckpointPath = Annotated[
    str | None,
    typer.Argument(metavar="CHECKPOINT", help="A directory with config.json and safetensors, or a Hub id org/name."),
]
WeightsDir = Annotated[
    str | None,
    typer.Option("--weights-dir", metavar="DIR", help="The same as CHECKPOINT.", rich_help_panel=MODEL),
]
Backend = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The installed backend that runs the model.", rich_help_panel=MODEL),
]
PatchPacks = Annotated[
    list[str] | None,
    typer.Option("--patch-pack", metavar="NAME", help="Apply a patch pack; repeat for more.", rich_help_panel=MODEL),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Neither progress nor timings on stderr.")]


@dataclass(frozen=True)
class Loading:
    """How a checkpoint is loaded."""

    dtype: Annotated[
        str,
        typer.Option(metavar="DTYPE", help="float32, bfloat16, float16, or auto: as stored.", rich_help_panel=MODEL),
    ] = "auto"
    parallelism_strategy: Annotated[
        str | None,
        typer.Option(
            "--parallelism-strategy",
            "--sharding-strategy",
            "--mesh",
            metavar="STRATEGY",
            help="How to shard the model over devices: fsdp, dp, mp, 2d, 3d, auto, 2x4, or data=2,tensor=4.",
            rich_help_panel=MODEL,
        ),
    ] = None
    plan: Annotated[
        str | None,
        typer.Option("--plan", metavar="FILE", help="The same, as ttpu plan --save wrote it.", rich_help_panel=MODEL),
    ] = None
    sharding_rules: Annotated[
        str | None,
        typer.Option(
            metavar="RULES",
            help="Logical axes, and the mesh axes that shard them in place of the usual ones: expert=tensor.",
            rich_help_panel=MODEL,
        ),
    ] = None
    attn_implementation: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The attention that runs: auto, or a name that the backend knows.",
            rich_help_panel=MODEL,
        ),
    ] = "auto"
    patch_pack: PatchPacks = None
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Quantize the weights while loading: w8a16, w8a8, w4a16-g128, w4a16-g128-asym, fp8, mxfp4.",
            rich_help_panel=MODEL,
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The fields of `LoadOptions` that were given, by name."""
        given = {
            "dtype": self.dtype,
            "parallelism_strategy": self.parallelism_strategy,
            "sharding_rules": None if self.sharding_rules is None else parse_rules(self.sharding_rules),
            "plan": self.plan,
            "attn_implementation": None if self.attn_implementation == "auto" else self.attn_implementation,
            "patch_packs": self.patch_pack,
            "quantization": self.quantization,
        }
        return {name: value for name, value in given.items() if value is not None}

    def options(self) -> LoadOptions:
        """The same as `LoadOptions`."""
        from ttpu_core.loading import LoadOptions

        return LoadOptions(**self.arguments())


# Typer could check them too, but its answer to NaN ("should be greater than or equal to 0") explains nothing.
NUMBERS = ("max_new_tokens", "max_length", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
           "presence_penalty", "frequency_penalty", "seed")  # fmt: skip


def _sampling(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=SAMPLING)


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen and when to stop, as the user asked; None leaves it to the checkpoint's generation config,
    then to the backend."""

    max_new_tokens: Annotated[int | None, _sampling("N", "The most tokens to add.")] = None
    max_length: Annotated[int | None, _sampling("N", "The same, prompt included.")] = None
    temperature: Annotated[float | None, _sampling("T", "Sample from logits / T; 0: do not sample.")] = None
    top_k: Annotated[int | None, _sampling("K", "Among the K likeliest (50); 0: all.")] = None
    top_p: Annotated[float | None, _sampling("P", "Among the likeliest that sum to P.")] = None
    min_p: Annotated[float | None, _sampling("P", "Not below P times the likeliest.")] = None
    repetition_penalty: Annotated[float | None, _sampling("X", "Above 1: seen tokens become unlikelier.")] = None
    presence_penalty: Annotated[float | None, _sampling("X", "Subtracted once from generated tokens.")] = None
    frequency_penalty: Annotated[float | None, _sampling("X", "Subtracted per occurrence.")] = None
    seed: Annotated[int | None, _sampling("N", "Makes sampling repeatable.")] = None
    stop: Annotated[list[str] | None, _sampling("TEXT", "End before this text; repeat for more.")] = None
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same as --temperature 0.", rich_help_panel=SAMPLING)
    ] = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RequestError: a value is out of range, or two options contradict each other.
        """
        for name in NUMBERS:
            value, allowed = getattr(self, name), RANGES[name]
            if value is not None and not allowed.holds(value):
                option = f"--{name.replace('_', '-')} {value}"
                raise RequestError(f"{option} was given, but {allowed.allowed} is needed: correct it, or leave it out.")
        if self.deterministic and self.temperature:
            raise RequestError(
                f"--deterministic and --temperature {self.temperature:g} were both given, but a temperature above 0 "
                "means sampling: leave one of them out."
            )
        if self.max_new_tokens is not None and self.max_length is not None:
            raise RequestError(
                f"--max-new-tokens {self.max_new_tokens} and --max-length {self.max_length} were both given, but the "
                "first counts the output and the second prompt and output together: pass one of them."
            )
        if "" in (self.stop or ()):
            raise RequestError("--stop was given an empty text, which every output contains: pass some text.")

    def samples(self, generation_config: Mapping[str, Any]) -> bool:
        """Whether tokens are drawn: a temperature decides, then a top-k, top-p or min-p that leaves tokens out, then
        the checkpoint."""
        if self.deterministic:
            return False
        if self.temperature is not None:
            return self.temperature > 0
        if any(getattr(self, name) not in (None, off) for name, off in FILTERS_OFF.items()):
            return True
        return generation_config.get("do_sample") is True

    def arguments(self, generation_config: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for a model's `stream`, by transformers' names."""
        samples = self.samples(generation_config)
        return {
            "max_new_tokens": self.max_new_tokens,
            "max_length": self.max_length,
            "do_sample": samples,
            "temperature": self.temperature if samples else None,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "stop_strings": self.stop or None,
        }
