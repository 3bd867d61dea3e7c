"""`smoe cluster`: runs one model on several machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smoe.bounds import MOST_THREADS, PRECISION
from smoe.cli.cluster_address import moved_to
from smoe.cli.cluster_draft import Draft, be_draft, check_alone
from smoe.cli.cluster_forget import forget
from smoe.cli.cluster_on_ray import RayOptions, up_on_ray
from smoe.cli.cluster_plan import plan
from smoe.cli.cluster_status import status
from smoe.cli.cluster_work import DEFAULT_WORKER_MEMORY, Torch, WorkerRoom, be_worker, check
from smoe.cli.cluster_workers import draft_of, keep_running, line_for_coordinator, local_workers
from smoe.cli.options import Debug, Json, Model
from smoe.cli.spread import with_options
from smoe.errors import ClusterError, ConfigError
from smoe.safe_path import module_line
from smoe.units import format_count

if TYPE_CHECKING:
    from smoe.cluster.stored_identity import Coordinator

MOST_LOCAL = 64
DEFAULT_LOCAL = 2
DEFAULT_NAME = "local"

Name = Annotated[str, typer.Option("--name", help="The cluster's name.")]
Memory = Annotated[
    str | None,
    typer.Option(
        "--worker-memory",
        help=f"Memory for the experts that each worker holds, e.g. 2GiB. \\[default: {DEFAULT_WORKER_MEMORY}]",
    ),
]
Slots = Annotated[
    int | None,
    typer.Option(
        help="Instead of --worker-memory: number of experts that a worker holds. 1: the worker reads an expert and "
        "then computes it. 2: the worker reads an expert while it computes another.",
        min=1,
    ),
]
Threads = Annotated[
    int | None, typer.Option(help="Number of threads that compute in a worker.", min=1, max=MOST_THREADS)
]
Precision = Annotated[
    str, typer.Option(help=f"Precision of the experts, the same as on the coordinator: {', '.join(PRECISION)}.")
]

app = typer.Typer(
    help="Run one model on several machines: start workers, invite other machines, show their state.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"""On one machine:

smoe cluster up demo --local 2 --worker-memory 8MiB

{line_for_coordinator("demo", DEFAULT_NAME, DEFAULT_LOCAL)}

With other machines: here smoe cluster invite --name home --address
192.168.1.5, there the command that it prints. The coordinator is smoe
generate --cluster.
""",
)


def up(
    on_ray: RayOptions,
    model: Model = "demo",
    local: Annotated[
        int | None,
        typer.Option(help=f"Number of workers on this machine. \\[default: {DEFAULT_LOCAL}]", min=1, max=MOST_LOCAL),
    ] = None,
    worker_memory: Memory = None,
    slots: Slots = None,
    name: Name = DEFAULT_NAME,
    threads: Threads = None,
    precision: Precision = "auto",
    torch: Torch = None,
    draft: Draft = False,
    debug: Debug = False,
) -> None:
    """Start workers on this machine, or on the nodes of a Ray cluster, and restart those that end, until Ctrl-C.

    A cluster of that name is created if there is none. It listens on the loopback interface only, unless smoe cluster
    invite has given it an address. Workers wait for the coordinator: smoe generate --cluster NAME.
    """
    from smoe.cli.console import note
    from smoe.load.check_zmq import check_zmq
    from smoe.models.files import named_elsewhere

    check_zmq()
    room, is_on_ray = WorkerRoom.of(worker_memory, slots), on_ray.are_given(local)
    for setting, value in {"torch": torch, "draft": draft or None}.items():
        if is_on_ray and value is not None:
            raise ConfigError.idle(setting, value, "`local`")
    check(model, room, precision, torch)
    if is_on_ray:
        up_on_ray(on_ray, name, threads, model, (room.memory_bytes, room.slots, precision))
        return
    local = local or DEFAULT_LOCAL
    coordinator, workers = local_workers(name, local, draft)
    given = ["--precision", precision, *room.as_given]
    given += [] if threads is None else ["--threads", str(threads)]
    given += [] if torch is None else ["--torch" if torch else "--no-torch"]
    work = module_line("smoe.__main__", "cluster", "work", named_elsewhere(model), "--name")
    lines = {each: [*work, each, *given] for each in workers}
    if draft:
        lines[draft_of(name)] = [*work, draft_of(name), "--draft", "--threads", str(threads or 1)]
    note(f"starting {format_count(local, 'worker')}{' and a draft model' if draft else ''}")

    def started() -> None:
        note(
            f"the workers wait for a coordinator at {coordinator.address}; to start the coordinator, run in another "
            "terminal:"
        )
        note(line_for_coordinator(model, coordinator.name, local, draft))

    keep_running(lines, started)


def invite(
    name: Name = "home",
    address: Annotated[
        str | None,
        typer.Option(help="This machine's address in your network, to which workers connect: HOST or tcp://HOST:PORT."),
    ] = None,
    every_interface: Annotated[
        bool | None,
        typer.Option(
            "--every-interface/--one-interface",
            help="--every-interface: the coordinator listens on all network interfaces of this machine. "
            "--one-interface: it listens only on the interface of --address. \\[default: as chosen before; in a "
            "new cluster --one-interface]",
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print a command line that lets one other machine join, once, within ten minutes.

    The coordinator (smoe generate --cluster NAME) admits the new worker, also while it is running already.
    """
    from smoe.cli.console import note, output, print_json
    from smoe.load.check_zmq import check_zmq

    check_zmq()
    from smoe.cluster.address import reach_of
    from smoe.cluster.stored_identity import INVITATION_SECONDS, invitation, store_coordinator

    coordinator = _inviting(name, address, every_interface)
    reach = reach_of(coordinator.address, coordinator.everywhere)
    coordinator, line = invitation(coordinator)
    store_coordinator(coordinator)
    if json:
        print_json(
            {
                "cluster": coordinator.name,
                "address": coordinator.address,
                "invitation": line,
                "seconds": INVITATION_SECONDS,
            }
        )
        return
    note(
        f"the invitation below admits one machine, once, within {INVITATION_SECONDS // 60} minutes; the coordinator "
        f"will listen at {reach}. Run on the other machine:"
    )
    output().print(
        f"smoe cluster join '{line}' MODEL --worker-memory 4GiB", soft_wrap=True, markup=False, highlight=False
    )


