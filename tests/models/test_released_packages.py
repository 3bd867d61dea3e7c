"""Quantised releases beside the decoders of compressed-tensors, the package that writes and converts them.

Would catch what our own toys share with our own reading: an order of codes, an offset, a side on which zero points are
packed that neither has right.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smoe.formats.registry import FORMATS
from smoe.memory.tensor_bytes import assembled
from smoe.models.reference import stored_numbers
from tests import released_toy
from tests.models.test_released import matrices_of
from tests.released_toy import SCHEMES, Tensors

helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", reason="needs Python 3.11")


def ours(folder: Path, tensors: Tensors, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers by the formula, numbers of the blocks) of the matrix `model.a`."""
    released_toy.write(folder, tensors, {"quantization_config": SCHEMES[name]})
    matrix = matrices_of(folder)["model.a.weight"]
    return stored_numbers(matrix), torch.from_numpy(FORMATS[matrix.dtype].decode(assembled(matrix).numpy()))


def unpacked(tensors: Tensors, bits: int, shape: torch.Size) -> torch.Tensor:
    """What the package makes of packed weights: (codes - zero points) * scales."""
    codes = helpers.unpack_from_int32(tensors["model.a.weight_packed"], bits, shape).float()
    scales = tensors["model.a.weight_scale"].float()
    each = shape[1] // scales.shape[1]
    if "model.a.weight_zero_point" in tensors:
        packed = tensors["model.a.weight_zero_point"]
        zeros = helpers.unpack_from_int32(packed, bits, torch.Size((shape[0], scales.shape[1])), packed_dim=0)
        codes = codes - zeros.float().repeat_interleave(each, 1)
    return codes * scales.repeat_interleave(each, 1)


@pytest.mark.parametrize("name", ["compressed int4", "compressed int4, zeros", "compressed int8"])
def test_packed_weights(name: str, tmp_path: Path) -> None:
    """Any codes, zero points and scales at all."""
    shape, chance = torch.Size((48, 256)), torch.Generator().manual_seed(0)
    tensors, _ = released_toy.quantised(torch.randn(shape, generator=chance), SCHEMES[name], "model.a")
    for tensor in tensors.values():
        if tensor.dtype is torch.int32:
            tensor.copy_(torch.randint(-(2**31), 2**31 - 1, tensor.shape, generator=chance, dtype=torch.int32))
    wanted = unpacked(tensors, SCHEMES[name]["config_groups"]["group_0"]["weights"]["num_bits"], shape)
    for found in ours(tmp_path, tensors, name):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["awq", "awq, whole rows"])
def test_awq_as_the_package_converts_it(name: str, tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    shape, chance = torch.Size((64, 128)), torch.Generator().manual_seed(1)
    tensors, _ = released_toy.quantised(torch.randn(shape, generator=chance), SCHEMES[name], "model.a")
    for key in ("model.a.qweight", "model.a.qzeros"):
        whole = tensors[key]
        whole.copy_(torch.randint(-(2**31), 2**31 - 1, whole.shape, generator=chance, dtype=torch.int32))
    converter = AutoAWQConverter.from_autoawq_config(SCHEMES[name], targets=("re:.*",))
    wanted = unpacked(converter.process(dict(tensors)), 4, shape)
    for found in ours(tmp_path, tensors, name):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["nvfp4", "compressed nvfp4", "compressed mxfp4"])
def test_numbers_of_four_bits(name: str, tmp_path: Path) -> None:
    """Any codes; NVIDIA's form as the package turns it into its own. Its classes decode to bf16 by way of scales in
    bf16, so their parts are called, with float32."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    shape, chance = (48, 256), torch.Generator().manual_seed(2)
    tensors, _ = released_toy.quantised(torch.randn(shape, generator=chance), SCHEMES[name], "model.a")
    codes = tensors["model.a.weight" if name == "nvfp4" else "model.a.weight_packed"]
    codes.copy_(torch.randint(0, 256, codes.shape, generator=chance, dtype=torch.uint8))
    found = ours(tmp_path, tensors, name)
    if name == "nvfp4":
        tensors = ModelOptNvfp4Converter(targets=("re:.*",)).process(dict(tensors))
    said = SCHEMES["compressed nvfp4" if name == "nvfp4" else name]["config_groups"]["group_0"]["weights"]
    scales = tensors["model.a.weight_scale"]
    wanted = dequantize(
        unpack_fp4_from_uint8(tensors["model.a.weight_packed"], *shape, dtype=torch.float32),
        MXFP4PackedCompressor._decompress_scale(scales, torch.float32) if "mxfp4" in name else scales.float(),
        args=QuantizationArgs.model_validate(said),
        global_scale=tensors.get("model.a.weight_global_scale"),
        dtype=torch.float32,
    )
    for numbers in found:  # a reciprocal may be rounded, here or there
        torch.testing.assert_close(numbers, wanted, rtol=0 if "mxfp4" in name else 3e-7, atol=0)


def test_fp8_as_the_package_dequantises_it(tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer

    tensors, _ = released_toy.quantised(torch.randn(256, 384), SCHEMES["fp8"], "model.a")
    converter = FP8BlockDequantizer(targets=("re:.*",), dtype=torch.float32)
    wanted = converter.process(dict(tensors))["model.a.weight"]
    for found in ours(tmp_path, tensors, "fp8"):
        assert torch.equal(found, wanted)
