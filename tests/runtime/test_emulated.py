"""A device beside the CPU, emulated: host tier, link, the CPU's own experts and the look-ahead, all at once, and exact.

The same code path as on a GPU above the link. Would catch: a host slot given away while it is computed from, a result
that arrives for the wrong expert, a look-ahead that spoils the KV cache, an error of another thread that nobody hears.
"""

from __future__ import annotations

import gc
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.compute.expert_math import ExpertMath
from smoe.errors import ConfigError, TransferError
from smoe.memory.emulation import Emulation
from smoe.memory.movers import Filler
from smoe.policy.load_or_compute import Costs
from smoe.policy.prediction import Sight
from smoe.policy.trial import Trial
from smoe.presets import configure
from smoe.routing import Phase
from tests import oracle, zoo
from tests.packs import pack_folder

Open = Callable[..., PreTrainedModel]
BENCH: dict[str, Any] = {"device": "emulated", "dilation": 1.0}


def favour_the_cpu(model: PreTrainedModel) -> None:
    """Costs as measured may favour the link on a busy machine."""
    if model.offload.executor._balancer is not None:
        model.offload.executor._balancer._fixed = Costs(load=2e-3, host=1e-3, token=1e-3)


@pytest.mark.parametrize("balance", ["none", "paper", "optimal", "host"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_every_division_of_work_is_exact(family: str, balance: str, toy: Callable[..., Path], open_model: Open) -> None:
    """The CPU acts the device too, so its experts have the same bits: grade E0."""
    folder = toy(family)
    model = open_model(folder, "fifth", **BENCH, balance=balance)
    favour_the_cpu(model)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    counters = model.offload.stats()
    model.offload.executor.table.check()
    decode_misses = counters.decode_uses - counters.decode_hits
    assert decode_misses > 0
    if balance == "none":
        assert counters.host_computed == 0
    elif balance == "host":
        assert counters.host_computed == decode_misses, "in decode nothing is loaded"
    else:
        assert counters.host_computed > 0


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_a_prompt_is_shared_out_and_exact(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    """The CPU computes a prompt's experts of few tokens, each at its place in the sum: grade E0."""
    folder = toy(family)
    model = open_model(folder, "fifth", **BENCH, balance="optimal")
    executor = model.offload.executor
    assert executor._balancer.shares_prompts
    balancer = executor._balancer
    balancer._fixed = Costs(load=1.0, host=1.0, token=0.1)  # whatever this machine's are
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    shared = model.offload.stats()
    assert 0 < shared.prefill_host_computed < shared.prefill_uses
    alone = open_model(folder, "fifth", **BENCH, balance="optimal", prefill_balance=False)
    oracle.greedy(alone)
    assert alone.offload.stats().prefill_host_computed == 0 < alone.offload.stats().host_computed
    without = open_model(folder, "fifth", **BENCH, balance="none")
    oracle.greedy(without)
    assert without.offload.stats().prefill_host_computed == 0


@pytest.mark.parametrize("order", ["score", "tokens"])
def test_a_batch_is_exact_to_rounding(order: str, toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen3_moe")
    model = open_model(folder, "half", **BENCH, preset="smoe-exact", balance_order=order, max_sequences=3)
    favour_the_cpu(model)
    ids = torch.cat([oracle.PROMPT, oracle.PROMPT.flip(1), oracle.PROMPT])
    ours = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    theirs = oracle.reference(folder).generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert torch.equal(ours, theirs)
    assert model.offload.stats().host_computed > 0


def test_substitution_beside_the_cpu(toy: Callable[..., Path], open_model: Open) -> None:
    """The whole preset at once; what is replaced is neither loaded nor computed by the CPU."""
    model = open_model(toy("qwen3_moe"), "fifth", **BENCH, preset="smoe", alpha=0.9)
    oracle.greedy(model)
    counters = model.offload.stats()
    assert counters.substituted > 0
    assert counters.host_computed + counters.loads > 0
    model.offload.executor.table.check()


def test_reproducible_at_fixed_costs(toy: Callable[..., Path], open_model: Open) -> None:
    """Measured costs would decide what becomes resident, and so what substitutes."""
    folder = toy("qwen3_moe")
    runs = [
        oracle.greedy(open_model(folder, "fifth", **BENCH, preset="smoe", alpha=0.9, reproducible=True))
        for _ in range(2)
    ]
    assert torch.equal(runs[0].tokens, runs[1].tokens)
    assert all(torch.equal(a, b) for a, b in zip(runs[0].logits, runs[1].logits, strict=True))


@pytest.mark.parametrize("at", [1, 5, 30])
def test_an_error_beside_the_device_loses_one_request(
    at: int, toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host tier is too small to hold anything for long, so every thread reads from disk all the time."""
    folder = toy("qwen2_moe")
    model = open_model(folder, "fifth", **BENCH, balance="host", host_memory_bytes=1)
    calls: list[int] = []
    original = Filler.fill

    def fill(self: Filler, *args: Any) -> int:
        calls.append(1)
        if len(calls) == at:
            raise TransferError(5, "injected: the disk is gone")
        return original(self, *args)

    with monkeypatch.context() as broken:
        broken.setattr(Filler, "fill", fill)
        with pytest.raises(TransferError, match="injected"):
            oracle.greedy(model)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    host = model.offload._transfers._mover._host
    assert not host._leased


@pytest.mark.parametrize(
    ("family", "prefetch_what"),
    [
        *((family, "top-score") for family in zoo.FAMILIES),
        # the same stations, asked for more: softmax, sigmoid and groups, without a residual
        *((family, "chosen") for family in ("mixtral", "deepseek_v3", "granitemoe")),
    ],
)
def test_looking_ahead_changes_no_bit(
    family: str, prefetch_what: str, toy: Callable[..., Path], open_model: Open
) -> None:
    folder = toy(family)
    model = open_model(folder, "half", prefetch="look-ahead", prefetch_what=prefetch_what)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    model.offload.executor.table.check()
    predictor = model.offload.executor.prefetching.predictors[Phase.DECODE]
    proven = {station.is_proven for station in predictor._stations.values()}
    assert proven == {family not in WITHOUT_RESIDUAL}
    assert model.offload.stats().prefetches > 0


WITHOUT_RESIDUAL = ["granitemoe"]
"""Families whose layer is more than residual plus block: they get the next gate instead."""


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "glm4_moe", "olmoe"])
def test_with_all_experts_the_look_ahead_is_the_truth(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    """Fed with the whole output of a layer's experts it must name what the next layer's router then chooses."""
    model = open_model(toy(family), "full", prefetch="look-ahead")
    executor = model.offload.executor
    predictor, said = executor.prefetching.predictors[Phase.DECODE], {}
    original = executor.compute.decode

    def decode(plan: Any, hidden: torch.Tensor, weights: torch.Tensor, *asked: Any) -> torch.Tensor:
        output = original(plan, hidden, weights, *asked)
        peeks = predictor.peeks
        predicted = predictor.predict(Sight(plan.layer, hidden, output.clone()))
        if predictor.peeks > peeks:  # else the next gate was asked, which only guesses
            said.update({named.layer: named.experts for named in predicted})
        truth.append((plan.layer, sorted(serve.key[1] for serve in plan.serves)))
        return output

    truth: list[tuple[int, list[int]]] = []
    executor.compute.decode = decode
    checked = 0
    cache = model.offload.new_cache()
    model(oracle.PROMPT, past_key_values=cache)
    for token in (5, 9, 23, 40):
        truth.clear()
        said.clear()
        model(torch.tensor([[token]]), past_key_values=cache)
        if token == 5:
            continue  # the first pass only proves the residuals
        for layer, experts in truth:
            if layer in said:
                assert sorted(said[layer]) == experts
                checked += 1
    assert checked >= 3


def test_listeners_are_not_disturbed(toy: Callable[..., Path], open_model: Open) -> None:
    """Whoever asks for router logits gets one tensor a layer, as from the library alone."""
    folder = toy("qwen3_moe")
    model = open_model(folder, "fifth", prefetch="look-ahead")
    oracle.greedy(model)  # the residuals are proven
    cache = model.offload.new_cache()
    model(oracle.PROMPT, past_key_values=cache)
    out = model(torch.tensor([[7]]), past_key_values=cache, output_router_logits=True)
    assert len(out.router_logits) == len(zoo.sparse_layers(model))


def test_a_cache_does_not_outlive_its_user(toy: Callable[..., Path], open_model: Open) -> None:
    """What the look-ahead keeps of a pass includes the KV cache."""
    model = open_model(toy("qwen3_moe"), "fifth", prefetch="look-ahead")
    oracle.greedy(model)
    gc.collect()
    assert [ref() for ref in model.offload._reserve.caches._made] == [None]


def test_a_look_ahead_that_is_switched_off_costs_nothing(toy: Callable[..., Path], open_model: Open) -> None:
    """Would catch a preset that pays for what its trial has declined."""
    model = open_model(toy("qwen3_moe"), "fifth", prefetch="look-ahead")
    prefetching = model.offload.executor.prefetching
    prefetching.trial = Trial()
    prefetching.trial.note = lambda *_: None
    prefetching.look_ahead_trial.fits = lambda *_: True  # by the clock it may be too slow, on a busy machine
    prefetching.trial.is_on = False
    oracle.greedy(model)
    assert model.offload.stats().look_aheads == 0
    prefetching.trial.is_on = True
    oracle.greedy(model)
    assert model.offload.stats().look_aheads > 0


def test_a_balance_without_a_second_unit_is_refused(toy: Callable[..., Path], open_model: Open) -> None:
    with pytest.raises(ConfigError, match="in addition to the CPU"):
        configure(device="cpu", balance="optimal")
    with pytest.raises(ConfigError, match="in addition to the CPU"):
        open_model(toy("mixtral"), "half", balance="host")
    open_model(toy("mixtral"), "half", preset="smoe")  # auto: none here


def test_the_dilation_is_found_by_measuring(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen3_moe")
    model = open_model(folder, "half", device="emulated")
    assert model.offload.pacing.dilation >= 1
    assert model.offload.stats().tokens == 0, "calibration is not the user's"
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


def test_it_is_found_beside_low_copies(toy: Callable[..., Path], open_model: Open, tmp_path: Path) -> None:
    """The proofs at load leave copies of both formats behind, and what is measured then may only evict its own."""
    folder = Path(shutil.copytree(toy("qwen2_moe"), tmp_path / "model"))
    pack_folder(folder, precision="int4")
    model = open_model(folder, "minimum", device="emulated", preset="hobbit", low_threshold=0.5, skip_threshold=1.0)
    oracle.greedy(model)
    model.offload.executor.table.check()
    assert model.offload.stats().low_served > 0


def test_the_cpus_experts_are_calibrated_as_they_are_computed(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not guessed from the device's: the CPU computes on one thread, and without our kernel."""
    heard: dict[str, float] = {}
    choose, forward = Emulation.choose_dilation, ExpertMath.forward

    def slow_on_the_cpu(math: ExpertMath, x: torch.Tensor, weights: Any) -> torch.Tensor:
        if "host-experts" in threading.current_thread().name:
            time.sleep(0.05)
        return forward(math, x, weights)

    def listen(emulation: Emulation, **times: float) -> None:
        heard.update(times)
        choose(emulation, **times)

    monkeypatch.setattr(Emulation, "choose_dilation", listen)
    monkeypatch.setattr(ExpertMath, "forward", slow_on_the_cpu)
    folder = toy("qwen3_moe")
    for balance, is_slow in (("optimal", True), ("none", False)):
        open_model(folder, "half", device="emulated", balance=balance)
        assert (heard["host"] > 0.05) is is_slow


def test_a_placement_forms_while_all_is_loaded_and_then_stays(toy: Callable[..., Path], open_model: Open) -> None:
    """Fiddler's split: would catch experts that are still loaded after the profile, or never were."""
    model = open_model(toy("qwen2_moe"), "half", **BENCH, balance="host", eviction="lfu")
    engine = model.offload
    with engine.loading_all():
        oracle.greedy(model)
    placed, counted = set(engine.executor.table.cached()), engine.stats()
    assert counted.host_computed == 0 and len(placed) == engine.ledger.cache_slots
    with torch.no_grad():
        for token in range(5, 25):
            model(torch.tensor([[token]]))
    assert set(engine.executor.table.cached()) == placed
    assert engine.stats().host_computed > 0
