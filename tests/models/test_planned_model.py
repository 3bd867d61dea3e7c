"""Rough sizes of models that smoe cannot run, from a config.json or the header of a GGUF file.

Would catch a model without any figures because its family is unknown, figures far from those of a known family with the
same fields, and rough figures of a model that smoe can run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from smoe.errors import BudgetError, ModelError, NotMoEError, UnsupportedModelError
from smoe.memory.dtypes import BY_NAME
from smoe.models.library_names import refuse_unknown_family
from smoe.models.model_sizes import model_sizes
from smoe.models.planned_model import planned_model
from smoe.models.spec import own_dtype
from smoe.models.usual_fields import usual_config
from smoe.presets import configure
from smoe.report.forecast import forecast
from tests import gguf_toy
from tests.published_configs import (
    DEEPSEEK_V3,
    GLM_46,
    KIMI_K25,
    MINIMAX_M2,
    MIXTRAL,
    QWEN3_30B,
    QWEN36_35B,
    Published,
)
from tests.rough_toys import EXPERTS, HIDDEN, LAYERS, MATRIX, NEW_FAMILY, Q4_K, Q8_0, VOCABULARY, new_folder, new_gguf

CONFIG = configure()
KNOWN = {
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe": GLM_46,
    "kimi_k25": KIMI_K25,
    "minimax_m2": MINIMAX_M2,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_30B,
}
W4A8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "input_activations": {"num_bits": 8, "type": "int"},
            "weights": {"num_bits": 4, "type": "int", "strategy": "channel"},
        }
    },
}
LONGCAT: dict[str, Any] = {
    "model_type": "longcat_flash",
    "architectures": ["LongcatFlashForCausalLM"],
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "n_routed_experts": 8,
    "moe_topk": 2,
    "zero_expert_num": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


@pytest.mark.parametrize("family", KNOWN)
def test_an_unknown_family_takes_about_what_a_known_one_with_its_fields_takes(family: str, tmp_path: Path) -> None:
    exact = model_sizes(Published(KNOWN[family]).write(tmp_path / "known"), CONFIG)[1]
    found = planned_model(Published(KNOWN[family] | NEW_FAMILY).write(tmp_path / "new"), CONFIG)
    rough = found.spec
    assert found.obstacle is not None and "neither the family 'newmoe'" in found.obstacle
    assert rough.experts_bytes == pytest.approx(exact.experts_bytes, rel=0.01)
    assert rough.expert_bytes_per_token == pytest.approx(exact.expert_bytes_per_token, rel=0.01)
    assert rough.weights_bytes == pytest.approx(exact.weights_bytes, rel=0.1)
    assert rough.anatomy.kv_bytes_per_token == exact.anatomy.kv_bytes_per_token


def test_experts_by_hand(tmp_path: Path) -> None:
    """48 layers of 128 experts, each with three matrices of 2048 x 768 in two bytes: 9 MiB, 54 GiB together."""
    spec = planned_model(new_folder(tmp_path), CONFIG).spec
    assert (spec.expert_bytes, spec.experts_bytes) == (9 << 20, 54 << 30)
    assert spec.expert_bytes_per_token == 48 * 8 * (9 << 20)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"first_k_dense_replace": 3}, 45),
        ({"expert_layer_period": 2}, 24),
        ({"moe_layer_freq": [0, 0] + [1] * 46}, 46),
        ({"mlp_only_layers": [0, 1]}, 46),
        ({"num_local_experts": None, "num_experts": None, "moe_config": {"moe_num_experts": 128}}, 48),
        ({"num_experts_per_tok": None, "moe_k": [8, 8]}, 48),
    ],
)
def test_fields_that_only_some_families_have(fields: dict[str, Any], layers: int, tmp_path: Path) -> None:
    spec = planned_model(new_folder(tmp_path, **fields), CONFIG).spec
    assert len(spec.sites) == layers and {site.experts for site in spec.sites} == {128}
    assert set(spec.anatomy.top_k.values()) == {8}


def test_the_fields_of_the_language_model_are_read(tmp_path: Path) -> None:
    exact = model_sizes(Published(QWEN36_35B).write(tmp_path / "known"), CONFIG)[1]
    rough = planned_model(Published(QWEN36_35B | NEW_FAMILY).write(tmp_path / "new"), CONFIG).spec
    assert rough.experts_bytes == exact.experts_bytes


def test_sizes_that_are_assumed_are_remarks(tmp_path: Path) -> None:
    spec = planned_model(new_folder(tmp_path, vocab_size=None), CONFIG).spec
    assert any("no vocab_size: 131,072 is assumed" in doubt for doubt in spec.doubts)


@pytest.mark.parametrize(
    ("quantisation", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (8, 8.6)),
        ({"quant_method": "strange", "bits": 4}, (4, 4.6)),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, (8, 8.6)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}, (4, 4.6)),
        ({"quant_method": "strange"}, (16, 16)),
        ({"load_in_4bit": True, "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0}, (4, 4.6)),
        ({"load_in_4bit": False, "load_in_8bit": True, "bnb_4bit_quant_type": "fp4"}, (8, 8.6)),
        (W4A8, (4, 4.6)),
        ({"quant_method": "exl2", "bits": 6.0}, (8, 8.6)),
        ({"quant_method": "exl2", "bits": 5}, (4, 4.6)),
        ({"quant_method": "strange", "bits": 1}, (2, 3.1)),
        ({"quant_method": "strange", "bits": "4"}, (4, 4.6)),
        ({"quant_method": "strange", "bits": 16}, (16, 16)),
        ({"quant_method": "strange", "w_bit": 3}, (3, 3.6)),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 2}}}, (2, 3.1)),
        ({"quant_method": "quanto", "activations": "int8", "weights": "int4"}, (4, 4.6)),
        ({"quant_method": "torchao", "quant_type": "int8_dynamic_activation_int4_weight"}, (4, 4.6)),
        ({"quant_method": "strange", "quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": "FP8"}, (4, 4.6)),
        ({"quant_method": "strange", "bits": 4, "dynamic": {"+:.*q_proj": {"bits": 8}}}, (4, 4.6)),
        ({"quant_method": "strange", "bits": True, "num_bits": [4], "w_bit": "x", "nbits": -4}, (16, 16)),
    ],
)
def test_experts_of_any_quantisation_have_about_its_bits(
    quantisation: dict[str, Any], bits: tuple[float, float], tmp_path: Path
) -> None:
    spec = planned_model(new_folder(tmp_path, quantization_config=quantisation), CONFIG).spec
    assert bits[0] <= 8 * spec.expert_bytes / (3 * 2048 * 768) <= bits[1]


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_the_quantisation_of_the_language_model_is_read(key: str, tmp_path: Path) -> None:
    settings = {"quant_method": "strange", "bits": 4}
    top = planned_model(new_folder(tmp_path / "top", **{key: settings}), CONFIG).spec
    fields = {**QWEN36_35B, **NEW_FAMILY}
    fields["text_config"] = {**fields["text_config"], key: settings}
    nested = planned_model(Published(fields).write(tmp_path / "nested"), CONFIG).spec
    assert top.stored_bytes is not None and nested.stored_bytes is not None


def test_an_unknown_number_of_bits_is_a_remark(tmp_path: Path) -> None:
    folders = [
        new_folder(tmp_path / str(number), **more)
        for number, more in enumerate(
            [
                {"quantization_config": {"quant_method": "strange"}},
                {"quantization_config": {"quant_method": "strange", "bits": 4}},
                {"quantization_config": {"quant_method": "strange", "bits": 16}},
                {},
            ]
        )
    ]
    remarks = [" ".join(planned_model(folder, CONFIG).spec.doubts) for folder in folders]
    assert ["do not say with how many bits" in each for each in remarks] == [True, False, False, False]


@pytest.mark.parametrize("dtype", [["a"], {"a": 1}, 5])
def test_a_dtype_that_is_no_name_is_absent(dtype: Any, tmp_path: Path) -> None:
    fields, own = usual_config("newmoe", {**QWEN3_30B, "torch_dtype": dtype, "dtype": dtype})[0], BY_NAME["bfloat16"]
    assert own_dtype(fields) == own
    assert planned_model(new_folder(tmp_path, torch_dtype=dtype), CONFIG).spec.own_dtype == own


@pytest.mark.parametrize("lacking", ["num_hidden_layers", "hidden_size", "num_experts", "num_experts_per_tok"])
def test_a_missing_field_is_named(lacking: str, tmp_path: Path) -> None:
    words = f"neither the family 'newmoe'.* cannot estimate its speed either: config.json lacks the field '{lacking}'"
    with pytest.raises(UnsupportedModelError, match=words):
        planned_model(new_folder(tmp_path, **{lacking: None}), CONFIG)


def test_a_dense_model_of_an_unknown_family_seems_to_have_no_experts(tmp_path: Path) -> None:
    dense = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = "neither the family 'newmoe'.* seems to have no experts, and smoe is for Mixture-of-Experts models"
    with pytest.raises(UnsupportedModelError, match=words):
        planned_model(Published(dense | NEW_FAMILY).write(tmp_path / "dense"), CONFIG)
    with pytest.raises(UnsupportedModelError) as raised:
        planned_model(new_folder(tmp_path / "lacking", num_experts_per_tok=None), CONFIG)
    assert "seems to have no experts" not in str(raised.value)


def test_sizes_that_contradict_each_other_come_after_the_real_reason(tmp_path: Path) -> None:
    folder = new_folder(tmp_path, num_experts=8, num_experts_per_tok=[20])
    words = r"neither the family 'newmoe'.* either: according to .* a token uses 20 experts"
    with pytest.raises(UnsupportedModelError, match=words) as raised:
        planned_model(folder, CONFIG)
    assert str(raised.value).index("neither the family") < str(raised.value).index("a token uses 20 experts")


def test_a_family_whose_experts_cannot_be_computed(tmp_path: Path) -> None:
    found = planned_model(Published(LONGCAT).write(tmp_path), CONFIG)
    assert found.obstacle is not None and "does not expose" in found.obstacle
    assert found.spec.experts_bytes == 2 * 8 * 3 * 64 * 32 * 2


def test_a_model_that_runs_has_no_obstacle_and_exact_sizes(tmp_path: Path) -> None:
    folder = Published(QWEN3_30B).write(tmp_path)
    found = planned_model(folder, CONFIG)
    assert found.obstacle is None and found.spec.weights_bytes == model_sizes(folder, CONFIG)[1].weights_bytes


def test_a_dense_model_and_images_of_a_text_model_are_refused_as_before(tmp_path: Path) -> None:
    dense = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(NotMoEError, match="dense model"):
        planned_model(Published(dense).write(tmp_path / "dense"), CONFIG)
    with pytest.raises(NotMoEError, match="dense model"):
        planned_model(new_gguf(tmp_path / "dense.gguf", entries={"expert_count": 0}), CONFIG)
    with pytest.raises(ModelError, match="newmoe"):
        planned_model(new_folder(tmp_path / "images"), configure(images=True))


@pytest.mark.parametrize("architecture", ["foomoe", "grok"])
def test_a_gguf_file_of_any_architecture_has_the_sizes_of_its_tensors(architecture: str, tmp_path: Path) -> None:
    found = planned_model(new_gguf(tmp_path / "new.gguf", architecture), CONFIG)
    spec = found.spec
    assert found.obstacle is not None and f"architecture '{architecture}', which smoe does not read" in found.obstacle
    assert [(site.layer, site.experts) for site in spec.sites] == [(layer, EXPERTS) for layer in range(LAYERS)]
    assert spec.expert_bytes == MATRIX * (2 * Q4_K + Q8_0)
    assert spec.experts_bytes == LAYERS * EXPERTS * spec.expert_bytes and set(spec.anatomy.top_k.values()) == {2}
    quantised = 2 * VOCABULARY * HIDDEN + LAYERS * (512 * HIDDEN + MATRIX)
    in_full = LAYERS * (HIDDEN + EXPERTS * HIDDEN)
    assert spec.weights_bytes == quantised * Q8_0 + in_full * 2
    assert spec.anatomy.kv_bytes_per_token == LAYERS * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("heads", "cached"), [([2, 0, 1], 3), (["a", "b", "c"], 3 * 4), ([2, -5, 1], 3), ([1.5, 2.5, 1.0], 3 * 4)]
)
def test_heads_by_layer_are_whole_numbers(heads: list[Any], cached: int, tmp_path: Path) -> None:
    """Other values are left out. Without any, as many heads are cached as the model has: 4 in each layer."""
    path = new_gguf(tmp_path / "new.gguf", entries={"attention.head_count_kv": heads})
    assert planned_model(path, CONFIG).spec.anatomy.kv_bytes_per_token == cached * 2 * 64 * 2


def test_a_type_of_a_gguf_file_that_is_a_list(tmp_path: Path) -> None:
    path = new_gguf(tmp_path / "new.gguf", more={"general.type": [1, 2]})
    assert planned_model(path, CONFIG).spec.experts_bytes > 0


def test_layers_for_multi_token_prediction_are_not_counted(tmp_path: Path) -> None:
    spec = planned_model(new_gguf(tmp_path / "new.gguf", entries={"nextn_predict_layers": 1}), CONFIG).spec
    assert len(spec.sites) == LAYERS - 1 and not any("blk.2." in name for name in spec.outline.weights)


def test_a_missing_entry_of_a_gguf_file_is_named(tmp_path: Path) -> None:
    path = new_gguf(tmp_path / "new.gguf", entries={"expert_used_count": 0})
    with pytest.raises(UnsupportedModelError, match=r"lacks the entry 'foomoe\.expert_used_count'"):
        planned_model(path, CONFIG)


def test_a_file_that_is_no_language_model_has_no_plan(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="sees images"):
        planned_model(new_gguf(tmp_path / "new.gguf", "clip"), CONFIG)


def test_the_experts_of_a_known_file_are_found_likewise(tmp_path: Path) -> None:
    """A file that smoe reads, and the same tensors under an unknown architecture."""
    path = gguf_toy.write(tmp_path / "toy.gguf", gguf_toy.make("qwen3_moe"))
    exact = model_sizes(path, CONFIG)[1]
    other = tmp_path / "other.gguf"
    other.write_bytes(path.read_bytes().replace(b"qwen3moe", b"qwen9moe"))
    rough = planned_model(other, CONFIG).spec
    assert (rough.experts_bytes, rough.expert_bytes) == (exact.experts_bytes, exact.expert_bytes)
    assert rough.weights_bytes == pytest.approx(exact.weights_bytes, rel=0.05)
    assert rough.anatomy.kv_bytes_per_token == exact.anatomy.kv_bytes_per_token


def test_a_budget_that_is_too_small_names_both_reasons(tmp_path: Path) -> None:
    with pytest.raises(
        BudgetError, match=r"(?s)cannot run this model: .*If it could, a budget of 1\.00 GiB cannot hold"
    ):
        forecast(str(new_folder(tmp_path)), configure(memory_bytes=1 << 30))


def test_names_in_the_files_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an import of transformers."""
    monkeypatch.delitem(sys.modules, "transformers")
    place = tmp_path / "config.json"
    for known in ({"model_type": "jamba"}, {"model_type": "xverse"}, {"model_type": "glm5_next_text"}):
        refuse_unknown_family(place, known)
    refuse_unknown_family(place, {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]})
    with pytest.raises(UnsupportedModelError, match=r"neither the family 'newmoe' nor a class \['NewMoeForCausalLM'\]"):
        refuse_unknown_family(place, NEW_FAMILY)
