"""OD-MoE's evaluation (section 4): Mixtral 8x7B in FP32 on ten machines, on a simulated cluster, and what it could be.

The six cases of figure 8:

    1  the draft model gets tokens, keys and values after each token    4  it gets nothing
    2  tokens alone                                                     5  none: workers load experts at random
    3  keys and values alone                                            6  none: they load when the router has spoken
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, NamedTuple

from bench.papers.cells import Cells
from bench.papers.claims import Cell, Claim, Reproduction, Setting, span
from bench.papers.cluster import decode
from bench.papers.cluster_prefill import prefill_seconds
from bench.papers.geometry import MIXTRAL
from bench.papers.od_moe_recall import (
    EMBEDDED,
    PRINTED,
    RECALL,
    TEXTS,
    WITNESS,
    WITNESS_AHEAD,
    WITNESS_ALIGNED,
    DraftRecall,
    as_printed,
    named_tokens,
    recall_of,
)
from bench.papers.od_moe_testbed import (
    ALL_BYTES,
    ALL_RESIDENT,
    GROUPS,
    KV_BYTES,
    Machines,
    memory_bytes,
    rtx_3080_expert_seconds,
    ten_machines,
)
from smoe.machine.processor import usable_cores
from smoe.simulator.sweep import sweep

NEW_TOKENS = 256
"""Section 4.2."""
DECODED, TTFT_MS = 3.6925, {16: 1345.3, 128: 3143.4}
"""Table 2, means over the two lengths of the answers."""
_NOTHING, _RANDOM = "nothing", "random"
"""In addition to recalls: what is predicted."""
CASES = {"case 1": (1, 1), "case 2": (1, 0), "case 3": (0, 1), "case 4": (0, 0)}
"""Of figure 8, those with a draft: periods of tokens and of keys and values."""
PERIODS = {PRINTED: (1, 4, 16), EMBEDDED: (1, 4, 16), WITNESS: (1, 16)}
"""Those of the paper's 1, 2, 4, 8, 16 at which a recall is known."""
_BITS = {"int8": 8.0, "int4": 4.5, "int3": 3.5}
BAR_SHARE, BAR_MEMORY, BAR_PROMPT = 0.95, 0.27, 1.5
"""Our own: of all-resident's speed, in so much of its memory; seconds to the first token of 128."""
BATCH_ROWS = 8
"""Of a message of a prompt that is piped."""
RUN_ON, TWO_SLOTS = "+ turns that run on", "+ two slots for prompts"
"""Five groups do not divide 32 layers: where each token begins with the first group, it has had two turns to load."""


class _ClusterCase(NamedTuple):
    """One cluster, one way to work on it."""

    name: str
    system: str
    recall: DraftRecall | str = _NOTHING
    new_tokens: int = 256
    prompt: int = 16
    groups: int = GROUPS
    spares: int = 0
    precision: str = "int8"
    periods: tuple[int, int] = (1, 1)
    is_early: bool = False
    since: bool = True
    """Whether all rows of keys and values since the last time travel, or the newest alone."""
    is_ours: bool = False
    """Wrong loads are given up, prompts piped, with so many"""
    slots: int = 1
    """in each worker."""
    turns_run_on: bool = False
    changed: tuple[tuple[str, float], ...] = ()
    """Times of the testbed that are others here."""


def _settings() -> list[_ClusterCase]:
    return [*_table_2(), *_other_recalls(), *_figure_8(), *_figure_9(), *_figure_10(), *_constants(), *_beyond()]


def _table_2() -> list[_ClusterCase]:
    aligned = recall_of(PRINTED, 1, 1)
    lengths = [(old, new) for old in TTFT_MS for new in (64, NEW_TOKENS)]
    found = [_ClusterCase("table 2", f"od-moe ({old}, {new})", aligned, new, old) for old, new in lengths]
    return [*found, _ClusterCase("table 2", "the cluster, no loads", new_tokens=NEW_TOKENS, changed=(("load", 0.0),))]


