"""Configurations as they are published on the hub: the fields that say what a model's weights take, and their bytes.

Fields are facts of each repository's config.json or hf_quant_config.json, reduced to what changes bytes; those of
DeepSeek-V4 and Qwen3.6 are transformers' own defaults for these models, and which of the layers of Qwen3.6 are named
is made up. Sizes are those that the hub shows for all safetensors files, in decimal gigabytes, written down from
memory and not read again; `files_gb` is None where none is known well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

Fields = dict[str, Any]


class Published(NamedTuple):
    """One repository."""

    config: Fields
    files_gb: float | None = None
    """All safetensors files together."""
    hf_quant_config: Fields | None = None

    def write(self, folder: Path) -> Path:
        """The folder that `smoe plan` reads, without weights."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.hf_quant_config is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(self.hf_quant_config))
        return folder


FP8: Fields = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}

DEEPSEEK_V3: Fields = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}

KIMI_K2: Fields = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}


def compressed(form: str, ignore: list[str], **weights: Any) -> Fields:
    """What llm-compressor writes for all linear layers but those of `ignore`."""
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


KIMI_INT4 = compressed(
    "pack-quantized",
    ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    actorder=None,
    dynamic=False,
    group_size=32,
    num_bits=4,
    observer="minmax",
    strategy="group",
    symmetric=True,
    type="int",
)

KIMI_K25: Fields = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "dtype": "bfloat16",
    "model_type": "kimi_k25",
    "text_config": {**{key: KIMI_K2[key] for key in KIMI_K2 if key != "torch_dtype"}, "quantization_config": KIMI_INT4},
    "tie_word_embeddings": False,
    "vision_config": {
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "patch_size": 14,
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_attention_heads": 16,
        "vt_num_hidden_layers": 27,
    },
}

MINIMAX_M2: Fields = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "model_type": "minimax_m2",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "mtp_transformer_layers": 1,
    "num_mtp_modules": 3,
    "use_mtp": True,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
    "dtype": "bfloat16",
}

QWEN3_30B: Fields = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
QWEN3_235B: Fields = {
    **QWEN3_30B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
QWEN3_GATES = [f"model.layers.{layer}.mlp.gate" for layer in range(94)]
QWEN3_KEPT = [
    "lm_head",
    *QWEN3_GATES,
    *(f"model.layers.{n}.{norm}_layernorm" for n in range(94) for norm in ("input",)),
]

GLM_46: Fields = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "vocab_size": 151552,
}
CHANNEL_FP8: Fields = {"dynamic": False, "num_bits": 8, "strategy": "channel", "symmetric": True, "type": "float"}

GPT_OSS: Fields = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}  # fmt: skip

MIXTRAL: Fields = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}

NVFP4: Fields = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
MODELOPT: Fields = {"producer": {"name": "modelopt", "version": "0.35.0"}}

QWEN36_35B: Fields = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "head_dim": 256,
        "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
}
QWEN36_LAYERS: Fields = {
    **{
        f"model.language_model.layers.{layer}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}
        for layer in range(40)
    },
    **{
        f"model.language_model.layers.{layer}.self_attn.{name}_proj": {"quant_algo": "FP8"}
        for layer in range(3, 40, 4)
        for name in "qkvo"
    },
}

QWEN36_MIXED: Fields = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": QWEN36_LAYERS,
}  # fmt: skip

DEEPSEEK_V4: Fields = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "expert_dtype": "fp4",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 43,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {**FP8, "scale_fmt": "ue8m0"},
    "vocab_size": 129280,
}

LLAMA4_MAVERICK: Fields = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama4_text",
        "attn_temperature_tuning": True,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "interleave_moe_layer_step": 2,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 1048576,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "use_qk_norm": False,
        "vocab_size": 202048,
    },
    "vision_config": {"model_type": "llama4_vision_model"},
    "quantization_config": compressed(
        "float-quantized",
        ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*vision_model.*", "re:.*multi_modal_projector.*",
         "Llama4TextAttention", "re:.*feed_forward.(gate|up|down)_proj", "re:.*shared_expert.*"],
        **CHANNEL_FP8,
    ),
}  # fmt: skip

GPTQ: Fields = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.01,
    "checkpoint_format": "gptq",
}  # fmt: skip
AWQ: Fields = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": ["gate"],
}  # fmt: skip

PUBLISHED: dict[str, Published] = {
    "deepseek-ai/DeepSeek-V3": Published(DEEPSEEK_V3, 688.6),
    "deepseek-ai/DeepSeek-V3.1": Published(
        {**DEEPSEEK_V3, "quantization_config": {**FP8, "scale_fmt": "ue8m0"}}, 688.6
    ),
    "deepseek-ai/DeepSeek-V4-Flash": Published(DEEPSEEK_V4),
    "moonshotai/Kimi-K2-Instruct": Published(KIMI_K2, 1029.0),
    "moonshotai/Kimi-K2-Thinking": Published({**KIMI_K2, "quantization_config": KIMI_INT4}, 594.0),
    "moonshotai/Kimi-K2.5": Published(KIMI_K25, 595.0),
    "MiniMaxAI/MiniMax-M2": Published(MINIMAX_M2, 230.1),
    "Qwen/Qwen3-30B-A3B": Published(QWEN3_30B, 61.1),
    "Qwen/Qwen3-30B-A3B-FP8": Published(
        {**QWEN3_30B, "quantization_config": {**FP8, "modules_to_not_convert": QWEN3_KEPT}}, 31.2
    ),
    "Qwen/Qwen3-235B-A22B-FP8": Published(
        {**QWEN3_235B, "quantization_config": {**FP8, "modules_to_not_convert": QWEN3_KEPT}}
    ),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": Published({**QWEN3_30B, "quantization_config": GPTQ}, 16.9),
    "Qwen3-30B-A3B in AWQ, int4": Published({**QWEN3_30B, "quantization_config": AWQ}),
    "Qwen3-30B-A3B in compressed-tensors, int4": Published(
        {
            **QWEN3_30B,
            "quantization_config": compressed(
                "pack-quantized", ["lm_head", "re:.*mlp.gate$"],
                num_bits=4, type="int", strategy="group", group_size=128, symmetric=True,
            ),
        }
    ),
    "nvidia/Qwen3-30B-A3B-NVFP4": Published(
        QWEN3_30B, 18.1,
        {**MODELOPT, "quantization": {**NVFP4, "exclude_modules": ["lm_head", *QWEN3_GATES]}},
    ),
    "nvidia/Qwen3-30B-A3B-FP8": Published(
        QWEN3_30B, 31.2,
        {**MODELOPT, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*mlp.gate"]}},
    ),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": Published(
        {**QWEN36_35B, "quantization_config": QWEN36_MIXED}
    ),
    "zai-org/GLM-4.6-FP8": Published(
        {**GLM_46, "quantization_config": compressed("float-quantized", ["lm_head", "re:.*mlp.gate$"], **CHANNEL_FP8)}
    ),
    "openai/gpt-oss-20b": Published(GPT_OSS, 13.76),
    "openai/gpt-oss-120b": Published({**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}, 65.25),
    "mistralai/Mixtral-8x7B-v0.1": Published({**MIXTRAL, "torch_dtype": "bfloat16"}, 93.4),
    "TheBloke/Mixtral-8x7B-v0.1-AWQ": Published({**MIXTRAL, "quantization_config": AWQ}, 24.65),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": Published(LLAMA4_MAVERICK),
}  # fmt: skip
