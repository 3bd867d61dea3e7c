"""A device that is not there, emulated on the CPU in slowed-down time: a test bench for concurrency and ablation.

Experts really lie in two arenas, are really copied by a thread and really computed, on the same code path as on a GPU
above the link. Only time is emulated: every resource (link, device, CPU) ends a piece of work at the later of its
real end and the time that a profile gives it, stretched by one factor, the *dilation*, chosen so large that the real
machine keeps up. All times that users see are divided by it. What could not keep up is counted, so that a bench whose
figures are this machine's and not the profile's says so.

    link (profile 0.4 ms, dilation 10)   | copy 1.3 ms | sleep 2.7 ms |
    reported                             | 0.4 ms                     |

What no profile knows, the time that our own Python takes to decide, is real and is reported as it is: it is stretched
like the rest. Link and CPU read the same RAM, at the profile's rate together (`shared_bandwidth.py`). A small model can
stand for one with larger experts: link, device and CPU are then paced as if they had them.

A labelled test bench, never a claim about a GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from smoe.errors import ConfigError
from smoe.memory.pacing import Pacing
from smoe.memory.shared_bandwidth import OVERSLEPT_SECONDS, SharedBandwidth

_LEAST, _MOST = 1e-12, 1e21
"""Seconds, bytes and operations a second of a machine that there could be."""
PUBLISHED, MEASURED = FIGURES = ("published", "measured")
"""Where the figures of a profile come from: data sheets, or the machine itself."""
MARGIN = 4.0
"""How much slower than its fastest the real machine may become before it is late: link, CPU and device are emulated at
once on the same cores and the same memory, and are measured one by one."""


@dataclass(frozen=True)
class DeviceProfile:
    """What a machine with a device needs for a piece of work: the larger of bytes and arithmetic, and a constant."""

    name: str
    source: str
    """Where the figures come from."""
    link_bytes_per_second: float
    link_latency_seconds: float
    """Seconds of latency of one copy."""
    device_bytes_per_second: float
    device_flops: float
    device_expert_seconds: float
    """Launches of one expert's kernels."""
    device_layer_seconds: float
    """Launches of a layer's other kernels."""
    host_bytes_per_second: float
    """The rate of RAM: what the CPU reads an expert with, and what link and CPU have together."""
    host_flops: float
    host_expert_seconds: float
    """Handing one expert's rows to the CPU and the result back."""
    date: str = ""
    """When the figures were put down."""
    figures: str = ""
    """`PUBLISHED` or `MEASURED`; empty: unknown."""
    disk_bytes_per_second: float | None = None
    """The rate of reads of an expert's size, past the page cache. This and what follows is for `smoe plan` alone."""
    device_memory_bytes: float | None = None
    host_memory_bytes: float | None = None
    has_link: bool = True
    """False: the device has no memory of its own, or is the CPU; experts come from the disk, whose figures the link
    then has."""

    def link_seconds(self, nbytes: float) -> float:
        return self.link_latency_seconds + nbytes / self.link_bytes_per_second

    def expert_seconds(self, nbytes: float, rows: int) -> float:
        """One expert of `nbytes` (two an element) for `rows` tokens on the device."""
        return self.device_expert_seconds + max(
            nbytes / self.device_bytes_per_second, nbytes * rows / self.device_flops
        )

    def layer_seconds(self, nbytes: float, tokens: int) -> float:
        """The rest of a layer, of `nbytes` of weights."""
        return self.device_layer_seconds + max(
            nbytes / self.device_bytes_per_second, nbytes * tokens / self.device_flops
        )

    def host_seconds(self, nbytes: float, rows: int) -> float:
        """One expert on the CPU, with the memory to itself."""
        return self.host_expert_seconds + self.host_arithmetic_seconds(nbytes, rows)

    def host_arithmetic_seconds(self, nbytes: float, rows: int) -> float:
        return max(nbytes / self.host_bytes_per_second, nbytes * rows / self.host_flops)


