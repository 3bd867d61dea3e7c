"""`smoe verify`: checks on this machine whether a model run by smoe gives the same results as transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.libraries import import_libraries, reading
from smoe.cli.options import Debug, EngineOptions, Json, Model
from smoe.errors import ConfigError
from smoe.units import format_count

if TYPE_CHECKING:
    from smoe.report.verify import Comparison, Reference, Report

EPILOG = """Examples:

smoe verify

smoe verify ./my-moe --memory 8GiB

smoe verify ./my-moe --memory 8GiB --low-precision int4

Exit code 0: every part is equal bit by bit, or up to rounding if weights are
quantised or smoe's kernels add in another order (--kernels own-order).
1: a part differs. 2: the check did not finish, for example because weights
contain NaN.
"""

_DIFFERS = 1
_SERVING_ALL: dict[str, Any] = {
    "low_threshold": 1.0,
    "skip_threshold": 1.0,
    "precision_shares": None,
    "low_meanwhile": False,
    "upgrade": False,
}
"""Settings that compute every expert with its full copy, whatever its importance."""
_WHY = {
    "quantised weights": "weights are quantised, and transformers computes with the dequantised numbers",
    "own order": "smoe's kernels add numbers in another order than torch (--kernels torch uses torch's order)",
}


_SELF_TESTS = {
    "now": "self-tests of kernels and experts: those in use passed when the model was loaded",
    "earlier": "self-tests of kernels and experts: those in use passed at an earlier load (stored)",
}


def command(
    engine: EngineOptions,
    model: Model = "demo",
    tokens: Annotated[
        int, typer.Option(min=2, help="Number of tokens of the prompt; a longer prompt tests more experts.")
    ] = 32,
    seed: Annotated[int, typer.Option(help="Seed from which the tokens of the prompt are drawn.")] = 0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check that results are exact: compare every part of the model with transformers, without the whole model in
    memory.

    First a single token runs, then a prompt with two tokens after it, within the budget. smoe and transformers' own
    modules compute every part of every layer from the same input: attention, norms, router, shared experts, and
    experts, which are read again by safetensors. The results must be equal bit by bit.

    With low-precision copies, the model is first checked without them. Then the copies of all experts are compared with
    transformers on their dequantised numbers, up to rounding.
    """
    from smoe.cli.console import is_quiet, print_json
    from smoe.generation.sampling_settings import check_seed

    check_seed(seed)
    report = _verify(model, engine, tokens, seed, is_quiet=json or is_quiet())
    if json:
        layers = [_entry(comparison) for comparison in report.comparisons]
        verdict = {"model": model, "is_exact": report.is_exact, "is_good": not report.bad, "seed": seed}
        more = {"layers": layers, "not_compared": report.not_compared, "self_test": report.self_test}
        print_json(verdict | more)
    else:
        _print_verdict(report)
    if report.bad:
        raise typer.Exit(_DIFFERS)


def _verify(model: str, engine: EngineOptions, tokens: int, seed: int, is_quiet: bool) -> Report:
    from dataclasses import replace

    from smoe.bounds import ALWAYS, AS_DTYPE, INT8
    from smoe.cli.console import progress

    config = engine.config()
    if config.alpha > 0:
        raise ConfigError(
            f"--alpha {config.alpha:g} replaces experts, but smoe verify can only check the lossless model: leave "
            "out --alpha; instead of --preset smoe, give --preset smoe-exact",
            setting="alpha",
            given=config.alpha,
            allowed="0 for smoe verify",
        )
    if config.activations == INT8:
        raise ConfigError(
            f"`activations={config.activations}` rounds numbers that the library does not round, and smoe verify "
            "checks the lossless model: leave out `activations`; smoe eval measures its quality cost",
            setting="activations",
            given=config.activations,
            allowed=f"{AS_DTYPE} for smoe verify",
        )
    config = replace(config, activations=AS_DTYPE, self_test=ALWAYS, **_SERVING_ALL)
    import_libraries(model, config)
    import torch

    from smoe.cli.session import loaded
    from smoe.report.verify import EXPERTS, LOW_COPIES, PASSES, reference_of, verify, verify_low_copies

    with reading("headers", model):
        reference = reference_of(model, config, engine.revision, tokens)
    for precision in {config.precision, config.low_precision} - {"auto", "none"}:
        _check_pack(model, precision, engine.revision, reference)
    with loaded(model, config, engine.revision) as ready, progress("verify") as bars:
        rounds = 1 + config.has_low
        task = bars.add_task("comparing layers", total=len(reference.sites) * PASSES * rounds, amount="")
        vocabulary = int(ready.config.get_text_config().vocab_size)
        ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))
        lines = _PassLines(is_quiet)

        def show(comparison: Comparison) -> None:
            lines.add(comparison)
            if comparison.part in (EXPERTS, LOW_COPIES):
                bars.update(task, advance=1, amount=f"layer {comparison.layer}, {comparison.phase}")

        report = verify(ready, reference, ids, show)
        if config.has_low:
            lines.end()
            low = verify_low_copies(ready, reference, ids, show)
            why = list(dict.fromkeys([*report.may_round, *low.may_round]))
            report = replace(report, comparisons=[*report.comparisons, *low.comparisons], may_round=why)
        lines.end()
        return report


