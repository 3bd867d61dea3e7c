"""Misses shared out between the link and the CPU: which missing experts are loaded, which are computed where they lie.

SMoE's CPU-load balancer (second version, section V-A; first version, section 5.6). All experts of a model have the same
size, so a decision is a number: how many of the missing ones are loaded, the most important first, as they are the ones
that will be wanted again. The CPU computes the others meanwhile, and the layer waits for the slower of the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from smoe.expert import ExpertKey
from smoe.policy.plan import HOST, Serve
from smoe.routing import Routing

RECENT = 16
"""Measured loads and CPU computations that a cost is the mean of (the papers' p, of which they give no value)."""


FLAT = 8
"""Tokens for which the CPU takes as long as for one: it waits for the weights (docs/papers/smoe.md)."""


class Costs(NamedTuple):
    """Seconds, of one expert each."""

    load: float
    """Host to device."""
    host: float
    """Computed by the CPU; with the order "tokens", for each token."""
    under_way: float = 0.0
    """What the link still has to do before it can begin."""
    token: float = 0.0
    """Computed by the CPU, for each of many tokens."""


class RecentCosts:
    """Costs as last measured, the mean of so many."""

    def __init__(self, recent: int = RECENT) -> None:
        self._load: deque[float] = deque(maxlen=recent)
        self._host: deque[float] = deque(maxlen=recent)
        self._token: deque[float] = deque(maxlen=recent)

    def note_load(self, seconds: float) -> None:
        self._load.append(seconds)

    def note_host(self, seconds: float) -> None:
        self._host.append(seconds)

    def note_token(self, seconds: float) -> None:
        """The share of one token in an expert computed for more than `FLAT` of them."""
        self._token.append(seconds)

    def costs(self, under_way: float) -> Costs:
        """`under_way` counts loads. What has not been measured yet is taken to cost as much as the other way."""
        load = sum(self._load) / len(self._load) if self._load else None
        host = sum(self._host) / len(self._host) if self._host else None
        load = load if load is not None else host if host is not None else 1.0
        host = host if host is not None else load
        token = sum(self._token) / len(self._token) if self._token else host / FLAT
        return Costs(load, host, under_way * load, token)


def paper(host: Sequence[float], costs: Costs) -> int:
    """Algorithm 2 as printed, two pointers: the side that is behind gets the next expert, the link first and from the
    left, the CPU from the right. `host`: CPU seconds of every missing expert, most important first."""
    load_seconds = host_seconds = 0.0
    left, right = 0, len(host) - 1
    while left <= right:
        if load_seconds <= host_seconds:
            load_seconds += costs.load
            left += 1
        else:
            host_seconds += host[right]
            right -= 1
    return left


def optimal(host: Sequence[float], costs: Costs) -> int:
    """The best of all splits of equation 4, with what is under way counted; of equal ones that which loads most.

    Algorithm 2 is not optimal: with a load of 3 and one expert that the CPU computes in 1 it still loads, as the link
    is idle.
    """

    def seconds(loaded: int) -> float:
        link = costs.under_way + loaded * costs.load if loaded else 0.0
        return max(link, sum(host[loaded:]))

    return min(range(len(host), -1, -1), key=seconds)


def never_load(host: Sequence[float], costs: Costs) -> int:
    """The CPU computes whatever is missing (Fiddler, arXiv 2402.07033; llama.cpp's static split)."""
    return 0


BALANCERS: dict[str, Callable[[Sequence[float], Costs], int]] = {
    "paper": paper,
    "optimal": optimal,
    "host": never_load,
}
"""How many of the missing experts are loaded, the most important first."""

BALANCE = ("auto", "none", *BALANCERS)
"""none: all are loaded; auto: optimal where the CPU is not itself the device."""

BALANCE_ORDER = ("score", "tokens")
"""Who is loaded first: the expert of the highest score, the CPU taking as long for several tokens as for one (second
version), or of the most tokens, the CPU's time growing with them (first version)."""


class Sharing(Protocol):
    """How one layer's misses are shared out between loading and the units that compute in parallel with the device."""

    def split(self, missing: Sequence[Serve], routing: Routing) -> tuple[list[Serve], list[Serve]]:
        """Split a decode step: (to be loaded, most important first; to be computed elsewhere, with the unit of
        each)."""

    def split_prompt(self, missing: Sequence[Serve], ahead: int) -> dict[ExpertKey, int]:
        """The experts of a prompt that are computed elsewhere, and by which unit; `ahead` loads come in any
        case."""

    @property
    def takes_all(self) -> bool:
        """Whether nothing is to be loaded here."""


class Balance(NamedTuple):
    """One layer's balancing: how, in which order, and at what costs."""

    method: str
    order: str
    costs: Costs

    def split(self, missing: Sequence[Serve], routing: Routing) -> tuple[list[Serve], list[Serve]]:
        """(to be loaded, most important first; to be computed by the CPU)."""
        ranked = sorted(missing, key=lambda serve: importance(serve, routing, self.order))
        tokens = [len(serve.routes) if self.order == "tokens" else 1 for serve in ranked]
        loaded = BALANCERS[self.method]([self.costs.host * count for count in tokens], self.costs)
        return ranked[:loaded], [serve._replace(unit=HOST) for serve in ranked[loaded:]]

    def split_prompt(self, missing: Sequence[Serve], ahead: int) -> dict[ExpertKey, int]:
        """The experts of a prompt that the CPU computes: of the fewest tokens, and as many as shorten the layer.

        `ahead` loads come in any case. The best split, whatever the method: only the CPU's time grows with the tokens
        (first version, section 5.6), and never to load would leave the device idle for the whole prompt.
        """
        ranked = sorted(missing, key=lambda serve: (-len(serve.routes), serve.key))
        host = [max(self.costs.host, self.costs.token * len(serve.routes)) for serve in ranked]
        under_way = self.costs.under_way + ahead * self.costs.load
        loaded = optimal(host, self.costs._replace(under_way=under_way))
        return {serve.key: HOST for serve in ranked[loaded:]}

    @property
    def takes_all(self) -> bool:
        """Never: what stays of a prompt is loaded."""
        return False


def importance(serve: Serve, routing: Routing, order: str) -> tuple[float, ...]:
    """A missing expert's place in one of `BALANCE_ORDER`, ascending: the most important first. Without scores the place
    among a token's choices stands for them."""
    _, expert, _ = serve.key
    width = len(routing.top_k_index[0])
    if routing.scores is not None:
        score = max(routing.scores[route // width][expert] for route in serve.routes)
    else:
        score = -min(float(route % width) for route in serve.routes)
    tokens = float(len(serve.routes))
    return (-tokens, -score, expert) if order == "tokens" else (-score, -tokens, expert)
