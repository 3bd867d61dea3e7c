"""`smoe cluster forget`: deletes a cluster's keys and state."""

from __future__ import annotations

from typing import Annotated

import typer

from smoe.cli.options import Debug, Json


def forget(
    name: Annotated[str, typer.Option("--name", help="The cluster's name.")],
    worker: Annotated[
        str | None,
        typer.Option(help="Delete only this worker of the cluster. \\[default: the whole cluster]", show_default=False),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete the keys and the state of a cluster, or of one worker, which is then no longer admitted.

    Deletes without confirmation and prints what it has deleted. Models and downloaded files stay.
    """
    from smoe.cli.console import output, print_json
    from smoe.load.check_zmq import check_zmq

    check_zmq()
    from smoe.cluster.forgetting import forget_cluster, forget_worker

    removed = forget_cluster(name) if worker is None else forget_worker(name, worker)
    if json:
        print_json({"cluster": name, "worker": worker, "removed": removed})
        return
    for each in removed:
        output().print(f"removed {each}" if "(process" not in each else each, soft_wrap=True, markup=False)
