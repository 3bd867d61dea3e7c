"""What a budget buys, forecast from a model's config.json: the table of `smoe plan`.

The floor assumes that every expert is equally likely (hit ratio = resident share). Real routing repeats itself, so a
run does better than this floor suggests; it is the planner's cautious side. For an emulated device it is the floor of
the machine whose times are acted, with every expert in its host tier.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from smoe.config import EMULATED, EngineConfig
from smoe.floor import Floor, Rates, StepBytes, floor_of, uniform_step
from smoe.hardware import acted_rates, load_profile, measure_small_disk, quick_rates
from smoe.loading import choose_device, make_ledger
from smoe.memory.emulation import DeviceProfile, read_profile
from smoe.memory.process import beside_budget
from smoe.models.workspace import reserved_kernel_bytes
from smoe.planning import Blueprint, blueprint
from smoe.policy.budget import Ledger, allocate, full_bytes, minimum_bytes

_SHARES = (0.1, 0.25, 0.5, 0.75)
"""Budgets between the smallest and the full one that the table shows, by share of experts in memory."""


@dataclass(frozen=True)
class Choice:
    """One budget and what it buys."""

    ledger: Ledger
    step: StepBytes
    floor: Floor | None

    @property
    def bytes_per_token(self) -> float:
        """What a token has to bring in: from the disk, or over the link alone where experts wait in a host tier."""
        return self.step.disk or self.step.link


@dataclass(frozen=True)
class Forecast:
    """A model, a budget, and the alternatives."""

    model: str
    blueprint: Blueprint
    ledger: Ledger
    reason: str
    chosen: Choice
    choices: list[Choice]
    """Ascending by budget, the chosen one among them."""
    rates: Rates
    is_acted: bool
    """For an emulated device: rates of its profile, experts from its host tier."""
    remarks: list[str]
    beside_budget: dict[str, int]
    """What the process takes beside the budget, at most, by name; empty where the budget is a GPU's memory."""

    def as_json(self) -> dict[str, Any]:
        """What `smoe plan --json` prints."""
        plan, ledger, floor = self.blueprint, self.ledger, self.chosen.floor
        return {
            "model": self.model,
            "model_type": plan.config.model_type,
            "dtype": str(plan.dtype).removeprefix("torch."),
            "moe_layers": len(plan.sites),
            "experts": ledger.demand.total_experts,
            "top_k": ledger.demand.top_k,
            "context_tokens": plan.context_tokens,
            "memory_budget_bytes": ledger.budget_bytes,
            "memory_budget_reason": self.reason,
            "bytes": ledger.entries(),
            "beside_budget_bytes": self.beside_budget,
            "slots": ledger.cache_slots,
            "staging_slots": ledger.staging_slots,
            "resident_share": ledger.resident_share,
            "expert_bytes": plan.expert_bytes,
            "experts_bytes": plan.experts_bytes,
            "dense_bytes": plan.anatomy.weights_bytes,
            "expert_bytes_per_token": plan.expert_bytes_per_token,
            "bytes_per_token": self.chosen.bytes_per_token,
            "minimum_memory_bytes": minimum_bytes(ledger.demand),
            "full_memory_bytes": full_bytes(ledger.demand),
            "floor_seconds_per_token": floor.overlapped_seconds if floor else None,
            "floor_serial_seconds_per_token": floor.serial_seconds if floor else None,
            "floor_bound_by": floor.bound_by if floor else None,
            "assumption": "uniform routing: hit ratio = resident share",
            "rates": {
                "memory_bytes_per_second": self.rates.memory,
                "disk_bytes_per_second": self.rates.disk,
                "link_bytes_per_second": self.rates.link,
                "source": self.rates.source,
            },
            "remarks": self.remarks,
        }


def forecast(model: str, config: EngineConfig, revision: str | None = None) -> Forecast:
    """Read the config, divide the budget, and put a floor under the time per token."""
    device = choose_device(config)
    profile = read_profile(config.profile) if config.device == EMULATED else None
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    plan = blueprint(model, config, revision)
    ledger, reason = make_ledger(plan, config, device)
    rates, is_acted = _rates(device, plan.expert_bytes, profile), profile is not None
    chosen = _choice(plan, ledger, rates, device, is_acted)
    others = [_choice(plan, other, rates, device, is_acted) for other in _alternatives(ledger)]
    choices = sorted([chosen, *others], key=lambda choice: choice.ledger.budget_bytes)
    beside = beside_budget(reserved_kernel_bytes(plan.experts_bytes)) if device.type == "cpu" else {}
    return Forecast(model, plan, ledger, reason, chosen, choices, rates, is_acted, _remarks(rates, is_acted), beside)


def _alternatives(chosen: Ledger) -> list[Ledger]:
    """The smallest budget, some shares of the experts, and all of them."""
    demand = chosen.demand
    least, full = minimum_bytes(demand), full_bytes(demand)
    sizes = {least, full}
    for share in _SHARES:
        size = full - int((1 - share) * demand.total_experts) * demand.slot_bytes
        if least < size < full:
            sizes.add(size)
    return [allocate(size, demand) for size in sorted(sizes - {chosen.budget_bytes})]


def _choice(plan: Blueprint, ledger: Ledger, rates: Rates, device: torch.device, is_acted: bool) -> Choice:
    has_link = is_acted or device.type == "cuda"
    step = uniform_step(plan.expert_bytes_per_token, dense_bytes_read(plan), ledger.resident_share, has_link)
    if is_acted:
        step = replace(step, disk=0.0)
    return Choice(ledger, step, floor_of(step, rates))


def dense_bytes_read(plan: Blueprint) -> int:
    """Non-expert weights that a decode step reads: all of them, of an untied input embedding just a row."""
    embedding, output = plan.shell.get_input_embeddings(), plan.shell.get_output_embeddings()
    unread = 0
    if embedding is not None and output is not None and embedding.weight is not output.weight:
        unread = embedding.weight.numel() * plan.dtype.itemsize
    return plan.anatomy.weights_bytes - unread


def _rates(device: torch.device, expert_bytes: int, profile: DeviceProfile | None) -> Rates:
    if profile is not None:
        return acted_rates(profile)
    rates = quick_rates(device)
    if rates.disk is not None:
        return rates
    return Rates(rates.memory, measure_small_disk(expert_bytes), rates.link, rates.source)


def _remarks(rates: Rates, is_acted: bool) -> list[str]:
    remarks = ["the floor assumes that every expert is equally likely; real routing repeats itself and reads less"]
    figures = f"rates from {rates.source}"
    if is_acted:
        return [*remarks, f"{figures}: the floor is that machine's, with every expert in its RAM (--host-memory)"]
    if load_profile() is None:
        figures += "; smoe doctor measures them properly"
    return [*remarks, figures]
