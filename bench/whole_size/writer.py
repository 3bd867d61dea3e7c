"""Write the file of a geometry, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

from bench.whole_size.geometry import Geometry
from bench.whole_size.mixture import types_of
from bench.whole_size.random_blocks import blocks_of, random_blocks
from bench.whole_size.routing import first_token, routing_of, steps_of
from bench.whole_size.tensors import Kind, Tensor, metadata_of, tensors_of
from bench.whole_size.vocabulary import copy_tokenizer
from smoe.formats.base import Bytes
from smoe.formats.registry import GGML

LAYERS_SHARE = 0.5
"""The energy of what all layers add to a hidden state, as a share of the code's: routing stays that of the trace."""
_QUIET_GAIN = 0.2
"""The standard deviation of the logits of tokens that are not the next one."""
_FILE_TYPES = {
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
    "Q2_K": LlamaFileType.MOSTLY_Q2_K,
    "MXFP4_MOE": LlamaFileType.MOSTLY_MXFP4_MOE,
}


def write_file(out: Path, name: str, g: Geometry, vocabulary: Path, seed: int = 0) -> int:
    """Write the file, and return the size of its tensors in bytes."""
    tensors = tensors_of(g)
    types = types_of(g, tensors)
    contents = _Contents(g, types, seed)
    writer = GGUFWriter(out, g.architecture)
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[g.mixture])
    for key, value in metadata_of(g).items():
        _add(writer, f"{g.architecture}.{key}", value)
    copy_tokenizer(vocabulary, writer, g.vocabulary)
    for tensor in tensors:
        _announce(writer, tensor, types[tensor.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total = 0
    for tensor in tensors:
        data = contents.of(tensor)
        writer.write_tensor_data(data)
        total += data.nbytes
    writer.close()
    return total


def file_bytes(tensors: Sequence[Tensor], types: Mapping[str, str]) -> int:
    """Return the size of a file's tensors in bytes, without alignment."""
    return sum(math.prod(_stored_shape(tensor, types[tensor.name])) for tensor in tensors)


def _stored_shape(tensor: Tensor, kind: str) -> tuple[int, ...]:
    """Return the shape of a tensor in bytes."""
    row = 4 * tensor.shape[-1] if kind == "F32" else GGML[kind].row_bytes(tensor.shape[-1])
    return (*tensor.shape[:-1], row)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[..., None]]
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[list] = writer.add_array
    kinds[type(value)](key, value)


def _announce(writer: GGUFWriter, tensor: Tensor, kind: str) -> None:
    """Write the header's entry for a tensor."""
    shape = _stored_shape(tensor, kind)
    if kind == "F32":
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), math.prod(shape))
    else:
        raw = GGMLQuantizationType[kind]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=raw)


def _layer(tensor: Tensor) -> int:
    return int(tensor.name.split(".")[1])


class _Contents:
    """The numbers of every tensor."""

    def __init__(self, g: Geometry, types: dict[str, str], seed: int) -> None:
        self._g, self._types = g, types
        self._chance = np.random.default_rng(seed)
        self._pools: dict[tuple[str, int, float], Bytes] = {}
        form = GGML[types["token_embd.weight"]]
        codes = self._chance.standard_normal((steps_of(g), g.hidden), np.float32)
        self._embedding = blocks_of(form, codes)
        self._routing = routing_of(g, form.decode(self._embedding), seed=seed)

    def of(self, tensor: Tensor) -> np.ndarray:
        """Return the tensor in the file's format."""
        if tensor.kind is Kind.EMBEDDING:
            return np.resize(self._embedding, (tensor.shape[0], self._embedding.shape[1]))
        if tensor.kind is Kind.OUTPUT:
            return self._output(tensor)
        if tensor.kind is Kind.ROUTER:
            return self._routing.routers[_layer(tensor)]
        if tensor.kind is Kind.ROUTER_NORM:
            return self._routing.norms[_layer(tensor)]
        if tensor.kind in (Kind.MATRIX, Kind.BRANCH):
            branch = math.sqrt(LAYERS_SHARE / (2 * self._g.layers))  # attention and experts of every layer
            return self._matrix(tensor, branch if tensor.kind is Kind.BRANCH else 1.0)
        value = {Kind.ONES: 1.0, Kind.ZEROS: 0.0, Kind.DECAY: -1.0}[tensor.kind]
        return np.full(tensor.shape, value, np.float32)

    def _output(self, tensor: Tensor) -> np.ndarray:
        rows = self._matrix(tensor, _QUIET_GAIN)
        form = GGML[self._types[tensor.name]]
        first, traced = first_token(self._g), self._routing.next_token_rows
        rows[first : first + len(traced)] = blocks_of(form, traced)
        return rows

    def _matrix(self, tensor: Tensor, gain: float) -> np.ndarray:
        """Return a random matrix; its products have `gain` times the size of what it is multiplied by."""
        spread = gain / math.sqrt(tensor.shape[-1])
        if self._types[tensor.name] == "F32":
            return self._chance.normal(0, spread, tensor.shape).astype(np.float32)
        form = GGML[self._types[tensor.name]]
        blocks = self._rolled_blocks(form.name, math.prod(tensor.shape) // form.numbers, spread)
        return blocks.reshape(*tensor.shape[:-1], -1)

    def _rolled_blocks(self, form: str, count: int, spread: float) -> Bytes:
        """Return random blocks. Tensors of one size have the same blocks, each from another one on.

        So a file is written at the rate at which memory is copied, and the experts of a layer differ.
        """
        pool = self._pools.get((form, count, spread))
        if pool is None:
            pool = self._pools[form, count, spread] = random_blocks(GGML[form], count, spread, self._chance)
        return np.roll(pool, int(self._chance.integers(count)), axis=0)
