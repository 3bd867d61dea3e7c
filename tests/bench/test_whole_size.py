"""Files with published models' geometry: read by the gguf package and by smoe, with the text and routing of the trace.

Would catch: a tensor of another name, type or shape than llama.cpp's quantizer writes, a file that smoe refuses, and
routing that is the random weights' own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from bench.whole_size.geometry import PUBLISHED, Geometry, LatentAttention, LinearAttention
from bench.whole_size.mixture import types_of
from bench.whole_size.random_blocks import blocks_of, random_blocks
from bench.whole_size.routing import first_token, steps_of
from bench.whole_size.tensors import tensors_of
from bench.whole_size.writer import file_bytes, write_file
from smoe import from_pretrained
from smoe.formats.registry import GGML
from smoe.simulator.synthetic import DrawnShape, synthesise
from smoe.trace.file import Trace
from smoe.trace.recorder import recording
from tests import gguf_toy

SMALL: dict[str, Any] = {
    "layers": 4, "hidden": 256, "heads": 4, "key_value_heads": 2, "head_dim": 64, "experts": 16, "top_k": 4,
    "inner": 256, "vocabulary": 400, "context_tokens": 4096,
}  # fmt: skip
FURTHER: dict[str, dict[str, Any]] = {
    "qwen3.6-35b-a3b-q4_k_m": {
        "shared_inner": 256,
        "linear": LinearAttention(full_every=4, key_heads=2, value_heads=4, head_dim=64, kernel=4),
    },
    "gpt-oss-20b-mxfp4": {"dense_inner": 256},
    "deepseek-v2-lite-q4_k_m": {
        "dense_inner": 256, "shared_inner": 512, "key_value_heads": 4,
        "latent": LatentAttention(rank=256, plain=32, rotated=32, values=64),
    },
    "glm-4.5-air-q2_k": {"dense_inner": 256, "shared_inner": 256},
}  # fmt: skip
NEW_TOKENS = 40


def small(name: str) -> Geometry:
    return replace(PUBLISHED[name], **{**SMALL, **FURTHER.get(name, {})})


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_toy.write(tmp_path_factory.mktemp("vocabulary") / "any.gguf", gguf_toy.make("qwen3_moe"))


@pytest.fixture(scope="module", params=PUBLISHED)
def written(
    request: pytest.FixtureRequest, vocabulary: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("whole") / "small.gguf"
    write_file(out, request.param, small(request.param), vocabulary)
    return request.param, out


def test_the_gguf_package_reads_it(written: tuple[str, Path]) -> None:
    name, path = written
    g = small(name)
    reader = gguf.GGUFReader(path)
    tensors = tensors_of(g)
    types = types_of(g, tensors)
    assert [each.name for each in reader.tensors] == [each.name for each in tensors]
    architecture = next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == g.architecture)
    known = gguf.get_tensor_name_map(architecture, g.layers)
    for found, tensor in zip(reader.tensors, tensors, strict=True):
        assert tuple(found.shape[::-1]) == tensor.shape
        assert found.tensor_type is Type[types[tensor.name]]
        assert known.get_name(tensor.name, (".weight", ".bias")) == tensor.name
        assert bool(np.isfinite(gguf.quants.dequantize(found.data, found.tensor_type)).all())


def test_the_text_and_the_routing_are_those_of_the_trace(written: tuple[str, Path], tmp_path: Path) -> None:
    name, path = written
    g = small(name)
    first, steps = first_token(g), steps_of(g)
    model = from_pretrained(path, memory="64MiB", context_tokens=128)
    with model.offload, recording(model, tmp_path / "run.trace"):
        text = model.generate(torch.tensor([[5]]), max_new_tokens=NEW_TOKENS, do_sample=False)[0]
    assert text.tolist() == [5, *(first + (6 + n) % steps for n in range(NEW_TOKENS))]
    shape = DrawnShape(g.experts, g.top_k, len(g.sparse_layers), steps)
    wanted = np.array([routing.top_k_index[0] for routing in synthesise(shape)]).reshape(steps, shape.layers, g.top_k)
    rows = Trace(tmp_path / "run.trace").rows
    right = [
        len(set(row["top_k_index"]) & set(wanted[(5 + row["step"]) % steps, row["layer"] - g.dense_layers])) / g.top_k
        for row in rows
    ]
    assert np.mean(right) > 0.8, np.mean(right)


def test_types_are_those_of_llama_cpps_quantizer() -> None:
    """Written down from its own run on a small model with as many layers."""
    raised = [*range(6), *range(8, 42, 3), *range(42, 48)]
    g = PUBLISHED["qwen3-30b-a3b-q4_k_m"]
    types = types_of(g, tensors_of(g))
    assert types["output.weight"] == "Q6_K" and types["token_embd.weight"] == "Q4_K"
    for name in ("attn_v", "ffn_down_exps"):
        kinds = [types[f"blk.{layer}.{name}.weight"] for layer in range(g.layers)]
        assert [layer for layer, kind in enumerate(kinds) if kind == "Q6_K"] == raised
        assert set(kinds) == {"Q4_K", "Q6_K"}
    for name in ("attn_q", "attn_k", "attn_output", "ffn_gate_exps", "ffn_up_exps"):
        assert {types[f"blk.{layer}.{name}.weight"] for layer in range(g.layers)} == {"Q4_K"}


def test_rows_that_are_no_whole_blocks_take_another_type() -> None:
    """1408 columns are five and a half blocks of 256."""
    g = PUBLISHED["deepseek-v2-lite-q4_k_m"]
    types = types_of(g, tensors_of(g))
    kinds = {types[f"blk.{layer}.ffn_down_exps.weight"] for layer in range(1, g.layers)}
    assert kinds == {"Q5_0", "Q8_0"} and types["blk.3.attn_k_b.weight"] == "Q5_0"


@pytest.mark.parametrize(
    ("name", "published_gb"),
    [("qwen3-30b-a3b-q4_k_m", 18.56), ("gpt-oss-20b-mxfp4", 12.11), ("deepseek-v2-lite-q4_k_m", 10.36)],
)
def test_files_are_as_large_as_published(name: str, published_gb: float) -> None:
    """As the hub shows them, the vocabulary's texts (6 to 13 MB) included."""
    tensors = tensors_of(PUBLISHED[name])
    assert file_bytes(tensors, types_of(PUBLISHED[name], tensors)) / 1e9 == pytest.approx(published_gb, rel=1.5e-3)


