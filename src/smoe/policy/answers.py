"""Chooses a resolution for every missing expert of a layer: load, CPU, low-precision copy, substitute or drop.

    resolution    seconds on the link         seconds on the CPU    quality cost      applies to
    HIGH          costs.high                                        0                 all routes of the expert
    HOST                                      costs.host            0                 all routes of the expert
    LOW           costs.low (0 if resident)                         of each route     all routes of the expert
    SUBSTITUTE                                                      of the route      one route
    SKIP                                                            of the route      one route

The link is the way from disk or host memory to the device. Loads follow one another on it, after those in flight
(`under_way`). The CPU works at the same time, and the layer waits for the slower of both:

    |-- under_way --|-- HIGH --|-- HIGH --|- LOW -|          link (no waiting where nothing is loaded)
    |----- HOST -----|----- HOST -----|                      CPU

The best plan has the least (seconds that the layer waits + rate * sum of the quality costs). HIGH and HOST have the
same quality cost and take the same time for every expert, so only the numbers of both matter: the most important of
these experts are loaded, and the CPU computes the others. Up to `EXACT_UP_TO` missing experts, dynamic programming
finds the least cost for every pair (number of experts without quality cost, number of low loads). The best division
between link and CPU follows by a formula, so the result is the optimum.

Without a CPU in addition to the device, the resolutions of the experts are almost independent of one another. The
experts whose cheapest lossy resolution costs most are loaded, as many as is best, which gives the optimum too. With a
CPU and more than `EXACT_UP_TO` missing experts this method is an approximation, because a low load may overlap with the
CPU's work. It is therefore repeated with several assumed costs of a low load. On 1500 random steps of 9 to 14 missing
experts it found the optimum in 96 of 100; the mean cost was 0.15 % above the optimum, the worst 13 %.

No token is left without an expert: of a *bare* token, which misses all of its experts, at least one route is not
dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

from smoe.policy.missing_experts import Missing, Route
from smoe.policy.prices import LayerPrices, Resolution
from smoe.policy.substitution import Replacement

EXACT_UP_TO = 8
"""The largest number of missing experts for which all combinations are compared."""
BARE_UP_TO = 2
"""The largest number of bare tokens (tokens that miss all of their experts) for which all choices of their remaining
experts are compared. In larger batches, each bare token keeps the route whose removal or replacement costs least."""
SHARES_TRIED = 3
"""A low load may overlap with the CPU's work. Costs of 0, 1/3, 2/3 and all of its seconds are therefore tried."""

HIGH, HOST, LOW, SUBSTITUTE, SKIP = (
    Resolution.HIGH,
    Resolution.HOST,
    Resolution.LOW,
    Resolution.SUBSTITUTE,
    Resolution.SKIP,
)


class AnswerCosts(NamedTuple):
    """The seconds that each resolution of one missing expert takes."""

    high: float
    """Seconds to load the full copy."""
    low: float | None = None
    """Seconds to load the low-precision copy; None if the model has no low-precision copies."""
    host: float | None = None
    """Seconds for the CPU to compute an expert; None if the CPU is itself the device."""
    under_way: float = 0.0
    """Seconds until the loads in flight have ended."""

    def split(self, zero_priced: int, low: int) -> tuple[float, int]:
        """Return (the least seconds that the layer waits, the number of experts for the CPU), if `zero_priced` experts
        are loaded or computed by the CPU, and `low` low-precision copies are loaded. Among equally fast divisions
        between link and CPU, the one with most loads is chosen."""
        link = self.under_way + zero_priced * self.high + low * (self.low or 0.0)
        host = self.host
        if host is None or not zero_priced:
            return (link if zero_priced or low else 0.0), 0
        on_host = min(int(link / (self.high + host)), zero_priced)  # with one more the CPU would be the slower
        best = max(link - on_host * self.high, on_host * host)
        if on_host < zero_priced:
            more = max(link - (on_host + 1) * self.high, (on_host + 1) * host)
            if more < best:
                best, on_host = more, on_host + 1
        if not low and zero_priced * host < best:
            return zero_priced * host, zero_priced
        return best, on_host


