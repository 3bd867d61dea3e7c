"""Medians, ranges and paired ratios of rounds, and the table people read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.peers.rounds import Round
from bench.peers.shape import Shape


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of some values."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        middle, low, high = (_three_digits(value) for value in (self.median, self.low, self.high))
        return middle if low == high else f"{middle} ({low}-{high})"


def _three_digits(value: float) -> str:
    """Three significant digits, never an exponent for large numbers: 0.0123, 4.56, 4351."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Spread of the values that are known; None when none is."""
    known = sorted(value for value in values if value is not None)
    return Spread(median(known), known[0], known[-1]) if known else None


def paired_ratios(first: Sequence[Round], second: Sequence[Round], value: Callable[[Round], float]) -> list[float]:
    """`value` of `first` over that of `second`, for every pair in which both ran.

    The two rounds of a pair follow each other, so a slow minute of the machine slows both and cancels.
    """
    partners = {round_.pair: round_ for round_ in second if round_.measurement}
    return [
        value(round_) / value(partners[round_.pair])
        for round_ in first
        if round_.measurement and round_.pair in partners
    ]


def ttft(length: int) -> Callable[[Round], float]:
    """The seconds to the first token of the prompt of `length` tokens."""
    return lambda round_: round_.measured.ttft_seconds[str(length)]


def summarise(rounds: Sequence[Round], prompts: Sequence[int], shape: Shape) -> dict[str, Spread | None]:
    """Spreads over the rounds of one engine in one case."""
    good = [round_ for round_ in rounds if round_.measurement]
    columns: dict[str, Callable[[Round], float | None]] = {
        "decode tok/s": lambda round_: round_.decode_rate,
        "2nd half": lambda round_: round_.late_decode_rate,
        **{f"TTFT {length} s": ttft(length) for length in prompts},
        "before decoding s": lambda round_: round_.seconds_before_decoding,
        "disk MB/token": lambda round_: _scaled(round_.disk_bytes_per_token, 1e6),
        "of possible": lambda round_: round_.of_possible(shape),
        "peak GiB": lambda round_: _scaled(round_.peak_bytes, 2**30),
        "own GiB": lambda round_: _scaled(round_.own_bytes, 2**30),
        "experts GiB": lambda round_: _scaled(round_.measured.resident_expert_bytes, 2**30),
    }
    return {name: spread(value(round_) for round_ in good) for name, value in columns.items()}


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def table(rounds: Sequence[Round], engines: Sequence[str], prompts: Sequence[int], shape: Shape) -> str:
    """The rounds of one case as text: one line per engine, then paired ratios of the first engine to the others."""
    by_engine = {name: [round_ for round_ in rounds if round_.engine == name] for name in engines}
    summaries = {name: summarise(found, prompts, shape) for name, found in by_engine.items()}
    columns = next(iter(summaries.values())).keys()
    head = ["engine", *columns, "rounds"]
    body = [
        [name, *(str(value) if value else "-" for value in summary.values()), _round_count(by_engine[name])]
        for name, summary in summaries.items()
    ]
    lines = _aligned([head, *body])
    lines += [f"  {round_.engine}, pair {round_.pair}: {round_.error}" for round_ in rounds if round_.error]
    lines += _ratio_lines(by_engine, prompts)
    return "\n".join(lines)


def _round_count(rounds: Sequence[Round]) -> str:
    """`3`, or `3 (1 disturbed)`, or `2 of 3` when some failed."""
    good = sum(round_.measurement is not None for round_ in rounds)
    disturbed = sum(round_.cpu.disturbed for round_ in rounds)
    count = f"{good}" if good == len(rounds) else f"{good} of {len(rounds)}"
    return f"{count} ({disturbed} disturbed)" if disturbed else count


def _ratio_lines(by_engine: dict[str, list[Round]], prompts: Sequence[int]) -> list[str]:
    first, *others = by_engine
    values: dict[str, Callable[[Round], float]] = {
        "decode rate": lambda round_: round_.decode_rate,
        "2nd half": lambda round_: round_.late_decode_rate,
        "before decoding": lambda round_: round_.seconds_before_decoding,
    }
    values |= {f"TTFT {length}": ttft(length) for length in prompts}
    lines = []
    for other in others:
        ratios = {name: spread(paired_ratios(by_engine[first], by_engine[other], f)) for name, f in values.items()}
        known = [f"{name} {ratio}" for name, ratio in ratios.items() if ratio]
        if known:
            lines.append(f"{first} / {other}, median of pairs (range): {', '.join(known)}")
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
