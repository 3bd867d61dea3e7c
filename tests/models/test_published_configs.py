"""Published configurations: each is read, and its bytes are those of the published files, or the plan says why not.

Would catch: a quantised release counted as bf16, one that is refused for how it spells what it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.models.module_names import in_decoder
from smoe.models.read_spec import read_spec
from smoe.models.released_schemes import read_scheme, stated_quantisation
from smoe.models.spec import ModelSpec
from smoe.presets import configure
from smoe.report.forecast import forecast
from tests.published_configs import FP8, KIMI_K2, KIMI_K25, MINIMAX_M2, NVFP4, PUBLISHED, QWEN3_30B, Published

_TOLERANCE = 0.02
SMALL = {"num_hidden_layers": 4}
"""Of a configuration that is looked at for how it is read, not for its bytes."""


def spec_of(published: Published, folder: Path) -> ModelSpec:
    return read_spec(published.write(folder), configure())


@pytest.mark.parametrize("name", [name for name, each in PUBLISHED.items() if each.files_gb is not None])
def test_files_are_as_large_as_published_or_a_doubt_is_stated(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    spec = spec_of(published, tmp_path)
    assert spec.files is not None and published.files_gb is not None
    difference = abs(spec.files.together / 1e9 / published.files_gb - 1)
    further = [doubt for doubt in spec.doubts if "multi-token prediction" in doubt]
    assert difference < _TOLERANCE or (further and difference < 0.03)


@pytest.mark.parametrize("name", [name for name, each in PUBLISHED.items() if each.files_gb is None])
def test_releases_of_unknown_size_are_read_as_quantised(name: str, tmp_path: Path) -> None:
    spec = spec_of(PUBLISHED[name], tmp_path)
    assert spec.files is not None and spec.files.experts is not None and spec.stored_bytes is not None
    weights = sum(site.experts * sum(part.shape[0] * part.shape[1] for part in site.parts) for site in spec.sites)
    bits = 8 * spec.files.experts / weights
    is_four = any(word in name for word in ("NVFP4", "int4", "V4"))
    assert 4 < bits < 4.6 if is_four else 8 <= bits < 8.1


def test_kimi_k2_5_states_its_quantisation_in_its_text_model(tmp_path: Path) -> None:
    """Its vision tower, and what the lists name, are in full."""
    stated = stated_quantisation(Published(KIMI_K25).write(tmp_path) / "config.json")
    scheme = read_scheme(stated)
    assert stated is not None and scheme is not None and stated.is_of_text
    assert (scheme.bits, scheme.columns_each) == (4, 32)
    assert scheme.of("model.vision_tower.encoder.layers.0.mlp.fc1") is None
    assert scheme.of("model.language_model.layers.0.self_attn.o_proj") is None
    assert scheme.of_experts("model.language_model.layers.1.mlp.experts") == scheme


def test_kimi_k2_is_the_librarys_deepseek_v3(tmp_path: Path) -> None:
    spec = spec_of(Published({**KIMI_K2, **SMALL}), tmp_path)
    assert type(spec.shell).__module__.startswith("transformers.models.deepseek_v3")
    assert spec.sites[0].experts == 384 and spec.anatomy.top_k[1] == 8
    assert any("'kimi_k2'" in doubt and "'deepseek_v3'" in doubt for doubt in spec.doubts)


def test_an_unknown_family_is_read_by_its_class_or_refused_by_name(tmp_path: Path) -> None:
    """Without code of its own as well, as SGLang's releases of DeepSeek-V4 are."""
    published = {**KIMI_K2, **SMALL, "model_type": "kimi_ref"}
    del published["auto_map"]
    spec = spec_of(Published(published), tmp_path)
    assert any("'kimi_ref'" in doubt and "'deepseek_v3'" in doubt for doubt in spec.doubts)
    with pytest.raises(UnsupportedModelError, match=r"neither the family 'kimi_ref' nor a class \['V9'\]; docs"):
        spec_of(Published({**published, "architectures": ["V9"]}), tmp_path)


