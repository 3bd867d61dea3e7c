"""Prints a summary on stderr at the end of a run, or at the end of a server: speed, bytes read, memory, and how close
the run came to the hardware's limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from smoe.bounds import INT8
from smoe.cli.console import errors
from smoe.machine.process_memory import LIBRARIES, SCRATCH
from smoe.machine.processor import BUSY_SHARE
from smoe.report.run import RunReport
from smoe.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from smoe.runtime.engine import Engine
    from smoe.server.totals import Totals

_NONE = "-"
_LITTLE_SECONDS = 0.005
"""The time per token that the hardware needs, below which other work takes most of a token's time: Python, and
operations that move few bytes."""
_UNUSED_TEMPLATE = "this model has one; smoe chat uses it, and smoe generate continues the prompt as it is"
_TORCH_ALONE = "torch computed all layers"
_COMPUTED = {
    "torch": "torch computed the experts",
    "native": "smoe's kernels computed the experts, with the same bits as torch",
    "own-order": "smoe's kernels computed the experts, with sums in another order than torch's",
    "slots": "smoe's GPU kernels computed the experts",
}
"""{kernels that multiplied few rows: the sentence about them}."""
_MET = 1.1
"""The factor by which a token may take longer than the requested time, so that the request counts as met."""


@dataclass(frozen=True)
class RunSetup:
    """How a model was set up for a run: the lines of the summary that do not depend on what was measured."""

    budget: str
    """How the memory budget is divided."""
    settings: Sequence[str] = ()
    """The settings that were chosen for the model, each with its reason."""
    has_template: bool = False
    """Whether the model has a chat template, which a continued prompt does not use."""

    @property
    def remarks(self) -> list[tuple[str, str]]:
        rows = [("setting", setting) for setting in self.settings]
        return [*rows, ("chat template", _UNUSED_TEMPLATE)] if self.has_template else rows


def setup_of(engine: Engine, *, has_template: bool) -> RunSetup:
    """Return how an engine was set up."""
    from smoe.cli.session import describe, settings_chosen

    budget = describe(engine.ledger, engine.budget_reason, engine.config.keeps_experts)
    return RunSetup(budget.removeprefix("budget "), settings_chosen(engine), has_template)


def print_summary(report: RunReport, setup: RunSetup) -> None:
    """Print a generation's summary, one line for each subject; the terminal wraps long lines."""
    _print([("budget", setup.budget), *_rows(report), *setup.remarks])


def print_totals(totals: Totals) -> None:
    """Print a server's summary."""
    read = totals.prompt_tokens - totals.reused_tokens
    tokens = f"{read:,} read, {totals.reused_tokens:,} reused from the KV cache, {totals.new_tokens:,} new"
    if totals.tokens_per_second is not None:
        tokens += f" = {format_rate(totals.tokens_per_second)} while requests were in flight"
    others = {
        "refused": totals.refused_requests,
        "failed": totals.failed_requests,
        "left by their clients": totals.abandoned_requests,
    }
    parts = [f"{count:,} {what}" for what, count in others.items() if count]
    requests = f"{format_count(totals.requests, 'request')} for text"
    requests = f"{totals.answered_requests:,} of {requests}" if parts else requests
    not_for_text = f"{totals.other_requests:,} (page, models, health, metrics, ...)" if totals.other_requests else ""
    rows = [
        ("answered", ", ".join([requests, *parts])),
        ("other requests", not_for_text),
        ("tokens", tokens),
        ("memory", _memory(totals)),
        ("whole process", _process(totals)),
    ]
    if totals.hit_ratio is not None:
        experts = f"{totals.hit_ratio:.1%} were in memory, {format_bytes(totals.bytes_read)} read"
        rows.insert(3, ("experts", experts))
    _print([(name, value) for name, value in rows if value])


def _print(rows: Sequence[tuple[str, str]]) -> None:
    console = errors()
    console.print()
    for name, value in rows:
        console.print(f"[dim]{name:<16}[/dim]{escape(value)}", soft_wrap=True)


def _rows(report: RunReport) -> list[tuple[str, str]]:
    generation = report.generation
    rows = [
        ("tokens", f"{generation.prompt_tokens} in the prompt, {generation.new_tokens} new"),
        ("first token", _seconds(generation.ttft_seconds)),
        ("per token", _per_token(report)),
        ("forecast", _forecast(report)),
        ("busy machine", _busy(report)),
        ("experts", _experts(report)),
        ("workers", _workers(report)),
        ("draft model", _draft(report)),
        ("lossy", _lossy(report)),
        ("arithmetic", _arithmetic(report)),
        ("test bench", _bench(report)),
        ("memory", _memory(report)),
        ("whole process", _process(report)),
        ("hardware limit", _limit(report)),
        ("time went to", waiting(report)),
    ]
    return [(name, value) for name, value in rows if value]


