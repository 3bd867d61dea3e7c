"""The members of a cluster, as stored on disk: keys, the coordinator's address, admitted workers, invitations.

    clusters/NAME/main.json        the coordinator's: its key pair, address, workers' names and keys, invitations
    clusters/NAME/worker.json      a worker's: its name and key pair, the coordinator's address and key
    clusters/NAME/up.json          the process that keeps this machine's workers running

The files are in the user's configuration folder, readable by the user only. An invitation is one line for the other
machine: the address, the coordinator's key, and a code that is valid once and for ten minutes. The coordinator stores
the code's checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import zmq

from smoe.cluster.address import checked_address
from smoe.errors import ClusterError
from smoe.units import format_count
from smoe.whole_file import partial_of, take_place, whole_file

_FORMAT = 1
INVITATION_SECONDS = 600
_PLACE = "XDG_CONFIG_HOME"
MOST_NAME = 63
"""The maximum number of characters of a name."""
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MOST_NAME - 1}}}")
_KEY = re.compile(r"[!-~]{40}")


@dataclass(frozen=True)
class KeyPair:
    """A key pair of CURVE (Curve25519), in Z85."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True)
class Coordinator:
    """The coordinator's record of its cluster."""

    name: str
    address: str
    """The address to which workers connect, such as `tcp://127.0.0.1:5717`."""
    keys: KeyPair
    workers: dict[str, str] = field(default_factory=dict)
    """The public keys of admitted workers, by name."""
    invitations: dict[str, float] = field(default_factory=dict)
    """The time at which each invitation expires, in Unix time, by the checksum of its code."""
    everywhere: bool = False
    """Whether the coordinator listens on all of the machine's interfaces, not only at `address`."""
    drafts: list[str] = field(default_factory=list)
    """The names of the workers that are draft models."""

    def with_worker(self, name: str, key: str) -> Coordinator:
        """Return the cluster with a worker added; it replaces a worker of that name."""
        return replace(self, workers=self.workers | {name: key})

    def with_role(self, name: str, is_draft: bool) -> Coordinator:
        """Return the cluster with a worker marked as a draft model, or as a worker that computes experts."""
        others = [each for each in self.drafts if each != name]
        return replace(self, drafts=[*others, name] if is_draft else others)

    def without_worker(self, key: str) -> Coordinator:
        """Return the cluster without the worker with this key."""
        left = {name: its_key for name, its_key in self.workers.items() if its_key != key}
        return replace(self, workers=left, drafts=[name for name in self.drafts if name in left])

    def invited(self, code: str, now: float | None = None) -> Coordinator | None:
        """Return the cluster without the invitation that has this code; None if the code is not valid."""
        now, digest = time.time() if now is None else now, _digest(code)
        until = self.invitations.get(digest)
        if until is None or until < now:
            return None
        return replace(self, invitations={each: end for each, end in self.invitations.items() if each != digest})

    def who_may_come(self, now: float | None = None) -> str:
        """Return a sentence for the user that says which machines can connect."""
        known = format_count(len(self.workers), "known worker")
        if not self.expects_someone(now):
            return f"{known} by their keys, no others"
        return f"{known} by their keys, and for some minutes workers with an invitation"

    def expects_someone(self, now: float | None = None) -> bool:
        """Return whether an invitation is still valid, so that another worker may join."""
        now = time.time() if now is None else now
        return any(until >= now for until in self.invitations.values())


@dataclass(frozen=True)
class Worker:
    """A worker's record of its cluster."""

    cluster: str
    name: str
    address: str
    main_key: str
    keys: KeyPair
    code: str | None = None
    """The invitation's code, until the worker is admitted."""


def clusters_folder() -> Path:
    """Return the folder of all clusters; it need not exist."""
    if os.environ.get(_PLACE):
        return Path(os.environ[_PLACE]) / "smoe" / "clusters"
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA", str(Path.home()))) / "smoe" / "clusters"
    return Path.home() / ".config" / "smoe" / "clusters"


def is_name(name: str) -> bool:
    """Return whether a cluster or worker may have this name."""
    return _NAME.fullmatch(name) is not None


def checked_name(name: str, setting: str = "cluster") -> str:
    """Return `name` if it is allowed for a cluster or worker. Raises `ClusterError` for a name that cannot be a file
    name."""
    if not is_name(name):
        raise ClusterError(
            f"`{setting}` is {name!r:.80}; a name consists of letters, digits, '.', '_' and '-', and begins with a "
            "letter or digit",
            setting=setting,
            given=name,
            allowed="letters, digits, '.', '_', '-'",
        )
    return name


def new_coordinator(name: str, address: str = "127.0.0.1") -> Coordinator:
    """Return a new cluster without workers."""
    return Coordinator(checked_name(name, "name"), checked_address(address), KeyPair.new())


def clusters() -> list[str]:
    """Return the names of the clusters of which this machine is the coordinator."""
    return sorted(each.parent.name for each in clusters_folder().glob("*/main.json"))


def read_coordinator(name: str, setting: str = "cluster") -> Coordinator:
    """Return the record of the cluster of this name, of which this machine must be the coordinator. `setting`: the
    setting that contains the name, for error messages.

    Raises `ClusterError` if there is no such cluster, or if its file is damaged.
    """
    path = _path(checked_name(name, setting), "main")
    stored = _read(path)
    if stored is None:
        known = clusters()
        here = f"; there are: {', '.join(known)}" if known else ""
        raise ClusterError(
            f"there is no cluster {name!r} on this machine{here}; create it with smoe cluster up",
            setting=setting,
            given=name,
            allowed=", ".join(known) or "none yet",
        )
    try:
        keys, everywhere = KeyPair(**stored["keys"]), stored.get("everywhere", False)
        invitations, drafts = stored["invitations"], stored.get("shadows", [])
        return Coordinator(name, stored["address"], keys, stored["workers"], invitations, everywhere, drafts)
    except (KeyError, TypeError) as error:
        raise ClusterError(f"{path} is damaged ({error}); delete its folder and start the cluster again") from error