class Emulation(Pacing):
    """The slowed-down clock of one engine. Any thread may `finish`."""

    is_emulated = True

    def __init__(
        self,
        profile: DeviceProfile,
        dilation: float | None,
        layer_bytes: float,
        expert_bytes: int,
        as_if_bytes: int | None = None,
    ) -> None:
        """`expert_bytes` are those of the real experts, `as_if_bytes` those of the experts that they stand for."""
        self.profile = profile
        self.layer_bytes = layer_bytes
        """A layer's share of the non-expert weights."""
        self.expert_bytes = as_if_bytes or expert_bytes
        self.scale = self.expert_bytes / expert_bytes
        """Bytes that one of a real expert stands for."""
        self.is_paced = True
        """False while the real machine is being measured: nothing waits for the profile."""
        self.late_seconds = 0.0
        """Reported time by which pieces of work ended later than the profile says."""
        self._layer_began = time.perf_counter()
        self.set_dilation(dilation or 1.0)

    def set_dilation(self, dilation: float) -> None:
        """Real seconds of a reported one, from now on; nothing may be under way."""
        self.dilation = dilation
        self._memory = SharedBandwidth(self.profile.host_bytes_per_second / dilation)

    def now(self) -> float:
        """Seconds of reported time."""
        return time.perf_counter() / self.dilation

    def finish(self, began: float, seconds: float) -> None:
        """Work that began at `began` (real clock) and takes `seconds` by the profile ends now, or when it is due."""
        if not self.is_paced:
            return
        due = began + seconds * self.dilation
        self.late_seconds += max(0.0, time.perf_counter() - due) / self.dilation
        _wait_until(due)

    def begin_pass(self) -> None:
        """A forward pass begins."""
        self._layer_began = time.perf_counter()

    def reach_experts(self, tokens: int) -> None:
        """The device has come to a layer's experts: attention, router and the like are done."""
        self.finish(self._layer_began, self.profile.layer_seconds(self.layer_bytes, tokens))

    def leave_experts(self) -> None:
        """A layer's experts are done; what follows is the next layer's."""
        self._layer_began = time.perf_counter()

    def compute_experts(self, began: float, rows: list[int]) -> None:
        """The device has computed one expert for each entry, for so many tokens."""
        self.finish(began, sum(self.profile.expert_seconds(self.expert_bytes, count) for count in rows))

    def look_ahead(self, began: float, tokens: int) -> None:
        """The device has run another layer's attention and router: its launches, but not its shared experts' bytes."""
        self.finish(began, self.profile.layer_seconds(0.0, tokens))

    def ask_gate(self, began: float) -> None:
        """The device has run another layer's router."""
        self.finish(began, self.profile.device_expert_seconds)

    def begin_planning(self) -> float:
        """The processor time of this thread: that others use its core or the interpreter is not planning."""
        return time.thread_time()

    def end_planning(self, began: float) -> None:
        """Deciding takes as long with a fast device as it did here."""
        seconds = time.thread_time() - began
        self.finish(time.perf_counter() - seconds, seconds)

    @contextmanager
    def computing_on_host(self, rows: int) -> Iterator[None]:
        """The CPU computes one expert for so many tokens."""
        with self._reading(
            self.expert_bytes,
            self.profile.host_arithmetic_seconds(self.expert_bytes, rows),
            self.profile.host_expert_seconds,
        ):
            yield

    @contextmanager
    def carrying(self, nbytes: int, is_first: bool) -> Iterator[None]:
        """The link carries so many of a real expert's bytes, the first of a copy or others."""
        as_if = nbytes * self.scale
        latency = self.profile.link_latency_seconds if is_first else 0.0
        with self._reading(as_if, as_if / self.profile.link_bytes_per_second, latency):
            yield

    @contextmanager
    def _reading(self, nbytes: float, seconds: float, constant: float) -> Iterator[None]:
        """Work that reads `nbytes` of RAM, in `seconds` where nothing else reads, and takes `constant` more."""
        if not self.is_paced:
            yield
            return
        with self._memory.reading(nbytes / seconds / self.dilation, nbytes) as flow:
            yield
            really_done = time.perf_counter()
        assert flow.ended is not None
        self.late_seconds += max(0.0, really_done - flow.ended - constant * self.dilation) / self.dilation
        _wait_until(flow.ended + constant * self.dilation)

    def choose_dilation(self, copy: float, expert: float, host: float, layer: float) -> None:
        """The dilation that the slowest of the real machine's times, against the profile's, asks for."""
        profile = self.profile
        ratios = (
            copy / profile.link_seconds(self.expert_bytes),
            expert / profile.expert_seconds(self.expert_bytes, 1),
            host / profile.host_seconds(self.expert_bytes, 1),
            layer / profile.layer_seconds(self.layer_bytes, 1),
        )
        self.set_dilation(max(1.0, MARGIN * max(ratios)))


