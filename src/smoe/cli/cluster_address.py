"""Changes of a cluster's address by commands."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from smoe.units import format_count

if TYPE_CHECKING:
    from smoe.cluster.identity import Main


def moved_to(main: Main, address: str) -> Main:
    """Return the cluster with this address of this machine, and warn about workers that know another one. Raises
    `ClusterError`."""
    from smoe.cli.console import warn
    from smoe.cluster.address import check_own, checked_address

    moved = replace(main, address=checked_address(address))
    if not main.everywhere:
        check_own(address)
    if moved.address != main.address:
        known = format_count(len(main.workers), "known worker")
        lost = f"; {known} will look for the coordinator at the old address: invite them again" if main.workers else ""
        warn(f"the cluster {main.name} moves to {moved.address}; it was at {main.address}{lost}")
    return moved
