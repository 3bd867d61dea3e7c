"""Replaces settings that the user left out by tuned values of the model, and records where they come from.

`smoe tune --prefetch auto` and `--eviction auto` run a tournament (`eval/tournament.py`) and store its winner in the
user's cache. From then on the setting `auto` means the winner, if about as many experts are resident as in the
tournament. Winners for several resident shares are stored, and the one with the nearest share counts. If the baseline
won, `auto` itself is stored as the winner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.errors import ConfigError, UnpreparedError
from smoe.load.cache_weights import FittedWeights
from smoe.load.importance_profile import ImportanceProfile
from smoe.load.learned import LearnedValues, expected_bytes, learned_of
from smoe.load.priced_alpha import PricedAlpha
from smoe.load.priced_answers import prices_of
from smoe.load.tuned import TunedValue
from smoe.machine.device import AnyDevice, gpu_name
from smoe.machine.processor import processor_name
from smoe.memory.emulation import read_profile
from smoe.models.spec import ModelSpec
from smoe.policy.prices import PriceTable
from smoe.policy.registry import ONLINE_EVICTION, PREFETCH, eviction_kind

NEAR = 1 / 3
"""The largest relative distance between the current resident share and that of a winner's tournament."""
_log = logging.getLogger(__name__)

CHOICES = {"prefetch": PREFETCH, "eviction": ONLINE_EVICTION}
"""The settings that have tournaments, with their candidates."""


@dataclass(frozen=True)
class Winner:
    """The winner of a tournament, the runner-up, and the conditions of the tournament."""

    name: str
    """The winner's name; `auto` if the baseline won."""
    seconds: float
    """The winner's time per token, in seconds."""
    second: str
    second_seconds: float
    resident_share: float
    text: str
    machine: str
    """The machine, as the function `where` describes it."""

    def __str__(self) -> str:
        how = "stayed the choice after" if self.name == "auto" else "won"
        return (
            f"{how} the tournament on {self.text} with {self.resident_share:.0%} of the experts resident, "
            f"{1e3 * self.seconds:.1f} ms a token ({self.second} {1e3 * self.second_seconds:.1f})"
        )

    @property
    def place(self) -> tuple[str, str]:
        """The machine and the resident share. Only the latest winner for each such pair is stored."""
        return self.machine, f"{self.resident_share:.0%}"

    def distance(self, resident_share: float) -> float:
        """Return the relative distance of a resident share from that of the tournament."""
        return abs(resident_share / self.resident_share - 1)


@dataclass(frozen=True)
class Winners(TunedValue):
    """The winners of a model's tournaments: for each setting, the latest one of each machine and resident share."""

    kind = "winners"
    version = 3

    by_setting: dict[str, list[Winner]]

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Winners:
        """Return the stored winners. Entries that this version cannot read are left out."""
        return cls({setting: _winners(setting, fields.get(setting)) for setting in CHOICES})

    def fields(self) -> dict[str, Any]:
        return {setting: [vars(winner) for winner in found] for setting, found in self.by_setting.items() if found}

    @classmethod
    def of_model(cls, folder: Path) -> Winners:
        """Return the winners of the model in `folder`. If the file has another format version, log a warning and return
        none."""
        found, path = cls.stored(folder), cls.path_of(folder)
        if found is None and path.exists():
            _log.warning(
                "the stored tournament result %s is damaged or from another version of smoe, and is not used: run smoe "
                "tune for this model again",
                path,
            )
        return found or cls({})

    def of(self, setting: str) -> list[Winner]:
        """Return the winners of one setting."""
        return self.by_setting.get(setting, [])


def _winners(setting: str, entries: Any) -> list[Winner]:
    """Return the stored winners of one setting that can be read."""
    found = []
    for entry in entries if isinstance(entries, list) else ():
        try:
            winner = Winner(**entry)
            if winner.name in CHOICES[setting] and winner.resident_share > 0:
                found.append(winner)
        except TypeError:
            continue
    return found


def winners_of(folder: Path, machine: str) -> dict[str, list[Winner]]:
    """Return the winners of all tournaments of the model in `folder` on this machine, by setting."""
    stored = Winners.of_model(folder)
    return _of_machine(stored, machine)


def _of_machine(stored: Winners, machine: str) -> dict[str, list[Winner]]:
    found = {setting: [winner for winner in stored.of(setting) if winner.machine == machine] for setting in CHOICES}
    return {setting: winners for setting, winners in found.items() if winners}


def remember(folder: Path, setting: str, winner: Winner) -> Path:
    """Store the winner of a tournament of the model in `folder`. It replaces only a winner of the same setting, machine
    and resident share (in whole per cent).

    Returns the file's path. Raises `OSError`.
    """
    stored = Winners.of_model(folder)
    others = [each for each in stored.of(setting) if each.place != winner.place]
    return Winners(stored.by_setting | {setting: [*others, winner]}).store(folder)


def forget(folder: Path, settings: Sequence[str]) -> dict[str, list[Winner]]:
    """Delete the winners of `settings` for all machines and resident shares, and return them. Raises `OSError`."""
    stored = Winners.of_model(folder)
    left = Winners({setting: found for setting, found in stored.by_setting.items() if setting not in settings})
    if any(left.by_setting.values()):
        left.store(folder)
    else:
        left.path_of(folder).unlink(missing_ok=True)
    return {setting: stored.of(setting) for setting in settings}


