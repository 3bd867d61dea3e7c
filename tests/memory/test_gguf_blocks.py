"""Blocks of GGUF that become others in a slot, against the gguf package's numbers of the file's own.

Would catch: a code in another group's half of a byte, a digit of another power, a scale of another expert.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from smoe.formats.registry import FORMATS
from smoe.memory.gguf_blocks import rearranged
from smoe.memory.gguf_tensors import plain_tensor
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import row_of
from smoe.memory.tensor_bytes import assembled

EXPERTS, ROWS, COLUMNS = 3, 5, 512
SLOTS = {"NVFP4": "NVFP4_64", "TQ1_0": "TQ2_0"}


def random_blocks(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Any codes, scales of a model's size: uint8 [rows, bytes]."""
    numbers, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    chance = np.random.default_rng(seed)
    blocks = chance.integers(0, 256, (rows * columns // numbers, nbytes), dtype=np.uint8)
    if name == "NVFP4":
        blocks[:, :4] = chance.integers(0, 64, (len(blocks), 4))
    else:
        blocks[:, 52:] = chance.uniform(-0.01, 0.01, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def stored(folder: Path, name: str, scales: np.ndarray | None) -> dict[str, StoredTensor]:
    """A file of one tensor for all experts, and what its numbers are multiplied with."""
    path, data = folder / "toy.gguf", random_blocks(name, EXPERTS * ROWS, COLUMNS)
    path.write_bytes(data.tobytes() + (b"" if scales is None else scales.astype("<f4").tobytes()))
    whole = StoredTensor(path, 0, data.nbytes, name, (EXPERTS, ROWS, COLUMNS), "x.weight")
    found = {"x.weight": whole, "x.input_scale": replace(whole, dtype="F32", shape=(1,), key="x.input_scale")}
    if scales is not None:
        found["x.scale"] = StoredTensor(path, data.nbytes, 4 * EXPERTS, "F32", (EXPERTS,), "x.scale")
    return found


@pytest.mark.parametrize("scales", [None, np.array([0.5, 3.0, 0.0625])], ids=["alone", "with scales"])
@pytest.mark.parametrize("name", SLOTS)
def test_numbers_are_those_of_the_file(name: str, scales: np.ndarray | None, tmp_path: Path) -> None:
    scales = scales if name == "NVFP4" else None
    found = rearranged(stored(tmp_path, name, scales))
    assert "x.scale" not in found, "it is part of the matrix"
    assert ("x.input_scale" in found) is (name != "NVFP4")
    theirs = dequantize(random_blocks(name, EXPERTS * ROWS, COLUMNS), GGMLQuantizationType[name])
    for expert in range(EXPERTS):
        matrix = row_of(found["x.weight"], expert)
        assert matrix.dtype == SLOTS[name] and matrix.shape == (ROWS, COLUMNS)
        wanted = theirs[ROWS * expert : ROWS * (expert + 1)] * np.float32(1 if scales is None else scales[expert])
        np.testing.assert_array_equal(FORMATS[matrix.dtype].decode(assembled(matrix).numpy()), wanted)
        np.testing.assert_array_equal(plain_tensor(matrix).numpy(), wanted)


def test_a_scale_that_is_no_number_stays_none(tmp_path: Path) -> None:
    tensors = stored(tmp_path, "NVFP4", np.array([1.0, np.inf, 1.0]))
    form, whole = FORMATS["NVFP4_64"], rearranged(tensors)["x.weight"]
    assert [form.is_finite(assembled(row_of(whole, n)).numpy()) for n in range(EXPERTS)] == [True, False, True]
