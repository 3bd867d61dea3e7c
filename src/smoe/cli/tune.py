"""`smoe tune`: measures which settings are best for a model, or trains policies for it, and stores the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smoe.cli.answer_prices import price_answers
from smoe.cli.libraries import import_libraries, token_ids
from smoe.cli.measured import Measured, report
from smoe.cli.options import Debug, EngineOptions, Json, Model, perplexity_share, substituting
from smoe.cli.tune_cache import tune_cache, tune_eviction
from smoe.cli.tune_corrected_gates import tune_corrected_gates
from smoe.cli.tune_options import TuneOptions
from smoe.cli.tune_policies import forget_winners, tune_policies
from smoe.cli.tune_predictor import tune_predictor
from smoe.cli.tune_shares import tune_shares
from smoe.policy.registry import CORRECTED_GATES, LEARNED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smoe.config import EngineConfig
    from smoe.eval.tune import AlphaChoice, Tuning

EPILOG = """Examples:

smoe tune ./my-moe --memory 8GiB --tpot 80ms

smoe generate ./my-moe --memory 8GiB --tpot 80ms -p "..."     (uses what was measured)

smoe tune ./my-moe --memory 8GiB --max-perplexity-increase 1% --text mine.txt

smoe generate ./my-moe --memory 8GiB --preset smoe -p "..."     (uses what was found)

smoe tune ./my-moe --memory 8GiB --low-precision int4 --prices --text mine.txt

smoe generate ./my-moe --memory 8GiB --preset balanced --max-perplexity-increase 1% -p "..."     (uses the prices)

smoe tune ./my-moe --memory 8GiB --cache mon.trace --cache tue.trace --held-out wed.trace

smoe generate ./my-moe --memory 8GiB --eviction multidimensional -p "..."     (uses what was fitted)

smoe tune ./my-moe --memory 8GiB --eviction learned --cache mon.trace --cache tue.trace --held-out wed.trace

smoe generate ./my-moe --memory 8GiB --eviction learned -p "..."     (uses what was learned)

smoe tune ./my-moe --memory 8GiB --predictor expert-mlp --trace mon.trace --held-out wed.trace

smoe generate ./my-moe --memory 8GiB --prefetch expert-mlp -p "..."     (uses what was trained)

smoe tune ./my-moe --memory 8GiB --shares 67,30,3 --text mine.txt

smoe generate ./my-moe --memory 8GiB --preset hobbit -p "..."     (uses the profile)

smoe tune ./my-moe --memory 8GiB --predictor corrected-gates --text mine.txt

smoe generate ./my-moe --memory 8GiB --prefetch corrected-gates -p "..."     (uses what was learned)

smoe tune ./my-moe --memory 8GiB --prefetch auto --eviction auto --text mine.txt

smoe tune ./my-moe --forget     (auto is what it was before any tournament)

