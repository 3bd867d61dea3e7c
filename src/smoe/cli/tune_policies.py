"""`smoe tune --prefetch auto`, `--eviction auto`: which predictor, which eviction serves a model best here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smoe.cli.options import EngineOptions
from smoe.policy.registry import LEARNED

if TYPE_CHECKING:
    from smoe.eval.tournament import Tournament

TOKENS = 400
"""Of the text, where the user does not say."""


def tune_policies(model: str, engine: EngineOptions, text: Path | None, tokens: int, as_json: bool) -> None:
    """Hold the tournaments that are asked for, remember the winners, and show."""
    from smoe.cli.console import note, print_json, progress
    from smoe.cli.keeping import Keeping
    from smoe.cli.session import loaded, tokenizer_of
    from smoe.eval.texts import read_documents
    from smoe.eval.tournament import hold, tokens_of
    from smoe.load.pretrained import choose_device
    from smoe.load.winners import CHOICES, Winner, remember, where
    from smoe.models.files import fetch
    from smoe.models.read_spec import read_spec

    kinds = [kind for kind in CHOICES if getattr(engine, kind) == "auto"]
    texts = read_documents(text)
    config = replace(engine.config(), prefetch="none", prefetch_trial=False)
    if "eviction" in kinds:
        config = replace(config, eviction="score")  # so that all that it needs is heard
    keeping = Keeping()
    with loaded(model, config, engine.revision) as ready:
        offload: Any = ready.offload
        tokenizer = tokenizer_of(model, engine.revision)
        ids = [token for document in texts for token in tokenizer(document)["input_ids"]]
        ids = ids[: min(tokens, offload.context_tokens)]
        spec = read_spec(model, config, engine.revision)
        with progress("tune", "tokens") as bars:
            task = bars.add_task("listening", total=tokens_of(len(ids), kinds), amount="")
            evictions = [name for name in CHOICES["eviction"] if name != LEARNED]  # it is trained on traces, not here
            found = hold(ready, spec, ids, kinds, evictions, lambda count: bars.update(task, advance=count))
        share, machine = offload.ledger.resident_share, where(config, choose_device(config))
    folder, source = fetch(model, engine.revision), "the demo's stories" if text is None else text.name
    for each in found:
        first, second = each.entrants[0], each.entrants[min(1, len(each.entrants) - 1)]
        won = Winner(first.name, first.seconds, second.name, second.seconds, share, source, machine)
        path = keeping.keep(lambda kind=each.kind, won=won: remember(folder, kind, won))  # type: ignore[misc]
        if not as_json:
            _print(each)
        if path is not None:
            note(f"remembered for {model} in {path}: --{each.kind} auto is now {first.name}")
    if as_json:
        results = {
            each.kind: {"entrants": [entrant.as_json() for entrant in each.entrants], "refused": dict(each.refused)}
            for each in found
        }
        print_json({"model": model, "resident_share": share, "tokens": len(ids), "text": source} | results)


def _print(found: Tournament) -> None:
    from rich.table import Table

    from smoe.cli.console import note, output
    from smoe.units import format_seconds

    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column(found.kind)
    guesses = any(entrant.recall is not None for entrant in found.entrants)
    for head in ("a token", "simulated", *(["recall", "right", "asking"] if guesses else [])):
        table.add_column(head, justify="right")
    for entrant in found.entrants:
        cells = [format_seconds(entrant.seconds) if entrant.measured_seconds else ""]
        cells.append(format_seconds(entrant.simulated_seconds))
        if entrant.recall is not None and entrant.precision is not None:
            cells += [f"{entrant.recall:.1%}", f"{entrant.precision:.1%}", format_seconds(entrant.asking_seconds)]
        table.add_row(entrant.name, *cells)
    output().print(table)
    for name, why in found.refused.items():
        note(f"{name} did not take part: {why}")
