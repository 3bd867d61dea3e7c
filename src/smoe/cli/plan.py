"""`smoe plan`: forecasts what a model needs and what a budget achieves, before anything is downloaded."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from smoe.bounds import EMULATED
from smoe.cli.options import Debug, EngineOptions, Json, Model
from smoe.cli.settings import SERVED_SEQUENCES
from smoe.config import EngineConfig
from smoe.garbage import collection_paused
from smoe.policy.budget import full_bytes, minimum_bytes
from smoe.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from smoe.models.spec import ModelSpec
    from smoe.policy.budget import Ledger
    from smoe.report.forecast import Choice, Forecast
    from smoe.report.on_clock import Simulated
    from smoe.report.outlook import Case, Outlook

EPILOG = """Examples:

smoe plan Qwen/Qwen3-30B-A3B --memory 8GiB

smoe plan mistralai/Mixtral-8x7B-v0.1 --memory 16GiB --context 8192

smoe plan Qwen/Qwen3-30B-A3B --memory 8GiB --profile rtx-4060-ti --precision int4     (another machine)

smoe plan ./my-moe --json

smoe plan ./my-moe.gguf --memory 8GiB

Of a hub model only config.json is fetched; of weights that are here the
headers are read. Run smoe doctor once for measured rates.
"""


_LOSSY, _TO_PACK = "lossy", "to pack"
_MEANING = {
    _LOSSY: "the text may differ from that of the unmodified model",
    _TO_PACK: "smoe pack must first write the experts in this precision",
}
_WORDS = ("--preset", "--precision", "remark")
"""The headings of columns with words, which are aligned at the left."""
_SLOW_BEGINNING = 0.8
"""The speed of the first tokens is printed if it is below this fraction of the later speed."""
_LEAST_GAIN = 0.01
"""The smallest gain of speed, as a fraction, that `smoe plan` mentions."""


@dataclass(frozen=True)
class MachineOptions(EngineOptions):
    """The engine's options for `smoe plan`. In contrast to other commands, --profile alone selects the machine for
    which the forecast is made."""

    def config(self, sequences: int = 1) -> EngineConfig:
        options: Any = self
        if self.profile is not None and self.device is None:
            options = replace(options, device=EMULATED)
        return EngineOptions.config(options, sequences)


def command(engine: MachineOptions, model: Model = "demo", json: Json = False, debug: Debug = False) -> None:
    """Forecast how a model would run on this machine, from its config.json, before its weights are downloaded.

    Prints how the memory is divided, how many experts stay in memory, and the expected speed. The forecast simulates
    smoe's own decisions on this machine, or on that of --profile. It also shows what other budgets, presets, precisions
    and a faster disk would achieve, and the command to type. For a model that smoe cannot run, it prints the reason
    and a short plan with rough figures.
    """
    from smoe.cli.console import doing, note, print_json

    config = engine.config()
    with doing("simulating runs"), collection_paused():  # all objects stay in use until the process ends
        from smoe.report.forecast import forecast

        result = forecast(model, config, engine.revision)
    if json:
        from smoe.report.usual_text import usual_slots

        outlook = result.outlook if result.obstacle is None else None
        command_line = None if outlook is None else _command(result.model, outlook)
        print_json(result.as_json() | {"usual_slots": usual_slots(result.ledger), "command": command_line})
        return
    _print(result)
    for line in result.remarks:
        note(line)
    if config.max_sequences == 1 and result.ledger.resident_share < 1 and result.obstacle is None:
        note(
            f"this plan is for one sequence at a time; smoe serve reserves memory for {SERVED_SEQUENCES} "
            f"sequences: to plan for smoe serve, add --max-sequences {SERVED_SEQUENCES}"
        )


def _print(result: Forecast) -> None:
    from smoe.cli.console import as_options, output

    console = output()
    if result.obstacle is not None:
        _print_rough(result, result.obstacle, console)
        return
    _print_budget(result, console)
    if result.outlook is not None:
        _print_expected(result.outlook, console)
    _print_choices(result, console)
    if result.outlook is not None and result.outlook.others:
        _print_others(result.outlook, console)
    console.print("\n".join(["", *_recommended(result)]), soft_wrap=True)
    if result.outlook is not None:
        console.print(f"[bold]{escape(_command(result.model, result.outlook))}[/bold]", soft_wrap=True)
        for line in [*_lacking(result.outlook), *result.outlook.warnings]:
            console.print(f"[yellow]{escape(as_options(line))}[/yellow]", soft_wrap=True)
        _print_plainly(result.outlook, console)


def _print_rough(result: Forecast, obstacle: str, console: Console) -> None:
    """Print a short plan of a model that smoe cannot run, with rough figures, and without commands."""
    from smoe.cli.console import as_options

    heading = f"[bold]smoe cannot run this model:[/bold] {escape(as_options(obstacle))}"
    console.print(f"{heading}\n[bold]If it could, about:[/bold]\n", soft_wrap=True)
    _print_budget(result, console)
    if result.outlook is not None:
        _print_expected(result.outlook, console)
    experts, others = format_bytes(result.spec.experts_bytes), format_bytes(result.spec.weights_bytes)
    least, full = (format_bytes(size(result.ledger.demand)) for size in (minimum_bytes, full_bytes))
    console.print(
        f"All experts together take {experts}, the other weights {others}. The least budget that works is {least}; the "
        f"whole model fits in {full}.",
        soft_wrap=True,
        highlight=False,
    )
    if result.outlook is not None:
        _print_plainly(result.outlook, console)


def _print_plainly(outlook: Outlook, console: Console) -> None:
    """Print the last lines of a plan: the expected speed, and what it means for an answer."""
    expected = f"{_expected(outlook, outlook.asked.run)} tokens/s"
    console.print(f"Expect [bold]{expected}[/bold]. {outlook.plainly()}", soft_wrap=True, highlight=False)


def _print_budget(result: Forecast, console: Console) -> None:
    """Print the size of the model, how many experts fit in memory, and what takes the memory budget."""
    from rich.table import Table

    console.print(f"[bold]{escape(result.model)}[/bold]  {escape(_size(result))}", soft_wrap=True)
    console.print("\n[bold]experts in memory[/bold]  " + "\n".join(_experts(result.ledger)), soft_wrap=True)
    console.print(f"\n[bold]a budget of {format_bytes(result.ledger.budget_bytes)}[/bold] ({result.reason})")
    budget = Table(show_header=False, **_STYLE)
    budget.add_column(style="dim")
    budget.add_column(justify="right")
    for name, count in _taken(result.ledger.entries()):
        budget.add_row(name, format_bytes(count))
    budget.add_row("[bold]together[/bold]", f"[bold]{format_bytes(result.ledger.total_bytes)}[/bold]")
    if result.outside_budget:
        budget.add_section()
        for name, count in _taken(result.outside_budget):
            budget.add_row(name, format_bytes(count))
        outside = sum(result.outside_budget.values())
        budget.add_row("[bold]outside the budget at most[/bold]", f"[bold]{format_bytes(outside)}[/bold]")
        budget.add_section()
        whole = result.ledger.total_bytes + outside
        budget.add_row("[bold]whole process at most[/bold] (--process-memory)", f"[bold]{format_bytes(whole)}[/bold]")
    console.print(budget)


def _print_choices(result: Forecast, console: Console) -> None:
    """Print the forecasts for other memory budgets."""
    from rich.table import Table

    console.print("\n[bold]other budgets[/bold]")
    choices = Table(**_STYLE)
    for heading in ("budget", "always in memory", result.moved, "tokens/s", "remark"):
        choices.add_column(heading, justify="left" if heading in _WORDS else "right")
    simulated = [None] * len(result.choices) if result.outlook is None else result.outlook.curve
    for choice, case in zip(result.choices, simulated, strict=True):
        is_chosen = choice.ledger.budget_bytes == result.ledger.budget_bytes
        choices.add_row(
            format_bytes(choice.ledger.budget_bytes),
            _slots(choice.ledger),
            _bytes(choice),
            _speeds(choice) if result.outlook is None or case is None else _expected(result.outlook, case.run),
            "this budget" if is_chosen else "",
            style="bold" if is_chosen else None,
        )
    console.print(choices)


def _print_expected(outlook: Outlook, console: Console) -> None:
    """Print the forecast for the given memory budget and settings."""
    from smoe.report.usual_text import PROMPT_TOKENS

    run, (slowest, fastest) = outlook.asked.run, map(_rate, outlook.tokens_per_second)
    span = f" ({slowest} - {fastest})" if slowest != fastest else ""
    speed, first = f"{_expected(outlook, run)} tokens/s", _first(outlook, outlook.asked)
    share = run.parts[run.bound_by] / run.seconds_per_token
    lines = [
        f"The simulated speed on {outlook.machine.name} is [bold]{speed}[/bold]"
        f"{span if outlook.spread == (1, 1) else ''}. {share:.0%} of the time goes to: {run.bound_by}.",
        *_of_first_tokens(outlook),
        *_with_faster_reads(outlook),
        f"The first token of a prompt of {PROMPT_TOKENS} tokens comes after {first}.",
        *_of_first_prompt(outlook.asked),
    ]
    console.print("\n".join(["", *lines]), soft_wrap=True, highlight=False)


def _of_first_tokens(outlook: Outlook) -> Iterator[str]:
    """Yield a line with the speed of the first tokens of an answer, if it is much lower than later."""
    from smoe.report.on_clock import FIRST_TOKENS

    run = outlook.asked.run
    if run.first_tokens_per_second < _SLOW_BEGINNING * run.tokens_per_second:
        speed = _expected_speed(outlook, run.first_tokens_per_second)
        yield f"The first {FIRST_TOKENS} tokens come at {speed} tokens/s, because experts are still being loaded."


def _with_faster_reads(outlook: Outlook) -> Iterator[str]:
    """Yield a line with the speed that a disk or link twice as fast would give, if it is worth mentioning."""
    run, reads = outlook.with_faster_reads, "link" if outlook.machine.has_link else "disk"
    if run.tokens_per_second / outlook.asked.run.tokens_per_second - 1 >= _LEAST_GAIN:
        yield f"A {reads} twice as fast would give {_expected(outlook, run)} tokens/s."


def _of_first_prompt(case: Case) -> Iterator[str]:
    """Yield a line with the time by which the first prompt of a process takes longer, if a run has measured it."""
    if case.first_pass_seconds is not None:
        yield f"The first prompt of a process takes {format_seconds(case.first_pass_seconds)} longer."


def _command(model: str, outlook: Outlook) -> str:
    """Return the command line that runs the model."""
    options = (f"--{name} {value}" for name, value in outlook.settings.items())
    return " ".join(["smoe generate", shlex.quote(model), *options, '-p "..."'])


def _print_others(outlook: Outlook, console: Console) -> None:
    """Print the forecasts for other presets and precisions with the same memory budget."""
    from rich.table import Table

    console.print("\n[bold]other presets and precisions with the same memory[/bold]")
    others, used = Table(**_STYLE), dict[str, None]()
    for heading in ("--preset", "--precision", "always in memory", "tokens/s", "first token", "remark"):
        others.add_column(heading, justify="left" if heading in _WORDS else "right")
    for case in outlook.others:
        remarks = [_LOSSY] * bool(case.lossy) + [_TO_PACK] * any("smoe pack" in line for line in case.missing)
        used |= dict.fromkeys(remarks)
        others.add_row(
            case.preset,
            case.precision,
            f"{case.resident_share:.0%}",
            _expected(outlook, case.run),
            _first(outlook, case),
            ", ".join(remarks),
        )
    console.print(others)
    for remark in used:
        console.print(f"[dim]{remark}: {_MEANING[remark]}[/dim]", soft_wrap=True)


def _lacking(outlook: Outlook) -> list[str]:
    """Return one line for each missing file or measurement that the settings of a forecast need."""
    return [f"missing: {line}" for line in outlook.asked.missing]


def _expected(outlook: Outlook, run: Simulated) -> str:
    """Return the expected tokens per second: one figure if a run has calibrated the forecast, else a range."""
    return _expected_speed(outlook, run.tokens_per_second)


def _expected_speed(outlook: Outlook, simulated: float) -> str:
    if outlook.spread == (1, 1):
        return _rate(simulated)
    return _span(*(_rate(_roughly(speed)) for speed in outlook.speeds(simulated, simulated)))


def _first(outlook: Outlook, case: Case) -> str:
    """Return the expected time to the first token: one figure if a run has calibrated the forecast, else a range."""
    if outlook.spread == (1, 1):
        return format_seconds(case.run.ttft_seconds)
    low, high = (format_seconds(_roughly(seconds)) for seconds in outlook.seconds(case.run.ttft_seconds))
    number, _, unit = low.partition(" ")
    return _span(number if high.partition(" ")[2] == unit else low, high)  # minutes are followed by seconds


def _roughly(number: float) -> float:
    """Return the number rounded to two digits, enough for the end of a range."""
    return float(f"{number:.2g}")


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} - {high}"


def _rate(tokens_per_second: float) -> str:
    return format_rate(tokens_per_second).removesuffix(" tokens/s")


_STYLE: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0), "header_style": "dim"}


def _taken(entries: dict[str, int]) -> list[tuple[str, int]]:
    """Return (name, bytes) of the entries of the memory budget that are above 0."""
    return [(name, count) for name, count in entries.items() if count]


def _experts(ledger: Ledger) -> list[str]:
    """Return sentences that say how many experts fit in memory: always, and in short texts, to which reserved memory
    is lent."""
    from smoe.report.usual_text import ANSWER_WORDS, PROMPT_TOKENS, usual_slots

    demand = ledger.demand
    if ledger.most_slots == ledger.cache_slots:
        return [f"{_slots(ledger)} of {demand.total_experts}, {format_bytes(ledger.most_experts_bytes)}"]
    usual, most = (
        f"{count} ({count / demand.total_experts:.0%})" for count in (usual_slots(ledger), ledger.most_slots)
    )
    return [
        f"{usual} of {demand.total_experts} at the end of a usual answer: a prompt of {PROMPT_TOKENS} tokens and "
        f"{ANSWER_WORDS} words",
        f"Memory for the context of {demand.context_tokens} tokens and for long prompts holds experts until a text "
        f"needs it. So {most} experts fit at first, and {_slots(ledger)} always.",
    ]


def _slots(ledger: Ledger) -> str:
    low = f" + {ledger.low_slots} low" if ledger.low_slots else ""
    return f"{ledger.cache_slots} ({ledger.resident_share:.0%}){low}"


def _bytes(choice: Choice) -> str:
    """Return the bytes that a token loads, from typical to uniform routing; one number if both are equal."""
    return _span(format_bytes(choice.typical.bytes_per_token), format_bytes(choice.uniform.bytes_per_token))


def _speeds(choice: Choice) -> str:
    """Return the tokens per second without a unit, so that a row of the table fits 80 columns. The heading has the
    unit."""
    if choice.tokens_per_second is None:
        return "?"
    return _span(*map(_rate, choice.tokens_per_second))


def _recommended(result: Forecast) -> list[str]:
    """Return a line with the options that are recommended for this machine, and the expected speed. No line if more
    memory than the given budget would not be faster."""
    if result.is_emulated:
        machine = result.rates.source.split(",")[0].removeprefix("profile ")
        return [f"This command runs the model on {machine}; --memory sets the budget:"]
    from smoe.report.outlook import budget_to_type

    found = result.recommendation
    if found is None:
        least = format_bytes(minimum_bytes(result.ledger.demand))
        return [f"[bold]This machine has too little free memory[/bold]: {least} is the least that works."]
    ledger, case = found.choice.ledger, None if result.outlook is None else result.outlook.recommended
    expected = _speeds(found.choice)
    if result.outlook is not None and case is not None:
        gain = case.run.tokens_per_second / result.outlook.asked.run.tokens_per_second - 1
        if ledger.budget_bytes > result.ledger.budget_bytes and gain < _LEAST_GAIN:
            return []
        expected = _expected(result.outlook, case.run)
    whole = "all experts" if ledger.resident_share == 1 else f"{ledger.resident_share:.0%} of the experts"
    return [
        f"This machine has {format_bytes(found.free_bytes)} free. With [bold]--memory "
        f"{budget_to_type(ledger)}[/bold], expect {expected} tokens/s ({whole} in memory)."
    ]


def _size(result: Forecast) -> str:
    spec = result.spec
    top_k = max(spec.anatomy.top_k.values())
    layers = len(spec.sites)
    low = "" if spec.low is None else f"; low copies of {format_bytes(spec.low.expert_bytes)} in {spec.low.precision}"
    return (
        f"{layers} layers of {max(site.experts for site in spec.sites)} experts of {format_bytes(spec.expert_bytes)}, "
        f"{top_k} a token; {format_bytes(spec.experts_bytes + spec.weights_bytes)} in {_precision(spec)}"
        f"{_tables(spec)}{low}"
    )


def _tables(spec: ModelSpec) -> str:
    """Return the number of rows that stay on disk in large tables, as a text; empty if the model has none."""
    rows = sum(spec.outline.weights[name].shape[0] for name in spec.outline.tables)
    return f"; {rows:,} rows of tables stay on disk" if rows else ""


def _precision(spec: ModelSpec) -> str:
    """Return the name of the number type in which the weights are stored."""
    dtype = str(spec.dtype)
    return dtype if spec.stored_bytes is None else f"its quantised formats, computed in {dtype}"