def _per_token(report: RunReport) -> str:
    generation = report.generation
    if generation.tpot_median_seconds is None or generation.tokens_per_second is None:
        return ""
    together = f" for {len(generation.answers)} at once" if len(generation.answers) > 1 else ""
    return (
        f"{_seconds(generation.tpot_mean_seconds)}{together} = {format_rate(generation.tokens_per_second)} "
        f"(median {_seconds(generation.tpot_median_seconds)}, p95 {_seconds(generation.tpot_p95_seconds)})"
        f"{_beyond(report)}"
    )


def _forecast(report: RunReport) -> str:
    """Return the line that compares the run with the forecast of `smoe plan`; empty if no earlier run of the model has
    calibrated the forecast."""
    forecast, generation = report.forecast, report.generation
    mean, first = generation.later_seconds_per_token, generation.ttft_seconds
    if forecast is None or not forecast.is_calibrated or mean is None or first is None:
        return ""
    off, off_first = mean / forecast.seconds_per_token - 1, first / forecast.ttft_seconds - 1
    measured = f"{format_seconds(mean)} on average, {off:+.0%}"
    return (
        f"{format_seconds(forecast.seconds_per_token)} per token (measured {measured}), first token "
        f"{format_seconds(forecast.ttft_seconds)} ({off_first:+.0%}), by the times of earlier runs"
    )


def _busy(report: RunReport) -> str:
    """Return a remark for the summary if other programs slowed this run; else an empty text."""
    waited = report.generation.waited_share
    if waited is None or waited < BUSY_SHARE:
        return ""
    return f"other programs used this machine: this run waited {waited:.0%} of its time for a core"


def _beyond(report: RunReport) -> str:
    """Return a remark if the tokens took longer than the requested time per token. It says what to change. Otherwise
    return an empty text."""
    asked, median = report.tpot_asked_seconds, report.generation.tpot_median_seconds
    if asked is None or median is None or median <= _MET * asked:
        return ""
    return (
        f"; {format_seconds(asked)} were requested and not met: give more --memory or a longer --tpot; if the "
        "run was short, generate more tokens, because the control needs some tokens to settle"
    )


def _experts(report: RunReport) -> str:
    if report.hit_ratio is None or report.bytes_read_per_token is None:
        return ""
    read = report.bytes_read_per_token
    until = " until the whole model is in memory" if report.all_fit and read else ""
    how = " in the background" if report.hit_ratio == 1 and read else ""
    return f"{report.hit_ratio:.1%} were in memory, {format_bytes(read)} read per token{how}{until}"


def _workers(report: RunReport) -> str:
    """Return the summary's lines about the workers of a cluster: how many there were, what they computed, and which
    were lost."""
    if report.workers is None:
        return ""
    if not report.workers:
        return "no worker connected"
    if not any(each["experts_computed"] for each in report.workers):
        why = (
            "all experts fit into the coordinator's memory"
            if report.all_fit
            else "the coordinator was faster for every expert"
        )
        done = f"not needed: {why}"
    else:
        done = "experts computed: " + ", ".join(f"{each['name']} {each['experts_computed']}" for each in report.workers)
    lost = {each["name"] for each in report.lost_workers}
    here = {each["name"] for each in report.workers if not each["why"]}
    refused = [f"{each['name']}: {each['why']}" for each in report.workers if each["why"] and each["name"] not in lost]
    return "; ".join([done, *(_loss(each, each["name"] in here) for each in report.lost_workers), *refused])


def _loss(lost: dict[str, Any], came_back: bool) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(lost["at"]))
    if came_back:
        return f"{lost['name']} was lost at {when} ({lost['why']}) and reconnected"
    return f"{lost['name']} was lost at {when} ({lost['why']})"


def _draft(report: RunReport) -> str:
    """Return the line about a cluster's draft model, if there was one."""
    if report.draft is None:
        return ""
    from smoe.cli.cluster_draft import draft_line

    return draft_line(report.draft).removeprefix("draft model ")


def _lossy(report: RunReport) -> str:
    what = ", ".join(report.lossy)
    if not what:
        return ""
    became = [text for text in (_replaced(report), _by_low_copies(report)) if text]
    if not became:
        return f"{what} (smoe eval measures the quality cost)"
    if not report.low_copies and not report.routes.get("substituted"):
        return f"{what}: {became[0]}"  # it cost nothing
    return f"{what}: {'; '.join(became)} (smoe eval measures the quality cost)"


