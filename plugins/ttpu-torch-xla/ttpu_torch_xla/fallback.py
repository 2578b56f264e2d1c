"""The fallback of the torch_xla backend, which implements `ttpu_core.backend.Fallback`: a model that no plugin
describes runs as transformers' own code with the backend's general patches, on one device or sharded by size."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint, dtype_name
from ttpu_core.config import ModelConfig
from ttpu_core.errors import CheckpointError, RequestError, UnsupportedError
from ttpu_core.sharding.parallelism import AUTO, Parallelism, resolve_parallelism
from ttpu_core.sharding.request import the_one_given
from ttpu_torch_xla.encoders import check_encoder, encoder_class, is_encoder, refuse_generation, without_pooling
from ttpu_torch_xla.generation.stock import unknown_layers
from ttpu_torch_xla.handle import Handle, run_on_all_devices
from ttpu_torch_xla.load import stock_model, tokenizer_of
from ttpu_torch_xla.load_options import TorchXlaLoadOptions
from ttpu_torch_xla.moving import move
from ttpu_torch_xla.patches.choice import patches_for
from ttpu_torch_xla.patches.patch import applied
from ttpu_torch_xla.runtime import TorchRuntime, current

RUNS_IN = "from_pretrained, `ttpu generate`, `ttpu chat`, `ttpu inspect`"
"""Where a model without a plugin runs."""

ENCODERS_RUN_IN = "from_pretrained, `ttpu inspect`"
"""Where a text encoder runs."""

GAINS = (
    "attention kernels for TPUs",
    "sharding along tensors and experts, and plans",
    "quantization, layers traced once (`scan_layers`), and training",
    "patches of what breaks the graph in this family, where it has some",
)
"""What a plugin would add."""

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
DEFAULT_CONTEXT = 2048
AXES = ("data", "fsdp")
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Of logits that the loop computes with its cache, against those of the whole text, in their standard deviations."""


@dataclass(frozen=True)
class StockSpec:
    """What the backend asks of an architecture, for a model that none describes.

    Attributes:
        model_type: of the config.
        context: the most tokens that a sequence may have.
    """

    model_type: str
    context: int
    layers: tuple[Any, ...] = ()
    kernels: tuple[Any, ...] = ()
    torch_patches: tuple[Any, ...] = ()


@dataclass(frozen=True)
class StockArchitecture:
    """Stands for the architecture of a model that no plugin describes."""

    spec: StockSpec
    family: str = "none: transformers' own code"


def stock_architecture(config: ModelConfig, text: Any) -> Architecture:
    """What stands for the architecture of a model that no plugin describes; `text` is its transformers text config."""
    return cast(Architecture, StockArchitecture(StockSpec(config.model_type, context_of(text))))