class ResolvedMisses(NamedTuple):
    """The resolutions of a layer's missing experts."""

    served: dict[int, Resolution]
    """The resolution HIGH, HOST or LOW of each missing expert that is computed, most important expert first. The routes
    of the other missing experts are in `replacements`."""
    replacements: list[Replacement]
    """The routes that a substitute computes, and the dropped routes."""
    nats: float
    """The sum of the routes' quality costs, in nats."""
    seconds: float
    """Predicted seconds that the layer waits."""
    wanted_nats: float
    """The sum of the quality costs, in nats, of the resolutions that would be best without `limit`."""


NOTHING = ResolvedMisses({}, [], 0.0, 0.0, 0.0)


def choose(
    missing: Sequence[Missing],
    costs: AnswerCosts,
    prices: LayerPrices,
    rate: float,
    top_k: int,
    limit: float = inf,
) -> ResolvedMisses:
    """Return the resolutions of least cost for one layer's `missing` experts.

    `rate`: the seconds that one nat is worth; if infinite, only HIGH and HOST are used. `limit`: the nats that may be
    spent. `top_k`: K, the number of experts that a token chooses. The result does not depend on the order of `missing`.
    """
    if not missing:
        return NOTHING
    ranked = sorted(missing, key=_importance) if len(missing) > 1 else missing
    if rate == inf:
        return _answered(ranked, [_EXACT] * len(ranked), costs)
    bare = _bare(ranked, top_k) if len(ranked) >= top_k else {}
    small = len(ranked) <= EXACT_UP_TO and len(bare) <= BARE_UP_TO
    protected: Container[tuple[int, int]] = () if small else _protected(ranked, bare, prices)
    options = [_options(entry, costs, prices, rate, bare if small else {}, protected) for entry in ranked]
    if small and costs.host is not None:
        return _together(ranked, options, costs, rate, limit, len(bare))
    picked = _by_worth(options, costs, rate)
    nats, all_protected = 0.0, 0
    for option in picked:
        nats += option.price
        all_protected |= option.keeps
    if nats <= limit and (not bare or not small or all_protected == sum(bare.values())):
        return _answered(ranked, picked, costs)
    if small:
        return _together(ranked, options, costs, rate, limit, len(bare))
    return _answered(ranked, [_EXACT] * len(ranked), costs, nats)


class _Option(NamedTuple):
    """A possible resolution of one missing expert, with its costs."""

    step: int
    """The amount by which this option increases the state of the dynamic programme (`ZERO_PRICED`): `ZERO_PRICED` for
    HIGH and HOST, `LOW_LOAD` for a low-precision copy that is loaded, 0 for an option that takes no time."""
    price: float
    keeps: int = 0
    """The bits of the bare tokens that have an expert if this option is chosen."""
    answer: Resolution | None = None
    """HIGH for HIGH or HOST, LOW for a low-precision copy; None if each route is replaced or dropped separately."""
    taken: Sequence[bool] = ()
    """For each route, whether a substitute computes it; otherwise the route is dropped."""


ZERO_PRICED, LOW_LOAD, FIRST_BARE = 1, 1 << 4, 1 << 8
"""A state of the dynamic programme is one number. Its bits 0 to 3 count the experts without quality cost, and bits 4 to
7 count the low loads. From bit 8 on, each bare token has a bit, which is set if the token has an expert."""

_EXACT = _Option(ZERO_PRICED, 0.0, 0, HIGH)
_TAKEN, _LEFT_OUT = (True,), (False,)


def _importance(entry: Missing) -> tuple[float, int, int]:
    """Return a sort key of a missing expert: the more important the expert, the lower the key."""
    routes = entry.routes
    weight = routes[0].weight if len(routes) == 1 else max(route.weight for route in routes)
    return -weight, -len(routes), entry.expert


def _bare(missing: Sequence[Missing], top_k: int) -> dict[int, int]:
    """Return {token: bit} for the tokens that miss all of their experts; each gets a bit of its own."""
    counts = Counter(route.token for entry in missing for route in entry.routes)
    return {token: FIRST_BARE << n for n, token in enumerate(token for token in counts if counts[token] == top_k)}


def _protected(missing: Sequence[Missing], bare: Container[int], prices: LayerPrices) -> set[tuple[int, int]]:
    """Return one (token, choice) for each bare token (a token that misses all of its experts): the route that must not
    be dropped. It is the route whose substitute costs least in comparison with dropping the route. If no route has a
    substitute, it is the route of highest weight."""
    best: dict[int, tuple[bool, float, int]] = {}
    for entry in missing:
        for route in entry.routes:
            if route.token in bare:
                dearer = _substitute_price(route, prices) - prices.price(SKIP, route.weight)
                is_alone = route.substitute is None
                rank = (is_alone, -route.weight if is_alone else dearer, route.choice)
                best[route.token] = min(best.get(route.token, rank), rank)
    return {(token, choice) for token, (_, _, choice) in best.items()}


