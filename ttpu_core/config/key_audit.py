"""Finds the keys of a config.json that no plugin read although they may change the forward pass."""

from __future__ import annotations

from typing import Any

from ttpu_core.config import ModelConfig
from ttpu_core.config.model_config import KeyPath, dotted
from ttpu_core.errors import UnsupportedError

NOT_IN_THE_FORWARD_PASS = frozenset(
    {
        # origin of the file, and the classes that it was written for
        "architectures", "auto_map", "custom_pipelines", "_name_or_path", "name_or_path", "transformers_version",
        "_commit_hash", "unsloth_version", "unsloth_fixed", "for_llm_compressor", "tokenizer_class",
        "processor_class",
        "finetuning_task",
        # dtype and runtime settings; the backend gets these separately
        "torch_dtype", "dtype", "use_bfloat16", "torchscript", "return_dict", "use_return_dict", "use_cache",
        "output_attentions", "output_hidden_states", "output_router_logits", "_attn_implementation",
        "attn_implementation", "_flash_attn_2_enabled", "use_flash_attn", "_experts_implementation",
        "gradient_checkpointing", "cache_implementation",
        # number of tensor-parallel slices in Llama 2's training: the same sums in another order
        "pretraining_tp",
        # tokens and labels, which belong to the tokenizer, to generation and to classification heads
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "mask_token_id", "cls_token_id",
        "decoder_start_token_id", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
        # image and audio parts of a multimodal model, which do not affect text-only input
        "vision_config", "image_token_index", "image_token_id", "boi_token_index", "boi_token_id", "eoi_token_index",
        "eoi_token_id", "projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size",
        "vision_feature_layer", "audio_config", "audio_token_id", "video_token_id", "boa_token_id", "eoa_token_id",
        "eoa_token_index", "mm_tokens_per_image", "vision_soft_tokens_per_image", "audio_soft_tokens_per_image",
        # training only: initial weights, dropout, auxiliary losses
        "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "residual_dropout",
        "resid_dropout", "embedding_dropout", "mlp_dropout", "dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop",
        "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "layerdrop",
        "router_aux_loss_coef", "router_z_loss_coef", "aux_loss_alpha", "seq_aux", "router_jitter_noise",
        "input_jitter_noise", "init_std",
        # GPT-2's heads for classification
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        # precision of the softmax, which is float32 in every backend
        "reorder_and_upcast_attn", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
        # encoder-decoder machinery that transformers 4 wrote into every config
        "is_decoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size",
        "tie_encoder_decoder", "encoder_no_repeat_ngram_size", "chunk_size_feed_forward", "pruned_heads", "prefix",
        # generation defaults that transformers 4 wrote; generation_config.json is authoritative
        "do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
        "diversity_penalty", "num_beams", "num_beam_groups", "num_return_sequences", "no_repeat_ngram_size",
        "max_length", "min_length", "max_new_tokens", "early_stopping", "bad_words_ids", "suppress_tokens",
        "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
        "exponential_decay_length_penalty", "output_scores", "return_dict_in_generate",
    }
)  # fmt: skip
"""Keys of config.json, at any depth, that do not change logits. Any other key is reported if no plugin reads it."""


CHANGES_THE_FORWARD_PASS: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    # attention
    "attn_logit_softcapping": (), "query_pre_attn_scalar": (), "attention_multiplier": (), "clip_qkv": (),
    "attention_chunk_size": (), "alibi": (False,), "parallel_attn": (False,), "use_parallel_residual": (False,),
    "use_qk_norm": (False,), "qk_layernorm": (False,), "attn_output_gate": (False,), "num_kv_shared_layers": (0,),
    "use_bidirectional_attention": (False,), "kv_lora_rank": (0,), "q_lora_rank": (0,), "attn_temperature_tuning": (),
    "partial_rotary_factor": (1.0,), "rotary_pct": (1.0,), "rope_scaling": (), "no_rope_layers": ([],),
    # experts
    "num_experts": (0, 1), "num_local_experts": (0, 1), "n_routed_experts": (0, 1),
    # the stream and the head
    "final_logit_softcapping": (), "logits_scaling": (1.0,), "logit_scale": (1.0,), "residual_multiplier": (1.0,),
    "embedding_multiplier": (1.0,), "scale_emb": (1.0,), "scale_depth": (), "hidden_size_per_layer_input": (0,),
}  # fmt: skip
"""Keys that change logits in every model that has them, with their neutral values (besides null). Ignoring any other
value would silently produce wrong text."""


def refuse_ignored(config: ModelConfig) -> tuple[str, ...]:
    """Return one sentence per unread key that may have an effect. Call it after the config was read and before the
    weights are.

    Raises:
        UnsupportedError: an unread key is known to change the forward pass, so the result would be wrong.
    """
    ignored = _paths_ignored(config)
    for path in ignored:
        name, value = path[-1], _plain(config.value_at(path))
        if name == "quantization_config":
            raise UnsupportedError(
                f"{config.source} has a 'quantization_config', but no installed plugin reads quantized weights: take "
                "the checkpoint in bfloat16 or float32."
            )
        if name in CHANGES_THE_FORWARD_PASS and value not in CHANGES_THE_FORWARD_PASS[name]:
            raise UnsupportedError(
                f"{config.source} of model_type {config.model_type!r} sets {dotted(path)!r} to {value!r}, which "
                "changes what the model computes, but the plugin for this type does not read it: update the plugin, or "
                "use one that describes this variant."
            )
    return tuple(f"nothing reads {dotted(path)!r} in {config.source}, so it has no effect" for path in ignored)


def keys_ignored(config: ModelConfig) -> tuple[str, ...]:
    """Keys with a value that no plugin read and that may change the forward pass, sorted. Keys inside a section are
    dotted."""
    return tuple(map(dotted, _paths_ignored(config)))


def _paths_ignored(config: ModelConfig) -> tuple[KeyPath, ...]:
    return tuple(path for path in config.paths_unread() if NOT_IN_THE_FORWARD_PASS.isdisjoint(path))


def _plain(value: Any) -> Any:
    """A value as JSON writes it."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.to_dict() if isinstance(value, ModelConfig) else value
