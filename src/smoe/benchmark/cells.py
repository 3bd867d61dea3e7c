"""The measurements of `smoe bench`, as in the tables of SMoE's evaluation: 16 or 128 prompt tokens, 64 or 256 new ones,
one sequence or three.

Each measurement is run once, on an engine that has run before. Answers have the full length (end tokens are ignored),
sampling is greedy, and prompts are drawn from a seed, so every run does the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from smoe.benchmark.prompts import prompt_ids
from smoe.generation.generate import generate_batch
from smoe.generation.sampling_settings import Sampling
from smoe.machine.measure import quick_rates
from smoe.report.run import RunReport, report_on
from smoe.runtime.engine import Engine

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class TableCell:
    """The definition of one measurement: the lengths of prompt and answer, and the number of sequences."""

    prompt_tokens: int
    new_tokens: int
    batch: int


CELLS = [TableCell(prompt, new, batch) for batch in (1, 3) for prompt in (16, 128) for new in (64, 256)]
QUICK_CELLS = [TableCell(16, 64, 1), TableCell(16, 64, 3)]


@dataclass(frozen=True)
class Measurement:
    """A measurement and its result."""

    cell: TableCell
    report: RunReport

    def as_json(self) -> dict[str, Any]:
        values = self.report.as_json()
        names = (
            "ttft_seconds",
            "tpot_seconds",
            "tokens_per_second",
            "hit_ratio",
            "bytes_read_per_token",
            "floor_seconds_per_token",
            "floor_share",
            "floor_bound_by",
            "rates_source",
            "time_shares",
            "waited_for_cores_share",
        )
        return asdict(self.cell) | {name: values[name] for name in names}


def fitting(cells: list[TableCell], context_tokens: int) -> list[TableCell]:
    """Return the measurements whose prompt and answer fit the context."""
    return [cell for cell in cells if cell.prompt_tokens + cell.new_tokens <= context_tokens]


def measure_cells(
    model: PreTrainedModel,
    tokenizer: Any,
    cells: list[TableCell],
    seed: int,
    on_start: Callable[[TableCell], None],
    on_end: Callable[[Measurement], None],
) -> list[Measurement]:
    """Run all measurements in order, after a warm-up of a few tokens. After an interrupt, return the measurements that
    are complete."""
    measurements: list[Measurement] = []
    _run(model, tokenizer, TableCell(16, WARM_UP_TOKENS, 1), seed)
    engine: Engine = model.offload  # type: ignore[assignment]
    rates = quick_rates(model.device, engine.slot_memory)
    for cell in cells:
        on_start(cell)
        generation = _run(model, tokenizer, cell, seed)
        if generation.was_interrupted:
            break
        measurement = Measurement(cell, report_on(generation, model, rates))
        measurements.append(measurement)
        on_end(measurement)
    return measurements


def _run(model: PreTrainedModel, tokenizer: Any, cell: TableCell, seed: int) -> Any:
    rows = [prompt_ids(tokenizer, cell.prompt_tokens, seed + row) for row in range(cell.batch)]
    sampling = Sampling(max_new_tokens=cell.new_tokens, seed=seed, ignores_end=True)
    return generate_batch(model, tokenizer, rows, sampling)
