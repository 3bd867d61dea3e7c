"""Placements of quantised experts: what lands in a slot is what the gguf package reads from the file, byte for byte, or
safetensors where codes and scales lie apart.

Would catch: gate and up exchanged, an expert's rows taken from its neighbour, a layer read in another layer's format,
views shared by experts that lie otherwise in their slots, a damaged scale that is laid to another tensor, scales laid
to the codes of another row, a piece that begins inside a block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from smoe.errors import CheckpointError
from smoe.expert import EXACT
from smoe.formats.plain import PLAIN
from smoe.formats.registry import FORMATS, GGML
from smoe.memory.arena import Arena
from smoe.memory.expert_files import DiskReader
from smoe.memory.movers import Filler, SlotMover
from smoe.memory.quantised_store import QuantisedStore, is_quantised
from smoe.memory.reading_threads import Ticket
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import PAGE, Part, StoredLayer
from smoe.models.checkpoint import checkpoint_at
from smoe.models.read_spec import read_spec
from smoe.policy.plan import Load, LoadReason
from smoe.presets import configure
from tests import gguf_toy, mxfp4_toy, zoo
from tests.formats.blocks import by_gguf, random_rows

SIZES = {"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 3, "num_experts": 3}
MATRICES = {"gate_up_proj.0": "gate", "gate_up_proj.1": "up", "down_proj.0": "down"}
FUSED = {"gate_up_proj.0": "gate_up", "down_proj.0": "down"}
MIXTURES = {
    "one format": [("Q8_0", "Q8_0", "Q8_0")],
    "each matrix its own": [("Q5_1", "Q3_K", "MXFP4")],
    "as in Q4_K_M": [("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "Q4_K", "Q4_K")],
    "as many bytes, other formats": [("Q4_0", "Q4_0", "Q4_0"), ("Q4_K", "Q4_K", "Q4_K"), ("Q5_0", "Q5_K", "Q4_0")],
}
"""Formats of gate, up and down for the layers in turn."""


def write(path: Path, mixture: str, *, fused: bool = False, parts: int = 1) -> Path:
    """A toy file of three layers of three experts, random blocks; with `fused` gate and up are of gate's format."""
    model = zoo.make("qwen3_moe", dtype=torch.bfloat16, num_experts_per_tok=2, **SIZES)
    weights, blocks = gguf_toy.tensors_of(model, fused=fused), {}
    for layer in range(SIZES["num_hidden_layers"]):
        names = dict(zip(("gate", "up", "down"), MIXTURES[mixture][layer % len(MIXTURES[mixture])], strict=True))
        for n, (kind, name) in enumerate({**names, "gate_up": names["gate"]}.items()):
            key = f"blk.{layer}.ffn_{kind}_exps.weight"
            if key in weights:
                experts, rows, columns = weights[key].shape
                data = random_rows(FORMATS[name], experts * rows, columns, 10 * layer + n)
                blocks[key] = data.reshape(experts, rows, -1), Type[name]
    return gguf_toy.write(path, model, blocks=blocks, fused=fused, parts=parts)


def open_store(path: Path) -> QuantisedStore:
    experts = checkpoint_at(path).experts(read_spec(path, configure(context_tokens=32)))
    assert is_quantised(experts)
    return QuantisedStore(experts)


def by_the_package(path: Path) -> dict[str, gguf.ReaderTensor]:
    """Every tensor of a file, or of all parts in its folder, by the gguf package's own reader."""
    return {tensor.name: tensor for each in sorted(path.parent.iterdir()) for tensor in gguf.GGUFReader(each).tensors}


