"""`smoe cluster status`: shows a cluster's machines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.cluster_draft import draft_line
from smoe.cli.options import Debug, Json
from smoe.errors import ClusterError

if TYPE_CHECKING:
    from rich.table import Table

    from smoe.cluster.stored_identity import Coordinator


def status(
    name: Annotated[
        str | None, typer.Option("--name", help="The cluster's name. \\[default: the only one]", show_default=False)
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Update the display until Ctrl-C.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the workers of a cluster and its draft model: the state of each, how many experts it has computed, and its
    times."""
    from smoe.load.check_zmq import check_zmq

    check_zmq()
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from smoe.cli.console import output, print_json
    from smoe.cluster.stored_identity import read_coordinator

    coordinator = read_coordinator(_only_cluster() if name is None else name, "name")
    report = _state_of(coordinator)
    if json:
        print_json(report)
        return
    if not watch:
        output().print(_head(coordinator, report), soft_wrap=True, markup=False)
        if report["workers"]:
            output().print(_table(report))
        return
    with Live(Group(Text(_head(coordinator, report)), _table(report)), console=output(), auto_refresh=False) as live:
        while True:
            time.sleep(0.5)
            report = _state_of(coordinator)
            live.update(Group(Text(_head(coordinator, report)), _table(report)), refresh=True)


def _only_cluster() -> str:
    """Return the name of the only cluster on this machine. Raises `ClusterError` if there is none, or more than one."""
    from smoe.cluster.stored_identity import clusters

    known = clusters()
    if len(known) == 1:
        return known[0]
    if known:
        message = f"there are several clusters on this machine; choose one with `name`: {', '.join(known)}"
    else:
        message = "there is no cluster on this machine yet; start one with smoe cluster up, or smoe cluster invite"
    raise ClusterError(message, setting="name", given=None, allowed=", ".join(known) or "none yet")


def _state_of(coordinator: Coordinator) -> dict[str, Any]:
    """Return the state that the cluster's coordinator stored last, and whether the coordinator still runs."""
    from smoe.cluster.running import coordinator_process
    from smoe.cluster.stored_identity import read_status

    stored, process = read_status(coordinator.name), coordinator_process(coordinator.name)
    return {
        "cluster": coordinator.name,
        "address": coordinator.address,
        "is_running": process is not None,
        "process": process,
        "known": sorted(coordinator.workers),
        "workers": stored["workers"] if stored is not None else [],
        "shadow": stored.get("shadow") if stored is not None else None,
    }


def _head(coordinator: Coordinator, report: dict[str, Any]) -> str:
    """Return the line above the table of workers: the coordinator's address and state."""
    if report["is_running"]:
        state = (
            ("the coordinator is running")
            if report["workers"]
            else "the coordinator is running; no worker has connected yet"
        )
    else:
        state = "no coordinator is running; the last one had" if report["workers"] else "no coordinator is running"
    known = f"; known workers: {', '.join(report['known'])}" if report["known"] and not report["workers"] else ""
    draft = f"\n{draft_line(report['shadow'])}" if report["shadow"] is not None else ""
    return f"cluster {coordinator.name} at {coordinator.address}: {state}{known}{draft}"


def _table(report: dict[str, Any]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None)
    for head in ("worker", "state", "fit", "computed", "late", "a load", "an expert", "there and back"):
        table.add_column(head, justify="left" if head in ("worker", "state") else "right")
    for each in report["workers"]:
        state = each["state"] + (f" ({each['why']})" if each["why"] else "")
        times = (
            f"{1e3 * each[key]:.2f} ms" for key in ("seconds_per_load", "seconds_per_expert", "seconds_there_and_back")
        )
        counts = (str(each[key]) for key in ("slots", "experts_computed", "deadlines_missed"))
        table.add_row(escape(each["name"]), escape(state), *counts, *times)
    return table
