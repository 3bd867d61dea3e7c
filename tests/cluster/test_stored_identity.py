"""Names, addresses, invitations, files. Would catch an invitation that is good twice or after its time, a secret that
others can read, a name that leaves the folder.
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace

import pytest

from smoe.cluster.stored_identity import (
    INVITATION_SECONDS,
    accepted,
    checked_name,
    clusters_folder,
    invitation,
    keep_worker,
    new_coordinator,
    read_coordinator,
    read_worker,
    store_coordinator,
)
from smoe.errors import ClusterError


def test_an_invitation_is_good_once_and_for_ten_minutes() -> None:
    coordinator, line = invitation(new_coordinator("home"), now=1000.0)
    worker = accepted(line, "shelf")
    assert (worker.cluster, worker.address, worker.main_key) == ("home", coordinator.address, coordinator.keys.public)
    assert worker.code is not None
    assert coordinator.expects_someone(1000.0 + INVITATION_SECONDS)
    assert coordinator.invited(worker.code, 1001.0 + INVITATION_SECONDS) is None, "too late"
    assert coordinator.invited("another", 1001.0) is None
    after = coordinator.invited(worker.code, 1001.0)
    assert after is not None
    assert after.invited(worker.code, 1001.0) is None, "used"
    assert worker.code not in str(coordinator), "main keeps a checksum"


def test_what_is_kept_comes_back_and_is_the_users_alone() -> None:
    coordinator, line = invitation(new_coordinator("home", "127.0.0.1:6000"))
    path = store_coordinator(coordinator.with_worker("shelf", "k" * 40))
    assert read_coordinator("home") == replace(coordinator, workers={"shelf": "k" * 40})
    worker = accepted(line, "shelf")
    keep_worker(worker)
    assert read_worker("home") == worker
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.is_relative_to(clusters_folder())
    store_coordinator(replace(coordinator, everywhere=True))
    assert read_coordinator("home").everywhere


def test_an_invitation_names_an_address_that_can_be_reached() -> None:
    _, line = invitation(new_coordinator("home", "fd00::5"))
    assert accepted(line, "shelf").address == "tcp://[fd00::5]:5717"
    with pytest.raises(ClusterError, match="every interface"):
        invitation(replace(new_coordinator("home"), address="tcp://0.0.0.0:5717"))


def test_who_may_come_is_said() -> None:
    coordinator = new_coordinator("home").with_worker("shelf", "k" * 40)
    assert coordinator.who_may_come() == "1 known worker by their keys, no others"
    expecting, _ = invitation(coordinator, now=1000.0)
    assert "workers with an invitation" in expecting.who_may_come(1001.0)
    assert "no others" in expecting.who_may_come(1001.0 + INVITATION_SECONDS)


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "ü", "x" * 64, "a b"])
def test_a_name_is_a_files_name(name: str) -> None:
    with pytest.raises(ClusterError, match="`cluster` is"):
        checked_name(name)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "home",
        "smoe://x/y",
        "smoe://h:1/n?key=short&code=c",
        "http://h:1/n?key=k&code=c",
        "smoe://[::1/n?key=k&code=c",
    ],
)
def test_what_is_no_invitation_is_refused(line: str) -> None:
    with pytest.raises(ClusterError, match="not an invitation"):
        accepted(line, "w")


def test_what_is_not_there_or_damaged_is_said() -> None:
    with pytest.raises(ClusterError, match="smoe cluster up"):
        read_coordinator("nowhere")
    path = store_coordinator(new_coordinator("home"))
    with pytest.raises(ClusterError, match="there are: home"):
        read_coordinator("nowhere")
    with pytest.raises(ClusterError, match="smoe cluster join"):
        read_worker("home")
    path.write_text('{"format": 1}', encoding="utf8")
    with pytest.raises(ClusterError, match="damaged"):
        read_coordinator("home")
    path.write_text('{"format": 99}', encoding="utf8")
    with pytest.raises(ClusterError, match="another version"):
        read_coordinator("home")
