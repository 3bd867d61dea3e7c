"""Linear layers and embeddings whose weights stay quantized as in the file. They replace `nn.Linear` and
`nn.Embedding`, and compute in the model's dtype.

    few rows    our kernels multiply the codes directly      (`kernels/quantised.py`, if `pool` is set)
    more rows   some outputs at a time are dequantized and multiplied by torch
    embedding   the requested rows are dequantized; they may be on disk until then
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional

from smoe.bounds import BF16
from smoe.errors import CheckpointError
from smoe.formats.base import Format
from smoe.formats.interleaved import as_in_file, in_rows
from smoe.kernels.matrix import Matrix, in_memory, interleave, products_of
from smoe.kernels.quantised_work import MOST_BYTE_ROWS, Target, most_quantised_rows
from smoe.kernels.rows import MOST_ROWS
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.unpacked import unpacked
from smoe.memory.stored_rows import StoredRows
from smoe.models.workspace import PIECE_ELEMENTS


class QuantisedWeight(nn.Module):
    """A quantized matrix [outputs, columns]. `codes` contains its blocks as bytes, uint8 [outputs, bytes of a row]."""

    codes: torch.Tensor

    def __init__(self, form: Format, codes: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.form = form
        self.dtype = dtype
        self.pool: SpinningPool | None = None
        """The threads that run our kernels; None if our kernels are not used."""
        self.activations = BF16
        """The type in which our kernels multiply few rows (`EngineConfig.activations`)."""
        self.register_buffer("codes", codes)
        self.shape = torch.Size((codes.shape[0], codes.shape[1] // form.nbytes * form.numbers))

    @property
    def weight(self) -> torch.Tensor:
        """The whole matrix, dequantized again at each access, for comparisons."""
        return self.numbers(0, self.shape[0])

    def multiply_by(self, pool: SpinningPool, activations: str) -> None:
        """Multiply by our kernels from now on, few rows in the type `activations` (`EngineConfig.activations`)."""
        self.pool, self.activations = pool, activations

    def numbers(self, begin: int, end: int) -> torch.Tensor:
        """Return the rows `begin` to `end` - 1 of the matrix, dequantized to the model's dtype. If rows are
        interleaved, both must be multiples of `form.rows`."""
        form, codes = self.form, self.codes[begin:end]
        if form.rows > 1:
            form, codes = as_in_file(form), torch.from_numpy(in_rows(form, codes.numpy()))
        if self.pool is None:
            return unpacked(form, codes, self.dtype)
        out = torch.empty(end - begin, self.shape[1], dtype=self.dtype)
        matrix = Matrix(codes.data_ptr(), end - begin, self.shape[1], products_of(form, self.activations))
        self.pool.unpack([(matrix, out.data_ptr())])
        return out

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield ranges (begin, end) of outputs with at most `PIECE_ELEMENTS` elements each."""
        rows = self.form.rows
        step = max(1, PIECE_ELEMENTS // self.shape[1] // rows) * rows
        for begin in range(0, self.shape[0], step):
            yield begin, min(begin + step, self.shape[0])


class QuantisedLinear(QuantisedWeight):
    """A quantized replacement for `nn.Linear`."""

    def __init__(
        self,
        form: Format,
        codes: torch.Tensor,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        columns: torch.Tensor | None = None,
    ) -> None:
        """`columns`: the column of the codes that belongs to each input; None: the codes are in the inputs' order."""
        super().__init__(form, codes, dtype)
        self._inputs = None if columns is None else columns.argsort()
        """The input that belongs to each column of the codes."""
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.out_features, self.in_features = self.shape
        self.shared: SharedInput | None = None
        """The group of layers that receive the same input and are computed together; None if there is none."""
        self._matrix_of: dict[str, Matrix] = {}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features] for an input [..., in_features]."""
        if self.shared is not None:
            return self.shared.output(self, input)
        if self._inputs is None:
            return self.alone(input)
        self._inputs = self._inputs.to(input.device)
        return self.alone(input[..., self._inputs])

    @property
    def weight(self) -> torch.Tensor:
        """The whole matrix, dequantized again at each access, for comparisons."""
        whole = self.numbers(0, self.shape[0])
        return whole if self._inputs is None else whole[:, self._inputs.argsort().to(whole.device)]

    def alone(self, input: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features] for an input [..., in_features], computing only this layer."""
        rows = input.reshape(-1, self.in_features)
        out = rows.new_empty(rows.shape[0], self.out_features)
        if rows.shape[0] <= self._most_rows(rows):
            self._multiply_codes(rows.contiguous(), out)
        elif self.pool is not None and rows.dtype is torch.bfloat16 and self.has_byte_products:
            for some, to in zip(rows.split(MOST_BYTE_ROWS), out.split(MOST_BYTE_ROWS), strict=True):
                self._multiply_codes(some.contiguous(), to)
        else:
            for begin, end in self.pieces():
                bias = None if self.bias is None else self.bias[begin:end]
                out[:, begin:end] = functional.linear(rows, self.numbers(begin, end).to(rows.dtype), bias)
        return out.view(*input.shape[:-1], self.out_features)

    @property
    def is_in_order(self) -> bool:
        """Whether the columns of the codes are in the order of the inputs."""
        return self._inputs is None

    def takes(self, input: torch.Tensor) -> bool:
        """Return whether our kernel multiplies the rows of `input` in 8 bits."""
        is_known = self.pool is not None and input.dtype is torch.bfloat16 and self.has_byte_products
        return is_known and input.numel() <= MOST_BYTE_ROWS * self.in_features

    def target(self, out: torch.Tensor) -> Target:
        """Return the arguments for a product by the thread pool: this matrix, and the address of the output `out` [M,
        out_features]."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return Target(self.matrix, out.data_ptr(), 2 * self.out_features, bias)

    def _most_rows(self, rows: torch.Tensor) -> int:
        """Return the largest number of rows that our kernel multiplies in one call."""
        if self.pool is None or rows.dtype is not torch.bfloat16:
            return 0
        if self.has_byte_products or self.bias is None or self.pool.rows_are_alone:
            return most_quantised_rows([self.matrix])
        return MOST_ROWS  # only the product of a single bf16 row adds a bias before rounding

    @property
    def has_byte_products(self) -> bool:
        """Whether our kernel multiplies this layer's weight with activation rows in 8 bits."""
        products = self.matrix.products
        return products is not None and products.in_bytes is not None

    @property
    def matrix(self) -> Matrix:
        """The whole matrix as an argument for products by the thread pool."""
        known = self._matrix_of.get(self.activations)
        if known is None or known.address != self.codes.data_ptr():
            products = products_of(self.form, self.activations)
            known = Matrix(self.codes.data_ptr(), self.out_features, self.in_features, products)
            self._matrix_of[self.activations] = known
        return known

    def interleave(self) -> None:
        """Interleave the rows of the matrix in memory where products gain from it (`kernels/interleaving.py`). No other
        layer may use the same codes."""
        form = in_memory(self.form, self.out_features, self.activations)
        if form.rows == self.form.rows:
            return
        self.form = form
        self._matrix_of.clear()
        interleave(form, self.matrix)

    def _multiply_codes(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        assert self.pool is not None
        if self.bias is None or self.has_byte_products:
            self.pool.multiply_each(rows, [self.target(out)])
            return
        for n in range(rows.shape[0]):
            self.pool.multiply_each(rows[n : n + 1], [self.target(out[n : n + 1])])


class SharedInput:
    """A group of layers that receive the same tensor one after the other. The first layer that is called computes the
    outputs of all layers.

    So the q, k and v projections of attention are one task for all threads. A layer that receives another tensor than
    the first one leaves the group.
    """

    def __init__(self, layers: Sequence[QuantisedLinear]) -> None:
        self.layers = list(layers)
        self._input: torch.Tensor | None = None
        self._outputs: dict[QuantisedLinear, torch.Tensor] = {}
        for layer in layers:
            layer.shared = self

    def output(self, layer: QuantisedLinear, input: torch.Tensor) -> torch.Tensor:
        """Return the output of `layer` for `input`. It may have been computed earlier, together with the output of
        another layer for the same input."""
        if layer is self.layers[0]:
            return self._all(input) if layer.takes(input) else layer.alone(input)
        found = self._outputs.pop(layer, None) if input is self._input else None
        if not self._outputs:
            self._input = None
        if found is not None:
            return found
        if layer.takes(input):
            self.layers.remove(layer)
            layer.shared = None
        return layer.alone(input)

    def _all(self, input: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        assert first.pool is not None
        rows = input.reshape(-1, first.in_features).contiguous()
        outs = [rows.new_empty(rows.shape[0], layer.out_features) for layer in self.layers]
        first.pool.multiply_each(rows, [layer.target(out) for layer, out in zip(self.layers, outs, strict=True)])
        own, *rest = [out.view(*input.shape[:-1], out.shape[1]) for out in outs]
        self._input, self._outputs = input, dict(zip(others, rest, strict=True))
        return own


def share_inputs(model: nn.Module) -> None:
    """Group the layers of each module that have equal input sizes, so that the products of layers with the same input
    are computed together."""
    for module in model.modules():
        alike: dict[int, list[QuantisedLinear]] = {}
        for child in module.children():
            if not isinstance(child, QuantisedLinear) or not child.is_in_order:
                continue
            if child.pool is not None and child.has_byte_products:
                alike.setdefault(child.in_features, []).append(child)
        for layers in alike.values():
            if len(layers) > 1:
                SharedInput(layers)


class QuantisedEmbedding(QuantisedWeight):
    """A quantized replacement for `nn.Embedding`."""

    def __init__(self, form: Format, codes: torch.Tensor, dtype: torch.dtype, padding_idx: int | None) -> None:
        super().__init__(form, codes, dtype)
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = self.shape

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return embeddings [..., embedding_dim] for token ids [...]."""
        ids = input.reshape(-1)
        if self.pool is None or len(ids) > MOST_ROWS:
            return unpacked(self.form, self.codes[ids], self.dtype).view(*input.shape, self.embedding_dim)
        out = torch.empty(len(ids), self.embedding_dim, dtype=self.dtype)
        products = products_of(self.form, self.activations)
        rows = [Matrix(self.codes[n].data_ptr(), 1, self.embedding_dim, products) for n in ids.tolist()]
        self.pool.unpack([(row, to.data_ptr()) for row, to in zip(rows, out, strict=True)])
        return out.view(*input.shape, self.embedding_dim)


class StoredEmbedding(nn.Module):
    """A replacement for `nn.Embedding` that reads the requested rows from disk."""

    def __init__(self, form: Format, rows: StoredRows, dtype: torch.dtype, padding_idx: int | None) -> None:
        super().__init__()
        self.form = form
        self.rows = rows
        self.dtype = dtype
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = self.shape = torch.Size(rows.shape)
        self.weight = torch.tensor(torch.nan, dtype=dtype).expand(self.shape)
        """Shape, type and device of the matrix, for transformers' code that reads them. Its values are on disk."""
        self.pool: SpinningPool | None = None
        """The threads that dequantize with our kernels; None if our kernels are not used."""

    def whole(self) -> torch.Tensor:
        """Return the whole matrix, which is read and dequantized by this call; for comparisons."""
        return self._numbers(range(self.num_embeddings))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return embeddings [..., embedding_dim] for token ids [...]."""
        ids: list[int] = input.reshape(-1).tolist()
        places = {token: n for n, token in enumerate(dict.fromkeys(ids))}
        out = self._numbers(list(places))
        if len(places) < len(ids):
            out = out[[places[token] for token in ids]]
        return out.view(*input.shape, self.embedding_dim)

    def unpack_by(self, pool: SpinningPool) -> None:
        """Dequantize rows by our kernels from now on."""
        self.pool = pool

    def _numbers(self, ids: Sequence[int]) -> torch.Tensor:
        codes = self.rows.read(ids)
        if not self.form.is_finite(codes):
            odd = next(row for row, code in zip(ids, codes, strict=True) if not self.form.is_finite(code[None]))
            tensor = self.rows.tensor_of(odd)
            raise CheckpointError(
                f"{tensor.path}: {tensor.key!r} has a number or scale that is NaN or infinite in {self.form.name}; "
                "download the checkpoint again"
            )
        read = QuantisedWeight(self.form, torch.from_numpy(codes), self.dtype)
        read.pool = self.pool
        return read.numbers(0, len(ids))


def can_stay_quantised(module: nn.Module) -> bool:
    """Return whether a module is exactly `nn.Linear` or `nn.Embedding`, which a quantized one can replace."""
    return type(module) in (nn.Linear, nn.Embedding)


def layers_of_weights(model: nn.Module) -> dict[str, list[str]]:
    """Return {name of a weight: the names of all layers that have it}, which are several if weights are tied."""
    sharing: dict[int, list[str]] = {}
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            found[f"{path}.weight"] = layers = sharing.setdefault(id(weight), [])
            layers.append(path)
    return found


def keep_quantised(
    model: nn.Module,
    layers: Sequence[str],
    form: Format,
    codes: torch.Tensor,
    dtype: torch.dtype,
    columns: torch.Tensor | None = None,
) -> None:
    """Replace the layers `layers`, which have one weight (`layers_of_weights`), by quantized layers. They share the
    quantized codes. `columns`: as in `QuantisedLinear`."""
    for path in layers:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, _of_codes(model.get_submodule(path), form, codes, dtype, columns))


def keep_on_disk(model: nn.Module, name: str, form: Format, rows: StoredRows, dtype: torch.dtype) -> None:
    """Replace the embedding that has the untied parameter `name` by one that reads rows from disk."""
    path = name.removesuffix(".weight")
    parent, _, child = path.rpartition(".")
    library = model.get_submodule(path)
    assert isinstance(library, nn.Embedding), library
    setattr(model.get_submodule(parent), child, StoredEmbedding(form, rows, dtype, library.padding_idx))


def _of_codes(
    module: nn.Module, form: Format, codes: torch.Tensor, dtype: torch.dtype, columns: torch.Tensor | None
) -> QuantisedWeight:
    if isinstance(module, nn.Embedding):
        assert columns is None, "columns of an embedding"
        return QuantisedEmbedding(form, codes, dtype, module.padding_idx)
    assert isinstance(module, nn.Linear), module
    return QuantisedLinear(form, codes, dtype, None if module.bias is None else module.bias.data, columns)
