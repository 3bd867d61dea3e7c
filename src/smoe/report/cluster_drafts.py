"""The draft models of a planned cluster: how much of the coordinator's memory each takes, and how much is left for
experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smoe.bounds import DEFAULT_DRAFT
from smoe.config import EngineConfig
from smoe.errors import BudgetError, ConfigError, UnsupportedModelError
from smoe.load.draft_size import least_draft_bytes
from smoe.machine.available_memory import free_device_bytes, less_margin
from smoe.policy.budget import Ledger, allocate, budget_for_share, full_bytes
from smoe.policy.registry import DRAFT
from smoe.report.forecast import Survey
from smoe.units import format_bytes


def of_one_machine(config: EngineConfig) -> tuple[EngineConfig, dict[str, str]]:
    """Return the coordinator's settings without those of a cluster, and {schedule: precision of its draft model}.

    Raises `ConfigError` for settings that `smoe cluster plan` does not support.
    """
    if config.cluster is not None:
        raise ConfigError(
            f"`cluster={config.cluster}` makes a run use that cluster; to plan with its measured workers, give "
            "`name` instead",
            setting="cluster",
            given=config.cluster,
            allowed="`name` instead, in a plan",
        )
    its = config.draft_precision if config.prefetch == DRAFT else None
    by_turns = config.placement == "round-robin"
    drafts = {"cluster": DEFAULT_DRAFT, "round-robin": "int8"}
    if its is not None:
        drafts["round-robin" if by_turns else "cluster"] = its
    usual: dict[str, Any] = dict.fromkeys(("placement", "draft_precision", "draft_start", "draft_on", "draft_extra"))
    if config.prefetch == DRAFT:
        usual |= {"prefetch": "auto", "prefetch_trial": None}
    return replace(config, **usual), drafts


def with_drafts(
    model: str, survey: Survey, config: EngineConfig, drafts: Mapping[str, str], revision: str | None
) -> tuple[Ledger | None, list[str]]:
    """Return the coordinator's memory budget with the draft model of the preset `cluster` (None if there is no room for
    that draft model), and a remark about the draft model of each schedule."""
    ledgers, remarks = dict[str, Ledger | None](), []
    for schedule, precision in drafts.items():
        what = f"{schedule} with a draft model in {precision} on the coordinator"
        its = replace(config, prefetch=DRAFT, draft_precision=precision)
        try:
            nbytes = least_draft_bytes(model, survey.spec, its, revision)
            ledgers[schedule] = _beside(survey, config, nbytes)
            takes = f"{format_bytes(nbytes)} of its memory"
        except BudgetError:
            ledgers[schedule], takes = None, f"{format_bytes(nbytes)}, which does not fit in its memory"
        except (ConfigError, UnsupportedModelError) as error:
            ledgers[schedule], takes = None, f"which does not work with this model: {error}"
        preset = "od-moe" if schedule == "round-robin" else schedule
        remarks.append(f"{what} ({takes}): `preset={preset}`, and first smoe pack --precision {precision}")
    remarks.append("the time of a draft model on the coordinator's cores is not included")
    return ledgers["cluster"], remarks


def _beside(survey: Survey, config: EngineConfig, draft_bytes: int) -> Ledger:
    """Return the coordinator's memory budget with room for a draft model. The budget has the requested size, or else is
    as large as the free memory allows. Raises `BudgetError` if the draft model does not fit."""
    demand = replace(survey.ledger.demand, draft_bytes=draft_bytes)
    if config.memory_bytes is not None or survey.is_emulated:
        return allocate(survey.ledger.budget_bytes, demand)
    if config.resident_share is not None:
        return allocate(budget_for_share(config.resident_share, demand), demand)
    free, _ = free_device_bytes(survey.device)
    return allocate(min(less_margin(free), full_bytes(demand)), demand)
