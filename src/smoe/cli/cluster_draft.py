"""Runs a cluster's draft model (`smoe cluster join --draft`, or one process of `smoe cluster up --draft`), and
describes the state of a draft model in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.errors import ConfigError
from smoe.units import format_bytes

if TYPE_CHECKING:
    from smoe.cluster.stored_identity import Worker

Draft = Annotated[
    bool,
    typer.Option(
        "--draft",
        help="Run a draft model instead of a worker (smoe cluster up: in addition to the workers). A draft model is "
        "a quantised copy of the model that decodes one token ahead and so predicts which experts will be used; "
        "the coordinator uses it with --preset cluster or od-moe.",
    ),
]


def check_alone(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if options that apply to workers only are given for a draft model."""
    for name, value in given.items():
        if value is not None:
            owner = "`fetch`" if name == "precision" else "a worker"
            raise ConfigError(
                f"`{name}={value}` applies only to {owner}; a draft model (`draft`) gets its settings from the "
                f"coordinator: leave out `{name}`",
                setting=name,
                given=value,
                allowed="only without `draft`",
            )


def be_draft(me: Worker, model: str, threads: int | None) -> None:
    """Run a draft model until Ctrl-C, SIGTERM, or a refusal of the coordinator."""
    from dataclasses import replace

    from smoe.cli.cluster_work import serve_until_signal
    from smoe.cli.console import note
    from smoe.cluster.address import to_connect_to
    from smoe.cluster.draft_process import DraftProcess
    from smoe.cluster.stored_identity import keep_worker
    from smoe.load.remote_draft import DraftFiles

    to_connect_to(me.address)  # refuse a name that does not resolve before reading files
    files = DraftFiles(model, threads)
    note(
        f"draft model {me.name}: ready; waiting for the coordinator at {me.address}, which chooses the precision in "
        "which the draft model is loaded"
    )

    def changed(state: str) -> None:
        note(f"draft model {me.name}: {state}")
        if me.code is not None:
            keep_worker(replace(me, code=None))

    try:
        serve_until_signal(DraftProcess(me, files, changed))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"draft model {me.name} has ended") from None


def draft_line(report: Mapping[str, Any]) -> str:
    """Return one line that describes the state of a cluster's draft model, from the coordinator's report."""
    state = report["state"] + (f" ({report['why']})" if report["why"] else "")
    copy = f" in {report['precision']}" if report["precision"] else ""
    done = f"{report['tokens_followed']} tokens followed, {report['layers_named']} layers predicted"
    sent = format_bytes(report["bytes_sent"])
    return f"draft model {report['name']}{copy}: {state}; {done}, {sent} of keys and values sent"
