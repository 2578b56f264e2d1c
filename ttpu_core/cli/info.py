"""`ttpu info`: a checkpoint, or only its config.json, comes in; what the model is, what it needs and what runs it goes
out, in words or as JSON. No weight is read but a head's that the config ties to the embedding."""

from __future__ import annotations

import shlex
from collections import Counter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli.console import counted, in_bytes, print_facts, print_json

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture
    from ttpu_core.checkpoint import Checkpoint
    from ttpu_core.config import ModelConfig
    from ttpu_core.spec import ArchitectureSpec

WEIGHT_DTYPES = ("float32", "bfloat16", "int8", "int4")


def info(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint's directory, a config.json, or a Hub id org/name."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quantization: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="As if it were quantized while loading, to w4a16-g128.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="The backend whose kernels are named.")] = None,
    patch_pack: Annotated[
        list[str] | None,
        typer.Option("--patch-pack", metavar="NAME", help="An installed patch pack to apply; repeat for more."),
    ] = None,
) -> None:
    """Explain a model: its architecture, its size, its files, and which plugins and kernels serve it.

    Needs a config.json only; if weights lie beside it their headers are checked against the architecture.

    Examples:

      ttpu info ./llama
      ttpu info ./llama/config.json
      ttpu info ./llama --quantization w4a16-g128
      ttpu info ./llama --json | jq .parameters.total
    """
    from ttpu_core.loading import describe_checkpoint
    from ttpu_core.registry import default_registry

    config, opened = _open(checkpoint)
    if not default_registry().is_described(config.model_type):
        runs = default_registry().backend(backend).name
        fallback = default_registry().fallback(runs)
        if fallback is not None:
            _print_fallback(checkpoint, config.model_type, runs, dict(fallback.describe(config)), as_json)
            return
    if opened is None:
        architecture = default_registry().architecture(config, patch_pack)
    else:
        opened, architecture = describe_checkpoint(opened, patch_pack)
    architecture, quantized, names = _quantized(opened, config, architecture, quantization)
    facts = {
        "checkpoint": checkpoint,
        "model_type": config.model_type,
        **_model_facts(architecture.spec),
        "quantization": quantized,
        "files": _file_facts(opened, architecture, names) if opened else None,
        "plugin": architecture.family,
        "patch_packs": list(architecture.patch_packs),
        "kernels": _kernels(architecture, backend),
    }
    # Last, because a backend may read the config too.
    from ttpu_core.config.key_audit import keys_ignored

    facts["config_keys_ignored"] = list(keys_ignored(config))
    facts["config_keys_without_effect"] = config.keys_without_effect
    if as_json:
        print_json(facts)
    else:
        print_facts(_sections(facts))


def _print_fallback(checkpoint: str, model_type: str, backend: str, found: dict[str, Any], as_json: bool) -> None:
    """What the fallback says of a model that no plugin describes."""
    begin = f"ttpu new-plugin --from {shlex.quote(checkpoint)}"
    facts = {"checkpoint": checkpoint, "model_type": model_type, "plugin": None, "backend": backend, **found}
    if found.get("a_plugin_would_add"):
        facts["begin_a_plugin"] = begin
    if as_json:
        print_json(facts)
        return
    gains = facts.pop("a_plugin_would_add", [])
    values = {name: f"{value:,}" if isinstance(value, int) else value for name, value in found.items()}
    known = [f"{name.replace('_', ' ')}: {value}" for name, value in values.items() if name != "a_plugin_would_add"]
    print_facts(
        [
            ("model", [f"{model_type} ({checkpoint})"]),
            ("plugin", [f"none: the fallback of backend {backend!r} runs transformers' own code"]),
            ("fallback", known),
            *([("a plugin adds", list(gains)), ("begin one", [begin])] if gains else []),
        ]
    )


def _open(name: str) -> tuple[ModelConfig, Checkpoint | None]:
    """The config, and the checkpoint unless `name` is a config.json file or its directory holds no weights."""
    from ttpu_core.checkpoint import open_checkpoint, open_config

    if Path(name).expanduser().is_file():
        return open_config(name), None
    checkpoint = open_checkpoint(name)
    return checkpoint.config, checkpoint if checkpoint.has_weights else None


def _model_facts(spec: ArchitectureSpec) -> dict[str, Any]:
    from ttpu_core.cli.prose import architecture_lines

    return {
        "architecture": architecture_lines(spec),
        "num_layers": spec.num_layers,
        "max_position_embeddings": spec.max_position_embeddings,
        "parameters": _parameter_facts(spec),
        "weight_bytes": {dtype: _weight_bytes(spec, dtype) for dtype in WEIGHT_DTYPES},
        "kv_cache": _cache_facts(spec),
    }


