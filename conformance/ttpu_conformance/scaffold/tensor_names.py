"""Recognises the tensors of a checkpoint by their names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ttpu_conformance.scaffold.reference_model import Seen
from ttpu_core.mapping.layout import CheckpointNames

ROLES = {
    "query": r"(q|query)(_proj)?|wq",
    "key": r"(k|key)(_proj)?|wk",
    "value": r"(v|value)(_proj)?|wv",
    "output": r"(o|out|output|c)(_proj)?|dense|wo|attention_out",
}
FUSED = r"qkv(_proj)?|query_key_value|c_attn|Wqkv|W_pack|in_proj"
MLP_ROLES = {
    "gate": r"gate(_proj)?|w1|linear_1",
    "up": r"up(_proj)?|fc1|c_fc|fc_in|dense_h_to_4h|w3|linear_v|linear_fc1|fc",
    "down": r"down(_proj)?|fc2|c_proj|fc_out|dense_4h_to_h|w2|proj|linear_fc2",
}
EXPERTS = r"(.*?)experts\.\{expert\}\.(\w+)"


def attention_names(seen: Seen) -> dict[str, str]:
    """Prefixes of attention's projections by role, "fused" for queries, keys and values in one."""
    found: dict[str, str] = {}
    for name in seen.tensors:
        prefix, _, last = name.rpartition(".")
        parent, _, leaf = prefix.rpartition(".")
        if last != "weight" or seen.attention not in parent.split(".") or len(seen.tensors[name]) != 2:
            continue
        role = next((role for role, pattern in ROLES.items() if re.fullmatch(pattern, leaf)), None)
        role = "fused" if re.fullmatch(FUSED, leaf) else role
        if role:
            found.setdefault(role, prefix)
    return found


def mlp_names(seen: Seen) -> dict[str, str]:
    """Prefixes of a dense MLP's projections by role, "fused" for gate and up in one; empty for a mixture of experts."""
    found: dict[str, str] = {}
    if any("expert" in name for name in seen.tensors):
        return found
    for name in seen.tensors:
        prefix, _, last = name.rpartition(".")
        leaf = prefix.rpartition(".")[2]
        inside = seen.attention in prefix.split(".")
        if last != "weight" or inside or len(seen.tensors[name]) != 2:
            continue
        role = next((role for role, pattern in MLP_ROLES.items() if re.fullmatch(pattern, leaf)), None)
        role = "fused" if leaf in ("gate_up_proj", "fc1_gate_up", "w12") else role
        if role:
            found.setdefault(role, prefix)
    return found


def changed_names(seen: Seen, usual: CheckpointNames) -> Iterator[tuple[str, str]]:
    """The fields of `CheckpointNames` that differ from the usual ones."""
    outside = [name for name in seen.outside if name.endswith(".weight")]
    head = next((name for name in outside if re.search(r"(^|\.)(lm_head|embed_out|output|head)\.weight$", name)), None)
    positions = positions_of(seen)
    table = next((n for n in outside if n not in (head, positions) and len(seen.outside[n]) == 2), None)
    final = [name for name in outside if len(seen.outside[name]) == 1]
    base = re.match(r"[^.]*\.", seen.layer)
    found = {
        "base": base[0] if base else "",
        "layer": seen.layer,
        "embedding": table,
        "positions": positions,
        "final_norm": final[-1].removesuffix(".weight") if final else None,
        "head": head.removesuffix(".weight") if head else None,
        **{role: name for role, name in attention_names(seen).items() if role != "fused"},
        **{role: name for role, name in mlp_names(seen).items() if role != "fused"},
        **seen.norms,
    }
    for role, pattern in (("q_norm", r"(q|query)_?(layer|ln|norm)\w*"), ("k_norm", r"(k|key)_?(layer|ln|norm)\w*")):
        tensor = next((n for n in (*seen.tensors, *seen.absent) if re.fullmatch(rf".*\.{pattern}\.weight", n)), None)
        found[role] = tensor.removesuffix(".weight") if tensor else None
    found |= dict(_expert_names(seen))
    sandwich = seen.placement == "sandwich"
    assumed = {"mlp_norm": "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"}
    for role, name in found.items():
        if name is not None and name != (assumed.get(role) or getattr(usual, role)):
            yield role, name


def _expert_names(seen: Seen) -> Iterator[tuple[str, str]]:
    for name in seen.tensors:
        numbered = re.sub(r"experts\.0\.", "experts.{expert}.", name).removesuffix(".weight")
        match = re.fullmatch(EXPERTS, numbered)
        if match:
            role = next((role for role, pattern in MLP_ROLES.items() if re.fullmatch(pattern, match[2])), None)
            if role:
                yield f"expert_{role}", numbered
        elif re.search(r"(^|\.)(gate|router|wg)\.weight$", name):
            yield "router", name.removesuffix(".weight")


def positions_of(seen: Seen) -> str | None:
    """The name of the table of learned positions."""
    return next((n for n, shape in seen.outside.items() if re.search(r"pos|wpe", n) and len(shape) == 2), None)
