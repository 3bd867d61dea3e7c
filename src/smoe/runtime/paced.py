"""Executes steps in the times of an emulated device: work ends when it would have ended on that device
(`memory/pacing.py`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from smoe.compute.decode_experts import DecodeExperts
from smoe.compute.expert_math import Weights
from smoe.kernels.experts import TokenExperts
from smoe.models.kv_cache import RowCache
from smoe.policy.plan import Serve
from smoe.routing import Routing
from smoe.runtime.execute import LayerExecutor, Planned
from smoe.runtime.layer import LayerCompute
from smoe.runtime.step import Step


class PacedExecutor(LayerExecutor):
    """A `LayerExecutor` for an emulated device: it reports its work to the device's clock, which waits."""

    def begin_pass(self, ids: torch.Tensor | None, cache: RowCache | None) -> None:
        self.compute.pacing.begin_pass()
        super().begin_pass(ids, cache)

    def _serve(self, step: Step) -> torch.Tensor:
        self.compute.pacing.reach_experts(step.hidden.shape[0])
        output = super()._serve(step)
        self.compute.pacing.leave_experts()
        return output

    def _plan(self, step: Step, routing: Routing) -> Planned:
        began = self.compute.pacing.begin_planning()
        planned = super()._plan(step, routing)
        self.compute.pacing.end_planning(began)
        return planned


class PacedCompute(LayerCompute):
    """A `LayerCompute` for an emulated device: it reports its work to the device's clock, which waits."""

    def _compute(self, tokens: DecodeExperts, first: int, weights: Sequence[Weights], serves: Sequence[Serve]) -> None:
        began = time.perf_counter()
        super()._compute(tokens, first, weights, serves)
        self.pacing.compute_experts(began, [len(serve.routes) for serve in serves])

    def _add(self, total: torch.Tensor, serve: Serve, *rest: Any) -> None:
        began = time.perf_counter()
        super()._add(total, serve, *rest)
        self.pacing.compute_experts(began, [len(serve.routes)])

    def _multiply(self, kernel: TokenExperts, hidden: torch.Tensor, matrices: Sequence[Any], *rest: Any) -> None:
        began = time.perf_counter()
        super()._multiply(kernel, hidden, matrices, *rest)
        self.pacing.compute_experts(began, [1] * len(matrices))

    def _note_served(self, serves: Sequence[Serve], first: int) -> None:
        began = self.pacing.begin_planning()
        super()._note_served(serves, first)
        self.pacing.end_planning(began)
