"""SMoE's evaluation (second version, section VI): three fine-grained models, each with one GPU, on the virtual clock.

Its four mechanisms are put in one after the other, as in figure 14:

    static | + CE (eviction by mean score) | + CR (substitution) | + Pre (prefetch) | + BA (the CPU's share)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.papers.cells import Cells
from bench.papers.claims import Cell, Claim, Reproduction, Setting, span
from bench.papers.geometry import DEEPSEEK_16B, QWEN2_57B, XVERSE, Geometry, step_times
from smoe.machine.processor import usable_cores
from smoe.memory.emulation import read_profile
from smoe.policy.prediction import Grading, Moment
from smoe.policy.registry import make_eviction
from smoe.policy.step import EXACT_SWITCHES
from smoe.routing import Phase, Routing, last_rows
from smoe.simulator.foresight import Foresight
from smoe.simulator.sweep import sweep
from smoe.simulator.synthetic import SAYS, DrawnShape, synthesise
from smoe.simulator.virtual_clock import replay_on_clock

PROMPT_TOKENS, NEW_TOKENS = 64, 64
ALPHA = 0.3
RECALL = 0.82
"""Of the prefetch (section VI-C)."""
STAGING_SLOTS = 8
BITS = 16
_RESERVED_BYTES = 2e9
"""Of a GPU's memory, for the KV cache, activations and the driver."""


class TestbedMachine(NamedTuple):
    """A row of table III."""

    model: Geometry
    profile: str
    memory_bytes: float

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.profile}"

    @property
    def slots(self) -> int:
        """Experts that fit in addition to the rest of the model."""
        room = self.memory_bytes - _RESERVED_BYTES - self.model.dense_bytes(BITS)
        return int(room / self.model.expert_bytes(BITS)) - STAGING_SLOTS


MACHINES = (
    TestbedMachine(DEEPSEEK_16B, "rtx-3080-ti", 12e9),
    TestbedMachine(XVERSE, "rtx-4060-ti", 24e9),
    TestbedMachine(QWEN2_57B, "rtx-a6000", 48e9),
)


class _SystemRun(NamedTuple):
    """One system's switches."""

    eviction: str
    prefetches: bool = False
    balance: str | None = None
    alpha: float = 0.0


BASELINES = {
    "static (llama.cpp)": _SystemRun("lru", balance="host"),
    "LRU and next gate": _SystemRun("lru", True),
    "HybriMoE": _SystemRun("score", True, "optimal"),
}
STEPS = {
    "+ CE": _SystemRun("score"),
    "+ CR": _SystemRun("score", alpha=ALPHA),
    "+ Pre": _SystemRun("score", True, alpha=ALPHA),
    "+ BA (smoe)": _SystemRun("score", True, "optimal", ALPHA),
}
SMOE = "+ BA (smoe)"
BATCHES = (1, 3)


class _Done(NamedTuple):
    """One system in one setting."""

    setting: Setting
    cache_ratio: float
    """Share of the experts used that the device's memory held: neither loaded nor computed by the CPU."""


SETTINGS = [(machine, batch) for machine in MACHINES for batch in BATCHES]


def reproduce(tick: Callable[[int], None], cells: Cells | None = None) -> Reproduction:
    """Simulate all settings but those that `cells` has; `tick` hears of every one that is done."""
    done: dict[int, dict[str, dict[str, _Done]]] = {batch: {} for batch in BATCHES}
    for (machine, batch), cell in zip(
        SETTINGS, sweep(_systems, SETTINGS, tick, usable_cores(), keeping=cells), strict=True
    ):
        done[batch][machine.name] = {each.system: _Done(each, cell.figures[each.system]) for each in cell.settings}
    settings = [each.setting for of in done.values() for rows in of.values() for each in rows.values()]
    return Reproduction("smoe", tuple(settings), tuple(_claims(done)), _REMARKS)


def _systems(setting: tuple[TestbedMachine, int]) -> Cell:
    """All of them in one setting, and their cache ratios."""
    machine, batch = setting
    trace = _trace(machine.model, batch)
    where = f"{machine.name}, batch {batch}"
    done = [_simulated(machine, where, name, run, trace) for name, run in (BASELINES | STEPS).items()]
    return Cell([each.setting for each in done], {each.setting.system: each.cache_ratio for each in done})


def _trace(model: Geometry, batch: int) -> list[Routing]:
    """Sequences of their own, side by side."""
    shape = DrawnShape(model.experts, model.top_k, model.layers, NEW_TOKENS, PROMPT_TOKENS)
    traces = [synthesise(shape, seed=seed, with_scores=True) for seed in range(batch)]
    return [_merged(routings) for routings in zip(*traces, strict=True)]


