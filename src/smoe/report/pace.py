"""Stores the times that a model's runs have measured on this machine, for the next forecast (`on_clock.py`).

A forecast knows only a machine's rates. A run measures the times of an expert, a layer and a load of this model. They
do not depend on the memory budget, so later forecasts of the same arithmetic use them. `smoe generate` and `smoe serve`
store them in the user's cache.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smoe.config import EngineConfig
from smoe.cpu_isa import max_cpu_isa
from smoe.machine.processor import BUSY_SHARE, processor_name
from smoe.metrics import Counters
from smoe.policy.budget import Ledger
from smoe.policy.registry import DRAFT
from smoe.report.usual_text import usual_slots
from smoe.user_cache import StoredValue

if TYPE_CHECKING:
    from smoe.runtime.engine import Engine

_LEAST_READING = 0.05
"""The fraction of the time in which experts are read at least, in a run that does not have all of them in memory."""
LEAST_STEPS = 10
"""The smallest number of decode steps, without the first ones of a text, of a run whose times are stored."""
_LEAST_LOADS = 16
_MOST_CACHED = 0.05
"""The largest fraction of the bytes that a run may have copied from the page cache, so that the time of its loads is
that of reads from the disk."""


@dataclass(frozen=True)
class Pace:
    """The seconds of operations that runs of a model have measured in decode steps of one sequence, corrected for
    concurrent reads. A field that is None was not measured."""

    layer: float | None = None
    """Seconds of a layer without its experts, including smoe's Python code."""
    expert: float | None = None
    load: float | None = None
    """Seconds of loading one expert, while all threads read."""
    skew: float | None = None
    """How unevenly the model's routing uses experts, as a multiple of the unevenness of typical routing
    (`simulator/skewness.py`)."""
    prompt: float | None = None
    """The measured time of computing a prompt, after the first pass, divided by the forecast time; within
    `PROMPT_FACTORS`."""
    reading: float | None = None
    """The fraction of the time in which experts were read."""
    first_pass: float | None = None
    """Additional seconds that a process's first pass takes, whatever the prompt, because kernels are compiled and
    memory is used for the first time. At most `MOST_FIRST_PASS`."""
    first_load: float | None = None
    """Seconds of loading one expert into memory that the process uses for the first time, while all threads read. The
    system must find and clear that memory, which can take longer than reading."""
    beginning: float | None = None
    """Additional seconds that the first decode steps of a text take, beyond those that a simulation explains: memory of
    the prompt is given to experts, and kernels are prepared. At least `LEAST_BEGINNING`. Only of runs that read experts
    in their answers."""

    def after(self, other: Pace) -> Pace:
        """Return the geometric mean of these times and `other`, so that one disturbed run changes little. A much
        shorter `first_pass` replaces the known one: only a model's first run compiles kernels."""
        shown = {name: value for name, value in vars(other).items() if value is not None}
        found = {name: _between(getattr(self, name), value) for name, value in shown.items()}
        before, now = self.first_pass, other.first_pass
        if before is not None and now is not None and now < before / _COMPILED:
            found["first_pass"] = now
        return replace(self, **found)

    def completed_by(self, other: Pace) -> Pace:
        """Return these times, and those of `other` that are not known here."""
        return replace(self, **{name: value for name, value in vars(other).items() if getattr(self, name) is None})


UNKNOWN = Pace()
_COMPILED = 2.0
"""The factor by which a first pass must be shorter than known so that the known one counts as one that compiled."""


def _between(before: float | None, now: float) -> float:
    if before is None:
        return now
    return (before * now) ** 0.5 if before and now else (before + now) / 2


PROMPT_FACTORS = (1 / 8, 8.0)
MOST_FIRST_PASS = 60.0
"""The upper bound, in seconds, of the extra time that a process's first pass takes."""
_LEAST_FIRST_PASS = 1e-3
"""The lower bound, in seconds, of the extra time that a process's first pass takes. It is above 0, so that geometric
means stay above 0."""
LEAST_BEGINNING = 1e-3
"""The lower bound of `Pace.beginning`, in seconds. It is above 0, so that geometric means stay above 0."""
LEAST_PROMPT_TOKENS = 32
"""The smallest number of tokens of a prompt from which the factor `Pace.prompt` is measured. In a shorter prompt,
function calls take more time than arithmetic."""


