"""Runs workers on the nodes of a Ray cluster. Ray places the workers, restarts those that die, and stores their logs.
Requests to experts and their results do not pass through Ray.

    this machine (smoe cluster up)      a Ray actor, on a node
    begin ---------------------------> opens the experts, makes its keys
          <--------- its public key --
    stores the key as admitted
    serve ---------------------------> runs a `WorkerProcess`, which connects to the coordinator by ZeroMQ
          <- the reason why it has ended, or that its process has died: then all begins again

A worker needs two calls of Ray in its life, one more at its end, and none for a token. The secret key never leaves the
worker's process: neither Ray's object store nor a node's disk contains secrets.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from smoe.cluster.address import to_listen_at
from smoe.cluster.stored_identity import Coordinator, KeyPair, Worker, checked_name, read_coordinator, store_coordinator
from smoe.errors import ClusterError, ConfigError, SmoeError
from smoe.safe_path import WORKING_FOLDER, child_environment, code_line

if TYPE_CHECKING:
    from smoe.cluster.worker import Served, WorkerProcess

_PLACING_SECONDS = 60.0
"""Seconds for Ray to place all workers."""
_ENDING_SECONDS = 5.0
"""Seconds for the workers to end in order."""
_LEAST_RUN_SECONDS = 5.0
"""A worker that ends sooner than this is not restarted."""
_PAUSE_SECONDS = 2.0
"""Seconds before an unreachable worker is called again: Ray takes half a minute to declare a node lost."""
_PROBE_SECONDS = 60.0
_CLOSED = 3
_PROBE = f"""
import socket, sys
from ray._private import services
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
address = services.canonicalize_bootstrap_address_or_die(sys.argv[1])
host, _, port = address.rpartition(":")
socket.create_connection((host.strip("[]"), int(port)), 5).close()  # Ray itself would try for 40 s
try:
    GcsClient(address=address).internal_kv_get(b"smoe", None, timeout=5)
except AuthenticationError:
    sys.exit({_CLOSED})
"""
"""The program of a process that tries to connect to a Ray cluster's head, with or without a token."""
_ADDRESSES = "HOST:PORT of a Ray cluster's head, or auto"


class Actor:
    """The Ray actor that runs one worker. Its process itself makes no calls to Ray."""

    def __init__(self, me: Worker, opening: Callable[[], Served], threads: int | None) -> None:
        """`me`: the worker, still without keys. `opening` opens the experts. `threads`: the number of computing
        threads; by default as many as torch uses."""
        if threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to 1, and torch will read it
        self._me = replace(me, keys=KeyPair.new())
        self._opening, self._threads = opening, threads
        self._process: WorkerProcess | None = None
        self._served: Served | None = None
        self._is_ending = False

    def begin(self) -> dict[str, Any]:
        """Open the experts. Return `host`, `process`, the public `key` that the coordinator must admit, and `slots`. If
        opening fails, return the reason `why` instead of `key` and `slots`."""
        from smoe.machine.processor import set_compute_threads

        self._close()
        here = {"host": socket.gethostname(), "process": os.getpid()}
        set_compute_threads(self._threads)
        try:
            self._served = self._opening()
        except (SmoeError, OSError) as error:
            return here | {"why": str(error)}
        return here | {"key": self._me.keys.public, "slots": self._served.alone.slots}

    def serve(self, key: str) -> str | None:
        """Run the worker until `end` is called, or until the coordinator refuses it. Return the reason. Return None if
        `key` belongs to an earlier process of this actor."""
        from smoe.cluster.worker import WorkerProcess

        if self._served is None or key != self._me.keys.public:
            return None
        process = self._process = WorkerProcess(self._me, self._served, self._say)
        if self._is_ending:  # `end` did not find the process
            process.end()
        try:
            process.serve()
        except (SmoeError, OSError) as error:
            self._say(f"ends: {error}")
            return str(error)
        finally:
            self._close()
        return "it was asked to end"

    def end(self) -> None:
        """Make `serve` return soon."""
        self._is_ending = True
        if self._process is not None:
            self._process.end()
        else:
            self._close()

    def _close(self) -> None:
        if self._served is not None:
            self._served.alone.close()
        self._process = self._served = None

    def _say(self, words: str) -> None:
        """Write a message to the log that Ray stores."""
        print(f"worker {self._me.name}: {words}", file=sys.stderr, flush=True)