def slots_filled(store: QuantisedStore, is_direct: bool) -> dict[tuple[int, int], bytes]:
    """Every expert's slot in an arena that was dirty before, filled as a running model fills it."""
    keys = store.keys()
    arena = Arena([(1, store.slot_bytes[layer]) for layer, _ in keys], torch.device("cpu"))
    arena.bytes.fill_(0xA5)
    reader = DiskReader(is_direct)
    mover = SlotMover(Filler({EXACT: store}, reader), reader, arena)
    for slot, (layer, expert) in enumerate(keys):
        came = mover.move(Ticket(Load((layer, expert, EXACT), slot, None, True, LoadReason.DEMAND, 0), None), None)
        assert came >= store.placement(layer, expert).nbytes
    mover.close()
    return {key: bytes(arena.buffer(slot)) for slot, key in enumerate(keys)}


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize(("fused", "parts"), [(False, 1), (True, 1), (False, 4)], ids=["one file", "fused", "parts"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_slots_hold_the_bytes_of_the_file(
    mixture: str, fused: bool, parts: int, is_direct: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "toy.gguf", mixture, fused=fused, parts=parts)
    store, stored = open_store(path), by_the_package(path)
    for (layer, expert), slot in slots_filled(store, is_direct).items():
        placement, matrices = store.placement(layer, expert), store.matrices(layer)
        kinds = FUSED if fused else MATRICES
        assert [matrix.name for matrix in matrices] == list(kinds) == list(placement.parts)
        for matrix in matrices:
            theirs = stored[f"blk.{layer}.ffn_{kinds[matrix.name]}_exps.weight"]
            wanted = theirs.data[expert].tobytes()
            begin = placement.parts[matrix.name]
            assert slot[begin : begin + matrix.nbytes] == wanted, (layer, expert, matrix.name)
            columns, outputs, _ = theirs.shape.tolist()
            assert (matrix.form.name, matrix.outputs, matrix.columns) == (theirs.tensor_type.name, outputs, columns)
        assert placement.nbytes == sum(matrix.nbytes for matrix in matrices)


@pytest.mark.parametrize("parts", [1, 4])
def test_placements_are_legal(parts: int, tmp_path: Path) -> None:
    """Pages for O_DIRECT, reads that do not overlap in the slot, no buffer between, sizes that hold every expert."""
    store = open_store(write(tmp_path / "toy.gguf", "as in Q4_K_M", parts=parts))
    assert not store.is_staged and store.staging_buffer_bytes == 0
    for key in store.keys():  # noqa: SIM118
        placement, end = store.placement(*key), 0
        for read in placement.reads:
            assert read.offset % PAGE == read.nbytes % PAGE == read.target % PAGE == 0 < read.need <= read.nbytes
            assert read.target >= end
            end = read.target + read.nbytes
        assert end <= placement.slot_bytes <= store.slot_bytes[key[0]] and not placement.pieces
    sizes = [store.placement(*key).nbytes for key in store.keys()]  # noqa: SIM118
    assert store.total_bytes == sum(sizes) and store.expert_bytes == max(sizes) > min(sizes)


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("staged_bytes", [512, 2**22], ids=["many pieces", "one piece"])
@pytest.mark.parametrize("shards", [1, 3])
def test_codes_and_scales_meet_in_the_slot(
    shards: int, staged_bytes: int, is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one file or from two; blocks in pieces that fit a small buffer, biases behind them."""
    monkeypatch.setattr("smoe.memory.store.STAGED_BYTES", staged_bytes)
    mxfp4_toy.save(tmp_path, shards=shards, hidden_size=96, intermediate_size=64)
    stored = {key: each for path in tmp_path.glob("*.safetensors") for key, each in load_file(path).items()}
    experts = checkpoint_at(tmp_path).experts(read_spec(tmp_path, configure(context_tokens=32)))
    store = QuantisedStore(experts, "BF16")
    assert is_quantised(experts) and store.is_staged
    assert {path.name for path in store.paths()} == {path.name for path in tmp_path.glob("*.safetensors")}
    for (layer, expert), slot in slots_filled(store, is_direct).items():
        placement, stem = store.placement(layer, expert), f"model.layers.{layer}.mlp.experts."
        for matrix in store.matrices(layer):
            codes, scales = (stored[f"{stem}{matrix.part}_{kind}"][expert] for kind in ("blocks", "scales"))
            wanted = torch.cat([scales.unsqueeze(-1), codes], -1).numpy().tobytes()
            begin = placement.parts[matrix.name]
            assert slot[begin : begin + matrix.nbytes] == wanted, (layer, expert, matrix.name)
            bias, begin = stored[f"{stem}{matrix.part}_bias"][expert], placement.parts[f"{matrix.part}_bias"]
            wanted = bias.view(torch.uint8).numpy().tobytes()
            assert slot[begin : begin + len(wanted)] == wanted and begin % 64 == 0
            assert (matrix.outputs, matrix.columns) == (codes.shape[0], 32 * codes.shape[1])
        for read in [piece.read for piece in placement.pieces]:
            assert read.offset % PAGE == read.nbytes % PAGE == read.target == 0 < read.need <= read.nbytes
            assert read.nbytes <= store.staging_buffer_bytes <= staged_bytes + 2 * PAGE


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_layout_is_shared_where_views_can_be(mixture: str, tmp_path: Path) -> None:
    """By every two experts whose matrices have the same place, format and shape, and by no others."""
    path = write(tmp_path / "toy.gguf", mixture)
    store, stored = open_store(path), by_the_package(path)

    def seen(layer: int, expert: int) -> list[tuple[object, ...]]:
        tensors = {name: stored[f"blk.{layer}.ffn_{kind}_exps.weight"] for name, kind in MATRICES.items()}
        parts = store.placement(layer, expert).parts
        return [(parts[name], t.tensor_type, *t.shape.tolist()) for name, t in tensors.items()]

    for one, other in combinations(store.keys(), 2):
        is_shared = store.placement(*one).layout == store.placement(*other).layout
        assert is_shared is (seen(*one) == seen(*other)), (one, other)


def tensor(dtype: str, shape: tuple[int, ...], offset: int, path: str = "toy.gguf", key: str = "") -> StoredTensor:
    form = (FORMATS | PLAIN).get(dtype)
    nbytes = 2 * prod(shape) if form is None else prod(shape[:-1]) * form.row_bytes(shape[-1])
    return StoredTensor(Path(path), offset, nbytes, dtype, shape, key or f"{dtype} at {offset}")


def layer_of(*experts: Sequence[StoredTensor], layer: int = 0) -> StoredLayer:
    """Experts of gate, up and down in files that are not there: only their places are asked for."""
    sources: list[Mapping[str, tuple[StoredTensor, ...]]] = [
        {"gate_up_proj": (gate, up), "down_proj": (down,)} for gate, up, down in experts
    ]
    gate, up, down = experts[0]
    parts = (Part("gate_up_proj", (gate.shape[0] + up.shape[0], gate.shape[1])), Part("down_proj", down.shape))
    return StoredLayer(layer, parts, sources)


def expert(formats: Sequence[str], shift: int = 0, shape: tuple[int, int] = (32, 256)) -> list[StoredTensor]:
    return [
        tensor(dtype, dtype_shape, shift + n * 2**20)
        for n, (dtype, dtype_shape) in enumerate(zip(formats, (shape, shape, (256, 256)), strict=True))
    ]


@pytest.mark.parametrize(
    ("other", "is_shared"),
    [
        (expert(("Q4_0", "Q4_0", "Q8_0"), shift=5 * PAGE), True),
        (expert(("Q4_0", "Q4_0", "Q8_0"), shift=32), False),
        (expert(("Q4_K", "Q4_0", "Q8_0")), False),
        (expert(("Q4_0", "Q4_K", "Q8_0")), False),
        (expert(("Q4_0", "Q4_0", "Q8_0"), shape=(16, 512)), False),
    ],
    ids=["whole pages further on", "off the page", "gate's format", "up's format", "shape"],
)
def test_what_makes_a_layout(other: list[StoredTensor], is_shared: bool) -> None:
    """Beside an expert of 32 rows of 256 in Q4_0 at a page; Q4_K, and half the rows of twice the width, are as long."""
    one = expert(("Q4_0", "Q4_0", "Q8_0"))
    store = QuantisedStore({0: layer_of(one), 1: layer_of(other, layer=1)})
    first, second = store.placement(0, 0), store.placement(1, 0)
    assert first.nbytes == second.nbytes
    assert (first.layout == second.layout) is is_shared


@pytest.mark.parametrize("matrix", range(3))
def test_experts_of_a_layer_in_different_formats_are_refused(matrix: int) -> None:
    """Though the two formats take as many bytes."""
    formats = ["Q4_0"] * 3
    formats[matrix] = "Q4_K"
    same, different = expert(["Q4_0"] * 3), expert(formats)
    with pytest.raises(CheckpointError, match=r"toy\.gguf: experts 0 and 2 of layer 7 .* different formats"):
        QuantisedStore({7: layer_of(same, same, different, layer=7)})
    QuantisedStore({7: layer_of(same, same, layer=7), 8: layer_of(different, different, layer=8)})


@pytest.mark.parametrize("plain", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("matrix", range(3))
def test_experts_may_be_quantised_in_part(matrix: int, plain: str) -> None:
    """Others keep their own type, in an expert and in a layer of which nothing is quantised beside one that is."""
    formats = ["Q4_0"] * 3
    formats[matrix] = plain
    partly, whole, none = expert(formats), expert(["Q4_0"] * 3), expert([plain] * 3)
    assert is_quantised({0: layer_of(partly)}) and not is_quantised({0: layer_of(none)})
    store = QuantisedStore({0: layer_of(whole), 1: layer_of(partly, layer=1), 2: layer_of(none, layer=2)})
    assert [each.form.name for each in store.matrices(1)] == formats
    for layer, tensors in ((1, partly), (2, none)):
        assert [each.nbytes for each in store.matrices(layer)] == [tensor.nbytes for tensor in tensors]
        assert store.placement(layer, 0).nbytes == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("plain", ["F64", "I8"])
def test_what_is_no_format_is_named(plain: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{plain} at \d+' .*{plain}"):
        QuantisedStore({0: layer_of(expert(["Q4_0", plain, "Q4_0"]))})


HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ2_0": (64,),
}
"""Bytes of a block at which its fp16 numbers begin, by ggml's own structures; where nothing is said, at the first."""


@pytest.mark.parametrize("kind", MATRICES.values())
@pytest.mark.parametrize("name", [name for name in GGML if name != "IQ1_M"])  # its scale is in pieces
def test_a_scale_that_is_no_number_is_named(name: str, kind: str) -> None:
    """NaN and both infinities, in the scale and the minimum of the last block; the largest number is neither."""
    form, number = FORMATS[name], list(MATRICES.values()).index(kind)
    tensors = [replace(each, key=key) for each, key in zip(expert([name] * 3, 32), MATRICES.values(), strict=True)]
    store = QuantisedStore({4: layer_of(tensors, tensors, layer=4)})
    placement, slot, data = store.placement(4, 1), bytearray(store.slot_bytes[4]), []
    for matrix in store.matrices(4):
        begin = placement.parts[matrix.name]
        data.append(np.frombuffer(slot, np.uint8, matrix.nbytes, begin).reshape(matrix.outputs, -1))
        data[-1][:] = random_rows(form, matrix.outputs, matrix.columns, seed=number)

    def is_good() -> bool:
        said = rf"toy\.gguf: '{kind}' .*of expert 1 in layer 4.*NaN or infinite in {name};"
        try:
            store.check_finite(4, 1, placement, memoryview(slot))
        except CheckpointError as error:
            assert re.match(said, str(error))
            return False
        return True

    last = data[number][-1, -form.nbytes :]
    for begin in HALVES.get(name, (0,)):
        scale = last[begin : begin + (1 if name == "MXFP4" else 2)]
        before = scale.copy()
        for bits in (b"\xfe",) if name == "MXFP4" else (b"\xff\x7b", b"\xff\xfb"):
            scale[:] = np.frombuffer(bits, np.uint8)
            assert is_good()
        for bits in (b"\xff",) if name == "MXFP4" else (b"\0\x7c", b"\0\xfc", b"\1\x7c", b"\0\xfe"):
            scale[:] = np.frombuffer(bits, np.uint8)
            assert not is_good(), (begin, bits)
            with np.errstate(invalid="ignore"):  # of the package's power of two 255 is a number, by the standard NaN
                assert name == "MXFP4" or not np.isfinite(by_gguf(form, data[number])).all()
        scale[:] = before
