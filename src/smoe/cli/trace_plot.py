"""`smoe trace plot`: draws pictures of the routing of a recorded run."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.options import Debug, Json
from smoe.errors import ConfigError, DiskSpaceError, ModelError
from smoe.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from smoe.policy.eviction.learned import NextUse
    from smoe.trace.file import Trace
    from smoe.trace.survey import TraceSurvey

FORMATS = ("png", "svg", "pdf")
_WORDS = {
    "ranks": "reuse and scores by rank",
    "next_token": "activation by sequence",
    "by_sequence": "what sequences prefer",
    "affinity": "affinity",
    "curves": "the miss-ratio curves",
}
"""{name of a figure: a readable name}, for figures that are missing in some traces."""
EPILOG = """Examples:

smoe record demo --text stories.jsonl --tokens 1000 --out demo.trace

smoe trace plot demo.trace --out pictures

smoe trace plot monday.trace tuesday.trace --out pictures --format svg --json

docs/traces.md shows every picture and explains it.
"""


def command(
    trace: Annotated[list[Path], typer.Argument(help="Traces that smoe record has written, all of the same model.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures; it is created if needed.")],
    format: Annotated[str, typer.Option(help=f"Format of the pictures: {', '.join(FORMATS)}.")] = "png",
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens of each trace that are used, from its beginning. \\[default: 1000; fewer for many "
            "layers]"
        ),
    ] = None,
    expert_size: Annotated[
        str | None, typer.Option(help="Size of an expert, e.g. 9MiB, for the axis of memory. \\[default: as recorded]")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw what a recorded run shows about experts: above all, how much memory is worth buying.

    Misses of every eviction policy at every size of the cache; reuse and scores by rank; what sequences prefer;
    popularity and affinity; entropy. With --json the numbers behind the pictures are printed.
    """
    from smoe.cli.console import note, print_json, warn
    from smoe.cli.plot_file import check_folder

    if format not in FORMATS:
        raise ConfigError.no_choice("format", format, FORMATS)
    if tokens is not None and tokens < 1:
        raise ConfigError.out_of_bounds("tokens", tokens, "at least 1")
    if expert_size is not None and not 1 <= parse_bytes(expert_size, "expert_size") <= 2**40:
        raise ConfigError.out_of_bounds("expert_size", expert_size, "from 1B to 1TiB")
    check_folder(out)
    found = _survey(trace, tokens, expert_size)
    files = _write(found, out, format)
    if json:
        print_json(found.as_json() | {"files": {name: str(path) for name, path in files.items()}})
    else:
        _print(found)
        for name, why in found.curves.left_out.items() if found.curves else ():
            note(f"the curve {name} is not drawn: {why}")
        note(f"{len(files)} pictures are written to {out}: {', '.join(path.name for path in files.values())}")
    for text in _remarks(found, out, format, set(files)):
        warn(text)


def _survey(paths: list[Path], tokens: int | None, expert_size: str | None) -> TraceSurvey:
    from smoe.cli.console import progress
    from smoe.trace.file import Trace
    from smoe.trace.survey import survey

    traces = [Trace(path) for path in paths]
    experts = traces[0].header.experts
    size = None if expert_size is None else experts * parse_bytes(expert_size)
    with progress("trace plot", "points") as bars:
        task = bars.add_task("replaying", total=None, amount="")
        return survey(
            traces,
            tokens,
            size,
            _next_use(traces[0]),
            lambda done, points: bars.update(task, completed=done, total=points),
        )


def _next_use(trace: Trace) -> NextUse | None:
    """Return the parameters of `--eviction learned` for the traces' model; None if it was not trained."""
    from smoe.cli.replay import next_use_for

    try:
        return next_use_for(trace.header)
    except (ConfigError, ModelError):  # the picture is drawn without it, with a remark
        return None