def of_prompt(
    first_pass_seconds: float, warm_seconds: float, forecast_seconds: float, tokens: int, factor: float | None = None
) -> Pace:
    """Return the times of prompts that can be computed from the first pass of a process: the factor `prompt` and the
    extra seconds `first_pass`.

    The pass computed `tokens` tokens in `first_pass_seconds`. The same pass later in the process would have taken
    `warm_seconds`, and by the machine's rates `forecast_seconds`. A prompt shorter than `LEAST_PROMPT_TOKENS` gives no
    factor. Its forecast is multiplied by the known `factor`, and the remaining time counts as extra time of a first
    pass. If rates that are too low forecast more than `warm_seconds`, the measured time is used in place of the
    forecast: the difference would be near zero, and the next forecast with better rates far too short.
    """
    low, high = PROMPT_FACTORS
    if tokens < LEAST_PROMPT_TOKENS:
        known = min(warm_seconds, forecast_seconds * (factor or 1.0))
        return Pace(first_pass=_first_pass(first_pass_seconds - known))
    found = min(high, max(low, warm_seconds / forecast_seconds))
    return Pace(prompt=found, first_pass=_first_pass(first_pass_seconds - warm_seconds))


def _first_pass(seconds: float) -> float:
    return min(MOST_FIRST_PASS, max(_LEAST_FIRST_PASS, seconds))


UNTAUGHT_SPEEDS = (0.3, 1.5)
"""(lowest, highest) speed of a model that has not run on this machine, as a fraction of its forecast. 54 cases of large
models were within 0.66 and 1.5, small models as low as 0.31 (docs/log/forecasts.md)."""
_OFF = 2.0
"""The factor by which a run must differ from its forecast so that the next forecast mentions the difference."""


@dataclass(frozen=True)
class LastRun:
    """The comparison of a model's last run with the forecast that was made before it."""

    per_token: float
    """The time per token, measured divided by forecast."""
    first_token: float
    """The time to the first token, measured divided by forecast."""
    waited: float | None = None
    """The share of the run's time in which its threads waited for a core that other programs used; None: unknown."""

    def doubts(self) -> list[str]:
        """Return warnings for the next forecast, if the last forecast was wrong or the machine was busy."""
        found = []
        ratios = {"a token": self.per_token, "the first token": self.first_token}
        off = [f"{what} was {_in_words(ratio)}" for what, ratio in ratios.items() if _is_off(ratio)]
        if off:
            found.append(f"the last run of this model differed from its forecast: {', '.join(off)}")
        if self.waited is not None and self.waited >= BUSY_SHARE:
            found.append(
                f"the last run of this model waited {self.waited:.0%} of its time for a core used by other programs; "
                "its times hold for a machine as busy as that"
            )
        return found


def _is_off(ratio: float) -> bool:
    return max(ratio, 1 / ratio) > _OFF


def _in_words(ratio: float) -> str:
    """Return a measured time, divided by the forecast time, in words with a factor above 1."""
    factor = float(f"{max(ratio, 1 / ratio):.2g}")
    return f"{factor:g} times {'slower' if ratio > 1 else 'faster'}"


ALONE = 2.1
"""The factor by which an expert takes longer on a CPU if it had to be waited for than if it is computed together with
others. It was measured for three models in bf16 and int4 on two cores (docs/log/forecasts.md). The causes are that the
helper thread sleeps, and that the product is short."""


def crowded(reading: float) -> float:
    """Return the factor by which a layer without experts takes longer on a CPU that reads experts during the fraction
    `reading` of the time. The reading threads use the same cores and memory (docs/log/forecasts.md)."""
    return 1 + 0.6 * min(1.0, reading)


def is_forecast(engine: Engine) -> bool:
    """Return whether forecasts are made for runs of an engine. They are not for a cluster, a device other than the CPU,
    or a draft model, which computes concurrently."""
    return engine.is_on_this_cpu and engine.config.prefetch != DRAFT


