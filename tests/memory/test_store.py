"""Placements: what lands in a slot equals what safetensors reads, whichever way the checkpoint is laid out.

Would catch: a read that starts at the wrong page, gate and up swapped, an expert's rows taken from its neighbour, a
conversion that rounds otherwise than the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from smoe.errors import CheckpointError
from smoe.expert import EXACT
from smoe.memory import expert_files
from smoe.memory.arena import Arena
from smoe.memory.expert_files import DiskReader
from smoe.memory.movers import Filler, SlotMover, torch_dtype
from smoe.memory.reading_threads import Ticket
from smoe.memory.safetensors_index import ITEM_BYTES, StoredTensor, read_header
from smoe.memory.store import (
    MATRIX_ALIGNMENT,
    PAGE,
    STAGED_BYTES,
    ExpertStore,
    FusedExperts,
    Part,
    StoredLayer,
    row_of,
)
from smoe.policy.plan import Load, LoadReason

INNER, HIDDEN, EXPERTS = 48, 40, 3
PARTS = (Part("gate_up_proj", (2 * INNER, HIDDEN)), Part("down_proj", (HIDDEN, INNER)))
Tensors = dict[str, torch.Tensor]
LAYOUTS = ("neighbours", "apart", "fused", "shards")


def make_tensors(dtype: torch.dtype, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for expert in range(EXPERTS):
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            tensors[f"{expert}.{name}"] = torch.randn(shape, generator=generator).to(dtype)
    return tensors


def write(folder: Path, tensors: Tensors, layout: str, shift: int) -> StoredLayer:
    """The checkpoint, laid out in one of the ways that occur; `shift` bytes move everything off its alignment."""
    names = {f"{e}.{n}": f"{e}.{m}" for e in range(EXPERTS) for n, m in (("gate", "a"), ("up", "b"), ("down", "c"))}
    if layout == "apart":  # as w1, w2, w3: down lies between gate and up
        names = {key: new.replace("c", "aa") for key, new in names.items()}
    padding = {"!": torch.zeros(shift, dtype=torch.uint8)} if shift else {}
    if layout == "fused":
        up = torch.stack([torch.cat([tensors[f"{e}.gate"], tensors[f"{e}.up"]]) for e in range(EXPERTS)])
        down = torch.stack([tensors[f"{e}.down"] for e in range(EXPERTS)])
        save_file({**padding, "up": up, "down": down}, folder / "one.safetensors")
        found = read_header(folder / "one.safetensors")
        sources = [
            {"gate_up_proj": (row_of(found["up"], e),), "down_proj": (row_of(found["down"], e),)}
            for e in range(EXPERTS)
        ]
        return StoredLayer(0, PARTS, sources)
    files: dict[str, Tensors] = {"one": dict(padding), "two": {}}
    for number, (key, name) in enumerate(names.items()):
        files["two" if layout == "shards" and number % 2 else "one"][name] = tensors[key]
    found = {}
    for file, contents in files.items():
        if contents:
            save_file(contents, folder / f"{file}.safetensors")
            found |= read_header(folder / f"{file}.safetensors")
    stored = {key: found[name] for key, name in names.items()}
    sources = [
        {"gate_up_proj": (stored[f"{e}.gate"], stored[f"{e}.up"]), "down_proj": (stored[f"{e}.down"],)}
        for e in range(EXPERTS)
    ]
    return StoredLayer(0, PARTS, sources)


def expected_parts(tensors: Mapping[str, torch.Tensor], expert: int, dtype: torch.dtype) -> Tensors:
    gate_up = torch.cat([tensors[f"{expert}.gate"], tensors[f"{expert}.up"]])
    return {"gate_up_proj": gate_up.to(dtype), "down_proj": tensors[f"{expert}.down"].to(dtype)}


def assert_slots_hold_the_experts(store: ExpertStore, tensors: Tensors, is_direct: bool) -> None:
    """Fill the slots of a dirty arena in an order of their own and compare every part."""
    arena = Arena([(EXPERTS, max(store.slot_bytes.values()))], torch.device("cpu"))
    arena.bytes.fill_(0xA5)
    reader = DiskReader(is_direct)
    mover = SlotMover(Filler({EXACT: store}, reader), reader, arena)
    for slot, expert in enumerate(reversed(range(EXPERTS))):
        ticket = Ticket(Load((0, expert, EXACT), slot, None, True, LoadReason.DEMAND, 0), None)
        came = mover.move(ticket, None)
        placement = store.placement(0, expert)
        assert came >= sum(read.need for read in placement.reads) >= placement.nbytes or store.is_staged
    for slot, expert in enumerate(reversed(range(EXPERTS))):
        placement = store.placement(0, expert)
        for part in PARTS:
            got = arena.view(slot, placement.parts[part.name], part.shape, torch_dtype(store.dtype))
            assert torch.equal(got, expected_parts(tensors, expert, torch_dtype(store.dtype))[part.name]), part.name
    mover.close()


def assert_placements_are_legal(store: ExpertStore) -> None:
    """Pages for O_DIRECT, reads that do not overlap in the slot, matrices where the kernels want them."""
    for layer, expert in store.keys():  # noqa: SIM118
        placement = store.placement(layer, expert)
        end = 0
        for read in [*placement.reads, *(piece.read for piece in placement.pieces)]:
            assert read.offset % PAGE == read.nbytes % PAGE == read.target % PAGE == 0
            assert 0 < read.need <= read.nbytes
        for read in placement.reads:
            assert read.target >= end
            end = read.target + read.nbytes
        assert end <= max(store.slot_bytes.values())
        for piece in placement.pieces:
            assert piece.read.nbytes <= store.staging_buffer_bytes <= STAGED_BYTES + 2 * PAGE
            assert piece.source + piece.nbytes <= piece.read.need
        alignment = ITEM_BYTES[store.dtype] if store.dtype == "BF16" else MATRIX_ALIGNMENT
        assert all(offset % alignment == 0 for offset in placement.parts.values())
        assert bool(placement.pieces) is store.is_staged
    assert max(store.slot_bytes.values()) % PAGE == 0


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("shift", [0, 2, 7, 4095])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_slots_equal_tensors(dtype: str, layout: str, shift: int, is_direct: bool, tmp_path: Path) -> None:
    tensors = make_tensors(torch_dtype(dtype))
    store = ExpertStore({0: write(tmp_path, tensors, layout, shift)}, dtype)
    assert_placements_are_legal(store)
    assert_slots_hold_the_experts(store, tensors, is_direct)
    assert store.expert_bytes >= sum(part.shape[0] * part.shape[1] for part in PARTS) * ITEM_BYTES[dtype]


@settings(max_examples=40, deadline=None)
@given(shift=st.integers(0, 9000), layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 9))
def test_slots_equal_tensors_at_any_offset(
    shift: int, layout: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensors = make_tensors(torch.bfloat16, seed)
    store = ExpertStore({0: write(tmp_path_factory.mktemp("shifted"), tensors, layout, shift)}, "BF16")
    assert_placements_are_legal(store)
    assert_slots_hold_the_experts(store, tensors, is_direct=False)


@pytest.mark.parametrize(("stored", "wanted"), [("F32", "BF16"), ("F32", "F16"), ("BF16", "F32"), ("F16", "F32")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_conversion_rounds_like_the_library(stored: str, wanted: str, layout: str, tmp_path: Path) -> None:
    tensors = make_tensors(torch_dtype(stored))
    store = ExpertStore({0: write(tmp_path, tensors, layout, 0)}, wanted)
    assert store.is_staged
    assert_slots_hold_the_experts(store, tensors, is_direct=False)


@pytest.mark.parametrize(
    ("layout", "is_staged"), [("neighbours", False), ("fused", False), ("apart", True), ("shards", True)]
)
def test_which_path_is_taken(layout: str, is_staged: bool, tmp_path: Path) -> None:
    """bf16 neighbours go straight into the slot; what has to be put together goes through a buffer."""
    store = ExpertStore({0: write(tmp_path, make_tensors(torch.bfloat16), layout, 0)}, "BF16")
    assert store.is_staged is is_staged
    reads = [len(store.placement(0, expert).reads) for expert in range(EXPERTS)]
    pieces = [len(store.placement(0, expert).pieces) for expert in range(EXPERTS)]
    assert reads == {"neighbours": [1] * 3, "fused": [2] * 3, "apart": [0] * 3, "shards": [0] * 3}[layout]
    assert pieces == [3 if is_staged else 0] * 3


def test_a_demand_load_inside_a_staged_prefetch_keeps_its_hands_off_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread, two experts: the prefetch has read its first chunk when the demand load passes."""
    monkeypatch.setattr(expert_files, "CHUNK_BYTES", PAGE)
    tensors = make_tensors(torch.float32)
    store = ExpertStore({0: write(tmp_path, tensors, "apart", 0)}, "F32")
    arena = Arena([(2, max(store.slot_bytes.values()))], torch.device("cpu"))
    reader = DiskReader(False)
    filler = Filler({EXACT: store}, reader)
    passed: list[int] = []

    def demand() -> None:
        if not passed:
            passed.append(filler.fill((0, 1, EXACT), arena.buffer(1), None))

    filler.fill((0, 0, EXACT), arena.buffer(0), demand)
    assert passed
    for slot, expert in ((0, 0), (1, 1)):
        for part in PARTS:
            got = arena.view(slot, store.placement(0, expert).parts[part.name], part.shape, torch.float32)
            assert torch.equal(got, expected_parts(tensors, expert, torch.float32)[part.name])
    reader.close()


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    experts = write(tmp_path, make_tensors(torch.float32), "neighbours", 0)
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        StoredLayer(0, (Part("gate_up_proj", (2 * INNER, HIDDEN + 1)), PARTS[1]), experts.sources)


