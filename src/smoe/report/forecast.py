"""Forecasts what a memory budget achieves, from a model's config.json: the table of `smoe plan`.

Two kinds of routing bound a run's speed. *Uniform*: every expert is equally likely, so the hit ratio equals the share
of resident experts; loads and computing do not overlap. *Typical*: experts repeat as in recorded texts
(`TYPICAL_HITS`), and loads overlap with computing. The speed of a run is between the speeds with these two kinds of
routing, or is limited by something that is not modelled. For an emulated device the rates are those of the profile,
with every expert in its host tier.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.errors import BudgetError, ConfigError
from smoe.load.device import device_for
from smoe.load.learned import expected_bytes, predictor_name
from smoe.load.ledger import (
    demand_of,
    fit_context,
    make_ledger,
    open_if_here,
    outside_budget,
    resident_share_with,
    shortages_of,
    with_lent_slots,
)
from smoe.load.tuned_settings import with_winners
from smoe.machine.available_memory import free_device_bytes, less_margin
from smoe.machine.device import AnyDevice
from smoe.machine.floor import Floor, Rates, StepBytes, floor_of, step_at
from smoe.machine.this_machine import layer_seconds
from smoe.memory.emulation import read_profile
from smoe.models.config_doubts import doubts_of_files
from smoe.models.described import Described
from smoe.models.model_sizes import model_sizes
from smoe.models.planned_model import PlannedModel, planned_model
from smoe.models.spec import ModelSpec
from smoe.policy.budget import Demand, Ledger, allocate, full_bytes, minimum_bytes
from smoe.policy.registry import DRAFT
from smoe.report.machine_for import files_of, machine_for, pace_for, rates_for, reads_past_cache
from smoe.report.outlook import Case, Outlook, Subject, outlook_of, preset_of
from smoe.report.pace import access_of, arithmetic_of
from smoe.report.remarks import moved_per_token, of_earlier_runs, of_machine
from smoe.units import identifier

TYPICAL_HITS = ((0.0, 0.0), (0.04, 0.12), (0.1, 0.28), (0.2, 0.47), (0.4, 0.72), (0.6, 0.88), (1.0, 1.0))
"""(share of resident experts, hit ratio) with the default eviction: means over the four recorded texts of
docs/evictions.md."""
_SHARES = (0.1, 0.25, 0.5, 0.75)
"""The budgets in the table between the smallest and the largest one, given by the share of experts in memory."""
_WITHOUT_LOW = "speeds are without low copies: their gain depends on which experts are missing, and on their importance"
_ESTIMATE = (
    "the sizes come from config.json only: once its files are on this machine, slots may be 4 KiB smaller, and reading "
    "may need buffers"
)


@dataclass(frozen=True)
class Traffic:
    """The bytes that one kind of routing (uniform or typical) moves per token, and the shortest time in which they can
    be moved."""

    step: StepBytes
    floor: Floor | None

    @property
    def bytes_per_token(self) -> float:
        """The bytes of experts per token that are read from disk, or copied over the link where experts are in a host
        tier."""
        return self.step.disk or self.step.link


@dataclass(frozen=True)
class Choice:
    """A memory budget with its division, and the speeds forecast for it."""

    ledger: Ledger
    uniform: Traffic
    typical: Traffic
    layers_seconds: float
    """The seconds of all layers of a token that are not spent on moving bytes."""

    @property
    def tokens_per_second(self) -> tuple[float, float] | None:
        """(lowest, highest) tokens per second. The lowest: uniform routing, and loads do not overlap with computing.
        The highest: typical routing with perfect overlap. None if a rate of the machine is unknown."""
        low, high = self.uniform.floor, self.typical.floor
        if low is None or high is None:
            return None
        return (
            1 / (low.serial_seconds + self.layers_seconds),
            1 / max(high.disk_seconds, high.link_seconds, high.memory_seconds + self.layers_seconds),
        )


@dataclass(frozen=True)
class Recommendation:
    """The memory budget that this machine should give the model."""

    choice: Choice
    free_bytes: int
    source: str
    """A phrase that says where the number `free_bytes` comes from."""


@dataclass(frozen=True)
class Forecast:
    """The forecast of `smoe plan`: a model, a budget, and alternatives to this budget."""

    model: str
    spec: ModelSpec
    ledger: Ledger
    reason: str
    chosen: Choice
    choices: list[Choice]
    """The budgets in the table, in ascending order. The chosen budget is one of them."""
    rates: Rates
    is_emulated: bool
    """Whether rates are those of an emulated device's profile, with experts in its host tier."""
    recommendation: Recommendation | None
    """The recommended budget; None if the machine has too little memory for the model."""
    remarks: list[str]
    outside_budget: dict[str, int]
    """The maximum number of bytes of the process outside the budget, by name; empty where the budget is a GPU's
    memory."""
    outlook: Outlook | None
    """The simulated forecast; None if the rate of loading experts is unknown."""
    obstacle: str | None = None
    """Why smoe cannot run the model; None if it can. All figures of a model that smoe cannot run are rough."""

    @property
    def moved(self) -> str:
        """The heading of the column with the bytes that a token loads for missing experts."""
        return moved_per_token(self.is_emulated)

    def as_json(self) -> dict[str, Any]:
        """Return the output of `smoe plan --json`."""
        spec, ledger, floor = self.spec, self.ledger, self.chosen.uniform.floor
        return {
            "model": self.model,
            "can_run": self.obstacle is None,
            "cannot_run_because": self.obstacle,
            "model_type": spec.config.model_type,
            "dtype": str(spec.dtype),
            "moe_layers": len(spec.sites),
            "experts": ledger.demand.total_experts,
            "top_k": ledger.demand.top_k,
            "context_tokens": spec.context_tokens,
            "memory_budget_bytes": ledger.budget_bytes,
            "memory_budget_reason": self.reason,
            "bytes": {identifier(name): count for name, count in ledger.entries().items()},
            "beside_budget_bytes": {identifier(name): count for name, count in self.outside_budget.items()},
            "slots": ledger.cache_slots,
            "most_slots": ledger.most_slots,
            "low_slots": ledger.low_slots,
            "low_copy_bytes": None if spec.low is None else spec.low.expert_bytes,
            "staging_slots": ledger.staging_slots,
            "resident_share": ledger.resident_share,
            "expert_bytes": spec.expert_bytes,
            "experts_bytes": spec.experts_bytes,
            "dense_bytes": spec.weights_bytes,
            "file_bytes": None if spec.files is None else spec.files.together,
            "experts_file_bytes": None if spec.files is None else spec.files.experts,
            "expert_bytes_per_token": spec.expert_bytes_per_token,
            "bytes_per_token": self.chosen.uniform.bytes_per_token,
            "typical_bytes_per_token": self.chosen.typical.bytes_per_token,
            "floor_tokens_per_second": _range(self.chosen),
            "minimum_memory_bytes": minimum_bytes(ledger.demand),
            "full_memory_bytes": full_bytes(ledger.demand),
            "floor_seconds_per_token": floor.overlapped_seconds if floor else None,
            "floor_serial_seconds_per_token": floor.serial_seconds if floor else None,
            "floor_bound_by": floor.bound_by if floor else None,
            "assumption": "from uniform routing (hit ratio = resident share) to typical routing (recorded texts)",
            "recommended": _as_json(self.recommendation),
            "rates": {
                "memory_bytes_per_second": self.rates.memory,
                "disk_bytes_per_second": self.rates.disk,
                "link_bytes_per_second": self.rates.link,
                "source": self.rates.source,
            },
            "remarks": self.remarks,
            "forecast": None if self.outlook is None else self.outlook.as_json(),
        }