@pytest.mark.parametrize("form", ["Q2_K", "Q3_K", "Q4_0", "Q4_K", "Q5_0", "Q6_K", "Q8_0", "MXFP4"])
def test_random_blocks_have_the_size_that_is_asked_for(form: str) -> None:
    blocks = random_blocks(GGML[form], 500, 0.02, np.random.default_rng(0))
    numbers = gguf.quants.dequantize(blocks.reshape(500, -1), Type[form])
    assert abs(numbers.mean()) < 0.004
    assert numbers.std() == pytest.approx(0.02, rel=0.5 if form == "MXFP4" else 0.1)


@pytest.mark.parametrize(("form", "error"), [("Q2_K", 0.6), ("Q4_K", 0.12), ("Q6_K", 0.03), ("Q8_0", 0.005)])
def test_blocks_of_numbers_are_near_to_them(form: str, error: float) -> None:
    numbers = np.random.default_rng(0).standard_normal((3, 512), np.float32)
    found = gguf.quants.dequantize(blocks_of(GGML[form], numbers), Type[form])
    assert np.abs(found - numbers).mean() < error


def test_a_vocabulary_of_another_size(vocabulary: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than the model's 50"):
        write_file(tmp_path / "out.gguf", "toy", replace(small("qwen3-30b-a3b-q4_k_m"), vocabulary=50), vocabulary)
