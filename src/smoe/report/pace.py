"""How fast the pieces of a model's runs were on this machine, kept for the next forecast (`on_clock.py`).

A forecast knows a machine by its rates. A run knows what an expert, a layer and a load of this model really took, which
does not hang on the budget; so the forecast after it is made of these. `smoe generate` keeps them in the user's cache.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from smoe.machine.measure import describe_machine
from smoe.metrics import Counters
from smoe.user_cache import keep, kept, of_model

_FORMAT = 1
LEAST_STEPS = 16
"""Decode steps that a run has at least, to be learned from."""
_LEAST_LOADS = 16


@dataclass(frozen=True)
class Pace:
    """Seconds, as if nothing were read meanwhile; None where nothing is known yet. Of decode steps of one sequence."""

    layer: float | None = None
    """A layer beside its experts, our own Python included."""
    expert: float | None = None
    load: float | None = None
    """An expert, while all threads read."""
    skew: float | None = None
    """How many times as much the model's routers like some experts more than others as typical ones do
    (`simulator/skewness.py`)."""
    prompt: float = 1.0
    """What a prompt's computing took, over what was foretold without this."""

    def after(self, other: Pace) -> Pace:
        """With what `other` knows beside what was known before, their geometric mean: one disturbed run says little."""
        shown = {name: value for name, value in vars(other).items() if value is not None}
        return replace(self, **{name: _between(getattr(self, name), value) for name, value in shown.items()})


UNKNOWN = Pace()


def _between(before: float | None, now: float) -> float:
    return now if before is None else (before * now) ** 0.5


ALONE = 2.1
"""How many times longer an expert takes a CPU that had to be waited for than one computed in one piece with others, of
three models in bf16 and int4 on two cores (docs/log.md): the helping thread has gone to sleep, the product is short."""


def crowded(reading: float) -> float:
    """How many times longer a layer beside its experts takes on a CPU that reads experts for such a share of the time:
    the reading threads want the same cores and the same memory (docs/log.md)."""
    return 1 + 0.6 * min(1.0, reading)


def measured_pace(decode: Counters, layers: int, expert_bytes: int) -> Pace:
    """Of so many layers with experts of so many bytes, by what was counted in decode steps; nothing where these are too
    few."""
    passes, uses = decode.forward_passes, decode.decode_uses
    if passes < LEAST_STEPS or not uses:
        return UNKNOWN
    loads = min(float(decode.loads + decode.prefetches), decode.bytes_read / expert_bytes)  # some were taken back
    of_layers = crowded(decode.read_busy_seconds / decode.forward_seconds)
    alone = uses - decode.decode_hits
    return Pace(
        layer=(decode.dense_seconds + decode.plan_seconds) / (passes * layers * of_layers),
        expert=decode.compute_seconds / (uses + (ALONE - 1) * alone),
        load=decode.read_busy_seconds / loads if loads >= _LEAST_LOADS else None,
    )


def pace_of(folder: Path, precision: str, is_direct: bool) -> Pace:
    """What is known of the model in `folder` with experts in `precision`, read past the page cache or not."""
    stored: dict[str, Any] = (kept(of_model("pace", folder), _FORMAT) or {}).get(_key(precision, is_direct), {})
    try:
        return Pace(**{field.name: stored[field.name] for field in fields(Pace)})
    except (KeyError, TypeError):
        return UNKNOWN


def remember(folder: Path, precision: str, is_direct: bool, pace: Pace) -> Path:
    """Keep what a run has shown, and what earlier ones have of which it shows nothing; returns where. Raises
    `OSError`."""
    path = of_model("pace", folder)
    stored: dict[str, Any] = kept(path, _FORMAT) or {}
    before = pace_of(folder, precision, is_direct)
    now = pace if before == UNKNOWN else before.after(pace)
    return keep(path, {"format": _FORMAT} | stored | {_key(precision, is_direct): asdict(now)})


def _key(precision: str, is_direct: bool) -> str:
    """Another processor has another pace."""
    return f"{describe_machine()['processor']}, {precision}, {'direct' if is_direct else 'page cache'}"