class Survey(NamedTuple):
    """A model, its memory budget and the rates of a machine, found before any forecast is made."""

    spec: ModelSpec
    ledger: Ledger
    reason: str
    outside: dict[str, int]
    """{name: bytes} of the process's memory outside the budget."""
    rates: Rates
    device: AnyDevice
    is_emulated: bool
    is_estimate: bool
    """Whether sizes come from the configuration only, where the model's files would have exact ones."""
    remarks: list[str]
    subject: Subject | None
    """The model, settings and machine to simulate; None if the rate of loading experts is unknown."""
    obstacle: str | None = None
    """Why smoe cannot run the model; None if it can."""


def foretell(model: str, config: EngineConfig, revision: str | None = None) -> Case | None:
    """Return the simulated forecast for the given settings only, without alternatives; None if the rate of loading
    experts is unknown."""
    survey = survey_of(model, config, revision)
    return None if survey.subject is None else survey.subject.case(survey.ledger)[0]


def forecast(model: str, config: EngineConfig, revision: str | None = None) -> Forecast:
    """Return the forecast of `smoe plan` for a model. Only the config and, if present, the headers of the weights are
    read.

    For a model that smoe cannot run, return a rough forecast without other budgets, presets and precisions. Raise
    `UnsupportedModelError` if the files lack the sizes for that, and `BudgetError` if the budget is too small.
    """
    survey = survey_of(model, config, revision, may_be_rough=True)
    spec, ledger, device, is_emulated = survey.spec, survey.ledger, survey.device, survey.is_emulated
    choose = functools.partial(_choice, spec, rates=survey.rates, device=device, is_emulated=is_emulated)
    chosen = choose(ledger)
    divide = functools.partial(_divided, ledger.demand, config=config, device=device)
    is_rough = survey.obstacle is not None
    others = [] if is_rough else [choose(divide(size)) for size in _other_budgets(ledger)]
    choices = sorted([chosen, *others], key=lambda choice: choice.ledger.budget_bytes)
    recommended = (
        None if is_emulated or is_rough else _recommend(ledger.demand, device, lambda size: choose(divide(size)))
    )
    has_own_memory = is_emulated or device.type != "cpu"
    outside = {} if has_own_memory else survey.outside
    remarks = of_machine(survey.rates, is_emulated) + [_ESTIMATE] * survey.is_estimate
    remarks += [*spec.doubts, *doubts_of_files(spec)]
    remarks += [_WITHOUT_LOW] * (spec.low is not None) + survey.remarks
    outlook = None
    if survey.subject is not None:
        ledgers = [choice.ledger for choice in choices]
        best = None if recommended is None else recommended.choice.ledger
        is_here = device.type == "cpu" and not is_emulated
        outlook = outlook_of(survey.subject, ledger, ledgers, best, is_here=is_here, is_rough=is_rough)
    return Forecast(
        model, spec, ledger, survey.reason, chosen, choices, survey.rates, is_emulated, recommended, remarks, outside,
        outlook, survey.obstacle,
    )  # fmt: skip


