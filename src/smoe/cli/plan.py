"""`smoe plan`: what a model needs and what a budget buys, before anything is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smoe.cli.options import Debug, EngineOptions, Json, Model
from smoe.policy.budget import minimum_bytes
from smoe.units import format_bytes, format_rate

if TYPE_CHECKING:
    from smoe.models.spec import ModelSpec
    from smoe.policy.budget import Ledger
    from smoe.report.forecast import Choice, Forecast

EPILOG = """Examples:

smoe plan Qwen/Qwen3-30B-A3B --memory 8GiB

smoe plan mistralai/Mixtral-8x7B-v0.1 --memory 16GiB --context 8192

smoe plan ./my-moe --json

smoe plan ./my-moe.gguf --memory 8GiB

Of a hub model only config.json is fetched; of weights that are here the headers are read. Run smoe doctor once for
measured rates.
"""


def command(engine: EngineOptions, model: Model = "demo", json: Json = False, debug: Debug = False) -> None:
    """Tell what a model needs and what a memory budget buys, from its config.json, before its weights are here.

    Bytes by role, expert slots, the share of experts that stay in memory, and the speed to expect on this machine: from
    that of experts all equally likely to that of experts which repeat themselves as in recorded texts. The last line
    recommends a budget. With --device emulated, speeds are those of the machine of the profile.
    """
    from smoe.cli.console import print_json
    from smoe.report.forecast import forecast

    result = forecast(model, engine.config(), engine.revision)
    if json:
        print_json(result.as_json())
    else:
        _print(result)


def _print(result: Forecast) -> None:
    from rich.markup import escape
    from rich.table import Table

    from smoe.cli.console import note, output

    console = output()
    console.print(f"[bold]{escape(result.model)}[/bold]  {escape(_size(result))}", soft_wrap=True)
    console.print(f"\n[bold]a budget of {format_bytes(result.ledger.budget_bytes)}[/bold] ({result.reason})")
    budget = Table(show_header=False, **_STYLE)
    budget.add_column(style="dim")
    budget.add_column(justify="right")
    for name, count in _taken(result.ledger.entries()):
        budget.add_row(name, format_bytes(count))
    budget.add_row("[bold]together[/bold]", f"[bold]{format_bytes(result.ledger.total_bytes)}[/bold]")
    if result.beside_budget:
        budget.add_section()
        for name, count in _taken(result.beside_budget):
            budget.add_row(name, format_bytes(count))
        whole = result.ledger.total_bytes + sum(result.beside_budget.values())
        budget.add_row("[bold]whole process at most[/bold]", f"[bold]{format_bytes(whole)}[/bold]")
    console.print(budget)
    console.print("\n[bold]what other budgets buy[/bold]")
    choices = Table(**_STYLE)
    moved = "loaded per token" if result.is_emulated else "read per token"
    for heading in ("budget", "experts in memory", moved, "tokens/s", ""):
        choices.add_column(heading, justify="right" if heading else "left")
    for choice in result.choices:
        is_chosen = choice.ledger.budget_bytes == result.ledger.budget_bytes
        choices.add_row(
            format_bytes(choice.ledger.budget_bytes),
            _slots(choice.ledger),
            _bytes(choice),
            _speeds(choice),
            "this budget" if is_chosen else "",
            style="bold" if is_chosen else None,
        )
    console.print(choices)
    console.print(f"\n{_recommended(result)}", soft_wrap=True)
    for line in result.remarks:
        note(line)


_STYLE: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0), "header_style": "dim"}


def _taken(entries: dict[str, int]) -> list[tuple[str, int]]:
    """Entries that take something: what a model lacks, or what is counted elsewhere, is no line to read."""
    return [(name, count) for name, count in entries.items() if count]


def _slots(ledger: Ledger) -> str:
    low = f" + {ledger.low_slots} low" if ledger.low_slots else ""
    return f"{ledger.cache_slots} ({ledger.resident_share:.0%}){low}"


def _bytes(choice: Choice) -> str:
    """From typical to uniform routing; one figure where they are the same."""
    least, most = format_bytes(choice.typical.bytes_per_token), format_bytes(choice.uniform.bytes_per_token)
    return most if least == most else f"{least} - {most}"


def _speeds(choice: Choice) -> str:
    """Without the unit, which stands in the head: a row fits a line of 80 columns."""
    if choice.tokens_per_second is None:
        return "?"
    low, high = (format_rate(speed).removesuffix(" tokens/s") for speed in choice.tokens_per_second)
    return low if low == high else f"{low} - {high}"


def _recommended(result: Forecast) -> str:
    """One line: what to type on this machine, and what to expect."""
    if result.is_emulated:
        return "A profile is a test bench: the budget to act is yours to choose."
    found = result.recommendation
    if found is None:
        least = format_bytes(minimum_bytes(result.ledger.demand))
        return f"[bold]This machine has too little free memory[/bold]: {least} is the least that works."
    ledger = found.choice.ledger
    whole = "all experts" if ledger.resident_share == 1 else f"{ledger.resident_share:.0%} of the experts"
    return (
        f"[bold]{format_bytes(found.free_bytes)} free here: --memory {_size_to_type(ledger.budget_bytes)}[/bold], "
        f"expect {_speeds(found.choice)} tokens/s ({whole} in memory)"
    )


def _size_to_type(nbytes: int) -> str:
    """`12GiB`, `2.25GiB`: what `--memory` reads."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g}{name}"
    return str(nbytes)


def _size(result: Forecast) -> str:
    spec = result.spec
    top_k = max(spec.anatomy.top_k.values())
    layers = len(spec.sites)
    low = "" if spec.low is None else f"; low copies of {format_bytes(spec.low.expert_bytes)} in {spec.low.precision}"
    return (
        f"{layers} layers of {max(site.experts for site in spec.sites)} experts of {format_bytes(spec.expert_bytes)}, "
        f"{top_k} a token; {format_bytes(spec.experts_bytes + spec.weights_bytes)} in {_precision(spec)}{low}"
    )


def _precision(spec: ModelSpec) -> str:
    """What the weights are stored in."""
    dtype = str(spec.dtype).removeprefix("torch.")
    return dtype if spec.stored_bytes is None else f"its quantised formats, computed in {dtype}"
