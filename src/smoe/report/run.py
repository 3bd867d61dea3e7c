"""The measured figures of one generation: speed, bytes read, memory, closeness to the hardware's limit, and times of
waiting.

`docs/metrics.md` defines these figures. The command line, the benchmark and programs all use this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.config import DEFAULTS, SETTINGS, EngineConfig
from smoe.generation.generate import Generation
from smoe.machine.floor import Floor, Rates, floor_of, measured_step
from smoe.machine.measure import emulated_rates, quick_rates
from smoe.machine.process_memory import ProcessMemory, peak_bytes, process_memory
from smoe.memory.emulation import Emulation
from smoe.memory.pacing import Pacing
from smoe.metrics import Counters
from smoe.models.quantised_linear import QuantisedWeight, StoredEmbedding
from smoe.runtime.engine import Engine
from smoe.units import identifier

if TYPE_CHECKING:
    from smoe.report.hindsight import Foretold

DISK, LINK, DEVICE, HOST, WORKERS, EXPERTS, DENSE, AHEAD, PYTHON = (
    "disk",
    "link",
    "the GPU",
    "the CPU's experts",
    "workers",
    "experts",
    "the other layers",
    "looking ahead",
    "Python",
)


_OF_ARITHMETIC = ("kernels", "activations", "dtype", "reproducible")
"""The settings that choose the arithmetic."""


@dataclass(frozen=True)
class RunReport:
    """The measured figures of one generation. A figure is None if it could not be measured, for example without a
    second token."""

    generation: Generation
    hit_ratio: float | None
    bytes_read_per_token: float | None
    peak_memory_bytes: int
    memory_budget_bytes: int
    process_peak_bytes: int | None
    floor: Floor | None
    rates: Rates
    time_shares: dict[str, float]
    """{activity: fraction of the decode time}; the fractions add up to 1."""
    alpha: float
    """The substitution threshold; 0: no substitution."""
    lossy: tuple[str, ...]
    """The settings by which the text may differ from the unmodified model's (`EngineConfig.lossy`)."""
    arithmetic: str
    """The kernels that multiplied few rows: torch, native (our kernels with torch's bits) or own-order (equal up to
    rounding)."""
    activations: str
    """The type to which activations were rounded before they were multiplied with quantized weights: bf16 (unchanged)
    or int8."""
    bench: dict[str, Any] | None
    """The emulated device: its profile, its dilation (slowdown), and the fraction of the time by which this machine was
    late. None: a real device."""
    routes: dict[str, float]
    """The fractions of the experts chosen in decoding that were low-score, replaced, or resolved by importance."""
    low_copies: dict[str, float]
    """The use of low-precision copies in decoding (`low_copy_shares`); empty where they are not used by importance or
    quality cost."""
    tpot_asked_seconds: float | None
    """The requested time per token, in seconds, within which misses are resolved; None: none was requested."""
    process: ProcessMemory | None
    """{entry: bytes} of the memory of the whole process. None if the budget is a GPU's memory, or if the system does
    not report it."""
    forecast: Foretold | None = None
    """The comparison with the forecast of this run; None if there was no forecast."""
    workers: list[dict[str, Any]] | None = None
    """The work of each worker of a cluster; None without a cluster."""
    lost_workers: Sequence[dict[str, Any]] = ()
    """For each lost worker: its name, the reason `why`, and the time `at` (Unix time)."""
    all_fit: bool = False
    """Whether all experts fit into the coordinator's memory."""
    draft: dict[str, Any] | None = None
    """The work of the cluster's draft model; None where none was connected."""
    arithmetic_options: tuple[str, ...] = ()
    """The given options that choose the arithmetic, as typed on the command line: such as `--kernels torch`."""

    @property
    def floor_share(self) -> float | None:
        """The floor (the shortest time of a step on this hardware) divided by the mean time of a step, at most 1."""
        ratio = self._floor_ratio
        return min(1.0, ratio) if ratio is not None else None

    @property
    def beats_rates(self) -> bool:
        """Whether the run was faster than the floor. The hardware's rates were then measured too low, because of
        processor caches or other programs."""
        ratio = self._floor_ratio
        return ratio is not None and ratio > 1.0

    @property
    def _floor_ratio(self) -> float | None:
        steps = self.generation.decode_counters.forward_passes
        measured = self.generation.decode_seconds / steps if steps else 0.0
        return self.floor.overlapped_seconds / measured if self.floor is not None and measured > 0 else None

    def as_json(self) -> dict[str, Any]:
        """Return the output of `smoe generate --json`, except the description of machine and versions."""
        generation, first = self.generation, self.generation.answers[0]
        return {
            "text": first.text,
            "token_ids": first.token_ids,
            "finish_reason": first.finish_reason,
            "prompt_tokens": generation.prompt_tokens,
            "new_tokens": generation.new_tokens,
            "ttft_seconds": generation.ttft_seconds,
            "tpot_seconds": {"median": generation.tpot_median_seconds, "p95": generation.tpot_p95_seconds},
            "tpot_asked_seconds": self.tpot_asked_seconds,
            "tokens_per_second": generation.tokens_per_second,
            "hit_ratio": self.hit_ratio,
            "bytes_read_per_token": self.bytes_read_per_token,
            "peak_memory_bytes": self.peak_memory_bytes,
            "memory_budget_bytes": self.memory_budget_bytes,
            "process_peak_bytes": self.process_peak_bytes,
            "process": self.process.as_json() if self.process else None,
            "waited_for_cores_share": generation.waited_share,
            "forecast": None if self.forecast is None else self.forecast._asdict(),
            "floor_seconds_per_token": self.floor.overlapped_seconds if self.floor else None,
            "floor_serial_seconds_per_token": self.floor.serial_seconds if self.floor else None,
            "floor_share": self.floor_share,
            "beats_rates": self.beats_rates,
            "floor_bound_by": self.floor.bound_by if self.floor else None,
            "rates_source": self.rates.source,
            "time_shares": {identifier(name): share for name, share in self.time_shares.items()},
            "alpha": self.alpha,
            "arithmetic": self.arithmetic,
            "activations": self.activations,
            "lossy": list(self.lossy),
            "routes": self.routes,
            "low_copies": self.low_copies,
            "emulated": self.bench,
            "workers": self.workers,
            "lost_workers": list(self.lost_workers),
            "shadow": self.draft,
            "was_interrupted": generation.was_interrupted,
            "notes": generation.notes,
            "sequences": [
                {
                    "text": answer.text,
                    "token_ids": answer.token_ids,
                    "prompt_tokens": answer.prompt_tokens,
                    "finish_reason": answer.finish_reason,
                }
                for answer in generation.answers
            ],
        }


