"""Writes the module of a family plugin from what transformers' tiny model shows: the hooks in which it differs from the
core's defaults, and a note of what was not recognised."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from ttpu_conformance.scaffold.reference_model import Seen
from ttpu_conformance.scaffold.source_lines import literal, short
from ttpu_conformance.scaffold.tensor_names import (
    attention_names,
    changed_names,
    mlp_names,
    positions_of,
)
from ttpu_core.defaults import ACTIVATIONS
from ttpu_core.mapping.layout import CheckpointNames

REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""The sizes that define a model: a config without them is refused."""
USUAL = (
    *REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings", "vocab_size", "rms_norm_eps", "hidden_act",
)  # fmt: skip
INNER_KEYS = ("n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_size")
"""Keys of an MLP's size that may be null."""


@dataclass
class _Module:
    """A module that is being written: its hooks, what they import, and the config keys that they read."""

    seen: Seen
    hooks: list[str] = field(default_factory=list)
    spec: set[str] = field(default_factory=set)
    layout: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=lambda: {"ModelConfig", "hookimpl"})
    keys: list[str] = field(default_factory=list)
    rope: bool = False
    replaces: bool = False
    mapping: bool = False

    def hook(self, text: str) -> None:
        self.hooks.append(f"@hookimpl\n{text.strip()}\n")

    def reads(self, *keys: str) -> None:
        self.keys.extend(key for key in keys if key not in self.keys)

    def replaced(self, hook: str, fields: dict[str, str]) -> str:
        """An expression: the default's answer of a hook with other fields."""
        self.replaces = True
        self.names.add("defaults")
        inner = ", ".join(f"{name}={value}" for name, value in fields.items())
        return f"replace(defaults.{hook}(config), {inner})"


def module_text(seen: Seen, model_type: str) -> str:
    """The module's source."""
    module = _Module(seen)
    module.reads("vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings")
    names = CheckpointNames()
    changed = dict(changed_names(seen, names))
    _norm(module)
    _block(module)
    _embedding(module)
    _attention(module)
    _rope(module)
    _mlp(module)
    _head(module)
    _mapping(module, changed)
    return _text(module, model_type)


# -- hooks ---------------------------------------------------------------------------------------------------


def _norm(module: _Module) -> None:
    norm = module.seen.norm
    if norm is None:
        return
    module.reads(norm.eps_key or "rms_norm_eps")
    if (norm.kind, norm.eps_key, norm.bias, norm.offset, norm.in_fp32) == ("rms", "rms_norm_eps", False, 0.0, False):
        return
    said = {"kind": '"layer"'} if norm.kind == "layer" else {}
    said["eps"] = f'config.positive_number("{norm.eps_key}")' if norm.eps_key else repr(norm.eps)
    said |= {"bias": "True"} if norm.bias else {}
    said |= {"offset": "1.0"} if norm.offset else {}
    said |= {"scale_in_fp32": "True"} if norm.in_fp32 else {}
    module.spec.add("NormSpec")
    words = "LayerNorm" if norm.kind == "layer" else "RMSNorm"
    words += " of `1 + weight`" if norm.offset else ""
    words += {True: " with a bias", False: " without a bias"}[norm.bias] if norm.kind == "layer" else ""
    words += ", multiplied before the cast" if norm.kind == "rms" and norm.in_fp32 else ""
    module.hook(
        f"def ttpu_norm({'config: ModelConfig' if norm.eps_key else ''}) -> NormSpec:\n"
        f'    """{words}."""\n'
        f"    return NormSpec({_call(said)})"
    )


def _block(module: _Module) -> None:
    seen, said = module.seen, dict[str, str]()
    if seen.placement not in (None, "pre"):
        said["placement"] = f'"{seen.placement}"'
    if isinstance(seen.value("residual_multiplier"), int | float):
        said["residual_multiplier"] = 'config.number("residual_multiplier")'
        module.reads("residual_multiplier")
    if not said:
        return
    module.spec.add("BlockSpec")
    taken = "config: ModelConfig" if "residual_multiplier" in said else ""
    module.hook(
        f"def ttpu_block({taken}) -> BlockSpec:\n"
        f'    """Norms are placed as in "{seen.placement or "pre"}"."""\n'
        f"    return BlockSpec({_call(said)})"
    )