def survey_of(model: str, config: EngineConfig, revision: str | None, may_be_rough: bool = False) -> Survey:
    """Return what a simulation needs: how the memory budget is divided for this model (from its config), and the
    machine's rates of reading, copying and computing.

    Raises `ConfigError` for settings that cannot be simulated. `may_be_rough`: whether a model that smoe cannot run is
    surveyed by rough sizes; otherwise `UnsupportedModelError` is raised.
    """
    device = device_for(config)
    _check_simulated(config)
    planned = (planned_model if may_be_rough else _runnable)(model, config, revision)
    try:
        return _surveyed(model, config, device, planned)
    except BudgetError as error:
        if planned.obstacle is None:
            raise
        raise BudgetError(
            f"smoe cannot run this model: {planned.obstacle}. If it could, {error}",
            setting=error.setting,
            given=error.given,
            allowed=error.allowed,
        ) from error


def _runnable(model: str, config: EngineConfig, revision: str | None) -> PlannedModel:
    return PlannedModel(*model_sizes(model, config, revision))


def _check_simulated(config: EngineConfig) -> None:
    """Raise `ConfigError` for settings that cannot be simulated."""
    if config.cluster is not None or config.placement is not None:
        preset = preset_of(config)
        has = f"`placement={config.placement}`" if preset == "own" else f"`preset={preset}`"
        given = ["`cluster`"] * (config.cluster is not None) + [has] * (config.placement is not None)
        raise ConfigError(
            "smoe plan forecasts for one machine; use smoe cluster plan for several machines, or leave out "
            f"{' and '.join(given)}",
            setting="cluster",
            given=config.cluster,
            allowed="none in a plan",
        )
    if config.prefetch == DRAFT:
        raise ConfigError(
            f"`prefetch={DRAFT}`: the time of a draft model is not simulated, so smoe plan does not support it; "
            "leave it out",
            setting="prefetch",
            given=DRAFT,
            allowed="another predictor in a plan",
        )


