"""Experts whose low copies serve where they matter little, beside plain loops over their numbers.

Would catch: low copies that change a bit where nobody may ask for them, a copy of the wrong format in a route, experts
that are left out or come low although they are a token's first, tables that an error has left in disagreement.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import TransferError
from smoe.expert import LOW
from smoe.memory.reading_threads import Ticket
from smoe.models.packed import read_packed
from smoe.models.reference import reference_parameters
from smoe.policy.plan import LoadReason
from tests import oracle
from tests.models.test_gguf_quantised import assert_near
from tests.packs import contents_of, pack_folder

Open = Callable[..., PreTrainedModel]
FAMILIES = ["qwen2_moe", "mixtral", "gpt_oss", "deepseek_v3"]


@pytest.fixture(scope="module")
def packed(toy: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`packed(family, *precisions)`: a toy in 32 bits with these copies beside it."""
    made: dict[tuple[str, ...], Path] = {}

    def folder(family: str, *precisions: str) -> Path:
        if (family, *precisions) not in made:
            place = Path(shutil.copytree(toy(family), tmp_path_factory.mktemp("packed") / family))
            for precision in precisions:
                pack_folder(place, precision=precision)
            made[(family, *precisions)] = place
        return made[(family, *precisions)]

    return folder


@pytest.mark.parametrize("budget", ["half", "minimum"])
@pytest.mark.parametrize("family", FAMILIES)
def test_at_thresholds_of_1_no_bit_differs(
    family: str, budget: str, packed: Callable[..., Path], open_model: Open
) -> None:
    """From the unmodified model's; a multidimensional cache and a prefetch beside."""
    folder = packed(family, "int4")
    model = open_model(folder, budget, preset="hobbit", low_threshold=1.0, skip_threshold=1.0, upgrade=True)
    assert model.offload.executor.table.has_low
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    counted = model.offload.stats()
    assert counted.low_served == counted.low_loads == counted.skipped == counted.upgrades == 0 < counted.loads
    assert all(key[2] != LOW for key in model.offload.executor.table.ready)


@pytest.mark.parametrize("switches", [{"precision": "int8"}, {"max_sequences": 3}, {"prefill_tokens": 7}], ids=str)
def test_nor_from_the_engine_without_them(
    switches: dict[str, Any], packed: Callable[..., Path], open_model: Open
) -> None:
    """Of a quantised model, in a batch, and with a prompt in chunks."""
    folder = packed("qwen2_moe", "int8", "int2")
    prompts = oracle.PROMPT.reshape(3, -1) if "max_sequences" in switches else oracle.PROMPT
    alone, beside = (
        oracle.greedy(open_model(folder, "half", **switches, **low), prompts, 8)
        for low in ({}, {"low_precision": "int2", "low_share": 0.4})
    )
    oracle.assert_same_steps(beside, alone)


@torch.no_grad()
def serving_low(folder: Path, precision: str | None) -> PreTrainedModel:
    """The library's model, which serves every expert that is no row's first by its low copy; None: by nothing."""
    theirs = oracle.reference(folder)
    contents = contents_of(folder, precision=precision or "int4")
    stored = read_packed(folder, contents)
    assert stored is not None
    for site in contents.sites:
        experts = theirs.get_submodule(site.name)
        own = {name: value.clone() for name, value in experts.named_parameters()}
        lower = reference_parameters(stored.layers[site.layer], list(range(site.experts)), theirs.dtype)
        if precision is None:
            lower = {name: torch.zeros_like(value) for name, value in lower.items()}
        assert own.keys() == lower.keys()

        def forward(
            hidden: torch.Tensor,
            index: torch.Tensor,
            weights: torch.Tensor,
            module: Any = experts,
            library: Any = experts.forward,
            copies: Any = (own, lower),
        ) -> torch.Tensor:
            first = set(index.gather(1, weights.argmax(1, keepdim=True)).flatten().tolist())
            for name, value in module.named_parameters():
                for expert in range(len(value)):
                    value.data[expert] = copies[0 if expert in first else 1][name][expert]
            result: torch.Tensor = library(hidden, index, weights)
            return result

        experts.forward = forward
    return theirs


@torch.no_grad()
def steps_of(
    model: PreTrainedModel, ids: torch.Tensor, before: Callable[[], None] = lambda: None
) -> list[torch.Tensor]:
    """Logits of a prompt and of the decode steps after it; `before` each, what is to be done."""
    before()
    found = [model(ids[:, :6], use_cache=True)]
    for n in range(6, ids.shape[1]):
        before()
        found.append(model(ids[:, n : n + 1], past_key_values=found[-1].past_key_values, use_cache=True))
    return [each.logits for each in found]


@pytest.mark.parametrize("precision", ["int4", "int3", "int2", None])
@pytest.mark.parametrize(("family", "sequences"), [*((family, 1) for family in FAMILIES), ("qwen2_moe", 3)])
def test_at_thresholds_of_0_only_first_experts_serve_themselves(
    family: str, sequences: int, precision: str | None, packed: Callable[..., Path], open_model: Open
) -> None:
    """From empty slots at every step; with a skip threshold of 0 the others are left out. In a batch and a prompt an
    expert serves itself where it is any row's first."""
    folder = packed(family, "int4", "int3", "int2")
    model = open_model(
        folder,
        "half",
        low_precision=precision or "int4",
        low_threshold=0.0,
        skip_threshold=0.0 if precision is None else 1.0,
        max_sequences=sequences,
    )
    executor = model.offload.executor
    executor.predict_by({})  # nothing is here before it is asked for
    ids = oracle.PROMPT.reshape(sequences, -1) if sequences > 1 else oracle.PROMPT[:, :12]
    ours = steps_of(model, ids, lambda: executor.reset(model.offload.fresh_eviction()))
    counted = executor.counters
    assert (counted.skipped > 0) is (precision is None) and (counted.low_served > 0) is (precision is not None)
    assert_near(ours, steps_of(serving_low(folder, precision), ids), 1e-4)


@pytest.mark.parametrize("at", [1, 5, 30])
def test_a_low_copy_that_cannot_be_read_loses_one_request(
    at: int, packed: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a prompt (the first reads) and in decode, with upgrades under way."""
    model = open_model(
        packed("qwen2_moe", "int4"), "fifth", preset="hobbit", low_threshold=0.3, low_meanwhile=True, upgrade=True
    )
    engine = model.offload
    executor, number = engine.executor, itertools.count(1)
    expected = oracle.greedy(model, new_tokens=2).prefill.shape
    executor.reset(engine.fresh_eviction())
    mover = engine._transfers._mover
    move = mover.move

    def failing(ticket: Ticket, between: Any) -> int:
        is_asked_for = (
            ticket.load.key[2] == LOW and ticket.load.reason is LoadReason.DEMAND
        )  # a prefetch is tried again
        if is_asked_for and next(number) == at:
            raise TransferError(5, "injected")
        came: int = move(ticket, between)
        return came

    with monkeypatch.context() as broken:
        broken.setattr(mover, "move", failing)
        with pytest.raises(TransferError, match="injected"):
            oracle.greedy(model)
    for _ in range(2):
        executor.table.check()
        assert executor.table.inflight.keys() == executor.arrivals.tickets.keys()
        assert set(executor.table.cached()) == executor.arrivals.eviction.residents()
        assert oracle.greedy(model, new_tokens=2).prefill.shape == expected
