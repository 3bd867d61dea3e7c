"""What arithmetic says of a model is what the library builds: of every family that is described so.

The oracle is the library's own model on the meta device, looked at by `examine.py`. Would catch a weight that is
forgotten, of another shape or counted twice, a default that is not the library's, a cache of another size.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig

from smoe.config import EngineConfig
from smoe.errors import ModelError
from smoe.models import gguf_sizes
from smoe.models.checkpoint import checkpoint_at
from smoe.models.described import described_at
from smoe.models.families import FAMILIES
from smoe.models.family_outline import plain_config
from smoe.models.finish_spec import position_limit
from smoe.models.model_sizes import by_arithmetic, model_sizes
from smoe.models.plain_config import UndescribedError
from smoe.models.read_spec import read_spec
from smoe.models.registration import register_local_families
from smoe.models.spec import LibrarySpec, ModelSpec
from smoe.presets import configure
from tests import families, gguf_converted, gguf_toy, zoo
from tests.gguf_windowed import TOYS
from tests.published_configs import PUBLISHED, Published

CONFIG = configure(context_tokens=32, resident_share=0.5)
LIBRARYS_KEYS = {"deepseek_v4", "kimi_k25"}
DESCRIBED = {*FAMILIES, "kimi_k2"}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "qwen2_moe": [{"decoder_sparse_step": 2, "mlp_only_layers": [3], "qkv_bias": False}],
    "qwen3_moe": [{"tie_word_embeddings": True, "attention_bias": True}],
    "qwen3_next": [{"attention_bias": True, "layer_types": ["full_attention", "linear_attention"] * 2}],
    "olmoe": [{"attention_bias": True}],
    "phimoe": [{"attention_bias": False, "lm_head_bias": False}],
    "deepseek_v2": [{"q_lora_rank": None, "first_k_dense_replace": 2}],
    "deepseek": [{"moe_layer_freq": 2, "n_shared_experts": None}],
    "gpt_oss": [{"attention_bias": False}],
    "glm4_moe": [{"attention_bias": False, "use_qk_norm": False, "rope_parameters": {"partial_rotary_factor": 1.0}}],
    "dots1": [{"attention_bias": True}],
    "minimax_m2": [{"rotary_dim": 8}],
    "ernie4_5_moe": [{"moe_layer_interval": 2, "use_bias": False, "moe_num_shared_experts": 0}],
    "granitemoe": [{"attention_bias": True, "tie_word_embeddings": True}],
    "xverse": [{"num_shared_experts": None}],
    "qwen3_5_moe_text": [{"attention_bias": True, "layer_types": ["full_attention", "linear_attention"] * 2}],
    "deepseek_v32": [{"mlp_layer_types": ["sparse", "dense"] * 2}, {"indexer_types": ["full", "shared"] * 2}],
    "deepseek_v3": [{"num_attention_heads": 5, "num_key_value_heads": 5}],
    "glm_moe_dsa": [{"indexer_types": ["full", "shared"] * 2, "first_k_dense_replace": 1}],
    "glm4_moe_lite": [
        {"q_lora_rank": None, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
        {"num_attention_heads": 5, "num_key_value_heads": 5},
    ],
    "solar_open": [{"attention_bias": True}],
    "exaone_moe": [{"first_k_dense_replace": 2, "num_shared_experts": 2}],
    "deepseek_v4": [
        {
            "layer_types": ["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"] * 2][
                :4
            ]
        },
        {"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"], "hc_mult": 2, "qk_rope_head_dim": None},
    ],
    "kimi_k25": [{"tie_word_embeddings": True}],
    "llama4_text": [{"moe_layers": [1, 2], "attention_bias": True}, {"interleave_moe_layer_step": 1}],
}
"""What published models of a family may have otherwise than its toy."""


def said(family: str, **others: Any) -> dict[str, Any]:
    """The config.json of a toy."""
    register_local_families(family)
    if family in zoo.FAMILIES:
        config = AutoConfig.for_model(family, **{**zoo._COMMON, **zoo._CONFIGS[family], **others})
    else:
        config = AutoConfig.for_model(**{**families.config_of(family).to_dict(), **others})
    return {**config.to_dict(), "model_type": family}


def written(folder: Path, fields: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def compare(ours: ModelSpec, theirs: LibrarySpec) -> None:
    for part in ("weights", "buffers", "sites", "anatomy", "embedding", "tied", "optional"):
        assert getattr(ours.outline, part) == getattr(theirs.outline, part), part
    for fact in ("dtype", "own_dtype", "context_tokens", "stored_bytes", "files", "doubts", "dense", "weights_bytes"):
        assert getattr(ours, fact) == getattr(theirs, fact), fact
    assert ours.demand(CONFIG) == theirs.demand(CONFIG)
    assert ours.dense_bytes_read == theirs.dense_bytes_read


CASES = [(family, {}) for family in FAMILIES]
CASES += [(family, more) for family, all_of in VARIANTS.items() for more in all_of]


@pytest.mark.parametrize(("family", "more"), CASES, ids=lambda value: value if isinstance(value, str) else len(value))
def test_the_library_builds_the_same(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    folder = written(tmp_path / family, said(family, **more))
    compare(by_arithmetic(folder, CONFIG)[1], read_spec(folder, CONFIG))


@pytest.mark.parametrize("name", [name for name, each in PUBLISHED.items() if each.config["model_type"] in DESCRIBED])
def test_published_configurations_of_few_layers(name: str, tmp_path: Path) -> None:
    """Their quantised releases, and one that is published under a name of its own."""
    published = PUBLISHED[name]
    few = {**published.config, "num_hidden_layers": 4, "layer_types": None}
    if "text_config" in few:
        text = {key: value for key, value in few["text_config"].items() if key != "layer_types"}
        few["text_config"] = text | {"num_hidden_layers": 4}
    folder = Published({key: value for key, value in few.items() if value is not None}).write(tmp_path)
    if published.hf_quant_config is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(published.hf_quant_config))
    compare(by_arithmetic(folder, CONFIG)[1], read_spec(folder, CONFIG))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_in_another_type(dtype: str, tmp_path: Path) -> None:
    config = configure(context_tokens=32, resident_share=0.5, dtype=dtype)
    for family in ("qwen3_next", "xverse", "glm4_moe"):
        folder = written(tmp_path / family, said(family))
        compare(by_arithmetic(folder, config)[1], read_spec(folder, config))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_defaults_are_the_librarys(family: str) -> None:
    """Would catch a new version of the library that takes another size where a config.json says none."""
    register_local_families(family)
    library = AutoConfig.for_model(family).get_text_config()
    for name, usual in FAMILIES[family].defaults.items():
        if name == "rope_parameters" or usual == () or not hasattr(library, name):
            continue
        theirs = getattr(library, name)
        settled = {"num_key_value_heads": library.num_attention_heads}.get(name) if usual is None else usual
        settled = library.num_hidden_layers - 1 if name == "moe_layer_end_index" else settled
        settled = 64 if (family, name) == ("deepseek_v2", "head_dim") else settled
        assert theirs == settled, name
    if all(FAMILIES[family].defaults.get(name, 1) is not None for name in ("num_experts", "n_routed_experts")):
        fields: dict[str, Any] = {"head_dim": 128}
        fields = {"text_config": fields} if FAMILIES[family].is_nested else fields
        assert position_limit(plain_config(family, fields)) == position_limit(library)


@pytest.mark.parametrize("family", sorted(gguf_toy.ARCHITECTURES))
def test_the_same_of_gguf_files(family: str, tmp_path: Path) -> None:
    if family == "gpt_oss":  # of which smoe reads MXFP4 alone
        path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "MXFP4", family)
    else:
        path = gguf_toy.write(tmp_path / "toy.gguf", gguf_toy.make(family))
    compare(by_arithmetic(path, CONFIG)[1], read_spec(path, CONFIG))


@pytest.mark.parametrize("kind", [Type.BF16, Type.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", TOYS)
def test_the_same_of_gguf_files_with_other_matrices(name: str, kind: Type, tmp_path: Path) -> None:
    architecture = TOYS[name]
    path = gguf_converted.write(tmp_path / "toy.gguf", architecture, gguf_converted.make(architecture), kind)
    if described_at(path).fields()[0] in FAMILIES:
        compare(by_arithmetic(path, CONFIG)[1], read_spec(path, CONFIG))
        assert not isinstance(model_sizes(path, CONFIG)[1], LibrarySpec), "only the library could describe it"


def test_of_quantised_gguf_files(tmp_path: Path) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q8_0", is_tied=True)
    compare(by_arithmetic(path, CONFIG)[1], read_spec(path, CONFIG))


@pytest.mark.parametrize(
    "family", sorted(name for name in set(FAMILIES) - set(zoo.FAMILIES) if FAMILIES[name].has_keys)
)
def test_checkpoints_of_the_other_families_are_found_likewise(family: str, tmp_path: Path) -> None:
    """As the library saves them; of one with images, those are in the files, too."""
    folder = families.save(family, tmp_path)
    described, ours = model_sizes(folder, CONFIG)
    theirs = read_spec(folder, CONFIG)
    assert not isinstance(ours, LibrarySpec), "only the library could describe it"
    assert described.experts(ours) == checkpoint_at(folder).experts(theirs)


@pytest.mark.parametrize("family", sorted(LIBRARYS_KEYS))
def test_files_whose_keys_only_the_library_translates(family: str, tmp_path: Path) -> None:
    """Would catch a plan that refuses such files, because arithmetic does not find its tensors in them."""
    assert isinstance(model_sizes(families.save(family, tmp_path), CONFIG)[1], LibrarySpec)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_experts_are_found_where_the_librarys_rules_find_them(family: str, toy: Any) -> None:
    folder = toy(family)
    described, ours = model_sizes(folder, CONFIG)
    theirs = read_spec(folder, CONFIG)
    assert not isinstance(ours, LibrarySpec), "only the library could describe it"
    assert described.experts(ours) == checkpoint_at(folder).experts(theirs)


ODD: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"model_type": "llama"}),
    ("mixtral", {"hidden_size": 64.0}),
    ("mixtral", {"hidden_act": "gelu"}),
    ("mixtral", {"num_key_value_heads": 3}),
    ("mixtral", {"pad_token_id": 128}),
    ("mixtral", {"attn_implementation": "eager"}),
    ("mixtral", {"quantization_config": {"quant_method": "bitsandbytes"}}),
    ("mixtral", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    ("mixtral", {"rope_parameters": {"rope_type": "yarn", "factor": "32"}}),
    ("mixtral", {"num_experts_per_tok": 9}),
    ("mixtral", {"dtype": "int8"}),
    ("deepseek_v3", {"n_group": 3}),
    ("lfm2_moe", {"layer_types": ["conv"] * 3}),
    ("hunyuan_v1_moe", {"moe_topk": [2, 2, 2, 2]}),
    ("qwen3_moe", {"partial_rotary_factor": 0.5}),
    ("llama4", {"text_config": "toy"}),
    ("exaone_moe", {"mlp_layer_types": ["dense"] * 3}),
    ("glm_moe_dsa", {"index_topk_freq": 2}),
    ("deepseek_v2", {"num_attention_heads": 5, "num_key_value_heads": 5}),
    ("deepseek_v4", {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 128}}),
    ("deepseek_v4", {"layer_types": None, "compress_ratios": [0, 5, 0, 4]}),
    ("kimi_k25", {"vision_config": {"hidden_size": "wide"}}),
]


@pytest.mark.parametrize(("family", "odd"), ODD, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_what_is_not_plain_is_left_to_the_library(family: str, odd: dict[str, Any], tmp_path: Path) -> None:
    folder = written(tmp_path / "odd", said(family) | odd)
    with pytest.raises((UndescribedError, ModelError)):  # or it is refused whoever reads it
        by_arithmetic(folder, EngineConfig())


def test_a_plan_indexes_the_experts_of_a_gguf_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 6,144 experts each time takes a tenth of a second. Another outline is indexed again."""
    path = gguf_toy.write(tmp_path / "toy.gguf", gguf_toy.make("qwen3_moe"))
    asked: list[int] = []
    index = gguf_sizes.index_gguf_experts
    monkeypatch.setattr(gguf_sizes, "index_gguf_experts", lambda *a: (asked.append(a[1].layer), index(*a))[1])
    described, spec = model_sizes(path, CONFIG)
    assert described.experts(spec) == described.experts(spec) and asked == [site.layer for site in spec.sites]
    described.experts(replace(spec, outline=replace(spec.outline)))
    assert len(asked) == 2 * len(spec.sites)
