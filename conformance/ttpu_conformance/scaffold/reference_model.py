"""Looks at transformers' tiny model of a type, by its tensors and by running it, and says what a plugin would have to
describe. Nothing here knows a family: what is not recognised is left to the core's defaults and said so."""

from __future__ import annotations

import copy
import inspect
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ttpu_conformance.declaration import Declaration, Variant
from ttpu_conformance.survey.types import tiny_declaration
from ttpu_conformance.tiny import config_class, random_model, reference_class, tiny_config
from ttpu_core.config import ModelConfig
from ttpu_core.errors import TTPUError, UnsupportedError

Modules = dict[str, Any]
CLOSE = 1e-4
EPS_KEYS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon")


@dataclass(frozen=True)
class NormSeen:
    """A norm: its kind, the key of its epsilon, whether it has a bias, what is added to its weight, and whether it
    multiplies by the weight before the cast."""

    kind: str
    eps_key: str | None
    eps: float
    bias: bool
    offset: float
    in_fp32: bool


@dataclass
class Seen:
    """What the tiny model shows.

    Attributes:
        declaration: the sizes that the model was made with.
        sizes: those of the tiny model that are not the kit's.
        class_name: of the model in transformers.
        defaults: what its config class assumes, by key.
        aliases: the usual key by the class's own, as in {"n_embd": "hidden_size"}.
        tensors: shapes of layer 0's tensors by their names within it.
        outside: shapes of the tensors outside layers, by name.
        layer: the name of a layer, with "{layer}".
        flags: by the end of a tensor's name within a layer, the boolean keys whose change makes it come or go, with
            the value at which it is there.
        absent: shapes of the tensors that only a flag brings.
        norms: tensors' prefixes by role, as in {"input_norm": "ln_1"}.
        placement: of the norms; None where it was not recognised.
        attention, mlp: names of the modules within a layer.
        norm: the norm of layers.
        numbers: what was measured, by name: "embedding_scale", "head_dim", "scaling", "rotary_dim".
        facts: what was found, by name: "rope", "interleaved", "rope_fp32".
        unknown: sentences on what was not recognised.
        declared_names: the fields of `CheckpointNames` that differ from the usual ones.
    """

    declaration: Declaration
    sizes: dict[str, Any]
    class_name: str
    defaults: dict[str, Any]
    aliases: dict[str, str]
    config: Any
    tensors: dict[str, tuple[int, ...]]
    outside: dict[str, tuple[int, ...]]
    layer: str
    transposed: frozenset[str] = frozenset()
    flags: dict[str, dict[str, bool]] = field(default_factory=dict)
    absent: dict[str, tuple[int, ...]] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    placement: str | None = None
    attention: str = ""
    mlp: str = ""
    norm: NormSeen | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    facts: dict[str, bool] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    declared_names: dict[str, str] = field(default_factory=dict)

    def value(self, key: str) -> Any:
        """The tiny config's value of a key, None where it has none."""
        return getattr(self.config, key, None)


def look_at(config: ModelConfig) -> Seen:
    """Make the tiny model of a config's type, with the config's own flags and names, and look at it.

    Raises:
        UnsupportedError: transformers has no such causal language model, or no tiny one can be made of it.
    """
    try:
        declaration = _declaration(config)
        model = random_model(declaration, Variant("base"))
    except Exception as error:  # transformers' code for any type
        told = str(error) if isinstance(error, TTPUError) else f"{type(error).__name__}: {error}"
        raise UnsupportedError(
            f"--from {config.source} has model_type {config.model_type!r}, of which no tiny model could be made "
            f"({' '.join(told.split())[:300]}): write the plugin without --from."
        ) from error
    kind, tiny = config_class(declaration), model.config.get_text_config(decoder=True)
    names = _saved_names(model)
    layer = _layer_pattern(names)
    if layer is None:
        raise UnsupportedError(
            f"--from {config.source} has model_type {config.model_type!r}, whose tensors are in no list of layers "
            f"({', '.join(list(names)[:3])}): write the plugin without --from."
        )
    first = layer.format(layer=0)
    seen = Seen(
        declaration,
        dict(tiny_declaration(config.model_type).base),
        type(model).__name__,
        _defaults(kind),
        {own: usual for usual, own in kind.attribute_map.items()},
        tiny,
        {name.removeprefix(first): shape for name, shape in names.items() if name.startswith(first)},
        {name: shape for name, shape in names.items() if not name.startswith(layer.partition("{")[0])},
        layer,
        frozenset(n.removeprefix(first) for n, m in model.named_modules() if type(m).__name__ == "Conv1D"),
    )
    seen.flags, seen.absent = _flags(declaration, tiny, set(seen.tensors), first)
    _run(model, first, seen)
    return seen


