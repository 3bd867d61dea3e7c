"""The remarks that `smoe plan` prints below a forecast: where its numbers come from, and why they may be wrong."""

from __future__ import annotations

from pathlib import Path

from smoe.machine.floor import Rates
from smoe.machine.measure import load_profile
from smoe.machine.processor import BUSY_SHARE, waited_share
from smoe.report.pace import Access, RunArithmetic, last_run_of, loads_other_way, pace_of
from smoe.simulator.synthetic import SAYS

_UNTAUGHT = (
    "the speeds are wide ranges because no run of this model in precision {} on this machine is stored yet; one smoe "
    "generate of 20 tokens or more narrows them"
)
_TAUGHT = (
    "the speeds use times measured in earlier runs of this model in precision {}; rows of other precisions use this "
    "machine's rates until such a run exists, and are too optimistic"
)
_OTHER_LOADS = (
    "the time of loading an expert is not one of them, but follows from the measured rate of the {}: earlier runs read "
    "experts {}, and with this budget a run reads them {}"
)
_DISK, _CACHE = "from the disk", "from the page cache"
_BUSY = (
    "this machine is busy: this command waited {:.0%} of its time for a core used by other programs; rates measured "
    "meanwhile are too low"
)


def moved_per_token(is_emulated: bool) -> str:
    """Return the heading of the column with the bytes that a token loads. It depends on whether they come from a disk,
    since an emulated device has none."""
    return "loaded per token" if is_emulated else "read per token"


def of_machine(rates: Rates, is_emulated: bool) -> list[str]:
    """Return remarks about the routing and the rates, and about other programs that use this machine."""
    remarks = [
        SAYS,
        f"{moved_per_token(is_emulated)}: the lower number is for typical texts, in which experts repeat as in "
        "recorded "
        "runs; the higher one is for texts in which all experts are equally likely",
    ]
    figures = f"the rates come from {rates.source}"
    if is_emulated:
        return [
            *remarks,
            f"{figures}: the speeds are those of that machine; experts that fit into its RAM are loaded from there",
        ]
    if load_profile() is None:
        figures += "; for precise rates, run smoe doctor once"
    waited = waited_share()
    busy = [] if waited is None or waited < BUSY_SHARE else [_BUSY.format(waited)]
    return [*busy, *remarks, figures]


def _in_words(arithmetic: RunArithmetic) -> str:
    return ", ".join(filter(None, arithmetic))


def of_earlier_runs(place: Path, arithmetic: RunArithmetic, access: Access) -> list[str]:
    """Return remarks about earlier runs of the model in `place` on this machine, for a forecast of this arithmetic
    and access."""
    known, last = pace_of(place, arithmetic, access), last_run_of(place, arithmetic, access)
    if known.expert is None:
        return [_UNTAUGHT.format(_in_words(arithmetic))]
    skewed = ["the simulated routing uses experts as unevenly as those runs did"] if known.skew is not None else []
    loads = []
    if loads_other_way(place, arithmetic, access):
        is_direct = access is Access.DIRECT
        loads.append(_OTHER_LOADS.format(*(("disk", _CACHE, _DISK) if is_direct else ("memory", _DISK, _CACHE))))
    return [_TAUGHT.format(_in_words(arithmetic)), *loads, *skewed, *([] if last is None else last.doubts())]