def report_on(generation: Generation, model: PreTrainedModel, rates: Rates | None = None) -> RunReport:
    """Return the report of a generation that has just ended. `rates`: the machine's rates, if they were already
    measured."""
    engine: Engine = model.offload  # type: ignore[assignment]
    cluster = engine.executor.compute.others
    decode = generation.decode_counters
    pacing = engine.pacing
    peak = peak_bytes()
    process = process_memory(engine.peak_memory_bytes()) if model.device.type == "cpu" else None
    if isinstance(pacing, Emulation):
        rates = emulated_rates(pacing.profile)
    rates = _with_own_disk_rate(rates or quick_rates(model.device, engine.slot_memory), generation)
    has_link = model.device.type == "cuda" or pacing.is_emulated
    low_bytes = low_copy_bytes(engine)
    step = measured_step(decode, engine.store.expert_bytes, dense_bytes(model), has_link, low_bytes)
    return RunReport(
        generation=generation,
        hit_ratio=decode.hit_ratio if decode.decode_uses else None,
        bytes_read_per_token=decode.bytes_read / decode.forward_passes if decode.forward_passes else None,
        peak_memory_bytes=engine.peak_memory_bytes(),
        memory_budget_bytes=engine.ledger.budget_bytes,
        process_peak_bytes=peak,
        floor=floor_of(step, rates) if step else None,
        rates=rates,
        time_shares=time_shares(generation, has_link, has_workers=cluster is not None),
        bench=_bench_of(generation, pacing),
        alpha=engine.config.alpha,
        arithmetic=engine.arithmetic,
        activations=engine.executor.compute.experts.activations,
        lossy=tuple(engine.config.lossy),
        tpot_asked_seconds=engine.config.tpot_seconds,
        routes=route_shares(decode),
        low_copies=low_copy_shares(engine.config, decode, low_bytes),
        process=process,
        workers=None if cluster is None else cluster.described(),
        lost_workers=() if cluster is None else cluster.lost(),
        all_fit=engine.ledger.holds_all,
        draft=None if cluster is None else cluster.draft,
        arithmetic_options=arithmetic_options(engine.config),
    )


def arithmetic_options(config: EngineConfig) -> tuple[str, ...]:
    """Return the options that choose the arithmetic and do not have their default value, as typed on the command
    line."""
    given = {name: getattr(config, name) for name in _OF_ARITHMETIC if getattr(config, name) != DEFAULTS[name]}
    return tuple(
        SETTINGS[name].option if value is True else f"{SETTINGS[name].option} {value}" for name, value in given.items()
    )


