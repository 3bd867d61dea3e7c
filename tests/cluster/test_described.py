"""What the coordinator says of its experts to workers without torch: the same weights, found in their own files, or a
refusal.

Would catch gate and up the wrong way round, a key of another layer, a row of a fused tensor that is its neighbour, and
words of main's that are believed though they cannot be.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq")

from smoe.cluster import described, frames
from smoe.cluster.described import Description, LayerKeys
from smoe.cluster.describing import Describer, LightWorker
from smoe.cluster.stored_identity import Coordinator, KeyPair, Worker
from smoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from smoe.expert import EXACT
from smoe.kernels.isa import widest
from smoe.load.describe import describe
from smoe.load.light_experts import open_described, place_of
from smoe.load.worker_experts import open_experts
from smoe.memory.store import StoredLayer
from smoe.models.checkpoint import whole_checkpoint
from smoe.models.read_spec import read_spec
from smoe.presets import configure

TABLE = np.arange(65536, dtype=np.uint16)
SOME = Description("sum", 64, 32, (LayerKeys(3, 8, ("a.*.w1", "a.*.w3"), ("fused",)),), TABLE)
FITS: dict[str, Any] = {"dtype": torch.bfloat16, "hidden_size": 256, "num_attention_heads": 4}


def sent(parts: list[Any]) -> frames.Frame:
    return frames.parse([bytes(part) for part in parts])


def described_by_main(folder: Path) -> LightWorker:
    spec = read_spec(folder, configure())
    stored: dict[int, StoredLayer] = whole_checkpoint(folder, None).experts(spec)
    served = open_experts(folder, None, configure(threads=1), 1)
    math: Any = served.alone.math
    served.alone.close()
    return describe(served.weights, stored, math, "own-order", 1)


def test_it_comes_as_it_was_sent() -> None:
    came = described.parse_experts(sent(described.experts(SOME)))
    assert came._replace(table=TABLE) == SOME and (came.table == TABLE).all()


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 0},
        {"hidden": True},
        {"inner": 1 << 40},
        {"weights": 5},
        {"layers": []},
        {"layers": [[0, 8, ["a"], []]]},
        {"layers": [[0, 8, ["a"], [5]]]},
        {"layers": [[-1, 8, ["a"], ["b"]]]},
        {"layers": [[0, 8, ["a"]]]},
        {"layers": 5},
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any]) -> None:
    header, words, table = described.experts(SOME)
    with pytest.raises(frames.FrameError):
        described.parse_experts(sent([header, json.dumps(json.loads(words) | change).encode(), table]))


@given(st.binary(max_size=200), st.integers(0, 131073))
def test_noise_is_refused(words: bytes, length: int) -> None:
    header, good, _ = described.experts(SOME)
    for parts in ([header, words, bytes(length)], [header, good, bytes(min(length, 131071))], [header, good]):
        with pytest.raises(frames.FrameError):
            described.parse_experts(sent(parts))


@pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2")
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3_moe", {"head_dim": 64, "moe_intermediate_size": 64}),
        ("mixtral", {"head_dim": 64, "intermediate_size": 64}),
        ("granitemoe", {"intermediate_size": 64}),
    ],
    ids=["a key for each", "scattered", "fused"],
)
def test_the_same_weights_are_found(family: str, more: dict[str, Any], toy: Callable[..., Path]) -> None:
    folder = toy(family, **FITS, **more)
    theirs = open_experts(folder, None, configure(threads=1), 1)
    ours = open_described(folder, described_by_main(folder).description, None, 1, 1)
    try:
        assert ours.weights == theirs.weights and (ours.dtype_name, ours.has_torch) == (theirs.dtype_name, False)
        assert ours.alone.slots == theirs.alone.slots and ours.alone.store.keys() == theirs.alone.store.keys()
        for key in sorted(theirs.alone.store.keys()):
            parts = [weights_of(each.alone, key) for each in (ours, theirs)]
            assert parts[0].keys() == parts[1].keys()
            assert all((parts[0][name] == parts[1][name]).all() for name in parts[0])
    finally:
        ours.alone.close()
        theirs.alone.close()


def weights_of(alone: Any, key: tuple[int, int]) -> dict[str, np.ndarray[Any, Any]]:
    """An expert's parts as they lie in its slot."""
    alone.experts.bring((*key, EXACT))
    host, store = alone._host, alone.store
    slot = host.arena.buffer(host._slots[(*key, EXACT)])
    shapes = {part.name: part.shape for part in store.layers[key[0]].parts}
    return {
        name: np.frombuffer(slot, np.uint16, int(np.prod(shapes[name])), at).copy()
        for name, at in store.placement(*key).parts.items()
    }


@pytest.mark.parametrize(
    ("family", "more", "why"),
    [
        ("gpt_oss", {"dtype": torch.bfloat16}, "not gated products without biases"),
        ("qwen3_moe", {"dtype": torch.float32}, "not stored in bf16"),
    ],
)
def test_what_our_kernels_do_not_know_is_refused(
    family: str, more: dict[str, Any], why: str, toy: Callable[..., Path]
) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        described_by_main(toy(family, **more))


@pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2")
def test_files_that_main_does_not_mean_are_refused(toy: Callable[..., Path]) -> None:
    folder = toy("qwen3_moe", **FITS, head_dim=64, moe_intermediate_size=64)
    description = described_by_main(folder).description
    keys = description.layers[0]
    for changed in (
        description._replace(layers=(keys._replace(up=("model.no.*",)),)),
        description._replace(layers=(keys._replace(experts=keys.experts + 1),)),
        description._replace(layers=(keys._replace(up=("model.norm.weight",)),)),
        description._replace(inner=2 * description.inner),
    ):
        with pytest.raises(CheckpointError):
            open_described(folder, changed, None, 1, 1)


def test_what_needs_torch_is_refused_before_anybody_is_asked(toy: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="`precision=int4`"):
        place_of(toy("qwen3_moe"), "int4")
    with pytest.raises(ConfigError, match="the model's folder of safetensors"):
        place_of("owner/name", "auto")


def test_it_is_found_out_once_and_why_not_is_kept() -> None:
    asked = []

    def refuse() -> LightWorker:
        asked.append(1)
        raise UnsupportedModelError("no kernels")

    describer = Describer(refuse)
    for _ in range(3):
        describer.begin()
    describer.close()
    assert (describer.found, describer.why, describer.parts, len(asked)) == (None, "no kernels", [], 1)
    known = Describer(lambda: LightWorker(SOME, "native", 9))
    known.begin()
    known.close()
    assert known.found is not None and described.parse_experts(sent(known.parts)).layers == SOME.layers


def test_an_interrupt_that_leaves_a_socket_open_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may come between the opening of a socket and the block that closes it."""
    left, ended = list[Any](), threading.Event()

    def interrupted(dealer: Any, me: Any) -> Any:
        left.append(dealer.get_monitor_socket())
        raise KeyboardInterrupt

    def ask() -> None:
        with suppress(KeyboardInterrupt):
            described.ask(cast("Any", None), {}, lambda: None)
        ended.set()

    monkeypatch.setattr(described, "watched", interrupted)
    threading.Thread(target=ask, daemon=True).start()
    assert ended.wait(10) and left


def test_it_ends_while_no_coordinator_answers(coordinator: Coordinator) -> None:
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt

    me = Worker("test", "small", coordinator.address, coordinator.keys.public, KeyPair.new())
    with pytest.raises(KeyboardInterrupt):
        described.ask(me, {}, check)
