"""Options that `generate` and `chat` share. They become a frozen `Decoding`, whose `arguments` go to a model's
`stream`, or are refused before anything is loaded. Typer turns each alias below into an option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.errors import RequestError
from ttpu_core.generation.ranges import RANGES

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
Dtype = Annotated[
    str,
    typer.Option(metavar="DTYPE", help="float32, bfloat16, float16, or auto: as stored.", rich_help_panel=MODEL),
]
ParallelismStrategy = Annotated[
    str | None,
    typer.Option(
        "--parallelism-strategy",
        "--sharding-strategy",
        "--mesh",
        metavar="STRATEGY",
        help="How to shard the model over devices: fsdp, dp, mp, 2d, 3d, auto, 2x4, or data=2,tensor=4.",
        rich_help_panel=MODEL,
    ),
]
PlanFile = Annotated[
    str | None,
    typer.Option("--plan", metavar="FILE", help="The same, as ttpu plan --save wrote it.", rich_help_panel=MODEL),
]
AttnImplementation = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="The attention that runs: auto, or a name that the backend knows.", rich_help_panel=MODEL
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The installed backend that runs the model.", rich_help_panel=MODEL),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Quantize the weights while loading: w8a16, w8a8, w4a16-g128, w4a16-g128-asym, fp8, mxfp4.",
        rich_help_panel=MODEL,
    ),
]
PatchPacks = Annotated[
    list[str] | None,
    typer.Option("--patch-pack", metavar="NAME", help="Apply a patch pack; repeat for more.", rich_help_panel=MODEL),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", metavar="N", help="The most tokens to add.", rich_help_panel=SAMPLING),
]
MaxLength = Annotated[
    int | None,
    typer.Option("--max-length", metavar="N", help="The same, prompt included.", rich_help_panel=SAMPLING),
]
Temperature = Annotated[
    float | None,
    typer.Option(metavar="T", help="Sample from logits / T; 0: do not sample.", rich_help_panel=SAMPLING),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", metavar="K", help="Among the K likeliest; 0: all.", rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Among the likeliest that sum to P.", rich_help_panel=SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="Not below P times the likeliest.", rich_help_panel=SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty", metavar="X", help="Above 1: seen tokens become unlikelier.", rich_help_panel=SAMPLING
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        "--presence-penalty", metavar="X", help="Subtracted once from generated tokens.", rich_help_panel=SAMPLING
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option("--frequency-penalty", metavar="X", help="Subtracted per occurrence.", rich_help_panel=SAMPLING),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Makes sampling repeatable.", rich_help_panel=SAMPLING)]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End before this text; repeat for more.", rich_help_panel=SAMPLING),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="The same as --temperature 0.", rich_help_panel=SAMPLING)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Neither progress nor timings on stderr.")]


def load_options(
    dtype: str,
    parallelism_strategy: str | None,
    plan: str | None,
    attn_implementation: str,
    patch_packs: list[str] | None,
    quantization: str | None = None,
) -> LoadOptions:
    """How a checkpoint is loaded, as the options above say it.

    Args:
        dtype: `Dtype`.
        parallelism_strategy: `ParallelismStrategy`.
        plan: `PlanFile`.
        attn_implementation: `AttnImplementation`.
        patch_packs: `PatchPacks`.
        quantization: `Quantization`.
    """
    from ttpu_core.loading import LoadOptions

    return LoadOptions(
        dtype=dtype,
        parallelism_strategy=parallelism_strategy,
        plan=plan,
        attn_implementation=attn_implementation,
        patch_packs=patch_packs,
        quantization=quantization,
    )


# Typer could check them too, but its answer to NaN ("should be greater than or equal to 0") explains nothing.
NUMBERS = ("max_new_tokens", "max_length", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
           "presence_penalty", "frequency_penalty", "seed")  # fmt: skip


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen and when to stop, as the user asked; None leaves it to the checkpoint's generation config,
    then to the backend."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    deterministic: bool = False

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
        if "" in self.stop:
            raise RequestError("--stop was given an empty text, which every output contains: pass some text.")

    def samples(self, generation_config: Mapping[str, Any]) -> bool:
        """Whether tokens are drawn: a temperature decides, then top-k, top-p or min-p, then the checkpoint."""
        if self.deterministic:
            return False
        if self.temperature is not None:
            return self.temperature > 0
        if any(value is not None for value in (self.top_k, self.top_p, self.min_p)):
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
            "stop_strings": list(self.stop) or None,
        }
