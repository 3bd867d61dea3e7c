"""`smoe cluster plan`: forecasts a cluster's speed before it is bought or built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.options import Debug, Json, Model
from smoe.cli.plan import MachineOptions
from smoe.errors import ClusterError, ConfigError
from smoe.units import parse_bytes, parse_link

if TYPE_CHECKING:
    from smoe.memory.emulation import DeviceProfile
    from smoe.report.cluster_outlook import ClusterCase, ClusterOutlook, Wanted
    from smoe.simulator.cluster_forecast import MeasuredWorker

MOST_WORKERS = 64
_WORKERS = 8
_WORKER_MEMORY = "4GiB"
_LINK = "1Gbit"


@dataclass(frozen=True)
class WorkerOptions:
    """The options of `smoe cluster plan` that describe the workers."""

    workers: Annotated[
        int | None,
        typer.Option(
            help="Largest number of workers to forecast. \\[default: 8; with --name: those of the cluster]",
            min=1,
            max=MOST_WORKERS,
            show_default=False,
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of an existing cluster, whose workers' measured times are used."),
    ] = None
    worker_profile: Annotated[
        str | None,
        typer.Option(
            help="Profile of the workers' machines: raspberry-pi-5, laptop-cpu, ... \\[default: the coordinator's]"
        ),
    ] = None
    worker_memory: Annotated[
        str | None, typer.Option(help=f"Memory for experts in each worker. \\[default: {_WORKER_MEMORY}]")
    ] = None
    slots: Annotated[
        int | None, typer.Option(help="Instead of --worker-memory: number of experts that a worker holds.", min=1)
    ] = None

    def check(self) -> None:
        """Raise `ConfigError` for two options that set the same property of workers."""
        of_plan = {"worker_profile": self.worker_profile, "worker_memory": self.worker_memory, "slots": self.slots}
        given = [what for what, value in of_plan.items() if value is not None]
        if self.name is not None and given:
            raise ConfigError(
                f"`name={self.name}` and `{given[0]}` both describe the workers; leave out one of the two",
                setting=given[0],
                given=of_plan[given[0]],
                allowed="only without `name`",
            )
        if self.slots is not None and self.worker_memory is not None:
            raise ConfigError(
                f"`worker_memory={self.worker_memory}` and `slots={self.slots}` both set how many experts a worker "
                "holds; leave out one of the two",
                setting="slots",
                given=self.slots,
                allowed="only without `worker_memory`",
            )

    def wanted(self) -> Wanted:
        """Return the description of the cluster to forecast, from these options."""
        worker_bytes = parse_bytes(self.worker_memory or _WORKER_MEMORY, "worker_memory")
        from smoe.report.cluster_outlook import Wanted

        measured = [] if self.name is None else _measured(self.name)
        profile = None if self.worker_profile is None else _profile(self.worker_profile)
        return Wanted(self.workers or len(measured) or _WORKERS, measured, profile, worker_bytes, self.slots)


def plan(
    engine: MachineOptions,
    workers: WorkerOptions,
    model: Model = "demo",
    link: Annotated[str, typer.Option(help="Rate of the coordinator's network: 100Mbit, 1Gbit, 2.5Gbit, ...")] = _LINK,
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace of the model, written by smoe record. \\[default: simulated routing]"),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Forecast the speed of a cluster before it is bought or built.

    Prints the time of a token with 1, 2, ... workers for each schedule, what it waits for, and the number of workers
    above which another one does not help. smoe's own scheduler is simulated: the coordinator is this machine, or that
    of --profile, with --memory; workers are machines of --worker-profile, or those of an existing cluster (--name).
    """
    from smoe.cli.console import Patience, print_json

    workers.check()
    bytes_per_second = parse_link(link, "link")
    wanted = workers.wanted()
    from smoe.report.cluster_outlook import Network, cluster_outlook
    from smoe.trace.file import Trace

    run = None if trace is None else Trace(trace).routings()
    patience = Patience("simulating")
    patience.start()
    try:
        found = cluster_outlook(model, engine.config(), wanted, Network(bytes_per_second), run, engine.revision)
    finally:
        patience.stop()
    if json:
        print_json(found.as_json() | {"link": link})
    else:
        _print(found, link)


def _profile(name: str) -> DeviceProfile:
    """Return the profile of the workers' machine, which the option --worker-profile names. Errors name this option."""
    from smoe.memory.emulation import read_profile

    try:
        return read_profile(name)
    except ConfigError as error:
        message = str(error).replace("`profile`", "`worker_profile`", 1)
        raise ConfigError(message, setting="worker_profile", given=name, allowed=error.allowed) from error


