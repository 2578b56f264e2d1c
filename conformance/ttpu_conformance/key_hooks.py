"""Which hook a key of config.json concerns, by the words in its name."""

from __future__ import annotations

import re
from collections.abc import Iterable

WORDS: tuple[tuple[str, str], ...] = (
    (r"mtp|nextn|token_id", "ttpu_config"),
    (r"rope|rotary", "ttpu_rope"),
    (r"final_logit|logit_scale|logits_scal|tie_word|lm_head", "ttpu_head"),
    (r"expert|moe|router|routed|topk|top_k|n_group|sparse_step", "ttpu_mlp"),
    (r"mlp|inner|intermediate|hidden_act|activation", "ttpu_mlp"),
    (r"linear_|mamba|ssm|conv|time_step|lora_rank|qk_nope|qk_rope|v_head_dim", "ttpu_mixer"),
    (r"attn|attention|qkv|clip|head|window|sliding|softcap|temperature|query|layer_types|use_bias", "ttpu_attention"),
    (r"norm|eps|layer_norm", "ttpu_norm"),
    (r"parallel|residual", "ttpu_block"),
    (r"vocab|embedding|per_layer", "ttpu_embedding"),
)


def hooks_of_keys(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the hooks that keys concern, each once; empty where no name says it.

    Args:
        keys: of a config; those of a section are dotted.
    """
    found = ("ttpu_rope" if "rope_" in key else _hook(key.rpartition(".")[2]) for key in keys)
    return tuple(dict.fromkeys(hook for hook in found if hook is not None))


def _hook(key: str) -> str | None:
    return next((hook for words, hook in WORDS if re.search(words, key)), None)