def _merged(routings: Sequence[Routing]) -> Routing:
    """One step of several sequences."""
    joined = routings[0]._replace(
        top_k_index=[row for routing in routings for row in routing.top_k_index],
        scores=None,
        weights=[row for routing in routings for row in routing.weights or ()],
        sequences=len(routings),
    )
    scores = [dict(zip(_scored(routing), routing.scores or (), strict=True)) for routing in routings]
    length = len(routings[0].top_k_index)
    return joined._replace(scores=[scores[row // length][row % length] for row in _scored(joined)])


def _scored(routing: Routing) -> Sequence[int]:
    """The rows whose scores policies hear of."""
    return last_rows(routing) if routing.phase is Phase.PREFILL else range(len(routing.top_k_index))


def _simulated(machine: TestbedMachine, where: str, name: str, run: _SystemRun, trace: Sequence[Routing]) -> _Done:
    model, profile = machine.model, read_profile(machine.profile)
    asked = Moment.RESIDENTS_DONE if run.alpha else Moment.ROUTED
    predictor = Foresight(trace, RECALL, asked) if run.prefetches else None
    if predictor is not None:
        predictor.grade_by(Grading(run.alpha))
    timed = replay_on_clock(
        trace,
        machine.slots,
        STAGING_SLOTS,
        make_eviction(run.eviction),
        step_times(model, profile, BITS, model.dense_bytes(BITS)),
        EXACT_SWITCHES._replace(alpha=run.alpha),
        run.balance,
        predictor,
    )
    nbytes = model.dense_bytes(BITS) + (machine.slots + STAGING_SLOTS) * model.expert_bytes(BITS)
    elsewhere = timed.loads + timed.computed_by_host
    setting = Setting(where, name, timed.prefill_seconds, timed.seconds_per_step, NEW_TOKENS, nbytes)
    return _Done(setting, 1.0 - elsewhere / timed.uses)


def _claims(done: dict[int, dict[str, dict[str, _Done]]]) -> list[Claim]:
    found = []
    for batch, paper in zip(BATCHES, (0.24, 0.35), strict=True):
        gains = [
            _best(rows, lambda each: each.setting.seconds_per_token) / _time(rows, SMOE) for rows in _of(done, batch)
        ]
        what = f"time per token, the best baseline over smoe, batch {batch}"
        found.append(Claim("figure 11", what, (1 / (1 - paper),) * 2, span(gains), _BASELINES))
    one = _of(done, 1)
    ratios = [rows[SMOE].cache_ratio / max(rows[name].cache_ratio for name in BASELINES) for rows in one]
    found.append(Claim("figure 12", "cache ratio, smoe over the best baseline", (1.65, 1.65), span(ratios)))
    firsts = [_best(rows, lambda each: each.setting.ttft_seconds) / rows[SMOE].setting.ttft_seconds for rows in one]
    found.append(Claim("figure 13", "first token, the best baseline over smoe", (1 / 0.89,) * 2, span(firsts)))
    before = "static (llama.cpp)"
    for (name, _), paper in zip(STEPS.items(), (0.08, 0.20, 0.14, 0.34), strict=True):
        gains = [_time(rows, before) / _time(rows, name) for rows in one]
        found.append(Claim("figure 14", f"time per token, {before} over {name}", (1 / (1 - paper),) * 2, span(gains)))
        before = name
    cache_ratios = [rows["+ CR"].cache_ratio / rows["+ CE"].cache_ratio for rows in one]
    found.append(Claim("figure 14", "cache ratio, + CR over + CE", (1.6, 1.6), span(cache_ratios)))
    ahead = [rows["+ Pre"].cache_ratio / rows["+ CR"].cache_ratio for rows in one]
    found.append(Claim("figure 14", "cache ratio, + Pre over + CR", (1.12, 1.12), span(ahead)))
    return found


def _of(done: dict[int, dict[str, dict[str, _Done]]], batch: int) -> list[dict[str, _Done]]:
    return list(done[batch].values())


def _best(rows: dict[str, _Done], of: Callable[[_Done], float]) -> float:
    return min(of(rows[name]) for name in BASELINES)


def _time(rows: dict[str, _Done], name: str) -> float:
    return rows[name].setting.seconds_per_token


_BASELINES = "their policies in our engine, not their programs"
_REMARKS = (
    SAYS,
    f"prompts of {PROMPT_TOKENS} tokens and answers of {NEW_TOKENS}, alpha {ALPHA:g}; what substitution would change "
    "in later routing is not seen, nor is accuracy",
    "16-bit experts; memory as in table III less 2 GB",
)
