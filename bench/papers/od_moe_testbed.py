"""OD-MoE's ten machines (section 4.1), by times that were chosen before anything was simulated with them.

| what | seconds | from |
| --- | --- | --- |
| an expert, loaded | 29.4 ms | 705 MB in FP32 over the RTX 3090's PCIe 4.0, our profile of it (data sheets): 24 GB/s |
| an expert, computed for a row | 0.92 ms | the same profile: its bytes at 800 GB/s, and the launches |
| main's part of a layer | 4.55 ms | Transformers on the same GPUs, all resident: 4.89 tokens/s, less two experts |
| the port | 1 Gbit/s | the paper |
| one way | 0.1 ms | assumed, of a LAN |
| a message | 0.1 ms | assumed: our own hop on an emulated 1 Gbit/s takes 0.4 ms beyond the wire, four messages |
| a layer of the draft | 2.5 ms | assumed |
| 16 KB a row, 8 KB of keys and values a layer | | the paper |

What is assumed is weak; `od_moe.py` has what follows of other times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from bench.papers.cluster import AlignedDraft, ClusterSetting
from bench.papers.cluster_prefill import PromptTimes
from bench.papers.geometry import MIXTRAL
from smoe.memory.emulation import read_profile
from smoe.simulator.cluster import Wire
from smoe.simulator.cluster_machine import WorkerTimes

BITS = 32
ALL_RESIDENT = 4.89
"""Tokens a second of Transformers with everything on eight GPUs, table 2."""
ROW_BYTES = 16384.0
KV_BYTES = 8192.0 * MIXTRAL.layers
"""Of one token."""
GROUPS = 4
"""Of two workers each."""
PROMPT_WORKERS = MIXTRAL.experts
"""One expert of every layer each (section 3.3)."""
_GB = 1e9
MAIN_BYTES, WORKER_BYTES, ALL_BYTES = 7 * _GB, 1 * _GB, 180 * _GB
_DRAFT_BYTES, _DRAFT_BITS = 45 * _GB, 8.0
"""Section 4.4, all four."""
_RTX_3080_SHARE = 760 / 936
"""Of the 3090's memory bandwidth; its PCIe is the same (data sheets)."""
CHUNK_BYTES = 16e6
"""Of a load, where one that proves wrong is given up: ours, not the paper's."""


@dataclass(frozen=True)
class Machines:
    """Times in seconds."""

    load: float
    expert: float
    layer: float
    message: float = 0.1e-3
    delay: float = 0.1e-3
    draft_layer: float = 2.5e-3
    port_bytes_per_second: float = 1e9 / 8

    @property
    def wire(self) -> Wire:
        return Wire(self.port_bytes_per_second, self.delay, self.message)

    def worker(self, gives_up: bool = False) -> WorkerTimes:
        chunk = self.load * CHUNK_BYTES / MIXTRAL.expert_bytes(BITS) if gives_up else None
        return WorkerTimes(self.load, self.expert, chunk=chunk)

    def draft(
        self, token_period: int = 1, kv_period: int = 1, is_early: bool = False, since: bool = True
    ) -> AlignedDraft:
        return AlignedDraft(self.draft_layer, is_early, token_period, kv_period, KV_BYTES, since)

    def cluster(
        self, groups: int, group_size: int, draft: AlignedDraft | None, is_ours: bool = False
    ) -> ClusterSetting:
        """`is_ours`: wrong loads are given up."""
        workers = [self.worker(is_ours)] * (groups * group_size)
        return ClusterSetting(self.layer, self.wire, ROW_BYTES, workers, group_size=group_size, draft=draft)

    def prompt(self, tokens: int, slots: int = 1, batch_rows: int | None = None, is_serial: bool = True) -> PromptTimes:
        """`batch_rows` None: a worker's rows travel in one message."""
        rows = -(-tokens * MIXTRAL.top_k // MIXTRAL.experts)
        profile = read_profile("rtx-3090")
        dense = MIXTRAL.dense_bytes(BITS) / MIXTRAL.layers
        more = profile.layer_seconds(dense, tokens) - profile.layer_seconds(dense, 1)
        return PromptTimes(
            MIXTRAL.layers,
            self.layer + more,
            self.load,
            self.expert,
            rows,
            PROMPT_WORKERS,
            ROW_BYTES,
            self.wire,
            slots,
            batch_rows,
            is_serial,
        )


@cache
def ten_machines() -> Machines:
    """As the table has it."""
    profile, nbytes = read_profile("rtx-3090"), MIXTRAL.expert_bytes(BITS)
    expert = profile.expert_seconds(nbytes, 1)
    layer = 1 / ALL_RESIDENT / MIXTRAL.layers - MIXTRAL.top_k * expert
    return Machines(profile.link_seconds(nbytes), expert, layer)


def rtx_3080_expert_seconds() -> float:
    """One expert for a row on the GPU of figure 10."""
    profile, nbytes = read_profile("rtx-3090"), MIXTRAL.expert_bytes(BITS)
    return profile.device_expert_seconds + nbytes / (profile.device_bytes_per_second * _RTX_3080_SHARE)


def memory_bytes(workers: int, draft_bits: float | None = _DRAFT_BITS, slots: int = 1) -> float:
    """Of all GPUs, by the paper's own sizes of the parts; a draft's goes with its bits, None: there is none. A second
    slot is an expert more in each worker that a prompt uses."""
    draft = 0.0 if draft_bits is None else _DRAFT_BYTES * draft_bits / _DRAFT_BITS
    return MAIN_BYTES + draft + workers * WORKER_BYTES + (slots - 1) * PROMPT_WORKERS * MIXTRAL.expert_bytes(BITS)