def _declaration(config: ModelConfig) -> Declaration:
    """The kit's or the survey's sizes of the type, with the flags, names and numbers of the config itself."""
    known = tiny_declaration(config.model_type)
    kind = config_class(known)
    keys = {each.name for each in fields(kind)} - {"dtype", "torch_dtype", "transformers_version", "model_type"}
    raw = config.to_dict()
    own = {k: v for k, v in raw.items() if k in keys and isinstance(v, bool | float | str) and "dropout" not in k}
    return Declaration(config.model_type, "new-plugin", base={**own, **dict(known.base)})


def _defaults(kind: Any) -> dict[str, Any]:
    try:
        assumed = kind()
    except Exception:  # a class that needs values
        return {each.name: each.default for each in fields(kind)}
    derived = {each.name for each in fields(kind) if each.default is None} - {"rope_parameters"}
    return {key: None if key in derived else value for key, value in vars(assumed).items() if not key.startswith("_")}


def _saved_names(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors by name. Experts are stored otherwise than they are held, so that models with
    experts are saved for it."""
    held = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        held.pop("lm_head.weight", None)
    if not any("expert" in name for name in held):
        return held
    from safetensors import safe_open

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict


def _layer_pattern(names: Mapping[str, Any]) -> str | None:
    for name in names:
        match = re.match(r"(.*?\.)0\.", name)
        if match:
            return f"{match[1]}{{layer}}."
    return None


def _flags(
    declaration: Declaration, tiny: Any, present: set[str], first: str
) -> tuple[dict[str, dict[str, bool]], dict[str, tuple[int, ...]]]:
    """Which boolean keys decide on which tensors of layer 0: each is turned once, on the meta device. Also the shapes
    of the tensors that came."""
    import torch

    kind, found = reference_class(declaration), dict[str, dict[str, bool]]()
    absent: dict[str, tuple[int, ...]] = {}
    for each in fields(config_class(declaration)):
        value = getattr(tiny, each.name, None)
        if not isinstance(value, bool) or each.name in ("use_cache", "tie_word_embeddings", "is_encoder_decoder"):
            continue
        try:
            turned = tiny_config(declaration, Variant("turned", {each.name: not value}))
            with torch.device("meta"):
                other = kind._from_config(turned, attn_implementation="eager")
        except Exception:  # a class may refuse it
            continue
        shapes = {n.removeprefix(first): tuple(t.shape) for n, t in other.state_dict().items() if n.startswith(first)}
        for name in shapes.keys() ^ present:
            if name in shapes:
                absent[name] = shapes[name]
            found.setdefault(name, {})[each.name] = value if name in present else not value
    return found, absent


# -- what running shows --------------------------------------------------------------------------------------


@dataclass
class _Call:
    name: str
    given: Any
    result: Any


def _run(model: Any, first: str, seen: Seen) -> None:
    """Run the model once, and note what its first layer calls with what."""
    import torch

    modules: Modules = dict(model.named_modules())
    layer = modules[first[:-1]]
    children = dict(layer.named_children())
    calls: list[_Call] = []
    handles = []
    for name, child in children.items():
        handles.append(child.register_forward_hook(_noting(calls, name), with_kwargs=True))
    table: list[Any] = []
    handles.append(model.get_input_embeddings().register_forward_hook(lambda _m, _a, out: table.append(out)))
    entered: list[Any] = []
    handles.append(
        layer.register_forward_pre_hook(lambda _m, args, kw: entered.append(_first(args, kw)), with_kwargs=True)
    )
    ids = torch.arange(3, 15)[None]
    try:
        with torch.no_grad():
            model(input_ids=ids)
    except Exception as error:  # transformers' code
        seen.unknown.append(f"its tiny model does not run ({type(error).__name__}: {str(error)[:120]})")
        return
    finally:
        for handle in handles:
            handle.remove()
    norms = [name for name in children if _is_norm(name, children[name])]
    attention = [name for name in children if name not in norms and re.search(r"att|attn", name)]
    seen.attention = attention[0] if attention else ""
    others = [call.name for call in calls if call.name not in norms and call.name not in attention]
    weighted = [name for name in others if any(True for _ in children[name].parameters())]
    seen.mlp = weighted[0] if weighted else ""
    _placement(seen, [call for call in calls if call.name in (*norms, seen.attention, seen.mlp)], norms)
    if seen.norms:
        seen.norm = _norm(children[next(iter(seen.norms.values()))], seen)
    if table and entered and table[0].shape == entered[0].shape:
        ratio = entered[0] / table[0]
        if float(ratio.std()) < CLOSE and abs(float(ratio.mean()) - 1) > CLOSE:
            seen.numbers["embedding_scale"] = float(ratio.mean())
        elif float(ratio.std()) >= CLOSE and not any(re.search(r"pos|wpe", name) for name in seen.outside):
            seen.unknown.append("what is done to embeddings before the first layer: `ttpu_embedding`")
    if seen.attention:
        _attention(children[seen.attention], modules, seen)


def _noting(calls: list[_Call], name: str) -> Any:
    def note(_module: Any, args: Any, kwargs: Any, result: Any) -> None:
        calls.append(_Call(name, _first(args, kwargs), result[0] if isinstance(result, tuple) else result))

    return note


def _first(args: Any, kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))


def _is_norm(name: str, module: Any) -> bool:
    return "norm" in f"{name} {type(module).__name__}".lower() or re.match(r"ln_?\w*$", name) is not None


def _placement(seen: Seen, calls: list[_Call], norms: list[str]) -> None:
    order = ["norm" if call.name in norms else "attention" if call.name == seen.attention else "mlp" for call in calls]
    names = [call.name for call in calls if call.name in norms]
    by_order = {
        "norm attention norm mlp": ("pre", ("input_norm", "mlp_norm")),
        "attention norm mlp norm": ("post", ("post_attention_norm", "post_mlp_norm")),
        "norm attention norm norm mlp norm": (
            "sandwich", ("input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"),
        ),
        "norm attention mlp": ("parallel", ("input_norm",)),
        "norm mlp attention": ("parallel", ("input_norm",)),
        "norm norm attention mlp": ("parallel_two_norms", ("input_norm", "mlp_norm")),
    }  # fmt: skip
    known = by_order.get(" ".join(order))
    if known is None:
        told = ", ".join(call.name for call in calls) or "nothing that is a norm, attention or an MLP"
        seen.unknown.append(f"the order in which a layer calls its parts ({told}): `ttpu_block`")
        return
    seen.placement, roles = known
    seen.norms = dict(zip(roles, names, strict=True))
    if seen.placement == "pre":
        first, second = (call.given for call in calls if call.name in norms)
        if first.shape == second.shape and bool((first == second).all()):
            seen.placement = "parallel_two_norms"


def _norm(module: Any, seen: Seen) -> NormSeen | None:
    """The kind of a norm, by what it makes of random features."""
    import torch

    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    eps_key = next((key for key in EPS_KEYS if isinstance(seen.value(key), float)), None)
    eps = next((float(getattr(module, name)) for name in ("variance_epsilon", "eps") if hasattr(module, name)), 1e-5)
    eps = seen.value(eps_key) if eps_key else eps
    if weight is None or weight.ndim != 1:
        seen.unknown.append("its norms have no weight: `ttpu_norm`")
        return None
    x = torch.randn(8, weight.numel(), generator=torch.Generator().manual_seed(0)) + 0.5
    with torch.no_grad():
        found = module(x)
        for kind, centred in (("rms", x), ("layer", x - x.mean(-1, keepdim=True))):
            plain = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
            for offset in (0.0, 1.0):
                expected = plain * (weight + offset) + (0 if bias is None else bias)
                if torch.allclose(found, expected, atol=CLOSE):
                    in_fp32 = kind == "layer" or _scales_in_float32(module, x)
                    return NormSeen(kind, eps_key, eps, bias is not None, offset, in_fp32)
    seen.unknown.append(f"{type(module).__name__} is neither RMSNorm nor LayerNorm: `ttpu_norm`")
    return None


def _scales_in_float32(module: Any, x: Any) -> bool:
    """Whether an RMSNorm multiplies by its weight before the cast back to bfloat16: its rounding tells."""
    import torch

    low = copy.deepcopy(module).to(torch.bfloat16)
    ones = copy.deepcopy(low)
    with torch.no_grad():
        given = x.to(torch.bfloat16)
        wide = given.float()
        probe = low(given)
        ones.weight.fill_(1.0)
        plain = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        base = ones(given).float()
        added = 1.0 if (base - plain).abs().max() > 0.5 else 0.0  # 1 + w
        weight = low.weight.float() + added
        before = (plain * weight).to(torch.bfloat16)
        after = plain.to(torch.bfloat16) * weight.to(torch.bfloat16)
        return bool((probe != before).sum() < (probe != after).sum())


def _attention(module: Any, modules: Modules, seen: Seen) -> None:
    import torch

    inner = next((each for each in module.modules() if hasattr(each, "scaling") or hasattr(each, "head_dim")), module)
    for name in ("head_dim", "scaling"):
        value = getattr(inner, name, None)
        if isinstance(value, int | float):
            seen.numbers[name] = float(value)
    code = sys.modules[type(module).__module__]
    text = inspect.getsource(code)
    rotary = next((each for each in modules.values() if "Rotary" in type(each).__name__), None)
    seen.facts["rope"] = rotary is not None
    seen.facts["interleaved"] = rotary is not None and bool(re.search(r"\[\.\.\., (0?::2|1::2)\]", text))
    if rotary is None:
        return
    try:
        x = torch.zeros(1, 4, 8, dtype=torch.bfloat16)
        by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        kinds = {"layer_type": seen.value("layer_types")[0]} if by_kind else {}
        with torch.no_grad():
            cos = rotary(x, torch.arange(4)[None], **kinds)[0]
        seen.facts["rope_fp32"] = cos.dtype == torch.float32
        seen.numbers["rotary_dim"] = float(cos.shape[-1])
    except Exception:  # a rotary embedding of another protocol
        seen.unknown.append(f"{type(rotary).__name__} is called otherwise than the usual ones: `ttpu_rope`")

