"""DuoServe-MoE's evaluation (section 6): two Mixtrals in four bits with an A5000 and an A6000, on the virtual clock.

Four systems, none with an expert cache:

    accelerate      experts when the router has spoken; in a prompt one after the other, the next is not read meanwhile
    moesys          all experts of the next layer ahead; a layer begins when all of its own are there
    duoserve        two slots: in a prompt the next expert is read meanwhile, in decode those that a predictor names
    ours on demand  our `--preset accelerate`: as accelerate, but a prompt streams through the staging slots
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from bench.papers.cells import Cells
from bench.papers.claims import Cell, Claim, Reproduction, Setting, span
from bench.papers.geometry import MIXTRAL, MIXTRAL_22B, Geometry, step_times
from smoe.machine.processor import usable_cores
from smoe.memory.emulation import DeviceProfile, read_profile
from smoe.policy.prediction import Moment, Prediction, Predictor, Sight
from smoe.policy.registry import make_eviction
from smoe.simulator.foresight import Foresight
from smoe.simulator.sweep import sweep
from smoe.simulator.synthetic import SAYS, DrawnShape, synthesise
from smoe.simulator.virtual_clock import VirtualClock

PROMPT_TOKENS, NEW_TOKENS = 180, 64
"""Of a question of SQuAD or Orca-Math and its answer; the paper does not give them."""
TOP_2 = {"Orca": (0.6685, 0.9545), "SQuAD": (0.6023, 0.9231)}
"""Table 3, Mixtral 8x7B: both experts right, at least one."""
_AWQ_BITS = 4.25
"""Of a weight in four bits, with a scale for 128 of them."""
MODELS = (MIXTRAL, MIXTRAL_22B)
DENSE_BYTES = {MIXTRAL: 2.15e9, MIXTRAL_22B: 4.6e9}
"""Everything except the experts; of 8x7B as the paper says, of 8x22B by its layers' sizes."""
EXPERTS, TOP_K = MIXTRAL.experts, MIXTRAL.top_k
DEVICES = ("rtx-a5000", "rtx-a6000")
PACES = AS_PROFILED, AS_IMPLIED = "as profiled", "as slow as implied"
"""How fast the device works: by its profile; or so slowly that loads and work can hide as much of each other as the
paper says they do."""
_ORCA_GAIN, _SQUAD_GAIN = 1.52, 1.47
"""Section 6.2."""
MEMORY = {"Mixtral 8x7B": (4.24, 3.63, 3.91), "Mixtral 8x22B": (9.13, 8.06, 8.44)}
"""Table 2, GB: moesys, accelerate, duoserve."""


