"""Models whose experts are served in fewer bits: beside transformers on the numbers that the codes stand for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from smoe.formats.registry import FORMATS
from smoe.load import pretrained
from smoe.models.packed import check_takes_less, read_packed
from smoe.models.read_spec import read_spec
from smoe.models.reference import reference_parameters
from smoe.policy.budget import allocate
from smoe.presets import configure
from tests import gguf_toy, mxfp4_toy, oracle, zoo
from tests.models.test_gguf_quantised import PROMPT, assert_near, steps
from tests.packs import contents_of, pack_folder

Open = Callable[..., PreTrainedModel]


def packed_toy(toy: Callable[..., Path], family: str, precision: str, target: Path, dtype: torch.dtype) -> Path:
    folder = Path(shutil.copytree(toy(family, dtype=dtype), target))
    pack_folder(folder, precision=precision)
    return folder


@torch.no_grad()
def dequantised(place: Path, precision: str, theirs: PreTrainedModel, most: float | None = None) -> PreTrainedModel:
    """The library's model of a checkpoint, now with the packed experts' numbers in it, which are `most` off."""
    contents = contents_of(place, precision=precision)
    packed = read_packed(place, contents)
    assert packed is not None
    most = most or {"int8": 0.01, "int4": 0.1, "int3": 0.19, "int2": 0.3}[precision]
    for site in contents.sites:
        experts = theirs.get_submodule(site.name)
        numbers = reference_parameters(packed.layers[site.layer], list(range(site.experts)), theirs.dtype)
        for name, value in numbers.items():
            weight = experts.get_parameter(name)
            if name.endswith("_bias"):
                assert torch.equal(value, weight), "a bias is not the checkpoint's"
                continue
            far = (value - weight).float().norm() / weight.float().norm()
            assert 0 < far < most, "not those weights"
            weight.copy_(value)
    return theirs


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        *((family, precision) for family in ("mixtral", "gpt_oss") for precision in ("int8", "int4", "int3", "int2")),
        # other names and shapes of the same weights: a byte each, and numbers that share bytes
        *((family, form) for family in ("qwen2_moe", "deepseek_v3", "granitemoe") for form in ("int8", "int3")),
    ],
)
def test_logits_are_those_of_the_dequantised_model(
    family: str, precision: str, toy: Callable[..., Path], open_model: Open, tmp_path: Path
) -> None:
    folder = packed_toy(toy, family, precision, tmp_path / "model", torch.float32)
    theirs = dequantised(folder, precision, oracle.reference(folder))
    full, least = (steps(open_model(folder, budget, precision=precision), PROMPT) for budget in ("full", "minimum"))
    assert all(map(torch.equal, full, least)), "a result that hangs on the budget"
    assert_near(full, steps(theirs, PROMPT), 1e-4)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_in_16_bits(family: str, kernels: str, toy: Callable[..., Path], open_model: Open, tmp_path: Path) -> None:
    folder = packed_toy(toy, family, "int4", tmp_path / "model", torch.bfloat16)
    theirs = dequantised(folder, "int4", oracle.reference(folder))
    ours = open_model(folder, "half", precision="int4", kernels=kernels, activations="dtype")
    assert_near(steps(ours, PROMPT), steps(theirs, PROMPT), 0.04, others=2)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float32])
def test_biases_in_either_type(
    stored: torch.dtype, computed: torch.dtype, toy: Callable[..., Path], open_model: Open, tmp_path: Path
) -> None:
    """Biases come with their expert where they need not be converted, else through a buffer."""
    folder = packed_toy(toy, "gpt_oss", "int8", tmp_path / "model", stored)
    theirs = dequantised(folder, "int8", oracle.reference(folder, computed))
    dtype = str(computed).removeprefix("torch.")
    ours = open_model(folder, "half", precision="int8", dtype=dtype, activations="dtype")
    store = ours.offload.store
    assert not store.is_staged
    assert bool(store.placement(min(store.layers), 0).pieces) is (stored is not computed)
    bound, others = (0.04, 2) if computed is torch.bfloat16 else (1e-4, 0)
    assert_near(steps(ours, PROMPT), steps(theirs, PROMPT), bound, others)


@pytest.mark.parametrize(
    ("family", "mixture", "precision", "most"),
    [
        ("qwen3_moe", "Q8_0", "int4", 0.1),
        ("qwen3_moe", "Q4_K_M", "int8", 0.35),
        ("qwen3_moe", "Q4_0", "int3", 0.3),
        ("gpt_oss", "MXFP4", "int2", 0.5),
    ],
)
def test_a_lower_copy_of_a_gguf_file(
    family: str, mixture: str, precision: str, most: float, open_model: Open, tmp_path: Path
) -> None:
    path, theirs = gguf_toy.quantised(tmp_path / "toy.gguf", mixture, family)
    assert pack_folder(path, precision=precision) == tmp_path / f"toy.gguf.experts.{precision}.smoe"
    dequantised(path, precision, theirs, most)
    ours = open_model(path, "half", precision=precision, activations="dtype")
    assert_near(steps(ours, PROMPT), steps(theirs, PROMPT), 0.04, others=2)


@pytest.mark.parametrize("precision", ["int3", "int2"])
def test_a_lower_copy_of_experts_in_mxfp4(precision: str, open_model: Open, tmp_path: Path) -> None:
    theirs = mxfp4_toy.save(tmp_path / "model")
    pack_folder(tmp_path / "model", precision=precision)
    dequantised(tmp_path / "model", precision, theirs)
    ours = open_model(tmp_path / "model", "half", precision=precision, activations="dtype")
    assert_near(steps(ours, PROMPT), steps(theirs, PROMPT), 0.04, others=2)


def test_the_same_budget_holds_more_experts(toy: Callable[..., Path], tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    folder = Path(shutil.copytree(toy("qwen3_moe", dtype=torch.bfloat16, **sizes), tmp_path / "model"))
    pack_folder(folder, precision="int4")
    memory = oracle.budget_bytes(folder, 4)
    plain, packed = (oracle.demand(folder, precision=precision) for precision in ("auto", "int4"))
    assert allocate(memory, packed).cache_slots > 3 * allocate(memory, plain).cache_slots == 12


def test_a_precision_must_have_been_packed(toy: Callable[..., Path], open_model: Open, tmp_path: Path) -> None:
    folder = packed_toy(toy, "mixtral", "int8", tmp_path / "model", torch.float32)
    with pytest.raises(ConfigError, match=r"smoe pack on .* with `precision=int4`") as refusal:
        open_model(folder, 10**9, precision="int4")
    assert refusal.value.setting == "precision"


def test_a_pack_of_other_weights_is_refused(toy: Callable[..., Path], open_model: Open, tmp_path: Path) -> None:
    folder = packed_toy(toy, "mixtral", "int4", tmp_path / "model", torch.float32)
    model = oracle.reference(folder)
    for weight in model.parameters():
        weight.data += 1
    model.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="other weights"):
        open_model(folder, "half", precision="int4")


@pytest.mark.parametrize(("precision", "form"), [("int4", "INT4"), ("int3", "INT3"), ("int2", "INT2")])
def test_a_scale_that_is_no_number_is_named(
    precision: str,
    form: str,
    toy: Callable[..., Path],
    open_model: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a pack that was verified before: the minimum of the first expert's first block."""
    monkeypatch.setattr(pretrained, "verify_pack", lambda *_: None)
    folder = packed_toy(toy, "mixtral", precision, tmp_path / "model", torch.bfloat16)
    contents = contents_of(folder, precision=precision)
    packed, minimum = read_packed(folder, contents), FORMATS[form].minimum
    assert packed is not None and minimum is not None
    data, at = bytearray(packed.path.read_bytes()), packed.start + minimum.byte
    data[at : at + 2] = b"\0\x7e"
    packed.path.write_bytes(data)
    said = rf"experts\.{precision}\.smoe: .*gate_up_proj of expert 0 in layer 0.* NaN or infinite in {form}; run smoe"
    with pytest.raises(CheckpointError, match=said):
        steps(open_model(folder, "full", precision=precision), PROMPT)