def _cache_facts(spec: ArchitectureSpec) -> dict[str, Any]:
    """What one sequence keeps between tokens, in bfloat16 unless a mixer's state has a dtype of its own."""
    from ttpu_core.spec import AttentionSpec
    from ttpu_core.spec.arithmetic import BITS

    mixers = [layer.mixer for layer in spec.layers]
    states = [state for layer in spec.layers for mixer in layer.mixers for state in mixer.state]
    bounded = sum(isinstance(mixer, AttentionSpec) and bool(mixer.window or mixer.chunk) for mixer in mixers)
    per_token = spec.kv_bytes_per_token(2)
    return {
        "dtype": "bfloat16",
        "bytes_per_token": per_token,
        "bytes_at_full_context": per_token * spec.max_position_embeddings,
        "layers_that_forget": bounded,
        "state_bytes_per_sequence": sum(
            prod(state.shape) * BITS[state.dtype or "bfloat16"] // 8 for state in states
        ),
    }


def _parameter_facts(spec: ArchitectureSpec) -> dict[str, Any]:
    from ttpu_core.spec.parameters import LAYERS, SHARED

    def below(prefix: str) -> int:
        return sum(parameter.size for path, parameter in spec.parameters.items() if path.startswith(prefix))

    return {
        "total": spec.num_parameters,
        "active": spec.num_active_parameters,
        "embedding": below("embed."),
        "head": below("head."),
        "shared": below(SHARED),
        "per_layer": [below(f"{LAYERS}{index}.") for index in range(spec.num_layers)],
    }


