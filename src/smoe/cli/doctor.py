"""`smoe doctor`: measures this machine, and reports what is missing or could be better."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoe.bounds import MOST_THREADS
from smoe.cli.options import Debug, Json
from smoe.errors import ConfigError
from smoe.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from smoe.machine.findings import Finding
    from smoe.machine.measure import Profile

EPILOG = """Examples:

smoe doctor

smoe doctor --folder /mnt/models --expert-size 9MiB

Takes about ten seconds; run it while nothing else is busy. The profile is
stored for smoe plan and for summaries, in smoe/profile.json of the user's
cache folder (XDG_CACHE_HOME sets its place).
"""

_LEAST_BYTES, _MOST_BYTES = 2**12, 2**31
"""The bounds of an expert's size: at least a page; two of the largest still fit an ordinary machine's memory."""
_MARKS = {"good": "[green]ok  [/green]", "better": "[yellow]hint[/yellow]", "bad": "[red]bad [/red]"}


def command(
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder with models; its disk is measured. \\[default: the hub's cache]"),
    ] = None,
    expert_size: Annotated[
        str, typer.Option(help="Size of one read from the disk; give the size of an expert of your model.")
    ] = "8MiB",
    threads: Annotated[
        int | None, typer.Option(help="Number of threads that compute in the measurement.", min=1, max=MOST_THREADS)
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine: memory, disk, link to the GPU, and arithmetic of experts. Store the rates, and give advice.

    smoe plan, smoe bench and the summaries of runs compute the shortest possible time per token from the stored rates.
    """
    read_bytes = parse_bytes(expert_size, "expert_size")
    if not _LEAST_BYTES <= read_bytes <= _MOST_BYTES:
        allowed = f"a size from {format_bytes(_LEAST_BYTES)} to {format_bytes(_MOST_BYTES)}"
        raise ConfigError.out_of_bounds("expert_size", expert_size, allowed)
    from smoe.cli.console import doing, note, print_json

    with doing("importing the libraries"):
        import smoe.load.pretrained  # noqa: F401 - a process with a model has all of these libraries
    from smoe.cli.keeping import ResultDestination
    from smoe.machine.findings import examine, models_folder
    from smoe.machine.measure import save_profile
    from smoe.machine.process_memory import outside_budget_bytes
    from smoe.units import identifier

    where = models_folder(folder)
    outside = outside_budget_bytes(0)  # before anything is measured, which takes memory too
    keeping = ResultDestination()
    profile = _measure(where, read_bytes, threads)
    findings = examine(profile, where)
    path = keeping.keep(lambda: save_profile(profile))
    if json:
        print_json(
            _as_json(profile, findings, path)
            | {"beside_budget_bytes": {identifier(name): count for name, count in outside.items()}}
        )
    else:
        _print(profile, findings, outside)
        if path is not None:
            note(f"profile stored in {path}")


def _measure(folder: Path, expert_bytes: int, threads: int | None) -> Profile:
    from smoe.cli.console import errors, note, progress
    from smoe.machine.measure import measure
    from smoe.machine.processor import set_compute_threads

    if not errors().is_terminal:
        note("measuring memory, disk and arithmetic, which takes about ten seconds")
    set_compute_threads(threads)
    with progress("doctor") as bars:
        task = bars.add_task("measuring", total=None, amount="")
        return measure(folder, expert_bytes, lambda what: bars.update(task, amount=what))


def _print(profile: Profile, findings: list[Finding], outside: dict[str, int]) -> None:
    from rich.markup import escape

    from smoe.cli.console import output

    console = output()
    known = ("self-tests stored", _self_test_line())
    for name, value in [*_rows(profile), ("outside the budget", _outside_line(outside)), known]:
        console.print(f"[dim]{name:<20}[/dim]{escape(value)}", soft_wrap=True)
    console.print()
    for finding in findings:
        console.print(f"{_MARKS[finding.grade]}  {escape(finding.text)}", soft_wrap=True)
        if finding.advice:
            console.print(f"      [dim]{escape(finding.advice)}[/dim]", soft_wrap=True)


def _outside_line(outside: dict[str, int]) -> str:
    """Return a line that says how much memory a process needs outside the memory budget if a model runs on the CPU."""
    from smoe.units import format_bytes

    return ", ".join(f"{name} {format_bytes(size)}" for name, size in outside.items() if size) + " at most"


def _self_test_line() -> str:
    """Return a line about the stored results of the tests that loading a model makes."""
    from smoe.load.stored_proofs import PROOFS, stored_count

    count = stored_count()
    if not count:
        return "none yet; the first load of a model tests its kernels and experts"
    return (
        f"for {count} combinations of model and settings, in {PROOFS.folder}; smoe verify and --set self_test=always "
        "test again"
    )


def _rows(profile: Profile) -> list[tuple[str, str]]:
    from smoe.units import format_bytes, format_bytes_rate

    machine = profile.machine
    way = "past the page cache" if profile.disk_is_direct else "through the page cache"
    rows = [
        ("machine", f"{machine['processor']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}"),
        ("memory, read", f"{format_bytes_rate(profile.memory_bytes_per_second)} on {profile.threads} threads"),
        (
            "disk, read",
            f"{format_bytes_rate(profile.disk_bytes_per_second)} at {format_bytes(profile.disk_request_bytes)} a read, "
            f"{way}",
        ),
        ("expert arithmetic", f"{format_bytes_rate(profile.expert_bytes_per_second)} of bf16 weights, one token"),
    ]
    if profile.link_bytes_per_second and profile.device_memory_bytes_per_second:
        rows.append(("link to the GPU", format_bytes_rate(profile.link_bytes_per_second)))
        rows.append(("GPU memory, read", format_bytes_rate(profile.device_memory_bytes_per_second)))
    return rows


def _as_json(profile: Profile, findings: list[Finding], path: Path | None) -> dict[str, object]:
    from dataclasses import asdict

    from smoe.load.stored_proofs import stored_count

    stored = {"profile_path": str(path) if path is not None else None, "stored_self_tests": stored_count()}
    return asdict(profile) | stored | {"findings": [asdict(finding) for finding in findings]}