def _options(
    entry: Missing,
    costs: AnswerCosts,
    prices: LayerPrices,
    rate: float,
    bare: Mapping[int, int],
    protected: Container[tuple[int, int]],
) -> list[_Option]:
    """Return the resolutions of one expert that can be part of the best combination. Of two resolutions that take the
    same time, the one of lower quality cost comes first.

    A resolution is left out if its quality cost exceeds the most that another resolution can cost. A load costs at most
    its own seconds and those of the loads in flight; the CPU costs at most the seconds of one expert.
    """
    keeps = 0
    if bare:
        for route in entry.routes:
            keeps |= bare.get(route.token, 0)
    options = [_EXACT if not keeps else _EXACT._replace(keeps=keeps)]
    high, host = costs.high, inf if costs.host is None else costs.host
    worth = min(high + costs.under_way, host)
    free = [option for option in _free(entry, prices, bare, protected) if rate * option.price <= worth]
    if costs.low is None and not entry.low_is_here:
        return options + free
    low = 0.0
    for route in entry.routes:
        low += prices.price(LOW, route.weight)
    if entry.low_is_here:
        free = [option for option in free if option.price < low]
        if rate * low <= worth:
            free.append(_Option(0, low, keeps, LOW))
    elif costs.low is not None and rate * low <= min(high - costs.low, host):
        options.append(_Option(LOW_LOAD, low, keeps, LOW))
        worth = costs.low + costs.under_way
        free = [option for option in free if rate * (option.price - low) <= worth]
    return options + free


def _free(
    entry: Missing, prices: LayerPrices, bare: Mapping[int, int], protected: Container[tuple[int, int]]
) -> list[_Option]:
    """Return the resolutions that take no time: each route is either replaced or dropped, whichever costs less.

    If only the dearer alternative gives a bare token an expert, options with that alternative are added. Protected
    routes are never dropped.
    """
    if len(entry.routes) == 1 and not bare and not protected:
        (route,) = entry.routes
        skip, substitute = prices.price(SKIP, route.weight), _substitute_price(route, prices)
        return [_Option(0, substitute, 0, None, _TAKEN) if substitute < skip else _Option(0, skip, 0, None, _LEFT_OUT)]
    found: list[tuple[float, int, tuple[bool, ...]]] = [(0.0, 0, ())]
    for route in entry.routes:
        skip, substitute = prices.price(SKIP, route.weight), _substitute_price(route, prices)
        bit = bare.get(route.token, 0) if bare else 0
        if protected and (route.token, route.choice) in protected:
            skip = inf
        if substitute < skip:
            ways = [(substitute, bit, True)]
        elif skip == inf:
            return []
        elif bit and substitute < inf:
            ways = [(skip, 0, False), (substitute, bit, True)]
        else:
            ways = [(skip, 0, False)]
        found = [
            (price + more, bits | bit, (*taken, is_taken))
            for price, bits, taken in found
            for more, bit, is_taken in ways
        ]
    return [_Option(0, price, bits, None, taken) for price, bits, taken in found]


def _substitute_price(route: Route, prices: LayerPrices) -> float:
    return inf if route.substitute is None else prices.price(SUBSTITUTE, route.weight, route.gap)


_Way: TypeAlias = "tuple[float, _Way | None, _Option]"
"""The cheapest sequence of options, one for each expert so far, that leads to a state of the dynamic programme:
(quality cost, the sequence for the experts before the last, the last expert's option)."""