def test_code_in_a_repository_is_never_executed(tmp_path: Path) -> None:
    """Neither where the library has the class nor where it has not."""
    code = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (tmp_path / name).write_text(code)
    spec_of(Published({**KIMI_K2, **SMALL}), tmp_path)
    unknown = {**KIMI_K2, **SMALL, "architectures": ["DeepseekV9ForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match=r"'kimi_k2'.*DeepseekV9ForCausalLM.*'auto_map'.*not executed"):
        spec_of(Published(unknown), tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("spelled", ["e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn"])
def test_spellings_of_fp8(spelled: str, tmp_path: Path) -> None:
    said = {**MINIMAX_M2, "quantization_config": {**MINIMAX_M2["quantization_config"], "fmt": spelled}}
    scheme = read_scheme(stated_quantisation(Published(said).write(tmp_path) / "config.json"))
    assert scheme is not None and scheme.leaves_out("model.layers.3.mlp.gate")
    assert not scheme.leaves_out("model.layers.3.mlp.experts.0.gate_proj")


STATED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, object]] = {
    "nothing anywhere": ({}, None, None),
    "an empty object": ({"quantization_config": {}}, None, None),
    "modelopt for the KV cache alone": ({}, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, None),
    "modelopt's file": ({}, {"quantization": NVFP4}, "modelopt"),
    "both, of which config.json counts": ({"quantization_config": FP8}, {"quantization": NVFP4}, "fp8"),
    "under its older name": (
        {"compression_config": {"quant_method": "compressed-tensors"}},
        None,
        "compressed-tensors",
    ),
    "in a language model": ({"llm_config": {"quantization_config": FP8}}, None, "fp8"),
}


@pytest.mark.parametrize("what", STATED)
def test_where_a_quantisation_is_stated(what: str, tmp_path: Path) -> None:
    said, beside, wanted = STATED[what]
    stated = stated_quantisation(
        Published({**QWEN3_30B, **said}, hf_quant_config=beside).write(tmp_path) / "config.json"
    )
    assert (None if stated is None else stated.method) == wanted


def test_a_modelopt_file_that_is_none(tmp_path: Path) -> None:
    place = Published(QWEN3_30B, hf_quant_config={"quantization": "NVFP4"}).write(tmp_path) / "config.json"
    with pytest.raises(CheckpointError, match=r"'quantization' of .*hf_quant_config\.json is 'NVFP4'"):
        stated_quantisation(place)


def test_modelopts_layers_may_lie_in_its_own_file(tmp_path: Path) -> None:
    layers = {"model.layers.0.mlp.experts.0.down_proj": {"quant_algo": "NVFP4"}, "lm_head": {"quant_algo": "FP8"}}
    said = {**QWEN3_30B, "quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}}
    beside = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    scheme = read_scheme(stated_quantisation(Published(said, hf_quant_config=beside).write(tmp_path) / "config.json"))
    assert scheme is not None
    experts, output = scheme.of_experts("model.layers.0.mlp.experts"), scheme.of("lm_head")
    assert experts is not None and experts.is_float4 and output is not None and output.bits == 8
    assert scheme.of("model.layers.0.self_attn.q_proj") is None


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_modelopts_names_of_nvfp4(algorithm: str, tmp_path: Path) -> None:
    """With activations that are quantised and without: the weights are stored alike."""
    published = Published(QWEN3_30B, hf_quant_config={"quantization": {**NVFP4, "quant_algo": algorithm}})
    scheme = read_scheme(stated_quantisation(published.write(tmp_path) / "config.json"))
    assert scheme is not None and scheme.is_float4 and scheme.columns_each == 16


MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": (MIXED, "MIXED_PRECISION' without 'quantized_layers'"),
    "an unknown way": (
        {**MIXED, "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "W4A8_AWQ"}}},
        "quantised as 'W4A8_AWQ'",
    ),
    "some layers' experts": (
        {**MIXED, "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}}},
        r"experts of 1 layers are quantised, those of 3 \(model\.layers\.1\.mlp\.experts first\) are not",
    ),
    "experts that modelopt quantised once more": (
        {**FP8, "expert_dtype": "fp4", "moe_quant_algo": "NVFP4"},
        r"quantised once more by modelopt \(moe_quant_algo 'NVFP4'\)",
    ),
    "experts in another way": ({**FP8, "expert_dtype": "int3"}, "have the expert_dtype 'int3'"),
    "another method in the text model": ({"quant_method": "quark"}, r"quantised \(quark\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_read_is_refused_by_name(what: str, tmp_path: Path) -> None:
    said, message = REFUSED[what]
    with pytest.raises(UnsupportedModelError, match=message):
        spec_of(Published({**QWEN3_30B, **SMALL, "quantization_config": said}), tmp_path)
    if said.get("quant_method") == "quark":
        text = {**KIMI_K25["text_config"], **SMALL, "quantization_config": said}
        with pytest.raises(UnsupportedModelError, match=message):
            spec_of(Published({**KIMI_K25, "text_config": text}), tmp_path)


def test_a_release_that_leaves_its_experts_in_full(tmp_path: Path) -> None:
    said = {**QWEN3_30B, **SMALL, "quantization_config": {**FP8, "modules_to_not_convert": ["re:.*experts.*"]}}
    assert spec_of(Published(said), tmp_path).stored_bytes is None


@pytest.mark.parametrize(
    ("left_out", "words"),
    [("torch_dtype", "names no dtype: what is not quantised is counted as bfloat16"), ("tie_word_embeddings", "")],
)
def test_what_a_configuration_does_not_say_is_said(left_out: str, words: str, tmp_path: Path) -> None:
    said = {key: value for key, value in {**QWEN3_30B, **SMALL}.items() if key != left_out}
    doubts = spec_of(Published(said), tmp_path).doubts
    assert any(words in doubt for doubt in doubts) if words else not doubts  # its family's default is an own matrix


def test_an_embedding_that_is_tied_by_default(tmp_path: Path) -> None:
    said = {**KIMI_K25, "text_config": {**KIMI_K25["text_config"], **SMALL}}
    said = json.loads(json.dumps(said))
    del said["tie_word_embeddings"], said["text_config"]["tie_word_embeddings"]
    doubts = spec_of(Published(said), tmp_path).doubts
    assert any("whether the output matrix is the embedding" in doubt and "GiB more" in doubt for doubt in doubts)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.layers.3.mlp.experts", "layers.3.mlp.experts"),
        ("language_model.model.layers.3.mlp", "layers.3.mlp"),
        ("model.language_model.layers.*.self_attn*", "layers.*.self_attn*"),
        ("mtp.layers.0.mlp.experts", ""),
        ("model.vision_tower.encoder.layers.0.mlp", ""),
        ("model.visual.blocks.0.attn", ""),
        ("language_model.lm_head", "lm_head"),
        ("model.embed_tokens", ""),
    ],
)
def test_names_within_the_decoder(name: str, wanted: str) -> None:
    assert in_decoder(name) == wanted


def test_a_plan_states_what_files_take_and_what_memory_takes(tmp_path: Path) -> None:
    """Of Kimi K2.5, whose scales are for 32 numbers each."""
    text = {**KIMI_K25["text_config"], **SMALL}
    folder = Published({**KIMI_K25, "text_config": text}).write(tmp_path)
    value = forecast(str(folder), configure(memory_bytes=60 << 30)).as_json()
    assert value["experts_bytes"] / value["experts_file_bytes"] == pytest.approx(5.25 / 4.5)
    assert value["file_bytes"] - value["experts_file_bytes"] == pytest.approx(value["dense_bytes"], rel=0.01)
    assert any("in the files (+17%)" in line for line in value["remarks"])