def _wait_until(due: float) -> None:
    """Wait to the microsecond: what the system oversleeps would otherwise be added to every piece of work."""
    left = due - time.perf_counter()
    if left > OVERSLEPT_SECONDS:
        time.sleep(left - OVERSLEPT_SECONDS)
    while time.perf_counter() < due:
        pass


def read_profile(name: str) -> DeviceProfile:
    """A profile by the name of one that comes with the program, or by the path of a JSON file with the same entries.

    Raises `ConfigError` where there is none, or an entry is missing, unknown or not a positive number.
    """
    shipped = resources.files("smoe") / "profiles"
    known = sorted(entry.name.removesuffix(".json") for entry in shipped.iterdir() if entry.name.endswith(".json"))
    try:
        text = (shipped / f"{name}.json").read_text("utf8") if name in known else Path(name).read_text("utf8")
        entries = json.loads(text)
    except (OSError, ValueError) as error:
        near = get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        allowed = f"{', '.join(known)} or the path of a JSON file"
        message = f"`profile` is {name!r}, {_why_unread(name, error)}{hint}; give {allowed}"
        raise ConfigError(message, setting="profile", given=name, allowed=allowed) from error
    wrong = _wrong_entries(entries)
    if wrong is not None:
        message = f"`profile` is {name!r}, which {wrong} ({shipped / 'rtx-a6000.json'} is a whole profile)"
        allowed = f"a JSON object with the entries {', '.join(_NEEDED)}"
        raise ConfigError(message, setting="profile", given=name, allowed=allowed)
    return DeviceProfile(**entries)


def read_emulated(name: str) -> DeviceProfile:
    """A profile of a device that can be emulated. Raises `ConfigError` as `read_profile` does, and for a machine
    without a link: there is no second device to emulate."""
    profile = read_profile(name)
    if profile.has_link:
        return profile
    raise ConfigError(
        f"`profile` {name} is a machine without a device to emulate: its experts are loaded from disk. Use smoe plan "
        "to forecast for it; `device` emulated needs a profile with a link, such as rtx-4060-ti",
        setting="profile",
        given=name,
        allowed="a profile with a link, such as rtx-4060-ti",
    )


def _why_unread(name: str, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError) or not name:
        return "and there is no such profile or file"
    if isinstance(error, json.JSONDecodeError):
        return f"which is no JSON ({error.msg} in line {error.lineno})"
    if isinstance(error, OSError):
        return f"which cannot be read ({error.strerror or error})"
    return "which is no text"


_ENTRIES = {field.name: str(field.type) for field in fields(DeviceProfile)}
"""The entries of a profile, with their types."""
_NEEDED = [field.name for field in fields(DeviceProfile) if field.default is MISSING]
"""The entries that every profile needs."""


def _wrong_entries(entries: Any) -> str | None:
    """What keeps the contents of a JSON file from being a profile, and what to do; None where nothing does."""
    if not isinstance(entries, dict):
        kind = "list" if isinstance(entries, list) else "value"
        return f"holds a JSON {kind}; it must hold an object with the entries {', '.join(_NEEDED)}"
    missing = [entry for entry in _NEEDED if entry not in entries]
    if missing:
        return f"lacks {', '.join(missing)}; add what is missing"
    unknown = [entry for entry in entries if entry not in _ENTRIES]
    if unknown:
        return f"has {', '.join(unknown)}, which no profile has; take that out"
    for entry, value in entries.items():
        kind = _ENTRIES[entry]
        if value is None and kind.endswith("None"):
            continue
        is_right = {"str": isinstance(value, str), "bool": isinstance(value, bool)}.get(kind, _is_positive(value))
        if not is_right:
            wanted = {"str": "text", "bool": "true or false"}.get(kind, "a positive number")
            return f"has {value!r} for {entry}; it must be {wanted}"
    if entries.get("figures", "") not in ("", *FIGURES):
        return f"has {entries['figures']!r} for figures; it must be {' or '.join(FIGURES)}"
    return None


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and _LEAST <= value <= _MOST
