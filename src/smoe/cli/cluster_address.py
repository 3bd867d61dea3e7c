"""Changes the address of a cluster when a command gives another one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from smoe.units import format_count

if TYPE_CHECKING:
    from smoe.cluster.stored_identity import Coordinator


def moved_to(coordinator: Coordinator, address: str) -> Coordinator:
    """Return the cluster with its new address on this machine. Warn about workers that know only the old address.

    Raises `ClusterError` for an address on which this machine cannot listen.
    """
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
        warn(
            f"the coordinator of the cluster {coordinator.name} now listens at {moved.address} instead of "
            f"{coordinator.address}{lost}"
        )
    return moved
