"""Quantised releases (fp8, NVFP4, compressed-tensors, GPTQ, AWQ) beside the library's model of their numbers.

Would catch: a word's codes in another order, zero points one off, scales of another row or turned, a matrix that is not
turned, a result that hangs on the budget or on where pieces of a file end, a layer beside the experts left as codes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from smoe import from_pretrained
from smoe.errors import CheckpointError, SmoeError, UnsupportedModelError
from smoe.formats.registry import FORMATS
from smoe.memory.safetensors_index import index_checkpoint
from smoe.memory.tensor_bytes import assembled
from smoe.models.quantised_linear import QuantisedLinear
from smoe.models.read_spec import read_spec
from smoe.models.reference import stored_numbers
from smoe.models.released_schemes import scheme_of
from smoe.models.released_tensors import joined
from smoe.presets import configure
from tests import oracle, released_toy
from tests.models.test_gguf_quantised import PROMPT, assert_near, steps
from tests.packs import pack_folder
from tests.released_toy import SCHEMES, Tensors

Open = Callable[..., PreTrainedModel]
REORDERED = ["gptq, in order of activations", "compressed int4, in order of activations"]
SERVED = [name for name in SCHEMES if name not in REORDERED]
served = pytest.mark.parametrize("name", SERVED)
OF_EACH_KIND = ("fp8", "nvfp4", "compressed int4", "gptq", "awq")
FIRST = "model.layers.0.mlp.experts.0.gate_proj"


@served
def test_logits_are_those_of_the_dequantised_model(name: str, tmp_path: Path, open_model: Open) -> None:
    wanted = steps(released_toy.save(tmp_path, SCHEMES[name]), PROMPT)
    model = open_model(tmp_path, "minimum", activations="dtype")
    minimum = steps(model, PROMPT)
    assert_near(minimum, wanted, 0.04)
    assert sum(isinstance(module, QuantisedLinear) for module in model.modules()) == 4 * 4
    if name in OF_EACH_KIND:
        full = steps(open_model(tmp_path, "full", activations="dtype"), PROMPT)
        assert all(map(torch.equal, full, minimum)), "a result that hangs on the budget"


@served
def test_in_32_bits_they_are_equal_but_for_the_last_ones(name: str, tmp_path: Path, open_model: Open) -> None:
    """And so, of a kind each, where the layers beside the experts are unpacked at load."""
    wanted = steps(released_toy.save(tmp_path, SCHEMES[name], dtype=torch.float32), PROMPT)
    for more in ({}, {"dense_precision": "dtype"}) if name in OF_EACH_KIND else ({},):
        assert_near(steps(open_model(tmp_path, "half", dtype="float32", **more), PROMPT), wanted, 1e-5)


@pytest.mark.parametrize("said", [released_toy.FP8, {**released_toy.FP8, "weight_block_size": None}], ids=str)
def test_experts_of_a_layer_in_one_tensor(said: dict[str, Any], tmp_path: Path, open_model: Open) -> None:
    theirs = released_toy.save(tmp_path, said, is_fused=True, dtype=torch.float32, moe_intermediate_size=256)
    wanted, budgets = steps(theirs, PROMPT), ("full", "minimum")
    full, minimum = (steps(open_model(tmp_path, budget, dtype="float32"), PROMPT) for budget in budgets)
    assert all(map(torch.equal, full, minimum)), "a result that hangs on the budget"
    assert_near(full, wanted, 1e-5)


LATENT = {"kv_lora_rank": 128, "q_lora_rank": 128, "v_head_dim": 32, "topk_group": 4, "intermediate_size": 256}
"""What DeepSeek's attention has instead of `head_dim`; all groups of experts."""


def _further_tokens(tensors: Tensors) -> None:
    """The layer behind the last one that guesses further tokens, as DeepSeek-V3's files have it."""
    for key in [key for key in tensors if key.startswith("model.layers.3.")]:
        tensors[key.replace("layers.3", "layers.4")] = tensors[key].clone()
    more, _ = released_toy.quantised(torch.randn(128, 256), released_toy.FP8, "model.layers.4.eh_proj")
    tensors |= more | {"model.layers.4.enorm.weight": torch.ones(128)}