def join_ray(address: str, is_open_allowed: bool, shows_logs: bool) -> Any:
    """Connect to a running Ray cluster and return the module `ray`. The cluster is given as `HOST:PORT` of its head, or
    as `auto` for the cluster of this machine.

    Raises `ConfigError` if the package ray is missing. Raises `ClusterError` if there is no such cluster, or if the
    cluster accepts any program that reaches its ports (unless `is_open_allowed`).
    """
    if address == "local" or "://" in address:  # for Ray: start one; or be no node of it
        raise ClusterError(
            f"`ray` is {address!r:.80}, which is not a running Ray cluster with this machine as a node; give "
            "HOST:PORT of the cluster's head, or auto",
            setting="ray",
            given=address,
            allowed=_ADDRESSES,
        )
    check_ray()
    if _answers(address, "disabled"):
        if not is_open_allowed:
            raise ClusterError(
                f"the Ray cluster at {address} requires no token: anyone who can reach its ports can run programs on "
                "every node. Start it with RAY_AUTH_MODE=token on every node (docs/cluster.md), or allow it "
                "(`allow_open_ray`)",
                setting="ray",
                given=address,
                allowed="a Ray cluster with RAY_AUTH_MODE=token",
            )
    elif not _answers(address, os.environ.setdefault("RAY_AUTH_MODE", "token")):  # Ray reads it when it is imported
        raise _no_cluster(address, "it requires a token, and this machine's (~/.ray/auth_token) is missing or differs")
    import ray

    ending = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=shows_logs, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise _no_cluster(address, str(error)) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ending)  # Ray has replaced the handler
    return ray


def check_ray() -> None:
    """Raise `ConfigError` where the package ray is not installed."""
    if sys.modules.get("ray") is None and find_spec("ray") is None:
        raise ConfigError(
            "workers on Ray need the package ray, which is not installed; run, in the copy of the repository: pip "
            "install '.[ray]'",
            setting="ray",
            given="a Ray cluster",
            allowed="none without the package ray",
        )


