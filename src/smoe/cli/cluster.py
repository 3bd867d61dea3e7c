"""`smoe cluster`: several machines serve one model."""

from __future__ import annotations

from typing import Annotated

import typer

from smoe.bounds import MOST_THREADS, PRECISION
from smoe.cli.cluster_address import moved_to
from smoe.cli.cluster_files import Fetch, Rate, check_fetch, fetched, send
from smoe.cli.cluster_forget import forget
from smoe.cli.cluster_on_ray import RayOptions, up_on_ray
from smoe.cli.cluster_plan import plan
from smoe.cli.cluster_shadow import Shadow, be_shadow, check_alone
from smoe.cli.cluster_status import status
from smoe.cli.cluster_work import DEFAULT_WORKER_MEMORY, Room, Torch, be_worker, check
from smoe.cli.cluster_workers import keep_running, line_for_main, local_workers, shadow_of
from smoe.cli.options import Debug, Json, Model
from smoe.cli.spread import with_options
from smoe.errors import ClusterError, ConfigError
from smoe.safe_path import module_line
from smoe.units import format_count

MOST_LOCAL = 64
DEFAULT_LOCAL = 2
DEFAULT_NAME = "local"

Name = Annotated[str, typer.Option("--name", help="The cluster's name.")]
Memory = Annotated[
    str | None,
    typer.Option("--worker-memory", help="For experts, of every worker.", show_default=DEFAULT_WORKER_MEMORY),
]
Slots = Annotated[
    int | None,
    typer.Option(
        help="Instead: room for so many experts; 1: no cache, 2: none but for the one that is read meanwhile.", min=1
    ),
]
Threads = Annotated[int | None, typer.Option(help="Computing threads of a worker.", min=1, max=MOST_THREADS)]
Precision = Annotated[str, typer.Option(help=f"The experts as the coordinator has them: {', '.join(PRECISION)}.")]

