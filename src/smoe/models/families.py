"""Descriptions of model families, from which the weights of a model are computed by arithmetic on its configuration.

Other families, and unusual configurations, are examined by building transformers' model without weights (`examine.py`),
which takes seconds and hundreds of MiB. A test compares both ways for every family in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from smoe.models import deepseek_v4_layers, kimi_k25_layers
from smoe.models import family_layers as layers
from smoe.models.family_parts import Weights
from smoe.models.outline import Buffer
from smoe.models.plain_config import PlainConfig


@dataclass(frozen=True)
class Family:
    """The description of a model family, from which the weights of its models are computed."""

    layer: Callable[[str, PlainConfig, int], Weights]
    """A function that yields the weights of one layer, given the layer's name, the configuration and the layer's
    number."""
    defaults: Mapping[str, Any]
    """Every field that determines a size, with its default value in transformers."""
    top_k: str = "num_experts_per_tok"
    router: str = "mlp.gate"
    """The name of the router within a layer."""
    has_gates: bool = True
    """Whether the routers take only hidden states as input."""
    by_tokens: Callable[[PlainConfig, int], bool] | None = None
    """A function that says whether the router of a layer chooses experts by a table of tokens. Such a router has no
    score correction, and takes the tokens as input too."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """{other name of a field in transformers: the name of the field}."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """{field: the value that it must have}. A field may also be missing. With another value, `examine.py` examines the
    model."""
    cached: Callable[[PlainConfig], tuple[int, int, int]] = layers.in_every_layer
    correction: str | None = None
    """The name, within a layer, of the buffer with the router's score correction."""
    final_norm: str = "model.norm"
    has_norm_bias: bool = False
    head_bias: str | None = None
    """The name of the field that says whether the output matrix has a bias."""
    rotary: str | None = "model.rotary_emb"
    """The name of the module with the frequencies of rotary embeddings; None: `buffers` has all of them."""
    turned: float = 1.0
    """The fraction of a head's dimensions that rotary embeddings rotate."""
    can_turn_less: bool = False
    """Whether a configuration may set another fraction than `turned`."""
    attention: str = "sdpa"
    is_transposed: bool = False
    """Whether transformers stores the experts' matrices as [inputs, outputs]."""
    takes_turns: bool = False
    """Whether rows of gate and up alternate in the experts' matrices."""
    keys: tuple[tuple[str, str], ...] = ()
    """Pairs (pattern, replacement) that turn checkpoint keys into transformers names."""
    has_keys: bool = True
    """Whether `keys` translates all keys of the checkpoints. Otherwise transformers reads them."""
    is_nested: bool = False
    """Whether the fields of the language model are in a nested configuration. Other models are next to it."""
    place: str = "model"
    """The name of the module that contains the embedding and the layers."""
    outside_layers: Callable[[PlainConfig], Weights] | None = None
    """A function that yields the weights outside the layers that only this family has, such as those of the other
    models if they are loaded too."""
    buffers: Callable[[PlainConfig], Mapping[str, Buffer]] | None = None
    """A function that returns the buffers that only this family has."""
    usual_form: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] | None = None
    """A function that takes the fields of the language model and of the whole configuration, and returns the fields of
    the language model by their usual names."""


_LLAMA = {"hidden_act": "silu", "tie_word_embeddings": False, "rope_parameters": None, "pad_token_id": None}
_QWEN = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_BLOCK_SPARSE = ((r"\.block_sparse_moe\.", ".mlp."),)


def _defaults(
    vocabulary: int,
    hidden: int,
    inner: int | None,
    depth: int,
    count: int,
    key_values: int | None,
    positions: int,
    **others: Any,
) -> dict[str, Any]:
    """Return the default values of the configuration fields of one family: those that all families have, with the given
    values, and the family's own fields `others`."""
    usual = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": depth,
        "num_attention_heads": count,
        "num_key_value_heads": key_values,
        "max_position_embeddings": positions,
    }
    return _LLAMA | usual | others


