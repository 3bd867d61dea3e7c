"""The tensors of a quantised release, those that make up a matrix joined to the one weight that they are.

    fp8                  X.weight (F8_E4M3 [N, K]), X.weight_scale_inv [N / 128, K / 128]
    compressed-tensors   X.weight (fp8), or X.weight_packed (I32 [N, K / 8]); X.weight_scale [N, K / G],
                         X.weight_zero_point (I32 [N / 8, K / G])
    GPTQ                 X.qweight (I32 [K / 8, N]), X.scales [K / G, N], X.qzeros (I32 [K / G, N / 8]), X.g_idx [K]
    AWQ                  X.qweight (I32 [K, N / 8]), X.scales, X.qzeros as above

With 8 bits there are 4 codes in a word of 32 bits, not 8. What a release has beside them (shapes, scales of activations
and of the KV cache) does not change what weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.formats.base import Format
from smoe.formats.released import SCALE_BYTES
from smoe.memory.arrangement import SCALE_KINDS, Grid, Scales, Spread, TurnedCodes, TurnedWords, Zeros
from smoe.memory.safetensors_index import Ingredient, StoredTensor
from smoe.models.released_schemes import Scheme

_BESIDE = (
    ".weight_shape",
    ".input_scale",
    ".output_scale",
    ".input_zero_point",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".weight_g_idx",
    ".g_idx",
)
"""What does not change what weights are, or is looked at with them."""
_WORD_BITS = 32


def joined(tensors: Mapping[str, StoredTensor], scheme: Scheme) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by the keys that the unquantised release has; quantised ones [outputs, columns].

    Raises `CheckpointError` where something of a matrix is missing, or does not fit the rest, `UnsupportedModelError`
    for rows that are no whole blocks.
    """
    names = _NAMES[scheme.method, scheme.is_float]
    found, used = {}, set()
    for key, scales in tensors.items():
        if key.endswith(names.scales):
            matrix = _Matrix(tensors, key.removesuffix(names.scales), names, scheme, scales)
            found[f"{matrix.stem}.weight"] = matrix.joined()
            used.update(matrix.keys)
    rest = {key: each for key, each in tensors.items() if key not in used and not key.endswith(_BESIDE)}
    for key, tensor in rest.items():
        if key in found or (key.endswith((names.codes, names.zeros)) and tensor.dtype not in ("BF16", "F16", "F32")):
            raise CheckpointError(
                f"{tensor.path} has {key!r}, but no shard has the scales that belong to it "
                f"({key.removesuffix(names.codes)}{names.scales}); the checkpoint is incomplete"
            )
    return rest | found


@dataclass(frozen=True)
class _Names:
    """Endings of keys."""

    codes: str
    scales: str
    zeros: str
    order: str = ".g_idx"


_NAMES = {
    ("fp8", True): _Names(".weight", ".weight_scale_inv", ".none"),
    ("compressed-tensors", True): _Names(".weight", ".weight_scale", ".none"),
    ("compressed-tensors", False): _Names(".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx"),
    ("gptq", False): _Names(".qweight", ".scales", ".qzeros"),
    ("awq", False): _Names(".qweight", ".scales", ".qzeros"),
}


