"""`smoe cluster join --fetch` and `smoe cluster send`: transfers a model's files to workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoe.bounds import PRECISION
from smoe.cli.options import Debug, Model
from smoe.errors import ConfigError
from smoe.units import format_bytes, parse_rate

if TYPE_CHECKING:
    from smoe.cluster.identity import Worker

Fetch = Annotated[
    Path | None,
    typer.Option(help="Instead of MODEL: a folder into which the worker downloads the coordinator's model."),
]
Rate = Annotated[
    str | None, typer.Option(help="With --fetch: the highest download rate, e.g. 20MiB/s. \\[default: no limit]")
]


def send(
    model: Model = "demo",
    name: Annotated[str, typer.Option("--name", help="The cluster's name.")] = "home",
    precision: Annotated[
        str, typer.Option(help=f"Precision of the experts, the same as on the coordinator: {', '.join(PRECISION)}.")
    ] = "auto",
    rate: Annotated[
        str | None,
        typer.Option(help="The highest upload rate, to all workers together, e.g. 20MiB/s. \\[default: no limit]"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Send a model's files to workers that join with --fetch, and do nothing else.

    Ends with Ctrl-C, or when every worker of the cluster has all files. A running coordinator (smoe generate --cluster
    NAME) sends them, too, while no worker computes for it.
    """
    from smoe.cli.console import note
    from smoe.load.check_zmq import check_zmq

    check_zmq()
    from smoe.cluster.address import reach_of
    from smoe.cluster.file_sender import FileSender
    from smoe.cluster.identity import read_coordinator
    from smoe.load.worker_files import worker_files
    from smoe.models.checkpoint import whole_checkpoint
    from smoe.models.read_spec import read_spec
    from smoe.presets import configure

    coordinator, bytes_per_second = read_coordinator(name, "name"), None if rate is None else parse_rate(rate, "rate")
    spec, checkpoint = read_spec(model, configure(precision=precision)), whole_checkpoint(model, None)
    checkpoint.experts(spec)  # what could not be served is not sent
    paths = worker_files(checkpoint, spec)
    total = format_bytes(sum(path.stat().st_size for path in paths.values()))
    sender = FileSender(
        coordinator, paths, precision, bytes_per_second, lambda worker: note(f"worker {worker} has all files")
    )
    reach = reach_of(coordinator.address, coordinator.everywhere)
    note(f"listening for workers at {reach}; admitted: {coordinator.who_may_come()}")
    note(
        f"{len(paths)} files, {total}, are ready for workers that connect to {coordinator.address}; run on each "
        "worker's machine:"
    )
    note(f"smoe cluster join {coordinator.name} --fetch FOLDER (or with the line of smoe cluster invite)")
    try:
        sender.serve()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped sending files; files that workers have received stay there") from None
    note("every worker of the cluster has all files")


def check_fetch(model: str, fetch: Path | None, rate: str | None) -> None:
    """Raise `ConfigError` if options that go with `--fetch` exclude each other or are invalid."""
    if fetch is not None and model != "demo":
        raise ConfigError(
            f"`fetch={fetch}` downloads the coordinator's model, so the given model {model} has no effect; leave out "
            "the model or `fetch`",
            setting="fetch",
            given=str(fetch),
            allowed="only without MODEL",
        )
    if fetch is not None and fetch.expanduser().exists() and not fetch.expanduser().is_dir():
        raise ConfigError.out_of_bounds("fetch", str(fetch), "a folder, or a path that does not exist yet")
    if rate is not None:
        if fetch is None:
            raise ConfigError.idle("rate", rate, "`fetch`")
        parse_rate(rate, "rate")


def fetched(me: Worker, folder: Path, precision: str, rate: str | None) -> Worker:
    """Download all files of the model into the folder of `--fetch`. Return the worker's record without the invitation
    code, which is used up."""
    from smoe.cli.console import note, progress
    from smoe.cluster.fetching import Course, Fetcher
    from smoe.cluster.identity import keep_worker

    with progress("cluster join") as bars:
        task = bars.add_task(f"waiting for the coordinator at {me.address}", total=None, amount="")

        def on_course(course: Course) -> None:
            descriptions = {
                "the coordinator sums": "the coordinator is making checksums",
                "checking": f"checking {folder}",
            }
            amount = f"{format_bytes(course.done)} of {format_bytes(course.total)}"
            description = descriptions.get(course.what, "fetching")
            if bars.tasks[0].description != description:
                bars.reset(task, description=description, total=course.total, amount=amount)
            bars.update(task, completed=course.done, total=course.total, skipped=course.skipped, amount=amount)

        def on_change(words: str) -> None:
            note(f"worker {me.name}: {words}")
            keep_worker(fetcher.me)

        fetcher = Fetcher(
            me, folder.expanduser(), precision, None if rate is None else parse_rate(rate, "rate"), on_change, on_course
        )
        try:
            fetcher.fetch()
        except KeyboardInterrupt:
            again = f"continue with: smoe cluster join {me.cluster} --fetch {folder}"
            raise KeyboardInterrupt(f"worker {me.name} has ended; the downloaded files stay; {again}") from None
    note(f"worker {me.name}: {folder} has all files of the coordinator's model")
    return fetcher.me
