"""HOBBIT's evaluation (section 5): Mixtral 8x7B and Phi-MoE with an RTX 4090 and on a Jetson Orin, on the virtual
clock.

The 4090 keeps what fits in addition to everything else in its 24 GB and has the rest in RAM, in 16 bits, low copies in
int4; the Orin reads from its disk, in int8, low copies in int2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.papers.cells import Cells
from bench.papers.claims import Cell, Claim, Reproduction, Setting, span
from bench.papers.geometry import MIXTRAL, PHI_MOE, Geometry, step_times
from smoe.expert import LOW
from smoe.machine.processor import usable_cores
from smoe.memory.emulation import read_profile
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.importance import Thresholds, least_unimportance
from smoe.policy.prediction import Grading
from smoe.policy.registry import make_eviction_for
from smoe.policy.residency import PoolSize
from smoe.policy.step import EXACT_SWITCHES, Switches
from smoe.routing import Phase, Routing
from smoe.simulator.foresight import Foresight
from smoe.simulator.mixed_cache import MixedCache, miss_penalty, multidimensional, named
from smoe.simulator.sweep import sweep
from smoe.simulator.synthetic import SAYS, DrawnShape, synthesise
from smoe.simulator.virtual_clock import replay_on_clock

PROMPT_TOKENS, NEW_TOKENS = 16, 128
"""One of the paper's four lengths; figure 16 is a mean over all."""
SHARES = (0.67, 0.30)
"""Of all choices, those that ask for their own copy and for a low one (section 3.2)."""
LOW_BYTES_SHARE = 0.15
STAGING_SLOTS = 4
RECALL = {1: 0.88, 2: 0.80, 3: 0.75, 4: 0.70}
"""By how many layers ahead: near figure 7b, which counts first experts alone (0.96, 0.90, 0.90)."""
EQUAL = (0.25, 0.25, 0.25, 0.25)


MODELS = (MIXTRAL, PHI_MOE)


class Machine(NamedTuple):
    """A column of table 2."""

    name: str
    profile: str
    bits: float
    """Of the experts' own copies."""
    low_bits: float
    """Of low ones, scales included."""
    dense_bits: float
    room_bytes: float
    """For the whole model."""


MACHINES = (
    Machine("rtx-4090", "rtx-4090", 16, 4.5, 16, 22.5e9),
    Machine("jetson-agx-orin", "jetson-agx-orin", 8.5, 2.5, 8, 27e9),
)
PAPER = {
    "dynamic loading": (1.19, 1.57),
    "moe-offloading, Mixtral 8x7B": (3.21, 3.21),
    "moe-offloading, Phi-MoE": (3.29, 3.29),
    "static, Mixtral 8x7B": (1.31, 1.31),
    "static, Phi-MoE": (1.42, 1.42),
    "prefetch, own copies alone": (1.0, 1.01),
    "prefetch, low copies too": (1.05, 1.05),
    "LRU": (1.0469, 1.0868),
    "LFU": (1.0213, 1.0419),
}
"""How many times better; of the cache's penalties, what the other's is of HOBBIT's."""


class _Run(NamedTuple):
    """One system's switches."""

    dynamic: bool
    eviction: str = "multidimensional"
    depth: int = 1
    """Layers ahead that are prefetched; 0: nothing is."""
    by_cpu: bool = False


RUNS = {
    "hobbit": _Run(True),
    "hobbit, own copies alone": _Run(False),
    "moe-offloading": _Run(False, "lru"),
    "static": _Run(False, "lru", 0, True),
    "hobbit beside the CPU": _Run(True, depth=0, by_cpu=True),
    "hobbit, no prefetch": _Run(True, depth=0),
    "hobbit, own copies, no prefetch": _Run(False, depth=0),
    "hobbit, two layers ahead": _Run(True, depth=2),
    "hobbit, three layers ahead": _Run(True, depth=3),
    "hobbit, four layers ahead": _Run(True, depth=4),
}


SETTINGS = [(model, machine) for model in MODELS for machine in MACHINES]


def reproduce(tick: Callable[[int], None], cells: Cells | None = None) -> Reproduction:
    """Simulate all settings but those that `cells` has; `tick` hears of every one that is done."""
    done = sweep(_systems, SETTINGS, tick, usable_cores(), keeping=cells)
    settings = [setting for cell in done for setting in cell.settings]
    return Reproduction("hobbit", tuple(settings), tuple(_claims(settings, [cell.figures for cell in done])), _REMARKS)


def _systems(setting: tuple[Geometry, Machine]) -> Cell:
    """All systems in one setting, and what the evictions' misses cost there."""
    model, machine = setting
    trace = synthesise(
        DrawnShape(model.experts, model.top_k, model.layers, NEW_TOKENS, PROMPT_TOKENS), with_scores=True
    )
    switches = switches_of(trace)
    runs = {name: run for name, run in RUNS.items() if not (run.by_cpu and machine.name == "jetson-agx-orin")}
    systems = [_simulated(model, machine, name, run, trace, switches) for name, run in runs.items()]
    return Cell(systems, _penalties(model, machine, trace, switches))


def switches_of(trace: Sequence[Routing]) -> Switches:
    """With the thresholds by which `SHARES` of a trace's choices ask for their own copy and for a low one."""
    decode = (routing for routing in trace if routing.phase is Phase.DECODE)
    values = sorted(value for routing in decode for value in least_unimportance(routing).values())
    low, skip = (values[int(share * (len(values) - 1))] for share in (SHARES[0], sum(SHARES)))
    return EXACT_SWITCHES._replace(thresholds=Thresholds(low, skip))