class StockFallback:
    """Runs transformers' own code on torch_xla."""

    def open(self, checkpoint: Checkpoint, options: TorchXlaLoadOptions) -> Any:
        """Load a stock model onto the XLA device, and check that the compiled loop generates what the model computes,
        or that an encoder ignores padding.

        Raises:
            CheckpointError: files that are missing, or that transformers refuses.
            UnsupportedError: transformers has no such model, or it has an encoder and a decoder.
            RequestError: an option that needs a plugin.
        """
        from ttpu_torch_xla import generation
        from ttpu_torch_xla.sharding.apply import shard_by_size

        began = time.perf_counter()
        config = checkpoint.config
        _refuse_options(options, config.model_type)
        tell, size = options.progress or (lambda *_: None), float(checkpoint.total_bytes)
        tell("load", 0.0, size)
        runtime = current()
        held = dtype_name(options.dtype, checkpoint, "")
        parallelism = _parallelism(options, runtime)
        if parallelism is not None:
            run_on_all_devices(runtime)
        steps = ExitStack()
        try:
            name = "eager" if options.attn_implementation in (None, "auto") else options.attn_implementation
            quiet, tells_unread = options.progress is not None, not is_encoder(config)
            model = stock_model(checkpoint, held, str(name), quiet=quiet, tells_unread=tells_unread).eval()
            _refuse_encoder(model.config, config)
            architecture = stock_architecture(config, model.config.get_text_config(decoder=True))
            chosen = patches_for(architecture, str(name), optional=options.patches)
            steps.enter_context(applied(chosen))
            handle = Handle(architecture, runtime, chosen, str(name), (), parallelism)
            handle.tokenizer = tokenizer_of(checkpoint)
            if parallelism is None:
                move(model, lambda _, tensor: runtime.put(tensor))
            else:
                handle.mesh = shard_by_size(model, parallelism, runtime)
            runtime.sync(wait=True)
            handle.attach(model, steps)
            if is_encoder(config):
                check_encoder(model, runtime, TOLERANCE[held])
                model.generate = partial(refuse_generation, str(checkpoint.source))
            else:
                generation.install(model)
                _check_loop(model, runtime, held)
            handle.load_seconds = time.perf_counter() - began
            tell("load", size, size)
        except BaseException:
            steps.close()
            raise
        return model

    def describe(self, config: ModelConfig) -> Mapping[str, Any]:
        """What is known of a model without a plugin, for `ttpu info`: plain values only.

        Raises:
            CheckpointError: transformers refuses the config.
            UnsupportedError: it has no such model.
        """
        kind, stock = stock_class(config)
        with torch.device("meta"):
            model = kind._from_config(stock, **without_pooling(kind))
        encoder = is_encoder(config)
        text = stock.get_text_config(decoder=not encoder)
        patches = patches_for(stock_architecture(config, text), "eager")
        return {
            "code": f"{kind.__module__}.{kind.__name__}",
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "context": context_of(text),
            "sharded_by": "size, along data and fsdp",
            "patches": ", ".join(patch.name for patch in patches),
            "runs_in": ENCODERS_RUN_IN if encoder else RUNS_IN,
            "a_plugin_would_add": [] if encoder else list(GAINS),
        }


def stock_class(config: ModelConfig) -> tuple[Any, Any]:
    """The transformers class of a causal language model, or of an encoder without a head, and its config.

    Raises:
        CheckpointError: transformers refuses the config.
        UnsupportedError: it has no such model, or one with an encoder.
    """
    import transformers

    none = UnsupportedError(
        f"{config.source} has model_type {config.model_type!r}, for which no plugin is installed and transformers "
        f"{transformers.__version__} has no causal language model: install a plugin, or update transformers."
    )
    if config.model_type not in transformers.CONFIG_MAPPING:
        raise none
    raw = {key: value for key, value in config.to_dict().items() if key != "model_type"}
    try:
        stock = transformers.CONFIG_MAPPING[config.model_type].from_dict(
            transformers.PreTrainedConfig._decode_special_floats(raw)
        )
    except Exception as error:  # config classes raise many kinds for values that they refuse
        raise CheckpointError(
            f"{config.source} was to be read, but transformers {transformers.__version__} refuses it "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]}): correct it."
        ) from error
    _refuse_encoder(stock, config)
    if is_encoder(config):
        return encoder_class(stock), stock
    mapping: Any = transformers.AutoModelForCausalLM._model_mapping
    if type(stock) not in mapping:
        raise none
    return mapping[type(stock)], stock


def context_of(config: Any) -> int:
    """The most tokens that a sequence may have, as a transformers config says; 2048 if it says nothing."""
    values = (getattr(config, key, None) for key in CONTEXT_KEYS)
    return next((value for value in values if isinstance(value, int) and value > 0), DEFAULT_CONTEXT)


def _refuse_encoder(stock: Any, config: ModelConfig) -> None:
    if getattr(stock, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{config.source} of model_type {config.model_type!r} has an encoder and a decoder, but TTPU runs decoders "
            "and encoders alone: use transformers for it."
        )


