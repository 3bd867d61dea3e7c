"""Joins the stored tensors of each quantized matrix of a checkpoint (codes, scales, zero points) to one weight. N is
the number of outputs, K of columns, G of columns for each scale.

    fp8                  X.weight (F8_E4M3 [N, K]), X.weight_scale_inv [N / 128, K / 128]; of all experts X, X_scale_inv
                         (DeepSeek-V4 has X.scale for X.weight_scale_inv)
      expert_dtype: fp4  X.weight (I8 [N, K / 2]), X.scale (exponents F8_E8M0 [N, K / 32])
    compressed-tensors   X.weight (fp8), or X.weight_packed (I32 [N, K / 8]); X.weight_scale [N, K / G],
                         X.weight_zero_point (I32 [N / 8, K / G])
      in 4-bit floats    X.weight_packed (U8 [N, K / 2]), X.weight_scale (F8_E4M3 [N, K / 16], or exponents U8
                         [N, K / 32]); of NVFP4 X.weight_global_scale, a divisor
    modelopt             X.weight (fp8, or U8 [N, K / 2]), X.weight_scale as above; of NVFP4 X.weight_scale_2
    GPTQ                 X.qweight (I32 [K / 8, N]), X.scales [K / G, N], X.qzeros (I32 [K / G, N / 8]), X.g_idx [K]
    AWQ                  X.qweight (I32 [K, N / 8]), X.scales, X.qzeros as above

The shapes are for 4 bits; with 8 bits a 32-bit word has 4 codes instead of 8. Other tensors (shapes, scales of
activations and of the KV cache) do not change the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.formats.base import Format
from smoe.formats.mxfp4 import MXFP4_PAIRS
from smoe.formats.released import NVFP4_GROUP, SCALE_BYTES
from smoe.memory.arrangement import (
    SCALE_KINDS,
    BlockGrid,
    PairsApart,
    Spread,
    StoredScales,
    TurnedCodes,
    TurnedWords,
    Zeros,
)
from smoe.memory.safetensors_index import Ingredient, StoredTensor
from smoe.memory.store import row_of
from smoe.models.released_schemes import Scheme

_EXTRA_TENSORS = (
    ".weight_shape",
    ".input_scale",
    ".input_global_scale",
    ".output_scale",
    ".input_zero_point",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".weight_g_idx",
    ".g_idx",
)
"""Suffixes of tensors that do not change the weights, or that are read together with their matrix."""
_WORD_BITS = 32
_PAIRS_OF_CODES = ("U8", "I8")
"""The dtypes in which a byte holds two 4-bit codes."""


def joined(tensors: Mapping[str, StoredTensor], scheme: Scheme) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors by the keys of the unquantized checkpoint; quantized ones are [outputs, columns].

    Raises `CheckpointError` if tensors of a matrix are missing or do not match, and `UnsupportedModelError` if rows are
    not whole blocks.
    """
    names = _names_of(scheme)
    tensors = {_scales_by_their_name(key, tensors, scheme): tensor for key, tensor in tensors.items()}
    found, used = {}, set()
    for key, scales in tensors.items():
        if key.endswith(names.scales):
            matrix = _matrix(tensors, key.removesuffix(names.scales), names, scheme, scales)
            found[f"{matrix.stem}.weight"] = matrix.joined()
            used.update(matrix.keys)
        elif scheme.method == "fp8" and key.endswith(_OF_ALL.scales):
            stem = key.removesuffix(_OF_ALL.scales)
            found[stem], made_of = _of_all_experts(tensors, stem, scheme, scales)
            used.update(made_of)
    rest = {key: each for key, each in tensors.items() if each.key not in used and not key.endswith(_EXTRA_TENSORS)}
    for key, tensor in rest.items():
        is_quantised = tensor.dtype not in ("BF16", "F16", "F32")
        if key in found or (key.endswith((names.codes, names.zeros)) and is_quantised):
            raise CheckpointError(
                f"{tensor.path} has {key!r}, but no shard has the scales that belong to it "
                f"({key.removesuffix(names.codes)}{names.scales}); the checkpoint is incomplete"
            )
    return rest | found


@dataclass(frozen=True)
class _Names:
    """The suffixes of the keys under which a checkpoint stores the tensors of one quantized matrix."""

    codes: str
    scales: str
    zeros: str
    order: str = ".g_idx"


_NONE = ".none"
_OF_ALL = _Names("", "_scale_inv", _NONE)
"""The suffixes for matrices of all experts, whose transformers keys have no `.weight`."""


def _names_of(scheme: Scheme) -> _Names:
    if scheme.method in ("gptq", "awq"):
        return _Names(".qweight", ".scales", ".qzeros")
    if scheme.method == "fp8":
        return _Names(".weight", ".weight_scale_inv", _NONE)
    if scheme.method == "modelopt" or (scheme.is_float and not scheme.is_float4):
        return _Names(".weight", ".weight_scale", _NONE)
    return _Names(".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx")