class _Matrix:
    """One matrix of a release."""

    def __init__(
        self, tensors: Mapping[str, StoredTensor], stem: str, names: _Names, scheme: Scheme, scales: StoredTensor
    ) -> None:
        self.stem, self._scheme, self._scales = stem, scheme, scales
        self._codes = self._other(tensors, names.codes)
        self._zeros = self._other(tensors, names.zeros) if scheme.has_zeros else None
        self._order = tensors.get(stem + names.order) if scheme.is_reordered else None
        self._is_turned = scheme.method in ("gptq", "awq")
        self._each = _WORD_BITS // scheme.bits
        """Codes of a word."""

    @property
    def keys(self) -> list[str]:
        """Of what it is made of."""
        return [each.key for each in (self._codes, self._scales, self._zeros) if each is not None]

    def joined(self) -> StoredTensor:
        rows, columns = self._shape()
        form = self._scheme.form(columns)
        if form is None:
            raise UnsupportedModelError(
                f"{self._codes.path}: rows of {self._codes.key!r} have {columns} numbers, "
                f"{self._scheme.columns_each or 'all'} with one scale, which make no whole blocks of 32, 64 or 128; "
                "take another release of the model"
            )
        made_of = self._made_of(Grid(rows, columns // form.numbers, form.nbytes), form, columns)
        if self._order is not None:
            made_of += (Ingredient(self._order, 0, None),)
        scheme = self._scheme.method
        return replace(self._codes, dtype=form.name, shape=(rows, columns), made_of=made_of, scheme=scheme)

    def _other(self, tensors: Mapping[str, StoredTensor], ending: str) -> StoredTensor:
        if self.stem + ending not in tensors:
            raise CheckpointError(
                f"{self._scales.path} has {self._scales.key!r}, but no shard has {self.stem + ending!r}, which belongs "
                "to it; the checkpoint is incomplete"
            )
        return tensors[self.stem + ending]

    def _shape(self) -> tuple[int, int]:
        """(outputs, columns) by the codes."""
        kind, codes = "F8_E4M3" if self._scheme.is_float else "I32", self._codes
        if codes.dtype != kind or len(codes.shape) != 2 or not codes.nbytes:
            raise CheckpointError(
                f"{codes.path}: {codes.key!r} is {codes.dtype}{list(codes.shape)}, and by config.json it should be "
                f"{kind} with two dimensions; download the checkpoint again"
            )
        first, second = codes.shape
        if self._scheme.is_float:
            return first, second
        if self._scheme.method == "awq":
            return second * self._each, first
        return (second, first * self._each) if self._is_turned else (first, second * self._each)

    def _made_of(self, grid: Grid, form: Format, columns: int) -> tuple[Ingredient, ...]:
        scheme = self._scheme
        groups = columns // (scheme.columns_each or columns)
        blocks_each, tall = grid.blocks // groups, scheme.rows_each or grid.rows
        shape = (groups, grid.rows) if self._is_turned else (-(-grid.rows // tall), groups)
        self._check(self._scales, shape, SCALE_KINDS)
        zero = None if scheme.is_float or scheme.has_zeros else 1 << scheme.bits - 1
        made_of = [
            Ingredient(self._codes, SCALE_BYTES + (not scheme.is_float), self._arranged(grid, form)),
            Ingredient(
                self._scales, 0, Scales(grid, self._scales.dtype, shape, tall, blocks_each, self._is_turned, zero)
            ),
        ]
        if self._zeros is not None:
            packed = -(-grid.rows // self._each)
            width = packed if self._is_turned else groups
            self._check(self._zeros, (groups, packed) if self._is_turned else (packed, groups), ("I32",))
            zeros = Zeros(grid, scheme.bits, width, self._is_turned, blocks_each, scheme.method == "awq", scheme.less)
            made_of.append(Ingredient(self._zeros, SCALE_BYTES, zeros))
        return tuple(made_of)

    def _arranged(self, grid: Grid, form: Format) -> Spread | TurnedWords | TurnedCodes:
        if self._scheme.method == "awq":
            return TurnedCodes(grid, form.numbers)
        if self._is_turned:
            return TurnedWords(grid, form.numbers // self._each)
        return Spread(form.numbers * self._scheme.bits // 8, form.nbytes)

    def _check(self, tensor: StoredTensor, shape: tuple[int, int], kinds: tuple[str, ...]) -> None:
        stored = tensor.shape
        if len(stored) < 2 and shape[0] * shape[1] == max(1, *stored, 1):  # one scale, or one a row
            stored = shape
        if stored != shape or tensor.dtype not in kinds:
            raise CheckpointError(
                f"{tensor.path}: {tensor.key!r} is {tensor.dtype}{list(tensor.shape)}; to {self._codes.key!r}, "
                f"{list(self._codes.shape)}, belongs {' or '.join(kinds)}{list(shape)}; download the checkpoint again"
            )