def _check_pack(model: str, precision: str, revision: str | None, reference: Reference) -> None:
    """Raise `CheckpointError` if a byte of the packed file differs from its checksum. The comparisons with the library
    use the packed numbers, so they could not detect this."""
    from smoe.cli.pack_check import find_damage
    from smoe.errors import CheckpointError
    from smoe.models.checkpoint import whole_checkpoint
    from smoe.models.packed import contents_in_precision
    from smoe.models.spec import own_dtype

    checkpoint = whole_checkpoint(model, revision)
    config = checkpoint.config()
    contents = contents_in_precision(list(reference.sites.values()), precision, config.model_type, own_dtype(config))
    packed = checkpoint.packed(contents)
    assert packed is not None, "refused before"
    damaged = find_damage(packed, contents, "verify")
    if damaged:
        layers = ", ".join(map(str, damaged))
        raise CheckpointError(
            f"{packed.path} is damaged: in layers {layers} it no longer has the bytes that smoe pack wrote; run smoe "
            "pack again"
        )


class _PassLines:
    """Prints one line for each pass, with all its parts, and one more for each layer that differs."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._pass: list[Comparison] = []

    def add(self, comparison: Comparison) -> None:
        def place(one: Comparison) -> tuple[int, int]:
            return one.position, one.tokens

        if self._pass and place(self._pass[0]) != place(comparison):
            self.end()
        self._pass.append(comparison)

    def end(self) -> None:
        """Print the lines of the present pass."""
        if self._pass and not self._is_quiet:
            _print_pass(self._pass)
        self._pass = []


def _print_pass(found: list[Comparison]) -> None:
    from smoe.cli.console import output

    first = found[0]
    verdict = "[bold red]different[/bold red]"
    if all(one.is_equal and one.is_finite for one in found):
        verdict = "[green]equal[/green]"
    elif all(one.is_good for one in found):
        verdict = "[green]equal up to rounding[/green]"
    output().print(
        f"{first.phase:<7}  {format_count(first.tokens, 'token'):>10} from position {first.position:>4}  {verdict}  "
        f"({_counts(found)})",
        soft_wrap=True,
    )
    for layer in dict.fromkeys(one.layer for one in found if not one.is_good):
        place = "all layers" if layer is None else f"layer {layer:>4}"
        output().print(f"  {place}  [bold red]{_faults(found, layer)}[/bold red]", soft_wrap=True)


def _faults(found: list[Comparison], layer: int | None) -> str:
    """Return which parts of a layer are not finite, or differ by more than rounding."""
    of_layer = [one for one in found if one.layer == layer]
    broken = ", ".join(one.part for one in of_layer if not one.is_finite)
    if broken:
        return f"NaN or infinity in its weights or inputs: {broken}"
    return ", ".join(f"{one.part} differs by {one.largest_difference:.3g}" for one in of_layer if not one.is_near)


def _counts(found: list[Comparison]) -> str:
    """Return how many layers, parts and experts of a pass were compared."""
    layers = {one.layer for one in found} - {None}
    experts: dict[str, tuple[int, int]] = {}
    for one in found:
        if one.used is not None and one.experts is not None:
            used, of = experts.get(one.part, (0, 0))
            experts[one.part] = used + one.used, of + one.experts
    parts = format_count(sum(one.used is None for one in found), "part")
    return ", ".join(
        [format_count(len(layers), "layer"), parts, *(f"{used} of {of} {part}" for part, (used, of) in experts.items())]
    )


def _print_verdict(report: Report) -> None:
    from smoe.cli.console import output

    bad, found = report.bad, report.comparisons
    layers = len({comparison.layer for comparison in found} - {None})
    if bad:
        places = {f"{one.part} of layer {one.layer}" if one.layer is not None else one.part: None for one in bad}
        output().print(f"[bold red]not exact:[/bold red] {', '.join(places)} ({layers} layers in all)", soft_wrap=True)
        output().print(
            "Run the command again with --kernels torch: if it finds no difference then, smoe's kernels are the cause; "
            "please report it. If experts differ, download the checkpoint again."
        )
    elif not all(one.is_equal for one in found):
        rounded = sum(not one.is_equal for one in found)
        output().print(
            f"[bold green]equal up to rounding:[/bold green] {layers} layers, {len(found)} comparisons. {rounded} "
            f"differ by rounding, the others in no bit: {' and '.join(_WHY[why] for why in report.may_round)}"
        )
    else:
        output().print(
            f"[bold green]exact:[/bold green] {layers} layers, {len(found)} comparisons, every bit equal to "
            "the results of transformers' own modules"
        )
    output().print(f"compared: {', '.join(dict.fromkeys(one.part for one in found))}")
    output().print(_SELF_TESTS[report.self_test])
    left = [*report.not_compared, "several sequences at once, prompts read in chunks"]
    output().print(f"not compared: {', '.join(left)}", soft_wrap=True)


def _entry(comparison: Comparison) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(comparison) | {"is_good": comparison.is_good}
