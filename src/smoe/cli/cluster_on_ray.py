"""`smoe cluster up --ray`: runs workers as actors on the nodes of a Ray cluster."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoe.cli.cluster_address import moved_to
from smoe.cli.cluster_workers import line_for_coordinator
from smoe.errors import ConfigError
from smoe.units import format_count

if TYPE_CHECKING:
    from smoe.cluster.stored_identity import Coordinator
    from smoe.cluster.worker import Served

MOST_WORKERS = 1024
_PANEL = "On Ray"
Room = tuple[int | None, int | None, str]
"""A worker's memory in bytes, its number of experts, and their precision."""
_TURN_SECONDS = 0.5
"""The longest time, in seconds, until a signal such as Ctrl-C has an effect."""


@dataclass(frozen=True)
class RayOptions:
    """The options of workers on Ray."""

    ray: Annotated[
        str | None,
        typer.Option(
            help="Start the workers on the nodes of a Ray cluster: HOST:PORT of its head, or auto to find it.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of workers, spread over the nodes. \\[default: one per node]",
            min=1,
            max=MOST_WORKERS,
            rich_help_panel=_PANEL,
        ),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            help="This machine's address in the nodes' network, on which the coordinator listens: HOST or "
            "tcp://HOST:PORT.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    allow_open_ray: Annotated[
        bool,
        typer.Option(
            "--allow-open-ray",
            help="Accept a Ray cluster that requires no token, on which anyone in the network can run programs.",
            rich_help_panel=_PANEL,
        ),
    ] = False

    def are_given(self, local: int | None) -> bool:
        """Return whether the options request workers on Ray.

        Raises `ConfigError` for options that exclude each other, and if the package ray is missing.
        """
        from smoe.cluster.on_ray import check_ray

        if self.ray is None:
            for name in ("workers", "address", "allow_open_ray"):
                if getattr(self, name):
                    raise ConfigError.idle(name, getattr(self, name), "`ray`")
            return False
        if local is not None:
            raise ConfigError(
                f"`local={local}` is a number of workers on this machine, and `ray` starts workers on other "
                "machines; leave out `local`, and give the number of workers with `workers`",
                setting="local",
                given=local,
                allowed="only without `ray`",
            )
        check_ray()
        return True


def up_on_ray(on_ray: RayOptions, name: str, threads: int | None, model: str, room: Room) -> None:
    """Start the workers on Ray's nodes, and restart those that end, until Ctrl-C."""
    from smoe.cli.console import note, warn
    from smoe.cluster.on_ray import OnRay, join_ray

    assert on_ray.ray is not None
    coordinator = _coordinator_of(name, on_ray.address)
    shows_logs = logging.getLogger("smoe").isEnabledFor(logging.INFO)
    token = token_file()
    if token is not None:
        warn(
            f"Ray's token file {token} can be read by other users of this machine, and anyone who reads it can run "
            f"programs on every node; run: chmod 600 {token}"
        )
    ray = join_ray(on_ray.ray, on_ray.allow_open_ray, shows_logs)
    there = str(Path(model).resolve()) if Path(model).exists() else model
    opening = partial(opened, there, *room)
    workers = OnRay(ray, coordinator, note, warn)
    try:
        workers.start(on_ray.workers, opening, threads)
        count = len(workers.names)
        note(
            f"Ray starts {format_count(count, 'worker')}; workers wait for a coordinator at {coordinator.address}. "
            "To start the coordinator, run in another terminal:"
        )
        note(line_for_coordinator(model, coordinator.name, count))
        while True:
            workers.turn(_TURN_SECONDS)
    finally:
        workers.close()


def opened(model: str, memory_bytes: int | None, slots: int | None, precision: str) -> Served:
    """Return the opened experts of a worker. The function is called on the node that computes them; importing this
    module does not import torch."""
    from smoe.load.worker_experts import open_experts
    from smoe.presets import configure

    return open_experts(model, memory_bytes, configure(precision=precision), slots)


def token_file() -> Path | None:
    """Return the path of the file that contains Ray's token, if other users can read it; else None. Ray itself creates
    the file readable for all users."""
    if os.name != "posix" or os.environ.get("RAY_AUTH_TOKEN"):
        return None
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path if path.exists() and path.stat().st_mode & 0o077 else None


def _coordinator_of(name: str, address: str | None) -> Coordinator:
    """Return the coordinator's record of the cluster of this name. If there is no such cluster, create it."""
    from smoe.cluster.stored_identity import (
        checked_name,
        clusters,
        new_coordinator,
        read_coordinator,
        store_coordinator,
    )

    is_known = checked_name(name, "name") in clusters()
    coordinator = read_coordinator(name) if is_known else new_coordinator(name, address or "127.0.0.1")
    if address is not None:
        coordinator = moved_to(coordinator, address)
    store_coordinator(coordinator)
    return coordinator
