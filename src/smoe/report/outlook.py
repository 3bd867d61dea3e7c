"""Forecasts how a model would run on a machine, before anything is downloaded: `smoe plan`, by simulation
(`on_clock.py`).

The forecast has a range of speeds for the given budget and settings, and one speed each for other budgets, a faster
disk, other presets and precisions. It also names what limits the speed and the options to use, and warns of unpleasant
times.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from smoe.config import EngineConfig
from smoe.errors import BudgetError, ConfigError, UnsupportedModelError
from smoe.load.tuned_settings import ResolvedSettings, known_of
from smoe.memory.emulation import DeviceProfile
from smoe.models.described import Described
from smoe.models.finish_spec import with_experts_of
from smoe.models.packed import contents_in_precision
from smoe.models.spec import ModelSpec
from smoe.policy.budget import Ledger, full_bytes
from smoe.policy.registry import eviction_kind
from smoe.presets import PRESETS
from smoe.report.on_clock import (
    FIRST_TOKENS,
    Scene,
    Simulated,
    prompt_seconds,
    settled,
    simulate,
)
from smoe.report.pace import UNTAUGHT_SPEEDS, Access, Pace, RunArithmetic, access_of, arithmetic_of
from smoe.report.step_times import work_of
from smoe.report.usual_text import ANSWER_WORDS, PROMPT_TOKENS, TOKENS_A_WORD
from smoe.simulator.synthetic import LEAST_REPETITIVE, MOST_REPETITIVE, SAYS, TYPICAL
from smoe.units import enough_to_type, identifier, plain_span, size_to_type

LEAST_PLEASANT, MOST_PLEASANT = 2.0, 30.0
"""The thresholds of pleasant use: at least so many tokens per second, and at most so many seconds before an answer
begins."""
ALTERNATIVES = (("exact", "auto"), ("smoe", "auto"), ("hobbit", "auto"), ("exact", "int4"), ("smoe", "int4"))
"""The presets and precisions with which `smoe plan` compares the given settings."""
_OTHER_HABITS = (LEAST_REPETITIVE, MOST_REPETITIVE)
FASTER_READS = 2.0
LONG_PROMPT_TOKENS = 2000
"""The number of tokens of a long prompt whose time `smoe plan` prints."""


@dataclass(frozen=True)
class Case:
    """The forecast for one combination of settings and budget, by simulation."""

    preset: str
    precision: str
    budget_bytes: int
    resident_share: float
    lossy: list[str]
    missing: list[str]
    """The files that must be made before a run, each with its command: packs, quality costs, learned parameters."""
    run: Simulated
    is_taught: bool
    """Whether the forecast used times of earlier runs of this model in this precision on this machine."""
    first_pass_seconds: float | None = None
    """Additional seconds to the first token in the first pass of a process; None where no run has measured it."""

    def as_json(self) -> dict[str, Any]:
        return {
            "preset": self.preset,
            "precision": self.precision,
            "memory_budget_bytes": self.budget_bytes,
            "resident_share": self.resident_share,
            "lossy": self.lossy,
            "missing": self.missing,
            "tokens_per_second": self.run.tokens_per_second,
            "first_tokens_per_second": self.run.first_tokens_per_second,
            "ttft_seconds": self.run.ttft_seconds,
            "bound_by": self.run.bound_by,
        }


@dataclass(frozen=True)
class Outlook:
    """The simulated forecast for a model on a machine, with the given settings and with alternatives to them."""

    machine: DeviceProfile
    asked: Case
    by_routing: list[Simulated]
    """The simulations with the least and the most repetitive routing of the recorded texts. Empty if `spread` is a
    range, because the speed then depends far more on the machine than on the routing."""
    with_faster_reads: Simulated
    long_prompt_seconds: float | None
    """Seconds of a prompt of `LONG_PROMPT_TOKENS` tokens; None where the context is too short."""
    others: list[Case]
    """Forecasts for other presets and precisions with the same budget."""
    curve: list[Case]
    """The forecasts for the given settings with other budgets, in ascending order."""
    recommended: Case | None
    """The forecast for the budget that this machine should give the model; None if the model does not fit."""
    settings: dict[str, str]
    """The options of the command line with which to run the case of the given budget."""
    warnings: list[str]
    spread: tuple[float, float]
    """(lowest, highest) real speed as a factor of the simulated speed. (1, 1) if a run of the model has measured its
    times, or if the machine is a profile."""

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        speeds = [run.tokens_per_second for run in (self.asked.run, *self.by_routing)]
        return self.speeds(min(speeds), max(speeds))

    def speeds(self, lowest: float, highest: float) -> tuple[float, float]:
        """Return the range in which the real speed is expected, for the lowest and highest simulated speed."""
        return self.spread[0] * lowest, self.spread[1] * highest

    def seconds(self, simulated: float) -> tuple[float, float]:
        """Return the range in which the real time is expected, for a simulated time."""
        return simulated / self.spread[1], simulated / self.spread[0]

    @property
    def answer_seconds(self) -> float:
        """Seconds from the first to the last word of an answer of `ANSWER_WORDS` words."""
        return self.asked.run.answer_seconds(ANSWER_WORDS * TOKENS_A_WORD)

    def plainly(self) -> str:
        """Return the forecast in one sentence."""
        answer = f"A {ANSWER_WORDS}-word answer takes {plain_span(*self.seconds(self.answer_seconds))}"
        if self.long_prompt_seconds is None:
            return f"{answer}."
        prompt = plain_span(*self.seconds(self.long_prompt_seconds))
        return f"{answer}, reading a prompt of {LONG_PROMPT_TOKENS:,} tokens {prompt}."

    def as_json(self) -> dict[str, Any]:
        """Return the part of the output of `smoe plan --json` that contains this forecast."""
        run = self.asked.run
        return {
            **self.asked.as_json(),
            "tokens_per_second_range": self.tokens_per_second,
            "is_calibrated": self.asked.is_taught,
            "first_tokens": FIRST_TOKENS,
            "ttft_seconds_range": self.seconds(run.ttft_seconds),
            "first_pass_seconds": self.asked.first_pass_seconds,
            "ttft_prompt_tokens": PROMPT_TOKENS,
            "ttft_bound_by": run.prefill_bound_by,
            "hit_ratio": run.hit_ratio,
            "prefetch_pays": run.prefetches,
            "seconds_per_token": run.seconds_per_token,
            "seconds_by_part": {identifier(name): seconds for name, seconds in run.parts.items()},
            "with_reads_twice_as_fast": self.with_faster_reads.tokens_per_second,
            "answer_seconds": self.answer_seconds,
            "long_prompt_seconds": self.long_prompt_seconds,
            "plainly": self.plainly(),
            "other_presets": [case.as_json() for case in self.others],
            "other_budgets": [case.as_json() for case in self.curve],
            "settings": self.settings,
            "warnings": self.warnings,
            "machine": asdict(self.machine),
            "routing": SAYS,
        }


@dataclass(frozen=True)
class Subject:
    """A model with settings on a machine, for which forecasts are simulated."""

    model: str
    checkpoint: Described
    spec: ModelSpec
    config: EngineConfig
    machine: DeviceProfile
    dense_bytes: int
    """Bytes of non-expert weights that a step reads."""
    predictor_of: Callable[[ModelSpec, EngineConfig], str]
    """A function that returns the name of the predictor that decoding uses."""
    pace_of: Callable[[RunArithmetic, Access], Pace]
    """A function that returns the times measured in earlier runs, for an arithmetic and an access to experts."""
    divide: Callable[[int, ModelSpec, EngineConfig], Ledger]
    """A function that divides a memory budget, given in bytes. Raises `BudgetError` if it is too small."""
    is_direct: bool = False
    """Whether loads read past the page cache."""
    unlearned: tuple[str, ...] = ()
    """Messages about values that the settings need and that have not been learned for the model."""

    def case(self, ledger: Ledger, is_compared: bool = False) -> tuple[Case, Scene]:
        """Return the forecast for these settings with the memory budget `ledger`, and the scene that was simulated.
        `is_compared` as in `Scene`."""
        known, missing = self._known(ledger)
        missing = [*self._packs(), *self.unlearned, *missing]
        work = work_of(self.spec, self.dense_bytes)
        predictor = self.predictor_of(self.spec, known.config)
        pace = self.pace_of(arithmetic_of(self.config, self.spec.precision), access_of(ledger, self.is_direct))
        unsettled = Scene(
            work, self.machine, ledger, known.config, predictor, known.prices, pace=pace, is_compared=is_compared
        )
        scene, run = settled(unsettled)
        config = self.config
        case = Case(
            preset_of(config),
            config.precision,
            ledger.budget_bytes,
            ledger.resident_share,
            config.lossy,
            missing,
            run,
            pace.expert is not None,
            pace.first_pass,
        )
        return case, scene

    def _known(self, ledger: Ledger) -> tuple[ResolvedSettings, list[str]]:
        """Return the settings with a value in place of every `auto`, and messages about missing measurements. Without
        measured quality costs, misses are resolved exactly."""
        place, config = self.checkpoint.place, self.config
        if eviction_kind(config.eviction).learned:  # learned parameters are for all layers, but only some are simulated
            config = replace(config, eviction="auto")
        try:
            return known_of(config, place, ledger.resident_share), []
        except ConfigError:
            exact = replace(config, max_perplexity_increase=None, tpot_seconds=None, precision_shares=None)
            low = f" with `low_precision={config.low_precision}`" if config.has_low else ""
            first = (
                f"quality costs: smoe tune --prices {shlex.quote(self.model)}{low}; the forecast is made without them"
            )
            return known_of(exact, place, ledger.resident_share), [first]

    def _packs(self) -> list[str]:
        """Return a line for each packed file that the settings need and that does not exist, with the command that
        writes it."""
        lacking = []
        for spec in (self.spec, self.spec.low):
            if spec is None or spec.precision == "auto":
                continue
            contents = contents_in_precision(spec.sites, spec.precision, spec.config.model_type, spec.own_dtype)
            path = contents.path(self.checkpoint.place)
            if not path.exists():
                where = f" ({path.name})" if self.checkpoint.has_weights() else ""
                pack = f"smoe pack --precision {spec.precision} {shlex.quote(self.model)}"
                lacking.append(f"experts in {spec.precision}{where}: {pack}")
        return lacking


def preset_of(config: EngineConfig) -> str:
    """Return the name of the preset whose settings a configuration has; `own` if there is none."""
    for name, switches in PRESETS.items():
        wanted = {switch: getattr(EngineConfig, switch) for switch in _SWITCHES} | switches
        if all(getattr(config, switch) == value for switch, value in wanted.items()):
            return name
    return "own"


_SWITCHES = sorted({switch for switches in PRESETS.values() for switch in switches})
"""The names of all settings that some preset sets."""


def with_preset(config: EngineConfig, preset: str, precision: str) -> EngineConfig:
    """Return the configuration with the settings of a preset and with this precision of the experts."""
    usual = {switch: getattr(EngineConfig, switch) for switch in _SWITCHES}
    return replace(config, **usual | PRESETS[preset] | {"precision": precision})


def outlook_of(
    subject: Subject,
    ledger: Ledger,
    budgets: Sequence[Ledger],
    recommended: Ledger | None,
    is_here: bool,
    is_rough: bool = False,
) -> Outlook:
    """Return the forecast with all its alternatives, whose simulations take some seconds.

    `budgets`: the budgets to compare, including `ledger`. `is_here`: whether the machine is this one, so that runs can
    improve the forecast. `is_rough`: whether the sizes are rough, so that speeds are wide ranges, and presets and
    precisions are not compared.
    """
    asked, scene = subject.case(ledger)
    compared, known = replace(scene, is_compared=True), {ledger.pools: asked}

    def case(budget: Ledger) -> Case:
        """Return the forecast for a memory budget. Budgets that hold the same experts share a simulation."""
        if budget.pools not in known:
            known[budget.pools] = subject.case(budget, is_compared=True)[0]
        return replace(known[budget.pools], budget_bytes=budget.budget_bytes, resident_share=budget.resident_share)

    spread = UNTAUGHT_SPEEDS if is_rough or (is_here and not asked.is_taught) else (1.0, 1.0)
    return Outlook(
        machine=subject.machine,
        asked=asked,
        by_routing=[simulate(compared, habits) for habits in _OTHER_HABITS if spread == (1, 1)],
        with_faster_reads=simulate(replace(scene, faster_reads=FASTER_READS), TYPICAL),
        long_prompt_seconds=(
            prompt_seconds(scene, LONG_PROMPT_TOKENS) if subject.spec.context_tokens >= LONG_PROMPT_TOKENS else None
        ),
        others=[] if is_rough else list(_others(subject, ledger, asked)),
        curve=[asked if each is ledger else case(each) for each in budgets],
        recommended=None if recommended is None else case(recommended),
        settings=_settings(subject, ledger, asked),
        warnings=_warnings(asked),
        spread=spread,
    )


def _others(subject: Subject, ledger: Ledger, asked: Case) -> Iterator[Case]:
    """Yield the forecasts for other presets and precisions, if the model supports them and the memory budget holds
    them."""
    for preset, precision in ALTERNATIVES:
        if (preset, precision) == (asked.preset, asked.precision):
            continue
        try:
            config = with_preset(subject.config, preset, precision)
            spec = with_experts_of(subject.spec, subject.checkpoint, config)
            divided = subject.divide(ledger.budget_bytes, spec, config)
        except (BudgetError, ConfigError, UnsupportedModelError):
            continue
        yield replace(subject, spec=spec, config=config, unlearned=()).case(divided, is_compared=True)[0]


def budget_to_type(ledger: Ledger) -> str:
    """Return a memory budget for the command line. It is rounded down, because it may be all the free memory; but the
    least budget for the whole model is rounded up, because with less the run would not be the planned one."""
    is_least = ledger.budget_bytes == full_bytes(ledger.demand)
    return enough_to_type(ledger.budget_bytes) if is_least else size_to_type(ledger.budget_bytes)


def _settings(subject: Subject, ledger: Ledger, asked: Case) -> dict[str, str]:
    """Return the options of the command line with which to run a case. Options with default values are left out."""
    config = subject.config
    found = {"memory": budget_to_type(ledger)}
    if config.context_tokens is not None:
        found["context"] = str(config.context_tokens)
    if asked.preset not in ("exact", "own"):
        found["preset"] = asked.preset
    if config.precision != "auto":
        found["precision"] = config.precision
    usual = PRESETS.get(asked.preset, {})
    for name in ("eviction", "prefetch"):
        if getattr(config, name) != usual.get(name, getattr(EngineConfig, name)):
            found[name] = getattr(config, name)
    return found


def _warnings(asked: Case) -> list[str]:
    """Return warnings about speeds below `LEAST_PLEASANT` and waits above `MOST_PLEASANT`."""
    found, run = [], asked.run
    if run.tokens_per_second < LEAST_PLEASANT:
        found.append(
            f"{run.tokens_per_second:.2g} tokens/s are slower than reading speed: most of the time goes to "
            f"{run.bound_by}"
        )
    if run.ttft_seconds > MOST_PLEASANT:
        found.append(
            f"the first token of a prompt of {PROMPT_TOKENS} tokens takes {run.ttft_seconds:.0f} s: most of it goes to "
            f"{run.prefill_bound_by}"
        )
    return found