def _surveyed(model: str, config: EngineConfig, device: AnyDevice, planned: PlannedModel) -> Survey:
    """Return what a simulation needs for a model whose sizes are known. Raise `BudgetError` if the budget is too
    small."""
    checkpoint, spec, obstacle = planned
    profile = read_profile(config.profile) if config.device == EMULATED else None
    if profile is not None and profile.device_memory_bytes is not None and config.resident_share is None:
        config = replace(config, memory_bytes=config.memory_bytes or less_margin(int(profile.device_memory_bytes)))
    store = open_if_here(checkpoint, spec, device)
    outside = outside_budget(spec, config)
    spec, config, fitted = fit_context(
        spec,
        config,
        lambda each: each.demand(config) if store is None else demand_of(each, config, device, store),
        outside,
    )
    share_of = resident_share_with(spec, config, device, store, 0, outside)
    config, learned_bytes, decided, unlearned = _decided(config, checkpoint, spec, device, share_of)
    decided = [*(f"`{name}={getattr(config, name)}` is used: {why}" for name, why in fitted.items()), *decided]
    ledger, reason = make_ledger(spec, config, device, store, learned_bytes, 0, outside)
    if profile is None:
        decided = [*decided, *shortages_of(config, ledger, device)]
    is_direct, is_emulated = reads_past_cache(config, spec, ledger, device), profile is not None
    files = (store or files_of(checkpoint, spec, device)) if is_direct and profile is None else None
    rates = rates_for(device, spec.expert_bytes, profile, files)
    machine, subject = machine_for(rates, device, profile, is_direct, spec), None
    if machine is not None:
        guess = functools.partial(predictor_name, device=device)
        pace = functools.cache(functools.partial(pace_for, checkpoint, device, is_emulated))
        dense = spec.dense_bytes_read

        def divide(nbytes: int, spec: ModelSpec, config: EngineConfig) -> Ledger:
            return _divided(spec.demand(config), nbytes, config, device)

        subject = Subject(model, checkpoint, spec, config, machine, dense, guess, pace, divide, is_direct, unlearned)
        if device.type == "cpu" and not is_emulated and obstacle is None:
            decided = [
                *decided,
                *of_earlier_runs(checkpoint.place, arithmetic_of(config, spec.precision), access_of(ledger, is_direct)),
            ]
    is_estimate = store is None and spec.precision == "auto" and obstacle is None
    return Survey(spec, ledger, reason, outside, rates, device, is_emulated, is_estimate, decided, subject, obstacle)


def _decided(
    config: EngineConfig,
    checkpoint: Described,
    spec: ModelSpec,
    device: AnyDevice,
    resident_share_with: Callable[[int], float],
) -> tuple[EngineConfig, int, list[str], tuple[str, ...]]:
    """Return (the configuration of a run, the bytes of values learned for it, the reasons for settings that were
    chosen, messages about values that are missing)."""
    if not checkpoint.has_weights():
        return config, expected_bytes(config, spec), [], ()
    try:
        decided = with_winners(config, checkpoint.place, spec, device, resident_share_with)
    except ConfigError as error:
        return config, expected_bytes(config, spec), [], (f"{error}; the forecast is made without it",)
    because = [f"`{name}={getattr(decided.config, name)}` is used: {why}" for name, why in decided.reasons.items()]
    return decided.config, decided.learned.nbytes, because, ()


