"""Emulates a device with its own memory on the CPU, in slowed-down time, to test concurrency and measure ablations.

As on a GPU, experts are stored in two arenas (host and device), copied by a thread, and computed by the same code. Only
time is emulated. Each resource (link, device, CPU) has a duration for its work in the profile. This duration is
multiplied by one factor for all, the *dilation*, which is large enough that the real machine can do the work in that
time. The work then ends at the later of its real end and this time. Reported times are divided by the dilation. Work
that ended too late is counted, so that a benchmark can report it.

    link (profile 0.4 ms, dilation 10)     | copy 1.3 ms | sleep 2.7 ms |
    reported                               | 0.4 ms                     |

The time that smoe's Python code takes for decisions is real and in no profile, and it is multiplied too. Link and CPU
share the profile's RAM bandwidth (`shared_bandwidth.py`). A small model can represent one with larger experts: link,
device and CPU then take the time of the larger experts.

This is for tests, and proves nothing about a real GPU.
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
from smoe.memory.pacing import Clock, Pacing
from smoe.memory.shared_bandwidth import OVERSLEPT_SECONDS, SharedBandwidth

_LEAST, _MOST = 1e-12, 1e21
"""Bounds for plausible figures of a machine: seconds, bytes, and operations per second."""
PUBLISHED, MEASURED = FIGURES = ("published", "measured")
"""The possible origins of a profile's figures: data sheets, or measurements on the machine."""
MARGIN = 4.0
"""How many times slower than its fastest measurement the real machine may be without being late. Link, CPU and device
are measured one by one, but they are emulated concurrently on the same cores and memory."""


@dataclass(frozen=True)
class DeviceProfile:
    """The costs of a machine with a device. A piece of work takes the time for its bytes or the time for its
    arithmetic, whichever is longer, plus a constant."""

    name: str
    source: str
    """A text about where the figures come from."""
    link_bytes_per_second: float
    link_latency_seconds: float
    """The constant part of the time of a copy."""
    device_bytes_per_second: float
    device_flops: float
    device_expert_seconds: float
    """The time to launch the kernels of one expert."""
    device_layer_seconds: float
    """The time to launch the other kernels of a layer."""
    host_bytes_per_second: float
    """The RAM bandwidth: of the CPU when it reads an expert, and of link and CPU together."""
    host_flops: float
    host_expert_seconds: float
    """The time to pass one expert's rows to the CPU, and its result back."""
    date: str = ""
    """The date of the figures."""
    figures: str = ""
    """`PUBLISHED` or `MEASURED`; empty if unknown."""
    disk_bytes_per_second: float | None = None
    """The rate of expert-sized reads past the page cache. Only `smoe plan` uses this field and those below."""
    device_memory_bytes: float | None = None
    host_memory_bytes: float | None = None
    has_link: bool = True
    """Whether the device has memory of its own. If not, experts are loaded from disk, and the link's figures are those
    of the disk."""

    def link_seconds(self, nbytes: float) -> float:
        return self.link_latency_seconds + nbytes / self.link_bytes_per_second

    def expert_seconds(self, nbytes: float, rows: int) -> float:
        """Return the device's time for one expert with `nbytes` bytes of weights (two per element) and `rows`
        tokens."""
        return self.device_expert_seconds + max(
            nbytes / self.device_bytes_per_second, nbytes * rows / self.device_flops
        )

    def layer_seconds(self, nbytes: float, tokens: int) -> float:
        """Return the device's time for a layer without its experts, with `nbytes` bytes of weights."""
        return self.device_layer_seconds + max(
            nbytes / self.device_bytes_per_second, nbytes * tokens / self.device_flops
        )

    def host_seconds(self, nbytes: float, rows: int) -> float:
        """Return the CPU's time for one expert if nothing else reads RAM."""
        return self.host_expert_seconds + self.host_arithmetic_seconds(nbytes, rows)

    def host_arithmetic_seconds(self, nbytes: float, rows: int) -> float:
        return max(nbytes / self.host_bytes_per_second, nbytes * rows / self.host_flops)