def _write(found: TraceSurvey, out: Path, form: str) -> dict[str, Path]:
    """Draw all pictures in memory, then write the files: after an interrupt each file is complete or absent."""
    from smoe.trace.pictures import drawn
    from smoe.whole_file import whole_file

    contents, files = drawn(found, form), {}
    try:
        out.mkdir(exist_ok=True)
        for name, content in contents.items():
            files[name] = out / f"{name}.{form}"
            with whole_file(files[name]) as file:
                file.write(content)
    except OSError as error:
        kind = DiskSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError
        raise kind(
            f"cannot write into {out}: {error.strerror or error}; free some space there, or give another `out`",
            setting="out",
            given=str(out),
            allowed="a writable folder with free space",
        ) from error
    return files


def _remarks(found: TraceSurvey, out: Path, form: str, drawn: set[str]) -> list[str]:
    """Return remarks about the pictures: which figures are missing and why, and which files are from an earlier run."""
    from smoe.trace.pictures import PICTURES

    remarks = [f"{_WORDS[name]} omitted: {why}" for name, why in found.left_out.items()]
    if len(found.names) > 1:
        remarks.append(
            f"the traces name their model {', '.join(found.names)}: treated as one model, as all layers agree"
        )
    stale = [f"{name}.{form}" for name in PICTURES if name not in drawn and (out / f"{name}.{form}").exists()]
    if stale:
        remarks.append(f"{out} still contains {', '.join(stale)} of an earlier run")
    return remarks


def _print(found: TraceSurvey) -> None:
    from rich.table import Table

    from smoe.cli.console import output

    size = f", {format_bytes(found.experts_bytes)} of experts" if found.experts_bytes else ""
    output().print(f"{found.header.model}: {found.size}{size}", markup=False, soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in rows_of(found):
        table.add_row(name, text)
    output().print(table)


def rows_of(found: TraceSurvey) -> list[tuple[str, str]]:
    """Return the main figures of the pictures, one line each."""
    from smoe.trace.curves import in_words
    from smoe.trace.pictures import LEADER

    rows: list[tuple[str, str]] = []
    top_k = found.header.layers[0].top_k
    ranks, reuse, affinity, entropy = found.ranks, found.next_token, found.affinity, found.entropy
    if ranks is not None:
        named = [("rank 1", 0), (f"rank {top_k}, the last chosen", top_k - 1), (f"rank {top_k + 1}", top_k)]
        texts = [f"{name} {ranks.reuse[place]:.0%}" for name, place in named if place < len(ranks.reuse)]
        texts = texts[1:] if top_k == 1 else texts
        chance = f"by chance {ranks.reuse_by_chance:.0%}"
        rows.append((f"chosen within {ranks.ahead} tokens", ", ".join([*texts, chance])))
        rows.append(("share of scores", f"rank 1 {ranks.share[0]:.0%}, all chosen {ranks.share[:top_k].sum():.0%}"))
    if reuse is not None:
        chance = f"by chance {reuse.chance.mean():.0%}"
        rows.append(("used by the next token", f"{reuse.share.mean():.0%} of a token's experts, {chance}"))
    tokens = "" if entropy.of_a_token is None else f"; of a token's scores {entropy.of_a_token.mean():.2f}"
    rows.append(("entropy", f"uses {entropy.used.mean():.2f} of {entropy.most.mean():.2f} bits{tokens}"))
    rows.append(("most, least used", _extremes(found)))
    if affinity is not None:
        known = f"affinity predicts {affinity.by_affinity.mean():.0%}, popularity {affinity.by_popularity.mean():.0%}"
        rows.append(("next layer's experts", f"{known}: {100 * affinity.gain:+.1f} points"))
    if found.curves is not None:
        rows.append(("memory", in_words(found.curves, LEADER, found.experts_bytes)))
    return rows


def _extremes(found: TraceSurvey) -> str:
    import numpy as np

    table, layers = found.times_even, found.header.layers

    def named(place: Any) -> str:
        layer, expert = np.unravel_index(int(place), table.shape)
        return f"expert {expert} of layer {layers[int(layer)].layer} ({table[layer, expert]:.2g} times even)"

    never = int((table == 0).sum())
    least = f"{never} of {found.header.experts} never" if never else named(np.nanargmin(table))
    return f"{named(np.nanargmax(table))}, {least}"
