"""Changes of a cluster's address by commands."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from smoe.units import format_count

if TYPE_CHECKING:
    from smoe.cluster.identity import Coordinator


def moved_to(coordinator: Coordinator, address: str) -> Coordinator:
    """Return the cluster with this address of this machine, and warn about workers that know another one. Raises
    `ClusterError`."""
    from smoe.cli.console import warn
    from smoe.cluster.address import check_own, checked_address

    moved = replace(coordinator, address=checked_address(address))
    if not coordinator.everywhere:
        check_own(address)
    if moved.address != coordinator.address:
        known = format_count(len(coordinator.workers), "known worker")
        lost = (
            f"; {known} will look for the coordinator at the old address: invite them again"
            if coordinator.workers
            else ""
        )
        warn(f"the cluster {coordinator.name} moves to {moved.address}; it was at {coordinator.address}{lost}")
    return moved