def _replaced(report: RunReport) -> str:
    """Return the line of the summary about substitution."""
    if not report.alpha:
        return ""
    replaced = report.routes.get("substituted", 0.0)
    if replaced == 0:
        return "no expert was replaced: too few are resident, or none was missing"
    return f"{replaced:.1%} of the experts chosen were replaced"


def _by_low_copies(report: RunReport) -> str:
    """Return the line of the summary about low-precision copies."""
    found = report.low_copies
    if not found:
        return ""
    text = f"{found['served']:.1%} of the experts used were low-precision copies"
    if found["left_out"]:
        text += f", {found['left_out']:.1%} were dropped"
    text += f", {format_bytes(found['bytes_per_token'])} of such copies read per token"
    upgrades = found["upgrades_per_token"]
    return f"{text}, {upgrades:.2g} upgrades a token" if upgrades else text


def _arithmetic(report: RunReport) -> str:
    """Return the line of the summary about the arithmetic: the code that computed, if options chose it, and how the
    result may differ from transformers."""
    parts, options = [], report.arithmetic_options
    if options:
        computed = _TORCH_ALONE if "--kernels torch" in options else _COMPUTED[report.arithmetic]
        parts.append(f"{computed} ({', '.join(options)})")
    if report.activations == INT8:
        parts.append(
            "8-bit activations where weights are quantised, as in llama.cpp (--activations dtype: full precision)"
        )
    elif report.arithmetic == "own-order":
        parts.append("results may differ from transformers in the last digits; --kernels torch gives identical bits")
    return "; ".join(parts)


def _bench(report: RunReport) -> str:
    if report.bench is None:
        return ""
    return (
        f"times of {report.bench['profile']}, emulated {report.bench['dilation']:.1f} times as slow, late by "
        f"{report.bench['late_share']:.0%}; no claim about that device"
    )


def _memory(report: RunReport | Totals) -> str:
    """Return the line of the summary about the budget. Reserved memory that was never written is not in RAM."""
    budget, peak = format_bytes(report.memory_budget_bytes), format_bytes(report.peak_memory_bytes)
    if not _only_reserved(report):
        return f"{peak} of the budget of {budget} at most"
    assert report.process is not None
    return f"{peak} of the budget of {budget} reserved, at most {format_bytes(report.process.budget)} of it used"


def _process(report: RunReport | Totals) -> str:
    """Return the line of the summary about the process's peak memory and its parts."""
    if report.process is None:
        return "" if report.process_peak_bytes is None else f"{format_bytes(report.process_peak_bytes)} at most"
    whole, libraries, budget, scratch = (format_bytes(size) for size in report.process)
    outside = format_bytes(report.process.outside_budget)
    if _only_reserved(report):  # how the rest divides into budget and scratch is then unknown
        return f"{whole} at most: {LIBRARIES} {libraries}, budget and {SCRATCH} {budget}"
    return (
        f"{whole} at most: of the budget {budget}, outside the budget {outside} ({LIBRARIES} {libraries}, {SCRATCH} "
        f"{scratch})"
    )


def _only_reserved(report: RunReport | Totals) -> bool:
    """Return whether a part of the peak of the budget was reserved but not in RAM."""
    return report.process is not None and report.process.budget < report.peak_memory_bytes


def _limit(report: RunReport) -> str:
    if report.floor is None or report.floor_share is None:
        return ""
    floor, part = format_seconds(report.floor.overlapped_seconds), report.floor.bound_by
    slowest = f"t full speed the {part} takes the longest time: {floor} a token ({report.rates.source})."
    if report.beats_rates:
        return (
            "this run was faster than the measured rates allow, for example because of the processor's cache or a "
            f"quieter machine. By these rates, a{slowest}"
        )
    is_little = report.floor.overlapped_seconds < _LITTLE_SECONDS and report.floor_share < 0.5
    elsewhere = " A model this small spends most of its time on other work." if is_little else ""
    return f"this run reached {report.floor_share:.0%} of the speed that this hardware allows. A{slowest}{elsewhere}"


def waiting(report: RunReport) -> str:
    """Return in words on which activities the decode time was spent, the largest first. Very small shares are left
    out."""
    shares = sorted(report.time_shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)


def _seconds(seconds: float | None) -> str:
    return _NONE if seconds is None else format_seconds(seconds)