class Emulation(Pacing):
    """The slowed-down clock of one engine that emulates a device. Any thread may call `finish`."""

    is_emulated = True
    has_times_of_its_own = True

    def __init__(
        self,
        profile: DeviceProfile,
        dilation: float | None,
        layer_bytes: float,
        expert_bytes: int,
        as_if_bytes: int | None = None,
    ) -> None:
        """`layer_bytes`: bytes of non-expert weights per layer. `expert_bytes`: the size of the model's experts.
        `as_if_bytes`: the size of the larger experts that they represent; None: their own."""
        self.profile = profile
        self.layer_bytes = layer_bytes
        """Bytes of non-expert weights per layer."""
        self.expert_bytes = as_if_bytes or expert_bytes
        self.scale = self.expert_bytes / expert_bytes
        """How many emulated bytes one byte of a real expert represents."""
        self.is_paced = True
        self.late_seconds = 0.0
        """The sum of the times, in reported seconds, by which work ended later than in the profile."""
        self._layer_began = time.perf_counter()
        self.set_dilation(dilation or 1.0)

    def set_dilation(self, dilation: float) -> None:
        """Set the number of real seconds per reported second. No work may be running."""
        self.dilation = dilation
        self._memory = SharedBandwidth(self.profile.host_bytes_per_second / dilation)

    @property
    def now(self) -> Clock:
        """A function that returns the time on the reported clock, in seconds."""
        return self._now

    def _now(self) -> float:
        return time.perf_counter() / self.dilation

    @contextmanager
    def in_real_time(self) -> Iterator[None]:
        """Measure the real machine during the `with` block: nothing waits for the profile's times."""
        self.is_paced = False
        try:
            yield
        finally:
            self.is_paced = True

    def finish(self, began: float, seconds: float) -> None:
        """Wait until work that began at `began` (on the real clock) has taken `seconds` of the emulated device's
        time."""
        if not self.is_paced:
            return
        due = began + seconds * self.dilation
        self.late_seconds += max(0.0, time.perf_counter() - due) / self.dilation
        _wait_until(due)

    def reset(self) -> None:
        """Set `late_seconds` to 0."""
        self.late_seconds = 0.0

    def begin_pass(self) -> None:
        """Record that a forward pass begins."""
        self._layer_began = time.perf_counter()

    def reach_experts(self, tokens: int) -> None:
        """Wait until the emulated device would have computed a layer up to its experts (attention, router and so
        on)."""
        self.finish(self._layer_began, self.profile.layer_seconds(self.layer_bytes, tokens))

    def leave_experts(self) -> None:
        """Record that a layer's experts are done and the next layer begins."""
        self._layer_began = time.perf_counter()

    def compute_experts(self, began: float, rows: list[int]) -> None:
        """Wait until the emulated device would have computed several experts. `rows` has one entry for each expert: its
        number of tokens."""
        self.finish(began, sum(self.profile.expert_seconds(self.expert_bytes, count) for count in rows))

    def look_ahead(self, began: float, tokens: int) -> None:
        """Wait until the emulated device would have run the attention and router of another layer, which predicts
        experts. Only kernel launches count, no bytes of weights."""
        self.finish(began, self.profile.layer_seconds(0.0, tokens))

    def ask_gate(self, began: float) -> None:
        """Wait until the emulated device would have run the router of another layer, which predicts experts."""
        self.finish(began, self.profile.device_expert_seconds)

    def begin_planning(self) -> float:
        """Return the CPU time that this thread has used, in seconds. It does not include time in which other threads
        had the core or the interpreter."""
        return time.thread_time()

    def end_planning(self, began: float) -> None:
        """Wait until a decision in Python that began at `began` (CPU time) has taken its real time on the reported
        clock, because a fast device does not make Python faster."""
        seconds = time.thread_time() - began
        self.finish(time.perf_counter() - seconds, seconds)

    @contextmanager
    def computing_on_host(self, rows: int) -> Iterator[None]:
        """Account for the work of the emulated CPU during the `with` block: one expert for `rows` tokens."""
        with self._reading(
            self.expert_bytes,
            self.profile.host_arithmetic_seconds(self.expert_bytes, rows),
            self.profile.host_expert_seconds,
        ):
            yield

    @contextmanager
    def carrying(self, nbytes: int, is_first: bool) -> Iterator[None]:
        """Account for the work of the emulated link during the `with` block: copying `nbytes` of a real expert. The
        first chunk of a copy includes the latency."""
        as_if = nbytes * self.scale
        latency = self.profile.link_latency_seconds if is_first else 0.0
        with self._reading(as_if, as_if / self.profile.link_bytes_per_second, latency):
            yield

    @contextmanager
    def _reading(self, nbytes: float, seconds: float, constant: float) -> Iterator[None]:
        """Account for work during the `with` block that reads `nbytes` of RAM. It takes `seconds` if nothing else reads
        RAM, and `constant` seconds in addition."""
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
        """Set the dilation so that the real machine can keep up with the emulated one. The arguments are the real
        machine's times in seconds: to copy an expert, to compute an expert on the device and on the CPU, and to compute
        a layer."""
        profile = self.profile
        ratios = (
            copy / profile.link_seconds(self.expert_bytes),
            expert / profile.expert_seconds(self.expert_bytes, 1),
            host / profile.host_seconds(self.expert_bytes, 1),
            layer / profile.layer_seconds(self.layer_bytes, 1),
        )
        self.set_dilation(max(1.0, MARGIN * max(ratios)))


def _wait_until(due: float) -> None:
    """Wait until the real clock shows `due`. The wait is precise to microseconds, because every delay would add to the
    measured times."""
    left = due - time.perf_counter()
    if left > OVERSLEPT_SECONDS:
        time.sleep(left - OVERSLEPT_SECONDS)
    while time.perf_counter() < due:
        pass


def read_profile(name: str) -> DeviceProfile:
    """Return a device profile. `name`: the name of a profile that smoe contains, or the path of a JSON file.

    Raises `ConfigError` if there is no such profile, or if an entry of the profile is missing, unknown or not a
    positive number.
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
    """Return the profile of a device to emulate. Raise `ConfigError` as `read_profile` does, and also for a machine
    without a link."""
    profile = read_profile(name)
    if profile.has_link:
        return profile
    raise ConfigError(
        f"`profile={name}` is a machine without a device to emulate: its experts are loaded from disk. Use smoe plan "
        "to forecast for it; `device=emulated` needs a profile with a link, such as rtx-4060-ti",
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
"""The names of a profile's entries with their types."""
_NEEDED = [field.name for field in fields(DeviceProfile) if field.default is MISSING]
"""The entries that every profile must have."""


def _wrong_entries(entries: Any) -> str | None:
    """Return a message about the first error in the entries of a profile's file; None if the entries are correct."""
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