def _embedding(module: _Module) -> None:
    seen, said, words = module.seen, dict[str, str](), ""
    learned = positions_of(seen)
    scale = seen.numbers.get("embedding_scale")
    if learned is not None:
        said["positions"] = 'config.positive_int("max_position_embeddings")'
        beyond = seen.outside[learned][0] - int(seen.value("max_position_embeddings") or 0)
        if beyond > 0:
            said["position_offset"] = str(beyond)
        words = "Tokens and learned positions."
    elif scale is not None:
        said["scale"], words = _number(module, scale, "hidden_size"), "Embeddings times a constant."
    if said:
        module.spec.add("EmbeddingSpec")
        module.hook(
            f"def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:\n"
            f'    """{words}"""\n'
            f"    return {module.replaced('ttpu_embedding', said)}"
        )


def _attention(module: _Module) -> None:
    seen = module.seen
    said: dict[str, str] = {}
    names = attention_names(seen)
    first = names.get("query") or names.get("fused")
    if first is None:
        seen.unknown.append("projections of queries, keys and values: `ttpu_mixer`, or `ttpu_attention` and names")
        return
    module.reads("attention_bias")
    for fieldname, tensor in (("qkv_bias", f"{first}.bias"), ("output_bias", f"{names.get('output', '?')}.bias")):
        value = _presence(module, tensor)
        usual = value == 'config.flag("attention_bias")' or (value == "False" and "attention_bias" not in seen.defaults)
        if not usual:
            said[fieldname] = value
    dim = seen.numbers.get("head_dim")
    scaling = seen.numbers.get("scaling")
    if dim and scaling and abs(scaling - dim**-0.5) > 1e-6:
        said["scale"] = _number(module, scaling, "head_dim")
    for role, pattern in (("q_norm", r"(q|query)_?(layer|ln|norm)\w*"), ("k_norm", r"(k|key)_?(layer|ln|norm)\w*")):
        weight = next((n for n in (*seen.tensors, *seen.absent) if re.fullmatch(rf".*\.{pattern}\.weight", n)), None)
        if weight is None:
            continue
        present = _presence(module, weight)
        said[role] = "norm" if present == "True" else f"norm if {present} else None"
        shape = seen.tensors.get(weight) or seen.absent.get(weight, ())
        if len(shape) == 2:
            said["qk_norm_scope"] = '"per_head"'
        elif shape and dim and shape[0] != int(dim):
            said["qk_norm_scope"] = '"full"'
    if any(name.endswith("sinks") for name in seen.tensors):
        said["sinks"] = "True"
    lines, taken = [], "config: ModelConfig"
    if "norm" in {word for value in said.values() for word in value.split()}:
        own = any("def ttpu_norm" in hook for hook in module.hooks)
        module.names |= set() if own else {"defaults"}
        given = "config" if not own or (seen.norm and seen.norm.eps_key) else ""
        lines.append(f"    norm = {'' if own else 'defaults.'}ttpu_norm({given})")
    if "sliding_window" in seen.defaults:
        module.reads("sliding_window")
        said["window"] = 'config.positive_int("sliding_window", default=None)'
        if "layer_types" in seen.defaults and isinstance(seen.value("layer_types"), list):
            taken += ", layer: int"
            module.names.add("defaults")
            lines.append(
                '    sliding = defaults.layer_type(config, layer, assumed="full_attention") == "sliding_attention"'
            )
            said["window"] = 'config.positive_int("sliding_window") if sliding else None'
    if "attn_logit_softcapping" in seen.defaults:
        module.reads("attn_logit_softcapping")
        said["logit_softcap"] = 'config.number("attn_logit_softcapping", default=None)'
    if said:
        module.spec.add("AttentionSpec")
        told = "\n".join([*lines, f"    return {module.replaced('ttpu_attention', said)}"])
        module.hook(
            f"def ttpu_attention({taken}) -> AttentionSpec:\n"
            f'    """Differs from llama\'s in: {", ".join(said)}."""\n{told}'
        )


