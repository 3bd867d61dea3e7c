"""The remarks below a forecast: the sources of its figures, and doubts."""

from __future__ import annotations

from smoe.machine.floor import Rates
from smoe.machine.measure import load_profile
from smoe.machine.processor import BUSY_SHARE, waited_share
from smoe.report.pace import LastRun, Pace
from smoe.simulator.synthetic import SAYS

_UNTAUGHT = (
    "this model (precision {}) has not run on this machine: speeds are ranges, and a run of 20 tokens narrows them"
)
_TAUGHT = (
    "times of layers, experts and loads are from earlier runs of this model (precision {}); rows of other precisions "
    "use the machine's rates until they have run, and look faster than they are"
)
_BUSY = (
    "this machine is busy: this command waited {:.0%} of its time for a core used by other programs; rates measured "
    "meanwhile are too low"
)


def moved_per_token(is_emulated: bool) -> str:
    """Return the name of the bytes of loads; with an emulated device experts are in RAM, so nothing is read from a
    disk."""
    return "loaded per token" if is_emulated else "read per token"


def of_machine(rates: Rates, is_emulated: bool) -> list[str]:
    """Return remarks about the routing and the rates, and about other programs that use this machine."""
    remarks = [
        SAYS,
        f"{moved_per_token(is_emulated)}: from typical texts (experts repeat as in recorded texts) to every expert "
        "equally likely",
    ]
    figures = f"rates from {rates.source}"
    if is_emulated:
        return [
            *remarks,
            f"{figures}: speeds are for that machine; experts are loaded from its RAM as far as they fit there",
        ]
    if load_profile() is None:
        figures += "; smoe doctor measures them precisely"
    waited = waited_share()
    busy = [] if waited is None or waited < BUSY_SHARE else [_BUSY.format(waited)]
    return [*busy, *remarks, figures]


def of_earlier_runs(known: Pace, last: LastRun | None, precision: str) -> list[str]:
    """Return remarks about earlier runs of the model on this machine."""
    if known.layer is None:
        return [_UNTAUGHT.format(precision)]
    skewed = ["simulated routing is as skewed as in those runs"] if known.skew is not None else []
    return [_TAUGHT.format(precision), *skewed, *([] if last is None else last.doubts())]