def _together(
    missing: Sequence[Missing],
    options: Sequence[Sequence[_Option]],
    costs: AnswerCosts,
    rate: float,
    limit: float,
    bare: int,
) -> ResolvedMisses:
    """Return the best of all combinations of the experts' `options`, by dynamic programming. A state is a number whose
    bits are described at `FIRST_BARE`. `bare` is the number of bare tokens, which miss all of their experts."""
    states: dict[int, _Way] = {0: (0.0, None, _EXACT)}
    for ways in options:
        reached: dict[int, _Way] = {}
        for option in ways:
            step, more, keeps, _, _ = option
            for state, way in states.items():
                following, price = state + step | keeps, way[0] + more
                known = reached.get(following)
                if known is None or price < known[0]:
                    reached[following] = (price, way, option)
        states = reached
    whole = [(state, way[0]) for state, way in states.items() if state >> 8 == (1 << bare) - 1]
    wanted = state = _cheapest(whole, costs, rate)
    if states[wanted][0] > limit:
        state = _cheapest([(state, price) for state, price in whole if price <= limit], costs, rate)
    picked: list[_Option] = []
    _, before, option = states[state]
    while before is not None:
        picked.append(option)
        _, before, option = before
    return _answered(missing, picked[::-1], costs, states[wanted][0])


def _cheapest(states: Sequence[tuple[int, float]], costs: AnswerCosts, rate: float) -> int:
    """Return the state of least cost among the pairs (state, quality cost in nats); of equal costs, the first state."""
    best, best_state = inf, -1
    for state, price in states:
        priced = rate * price
        if priced <= best:
            cost = costs.split(state & 15, state >> 4 & 15)[0] + priced
            if cost < best:
                best, best_state = cost, state
    return best_state


def _by_worth(options: Sequence[Sequence[_Option]], costs: AnswerCosts, rate: float) -> list[_Option]:
    """Return one option for each expert. The experts whose cheapest lossy option costs most get exact options, the
    others lossy ones; the best number of exact options is searched for. Several assumed costs of loading a
    low-precision copy are tried. Without a CPU the result is the optimum."""
    best: tuple[float, float] = (inf, inf)
    best_picked: list[_Option] = []
    for low in _prices_of_a_low_load(costs):
        lossy: list[tuple[float, int, _Option]] = []
        for n, ways in enumerate(options):
            cheapest, least = _EXACT, inf
            for option in ways:
                cost = rate * option[1] + (low if option[0] else 0.0)
                if cost < least and option[0] != ZERO_PRICED:
                    cheapest, least = option, cost
            lossy.append((-least, n, cheapest))
        lossy.sort()
        picked, at_best = [ways[0] for ways in options], -1
        low_count, nats = 0, 0.0
        for exact in range(len(lossy), -1, -1):
            if exact < len(lossy):
                _, _, option = lossy[exact]
                if option.step == ZERO_PRICED:  # no lossy option, neither here nor before in this order
                    break
                low_count += option.step == LOW_LOAD
                nats += option.price
            cost = costs.split(exact, low_count)[0] + rate * nats
            if (cost, nats) < best:
                best, at_best = (cost, nats), exact
        if at_best >= 0:
            for _, n, option in lossy[at_best:]:
                picked[n] = option
            best_picked = picked
    return best_picked


def _prices_of_a_low_load(costs: AnswerCosts) -> Iterator[float]:
    """Yield the costs to assume for loading a low-precision copy, as seconds by which it delays the layer. Infinite
    means that low-precision copies are not loaded."""
    yield inf
    if costs.low is not None:
        yield costs.low
        for share in range(SHARES_TRIED if costs.host is not None else 0):
            yield costs.low * share / SHARES_TRIED


def _answered(
    missing: Sequence[Missing], picked: Sequence[_Option], costs: AnswerCosts, wanted_nats: float | None = None
) -> ResolvedMisses:
    """Return the resolutions that consist of the picked option of each missing expert."""
    served: dict[int, Resolution] = {}
    replacements: list[Replacement] = []
    nats = 0.0
    steps = [option.step for option in picked]
    zero_priced = steps.count(ZERO_PRICED)
    seconds, on_host = costs.split(zero_priced, steps.count(LOW_LOAD))
    to_load = zero_priced - on_host
    for entry, option in zip(missing, picked, strict=True):
        nats += option.price
        if option.step == ZERO_PRICED:
            served[entry.expert] = HIGH if to_load > 0 else HOST
            to_load -= 1
        elif option.answer is not None:
            served[entry.expert] = option.answer
        else:
            replacements += [
                Replacement(route.token, route.choice, entry.expert, route.substitute if is_taken else None)
                for route, is_taken in zip(entry.routes, option.taken, strict=True)
            ]
    return ResolvedMisses(served, replacements, nats, seconds, nats if wanted_nats is None else wanted_nats)