def _rope(module: _Module) -> None:
    seen = module.seen
    if "rope" not in seen.facts:
        return
    if not seen.facts["rope"]:
        module.spec |= {"NO_ROPE", "RopeSpec"}
        words = "None: positions are learned." if positions_of(seen) else "None was found in the model."
        module.hook(f'def ttpu_rope() -> RopeSpec:\n    """{words}"""\n    return NO_ROPE')
        return
    said: dict[str, str] = {}
    assumed = seen.defaults.get("rope_parameters") or {}
    theta = assumed.get("rope_theta") if isinstance(assumed, dict) else None
    if isinstance(theta, int | float) and theta != 10_000.0:
        said["theta"] = f"{float(theta):_}"
    rotary, dim = seen.numbers.get("rotary_dim"), seen.numbers.get("head_dim")
    share = assumed.get("partial_rotary_factor") if isinstance(assumed, dict) else None
    if (rotary and dim and rotary < dim) or share:
        said["partial"] = "True"
        if share and share != 1.0:
            module.seen.defaults.setdefault("partial_rotary_factor", share)
            module.reads("partial_rotary_factor")
    if seen.facts.get("interleaved"):
        said["layout"] = '"interleaved"'
    if seen.facts.get("rope_fp32"):
        said["fp32"] = "True"
    if said:
        module.rope = True
        module.spec.add("AttentionSpec")
        module.hook(
            "def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:\n"
            f'    """Differs from llama\'s in: {", ".join(said)}."""\n'
            f"    return rope_from_config(config, head_dim=attention.head_dim, {_call(said)})"
        )


def _mlp(module: _Module) -> None:
    seen = module.seen
    activations = [key for key, value in vars(seen.config).items() if isinstance(value, str) and value in ACTIVATIONS]
    act = next((key for key in activations if "act" in key), "hidden_act")
    act = seen.aliases.get(act, act)
    module.reads(act)
    if any("expert" in name for name in seen.tensors):
        _experts(module, act)
        return
    names = mlp_names(seen)
    if "up" not in names and "fused" not in names:
        seen.unknown.append("the projections of the MLP: `ttpu_mlp`")
        return
    gated = "gate" in names or "fused" in names
    bias = _presence(module, f"{names['down']}.bias")
    said = {} if gated else {"gated": "False"}
    if bias == 'config.flag("mlp_bias")':
        module.reads("mlp_bias")
    elif bias != "False" or "mlp_bias" in seen.defaults:
        said["bias"] = bias
    down = seen.tensors.get(f"{names['down']}.weight", (0, 0))
    inner = seen.value("intermediate_size") or 0
    wide = down[0 if names["down"] in seen.transposed else -1]
    if wide != inner:
        key = next((k for k, v in vars(seen.config).items() if v == wide and not isinstance(v, bool)), None)
        hidden = int(seen.value("hidden_size"))
        usual = seen.aliases.get(key or "", key)
        times = f'{wide // hidden} * config.positive_int("hidden_size")'
        optional = next((k for k in INNER_KEYS if k in seen.defaults and seen.value(k) is None), None)
        said["intermediate_size"] = f'config.positive_int("{usual}")' if usual else times
        if not usual and optional:
            said["intermediate_size"] = f'config.positive_int("{optional}", default={times})'
        said["activation"] = _activation(module, act)
        module.names.add("defaults")
    elif act != "hidden_act":
        said["activation"] = _activation(module, act)
    if not said:
        return
    module.spec.add("MLPSpec")
    if "intermediate_size" in said:
        order = ("intermediate_size", "activation", "gated", "bias")
        made = f"MLPSpec({_call({key: said[key] for key in order if key in said})})"
    else:
        made = module.replaced("ttpu_mlp", said)
    module.hook(
        f"def ttpu_mlp(config: ModelConfig) -> MLPSpec:\n"
        f'    """{"A gated MLP" if gated else "A plain MLP"}."""\n    return {made}'
    )