def measured_pace(decode: Counters, layers: int, expert_bytes: int) -> Pace:
    """Return the times of operations computed from the counters of decode steps, given a model's number of layers and
    the bytes of an expert. Return an empty `Pace` for too few steps."""
    passes, uses = decode.forward_passes, decode.decode_uses
    if passes < LEAST_STEPS or not uses:
        return UNKNOWN
    loads = min(float(decode.loads + decode.prefetches), decode.bytes_read / expert_bytes)  # some were cancelled
    has_load = loads >= _LEAST_LOADS and decode.bytes_cached <= _MOST_CACHED * decode.bytes_read
    reading = decode.read_busy_seconds / decode.forward_seconds
    alone = uses - decode.decode_hits
    return Pace(
        layer=(decode.dense_seconds + decode.plan_seconds) / (passes * layers * crowded(reading)),
        expert=decode.compute_seconds / (uses + (ALONE - 1) * alone),
        load=decode.read_busy_seconds / loads if has_load else None,
        reading=reading,
    )


def first_load(prompt: Counters, expert_bytes: int) -> float | None:
    """Return the seconds of loading one expert into memory that is used for the first time, from the counters of a
    process's first prompt. None for too few loads, or loads from the page cache."""
    loads = prompt.bytes_read / expert_bytes
    if loads < _LEAST_LOADS or prompt.bytes_cached > _MOST_CACHED * prompt.bytes_read:
        return None
    return prompt.read_busy_seconds / loads


class RunArithmetic(NamedTuple):
    """The arithmetic of a run. Only runs of the same arithmetic have the same times of computing."""

    precision: str
    """The precision of the experts."""
    settings: str = ""
    """The settings that change the arithmetic; empty for the default arithmetic."""


def arithmetic_of(config: EngineConfig, precision: str) -> RunArithmetic:
    """Return the arithmetic of a run with these settings. `precision`: that of the experts, which `config` may leave to
    the files."""
    found = [] if config.kernels == "auto" else [f"kernels {config.kernels}"]
    found += [] if config.activations == "auto" else [f"activations {config.activations}"]
    found += ["reproducible"] * config.reproducible
    found += [] if max_cpu_isa() == "all" else [f"at most {max_cpu_isa()}"]
    return RunArithmetic(precision, ", ".join(found))


class Access(Enum):
    """How runs get experts that are not in memory."""

    DIRECT = "direct"
    """Reads past the page cache."""
    PAGE_CACHE = "page cache"
    """Copies from the page cache, which holds the whole model."""
    NONE = "in memory"
    """All experts are in memory, at least during a usual answer."""


def access_of(ledger: Ledger, is_direct: bool) -> Access:
    """Return how a run with this memory budget gets missing experts. `is_direct`: whether reads bypass the page
    cache."""
    if usual_slots(ledger) >= ledger.demand.total_experts:
        return Access.NONE
    return Access.DIRECT if is_direct else Access.PAGE_CACHE


def usable(pace: Pace, access: Access) -> Pace:
    """Return the times of a run that later forecasts can use. If the budget holds all experts, and the run ended while
    they were still being read, the time of an expert is corrected for these reads."""
    if access is not Access.NONE or (pace.reading or 0.0) <= _LEAST_READING:
        return pace
    return replace(_without_reads(pace), load=None, skew=None)


def _without_reads(pace: Pace) -> Pace:
    """Return the times of computing while no experts are read."""
    expert = None if pace.expert is None else pace.expert / crowded(pace.reading or 0.0)
    return replace(pace, expert=expert, reading=None)


def pace_of(folder: Path, arithmetic: RunArithmetic, access: Access) -> Pace:
    """Return the stored times of the model in `folder` with this arithmetic. What was only measured in runs with
    another access is the same, except the times of loads. Where all experts are in memory, no read slows an expert. The
    time of a layer without its experts is that of any precision."""
    others = [each for each in (Access.DIRECT, Access.PAGE_CACHE, Access.NONE) if each is not access]
    own, first, second = (_measured(folder, arithmetic, each) for each in (access, *others))
    found = replace(first.completed_by(second), load=None, first_load=None, beginning=None)
    if access is Access.NONE:
        found = _without_reads(found)
    return own.completed_by(found).completed_by(Pace(layer=_layer_of_any_precision(folder, arithmetic)))