def store_coordinator(coordinator: Coordinator) -> Path:
    """Write the cluster's file atomically. Return its path. Raises `OSError`."""
    live = {code: until for code, until in coordinator.invitations.items() if until >= time.time()}
    stored = asdict(replace(coordinator, invitations=live))
    stored["shadows"] = stored.pop("drafts")  # the file's key is older than the name
    return _keep(_path(coordinator.name, "main"), stored)


def read_worker(name: str) -> Worker:
    """Return this machine's worker of the cluster of this name. Raises `ClusterError`."""
    path = _path(name, "worker")
    stored = _read(path)
    if stored is None:
        raise ClusterError(
            f"this machine has not joined a cluster {name!r}; run smoe cluster join with the line that smoe cluster "
            "invite prints on the coordinator",
            setting="cluster",
            given=name,
            allowed="a cluster that was joined",
        )
    try:
        return Worker(**(stored | {"keys": KeyPair(**stored["keys"])}))
    except (KeyError, TypeError) as error:
        raise ClusterError(f"{path} is damaged ({error}); delete its folder and join again") from error


def keep_worker(worker: Worker) -> Path:
    """Write the worker's file atomically. Return its path. Raises `OSError`."""
    return _keep(_path(worker.cluster, "worker"), asdict(worker))


def joined() -> list[str]:
    """Return the names of the clusters in which this machine is a worker."""
    return sorted(each.parent.name for each in clusters_folder().glob("*/worker.json"))


def keep_keeper(name: str, process: int, began: float) -> Path:
    """Store the number and the start time (Unix time) of the process that keeps this cluster's workers on this machine
    running. Return the file's path. Raises `OSError`."""
    return _keep(_path(name, "up"), {"process": process, "began": began})


def read_keeper(name: str) -> dict[str, Any] | None:
    """Return the process that last kept workers of this cluster running on this machine: `process`, its number, and
    `began`, its start time. None if there was no such process."""
    return _read(_path(name, "up"))


def keep_status(
    name: str, workers: list[dict[str, Any]], draft: dict[str, Any] | None = None, is_over: bool = False
) -> Path:
    """Store the present state of the cluster's workers, which is the final state if the coordinator ends. Return the
    file's path. Raises `OSError`."""
    path, at = _path(name, "status"), 0 if is_over else time.time()
    content = {"format": _FORMAT, "at": at, "process": os.getpid(), "workers": workers, "shadow": draft}
    partial = partial_of(path)
    partial.write_text(json.dumps(content), encoding="utf8")  # no fsync, which would disturb reads of experts
    take_place(partial, path)
    return path


def read_status(name: str) -> dict[str, Any] | None:
    """Return the last stored state of the coordinator: `at` (Unix time; 0 if the coordinator has ended), `process` and
    `workers`. None if the coordinator has never run."""
    return _read(_path(name, "status"))


def invitation(coordinator: Coordinator, now: float | None = None) -> tuple[Coordinator, str]:
    """Return the cluster with a new invitation, and the line of text that the other machine must be given."""
    checked_address(coordinator.address)
    code, now = secrets.token_urlsafe(18), time.time() if now is None else now
    expecting = replace(coordinator, invitations=coordinator.invitations | {_digest(code): now + INVITATION_SECONDS})
    parts = urlsplit(coordinator.address)
    return (
        expecting,
        f"smoe://{parts.netloc}/{coordinator.name}?{urlencode({'key': coordinator.keys.public, 'code': code})}",
    )


def accepted(line: str, worker_name: str) -> Worker:
    """Return this machine's record as a new worker, made from an invitation's line of text. Raises `ClusterError` for
    an invalid line."""
    try:
        parts = urlsplit(line.strip())
    except ValueError:  # half an IPv6 address
        parts = urlsplit("")
    given = parse_qs(parts.query)
    key, code, cluster = given.get("key", [""])[0], given.get("code", [""])[0], parts.path.strip("/")
    if parts.scheme != "smoe" or not _KEY.fullmatch(key) or not code:
        raise ClusterError(
            f"{line!r:.80} is not an invitation; give the whole line that smoe cluster invite prints, in quotes",
            setting="invitation",
            given=line[:80],
            allowed="smoe://HOST:PORT/NAME?key=...&code=...",
        )
    address = checked_address(f"tcp://{parts.netloc}")
    return Worker(checked_name(cluster), checked_name(worker_name, "worker"), address, key, KeyPair.new(), code)


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()


def _path(name: str, role: str) -> Path:
    return clusters_folder() / checked_name(name) / f"{role}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """Return a file's content; None where it does not exist."""
    try:
        stored = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"{path} cannot be read ({error}); delete the folder of this file, then create the cluster or join it again"
        ) from error
    if not isinstance(stored, dict) or stored.pop("format", None) != _FORMAT:
        raise ClusterError(
            f"{path} was written by another version of smoe; delete the folder of this file, then create the cluster "
            "or join it again"
        )
    return stored


def _keep(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with whole_file(path) as file:
        if os.name == "posix":
            os.fchmod(file.fileno(), 0o600)
        file.write((json.dumps({"format": _FORMAT} | content, indent=2) + "\n").encode())
    return path
