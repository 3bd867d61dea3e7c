"""GGUF types whose blocks are converted while they are loaded, exactly, to another type, because our kernels support
only that type.

    NVFP4  scales of 4 groups | 4 x 8 bytes: elements j and 8 + j of a group in byte j      becomes NVFP4_64
    TQ1_0  48 bytes of five elements each | 4 bytes of four each | scale                    becomes TQ2_0

NVFP4 has an additional factor for each matrix or each expert, which is a tensor of its own, `NAME.scale`. The factor of
activations, `NAME.input_scale`, is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from smoe.formats.base import Format
from smoe.formats.registry import FORMATS
from smoe.formats.released import SCALE_BYTES
from smoe.memory.arrangement import BlockGrid, Bytes, SlotArrangement, StoredScales
from smoe.memory.safetensors_index import Ingredient, StoredTensor

_WEIGHT, _SCALE, _INPUT_SCALE = ".weight", ".scale", ".input_scale"


@dataclass(frozen=True)
class Nvfp4Blocks:
    """The conversion of GGUF's NVFP4 blocks. `is_whole`: the matrix has no additional factor, so the scale of each
    block is set to 1."""

    is_whole: bool
    unit: int = 36

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        blocks, form = source.reshape(-1, self.unit), FORMATS["NVFP4_64"]
        codes = blocks[:, 4:].reshape(-1, 4, 1, 8)
        groups = (codes >> np.array([[0], [4]], np.uint8) & 15).reshape(-1, 4, 16)
        pairs = groups[:, 0::2] | groups[:, 1::2] << 4
        found = _in_slot(slot, target + begin // self.unit * form.nbytes, len(blocks), form)
        if self.is_whole:
            found[:, :SCALE_BYTES] = np.array([1], "<f4").view(np.uint8)
        found[:, SCALE_BYTES : SCALE_BYTES + 4] = blocks[:, :4] & 127  # scales have no sign
        found[:, SCALE_BYTES + 4 :] = pairs.reshape(len(blocks), -1)


@dataclass(frozen=True)
class TernaryBlocks:
    """The conversion of TQ1_0 blocks, whose bytes contain base-3 digits: a byte times a power of three, modulo 256, has
    the digit as its highest."""

    unit: int = 54

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        blocks, form = source.reshape(-1, self.unit), FORMATS["TQ2_0"]
        runs = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
        digits = np.concatenate([_digits(blocks[:, first:end], count) for first, end, count in runs], 1)
        four = digits.reshape(-1, 2, 4, 32)
        codes = four[:, :, 0] | four[:, :, 1] << 2 | four[:, :, 2] << 4 | four[:, :, 3] << 6
        found = _in_slot(slot, target + begin // self.unit * form.nbytes, len(blocks), form)
        found[:, : form.scale.byte] = codes.reshape(len(blocks), -1)
        found[:, form.scale.byte :] = blocks[:, 52:]


def rearranged(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return a GGUF file's tensors by name. NVFP4 and TQ1_0 tensors are replaced by their conversions, and unused
    tensors are removed."""
    found = dict(tensors)
    for key, tensor in tensors.items():
        if tensor.dtype == "TQ1_0":
            found[key] = replace(tensor, dtype="TQ2_0", made_of=(Ingredient(tensor, 0, TernaryBlocks()),))
        elif tensor.dtype == "NVFP4":
            stem = key.removesuffix(_WEIGHT)
            found.pop(stem + _INPUT_SCALE, None)
            found[key] = _with_scale(tensor, found.pop(stem + _SCALE, None))
    return found


def _with_scale(tensor: StoredTensor, scale: StoredTensor | None) -> StoredTensor:
    """Return an NVFP4 tensor (a matrix, or the matrices of all experts) joined with its additional factor `scale`, if
    it has one."""
    form, (rows, columns) = FORMATS["NVFP4_64"], tensor.shape[-2:]
    made_of = [Ingredient(tensor, 0, Nvfp4Blocks(is_whole=scale is None))]
    if scale is not None:
        blocks = columns // form.numbers
        everywhere: SlotArrangement = StoredScales(BlockGrid(rows, blocks, form.nbytes), "F32", (1, 1), rows, blocks)
        made_of.append(Ingredient(replace(scale, shape=(*scale.shape, 1)), 0, everywhere))
    return replace(tensor, dtype=form.name, made_of=tuple(made_of))


def _digits(bytes_: Bytes, count: int) -> Bytes:
    """Return the base-3 digits of bytes: the first digit of every byte of a block, then the second, and so on: [blocks,
    count * bytes]."""
    powers = np.array([3**n for n in range(count)], np.uint8).reshape(-1, 1)
    lowest = bytes_[:, None, :] * powers  # modulo 256
    return (lowest.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(bytes_), -1)


def _in_slot(slot: memoryview, target: int, blocks: int, form: Format) -> Bytes:
    found: Bytes = np.ndarray((blocks, form.nbytes), np.uint8, slot, target)
    return found