def _layer_of_any_precision(folder: Path, arithmetic: RunArithmetic) -> float | None:
    """Return the time of a layer that was measured last on this processor with these settings, with experts in any
    precision."""
    for key, entry in reversed(_entries(folder).items()):
        precision, layer = key.split(_SEPARATOR)[1:2], entry.get("pace", {}).get("layer")
        same = [_key(arithmetic._replace(precision=each), access) for each in precision for access in Access]
        if key in same and isinstance(layer, float):
            return layer
    return None


def loads_other_way(folder: Path, arithmetic: RunArithmetic, access: Access) -> bool:
    """Return whether loads were measured only in runs that read experts the other way."""
    ways = {Access.DIRECT: Access.PAGE_CACHE, Access.PAGE_CACHE: Access.DIRECT}
    if access not in ways:
        return False
    own, other = (_measured(folder, arithmetic, each) for each in (access, ways[access]))
    return own.load is None and other.load is not None


def _measured(folder: Path, arithmetic: RunArithmetic, access: Access) -> Pace:
    """Return the times of the runs with this access to experts."""
    try:
        stored = _entries(folder)[_key(arithmetic, access)]["pace"]
        return Pace(**{field.name: stored[field.name] for field in fields(Pace)})
    except (KeyError, TypeError):
        return UNKNOWN


def last_run_of(folder: Path, arithmetic: RunArithmetic, access: Access) -> LastRun | None:
    """Return the comparison of the last run of the model in `folder` with its forecast; None if no run is stored."""
    try:
        return LastRun(**_entries(folder)[_key(arithmetic, access)]["last_run"])
    except (KeyError, TypeError):
        return None


def remember(
    folder: Path,
    arithmetic: RunArithmetic,
    access: Access,
    pace: Pace,
    last: LastRun | None = None,
    waited: float | None = None,
) -> Path:
    """Store the measurements of a run, combined with those of earlier runs. Return the file's path. Raises `OSError`.

    If other programs used the cores during some of the runs, the times of the other runs count. `last`: the comparison
    of the run with its forecast. Without one the comparison that is stored stays, and `waited` is the share of the
    run's time in which its thread waited for a core.
    """
    entries, key, known = _entries(folder), _key(arithmetic, access), _measured(folder, arithmetic, access)
    was_disturbed = key in entries and bool(entries[key].get("is_disturbed"))
    is_disturbed = _is_disturbed(waited if last is None else last.waited)
    if known != UNKNOWN and is_disturbed and not was_disturbed:
        now, is_disturbed = known.completed_by(pace), False
    elif was_disturbed and not is_disturbed:
        now = pace.completed_by(known)
    else:
        now = known.after(pace)
    entry = {
        "pace": asdict(now),
        "last_run": entries.get(key, {}).get("last_run") if last is None else asdict(last),
        "is_disturbed": is_disturbed,
    }
    entries.pop(key, None)  # the entry that was measured last is the last one
    return _Runs(entries | {key: entry}).store(folder)


def _is_disturbed(waited: float | None) -> bool:
    """Return whether a run waited so long for cores that other programs used that its times are not the machine's."""
    return waited is not None and waited >= BUSY_SHARE


@dataclass(frozen=True)
class _Runs(StoredValue):
    """What runs of one model have measured."""

    kind = "pace"
    version = 4

    entries: dict[str, Any]
    """The times and the last run, by the conditions of the runs (`_key`)."""

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> _Runs:
        return cls(fields)

    def fields(self) -> dict[str, Any]:
        return self.entries


def _entries(folder: Path) -> dict[str, Any]:
    found = _Runs.stored(folder)
    return {} if found is None else found.entries


_SEPARATOR = " | "


def _key(arithmetic: RunArithmetic, access: Access) -> str:
    """Return the key under which the times of a model are stored: processor, precision, settings of the arithmetic, and
    access to experts."""
    return _SEPARATOR.join([processor_name(), *arithmetic, access.value])