smoe eval ./my-moe --memory 8GiB says what a threshold costs in full.
"""

ALPHAS = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
_PRICED_TOKENS = 2000
_LEAST_PRICED_TOKENS = 640
"""The minimum number of tokens for a quality cost, ten blocks: fewer give no estimate of the uncertainty."""


def command(
    engine: EngineOptions, tuned: TuneOptions, model: Model = "demo", json: Json = False, debug: Debug = False
) -> None:
    """Find the substitution threshold for a time per token, or for a quality cost. Both search from 0 to 0.6.

    With --tpot, or no option: measure the time per token, and choose the smallest threshold that meets the budget.
    Measurements are repeated in rounds to estimate the noise of this machine (+/-: half the difference between the
    fastest and the slowest); the chosen threshold is measured once more. Where experts come from disk, times are
    converted to one read rate, as a disk's rate may double within a minute. The result is stored for this model, budget
    and machine; `smoe generate --tpot` uses it.

    With --max-perplexity-increase: measure the quality cost of every threshold as `smoe eval` does, and choose the
    largest whose perplexity rises by no more, at the upper bound of its interval of 95 %. The result is stored for this
    model and applies wherever at least as many experts are resident; --preset smoe uses it.

    With --prices: measure the quality cost, in nats and by layer, of dropping an expert, of replacing it by a resident
    one and, with low-precision copies, of computing its copy. The table is stored for this model; --preset balanced and
    --max-perplexity-increase of other commands use it.

    With --cache: find the weights of HOBBIT's cache whose misses cost least on recorded traces, in a cache of this
    size. They are stored for this model; --eviction multidimensional uses them. With --eviction learned as well: learn
    from the traces which experts will be used next, and count the misses of each policy in a cache of this size.

    With --predictor: fit a predictor of the next layer's experts that sees only the history of routing, on recorded
    traces (or on a text, which is recorded first): counts, or a network that is trained for 15 to 45 passes. Training
    continues after an interrupt and takes minutes, a quarter of an hour for the embedded model. The result is stored
    for this model; --prefetch uses it. With --held-out, also test it and the other predictors on other text.

    With --shares: find the thresholds (T1, T2) at which the given per cent of a text's choices are computed in full
    precision, in low precision, and not at all. The text's profile is stored for this model, whatever the shares;
    --precision-shares and --preset hobbit use it.

    With --predictor corrected-gates: learn how the layers in between change a router's input, so that the experts of
    later layers are predicted better. The result is stored for this model; --prefetch corrected-gates uses it.

    With --prefetch auto, --eviction auto, or both: a tournament of all predictors, or all evictions, on a text. The
    text is read once; every candidate is simulated with the times of this machine, and the best ones are run in turns,
    compared with no prefetch or with the usual eviction. Candidates that must be learned take part if they have been.
    The usual choice wins ties: another replaces it only if it was more than 2 % faster in each of three rounds. If the
    fastest candidate has not won all three, there are up to seven rounds, and it must win three more than it does not
    win. The result is stored for this model and machine; --prefetch auto and --eviction auto, the defaults, use it
    where about as many experts are resident (within a third). With both, predictors are compared with the eviction that
    won. --forget deletes stored results.
    """
    name = tuned.measurement(engine)
    special = {"cache": engine.eviction, "predictor": tuned.predictor}.get(name)
    run = _MEASUREMENTS.get(f"{name} {special}", _MEASUREMENTS[name])
    run(model, engine, tuned, json)


def _price(model: str, engine: EngineOptions, tuned: TuneOptions) -> Measured:
    """Measure the quality cost of several alphas, and choose the largest within the bound."""
    assert engine.max_perplexity_increase is not None
    allowed = perplexity_share(engine.max_perplexity_increase)
    engine = replace(engine, max_perplexity_increase=None)  # the option chooses alpha here
    import_libraries(model, engine.config())
    from smoe.cli.prices import Material, measured, print_table
    from smoe.eval.price import largest_within
    from smoe.load.priced_alpha import PricedAlpha
    from smoe.units import format_seconds

    material = Material(tuned.text, tuned.tokens or _PRICED_TOKENS, least_tokens=_LEAST_PRICED_TOKENS)
    prices, circumstances = measured(engine, model, ALPHAS, material, tuned.out)
    chosen = largest_within(prices, allowed)
    priced = PricedAlpha(
        alpha=chosen.quality.alpha,
        allowed_increase=allowed,
        low=chosen.perplexity.low,
        high=chosen.perplexity.high,
        resident_share=circumstances["resident_share"],
        tokens=circumstances["text_tokens"],
        text=circumstances["text"],
    )
    print_table(prices)
    before, after = prices[0].quality.median_seconds, chosen.quality.median_seconds
    useless = (
        f"this alpha saves no time on this machine: a token takes {format_seconds(after)} with it, and "
        f"{format_seconds(before)} without; if experts are small, or all in memory, there is no time to save"
    )
    return Measured(
        priced,
        "this alpha is stored for --preset smoe",
        circumstances | priced.as_json() | {"prices": [price.as_json() for price in prices]},
        lambda: print(f"alpha {priced.alpha:g} is the largest that costs at most {100 * allowed:g} %: {priced}"),
        (useless,) if priced.alpha > 0 and after >= before else (),
    )


def _time(model: str, engine: EngineOptions, tuned: TuneOptions, as_json: bool) -> None:
    from smoe.units import parse_seconds

    budget = parse_seconds(tuned.tpot, "tpot") if tuned.tpot is not None else None
    try:
        _tune(model, substituting(engine), engine.revision, tuned.text, budget, as_json)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing was stored") from None


def _tune(
    model: str, config: EngineConfig, revision: str | None, text: Path | None, budget: float | None, as_json: bool
) -> None:
    """Measure the time per token at several alphas; store and print the times; choose an alpha if a time was
    requested."""
    from smoe.cli.console import note, warn
    from smoe.cli.keeping import ResultDestination
    from smoe.eval.texts import read_documents

    texts = read_documents(text)
    import_libraries(model, config)
    from smoe.cli.session import loaded

    ids = token_ids(model, revision, texts)
    with loaded(model, config, revision) as ready:
        offload: Any = ready.offload
        ids = ids[: offload.context_tokens]
        keeping = ResultDestination()
        tuning = _measure(ready, model, ids)
        path = keeping.keep(lambda: tuning.store(tuning.circumstances))
        if path is not None:
            note(f"the measured times are stored for smoe generate --tpot in {path}")
        if not as_json:
            _print_table(tuning)
        if tuning.bytes_per_second is not None:
            note(_rates(tuning, tuning.bytes_per_second))
        if tuning.is_flat:
            note(_flat(tuning))
        choice = _choose(ready, tuning, budget, ids) if budget is not None else None
    if choice is not None and choice.is_within_noise:
        warn(_unsure(tuning, choice))
    if as_json:
        _print_json(tuning, choice)
    elif choice is not None:
        _print_choice(tuning, choice)


def _measure(ready: PreTrainedModel, model: str, ids: list[int]) -> Tuning:
    from smoe.cli.console import progress
    from smoe.eval.tune import circumstances_of, measure_times, steps_of

    offload: Any = ready.offload
    with progress("tune", "tokens") as bars:
        task = bars.add_task("measuring", total=steps_of(ALPHAS), amount="")
        circumstances = circumstances_of(model, offload)
        return measure_times(ready, ALPHAS, ids, circumstances, lambda count: bars.update(task, advance=count))


def _choose(ready: PreTrainedModel, tuning: Tuning, budget: float, ids: list[int]) -> AlphaChoice:
    from smoe.cli.console import progress
    from smoe.eval.tune import choose, turn_tokens

    with progress("tune", "tokens") as bars:
        task = bars.add_task("measuring the chosen alpha once more", total=turn_tokens(), amount="")
        return choose(ready, tuning, budget, ids, lambda count: bars.update(task, advance=count))


def _flat(tuning: Tuning) -> str:
    from smoe.units import format_seconds

    return (
        f"alpha changes nothing here: from {tuning.alphas[0]:g} to {tuning.alphas[-1]:g} the time per token stays the "
        f"same within the noise (+/- {format_seconds(tuning.noise_seconds)}); "
        "alpha 0, with which no expert is replaced, is as fast as any other"
    )


def _rates(tuning: Tuning, rate: float) -> str:
    from smoe.units import format_bytes_rate

    lowest, highest = format_bytes_rate(min(tuning.rates)), format_bytes_rate(max(tuning.rates))
    return (
        f"experts were read at {lowest} to {highest}; the times per token are converted to "
        f"{format_bytes_rate(rate)}; the "
        'column "by the clock" has the times as measured'
    )


def _unsure(tuning: Tuning, choice: AlphaChoice) -> str:
    from smoe.units import format_seconds

    low, high = f"{choice.lowest_alpha:g}", choice.highest_alpha
    found = f"anything from {low} to {high:g}" if high is not None else f"{low} or higher, or no alpha may meet it"
    return (
        f"the measured times have a noise of +/- {format_seconds(tuning.noise_seconds)}, so the smallest alpha that "
        "meets "
        f"{format_seconds(choice.tpot_seconds)} a token may be {found}"
    )


def _print_table(tuning: Tuning) -> None:
    from smoe.cli.console import print_rows
    from smoe.units import format_seconds

    is_rescaled = tuning.bytes_per_second is not None
    rows = []
    figures = zip(tuning.points, tuning.half_range_seconds, tuning.measured_seconds, strict=True)
    for (alpha, seconds), half_range, measured in figures:
        shown = [seconds, half_range, *([measured] if is_rescaled else [])]
        rows.append([f"{alpha:g}", *(format_seconds(time) for time in shown)])
    print_rows(("alpha", "a token", "+/-", *(["by the clock"] if is_rescaled else [])), rows)


def _print_choice(tuning: Tuning, choice: AlphaChoice) -> None:
    from smoe.units import format_bytes_rate, format_seconds

    budget = format_seconds(choice.tpot_seconds)
    verdict = f"meets {budget} a token within 10 %" if choice.is_met else f"misses {budget} a token by more than 10 %"
    measured = f"measured {format_seconds(choice.measured_seconds)}"
    if choice.measured_bytes_per_second is not None and tuning.bytes_per_second is not None:
        measured += (
            f" while experts were read at {format_bytes_rate(choice.measured_bytes_per_second)}, which is "
            f"{format_seconds(choice.rescaled_seconds)} at {format_bytes_rate(tuning.bytes_per_second)}"
        )
    print(f"alpha {choice.alpha:g} {verdict}: predicted {format_seconds(choice.predicted_seconds)}, {measured}")


def _print_json(tuning: Tuning, choice: AlphaChoice | None) -> None:
    """Print the result as JSON, with the same names whether a time was requested or not."""
    from dataclasses import asdict, fields

    from smoe.cli.console import print_json
    from smoe.eval.tune import AlphaChoice

    chosen = asdict(choice) if choice else dict.fromkeys(field.name for field in fields(AlphaChoice))
    print_json(tuning.as_json() | chosen)


_MEASUREMENTS: dict[str, Callable[[str, EngineOptions, TuneOptions, bool], None]] = {
    "forget": forget_winners,
    "prices": report(price_answers),
    "cache": report(tune_cache),
    f"cache {LEARNED}": report(tune_eviction),
    "shares": report(tune_shares),
    "predictor": report(tune_predictor),
    f"predictor {CORRECTED_GATES}": report(tune_corrected_gates),
    "max_perplexity_increase": report(_price),
    "prefetch": tune_policies,
    "eviction": tune_policies,
    "tpot": _time,
}
"""{measurement: function}. If one eviction policy or predictor has a measurement of its own, its name follows."""