app = typer.Typer(
    help="Several machines serve one model: start workers, invite others, see who is there.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"""On one machine:

smoe cluster up demo --local 2 --worker-memory 8MiB

{line_for_main("demo", DEFAULT_NAME, DEFAULT_LOCAL)}

With others: smoe cluster invite --name home --address 192.168.1.5 here, and
what it prints there. The coordinator is whoever runs smoe generate --cluster.
""",
)


def up(
    on_ray: RayOptions,
    model: Model = "demo",
    local: Annotated[
        int | None, typer.Option(help="Workers on this machine.", min=1, max=MOST_LOCAL, show_default="2")
    ] = None,
    worker_memory: Memory = None,
    slots: Slots = None,
    name: Name = DEFAULT_NAME,
    threads: Threads = None,
    precision: Precision = "auto",
    torch: Torch = None,
    shadow: Shadow = False,
    debug: Debug = False,
) -> None:
    """Start workers on this machine, or on a Ray cluster's nodes, and keep them running until Ctrl-C.

    The cluster is made where there is none of that name; it listens on the loopback interface only, unless an address
    was named (smoe cluster invite). Workers wait for the coordinator: smoe generate --cluster NAME.
    """
    from smoe.cli.console import note
    from smoe.load.check_zmq import check_zmq
    from smoe.models.files import named_elsewhere

    check_zmq()
    room, is_on_ray = Room.of(worker_memory, slots), on_ray.are_given(local)
    for setting, said in {"torch": torch, "shadow": shadow or None}.items():
        if is_on_ray and said is not None:
            raise ConfigError.idle(setting, said, "`local`")
    check(model, room, precision, torch)
    if is_on_ray:
        up_on_ray(on_ray, name, threads, model, (room.memory_bytes, room.slots, precision))
        return
    local = local or DEFAULT_LOCAL
    main, workers = local_workers(name, local, shadow)
    given = ["--precision", precision, *room.as_given]
    given += [] if threads is None else ["--threads", str(threads)]
    given += [] if torch is None else ["--torch" if torch else "--no-torch"]
    work = module_line("smoe.__main__", "cluster", "work", named_elsewhere(model), "--name")
    lines = {each: [*work, each, *given] for each in workers}
    if shadow:
        lines[shadow_of(name)] = [*work, shadow_of(name), "--shadow", "--threads", str(threads or 1)]
    note(f"starting {format_count(local, 'worker')}{' and a draft model' if shadow else ''}")

    def started() -> None:
        note(f"they wait for a coordinator at {main.address}; in another terminal:")
        note(line_for_main(model, main.name, local, shadow))

    keep_running(lines, started)


def invite(
    name: Name = "home",
    address: Annotated[
        str | None, typer.Option(help="This machine's address in your network, HOST or tcp://HOST:PORT.")
    ] = None,
    every_interface: Annotated[
        bool | None,
        typer.Option(
            "--every-interface/--one-interface", help="Listen at all of this machine's interfaces, or at that address."
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print a line that lets one other machine join, once, within ten minutes.

    Who joins is let in when the coordinator runs (smoe generate --cluster NAME), also if it runs already.
    """
    from dataclasses import replace

    from smoe.cli.console import note, output, print_json
    from smoe.load.check_zmq import check_zmq

    check_zmq()
    from smoe.cluster import identity
    from smoe.cluster.address import reach_of
    from smoe.cluster.identity import INVITATION_SECONDS, checked_name, invitation, keep_main, new_main

    if checked_name(name, "name") in identity.clusters():
        main = identity.read_main(name)
    else:
        if address is None:
            raise ConfigError(
                f"there is no cluster {name!r} yet; give the address that it is to listen at: --address HOST",
                setting="address",
                given=None,
                allowed="this machine's address in your network",
            )
        main = new_main(name, address)
    if every_interface is not None:
        main = replace(main, everywhere=every_interface)
    if address is not None:
        main = moved_to(main, address)
    reach = reach_of(main.address, main.everywhere)
    main, line = invitation(main)
    keep_main(main)
    if json:
        print_json({"cluster": main.name, "address": main.address, "invitation": line, "seconds": INVITATION_SECONDS})
        return
    note(
        f"good once, for {INVITATION_SECONDS // 60} minutes; the coordinator will listen at {reach}. On the other "
        "machine:"
    )
    output().print(
        f"smoe cluster join '{line}' MODEL --worker-memory 4GiB", soft_wrap=True, markup=False, highlight=False
    )


def join(
    invitation: Annotated[
        str, typer.Argument(help="The line of smoe cluster invite, in quotes; or NAME, once joined.")
    ],
    model: Model = "demo",
    fetch: Fetch = None,
    rate: Rate = None,
    worker_memory: Memory = None,
    slots: Slots = None,
    worker: Annotated[str | None, typer.Option(help="What this worker is called. \\[default: the host's name]")] = None,
    threads: Threads = None,
    precision: Precision = "auto",
    torch: Torch = None,
    shadow: Shadow = False,
    debug: Debug = False,
) -> None:
    """Be a worker of another machine's cluster, or run its draft model (--shadow), until Ctrl-C.

    The same model must lie here, too; --fetch FOLDER instead of MODEL downloads the coordinator's files into a folder
    first (once, verified; interrupted, it goes on where it was), while the coordinator runs, or smoe cluster send does
    there. A draft model needs the pack that the coordinator's preset asks for as well: smoe pack --precision int4 here,
    or fetched by --precision int4.
    """
    from smoe.load.check_zmq import check_zmq

    check_fetch(model, fetch, rate)
    if shadow:
        packs = None if precision == "auto" or fetch is not None else precision
        check_alone({"worker_memory": worker_memory, "slots": slots, "torch": torch, "precision": packs})
    check_zmq()
    import socket

    from smoe.cluster.identity import accepted, is_name, read_worker

    if not invitation.startswith("smoe:") and not is_name(invitation):
        raise ClusterError(
            f"{invitation!r:.80} is neither an invitation (the whole line of smoe cluster invite, in quotes) nor the "
            "name of a cluster that was joined",
            setting="invitation",
            given=invitation[:80],
            allowed="smoe://HOST:PORT/NAME?key=...&code=..., or a cluster's name",
        )
    if invitation.startswith("smoe:"):
        host = "".join(c for c in socket.gethostname() if c.isascii() and (c.isalnum() or c in "._-")).lstrip("._-")
        me = accepted(invitation, worker or host[:63] or "worker")
    else:
        me = read_worker(invitation)
    if fetch is not None:
        me, model = fetched(me, fetch, precision, rate), str(fetch.expanduser().absolute())
    if shadow:
        be_shadow(me, model, threads)
    else:
        be_worker(me, model, Room.of(worker_memory, slots), threads, precision, torch)


def work(
    model: Model = "demo",
    name: Name = DEFAULT_NAME,
    worker_memory: Memory = None,
    slots: Slots = None,
    threads: Threads = None,
    precision: Precision = "auto",
    torch: Torch = None,
    shadow: Shadow = False,
) -> None:
    """One of the workers of `smoe cluster up`, or its shadow."""
    from smoe.cluster.identity import read_worker

    if shadow:
        be_shadow(read_worker(name), model, threads)
    else:
        be_worker(read_worker(name), model, Room.of(worker_memory, slots), threads, precision, torch)


for _command in (up, invite, join, send, status, plan, forget):
    app.command(help=_command.__doc__)(with_options(_command))
app.command(hidden=True)(with_options(work))
