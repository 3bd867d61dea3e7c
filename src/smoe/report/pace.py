"""How fast the pieces of a model's runs were on this machine, stored for the next forecast (`on_clock.py`).

A forecast knows a machine by its rates. A run knows what an expert, a layer and a load of this model really took, which
does not hang on the budget; so the forecast after it is made of these. `smoe generate` keeps them in the user's cache.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from smoe.machine.measure import describe_machine
from smoe.machine.processor import BUSY_SHARE
from smoe.metrics import Counters
from smoe.user_cache import keep, of_model, read_stored

_FORMAT = 2
LEAST_STEPS = 16
"""Decode steps that a run has at least, to be learned from."""
_LEAST_LOADS = 16


@dataclass(frozen=True)
class Pace:
    """Seconds, as if nothing were read meanwhile; None where nothing is known yet. Of decode steps of one sequence."""

    layer: float | None = None
    """A layer without its experts, our own Python included."""
    expert: float | None = None
    load: float | None = None
    """An expert, while all threads read."""
    skew: float | None = None
    """How many times as much the model's routers like some experts more than others as typical ones do
    (`simulator/skewness.py`)."""
    prompt: float | None = None
    """What computing a prompt took in layers that had been computed before, over the forecast without this; within
    `PROMPT_FACTORS`."""
    first_pass: float | None = None
    """What the first pass of a process took beyond that, whatever the prompt: kernels are compiled, memory is touched.
    At most `MOST_FIRST_PASS`."""

    def after(self, other: Pace) -> Pace:
        """Combined with what `other` knows, by the geometric mean: one disturbed run says little."""
        shown = {name: value for name, value in vars(other).items() if value is not None}
        return replace(self, **{name: _between(getattr(self, name), value) for name, value in shown.items()})


UNKNOWN = Pace()


def _between(before: float | None, now: float) -> float:
    return now if before is None else (before * now) ** 0.5


PROMPT_FACTORS = (1 / 8, 8.0)
MOST_FIRST_PASS = 60.0
"""Seconds."""
_LEAST_FIRST_PASS = 1e-3
"""Seconds, so that a mean with it stays above 0."""
LEAST_PROMPT_TOKENS = 32
"""Of a prompt that a factor is learned from: in a shorter one calls take more of the time than arithmetic."""


def of_prompt(first_pass_seconds: float, warm_seconds: float, forecast_seconds: float, tokens: int) -> Pace:
    """What the first pass of a process shows of prompts: it computed so many tokens in so many seconds, would have
    taken `warm_seconds` in layers that had been computed before, and `forecast_seconds` by the machine's rates."""
    low, high = PROMPT_FACTORS
    factor = min(high, max(low, warm_seconds / forecast_seconds))
    once = min(MOST_FIRST_PASS, max(_LEAST_FIRST_PASS, first_pass_seconds - warm_seconds))
    return Pace(prompt=factor if tokens >= LEAST_PROMPT_TOKENS else None, first_pass=once)


UNTAUGHT_SPEEDS = (0.3, 1.5)
"""Between which shares of its forecast the speed of a model lies that has not run on this machine: 54 cells of large
models were within 0.66 and 1.5 of it, small ones go as low as 0.31 (docs/log/forecasts.md)."""
_OFF = 2.0
"""Times by which a run differs from its forecast at least, to be mentioned."""


@dataclass(frozen=True)
class LastRun:
    """How the last run of a model went, compared with the forecast before it."""

    per_token: float
    """The time per token, measured over forecast."""
    first_token: float
    """Likewise the time to the first token."""
    waited: float | None = None
    """Share of its time in which other programs had the cores."""

    def doubts(self) -> list[str]:
        """What a forecast made after this run has to mention."""
        found = []
        if _is_off(self.per_token) or _is_off(self.first_token):
            found.append(
                f"the forecast before the last run of this model was off: a token took {self.per_token:.2g} times as "
                f"long, the first token {self.first_token:.2g} times"
            )
        if self.waited is not None and self.waited >= BUSY_SHARE:
            found.append(
                f"the last run of this model waited {self.waited:.0%} of its time for a core used by other programs; "
                "its times hold for a machine as busy as that"
            )
        return found


def _is_off(ratio: float) -> bool:
    return max(ratio, 1 / ratio) > _OFF


ALONE = 2.1
"""How many times longer an expert takes a CPU that had to be waited for than one computed in one piece with others, of
three models in bf16 and int4 on two cores (docs/log/forecasts.md): the helping thread has gone to sleep, the product is
short."""


def crowded(reading: float) -> float:
    """How many times longer a layer without its experts takes on a CPU that reads experts for such a share of the time:
    the reading threads want the same cores and the same memory (docs/log/forecasts.md)."""
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
    try:
        stored = _stored(folder, precision, is_direct)["pace"]
        return Pace(**{field.name: stored[field.name] for field in fields(Pace)})
    except (KeyError, TypeError):
        return UNKNOWN


def last_run_of(folder: Path, precision: str, is_direct: bool) -> LastRun | None:
    """How the last of these runs went; None where none was compared with a forecast."""
    try:
        return LastRun(**_stored(folder, precision, is_direct)["last_run"])
    except (KeyError, TypeError):
        return None


def remember(folder: Path, precision: str, is_direct: bool, pace: Pace, last: LastRun | None = None) -> Path:
    """Keep what a run has shown, and what earlier ones have of which it shows nothing; returns where. Raises
    `OSError`."""
    path = of_model("pace", folder)
    stored: dict[str, Any] = read_stored(path, _FORMAT) or {}
    now = pace_of(folder, precision, is_direct).after(pace)
    entry = {"pace": asdict(now), "last_run": None if last is None else asdict(last)}
    return keep(path, {"format": _FORMAT} | stored | {_key(precision, is_direct): entry})


def _stored(folder: Path, precision: str, is_direct: bool) -> dict[str, Any]:
    content = read_stored(of_model("pace", folder), _FORMAT) or {}
    return dict(content.get(_key(precision, is_direct), {}))


def _key(precision: str, is_direct: bool) -> str:
    """Another processor has another pace."""
    return f"{describe_machine()['processor']}, {precision}, {'direct' if is_direct else 'page cache'}"