class _AllOfNext(Predictor):
    """Every expert of the next layer."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def predict(self, sight: Sight) -> Sequence[Prediction]:
        after = sight.layer + 1
        return (Prediction(after, range(EXPERTS)),) if after < self._layers else ()


class _Case(NamedTuple):
    """What is simulated with every system."""

    pace: str
    model: Geometry
    device: str
    text: str


SETTINGS = [
    _Case(pace, model, device, text) for pace in PACES for model in MODELS for device in DEVICES for text in TOP_2
]


def reproduce(tick: Callable[[int], None], cells: Cells | None = None) -> Reproduction:
    """Simulate all settings but those that `cells` has; `tick` hears of every one that is done."""
    by_pace: dict[str, list[Setting]] = {pace: [] for pace in PACES}
    for case, cell in zip(SETTINGS, sweep(_in_case, SETTINGS, tick, usable_cores(), keeping=cells), strict=True):
        by_pace[case.pace] += cell.settings
    claims = [claim for pace, settings in by_pace.items() for claim in _claims(settings, pace)]
    claims.append(_memory(by_pace[AS_PROFILED]))
    every = [setting for settings in by_pace.values() for setting in settings]
    return Reproduction("duoserve", tuple(every), tuple(claims), (*_REMARKS, _bound()))


def _in_case(case: _Case) -> Cell:
    profile = read_profile(case.device)
    if case.pace == AS_IMPLIED:
        profile = replace(profile, device_layer_seconds=implied_layer_seconds(case.model, profile))
    both, one = TOP_2[case.text]
    right = (both + one) / 2  # an expert is named with this probability: both or one of two
    return Cell(_systems(case.model, profile, f"{case.model.name}, {case.device}, {case.text}, {case.pace}", right), {})


def implied_layer_seconds(model: Geometry, profile: DeviceProfile) -> float:
    """How long the non-expert layers must take for perfect prefetching to gain what the paper's gains on SQuAD,
    where loads are the longer part."""
    return (_SQUAD_GAIN - 1.0) * TOP_K * profile.link_seconds(model.expert_bytes(_AWQ_BITS))


def _systems(model: Geometry, profile: DeviceProfile, name: str, recall: float) -> list[Setting]:
    trace = synthesise(DrawnShape(EXPERTS, TOP_K, model.layers, NEW_TOKENS, PROMPT_TOKENS))
    nbytes, times = model.expert_bytes(_AWQ_BITS), step_times(model, profile, _AWQ_BITS, DENSE_BYTES[model])
    made: dict[str, tuple[int, Predictor | None]] = {
        "accelerate": (1, None),
        "moesys": (EXPERTS + 1, _AllOfNext(model.layers)),
        "duoserve": (TOP_K + 1, Foresight(trace, recall, Moment.FIRST_DONE)),
        "ours on demand": (2, None),
    }
    found = []
    for system, (staging, predictor) in made.items():
        whole, lru = system == "moesys", make_eviction("lru")
        clock = VirtualClock(TOP_K, staging, model.layers, lru, times, predictor=predictor, waits_for_all=whole)
        for routing in trace:
            clock.serve(routing)
        result = clock.result
        slots = TOP_K + staging
        found.append(
            Setting(
                name,
                system,
                result.prefill_seconds,
                result.seconds_per_step,
                NEW_TOKENS,
                DENSE_BYTES[model] + slots * nbytes,
            )
        )
    return found


def _claims(settings: Sequence[Setting], pace: str) -> list[Claim]:
    by_name: dict[str, dict[str, Setting]] = {}
    for setting in settings:
        by_name.setdefault(setting.name, {})[setting.system] = setting

    def ratios(of: Callable[[Setting], float], baselines: Sequence[str], texts: str = "") -> tuple[float, float]:
        """Return the least and the largest ratio, over settings whose name contains `texts`."""
        rows = [row for name, row in by_name.items() if texts in name]
        return span([of(row[baseline]) / of(row["duoserve"]) for row in rows for baseline in baselines])

    both, end_to_end = ("accelerate", "moesys"), attrgetter("end_to_end_seconds")
    orca = ratios(end_to_end, ["accelerate"], "Orca")
    squad = ratios(end_to_end, ["accelerate"], "SQuAD")
    return [
        Claim(
            "figure 5",
            "first token, both baselines over duoserve",
            (1.78, 3.8),
            ratios(attrgetter("ttft_seconds"), both),
            "in the first token the paper's moesys is slower, too; here it reads each layer once, as duoserve does",
            pace,
        ),
        Claim(
            "figure 5",
            "end to end, both baselines over duoserve",
            (1.42, 7.54),
            ratios(end_to_end, both),
            case=pace,
        ),
        Claim("section 6.2", "end to end, Orca, accelerate over duoserve", (_ORCA_GAIN,) * 2, orca, case=pace),
        Claim("section 6.2", "end to end, SQuAD, accelerate over duoserve", (_SQUAD_GAIN,) * 2, squad, case=pace),
        Claim(
            "figure 6",
            "tokens a second, duoserve over both baselines",
            (1.78, 7.04),
            ratios(attrgetter("seconds_per_token"), both),
            case=pace,
        ),
    ]


_REMARKS = (
    SAYS,
    f"prompts of {PROMPT_TOKENS} tokens and answers of {NEW_TOKENS}: the paper does not give them",
    "duoserve's predictor is right as often as table 3 says; it runs while the experts are computed, and takes no time",
)


def _memory(settings: Sequence[Setting]) -> Claim:
    of = {(setting.name, setting.system): setting.memory_bytes for setting in settings}
    ours = [of[name, "moesys"] / of[name, "duoserve"] for name in dict.fromkeys(name for name, _ in of)]
    paper = [moesys / duoserve for moesys, _, duoserve in MEMORY.values()]
    why = "weights and slots alone, without activations and KV cache"
    return Claim("table 2", "peak memory, moesys over duoserve", span(paper), span(ours), why)


def _bound() -> str:
    """Why prefetching cannot gain more than it does."""
    model, profile = MODELS[0], read_profile(DEVICES[0])
    nbytes = model.expert_bytes(_AWQ_BITS)
    loads = TOP_K * profile.link_seconds(nbytes)
    work = TOP_K * profile.expert_seconds(nbytes, 1) + profile.layer_seconds(DENSE_BYTES[model] / model.layers, 1)
    return (
        f"{model.name} on {profile.name}: a layer's loads take {1e3 * loads:.1f} ms, all else {1e3 * work:.1f} ms: "
        f"hiding gains {(loads + work) / max(loads, work):.2f} times at most\n"
        f"as slow as implied: all else {1e3 * implied_layer_seconds(model, profile):.1f} ms, for the paper's "
        f"{_SQUAD_GAIN} times"
    )