def _inviting(name: str, address: str | None, every_interface: bool | None) -> Coordinator:
    """Return the coordinator of the cluster, new or stored, with the address and interfaces that were given."""
    from dataclasses import replace

    from smoe.cluster.stored_identity import checked_name, clusters, new_coordinator, read_coordinator

    if checked_name(name, "name") in clusters():
        coordinator = read_coordinator(name)
    elif address is not None:
        coordinator = new_coordinator(name, address)
    else:
        raise ConfigError(
            f"there is no cluster {name!r} yet; to create it, give the address on which the coordinator listens: "
            "--address HOST",
            setting="address",
            given=None,
            allowed="this machine's address in your network",
        )
    if every_interface is not None:
        coordinator = replace(coordinator, everywhere=every_interface)
    return coordinator if address is None else moved_to(coordinator, address)


def join(
    invitation: Annotated[
        str,
        typer.Argument(
            help="The line that smoe cluster invite has printed, in quotes; or the cluster's name, if this machine has "
            "joined it before."
        ),
    ],
    model: Model = "demo",
    worker_memory: Memory = None,
    slots: Slots = None,
    worker: Annotated[str | None, typer.Option(help="Name that this worker gets. \\[default: the host's name]")] = None,
    threads: Threads = None,
    precision: Precision = "auto",
    torch: Torch = None,
    draft: Draft = False,
    debug: Debug = False,
) -> None:
    """Run a worker of another machine's cluster, or its draft model (--draft), until Ctrl-C.

    The same model must be on this machine: download it from the hub, or copy its folder, for example with rsync. A
    draft model also needs the pack that the coordinator's preset uses: run smoe pack --precision int4 here, or copy it.
    """
    from smoe.load.check_zmq import check_zmq

    if draft:
        packs = None if precision == "auto" else precision
        check_alone({"worker_memory": worker_memory, "slots": slots, "torch": torch, "precision": packs})
    check_zmq()
    import socket

    from smoe.cluster.stored_identity import accepted, is_name, read_worker

    if not invitation.startswith("smoe:") and not is_name(invitation):
        raise ClusterError(
            f"{invitation!r:.80} is neither an invitation (the whole line of smoe cluster invite, in quotes) nor the "
            "name of a cluster that this machine has joined",
            setting="invitation",
            given=invitation[:80],
            allowed="smoe://HOST:PORT/NAME?key=...&code=..., or a cluster's name",
        )
    if invitation.startswith("smoe:"):
        host = "".join(c for c in socket.gethostname() if c.isascii() and (c.isalnum() or c in "._-")).lstrip("._-")
        me = accepted(invitation, worker or host[:63] or "worker")
    else:
        me = read_worker(invitation)
    if draft:
        be_draft(me, model, threads)
    else:
        be_worker(me, model, WorkerRoom.of(worker_memory, slots), threads, precision, torch)


def work(
    model: Model = "demo",
    name: Name = DEFAULT_NAME,
    worker_memory: Memory = None,
    slots: Slots = None,
    threads: Threads = None,
    precision: Precision = "auto",
    torch: Torch = None,
    draft: Draft = False,
) -> None:
    """Run one of the workers of `smoe cluster up`, or its draft model."""
    from smoe.cluster.stored_identity import read_worker

    if draft:
        be_draft(read_worker(name), model, threads)
    else:
        be_worker(read_worker(name), model, WorkerRoom.of(worker_memory, slots), threads, precision, torch)


for _command in (up, invite, join, status, plan, forget):
    app.command(help=_command.__doc__)(with_options(_command))
app.command(hidden=True)(with_options(work))