def _divided(demand: Demand, nbytes: int, config: EngineConfig, device: AnyDevice) -> Ledger:
    return with_lent_slots(allocate(nbytes, demand), config, device)


def _other_budgets(chosen: Ledger) -> list[int]:
    """Return the other memory budgets of the table, in bytes: the smallest possible one, budgets that hold the
    fractions `_SHARES` of the experts, and the budget that holds the whole model."""
    demand = chosen.demand
    least, full = minimum_bytes(demand), full_bytes(demand)
    sizes = {least, full}
    for share in _SHARES:
        size = full - int((1 - share) * demand.experts_bytes)
        if least < size < full:
            sizes.add(size)
    return sorted(sizes - {chosen.budget_bytes})


def _recommend(demand: Demand, device: AnyDevice, choose: Callable[[int], Choice]) -> Recommendation | None:
    """Return the budget that this machine should give the model: the free memory less a margin, at most the whole
    model, rounded down; None if the model does not fit. `choose` returns the division of a budget in bytes."""
    free, source = free_device_bytes(device)
    room, full = less_margin(free), round_up(full_bytes(demand))
    budget = full if full <= room else round_down(room)
    if budget < minimum_bytes(demand):
        return None
    return Recommendation(choose(budget), free, source)


def round_down(nbytes: int) -> int:
    """Return the largest round size that is not above `nbytes`. A round size is a multiple of a unit (GiB, MiB or
    byte), or below four units a multiple of a quarter unit."""
    return nbytes // _step(nbytes) * _step(nbytes)


def round_up(nbytes: int) -> int:
    """Return the smallest round size (as in `round_down`) that is not below `nbytes`."""
    return -(-nbytes // _step(nbytes)) * _step(nbytes)


def _step(nbytes: int) -> int:
    unit = next((unit for unit in (1 << 30, 1 << 20) if nbytes >= unit), 1)
    return unit if nbytes >= 4 * unit else max(1, unit // 4)


def typical_hit_ratio(resident_share: float) -> float:
    """Return the hit ratio of typical texts if the fraction `resident_share` of the experts is resident, interpolated
    in `TYPICAL_HITS`."""
    for (low, at_low), (high, at_high) in itertools.pairwise(TYPICAL_HITS):
        if resident_share <= high:
            return at_low + (at_high - at_low) * (resident_share - low) / (high - low)
    return 1.0


def _choice(spec: ModelSpec, ledger: Ledger, rates: Rates, device: AnyDevice, is_emulated: bool) -> Choice:
    has_link = is_emulated or device.type == "cuda"

    def case(hit_ratio: float) -> Traffic:
        step = step_at(spec.expert_bytes_per_token, spec.dense_bytes_read, hit_ratio, has_link)
        step = replace(step, disk=0.0) if is_emulated else step
        return Traffic(step, floor_of(step, rates))

    share = ledger.resident_share
    text = spec.config.get_text_config()
    layers = layer_seconds(int(text.hidden_size)) * int(text.num_hidden_layers) if not has_link else 0.0
    return Choice(ledger, case(share), case(typical_hit_ratio(share)), layers)


def _range(choice: Choice) -> dict[str, float] | None:
    speeds = choice.tokens_per_second
    return None if speeds is None else {"uniform": speeds[0], "typical": speeds[1]}


def _as_json(recommended: Recommendation | None) -> dict[str, Any] | None:
    if recommended is None:
        return None
    ledger = recommended.choice.ledger
    return {
        "memory_budget_bytes": ledger.budget_bytes,
        "resident_share": ledger.resident_share,
        "floor_tokens_per_second": _range(recommended.choice),
        "free_bytes": recommended.free_bytes,
    }
