"""Compares the tensors that a description asks for with those that a checkpoint holds, and infers from names and shapes
which hooks to correct."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ttpu_core.architecture import Architecture

Shapes = Mapping[str, tuple[int, ...]]

ATTENTION_WORDS = r"attn|attention|q_proj|k_proj|v_proj|o_proj|qkv|c_attn|query_key_value|out_proj|Wqkv|sinks"
MIXER_WORDS = r"mamba|ssm|conv|linear_attn|mixer|temporal|recurrent|A_log|dt_|x_proj|gated_delta|rg_lru|shortconv|kda"
MLP_WORDS = r"mlp|ffn|feed_forward|expert|router|gate|fc1|fc2|fc_in|fc_out|c_fc|w1|w2|w3|moe|dense_h_to_4h|dense_4h"
NORM_WORDS = r"norm|ln_|layernorm|\.ln"
EMBEDDING_WORDS = r"embed|wte|wpe|word_embeddings|per_layer"
HEAD_WORDS = r"lm_head|embed_out|output_layer|score"


@dataclass(frozen=True)
class Misfits:
    """Where checkpoint and description part: tensors that are missing from the checkpoint, tensors that nothing asks
    for, and tensors of another shape (name, shape that is asked for, shape that is there)."""

    missing: dict[str, tuple[int, ...]]
    extra: dict[str, tuple[int, ...]]
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.reshaped)


def misfits_of(architecture: Architecture, held: Shapes) -> Misfits:
    """Compare a description with the shapes of a checkpoint's tensors, by name."""
    mapping = architecture.mapping.suited_to(held)
    wanted = mapping.tensors
    found = mapping.canonical(held)
    ignored = [re.compile(pattern) for pattern in mapping.ignored]
    read = set(found.values())
    reshaped = tuple(
        (name, wanted[name], tuple(held[actual]))
        for name, actual in found.items()
        if name in wanted and tuple(held[actual]) != wanted[name]
    )
    extra = {
        name: tuple(shape)
        for name, shape in held.items()
        if name not in read and not any(pattern.fullmatch(name) for pattern in ignored)
    }
    return Misfits({name: shape for name, shape in wanted.items() if name not in found}, extra, reshaped)


def hooks_of(misfits: Misfits, architecture: Architecture) -> tuple[str, ...]:
    """The hooks that misfits point at, the likeliest first.

    Where the checkpoint holds as many numbers as the description asks for, tensors are only named or cut otherwise,
    and the mapping is to be corrected (norms may also be at other places). Else the parameter that lacks its tensor
    says which hook describes too much, and the name of a tensor that nobody reads says which one describes too
    little. Tensors of the same names in other layers are those of a wrong pattern of layers, and the same tensors under
    another prefix are the mapping's.
    """
    paths = {leaf.name: path for path, rule in architecture.mapping.rules for leaf in rule.leaves()}
    wanted = sum(map(prod, misfits.missing.values()))
    held = sum(map(prod, misfits.extra.values()))
    turned = all(prod(one) == prod(other) for _, one, other in misfits.reshaped)
    if misfits.missing and _under_another_prefix(misfits):
        return ("ttpu_flax_mapping",)
    if turned and wanted == held and not _in_other_layers(misfits):
        norms = any(hook_of_path(paths[name]) == "ttpu_block" for name in misfits.missing)
        return ("ttpu_block", "ttpu_flax_mapping") if norms else ("ttpu_flax_mapping",)
    votes: Counter[str] = Counter()
    for name, one, other in misfits.reshaped:
        votes["ttpu_flax_mapping" if prod(one) == prod(other) else hook_of_path(paths[name])] += 1
    for name in misfits.missing:
        votes[hook_of_path(paths[name])] += 1
    for name in misfits.extra:
        votes[hook_of_tensor(name)] += 1
    return tuple(hook for hook, _ in votes.most_common())


def _under_another_prefix(misfits: Misfits) -> bool:
    """Whether every missing tensor is there with something else before its name's second part."""
    extra = misfits.extra.items()
    tails = {(name.split(".", cut)[-1], shape) for name, shape in extra for cut in range(name.count("."))}
    return all((name.partition(".")[2], shape) in tails for name, shape in misfits.missing.items())


def _in_other_layers(misfits: Misfits) -> bool:
    """Whether what is missing and what nobody asks for have the same names but for the numbers in them."""
    both = (misfits.missing, misfits.extra)
    missing, extra = ({re.sub(r"\.\d+\.", ".*.", name) for name in names} for names in both)
    return missing == extra != set()


def hook_of_path(path: str) -> str:
    """The hook that describes a parameter, by its Flax path."""
    parts = path.split(".")
    if parts[0] in ("embed", "final_projection"):
        return "ttpu_embedding"
    if parts[0] == "head":
        return "ttpu_head"
    if parts[0] == "final_norm":
        return "ttpu_final_norm" if parts[-1] != "bias" else "ttpu_norm"
    section = parts[2] if len(parts) > 2 else ""
    if section == "attention":
        return "ttpu_attention"
    if section == "mixer":
        return "ttpu_mixer"
    if section in ("mlp", "moe"):
        return "ttpu_mlp"
    return "ttpu_norm" if parts[-1] == "bias" else "ttpu_block"


def hook_of_tensor(name: str) -> str:
    """The hook that should describe a tensor, by its name in a checkpoint."""

    def says(words: str) -> bool:
        return re.search(words, name) is not None

    of_a_layer = re.search(r"\.\d+\.", name) is not None
    if not of_a_layer:
        if says(HEAD_WORDS):
            return "ttpu_head"
        if says(EMBEDDING_WORDS):
            return "ttpu_embedding"
        if says(NORM_WORDS):
            return "ttpu_norm" if name.endswith("bias") else "ttpu_final_norm"
        return "ttpu_flax_mapping"
    if says(r"rotary|inv_freq|masked_bias|attn\.bias$"):
        return "ttpu_flax_mapping"
    if says(r"(attn|attention|mixer|mamba)\.(q|k|v|query|key)\w*(norm|ln|layernorm)|[qkv]_(norm|layernorm)|qk?_ln"):
        return "ttpu_attention"
    module = re.sub(r".*\.\d+\.", "", name, count=1)
    if re.search(NORM_WORDS, module.split(".")[0]):
        return "ttpu_norm" if name.endswith("bias") else "ttpu_block"
    if says(MIXER_WORDS):
        return "ttpu_mixer"
    if says(ATTENTION_WORDS):
        return "ttpu_attention"
    if says(MLP_WORDS):
        return "ttpu_mlp"
    return "ttpu_flax_mapping" if not says(NORM_WORDS) else "ttpu_block"
