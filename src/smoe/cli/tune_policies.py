"""`smoe tune --prefetch auto`, `--eviction auto`: finds the predictor and the eviction policy that are fastest for a
model on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smoe.cli.libraries import import_libraries, token_ids
from smoe.cli.options import EngineOptions
from smoe.cli.tune_options import TuneOptions
from smoe.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smoe.config import EngineConfig
    from smoe.eval.tournament import Entrant, Tournament
    from smoe.load.tuned_settings import Winner

_TOKENS = 400
"""The default number of tokens of the text."""


def tune_policies(model: str, engine: EngineOptions, tuned: TuneOptions, as_json: bool) -> None:
    """Run the requested tournaments, store the winners, and print them.

    The winners are stored only after all tournaments, so an interrupt leaves earlier results valid.
    """
    from smoe.cli.console import note, print_json, progress
    from smoe.cli.keeping import ResultDestination
    from smoe.load.tuned_settings import CHOICES, remember, where
    from smoe.models.files import fetch

    kinds = [kind for kind in CHOICES if getattr(engine, kind) == "auto"]
    if engine.prefetch not in (None, "auto", "none"):
        raise ConfigError(
            "eviction policies are compared without prefetch, so `prefetch` cannot be set; leave out `prefetch`, or "
            "give `prefetch=auto` to compare predictors as well",
            setting="prefetch",
            given=engine.prefetch,
            allowed="auto or none in a tournament",
        )
    config = replace(engine.config(), prefetch="none", prefetch_asked=None, prefetch_trial=False)
    import_libraries(model, config)
    from smoe.eval.tournament import hold, tokens_of
    from smoe.load.device import choose_device
    from smoe.models.read_spec import read_spec

    text = tuned.text
    ids = _ids(model, engine.revision, text, tuned.tokens or _TOKENS, config.context_tokens)
    keeping = ResultDestination()
    with _interrupted_in_words(), ExitStack() as stack:
        ready = _opened(stack, model, config, engine.revision, "eviction" in kinds)
        offload: Any = ready.offload
        ids = ids[: offload.context_tokens]
        spec = read_spec(model, config, engine.revision)
        with progress("tune", "tokens") as bars:
            task = bars.add_task("listening", total=tokens_of(len(ids), kinds), amount="")
            found = hold(ready, spec, ids, kinds, lambda count: bars.update(task, advance=count))
        share, machine = offload.ledger.resident_share, where(config, choose_device(config))
    folder, source = fetch(model, engine.revision), "the demo's stories" if text is None else text.name
    for each in found:
        if not as_json:
            _print(each, model)
        won = _won(each, share, source, machine)
        path = keeping.keep(lambda kind=each.kind, won=won: remember(folder, kind, won))  # type: ignore[misc]
        if path is not None:
            note(
                f"the winner is stored for {model} in {path}: --{each.kind} auto "
                f"{'stays' if each.stays else 'is now'} {each.winner.name} where about {share:.0%} of the experts "
                "are resident"
            )
    if as_json:
        results = {each.kind: each.as_json() for each in found}
        print_json({"model": model, "resident_share": share, "tokens": len(ids), "text": source} | results)


def forget_winners(model: str, engine: EngineOptions, _: TuneOptions, as_json: bool) -> None:
    """Delete the stored winners of the given kinds (default: both), and print them."""
    from smoe.cli.console import print_json
    from smoe.load.tuned_settings import CHOICES, forget
    from smoe.models.files import fetch

    named = [kind for kind in CHOICES if getattr(engine, kind) is not None]
    for kind in named:
        if getattr(engine, kind) != "auto":
            raise ConfigError.no_choice(kind, getattr(engine, kind), ["auto"])
    dropped = forget(fetch(model, engine.revision), named or [*CHOICES])
    if as_json:
        print_json({"model": model, "forgotten": {kind: [vars(won) for won in of] for kind, of in dropped.items()}})
        return
    for kind, winners in dropped.items():
        for won in winners:
            print(f"deleted: {kind} {won.name}, {won}")
    if not any(dropped.values()):
        options = " or ".join(f"--{kind}" for kind in CHOICES)
        print(f"nothing to delete: smoe tune has stored no choice of {options} for {model}")


def _ids(model: str, revision: str | None, text: Path | None, tokens: int, context: int | None) -> list[int]:
    """Return the first tokens of the text. Raises `ConfigError` where they are too few, before the model is loaded."""
    from smoe.eval.texts import read_documents
    from smoe.eval.tournament import LEAST_TOKENS

    texts = read_documents(text)
    for name, most in (("tokens", tokens), ("context_tokens", context)):
        if most is not None and most < LEAST_TOKENS:
            raise ConfigError.out_of_bounds(name, most, f"at least {LEAST_TOKENS} for a tournament")
    ids = token_ids(model, revision, texts)
    if len(ids) < LEAST_TOKENS:
        raise ConfigError.too_few_tokens("text", len(ids), LEAST_TOKENS, "for a tournament")
    return ids[:tokens]


def _opened(
    stack: ExitStack, model: str, config: EngineConfig, revision: str | None, uses_scores: bool
) -> PreTrainedModel:
    """Return the loaded model, which stays open until `stack` is closed. Its routers return the scores of all experts
    if a compared eviction policy may need them."""
    from smoe.cli.session import loaded

    if uses_scores:
        try:
            return stack.enter_context(loaded(model, replace(config, eviction="score"), revision))
        except UnsupportedModelError:
            pass  # a family without scores: `score` gets the reason; other errors occur again below
    return stack.enter_context(loaded(model, config, revision))


@contextmanager
def _interrupted_in_words() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("no result was stored, earlier results still apply") from None


def _won(found: Tournament, share: float, source: str, machine: str) -> Winner:
    """Return the winner of a tournament in the form in which it is stored. If the usual policy won, `auto` is stored,
    which changes nothing."""
    from smoe.load.tuned_settings import Winner

    first, second = found.winner, found.entrants[min(1, len(found.entrants) - 1)]
    name = "auto" if found.stays else first.name
    return Winner(name, first.seconds, second.name, second.seconds, share, source, machine)


def _print(found: Tournament, model: str) -> None:
    from smoe.cli.console import note, print_rows
    from smoe.units import format_seconds

    guesses = any(entrant.recall is not None for entrant in found.entrants)
    rows = []
    for entrant in found.entrants:
        row = [entrant.name, format_seconds(entrant.seconds) if entrant.measured_seconds else ""]
        row.append(format_seconds(entrant.simulated_seconds))
        if entrant.recall is not None and entrant.precision is not None:
            row += [f"{entrant.recall:.1%}", f"{entrant.precision:.1%}", format_seconds(entrant.asking_seconds)]
        rows.append(row)
    heads = (found.kind, "a token", "simulated", *(["recall", "right", "asking"] if guesses else []))
    print_rows(heads, rows, left=1)
    note(_verdict(found))
    for line in _absent(found, model):
        note(line)


def _verdict(found: Tournament) -> str:
    """Return in words why this candidate has won the tournament."""
    from smoe.eval.tournament import LEAD

    usual = next(entrant for entrant in found.entrants if entrant.name == found.baseline)

    def rounds(entrant: Entrant) -> str:
        return f"more than {LEAD:.0%} faster in {entrant.won(usual)} of {len(entrant.measured_seconds)} rounds"

    if found.winner.name != found.baseline:
        won = found.winner
        return f"{won.name} replaces {usual.name}: {rounds(won)}, {_less(won, usual):.1%} at the median"
    rival = min(found.entrants, key=lambda entrant: entrant.seconds if entrant.measured_seconds else float("inf"))
    if rival.name == usual.name:
        return f"{usual.name} stays: no other was faster"
    return (
        f"{usual.name} stays: {rival.name} was {_less(rival, usual):.1%} faster at the median, but {rounds(rival)} only"
    )


def _less(entrant: Entrant, usual: Entrant) -> float:
    return usual.seconds / entrant.seconds - 1


def _absent(found: Tournament, model: str) -> list[str]:
    """Return lines about policies that did not take part. Policies that lack the same thing share a line, which has the
    command that makes it."""
    lines = [
        f"{name} did not take part: {refused.why}" for name, refused in found.refused.items() if not refused.lacking
    ]
    lacking: dict[str, list[str]] = {}
    for name, refused in found.refused.items():
        if refused.lacking:
            lacking.setdefault(refused.lacking, []).append(name)
    for what, names in lacking.items():
        place = shlex.quote(model)
        first = f"smoe tune {place} --predictor {names[0]}{' (or another of them)' if len(names) > 1 else ''}"
        if found.kind == "eviction":
            first = (
                f"smoe record {place} --text mine.txt --out mine.trace, then smoe tune {place} --memory ... --eviction "
                f"{names[0]} --cache mine.trace"
            )
        lines.append(f"{', '.join(names)} did not take part: {what}; first run {first}")
    return lines