# fmt: off
_QWEN3_5 = Family(
    layers.qwen3_5,
    _defaults(
        248320, 2048, None, 40, 16, 2, 32768, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        num_experts_per_tok=8, num_experts=256, attention_bias=False, head_dim=256, linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        layer_types=(),
    ),
    cached=layers.with_linear_attention,
    turned=0.25,
    can_turn_less=True,
    keys=((r"^model\.language_model\.", "model."),),
)
_LLAMA4 = Family(
    layers.llama4,
    _defaults(
        202048, 5120, 8192, 48, 40, 8, 131072, intermediate_size_mlp=16384, head_dim=128, num_experts_per_tok=1,
        num_local_experts=16, moe_layers=(), interleave_moe_layer_step=1, attention_bias=False,
    ),
    router="feed_forward.router",
    aliases={"num_experts": "num_local_experts"},
    is_transposed=True,
    keys=((r"^language_model\.", ""),),
)
_INDEXED = {"index_head_dim": 128, "first_k_dense_replace": 3, "mlp_layer_types": (), "indexer_types": ()}
_DEEPSEEK_V3 = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8,
    "topk_group": 4,
}
_IN_EVERY_LAYER = {"attention_bias": False, "mlp_bias": False, "index_topk_pattern": None}
_DEEPSEEK_V3_FAMILY = Family(
    layers.deepseek_v3,
    _defaults(129280, 7168, 18432, 61, 128, 128, 4096, **_DEEPSEEK_V3, first_k_dense_replace=3),
    aliases={"num_local_experts": "n_routed_experts"},
    usual={"attention_bias": False},
    cached=layers.latents,
    correction="mlp.gate.e_score_correction_bias",
)