def _measured(name: str) -> list[MeasuredWorker]:
    """Return the workers of an existing cluster, with the times that its coordinator measured last.

    Raises `ClusterError` if the coordinator has not measured any.
    """
    from smoe.load.check_zmq import check_zmq
    from smoe.simulator.cluster_forecast import MeasuredWorker

    check_zmq()
    from smoe.cluster.stored_identity import read_coordinator, read_status

    stored = read_status(read_coordinator(name, "name").name)
    known = [each for each in (stored or {"workers": []})["workers"] if each["seconds_per_expert"]]
    if not known:
        raise ClusterError(
            f"no coordinator of the cluster {name!r} has measured its workers yet; run smoe generate --cluster {name} "
            "once, or give `worker_profile` instead of `name`",
            setting="name",
            given=name,
            allowed="a cluster that has run",
        )
    loads = [each["seconds_per_load"] for each in known if each["seconds_per_load"]]
    if not loads:
        raise ClusterError(
            f"the workers of the cluster {name!r} have loaded no experts, so the time of a load is not measured; run "
            f"smoe generate --cluster {name!r} once with less memory, or give `worker_profile` instead of `name`",
            setting="name",
            given=name,
            allowed="a cluster whose workers have loaded experts",
        )
    usual = sum(loads) / len(loads)
    return [
        MeasuredWorker(
            each["seconds_per_load"] or usual, each["seconds_per_expert"], each["seconds_there_and_back"], each["slots"]
        )
        for each in known
    ]


def _print(found: ClusterOutlook, link: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    from smoe.cli.console import as_options, note, output
    from smoe.report.cluster_outlook import SCHEDULES
    from smoe.units import format_digits, format_seconds

    workers, console = found.workers, output()
    coordinator = found.coordinator
    with_draft = "" if found.with_draft is None else f" ({found.with_draft.slots} with a draft model)"
    console.print(
        f"[bold]{escape(found.model)}[/bold]  the coordinator: a layer {format_seconds(coordinator.layer)}, room for "
        f"{coordinator.slots} experts{with_draft}; workers: room for {_span([each.slots for each in workers], str)}, "
        f"a load {_span([each.load for each in workers], format_seconds)}, an expert "
        f"{_span([each.expert for each in workers], format_seconds)}; {link}",
        soft_wrap=True,
        highlight=False,
    )
    for schedule in found.schedules:
        console.print(f"[italic]{schedule}[/italic]: {as_options(SCHEDULES[schedule])}", soft_wrap=True)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for head in ("workers", "ms a token", "tokens/s", "loads a token", "waits most for"):
            table.add_column(head, justify="left" if head.startswith("waits") else "right")
        if schedule == "finish":
            alone = found.alone.run
            table.add_row("none", format_digits(1e3 * alone.seconds_per_token), _rate(alone.tokens_per_second), "", "")
        for case in found.of(schedule):
            loads = f"{case.loads_at_workers:.1f} + {case.loads_at_main:.1f}"
            time, rate = format_digits(1e3 * case.seconds_per_token), _rate(case.tokens_per_second)
            table.add_row(str(case.workers), time, rate, loads, _waits(case))
        console.print(table)
        console.print(_enough(found, schedule), soft_wrap=True, highlight=False)
    for remark in [*(f"missing: {each}" for each in found.alone.missing), *found.remarks]:
        note(remark)


def _span(values: Sequence[Any], words: Callable[[Any], str]) -> str:
    """Return the smallest and the largest of several values in words, or one value if all are equal."""
    least, most = words(min(values)), words(max(values))
    return least if least == most else f"{least} to {most}"


def _enough(found: ClusterOutlook, schedule: str) -> str:
    """Return in words how many workers are worth having by this schedule."""
    count, most = found.enough(schedule), len(found.workers)
    if count == 0:
        return f"{schedule}: [bold]workers do not help[/bold]; {_alone(found, schedule)}"
    if count == most:
        return f"{schedule}: every worker helps, up to {most}"
    are = "worker is" if count == 1 else "workers are"
    return f"{schedule}: [bold]{count} {are} enough[/bold]; {most} would gain less than 5%"


def _alone(found: ClusterOutlook, schedule: str) -> str:
    """Return in words how fast the coordinator alone is, compared with the number of workers that is fastest."""
    ratio = found.fastest(schedule).seconds_per_token / found.alone.run.seconds_per_token
    if ratio < 1.05:  # two digits would show 1
        return "the coordinator alone is as fast"
    return f"the coordinator alone is {f'{ratio:.2g}' if ratio < 10 else f'{ratio:.0f}'} times as fast"


def _waits(case: ClusterCase) -> str:
    """Return in words the activity that takes the largest part of a token's time."""
    return f"{case.waits_for} {max(case.waits) / case.seconds_per_token:.0%}"


def _rate(tokens_per_second: float) -> str:
    from smoe.units import format_rate

    return format_rate(tokens_per_second).removesuffix(" tokens/s")