def _other_recalls() -> list[_ClusterCase]:
    """What the paper's speed would take."""
    others = {
        "as FP16's, 99.94 %": DraftRecall((0.9994,)),
        "as NF4's, 95.67 %": DraftRecall((0.9567,)),
        "misses of a layer together": DraftRecall((RECALL[1, 1],), RECALL[1, 1]),
    }
    return [_ClusterCase("table 2, other recalls", system, recall, NEW_TOKENS) for system, recall in others.items()]


def _figure_8() -> list[_ClusterCase]:
    found = [
        _ClusterCase(f"figure 8, {TEXTS[source]}", case, recall_of(source, *periods), NEW_TOKENS, periods=periods)
        for source in TEXTS
        for case, periods in CASES.items()
    ]
    alone = [
        _ClusterCase("figure 8", "case 5", _RANDOM, NEW_TOKENS),
        _ClusterCase("figure 8", "case 6", _NOTHING, NEW_TOKENS),
    ]
    return [*found, *alone]


def _figure_9() -> list[_ClusterCase]:
    return [
        _ClusterCase(
            f"figure 9, {TEXTS[source]}", f"T{t} KV{kv}", recall_of(source, t, kv), NEW_TOKENS, periods=(t, kv)
        )
        for source, known in PERIODS.items()
        for t, kv in product(known, known)
    ]


def _figure_10() -> list[_ClusterCase]:
    """With the workers' GPUs as they were, too."""
    return [
        _ClusterCase(_figure_10_name(gpu, rows, source), f"T1 KV{kv}", recall_of(source, 1, kv), NEW_TOKENS,
              periods=(1, kv), since=rows == _ALL_ROWS, changed=_GPUS[gpu])
        for source in (PRINTED, EMBEDDED)
        for rows in _ROWS
        for gpu in _GPUS
        for kv in (*PERIODS[source], 0)
    ]  # fmt: skip


_ROWS = _ALL_ROWS, _NEWEST = "all rows since", "the newest row"
"""Of keys and values, which travel: what our recordings were made with, and what the paper's words may mean."""
_3090, _3080 = "RTX 3090", "RTX 3080"
_GPUS: dict[str, tuple[tuple[str, float], ...]] = {_3090: (), _3080: (("expert", rtx_3080_expert_seconds()),)}


def _figure_10_name(gpu: str, rows: str, source: str) -> str:
    return f"figure 10, {gpu}, {rows}, {TEXTS[source]}"


def _constants() -> list[_ClusterCase]:
    """Table 2 with one time changed."""
    base, aligned = ten_machines(), recall_of(PRINTED, 1, 1)
    others: dict[str, tuple[str, float]] = {
        "a link of 22 GB/s": ("load", base.load * 24 / 22),
        "a link of 26 GB/s": ("load", base.load * 24 / 26),  # of PCIe 4.0's 31.5
        "messages of 0.05 ms": ("message", 0.05e-3),
        "messages of 0.2 ms": ("message", 0.2e-3),
        "main a fifth faster": ("layer", base.layer * 0.8),
        "main a fifth slower": ("layer", base.layer * 1.2),
        "draft of 1.25 ms": ("draft_layer", 1.25e-3),
        "draft of 4 ms": ("draft_layer", 4e-3),
    }
    return [
        _ClusterCase(_constants_name(length), system, aligned, NEW_TOKENS, length, changed=(change,))
        for length in TTFT_MS
        for system, change in others.items()
    ]


def _constants_name(length: int) -> str:
    return f"other constants, prompt of {length}"