def test_row_of_a_fused_tensor(tmp_path: Path) -> None:
    save_file({"w": torch.arange(24.0).reshape(4, 2, 3)}, tmp_path / "w.safetensors")
    row = row_of(read_header(tmp_path / "w.safetensors")["w"], 2)
    raw = (tmp_path / "w.safetensors").read_bytes()[row.offset : row.offset + row.nbytes]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32), torch.arange(12.0, 18.0))
    assert row.shape == (2, 3)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("shift", [0, 2, 4094])
@pytest.mark.parametrize(("inner", "period"), [(32, 1), (48, 2), (40, 4), (65, 9)])
def test_rows_made_on_demand_are_placed_as_rows_made_at_once(inner: int, period: int, shift: int, dtype: str) -> None:
    """Offsets have the same remainders by the page size after 1, 2 or 4 experts, or after none of all 9."""
    experts, item = 9, ITEM_BYTES["BF16"]
    parts = (Part("gate_up_proj", (2 * inner, 64)), Part("down_proj", (64, inner)))
    fused, offset = dict[str, tuple[StoredTensor, ...]](), shift
    for part in parts:
        shape = (experts, *part.shape)
        nbytes = shape[0] * shape[1] * shape[2] * item
        fused[part.name] = (StoredTensor(Path("one.safetensors"), offset, nbytes, "BF16", shape, part.name),)
        offset += nbytes
    on_demand = FusedExperts(experts, fused)
    assert on_demand.period == period
    lazy, eager = (
        ExpertStore({layer: StoredLayer(layer, parts, sources) for layer in (0, 3)}, dtype)
        for sources in (on_demand, list(on_demand))
    )
    assert lazy.keys() == eager.keys()
    for key in reversed(eager.keys()):
        assert lazy.placement(*key) == eager.placement(*key)
    for name in ("is_staged", "slot_bytes", "staging_buffer_bytes", "expert_bytes", "total_bytes"):
        assert getattr(lazy, name) == getattr(eager, name), name
    assert lazy.paths() == eager.paths()