def test_a_precision_of_a_gguf_file_must_have_been_packed(open_model: Open, tmp_path: Path) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q8_0")
    with pytest.raises(ConfigError, match=r"smoe pack on .*toy\.gguf with `precision=int4`"):
        open_model(path, 10**9, precision="int4")


def test_a_pack_of_another_gguf_file_is_refused(open_model: Open, tmp_path: Path) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q8_0")
    pack_folder(path, precision="int4")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="other weights"):
        open_model(path, 10**9, precision="int4")


def test_a_copy_that_would_take_no_less_is_refused(toy: Callable[..., Path], tmp_path: Path) -> None:
    """As int4 of MXFP4, which has a quarter of a bit less."""
    mxfp4_toy.save(tmp_path / "model")
    for model, precision, is_good in (
        (tmp_path / "model", "int4", False),
        (tmp_path / "model", "int2", True),
        (toy("gpt_oss", dtype=torch.bfloat16), "int8", True),
    ):
        spec = read_spec(model, configure(context_tokens=32))
        with nullcontext() if is_good else pytest.raises(ConfigError, match="lower precision"):
            check_takes_less(contents_of(model, precision=precision), spec)


def test_what_no_format_fits_is_refused(tmp_path: Path) -> None:
    zoo.save("qwen3_moe", tmp_path / "model", moe_intermediate_size=24)
    with pytest.raises(UnsupportedModelError, match="down_proj of layer 0 has rows of 24"):
        contents_of(tmp_path / "model", precision="int8")