def _experts(module: _Module, act: str) -> None:
    """A guess at a mixture of experts: its router's score is what conformance decides."""
    seen = module.seen

    def key(*candidates: str) -> str:
        found = next((each for each in candidates if seen.value(each) is not None), candidates[0])
        module.reads(found)
        return found

    count = key("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    chosen = key("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk", "top_k")
    inner = key("moe_intermediate_size", "intermediate_size")
    said = {
        "num_experts": f'config.positive_int("{count}")',
        "experts_per_token": f'config.positive_int("{chosen}")',
        "intermediate_size": f'config.positive_int("{inner}")',
        "activation": _activation(module, act),
    }
    router: dict[str, str] = {}
    if seen.value("norm_topk_prob") is not None:
        module.reads("norm_topk_prob")
        router["renormalize"] = 'config.flag("norm_topk_prob")'
    if seen.value("routed_scaling_factor") is not None:
        module.reads("routed_scaling_factor")
        router["scaling_factor"] = 'config.number("routed_scaling_factor")'
    if any("correction_bias" in name for name in seen.tensors):
        router |= {"score": '"sigmoid"', "correction_bias": "True"}
    if router:
        module.spec.add("RouterSpec")
        said["router"] = f"RouterSpec({_call(router)})"
    if any("shared_expert" in name for name in seen.tensors):
        seen.unknown.append("the size of the shared expert (MoESpec.shared): `ttpu_mlp`")
    seen.unknown.append("how the router scores experts (RouterSpec.score), and which layers have experts: `ttpu_mlp`")
    module.names.add("defaults")
    module.spec.add("MoESpec")
    module.hook(
        "def ttpu_mlp(config: ModelConfig) -> MoESpec:\n"
        '    """Experts. The router\'s score is a guess."""\n'
        f"    return MoESpec({_call(said)})"
    )


def _activation(module: _Module, key: str) -> str:
    module.names.add("defaults")
    return "defaults.activation(config)" if key == "hidden_act" else f'defaults.activation(config, "{key}")'


def _head(module: _Module) -> None:
    seen, said = module.seen, dict[str, str]()
    module.reads("tie_word_embeddings")
    if "tie_word_embeddings" not in seen.defaults:
        seen.defaults["tie_word_embeddings"] = bool(seen.value("tie_word_embeddings"))
    if any(re.search(r"(lm_head|embed_out|head)\.bias$", name) for name in seen.outside):
        said["bias"] = "True"
    for key, fieldname, value in (
        ("final_logit_softcapping", "softcap", 'config.number("final_logit_softcapping", default=None)'),
        ("logit_scale", "multiplier", 'config.number("logit_scale")'),
        ("logits_scaling", "multiplier", '1.0 / config.positive_number("logits_scaling")'),
    ):
        if key in seen.defaults:
            said[fieldname] = value
            module.reads(key)
    if said:
        module.spec.add("HeadSpec")
        module.hook(
            "def ttpu_head(config: ModelConfig) -> HeadSpec:\n"
            f'    """Differs from llama\'s in: {", ".join(said)}."""\n'
            f"    return {module.replaced('ttpu_head', said)}"
        )


def _mapping(module: _Module, changed: dict[str, str]) -> None:
    seen = module.seen
    attention, mlp = attention_names(seen), mlp_names(seen)
    rules: list[str] = []
    if "fused" in attention:
        module.layout.add("fused_qkv")
        options = ", by_group=True" if "query_key_value" in attention["fused"] else ""
        options += ", transposed=True" if attention["fused"] in seen.transposed else ""
        rules.append(f'fused_qkv(spec, NAMES, "{attention["fused"]}"{options})')
    if "fused" in mlp:
        module.layout.add("fused_gate_up")
        rules.append(f'fused_gate_up(spec, NAMES, "{mlp["fused"]}.weight")')
    kernels = [
        path
        for path, name in (
            ("attention.output.kernel", attention.get("output")),
            ("mlp.up.kernel", mlp.get("up")),
            ("mlp.down.kernel", mlp.get("down")),
        )
        if name in seen.transposed
    ]
    if not (changed or rules or kernels):
        return
    module.mapping = True
    module.spec.add("ArchitectureSpec")
    module.layout.add("standard_mapping")
    if changed:
        module.layout.add("CheckpointNames")
    made = "standard_mapping(spec, NAMES)" if changed else "standard_mapping(spec)"
    for rule in rules:
        module.layout.add("replace_rules")
        made = f"replace_rules({made}, {rule if changed else rule.replace('spec, NAMES, ', 'spec, tensor=')})"
    if kernels:
        module.layout.add("transposed_kernels")
        made = f"transposed_kernels({made}, {', '.join(json.dumps(path) for path in kernels)})"
    module.hook(
        f'def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:\n    """The checkpoint\'s names."""\n'
        f"    return {made}"
    )
    seen.facts["names"] = bool(changed)
    seen.declared_names = changed


# -- words ---------------------------------------------------------------------------------------------------


def _presence(module: _Module, tensor: str) -> str:
    """An expression for whether a tensor is there: True, False, or a flag of the config."""
    flags = module.seen.flags.get(tensor, {})
    present = tensor in module.seen.tensors
    if not flags:
        return str(present)
    key, there = next(iter(flags.items()))
    module.reads(key)
    return f'config.flag("{key}")' if there else f'not config.flag("{key}")'


def _number(module: _Module, value: float, size: str) -> str:
    """An expression for a measured number: a key of the config, or a power of a size."""
    seen = module.seen
    known = {key: float(each) for key, each in vars(seen.config).items() if isinstance(each, int | float) and each}
    for key, each in known.items():
        usual = seen.aliases.get(key, key)
        for power, text in ((1.0, ""), (-0.5, "**-0.5"), (0.5, "**0.5"), (-1.0, "**-1")):
            if value == 1.0 and not re.search("multiplier|scal", key):  # many keys are 1
                continue
            if each > 0 and abs(each**power - value) < 1e-5 * abs(value):
                module.reads(usual)
                return f'config.positive_number("{usual}"){text}'
    seen.unknown.append(f"where the factor {value:g} comes from (it is no power of {size} or of another key)")
    return repr(value)


def _call(said: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in said.items())


def _text(module: _Module, model_type: str) -> str:
    seen = module.seen
    renamed = {own: usual for own, usual in seen.aliases.items() if usual in USUAL}
    renamed |= {usual: own for own, usual in seen.aliases.items() if usual not in USUAL and own in module.keys}
    own = {usual: key for key, usual in renamed.items()}
    defaults = {}
    for key in module.keys:
        value = seen.defaults.get(own.get(key, key), seen.defaults.get(key))
        if key not in REQUIRED and isinstance(value, bool | int | float | str):
            defaults[key] = value
    config = f"config{'.with_renamed(KEYS)' if renamed else ''}.with_defaults(CONFIG_DEFAULTS)"
    head = [f'"""{seen.class_name} (`model_type` "{model_type}"), as transformers\' tiny model shows it.', ""]
    if seen.unknown:
        head += ["Not recognised, and so to be written by hand:", *(f"- {each}." for each in seen.unknown)]
    else:
        head += ["Everything that was looked at was recognised."]
    head[-1] += '"""'
    imports = ["from dataclasses import replace", ""] if module.replaces else []
    names = ["ModelConfig", *(["defaults"] if "defaults" in module.names else []), "hookimpl"]
    imports.append(f"from ttpu_core import {', '.join(names)}")
    imports += ["from ttpu_core.mapping import FlaxMapping"] if module.mapping else []
    imports += [f"from ttpu_core.mapping.layout import {', '.join(sorted(module.layout))}"] if module.layout else []
    spec = sorted(module.spec, key=lambda one: (not one.isupper(), one))
    imports += [f"from ttpu_core.spec import {', '.join(spec)}"] if spec else []
    imports += ["from ttpu_core.spec.rope import RopeSpec, rope_from_config"] if module.rope else []
    table = ["CONFIG_DEFAULTS = {", *(f'    "{k}": {literal(v)},' for k, v in defaults.items()), "}"]
    if renamed:
        table += ["KEYS = {", *(f'    "{k}": "{v}",' for k, v in renamed.items()), "}"]
    if seen.declared_names:
        names = [f"    {key}={json.dumps(value)}," for key, value in seen.declared_names.items()]
        table += ["NAMES = CheckpointNames(", *names, ")"]
    first = (
        "@hookimpl\ndef ttpu_config(config: ModelConfig) -> ModelConfig:\n"
        '    """The config with the defaults of transformers\' class. The sizes that define a model are required."""\n'
        f"    return {config}\n"
    )
    parts = ["\n".join(head), "\n".join(imports), "\n".join(table) + "\n", "\n\n".join([first, *module.hooks])]
    return "\n\n".join("\n".join(map(short, part.split("\n"))) for part in parts)