FAMILIES: Mapping[str, Family] = {
    "mixtral": Family(
        layers.mixtral,
        _defaults(32000, 4096, 14336, 32, 32, 8, 131072, num_experts_per_tok=2, num_local_experts=8, head_dim=None),
        aliases={"num_experts": "num_local_experts"},
        keys=_BLOCK_SPARSE,
    ),
    "phimoe": Family(
        layers.phimoe,
        _defaults(
            32064, 4096, 6400, 32, 32, 8, 131072, num_experts_per_tok=2, num_local_experts=16, attention_bias=False,
            lm_head_bias=False,
        ),
        router="mlp.router",
        has_norm_bias=True,
        head_bias="lm_head_bias",
        usual={"num_experts_per_tok": 2},
        keys=((r"\.block_sparse_moe\.gate\.", ".mlp.router."), *_BLOCK_SPARSE),
    ),
    "qwen2_moe": Family(
        layers.qwen2_moe,
        _defaults(
            151936, 2048, 5632, 24, 16, 16, 32768, **_QWEN, moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632, num_experts_per_tok=4, num_experts=60, qkv_bias=True,
        ),
    ),
    "qwen3_moe": Family(
        layers.qwen3_moe,
        _defaults(
            151936, 2048, 6144, 24, 32, 4, 32768, **_QWEN, moe_intermediate_size=768, num_experts_per_tok=8,
            num_experts=128, attention_bias=False,
        ),
        aliases={"num_local_experts": "num_experts"},
    ),
    "qwen3_next": Family(
        layers.qwen3_next,
        _defaults(
            151936, 2048, 5632, 48, 16, 2, 32768, **_QWEN, moe_intermediate_size=512,
            shared_expert_intermediate_size=512, num_experts_per_tok=10, num_experts=512, attention_bias=False,
            head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
            linear_num_key_heads=16, linear_num_value_heads=32, layer_types=(),
        ),
        cached=layers.with_linear_attention,
        turned=0.25,
        can_turn_less=True,
    ),
    "qwen3_5_moe": replace(_QWEN3_5, is_nested=True),
    "qwen3_5_moe_text": _QWEN3_5,
    "olmoe": Family(
        layers.olmoe,
        _defaults(
            50304, 2048, 2048, 16, 16, None, 4096, num_experts_per_tok=8, num_experts=64, attention_bias=False,
            pad_token_id=1,
        ),
        aliases={"num_local_experts": "num_experts"},
    ),
    "deepseek_v2": Family(
        layers.deepseek_v3,
        _defaults(
            102400, 4096, 11008, 32, 32, None, 2048, first_k_dense_replace=0, kv_lora_rank=512, q_lora_rank=1536,
            n_routed_experts=64, n_shared_experts=2, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            num_experts_per_tok=None, moe_intermediate_size=1407, n_group=None, topk_group=None, topk_method="greedy",
        ),
        aliases={"num_experts": "n_routed_experts"},
        usual={"attention_bias": False, "mlp_bias": False},
        cached=layers.latents,
    ),
    "deepseek_v3": _DEEPSEEK_V3_FAMILY,
    "kimi_k25": replace(
        _DEEPSEEK_V3_FAMILY,
        has_keys=False,
        is_nested=True,
        place="model.language_model",
        outside_layers=kimi_k25_layers.vision,
        rotary="model.language_model.rotary_emb",
        final_norm="model.language_model.norm",
        buffers=kimi_k25_layers.buffers,
        usual_form=kimi_k25_layers.usual_form,
    ),
    "deepseek_v4": Family(
        deepseek_v4_layers.layer,
        _defaults(
            129280, 4096, 2048, 43, 64, 1, 1048576, head_dim=512, q_lora_rank=1024, num_experts_per_tok=6,
            n_routed_experts=256, moe_intermediate_size=2048, layer_types=(), mlp_layer_types=(), num_hash_layers=3,
            hc_mult=4, o_groups=8, o_lora_rank=1024, index_n_heads=64, index_head_dim=128,
        ),
        aliases={"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
        usual={"attention_bias": False, "mlp_bias": False, "n_shared_experts": 1},
        cached=deepseek_v4_layers.cached,
        by_tokens=deepseek_v4_layers.is_by_tokens,
        correction="mlp.gate.e_score_correction_bias",
        has_keys=False,
        outside_layers=deepseek_v4_layers.head,
        rotary=None,
        attention="eager",
        buffers=deepseek_v4_layers.buffers,
        usual_form=deepseek_v4_layers.usual_form,
    ),
    "deepseek_v32": Family(
        layers.deepseek_v32,
        _defaults(129280, 7168, 18432, 61, 128, 128, 163840, **_DEEPSEEK_V3, **_INDEXED, index_n_heads=64),
        aliases={"num_local_experts": "n_routed_experts"},
        usual=_IN_EVERY_LAYER,
        cached=layers.latents_and_index,
        correction="mlp.gate.e_score_correction_bias",
    ),
    "glm_moe_dsa": Family(
        layers.deepseek_v32,
        _defaults(
            154880, 6144, 12288, 78, 64, 64, 202752, **_INDEXED, index_n_heads=32, kv_lora_rank=512, q_lora_rank=2048,
            n_routed_experts=256, n_shared_experts=1, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
            num_experts_per_tok=8, moe_intermediate_size=2048, n_group=1, topk_group=1,
        ),
        aliases={"num_local_experts": "n_routed_experts"},
        usual={**_IN_EVERY_LAYER, "index_topk_freq": 1},
        cached=layers.latents_and_index,
        correction="mlp.gate.e_score_correction_bias",
    ),
    "glm4_moe_lite": Family(
        layers.glm4_moe_lite,
        _defaults(
            154880, 2048, 10240, 47, 20, 20, 202752, mlp_layer_types=(), kv_lora_rank=512, q_lora_rank=768,
            n_routed_experts=64, n_shared_experts=1, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
            num_experts_per_tok=4, moe_intermediate_size=1536, n_group=1, topk_group=1,
        ),
        aliases={"num_local_experts": "n_routed_experts"},
        usual={"attention_bias": False, "first_k_dense_replace": 1},
        cached=layers.latents,
        correction="mlp.gate.e_score_correction_bias",
    ),
    "solar_open": Family(
        layers.solar_open,
        _defaults(
            196608, 4096, None, 48, 64, 8, 131072, head_dim=128, moe_intermediate_size=1280, num_experts_per_tok=8,
            n_shared_experts=1, n_routed_experts=128, n_group=1, topk_group=1, attention_bias=False,
        ),
        aliases={"num_local_experts": "n_routed_experts"},
        correction="mlp.gate.e_score_correction_bias",
    ),
    "exaone_moe": Family(
        layers.exaone_moe,
        _defaults(
            102400, 4096, 16384, 32, 32, 32, 2048, mlp_layer_types=(), first_k_dense_replace=1, num_experts=64,
            moe_intermediate_size=1024, num_experts_per_tok=8, num_shared_experts=1, n_group=1, topk_group=1,
            pad_token_id=0,
        ),
        correction="mlp.gate.e_score_correction_bias",
        keys=((r"\.mlp\.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
    ),
    "llama4": replace(_LLAMA4, is_nested=True),
    "llama4_text": _LLAMA4,
    "deepseek": Family(
        layers.deepseek,
        _defaults(
            102400, 2048, 10944, 28, 16, None, 4096, moe_intermediate_size=1408, n_routed_experts=64,
            n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, moe_layer_freq=1,
        ),
        aliases={"num_experts": "n_routed_experts"},
        usual={"attention_bias": False, "mlp_bias": False, "scoring_func": "softmax"},
    ),
    "gpt_oss": Family(
        layers.gpt_oss,
        _defaults(
            201088, 2880, 2880, 36, 64, 8, 131072, num_local_experts=128, head_dim=64, num_experts_per_tok=4,
            attention_bias=True,
            rope_parameters={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        ),
        router="mlp.router",
        aliases={"num_experts": "num_local_experts"},
        attention="eager",
        is_transposed=True,
        takes_turns=True,
    ),
    "glm4_moe": Family(
        layers.glm4_moe,
        _defaults(
            151552, 4096, 10944, 46, 96, 8, 131072, attention_bias=False, moe_intermediate_size=1408,
            num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=128, n_group=1, topk_group=1,
            first_k_dense_replace=1, use_qk_norm=False,
        ),
        aliases={"num_local_experts": "n_routed_experts"},
        correction="mlp.gate.e_score_correction_bias",
        turned=0.5,
        can_turn_less=True,
    ),
    "dots1": Family(
        layers.dots1,
        _defaults(
            152064, 4608, 10944, 62, 32, 32, 2048, moe_intermediate_size=1408, n_shared_experts=None,
            n_routed_experts=None, n_group=1, topk_group=1, num_experts_per_tok=None, first_k_dense_replace=0,
            attention_bias=False,
        ),
        aliases={"num_local_experts": "n_routed_experts"},
        correction="mlp.gate.e_score_correction_bias",
    ),
    "minimax_m2": Family(
        layers.minimax_m2,
        _defaults(
            200064, 3072, 1536, 62, 48, 8, 196608, head_dim=128, num_experts_per_tok=8, num_local_experts=256
        ),
        has_gates=False,
        can_turn_less=True,
        aliases={"num_experts": "num_local_experts"},
        correction="mlp.e_score_correction_bias",
        keys=_BLOCK_SPARSE,
    ),
    "ernie4_5_moe": Family(
        layers.ernie,
        _defaults(
            103424, 2560, 12288, 28, 20, 4, 131072, use_bias=False, moe_intermediate_size=1536, moe_k=6,
            moe_num_experts=64, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1,
            moe_layer_interval=1, tie_word_embeddings=True, pad_token_id=0,
        ),
        top_k="moe_k",
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        head_bias="use_bias",
        keys=((r"\.mlp\.moe_statics\.", ".mlp.gate.moe_statics."),),
    ),
    "granitemoe": Family(
        layers.granitemoe,
        _defaults(
            32000, 4096, 11008, 32, 32, None, 2048, attention_bias=False, num_local_experts=8, num_experts_per_tok=2
        ),
        router="block_sparse_moe.router",
        keys=(
            (r"\.block_sparse_moe\.input_linear\.weight", ".block_sparse_moe.experts.gate_up_proj"),
            (r"\.block_sparse_moe\.output_linear\.weight", ".block_sparse_moe.experts.down_proj"),
            (r"\.router\.layer\.", ".router."),
        ),
    ),
    "hunyuan_v1_moe": Family(
        layers.hunyuan,
        _defaults(
            290943, 4096, 11008, 32, 32, None, 2048, attention_bias=False, num_experts=1, moe_topk=1, head_dim=None,
            pad_token_id=0,
        ),
        top_k="moe_topk",
    ),
    "lfm2_moe": Family(
        layers.lfm2_moe,
        _defaults(
            65536, 2048, 7168, 32, 32, 8, 128000, moe_intermediate_size=1792, num_dense_layers=2,
            num_experts_per_tok=4, num_experts=32, conv_L_cache=3, layer_types=(), tie_word_embeddings=True,
            pad_token_id=0,
        ),
        router="feed_forward.gate",
        has_gates=False,
        usual={"conv_bias": False, "use_expert_bias": True},
        cached=layers.with_convolutions,
        correction="feed_forward.expert_bias",
        final_norm="model.embedding_norm",
        rotary="model.pos_emb",
    ),
    "xverse": Family(
        layers.xverse,
        _defaults(
            100534, 2560, 1728, 28, 32, None, 8192, num_experts=None, moe_top_k=6, num_shared_experts=2, pad_token_id=1
        ),
        top_k="moe_top_k",
        router="mlp.router",
        aliases={"num_experts_per_tok": "moe_top_k", "moe_intermediate_size": "intermediate_size"},
        usual={"attention_bias": False, "mlp_bias": False},
    ),
}
"""{`model_type`: description of the family}."""
# fmt: on