def _weight_bytes(spec: ArchitectureSpec, dtype: str) -> int:
    """Bytes of all weights in a dtype; a parameter that has a dtype of its own keeps it."""
    from ttpu_core.spec.arithmetic import BITS

    total = sum(parameter.size * BITS[parameter.dtype or dtype] for parameter in spec.parameters.values())
    return -(-total // 8)


def _quantized(
    checkpoint: Checkpoint | None, config: ModelConfig, architecture: Architecture, asked: str | None
) -> tuple[Architecture, dict[str, Any] | None, dict[str, tuple[int, ...]] | None]:
    """The architecture with formats of kernels, the facts of its quantization, and the tensors of the dense checkpoint
    that a quantized one stands for."""
    from dataclasses import replace

    from ttpu_core.errors import TTPUError
    from ttpu_core.quantization import QuantizationConfig, choices, quantize_spec
    from ttpu_core.quantization.mapping import formats_of, mixed_kernels
    from ttpu_core.quantization.report import DEQUANTIZED, report_of
    from ttpu_core.quantization.schemes import open_quantized, quantization_of

    dtype = "bfloat16" if checkpoint is None else checkpoint.dtype
    if asked is not None:
        wanted = QuantizationConfig.parse(asked)
        spec = quantize_spec(architecture.spec, wanted, architecture.mapping)
        report = report_of(spec, "while loading", dtype, choices(architecture.spec, wanted, architecture.mapping))
        return replace(architecture, spec=spec), report.to_dict(), None
    try:
        written = quantization_of(config)
        held = None if checkpoint is None else open_quantized(checkpoint)
    except TTPUError as error:
        return architecture, {"unreadable": str(error)}, None
    if written is None:
        return architecture, None, None
    if held is None:
        return architecture, {"scheme": written.text("quant_method")}, None
    mapping = architecture.mapping.suited_to(held.shapes)
    spec = formats_of(architecture.spec, mapping, held)
    report = report_of(spec, held.scheme, dtype, mixed=dict.fromkeys(mixed_kernels(spec, mapping, held), DEQUANTIZED))
    return replace(architecture, spec=spec), report.to_dict(), held.shapes


def _file_facts(
    checkpoint: Checkpoint, architecture: Architecture, dense: dict[str, tuple[int, ...]] | None = None
) -> dict[str, Any]:
    """What lies on disk; `dense` are the tensors that a quantized checkpoint stands for.

    Raises:
        CheckpointError: a file is missing, truncated or malformed.
        MappingError: the tensors are not those of the architecture.
    """
    tensors = checkpoint.tensors
    shapes = dense or {name: tensor.shape for name, tensor in tensors.items()}
    architecture.mapping.suited_to(shapes).resolve(shapes, checkpoint.source)
    return {
        "path": str(checkpoint.path),
        "weight_files": len(checkpoint.weight_files),
        "tensors": len(tensors),
        "bytes": checkpoint.total_bytes,
        "dtypes": dict(Counter(tensor.dtype for tensor in tensors.values()).most_common()),
    }


def _kernels(architecture: Architecture, backend: str | None) -> dict[str, Any]:
    """What the backend answers, or the sentence that says which `pip install` brings it; info needs no backend."""
    from ttpu_core.backend import Patches
    from ttpu_core.errors import TTPUError
    from ttpu_core.registry import default_registry

    try:
        runner = default_registry().backend(backend)
        facts: dict[str, Any] = {"backend": runner.name, "operations": dict(runner.kernels(architecture))}
        if isinstance(runner, Patches):
            names = ("name", "target", "reason", "when", "source")
            facts["patches"] = [
                {name: getattr(patch, name) for name in names} for patch in runner.patches(architecture)
            ]
        return facts
    except TTPUError as error:
        return {"backend": backend, "missing": str(error)}


def _sections(facts: dict[str, Any]) -> list[tuple[str, list[str]]]:
    parameters, cache, context = facts["parameters"], facts["kv_cache"], facts["max_position_embeddings"]
    memory = ", ".join(f"{dtype} {in_bytes(size)}" for dtype, size in facts["weight_bytes"].items())
    ignored = [f"nothing reads {key!r} in the config, so it has no effect" for key in facts["config_keys_ignored"]]
    return [
        ("model", [f"{facts['model_type']} ({facts['checkpoint']})"]),
        ("architecture", facts["architecture"]),
        ("parameters", [_parameter_words(parameters)]),
        ("memory", [f"{memory} (weights only, without quantization scales, KV cache and activations)"]),
        ("quantization", _quantization_lines(facts["quantization"])),
        ("KV cache", [_cache_words(cache)]),
        ("context", [f"{context:,} tokens"]),
        ("files", [_file_words(facts["files"])]),
        ("plugin", [facts["plugin"]]),
        ("patch packs", [", ".join(facts["patch_packs"]) or "none"]),
        ("kernels", _kernel_lines(facts["kernels"])),
        ("patches", _patch_lines(facts["kernels"])),
        ("note", ignored),
    ]


def _parameter_words(parameters: dict[str, Any]) -> str:
    sizes = sorted(set(parameters["per_layer"]))
    per_layer = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    head = f", head {parameters['head']:,}" if parameters["head"] else ""
    head = f", shared by layers {parameters['shared']:,}{head}" if parameters["shared"] else head
    active = f" ({parameters['active']:,} for each token)" if parameters["active"] != parameters["total"] else ""
    return f"{parameters['total']:,}{active}: embedding {parameters['embedding']:,}, each layer {per_layer}{head}"


def _quantization_lines(facts: dict[str, Any] | None) -> list[str]:
    if facts is None:
        return ["none"]
    if "formats" not in facts:
        return [facts.get("unreadable") or f"{facts['scheme']}, as the config says; the weights are not here"]
    from ttpu_core.quantization.report import QuantizationReport

    return str(QuantizationReport(**facts)).splitlines()


def _cache_words(cache: dict[str, Any]) -> str:
    words = f"{cache['bytes_per_token']:,} bytes per token in {cache['dtype']}"
    words += f"; {in_bytes(cache['bytes_at_full_context'])} for a full context"
    if cache["layers_that_forget"]:
        words += f" (with {counted(cache['layers_that_forget'], 'layer')} of bounded reach counted like the rest)"
    if cache["state_bytes_per_sequence"]:
        words += f"; {in_bytes(cache['state_bytes_per_sequence'])} of state per sequence"
    return words


def _file_words(files: dict[str, Any] | None) -> str:
    if files is None:
        return "no weights here, only a config"
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in files["dtypes"].items())
    where = counted(files["weight_files"], "file")
    return f"{counted(files['tensors'], 'tensor')} ({dtypes}), {in_bytes(files['bytes'])} in {where} in {files['path']}"


def _kernel_lines(kernels: dict[str, Any]) -> list[str]:
    if "missing" in kernels:
        return [f"not known: {kernels['missing']}"]
    return [f"{operation}: {served}" for operation, served in kernels["operations"].items()] or ["none named"]


def _patch_lines(kernels: dict[str, Any]) -> list[str]:
    return [
        f"{patch['name']} ({patch['when']}): {patch['reason']} [{patch['target']}; from {patch['source']}]"
        for patch in kernels.get("patches", ())
    ]