def _answers(address: str, mode: str) -> bool:
    """Return whether the head of a Ray cluster accepts a connection with a token (`mode` token) or without one (`mode`
    disabled). A separate process connects, because Ray reads its settings only once in a process.

    Raises `ClusterError` if the head does not answer.
    """
    line, environment = code_line(_PROBE, address), child_environment() | {"RAY_AUTH_MODE": mode}
    try:
        asked = subprocess.run(
            line, env=environment, cwd=WORKING_FOLDER, capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise _no_cluster(address, f"no answer in {_PROBE_SECONDS:g} s") from error
    if asked.returncode not in (0, _CLOSED):
        raise _no_cluster(address, asked.stderr)
    return asked.returncode == 0


def _no_cluster(address: str, why: str) -> ClusterError:
    return ClusterError(
        f"the Ray cluster at `ray={address}` cannot be joined ({_last_line(why)}); is this machine a node of it (ray "
        "start)?",
        setting="ray",
        given=address,
        allowed=_ADDRESSES,
    )


def _last_line(error: object) -> str:
    """Return the last line of a traceback."""
    lines = str(error).strip().splitlines()
    return f"{lines[-1]:.200}" if lines else "no reason was given"


@dataclass(eq=False)
class _RayWorker:
    """The state of one worker that runs on Ray."""

    name: str
    actor: Any
    call: Any = None
    """The call of the actor that has not returned yet, `begin` or `serve`; None if there is none."""
    is_serving: bool = False
    is_away: bool = False
    since: float = 0.0
    """The time at which the worker began to serve, or was found unreachable."""
    where: str = ""

    def __str__(self) -> str:
        return f"worker {self.name}{self.where}"


class OnRay:
    """The workers on a Ray cluster. They run, and are restarted when they end, as long as `turn` is called; `close`
    ends them."""

    def __init__(
        self, ray: Any, coordinator: Coordinator, on_change: Callable[[str], None], on_trouble: Callable[[str], None]
    ) -> None:
        """`on_change` and `on_trouble` receive messages about the workers."""
        self._ray, self._coordinator = ray, coordinator
        self._on_change, self._on_trouble = on_change, on_trouble
        self._workers: list[_RayWorker] = []
        self._group: Any = None

    def start(self, count: int | None, opening: Callable[[], Served], threads: int | None) -> None:
        """Start `count` workers, by default one on every node. Raises `ClusterError` if Ray has too few free CPUs for
        them, or if they could not reach the coordinator."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        coordinator, nodes = self._coordinator, _nodes(self._ray, self._coordinator)
        count = count or nodes
        self._group = _places(self._ray, count, nodes)
        kind = self._ray.remote(Actor)
        for n in range(count):
            name = checked_name(f"{coordinator.name}-ray-{n + 1}")
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=n)
            options = {"num_cpus": 1, "max_restarts": -1, "max_concurrency": 2, "scheduling_strategy": place}
            me = Worker(name, name, coordinator.address, coordinator.keys.public, KeyPair("", ""))
            self._workers.append(_RayWorker(name, kind.options(**options).remote(me, opening, threads)))
        for each in self._workers:
            self._begin(each)

    @property
    def names(self) -> list[str]:
        """The names of the workers that run or will be restarted."""
        return [each.name for each in self._workers]

    def turn(self, seconds: float) -> None:
        """Process the next event of a worker, if one occurs within `seconds`. Raises `ClusterError` if no worker
        remains."""
        if not self._workers:
            raise ClusterError("no worker is left; the messages above say why each ended")
        for each in self._workers:
            if each.call is None and time.monotonic() - each.since >= _PAUSE_SECONDS:
                self._begin(each)
        calls = [each.call for each in self._workers if each.call is not None]
        if not calls:
            time.sleep(seconds)
            return
        done, _ = self._ray.wait(calls, num_returns=1, timeout=seconds)
        for each in [each for each in self._workers if each.call in done]:
            self._went_on(each)

    def close(self) -> None:
        """End the workers, remove their keys, and disconnect from Ray. Repeated calls have no effect."""
        ending_workers, self._workers = self._workers, []
        ending = [each.actor.end.remote() for each in ending_workers]
        if ending:
            serving = [each.call for each in ending_workers if each.is_serving]
            self._ray.wait(ending + serving, num_returns=len(ending + serving), timeout=_ENDING_SECONDS)
        for each in ending_workers:
            self._give_up(each)
        group, self._group = self._group, None
        if group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(group)
        self._ray.shutdown()

    def _begin(self, each: _RayWorker) -> None:
        each.is_serving = False
        each.call = each.actor.begin.remote()  # runs when Ray has started it

    def _went_on(self, each: _RayWorker) -> None:
        errors = self._ray.exceptions
        try:
            fields = self._ray.get(each.call)
        except errors.RayTaskError as error:
            self._ended(each, _last_line(error))
        except errors.RayActorError as error:
            self._died(each, error)
        else:
            if each.is_serving:
                self._ended(each, fields) if fields is not None else self._begin(each)
            else:
                self._has_begun(each, fields)

    def _has_begun(self, each: _RayWorker, fields: dict[str, Any]) -> None:
        each.is_away = False
        each.where = f" on {fields['host']}, process {fields['process']}"
        if "why" in fields:
            self._ended(each, str(fields["why"]))
            return
        coordinator = read_coordinator(self._coordinator.name)  # others may have been admitted since
        store_coordinator(coordinator.with_worker(each.name, str(fields["key"])))
        each.call, each.is_serving, each.since = each.actor.serve.remote(fields["key"]), True, time.monotonic()
        self._on_change(f"{each}: room for {fields['slots']} experts")

    def _died(self, each: _RayWorker, error: Exception) -> None:
        if isinstance(error, self._ray.exceptions.ActorDiedError):  # permanently: its creation failed
            each.is_serving = False
            self._ended(each, _last_line(error))
            return
        if each.is_serving:
            self._on_trouble(f"{each} died; Ray starts it again")
        elif not each.is_away:
            self._on_trouble(f"{each} cannot be reached, or ends before it is ready; Ray keeps trying")
            each.is_away = True
        each.call, each.is_serving, each.since = None, False, time.monotonic()

    def _ended(self, each: _RayWorker, why: str) -> None:
        if each.is_serving and time.monotonic() - each.since >= _LEAST_RUN_SECONDS:
            self._on_trouble(f"{each} has ended ({why}); it is started again")
            self._begin(each)
            return
        self._on_trouble(f"{each} ended at once ({why}) and is not started again")
        self._workers.remove(each)
        self._give_up(each)

    def _give_up(self, each: _RayWorker) -> None:
        self._ray.kill(each.actor, no_restart=True)
        coordinator = read_coordinator(self._coordinator.name)
        store_coordinator(
            replace(coordinator, workers={name: key for name, key in coordinator.workers.items() if name != each.name})
        )


def _nodes(ray: Any, coordinator: Coordinator) -> int:
    """Return the number of nodes with a CPU for a worker. Raises `ClusterError` where some cannot reach the
    coordinator."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    addresses = [str(node["NodeManagerAddress"]) for node in nodes]
    here = ray.util.get_node_ip_address()
    far = sorted({each for each in addresses if each != here})
    if far and ip_address(urlsplit(to_listen_at(coordinator.address, False).address).hostname or "").is_loopback:
        raise ClusterError(
            f"workers on {', '.join(far)} could not reach the coordinator at {coordinator.address}; give this "
            "machine's address in their network (`address`)",
            setting="address",
            given=coordinator.address,
            allowed="this machine's address in your network",
        )
    if not addresses:
        message = "no node of the Ray cluster has a CPU for a worker; add CPUs to a node (ray start)"
        raise ClusterError(message, setting="ray", given="a Ray cluster without CPUs", allowed="nodes with a CPU")
    return len(addresses)


def _places(ray: Any, count: int, nodes: int) -> Any:
    """Return Ray's placement group, which reserves one CPU bundle for each worker, on separate nodes if possible. A
    bundle of a lost node waits for a new node."""
    from ray.util import placement_group, remove_placement_group

    group = placement_group([{"CPU": 1}] * count, strategy="STRICT_SPREAD" if count <= nodes else "SPREAD")
    if not group.wait(timeout_seconds=_PLACING_SECONDS):
        remove_placement_group(group)
        free = ray.available_resources().get("CPU", 0)
        raise ClusterError(
            f"Ray has no room for {count} workers of one CPU each on {nodes} nodes ({free:g} CPUs are free): request "
            "fewer workers (`workers`), or add CPUs to the nodes (ray start)",
            setting="workers",
            given=count,
            allowed=f"{free:g} now",
        )
    return group
