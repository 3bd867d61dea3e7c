"""`smoe verify`: is the offloaded model exact, on this machine, with these files?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.options import Debug, EngineOptions, Json, Model

if TYPE_CHECKING:
    from smoe.verify import Comparison

EPILOG = """Examples:

smoe verify

smoe verify ./my-moe --memory 8GiB

Exit code 0: every layer is equal bit by bit. 1: a layer differs. 2: not checked to the end, as where weights hold NaN.
"""

_DIFFERS = 1


def command(
    engine: EngineOptions,
    model: Model = "demo",
    tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt; more tokens use more experts.")] = 32,
    seed: Annotated[int, typer.Option(help="For the prompt's tokens.")] = 0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check exactness layer by layer against the transformers library, without the whole model in memory.

    Each layer's experts are computed twice from the same input: by smoe inside its budget, and by the library's own
    loop on experts read by safetensors. The results must be equal bit by bit.
    """
    from smoe.cli.console import print_json

    found = _verify(model, engine, tokens, seed, is_quiet=json)
    bad = [comparison for comparison in found if not comparison.is_good]
    if json:
        print_json({"model": model, "is_exact": not bad, "seed": seed, "layers": [_entry(c) for c in found]})
    else:
        _print_verdict(found, bad)
    if bad:
        raise typer.Exit(_DIFFERS)


def _verify(model: str, engine: EngineOptions, tokens: int, seed: int, is_quiet: bool) -> list[Comparison]:
    import torch

    from smoe.cli.console import progress
    from smoe.cli.session import loaded
    from smoe.verify import DECODE_STEPS, reference_of, verify

    config = engine.config()
    reference = reference_of(model, config, engine.revision)
    with loaded(model, config, engine.revision) as ready, progress("verify") as bars:
        passes = len(reference.sites) * (1 + DECODE_STEPS)
        task = bars.add_task("comparing layers", total=passes, amount="")
        vocabulary = int(ready.config.get_text_config().vocab_size)
        ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))

        def show(comparison: Comparison) -> None:
            bars.update(task, advance=1, amount=f"layer {comparison.layer}, {comparison.phase}")
            if not is_quiet:
                _print_layer(comparison)

        return verify(ready, reference, ids, show)


def _print_layer(comparison: Comparison) -> None:
    from smoe.cli.console import output

    verdict = "[green]equal[/green]"
    if not comparison.is_finite:
        verdict = "[bold red]NaN or infinity in its weights or inputs[/bold red]"
    elif not comparison.is_equal:
        verdict = f"[bold red]differs by {comparison.largest_difference:.3g}[/bold red]"
    output().print(
        f"layer {comparison.layer:>3}  {comparison.phase:<7}  {comparison.tokens:>4} tokens  "
        f"{comparison.used:>4} of {comparison.experts} experts  {verdict}",
        soft_wrap=True,
    )


def _print_verdict(found: list[Comparison], bad: list[Comparison]) -> None:
    from smoe.cli.console import output

    layers = len({comparison.layer for comparison in found})
    if bad:
        worst = ", ".join(str(n) for n in sorted({comparison.layer for comparison in bad}))
        output().print(
            f"[bold red]not exact:[/bold red] layers {worst} of {layers}; download the checkpoint again, and "
            "report it if that does not help",
            soft_wrap=True,
        )
    else:
        output().print(
            f"[bold green]exact:[/bold green] {layers} layers, {len(found)} comparisons, every bit equal to the "
            "library's own loop",
            soft_wrap=True,
        )


def _entry(comparison: Comparison) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(comparison) | {"is_good": comparison.is_good}