class Decided(NamedTuple):
    """The settings after the results of tournaments have been applied, and the learned values that they need."""

    config: EngineConfig
    learned: LearnedValues
    reasons: dict[str, str]
    """The reason for the value of each setting that was decided here, by its name."""


def with_winners(
    config: EngineConfig, place: Path, spec: ModelSpec, device: AnyDevice, share_of: Callable[[int], float]
) -> Decided:
    """Return the settings, with each `auto` that a tournament has decided replaced by the winner. `place`: the model's
    folder.

    `share_of` returns the resident share for a number of bytes of learned values; it is called only if there are
    winners. A winning prefetch remains on trial: it is turned off if it does not pay. A winner is not used if its
    learned file is missing or for other weights, or if its resident share differs too much. Raises `ConfigError` if a
    value that the user requests by name has not been learned, and `BudgetError` if the budget is too small.
    """
    try:
        learned = learned_of(config, place, spec)
    except UnpreparedError:
        share_of(expected_bytes(config, spec))  # refuses a budget that is too small, before the user fits the predictor
        raise
    decided = Decided(config, learned, learned.reasons)
    stored = Winners.of_model(place)
    held = _of_machine(stored, where(config, device)) if any(stored.by_setting.values()) else {}
    asked = {setting: found for setting, found in held.items() if getattr(config, setting) == "auto"}
    share = share_of(decided.learned.nbytes) if asked else 0.0
    for setting, winners in asked.items():
        nearest = min(winners, key=lambda winner: winner.distance(share))
        if nearest.distance(share) > NEAR:
            why = _too_far(setting, nearest, share)
            decided = decided._replace(reasons=decided.reasons | {setting: why})
        elif nearest.name == "auto":
            decided = decided._replace(reasons=decided.reasons | {setting: str(nearest)})
        else:
            decided = _decided_by(decided, setting, nearest, place, spec)
    return decided


def _decided_by(decided: Decided, setting: str, winner: Winner, place: Path, spec: ModelSpec) -> Decided:
    changed: dict[str, Any] = {setting: winner.name}
    if setting == "prefetch" and decided.config.prefetch_trial is None:
        changed["prefetch_trial"] = True
    with_it = replace(decided.config, **changed)
    try:
        learned = learned_of(with_it, place, spec)
    except ConfigError as error:
        _log.warning("`%s=auto`: %s won the tournament, but is not used: %s", setting, winner.name, error)
        return decided
    reasons = decided.reasons | learned.reasons
    because = f"{winner}; {learned.reasons[setting]}" if setting in learned.reasons else str(winner)
    return Decided(with_it, learned, reasons | {setting: because})


def _too_far(setting: str, nearest: Winner, share: float) -> str:
    return (
        f"as without a tournament: the nearest result is for {nearest.resident_share:.0%} of the experts resident, "
        f"and {share:.0%} are; to measure, run smoe tune with `{setting}=auto` and this `memory`"
    )


def where(config: EngineConfig, device: AnyDevice) -> str:
    """Return the description of a machine for which the times of a tournament are valid: its processor and its device,
    or the emulated profile."""
    processor = processor_name()
    if config.device == EMULATED:
        return f"{processor}, acting {read_profile(config.profile).name}"
    return processor if device.type == "cpu" else f"{processor}, {gpu_name(device)}"


class ResolvedSettings(NamedTuple):
    """The settings of a model after tuned values have replaced the settings that the user left out."""

    config: EngineConfig
    reasons: dict[str, str]
    """The origin of each setting that the user left out, by its name."""
    prices: PriceTable | None = None
    """The quality costs of miss resolutions, if misses have a budget; else None."""


def known_of(config: EngineConfig, place: Path, resident_share: float) -> ResolvedSettings:
    """Return `config` with tuned values, for the model in `place`, of settings that the user left out.
    `resident_share`: the fraction of experts that fit into memory.

    Raises `ConfigError` if the resolution of misses has a quality budget and the model's quality costs have not been
    measured.
    """
    reasons: dict[str, str] = {}
    asked: dict[type[TunedValue], bool] = {
        ImportanceProfile: config.precision_shares is not None,
        PricedAlpha: config.alpha_as_priced,
        FittedWeights: config.cache_weights is None and "cache_weights" in eviction_kind(config.eviction).settings,
    }
    for kind in (kind for kind, is_asked in asked.items() if is_asked):
        config, origins = kind.apply(config, place, resident_share)
        reasons |= origins
    prices = _prices(config, place) if config.prices_answers else None
    return ResolvedSettings(config, reasons, prices)


def _prices(config: EngineConfig, place: Path) -> PriceTable:
    priced, budget = prices_of(place), "max_perplexity_increase" if config.tpot_seconds is None else "tpot_seconds"
    wanted = config.low_precision if config.has_low else None
    if priced is None or (wanted is not None and priced.low_precision not in (wanted, "none")):
        of_what = "" if wanted is None else f" with `low_precision={wanted}`"
        raise UnpreparedError(
            f"`{budget}`: the quality costs of this model{of_what} have not been measured yet; run smoe tune on it "
            f"with `prices`{of_what}, once",
            setting=budget,
            given=getattr(config, budget),
            allowed="for models whose quality costs have been measured",
        )
    return priced.table