def _slots(model: Geometry, machine: Machine, dynamic: bool) -> tuple[int, int]:
    """(for own copies, for low ones) in what the rest of the model leaves."""
    own, low = model.expert_bytes(machine.bits), model.expert_bytes(machine.low_bits)
    room = machine.room_bytes - model.dense_bytes(machine.dense_bits) - STAGING_SLOTS * own
    for_low = LOW_BYTES_SHARE * room if dynamic else 0.0
    whole = model.layers * model.experts
    return min(whole, int((room - for_low) / own)), min(whole, int(for_low / low))


def _simulated(
    model: Geometry, machine: Machine, name: str, run: _Run, trace: Sequence[Routing], switches: Switches
) -> Setting:
    slots, low_slots = _slots(model, machine, run.dynamic)
    sizes = [PoolSize(slots, STAGING_SLOTS)] + ([PoolSize(low_slots, STAGING_SLOTS, form=LOW)] if run.dynamic else [])
    wanted = EvictionSettings(run.eviction, cache_weights=EQUAL if run.eviction == "multidimensional" else None)
    eviction = make_eviction_for(wanted, sizes, dict.fromkeys(range(model.layers), model.experts))
    predictor = Foresight(trace, RECALL[run.depth], depth=run.depth) if run.depth else None
    if predictor is not None and run.dynamic:
        predictor.grade_by(Grading(thresholds=switches.thresholds))
    timed = replay_on_clock(
        trace,
        slots,
        STAGING_SLOTS,
        eviction,
        step_times(
            model, read_profile(machine.profile), machine.bits, model.dense_bytes(machine.dense_bits), machine.low_bits
        ),
        switches if run.dynamic else EXACT_SWITCHES,
        ("host" if name == "static" else "optimal") if run.by_cpu else None,
        predictor,
        low_slots if run.dynamic else 0,
    )
    own, low = model.expert_bytes(machine.bits), model.expert_bytes(machine.low_bits)
    nbytes = model.dense_bytes(machine.dense_bits) + (slots + STAGING_SLOTS) * own + low_slots * low
    where = f"{model.name}, {machine.name}"
    return Setting(where, name, timed.prefill_seconds, timed.seconds_per_step, NEW_TOKENS, nbytes)


def _penalties(model: Geometry, machine: Machine, trace: Sequence[Routing], switches: Switches) -> dict[str, float]:
    """Of every eviction: misses in loads of own copies."""
    slots, low_slots = _slots(model, machine, dynamic=True)
    cache = MixedCache(slots, low_slots, machine.low_bits / machine.bits, switches)
    makers = {"LRU": named("lru"), "LFU": named("lfu"), "hobbit": multidimensional(EQUAL)}
    return {name: miss_penalty([trace], cache, make) for name, make in makers.items()}


def _claims(settings: Sequence[Setting], penalties: Sequence[dict[str, float]]) -> list[Claim]:
    by_name: dict[str, dict[str, float]] = {}
    for setting in settings:
        by_name.setdefault(setting.name, {})[setting.system] = setting.seconds_per_token
    rows = list(by_name.items())

    def gain(other: str, system: str, where: str = "") -> tuple[float, float]:
        return span([row[other] / row[system] for name, row in rows if where in name and other in row])

    found = [
        Claim("figure 16", "dynamic loading, own copies alone over it", PAPER["dynamic loading"],
              gain("hobbit, own copies alone", "hobbit"))
    ]  # fmt: skip
    for model in MODELS:
        on_4090 = f"{model.name}, rtx-4090"
        found.append(
            Claim("figure 14", f"moe-offloading over hobbit, {on_4090}", PAPER[f"moe-offloading, {model.name}"],
                  gain("moe-offloading", "hobbit", on_4090),
                  "the other system is its policy in our engine, not its own program")
        )  # fmt: skip
        found.append(
            Claim("figure 15", f"llama.cpp's split over hobbit beside the CPU, {on_4090}",
                  PAPER[f"static, {model.name}"], gain("static", "hobbit beside the CPU", on_4090))
        )  # fmt: skip
    for what, without, with_it in (
        ("own copies alone", "hobbit, own copies, no prefetch", "hobbit, own copies alone"),
        ("low copies too", "hobbit, no prefetch", "hobbit"),
    ):
        found.append(
            Claim("figure 17", f"no prefetch over one layer ahead, {what}, rtx-4090", PAPER[f"prefetch, {what}"],
                  gain(without, with_it, "rtx-4090"))
        )  # fmt: skip
    for other in ("LRU", "LFU"):
        ours = span([each[other] / each["hobbit"] for each in penalties])
        found.append(Claim("figure 18", f"miss penalty, {other} over the multidimensional cache", PAPER[other], ours,
                           "equal weights, none fitted"))  # fmt: skip
    return found


_REMARKS = (
    SAYS,
    f"prompts of {PROMPT_TOKENS} tokens and answers of {NEW_TOKENS}, one of the paper's four lengths; thresholds by "
    "the shares 67/30/3",
    "accuracy (table 3) cannot be simulated: docs/papers/hobbit.md has it of the embedded model",
)