def _scales_by_their_name(key: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> str:
    """Return the key of a tensor. DeepSeek-V4's short name of scales is replaced by the usual one."""
    stem = key.removesuffix(".scale")
    is_short = scheme.method == "fp8" and stem != key and f"{stem}.weight" in tensors
    return f"{stem}.weight_scale_inv" if is_short else key


def _stored_as(scheme: Scheme, codes: StoredTensor | None) -> Scheme:
    """Return the scheme of one matrix, which the dtype of its codes determines in checkpoints with several schemes."""
    kinds = [*scheme.layers.values(), *([] if scheme.experts is None else [scheme, scheme.experts])]
    is_float4 = codes is not None and codes.dtype in _PAIRS_OF_CODES
    return next((kind for kind in kinds if kind.is_float4 == is_float4), scheme)


def _matrix(
    tensors: Mapping[str, StoredTensor], stem: str, names: _Names, scheme: Scheme, scales: StoredTensor
) -> _Matrix:
    scheme = _stored_as(scheme, tensors.get(stem + names.codes))
    return (_Float4 if scheme.is_float4 else _Matrix)(tensors, stem, names, scheme, scales)


def _of_all_experts(
    tensors: Mapping[str, StoredTensor], stem: str, scheme: Scheme, scales: StoredTensor
) -> tuple[StoredTensor, list[str]]:
    """Return the joined matrices of all experts of a layer [E, outputs, columns], and the keys of their tensors."""
    whole = {key: tensors[key] for key in (stem, stem + _OF_ALL.scales) if key in tensors}
    for tensor in whole.values():
        if not tensor.shape or not tensor.nbytes or tensor.shape[0] != scales.shape[0]:
            raise CheckpointError(
                f"{tensor.path}: the tensor {tensor.key!r} has the shape {list(tensor.shape)}, and its scales "
                f"{scales.key!r} have the shape {list(scales.shape)}: every expert needs scales of its own; download "
                "the checkpoint again"
            )
    first = {key: row_of(tensor, 0) for key, tensor in whole.items()}
    matrix = _Matrix(first, stem, _OF_ALL, scheme, first[scales.key])
    one = matrix.joined()
    made_of = tuple(each._replace(tensor=whole[each.tensor.key]) for each in one.made_of)
    shape = (scales.shape[0], *one.shape)
    return replace(whole[stem], dtype=one.dtype, shape=shape, made_of=made_of, scheme=scheme.method), matrix.keys


class _Matrix:
    """One quantized matrix of a checkpoint, which is stored as several tensors."""

    def __init__(
        self, tensors: Mapping[str, StoredTensor], stem: str, names: _Names, scheme: Scheme, scales: StoredTensor
    ) -> None:
        self.stem, self._scheme, self._scales = stem, scheme, scales
        self._codes = self._other(tensors, names.codes)
        self._zeros = self._other(tensors, names.zeros) if scheme.has_zeros else None
        self._order = tensors.get(stem + names.order) if scheme.is_reordered else None
        self._is_turned = scheme.method in ("gptq", "awq")
        self._each = _WORD_BITS // scheme.bits
        """The number of codes per 32-bit word."""

    @property
    def keys(self) -> list[str]:
        """The keys of the matrix's tensors."""
        return [each.key for each in (self._codes, self._scales, self._zeros) if each is not None]

    def joined(self) -> StoredTensor:
        rows, columns = self._shape()
        form = self._scheme.form(columns)
        if form is None:
            raise UnsupportedModelError(
                f"{self._codes.path}: rows of the tensor {self._codes.key!r} have {columns} numbers, and "
                f"{self._scheme.columns_each or 'all'} numbers have a scale in common; these are no whole blocks of "
                "32, 64 or 128, which smoe needs: take another release of the model"
            )
        made_of = self._made_of(BlockGrid(rows, columns // form.numbers, form.nbytes), form, columns)
        if self._order is not None:
            made_of += (Ingredient(self._order, 0, None),)
        scheme = self._scheme.method
        return replace(self._codes, dtype=form.name, shape=(rows, columns), made_of=made_of, scheme=scheme)

    def _other(self, tensors: Mapping[str, StoredTensor], ending: str) -> StoredTensor:
        if self.stem + ending not in tensors:
            raise CheckpointError(
                f"{self._scales.path} has {self._scales.key!r}, but no shard has the matching "
                f"{self.stem + ending!r}; the checkpoint is incomplete"
            )
        return tensors[self.stem + ending]

    def _shape(self) -> tuple[int, int]:
        """Return (outputs, columns) of the matrix by the shape of its codes."""
        kind, codes = "F8_E4M3" if self._scheme.is_float else "I32", self._codes
        if codes.dtype != kind or len(codes.shape) != 2 or not codes.nbytes:
            raise CheckpointError(
                f"{codes.path}: the tensor {codes.key!r} is {codes.dtype}{list(codes.shape)}, and by config.json it "
                f"should be {kind} with two dimensions; download the checkpoint again"
            )
        first, second = codes.shape
        if self._scheme.is_float:
            return first, second
        if self._scheme.method == "awq":
            return second * self._each, first
        return (second, first * self._each) if self._is_turned else (first, second * self._each)

    def _made_of(self, grid: BlockGrid, form: Format, columns: int) -> tuple[Ingredient, ...]:
        scheme = self._scheme
        groups = columns // (scheme.columns_each or columns)
        blocks_each, tall = grid.blocks // groups, scheme.rows_each or grid.rows
        shape = (groups, grid.rows) if self._is_turned else (-(-grid.rows // tall), groups)
        self._check(self._scales, shape, SCALE_KINDS if scheme.is_float else SCALE_KINDS[:-1])
        zero = None if scheme.is_float or scheme.has_zeros else 1 << scheme.bits - 1
        made_of = [
            Ingredient(self._codes, SCALE_BYTES + (not scheme.is_float), self._arranged(grid, form)),
            Ingredient(
                self._scales, 0, StoredScales(grid, self._scales.dtype, shape, tall, blocks_each, self._is_turned, zero)
            ),
        ]
        if self._zeros is not None:
            packed = -(-grid.rows // self._each)
            width = packed if self._is_turned else groups
            self._check(self._zeros, (groups, packed) if self._is_turned else (packed, groups), ("I32",))
            zeros = Zeros(grid, scheme.bits, width, self._is_turned, blocks_each, scheme.method == "awq", scheme.less)
            made_of.append(Ingredient(self._zeros, SCALE_BYTES, zeros))
        return tuple(made_of)

    def _arranged(self, grid: BlockGrid, form: Format) -> Spread | TurnedWords | TurnedCodes:
        if self._scheme.method == "awq":
            return TurnedCodes(grid, form.numbers)
        if self._is_turned:
            return TurnedWords(grid, form.numbers // self._each)
        return Spread(form.numbers * self._scheme.bits // 8, form.nbytes)

    def _check(self, tensor: StoredTensor, shape: tuple[int, int], kinds: tuple[str, ...]) -> None:
        stored = tensor.shape
        if len(stored) < 2 and shape[0] * shape[1] == max(1, *stored, 1):  # a scale for the matrix, or one per row
            stored = shape
        if stored != shape or tensor.dtype not in kinds:
            raise CheckpointError(
                f"{tensor.path}: the tensor {tensor.key!r} is {tensor.dtype}{list(tensor.shape)}; to fit "
                f"{self._codes.key!r} of the shape {list(self._codes.shape)}, it should be "
                f"{' or '.join(kinds)}{list(shape)}; download the checkpoint again"
            )


class _Float4(_Matrix):
    """A matrix in NVFP4 or MXFP4: 4-bit floats, two neighbours per byte, with an 8-bit scale per group."""

    def __init__(
        self, tensors: Mapping[str, StoredTensor], stem: str, names: _Names, scheme: Scheme, scales: StoredTensor
    ) -> None:
        super().__init__(tensors, stem, names, scheme, scales)
        self._has_factor = scheme.columns_each == NVFP4_GROUP
        self._divides = scheme.method != "modelopt"
        ending = ".weight_global_scale" if self._divides else ".weight_scale_2"
        self._factor = self._other(tensors, ending) if self._has_factor else None
        """The factor of the whole matrix; None in MXFP4."""

    @property
    def keys(self) -> list[str]:
        return super().keys + ([] if self._factor is None else [self._factor.key])

    def _shape(self) -> tuple[int, int]:
        codes = self._codes
        if codes.dtype not in _PAIRS_OF_CODES or len(codes.shape) != 2 or not codes.nbytes:
            raise CheckpointError(
                f"{codes.path}: the tensor {codes.key!r} is {codes.dtype}{list(codes.shape)}, and by config.json it "
                "should be U8 or I8 with two dimensions; download the checkpoint again"
            )
        return codes.shape[0], 2 * codes.shape[1]

    def _made_of(self, grid: BlockGrid, form: Format, columns: int) -> tuple[Ingredient, ...]:
        shape = (grid.rows, columns // (self._scheme.columns_each or columns))
        if self._factor is None:
            self._check(self._scales, shape, ("U8", "F8_E8M0"))
            codes = Spread(MXFP4_PAIRS.numbers // 2, form.nbytes)
            return Ingredient(self._codes, 1, codes), Ingredient(self._scales, 0, Spread(1, form.nbytes))
        self._check(self._scales, shape, ("F8_E4M3",))
        self._check(self._factor, (1, 1), ("F32",))
        each = form.numbers // NVFP4_GROUP
        factor = StoredScales(grid, "F32", (1, 1), grid.rows, grid.blocks, is_divisor=self._divides)
        return (
            Ingredient(self._codes, SCALE_BYTES + each, PairsApart(form.numbers, form.nbytes)),
            Ingredient(self._scales, SCALE_BYTES, Spread(each, form.nbytes)),
            Ingredient(self._factor, 0, factor),
        )