def _beyond() -> list[_ClusterCase]:
    """Each step on top of the one before, where it says `+`."""
    spare: dict[str, Any] = {"spares": 1, "precision": "int4"}
    early: dict[str, Any] = {"is_early": True}
    five: dict[str, Any] = {"groups": 5, "turns_run_on": True}
    steps: list[tuple[str, dict[str, Any]]] = [
        ("wrong loads given up", {}),
        ("+ int4, spares", spare),
        ("+ early", spare | early),
        ("+ a fifth group", spare | early | {"groups": 5}),
        (RUN_ON, spare | early | five),
        (TWO_SLOTS, spare | early | five | {"slots": 2}),
        ("the same with int3", spare | early | five | {"slots": 2, "precision": "int3"}),
        ("int8, early, no spares", early),
        ("int8, early, no spares, run on", early | five),
    ]
    return [
        _ClusterCase(_beyond_name(source), system, _recall_beyond(source, more), NEW_TOKENS, 128, is_ours=True, **more)
        for source in (WITNESS, PRINTED)
        for system, more in steps
    ]


def _beyond_name(source: str) -> str:
    return f"beyond the paper, {TEXTS[source]}"


def _recall_beyond(source: str, more: Mapping[str, Any]) -> DraftRecall:
    """The witness's; its misses as the paper's model would have them, where that is asked for."""
    found = (WITNESS_AHEAD if more.get("is_early") else WITNESS_ALIGNED)[more.get("precision", "int8")]
    if source == WITNESS:
        return found
    assert found.with_spare is not None
    spare = 1 - as_printed(max(1 - found.with_spare, 1e-9), WITNESS)
    return DraftRecall((1 - as_printed(1 - found.experts[0], WITNESS),), None, spare, found.own_token)


SETTINGS = _settings()


def reproduce(tick: Callable[[int], None], cells: Cells | None = None) -> Reproduction:
    """Simulate all settings but those that `cells` has; `tick` hears of every one that is done."""
    done = sweep(_in_case, SETTINGS, tick, usable_cores(), keeping=cells)
    settings = [setting for cell in done for setting in cell.settings]
    return Reproduction("od-moe", tuple(settings), tuple(_claims(settings)), _remarks())


def _in_case(case: _ClusterCase) -> Cell:
    base = replace(ten_machines(), **dict(case.changed))
    recall = case.recall if isinstance(case.recall, DraftRecall) else None
    count = min(case.new_tokens, NEW_TOKENS)
    tokens = named_tokens(recall, count, case.spares, is_random=case.recall == _RANDOM)
    group_size = MIXTRAL.top_k + case.spares
    draft = None if recall is None else base.draft(*case.periods, case.is_early, case.since)
    cluster = base.cluster(case.groups, group_size, draft, case.is_ours)
    run = decode(replace(cluster, turns_run_on=case.turns_run_on), tokens)
    batch_rows = BATCH_ROWS if case.is_ours else None
    prompt = base.prompt(case.prompt, case.slots, batch_rows, is_serial=not case.is_ours)
    bits = None if draft is None else _BITS[case.precision]
    nbytes = memory_bytes(len(cluster.workers), bits, case.slots) if base.load else ALL_BYTES
    ttft, seconds = prefill_seconds(prompt), run.seconds_per_token
    return Cell([Setting(case.name, case.system, ttft, seconds, case.new_tokens, nbytes)], {})


def knee(base: Machines) -> tuple[float, float, float]:
    """(the longest load that delays nothing, as it comes out; as equation 1 is printed; with the number of groups in
    the place of their size), seconds."""
    tokens = [token._replace(named=token.chosen) for token in named_tokens(None, 4)]

    def last_token(load: float) -> float:
        return decode(replace(base, load=load).cluster(GROUPS, MIXTRAL.top_k, None), tokens).token_seconds[-1]

    free = last_token(0.0)
    low, high = 0.0, 10 * free / MIXTRAL.layers
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if last_token(middle) <= free * (1 + 1e-9) else (low, middle)
    busy = base.expert
    mains = free / MIXTRAL.layers - busy
    return low, MIXTRAL.top_k * mains + (MIXTRAL.top_k - 1) * busy, GROUPS * mains + (GROUPS - 1) * busy


_HALVINGS = 14