def _refuse_options(options: TorchXlaLoadOptions, model_type: str) -> None:
    """Refuse what needs an architecture."""
    asked = {
        "quantization": options.quantization is not None,
        "do_quant": options.do_quant,
        "random_seed": options.random_seed is not None,
        "plan": options.plan is not None,
        "sharding_rules": options.sharding_rules is not None,
        "patch_packs": bool(options.patch_packs),
        "attention_config": options.attention_config is not None,
        "use_fsdp_wrap": options.use_fsdp_wrap is True,
        "scan_layers": options.scan_layers,
        "gradient_checkpointing": options.gradient_checkpointing,
        "attn_implementation": options.attn_implementation not in (None, "auto", "eager", "sdpa"),
    }
    refused = next((name for name, given in asked.items() if given), None)
    if options.purpose != "generate":
        verb = {"serve": "served by the engine", "train": "trained"}.get(options.purpose, options.purpose)
        raise RequestError(
            f"a model of type {model_type!r} was to be {verb}, but no plugin describes this type, and transformers' "
            "own code, which runs without one, generates only (`ttpu generate`, from_pretrained): install a plugin, or "
            "begin one with `ttpu new-plugin --from CONFIG`."
        )
    if refused is not None:
        raise RequestError(
            f"{refused}={getattr(options, refused)!r} was asked for, but no plugin describes model type "
            f"{model_type!r}, and transformers' own code is run without it: leave it out, or install or write a plugin "
            "(`ttpu new-plugin`)."
        )


def _parallelism(options: TorchXlaLoadOptions, runtime: TorchRuntime) -> Parallelism | None:
    """How the model is spread over devices; None on one.

    Raises:
        UnsupportedError: a mesh with other axes than data and fsdp.
    """
    given = the_one_given(
        None,
        parallelism_strategy=options.parallelism_strategy,
        sharding_strategy=options.sharding_strategy,
        mesh=options.mesh,
        plan=None,
    )
    argument, asked = given or ("parallelism_strategy", None)
    if asked is None or not options.auto_shard:
        return None
    if isinstance(asked, str):
        devices = runtime.num_devices()
        if asked.strip().lower() == AUTO:
            asked = "fsdp"  # the planner knows no model without a plugin
        asked = resolve_parallelism(asked, devices, None, argument=argument)
    if not isinstance(asked, Parallelism):
        raise RequestError(
            f"{argument}={asked!r} was given, but a model without a plugin takes a strategy's name, a mesh as text, "
            "or a Parallelism: pass 'fsdp'."
        )
    sizes = {axis: devices for axis, devices in dict(asked.mesh).items() if devices > 1}
    other = [axis for axis in sizes if axis not in AXES]
    if other:
        raise UnsupportedError(
            f"{argument} has the axis {other[0]!r}, but without a plugin torch_xla shards a model by size, along "
            f"{' and '.join(AXES)}: use those."
        )
    return asked if sizes else None


def _check_loop(model: Any, runtime: TorchRuntime, dtype: str) -> None:
    """Leave generation to transformers' own loop where the compiled one computes something else than the model does for
    the whole text."""
    if unknown_layers(model.config):
        return  # the loop leaves such a model to transformers already
    vocab = int(model.config.get_text_config(decoder=True).vocab_size)
    device = runtime.device()
    ids = torch.randint(min(3, vocab - 1), vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    try:
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, eos_token_id=None,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        decoded = torch.stack([each.float().cpu() for each in found.logits], 1)
        with torch.no_grad():
            whole = model(input_ids=found.sequences.to(device)).logits.float().cpu()[:, len(ids[0]) - 1 : -1]
        apart = float((decoded - whole).abs().max() / whole.std().clamp_min(1e-6))
        reason = f"its logits are {apart:.2g} standard deviations from those of the whole text"
        right = apart <= TOLERANCE[dtype]
    except Exception as error:  # what the code of any model may raise
        right, reason = False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if not right:
        from ttpu_torch_xla.generation.generate import uninstall

        uninstall(model)
        warnings.warn(
            f"no plugin describes {type(model).__name__}, and the compiled decoding loop does not serve it ({reason}): "
            "transformers' own loop runs, and compiles a program for nearly every token.",
            stacklevel=4,
        )
