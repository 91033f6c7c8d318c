"""The fields of a `config.json`: those that are read, those without effect, those that must have their usual value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ("HARMLESS", "ONLY_AT", "READ", "READ_BY_FAMILY")

# Fields that change nothing about what the model computes when it serves: provenance, training, generation defaults
# (a request decides those), and how some other program loads it.
HARMLESS: Final = frozenset(
    [
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "initial_context_length",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "router_aux_loss_coef",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "transformers.js_config",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    ]
)

# Fields that mean "as usual" at these values (and when absent or null), and something not implemented at any other.
ONLY_AT: Final[Mapping[str, tuple[object, ...]]] = {
    "add_cross_attention": (False,),
    "attn_logit_softcapping": (0, 0.0),
    "auto_map": ({},),
    "cross_attention_hidden_size": (),
    "embedding_multiplier": (1, 1.0),
    "final_logit_softcapping": (0, 0.0),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "n_routed_experts": (0,),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "pruned_heads": ({},),
    "quantization_config": (),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
}

READ: Final = frozenset(
    [
        "attention_bias",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "vocab_size",
    ]
)

_LLAMA = frozenset(["hidden_act", "max_window_layers", "mlp_bias", "use_sliding_window"])

READ_BY_FAMILY: Final[Mapping[str, frozenset[str]]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma3_text": frozenset(
        [
            "_sliding_window_pattern",
            "hidden_activation",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
            "sliding_window_pattern",
        ]
    ),
    "gpt_oss": frozenset(
        [
            "experts_per_token",
            "hidden_act",
            "num_experts_per_tok",
            "num_local_experts",
            "swiglu_alpha",
            "swiglu_limit",
        ]
    ),
}