def _claims(settings: Sequence[Setting]) -> list[Claim]:
    of: dict[str, dict[str, Setting]] = {}
    for setting in settings:
        of.setdefault(setting.name, {})[setting.system] = setting
    speeds = {name: {system: 1 / each.seconds_per_token for system, each in row.items()} for name, row in of.items()}
    return [
        *_of_table_2(of, speeds),
        *_of_equation_1(),
        *_of_figures(speeds),
        *(claim for source in (WITNESS, PRINTED) for claim in _of_bars(of[_beyond_name(source)], TEXTS[source])),
    ]


def _near(paper: float, share: float) -> tuple[float, float]:
    return paper * (1 - share), paper * (1 + share)


def _of_table_2(of: Mapping[str, Mapping[str, Setting]], speeds: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    rows, case = of["table 2"], TEXTS[PRINTED]
    ours = [system for system in rows if system.startswith("od-moe")]
    decoded = span([speeds["table 2"][system] for system in ours])
    others = span([speed for length in TTFT_MS for speed in speeds[_constants_name(length)].values()])
    within = _near(DECODED, 0.1)
    found = [
        *_of_speed(decoded, case),
        Claim("table 2", "tokens a second, other constants", (DECODED,) * 2, others, _WHY_DECODED, case, within),
    ]
    for source in (EMBEDDED, WITNESS):
        speed = speeds[f"figure 8, {TEXTS[source]}"]["case 1"]
        found += _of_speed((speed, speed), TEXTS[source])
    for length, paper in TTFT_MS.items():
        times = span([1e3 * rows[system].ttft_seconds for system in ours if f"({length}," in system])
        others = span([1e3 * each.ttft_seconds for each in of[_constants_name(length)].values()])
        what, within = f"first token of {length}, ms", _near(paper, 0.05)
        found.append(Claim("table 2", what, (paper,) * 2, times, _WHY_TTFT, within=within))
        found.append(Claim("table 2", f"{what}, other constants", (paper,) * 2, others, within=within))
    nbytes = span([rows[system].memory_bytes / 1e9 for system in ours])
    found.append(Claim("table 2", "GB on GPUs (of 180)", (60.0, 60.0), nbytes, _WHY_MEMORY, within=(60.0, 60.0)))
    return found


def _of_speed(decoded: tuple[float, float], case: str) -> list[Claim]:
    share, paper = 100 / ALL_RESIDENT, 100 * DECODED / ALL_RESIDENT
    ours, within = (share * decoded[0], share * decoded[1]), (paper - 8, paper + 8)
    return [
        Claim("table 2", "tokens a second", (DECODED,) * 2, decoded, _WHY_DECODED, case, _near(DECODED, 0.1)),
        Claim("table 2", f"% of all resident ({ALL_RESIDENT} tokens/s)", (paper,) * 2, ours, "", case, within),
    ]


def _of_equation_1() -> list[Claim]:
    found, printed, by_groups = (1e3 * each for each in knee(ten_machines()))
    what = "longest load that delays nothing, ms"
    return [
        Claim("equation 1", f"{what}, as printed (G)", (printed,) * 2, (found,) * 2, within=_near(printed, 0.01)),
        Claim("equation 1", f"{what}, groups for G", (by_groups,) * 2, (found,) * 2, within=_near(by_groups, 0.01)),
    ]


def _of_figures(speeds: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    """Orders alone: the bars' heights are in pictures."""
    found = []
    for source, case in TEXTS.items():
        cases = {**speeds[f"figure 8, {case}"], **speeds["figure 8"]}
        for better, worse in pairwise(cases):
            found.append(_above("figure 8", f"{better} over {worse}", [cases[better] / cases[worse]], case))
        found.append(_best("figure 9", "T1 KV1", speeds[f"figure 9, {case}"], case))
        if source != WITNESS:  # no period of 4 was recorded of it
            for rows in _ROWS:
                before, after = (speeds[_figure_10_name(gpu, rows, source)] for gpu in _GPUS)
                found.append(_best("figure 9", "T1 KV1", before, case, f" of T1, {rows}"))
                found.append(_best("figure 10", "T1 KV4", after, case, f" on an {_3080}, {rows}"))
    return found


def _best(where: str, best: str, speeds: Mapping[str, float], case: str, more: str = "") -> Claim:
    ratios = [speeds[best] / speed for system, speed in speeds.items() if system != best]
    return _above(where, f"{best} over all others{more}", ratios, case)


def _above(where: str, what: str, ratios: list[float], case: str) -> Claim:
    return Claim(where, what, (1.0, 1.0), span(ratios), _WHY_ORDER, case, (1.0 + 1e-6, None))


def _of_bars(rows: Mapping[str, Setting], case: str) -> list[Claim]:
    five, piped = rows[RUN_ON], rows[TWO_SLOTS]
    share = 100 / five.seconds_per_token / ALL_RESIDENT
    memory = 100 * five.memory_bytes / ALL_BYTES
    ttft = piped.ttft_seconds
    bar, where = 100 * BAR_SHARE, "our bar"
    return [
        Claim(where, "% of all resident, five groups", (bar,) * 2, (share,) * 2, _WHY_BARS, case, (bar, None)),
        Claim(where, "% of its memory", (100 * BAR_MEMORY,) * 2, (memory,) * 2, "", case, (0.0, 100 * BAR_MEMORY)),
        Claim(where, "first token of 128, piped, s", (BAR_PROMPT,) * 2, (ttft,) * 2, "", case, (0.0, BAR_PROMPT)),
    ]


_WHY_DECODED = "the link and the recall count most: see `other constants`, `other recalls`"
_WHY_TTFT = "a load, main's part, and 2 rows of 16 KB a token over 1 Gbit/s both ways, one after the other, 32 times"
_WHY_MEMORY = "the paper's own sizes of the parts: 7 on main, 45 of the draft, 1 on each of eight workers"
_WHY_ORDER = "bars are in pictures alone, so no more is asked than that one is higher: above 1"
_WHY_BARS = "set by ourselves; recalls with a spare are our witness's, or its misses stretched as the others are"


def _remarks() -> tuple[str, ...]:
    base = ten_machines()
    load, expert, layer = (1e3 * each for each in (base.load, base.expert, base.layer))
    bound, resident = (load + expert) / GROUPS, 1e3 / ALL_RESIDENT / MIXTRAL.layers
    kv = 1e3 * base.wire.seconds(KV_BYTES)
    even = kv / load / (MIXTRAL.layers * MIXTRAL.top_k)
    return (
        "routing is synthetic: every expert is as likely as any other; without caches who is chosen decides nothing",
        f"times chosen beforehand: {load:.1f} ms to load an expert (24 GB/s), {expert:.2f} to compute one, {layer:.2f} "
        f"for main's part of a layer (so that all resident is the paper's {ALL_RESIDENT} tokens/s); assumed: "
        f"{1e3 * base.message:.1f} a message, {1e3 * base.delay:.1f} one way, {1e3 * base.draft_layer:.1f} a layer of "
        "the draft",
        f"the paper prints recalls of T1 KV1 ({100 * RECALL[1, 1]:.2f} %) and T0 KV0 (some {100 * RECALL[0, 0]:.0f} %) "
        "alone: between them ours, stretched over these two; periods of 2, 8 and 32 were not recorded",
        f"with every guess right and in time a layer takes {bound:.1f} ms of {GROUPS} groups' loads, all resident "
        f"{resident:.1f}: {100 * resident / max(bound, resident):.0f} % at most; a wrong guess is a load of "
        f"{load:.1f} ms",
        f"keys and values of a token take {kv:.1f} ms of main's port: they pay where they save {100 * even:.2f} points "
        "of recall; an RTX 3080 has the same PCIe, and computes an expert in "
        f"{1e3 * rtx_3080_expert_seconds() - expert:.2f} ms more, which moves nothing",
    )