def test_deepseek_v3_as_it_was_released(tmp_path: Path, open_model: Open) -> None:
    """Attention by way of fewer numbers, in fp8 as well; a matrix whose rows are no whole blocks of 128."""
    sizes = {"dtype": torch.float32, "head_dim": 8, **LATENT}
    theirs = released_toy.save(tmp_path, released_toy.FP8, _further_tokens, family="deepseek_v3", **sizes)
    wanted, budgets = steps(theirs, PROMPT), ("full", "minimum")
    full, minimum = (steps(open_model(tmp_path, budget, dtype="float32"), PROMPT) for budget in budgets)
    assert all(map(torch.equal, full, minimum)), "a result that hangs on the budget"
    assert_near(full, wanted, 1e-5)


@served
def test_blocks_are_the_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every matrix: what blocks decode to, what the package's formula gives, and what was written. Also of one with
    rows that are no whole number of words or blocks of scales, read in pieces."""
    model = released_toy.save(tmp_path, SCHEMES[name], size=256)
    matrices = matrices_of(tmp_path)
    quantised = [key for key, tensor in matrices.items() if tensor.made_of]
    assert len(quantised) == 4 * (4 + 3 * 8)
    for key in [quantised[0], quantised[-1], f"{FIRST}.weight", "model.layers.2.self_attn.k_proj.weight"]:
        form = FORMATS[matrices[key].dtype]
        numbers = torch.from_numpy(form.decode(assembled(matrices[key]).numpy()))
        # the package divides by NVFP4's factor what we multiply with its reciprocal
        slack = 3e-7 if name == "compressed nvfp4" else 0
        torch.testing.assert_close(numbers, stored_numbers(matrices[key]), rtol=slack, atol=0)
        if "experts" not in key:
            assert torch.equal(numbers.bfloat16(), model.get_parameter(key).data)


@pytest.mark.parametrize("rows", [200, 24])
@pytest.mark.parametrize(
    "name", ["fp8", "compressed int4, zeros", "gptq", "awq", "compressed fp8", "nvfp4", "compressed mxfp4"]
)
def test_pieces_may_end_anywhere(name: str, rows: int, tmp_path: Path) -> None:
    """As a reading thread brings them: unit by unit, in any number, in any order."""
    tensors, numbers = released_toy.quantised(torch.randn(rows, 256), SCHEMES[name], "a")
    released_toy.write(tmp_path, tensors, {"quantization_config": SCHEMES[name]})
    matrix = matrices_of(tmp_path)["a.weight"]
    wanted, form = assembled(matrix), FORMATS[matrix.dtype]
    assert torch.equal(torch.from_numpy(form.decode(wanted.numpy())), numbers)
    chance = np.random.default_rng(0)
    slot = np.zeros(wanted.numel(), np.uint8)
    for each in matrix.made_of:
        assert each.arrangement is not None
        data = np.fromfile(each.tensor.path, np.uint8, each.tensor.nbytes, offset=each.tensor.offset)
        units = len(data) // each.arrangement.unit
        cuts = sorted({0, units, *chance.integers(0, units + 1, 3).tolist()})
        for begin, end in chance.permutation([*itertools.pairwise(cuts)]).tolist():
            at = begin * each.arrangement.unit
            each.arrangement.put(data[at : end * each.arrangement.unit], slot.data, each.place, at)
    assert np.array_equal(slot, wanted.numpy().ravel())


@pytest.mark.parametrize("name", ["fp8", "compressed int4", "nvfp4", "compressed mxfp4", "gptq", "awq"])
def test_what_is_packed_as_it_is_has_the_same_bits(name: str, tmp_path: Path, open_model: Open) -> None:
    """Each expert one read straight into its slot, and nothing is turned on its way any more."""
    released_toy.save(tmp_path, SCHEMES[name])
    wanted = steps(open_model(tmp_path, "half"), PROMPT)
    path = pack_folder(tmp_path)
    assert path.name == "experts.stored.smoe"
    for budget in ("full", "minimum"):
        model = open_model(tmp_path, budget)
        store = model.offload.store
        assert store.paths() == [path] and not store.is_staged
        assert all(map(torch.equal, steps(model, PROMPT), wanted))
    matrices = matrices_of(tmp_path)
    parts = [assembled(matrices[f"model.layers.1.mlp.experts.3.{part}_proj.weight"]) for part in ("gate", "up", "down")]
    expert = b"".join(part.numpy().tobytes() for part in parts)
    assert expert in path.read_bytes()


@pytest.mark.parametrize("name", REORDERED)
def test_columns_in_another_order_are_for_packing(name: str, tmp_path: Path) -> None:
    theirs = released_toy.save(tmp_path, SCHEMES[name])
    with pytest.raises(UnsupportedModelError, match=r"act-order.*run smoe pack with `precision=int8` or int4"):
        from_pretrained(tmp_path, memory="1GiB")
    matrices = matrices_of(tmp_path)
    for key in ("model.layers.1.self_attn.q_proj.weight", f"{FIRST}.weight"):
        assert stored_numbers(matrices[key]).shape == matrices[key].shape
    numbers = stored_numbers(matrices["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(numbers.bfloat16(), theirs.get_parameter("model.layers.1.self_attn.q_proj.weight").data)


BAD: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "no scales": ("gptq", lambda t: t.pop(f"{FIRST}.scales"), "no shard has the scales that belong to it"),
    "no codes": ("compressed int4", lambda t: t.pop(f"{FIRST}.weight_packed"), "no shard has .*weight_packed"),
    "no zeros": ("awq", lambda t: t.pop(f"{FIRST}.qzeros"), "no shard has .*qzeros"),
    "short scales": (
        "gptq",
        lambda t: t.update({f"{FIRST}.scales": t[f"{FIRST}.scales"][:-1].clone()}),
        r"should be F32 or BF16 or F16\[4, 128\]",
    ),
    "turned scales": (
        "fp8",
        lambda t: t.update({f"{FIRST}.weight_scale_inv": torch.ones(2, 1)}),
        r"should be .*\[1, 1\]",
    ),
    "integers": (
        "compressed int4",
        lambda t: t.update({f"{FIRST}.weight_scale": t[f"{FIRST}.weight_scale"].int()}),
        "is I32",
    ),
    "plain codes": ("fp8", lambda t: t.update({f"{FIRST}.weight": torch.ones(128, 128)}), "should be F8_E4M3"),
    "NaN": (
        "awq",
        lambda t: t[f"{FIRST}.scales"].view(-1)[5:6].fill_(float("nan")),
        "NaN or infinite",
    ),
    "no number": (
        "fp8",
        lambda t: t[f"{FIRST}.weight"].view(torch.uint8)[3, 4:5].fill_(0x7F),
        "NaN or infinite",
    ),
    "no factor": ("nvfp4", lambda t: t.pop(f"{FIRST}.weight_scale_2"), "no shard has .*weight_scale_2"),
    "a factor that divides by nothing": (
        "compressed nvfp4",
        lambda t: t[f"{FIRST}.weight_global_scale"].zero_(),
        "NaN or infinite",
    ),
    "no scale of a group": (
        "nvfp4",
        lambda t: t[f"{FIRST}.weight_scale"].view(torch.uint8)[3, 4:5].fill_(0x7F),
        "NaN or infinite",
    ),
    "scales of another kind": (
        "nvfp4",
        lambda t: t.update({f"{FIRST}.weight_scale": t[f"{FIRST}.weight_scale"].float()}),
        "should be F8_E4M3",
    ),
    "mixed": (
        "fp8",
        lambda t: (t.pop(f"{FIRST}.weight_scale_inv"), t.update({f"{FIRST}.weight": torch.ones(128, 128).bfloat16()})),
        "different formats",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_refused_by_name(what: str, tmp_path: Path) -> None:
    name, change, message = BAD[what]
    released_toy.save(tmp_path, SCHEMES[name], change=change)
    with pytest.raises(CheckpointError, match=message) as caught:
        model = from_pretrained(tmp_path, memory="1GiB", context_tokens=64)
        steps(model, PROMPT)
    assert "experts.0.gate_proj" in str(caught.value) or "experts 0 and 1" in str(caught.value)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "three bits": ({**released_toy.GPTQ, "bits": 3}, "gptq have 3 bits"),
    "marlin": ({**released_toy.GPTQ, "checkpoint_format": "marlin"}, "in the format 'marlin'"),
    "gemv": ({**released_toy.AWQ, "version": "gemv"}, "in the version 'gemv'"),
    "other blocks": ({**released_toy.FP8, "weight_block_size": [64, 64]}, r"blocks of \[64, 64\]"),
    "e5m2": ({**released_toy.FP8, "fmt": "e5m2"}, "format 'e5m2'"),
    "nvfp4 in other groups": ({**released_toy.NVFP4, "group_size": 32}, "groups of 32 columns in NVFP4"),
    "nvfp4 in other groups, compressed": (
        released_toy.compressed(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=32
        ),
        "groups of 32 columns in the format 'nvfp4-pack-quantized'",
    ),
    "several ways": ({**released_toy.NVFP4, "quant_algo": "MIXED_PRECISION"}, "quantised as 'MIXED_PRECISION'"),
    "whole numbers": (
        released_toy.compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        "int with 8 bits in the format 'int-quantized'",
    ),
    "two kinds": (
        {
            **released_toy.INT4,
            "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
        },
        "have 2 kinds of weights",
    ),
    "nothing": ({"quant_method": "compressed-tensors"}, "have no kinds of weights"),
    "odd groups": ({**released_toy.GPTQ, "group_size": "all"}, "groups of 'all' columns"),
    "another method": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "is quantised .bitsandbytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_read_is_refused_by_its_configuration(what: str, tmp_path: Path) -> None:
    said, message = REFUSED[what]
    released_toy.save(tmp_path, SCHEMES["gptq"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    with pytest.raises(UnsupportedModelError, match=message):
        from_pretrained(tmp_path, memory="1GiB")


def test_matrices_that_lie_the_other_way_round(tmp_path: Path) -> None:
    released_toy.save(tmp_path, released_toy.FP8, family="gpt_oss", is_fused=True, intermediate_size=128)
    with pytest.raises(UnsupportedModelError, match=r"experts\.(gate_up|down)_proj.* with one output per column"):
        from_pretrained(tmp_path, memory="1GiB")


def test_groups_that_are_no_whole_blocks(tmp_path: Path) -> None:
    released_toy.save(tmp_path, {**released_toy.GPTQ, "group_size": 16})
    with pytest.raises(SmoeError, match="16 numbers have a scale in common; these are no whole blocks"):
        from_pretrained(tmp_path, memory="1GiB")


def matrices_of(folder: Path) -> dict[str, Any]:
    said = scheme_of(json.loads((folder / "config.json").read_text()), folder)
    assert said is not None
    return joined(index_checkpoint(folder), said)


@pytest.mark.parametrize("name", ["fp8", "compressed int4", "nvfp4", "gptq", "awq"])
def test_a_configuration_alone_says_what_the_layers_beside_the_experts_take(name: str, tmp_path: Path) -> None:
    """For a forecast of what was not downloaded: the budget is that of the files."""
    whole, config = tmp_path / "whole", configure(context_tokens=oracle.CONTEXT)
    released_toy.save(whole, SCHEMES[name])
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((whole / "config.json").read_bytes())
    specs = [read_spec(folder, config) for folder in (whole, bare)]
    assert specs[0].dense.keys() == specs[1].dense.keys() and specs[0].dense
    assert specs[0].weights_bytes == specs[1].weights_bytes < specs[0].outline.dense_bytes(specs[0].dtype)


@pytest.mark.parametrize(
    ("said", "left_out"),
    [
        ({"modules_to_not_convert": ["mlp.gate", "model.layers.3"]}, ["a.mlp.gate", "model.layers.3.self_attn.q_proj"]),
        ({"ignore": ["re:.*shared.*", "lm_head"]}, ["model.layers.0.mlp.shared_expert.up_proj", "lm_head"]),
        ({"exclude_modules": ["*self_attn*"]}, ["model.layers.0.self_attn.k_proj"]),
        ({"dynamic": {"-:.*mlp\\.gate$": {}, "+:.*": {"bits": 8}, "-:(": {}}}, ["model.layers.0.mlp.gate"]),
        ({"ignore": [3], "modules_to_not_convert": None, "dynamic": []}, ["lm_head"]),
    ],
    ids=str,
)
def test_what_a_configuration_leaves_out(said: dict[str, Any], left_out: list[str]) -> None:
    scheme = scheme_of({"quantization_config": {**released_toy.FP8, **said}}, Path("here"))
    assert scheme is not None and all(map(scheme.leaves_out, left_out))
    assert not scheme.leaves_out("model.layers.30.mlp.gate_up_proj")


def test_a_method_that_is_no_name_is_no_scheme() -> None:
    """A configuration can contain anything."""
    assert scheme_of({"quantization_config": {"quant_method": ["fp8"]}}, Path("config.json")) is None