def _bench_of(generation: Generation, pacing: Pacing) -> dict[str, Any] | None:
    if not isinstance(pacing, Emulation):
        return None
    whole = generation.ended - generation.started
    return {
        "profile": pacing.profile.name,
        "dilation": pacing.dilation,
        "late_share": generation.counters.late_seconds / whole if whole > 0 else 0.0,
    }


def route_shares(decode: Counters) -> dict[str, float]:
    """Return {resolution: fraction} of the experts that the routers chose in decoding. Empty if the settings replace no
    experts."""
    if not decode.routes:
        return {}
    counts = {
        "low_score": decode.low_score,
        "low_score_missing": decode.low_score_missing,
        "top_score_missing": decode.top_score_missing,
        "substituted": decode.substituted,
    }
    return {name: count / decode.routes for name, count in counts.items()}


def low_copy_bytes(engine: Engine) -> int:
    """Return the size in bytes of the largest slot for a low-precision copy; 0 if there are none."""
    return max((each.slot_bytes for each in engine.ledger.demand.low), default=0)


def low_copy_shares(config: EngineConfig, decode: Counters, low_bytes: int) -> dict[str, float]:
    """Return the use of low-precision copies in decode steps; empty if neither importance nor quality cost decides
    about them.

    The result has fractions of expert uses (computed by low-precision copies, dropped). Per step it has the bytes of
    low-precision copies loaded on demand, and the number of upgrades.
    """
    uses, steps = decode.decode_uses + decode.skipped, decode.forward_passes
    by_importance = config.low_threshold < 1 or config.skip_threshold < 1
    if not uses or not steps or not (by_importance or config.prices_answers):
        return {}
    return {
        "served": decode.low_served / uses,
        "left_out": decode.skipped / uses,
        "bytes_per_token": decode.low_loads * low_bytes / steps,
        "upgrades_per_token": decode.upgrades / steps,
    }


def dense_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of non-expert weights that a decode step reads. If the input embedding is not also the output
    matrix, a step reads only one of its rows."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [module for module in model.modules() if isinstance(module, QuantisedWeight)]
    weights = {each.data_ptr(): each for each in (*model.parameters(), *(layer.codes for layer in layers))}
    if isinstance(embedding, StoredEmbedding):
        return sum(each.nbytes for each in weights.values())
    if embedding is not None and output is not None and _stored(embedding).data_ptr() != _stored(output).data_ptr():
        del weights[_stored(embedding).data_ptr()]
    return sum(each.nbytes for each in weights.values())


def _stored(layer: nn.Module) -> torch.Tensor:
    """Return the weights of a module in the form in which they are in memory, quantized or not."""
    weights = layer.codes if isinstance(layer, QuantisedWeight) else layer.weight
    assert isinstance(weights, torch.Tensor)
    return weights


def time_shares(generation: Generation, has_link: bool, has_workers: bool = False) -> dict[str, float]:
    """Return {activity: fraction of the decode time}. Time outside of forward passes counts as Python.

    `has_link`: experts are loaded over a link to a device with its own memory; `has_workers`: a cluster's workers
    compute experts.
    """
    whole, decode = generation.decode_seconds, generation.decode_counters
    if whole <= 0:
        return {}
    parts = seconds_by_part(decode, whole, has_link, has_workers)
    total = sum(parts.values()) or 1.0
    return {name: seconds / total for name, seconds in parts.items()}


def seconds_by_part(decode: Counters, whole: float, has_link: bool, has_workers: bool) -> dict[str, float]:
    """Divide `whole` seconds of decode steps into activities, by these counters. Time outside of forward passes counts
    as Python."""
    return {
        LINK if has_link else DISK: decode.wait_seconds,
        **({DEVICE: decode.device_wait_seconds} if decode.device_wait_seconds else {}),
        WORKERS if has_workers else HOST: decode.host_wait_seconds,
        EXPERTS: decode.compute_seconds,
        DENSE: decode.dense_seconds,
        AHEAD: decode.look_ahead_seconds,
        PYTHON: decode.plan_seconds + max(0.0, whole - decode.forward_seconds),
    }


def _with_own_disk_rate(rates: Rates, generation: Generation) -> Rates:
    """Return the rates with the disk rate that this run has measured, if it is higher than the rate measured before
    (page cache, other programs)."""
    counters = generation.counters
    own = counters.bytes_read / counters.read_busy_seconds if counters.read_busy_seconds > 0 else None
    if own is None or (rates.disk is not None and rates.disk >= own):
        return rates
    return replace(rates, disk=own, source=f"{rates.source}, disk as this run read it")
