"""Which keys of a config.json nobody looked at although they may matter. In: a config that a family has read; out: keys
that may change the forward pass, so that their being ignored can be said."""

from __future__ import annotations

import re

from ttpu_core.config import ModelConfig
from ttpu_core.errors import UnsupportedError

NOT_IN_THE_FORWARD_PASS = frozenset(
    {
        # who wrote the file, and which classes it was written for
        "architectures", "auto_map", "custom_pipelines", "_name_or_path", "name_or_path", "transformers_version",
        "_commit_hash", "unsloth_version", "unsloth_fixed", "tokenizer_class", "processor_class", "finetuning_task",
        # how to hold and run it; the backend is told these separately
        "torch_dtype", "dtype", "use_bfloat16", "torchscript", "return_dict", "use_return_dict", "use_cache",
        "output_attentions", "output_hidden_states", "output_router_logits", "_attn_implementation",
        "attn_implementation", "_flash_attn_2_enabled", "use_flash_attn", "_experts_implementation",
        "gradient_checkpointing",
        # tensor-parallel slices that Llama 2 was trained with: the same sums in another order
        "pretraining_tp",
        # tokens and labels, which belong to the tokenizer, to generation and to classification heads
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "mask_token_id", "cls_token_id",
        "decoder_start_token_id", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
        # training only: initial weights, dropout, auxiliary losses
        "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "residual_dropout",
        "resid_dropout", "embedding_dropout", "mlp_dropout", "dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop",
        "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "layerdrop",
        "router_aux_loss_coef", "router_z_loss_coef", "aux_loss_alpha", "seq_aux", "router_jitter_noise",
        # encoder-decoder machinery that transformers 4 wrote into every config
        "is_decoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size",
        "tie_encoder_decoder", "encoder_no_repeat_ngram_size", "chunk_size_feed_forward", "pruned_heads", "prefix",
        # generation defaults that transformers 4 wrote there too; generation_config.json is where they count
        "do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
        "diversity_penalty", "num_beams", "num_beam_groups", "num_return_sequences", "no_repeat_ngram_size",
        "max_length", "min_length", "max_new_tokens", "early_stopping", "bad_words_ids", "suppress_tokens",
        "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
        "exponential_decay_length_penalty", "output_scores", "return_dict_in_generate",
    }
)  # fmt: skip
"""Keys of config.json, at any depth, that leave logits as they are. What is not here is reported when nobody reads it;
`quantization_config`, for one, changes everything."""


def refuse_ignored(config: ModelConfig) -> tuple[str, ...]:
    """Sentences about keys that have no effect; ask after the config was read and before the weights are.

    Raises:
        UnsupportedError: the weights are quantized, so that nothing right can come of ignoring it.
    """
    ignored = keys_ignored(config)
    if any(key.split(".")[-1] == "quantization_config" for key in ignored):
        raise UnsupportedError(
            f"{config.source} has a 'quantization_config', but no installed plugin reads quantized weights: take the "
            "checkpoint in bfloat16 or float32."
        )
    return tuple(f"nothing reads {key!r} in {config.source}, so it has no effect" for key in ignored)


def keys_ignored(config: ModelConfig) -> tuple[str, ...]:
    """Keys with a value that no plugin read and that may change the forward pass, sorted; dotted inside a section."""
    return tuple(key for key in config.keys_unread() if not _harmless(key))


def _harmless(key: str) -> bool:
    return any(part in NOT_IN_THE_FORWARD_PASS for part in re.split(r"\.", key))
