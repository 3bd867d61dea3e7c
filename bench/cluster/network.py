"""Several machines on one: network namespaces, and between them a switch with a rate and a delay.

    machine 0: tun0 10.77.0.1     machine 1: tun0 10.77.0.2     ...
                    \\                     |
                     one process that relays packets: its sender's port, the delay, its receiver's port

For a kernel without netem. Every machine is a namespace with a TUN device whose other end the relay holds, so that a
packet costs two system calls and no checksum. Faithful for messages of some KB; what is sent in bulk waits for the
relay's Python above a few 100 Mbit/s. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import math
import os
import select
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from bench.cluster.child import Child

_TUN = Path("/dev/net/tun")
_PLACE = Path("/var/run/netns")
_PREFIX = "smoe-bench"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001
_PR_SET_TIMERSLACK = 29
_FRAMING_BYTES = 38
"""What Ethernet sends around a packet."""
_MOST_AT_ONCE = 64
"""Packets of one machine that are read before those of the others."""
_PRIORITY = -15
"""Of the relay: it stands for hardware that waits for nobody."""


class Link(NamedTuple):
    """What lies between a machine and the switch."""

    bits_per_second: float
    delay_seconds: float
    """From one machine to another."""


LINKS = {
    "100mbit": Link(100e6, 1e-4),
    "1gbit": Link(1e9, 1e-4),
    "unshaped": Link(math.inf, 0.0),
}


class NetworkError(RuntimeError):
    """There can be no such network here; the message says why."""


class Network:
    """Machines 0 to `count` - 1 and the switch between them; a context manager, which leaves nothing behind."""

    def __init__(self, count: int, link: Link) -> None:
        self._names = [f"{_PREFIX}-{os.getpid()}-{n}" for n in range(count)]
        self._link = link
        self._relay: Child | None = None

    def __enter__(self) -> Network:
        check()
        remove_left_over()
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
            self._relay = Child("switch", self._serve)
            self._relay.hear(10)  # all devices are there
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._relay is not None:
            self._relay.kill()
        for name in self._names:
            if (_PLACE / name).exists():
                _run("ip", "netns", "del", name)

    def enter(self, machine: int) -> None:
        """From now on the calling process has this machine's network."""
        _enter(_PLACE / self._names[machine])

    def plug(self, machine: int, is_in: bool) -> None:
        """Pull a machine's cable, or put it in again."""
        _run("ip", "-n", self._names[machine], "link", "set", "tun0", "up" if is_in else "down")

    def _serve(self, child: Child) -> None:
        os.nice(_PRIORITY)
        home = Path("/proc/self/ns/net")
        with home.open("rb") as own:
            devices = []
            for n in range(len(self._names)):
                self.enter(n)
                devices.append(_make_device(address(n)))
                _set_namespace(own.fileno())
        child.say("ready")
        relay(devices, self._link)


def address(machine: int) -> str:
    """Where the others find it."""
    return f"10.77.0.{machine + 1}"


def check() -> None:
    """Raise `NetworkError` where namespaces or TUN devices cannot be made."""
    if os.geteuid() != 0:
        raise NetworkError("machines in namespaces of their own need root; run this as root")
    if not _TUN.exists():
        raise NetworkError(f"the switch needs {_TUN}, which is not here; load the kernel module tun")


def remove_left_over() -> None:
    """The namespaces of earlier benchmarks that were killed."""
    for path in _PLACE.glob(f"{_PREFIX}-*") if _PLACE.is_dir() else ():
        made_by = path.name.split("-")[2]
        if not Path("/proc", made_by).exists():
            _run("ip", "netns", "del", path.name)


def relay(devices: Sequence[int], link: Link) -> None:
    """Carry packets between devices, number n of which has the address of machine n, until one of them is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    sending, receiving = [0.0] * len(devices), [0.0] * len(devices)
    """Until when each port is busy."""
    waiting: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    while True:
        left = max(0.0, waiting[0][0] - perf_counter()) if waiting else None
        for device in select.select(devices, (), (), left)[0]:
            sender = devices.index(device)
            for packet in _packets(device):
                if not packet:
                    return
                receiver = packet[19] - 1
                if packet[0] >> 4 != 4 or not 0 <= receiver < len(devices):
                    continue  # no IPv4, or to nobody here
                wire = (len(packet) + _FRAMING_BYTES) * 8 / link.bits_per_second
                sending[sender] = max(perf_counter(), sending[sender]) + wire
                arrives = sending[sender] + link.delay_seconds
                receiving[receiver] = max(arrives - wire, receiving[receiver]) + wire  # both ports at the same time
                heapq.heappush(waiting, (receiving[receiver], next(numbers), devices[receiver], packet))
        now = perf_counter()
        while waiting and waiting[0][0] <= now:
            _, _, device, packet = heapq.heappop(waiting)
            with suppress(OSError):  # its cable is pulled, or it takes no more: lost, as on any network
                os.write(device, packet)


def _packets(device: int) -> Iterator[bytes]:
    """Those that a machine has sent."""
    for _ in range(_MOST_AT_ONCE):
        try:
            yield os.read(device, 1 << 16)
        except OSError:  # no more, or its cable is pulled
            return


def _make_device(own_address: str) -> int:
    """In the namespace where the caller is; returns the descriptor of the other end."""
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _IFF_TUN_NO_PI))
    _run("ip", "addr", "add", f"{own_address}/24", "dev", "tun0")
    _run("ip", "link", "set", "tun0", "mtu", "1500", "txqueuelen", "4096", "up")
    _run("ip", "link", "set", "lo", "up")
    return device


def _enter(path: Path) -> None:
    with path.open("rb") as namespace:
        _set_namespace(namespace.fileno())


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise NetworkError(f"cannot enter a namespace: {os.strerror(number)}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
