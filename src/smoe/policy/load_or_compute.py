"""Divides a layer's misses between the link and the CPU: which missing experts are loaded, and which the CPU computes.

This is SMoE's CPU-load balancer (second version, section V-A; first version, section 5.6). All experts of a model have
the same size, so the decision is a number: how many of the missing experts are loaded. The most important are loaded,
because they will be needed again. The CPU computes the others at the same time, and the layer waits for the slower of
link and CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from smoe.expert import ExpertKey
from smoe.policy.plan import HOST, Serve
from smoe.routing import Routing

RECENT = 16
"""The number of latest loads and CPU computations whose mean is used as the cost (p in the papers, which give no
value)."""


FLAT = 8
"""The number of tokens up to which the CPU takes the same time for an expert, because it waits for the expert's weights
(docs/papers/smoe.md)."""


class Costs(NamedTuple):
    """The seconds that one missing expert takes."""

    load: float
    """Seconds to load an expert from host to device."""
    host: float
    """Seconds for the CPU to compute an expert; if experts are ordered by "tokens", seconds for each token of the
    expert."""
    under_way: float = 0.0
    """Seconds until the loads in flight have ended."""
    token: float = 0.0
    """Seconds of the CPU for each token of an expert with more than `FLAT` tokens."""


class RecentCosts:
    """The means of the latest measured costs."""

    def __init__(self, recent: int = RECENT) -> None:
        self._load: deque[float] = deque(maxlen=recent)
        self._host: deque[float] = deque(maxlen=recent)
        self._token: deque[float] = deque(maxlen=recent)

    def note_load(self, seconds: float) -> None:
        self._load.append(seconds)

    def note_host(self, seconds: float) -> None:
        self._host.append(seconds)

    def note_token(self, seconds: float) -> None:
        """Record the CPU's time per token for an expert with more than `FLAT` tokens."""
        self._token.append(seconds)

    def costs(self, under_way: float) -> Costs:
        """Return the mean costs in seconds. `under_way`: the number of loads in flight. If loads were never measured, a
        load is assumed to cost as much as the CPU, and the reverse."""
        load = sum(self._load) / len(self._load) if self._load else None
        host = sum(self._host) / len(self._host) if self._host else None
        load = load if load is not None else host if host is not None else 1.0
        host = host if host is not None else load
        token = sum(self._token) / len(self._token) if self._token else host / FLAT
        return Costs(load, host, under_way * load, token)


def paper(host: Sequence[float], costs: Costs) -> int:
    """Return the number of experts to load by Algorithm 2 as printed. `host`: CPU seconds of every missing expert, most
    important first.

    The algorithm has two pointers. Whichever of link and CPU is finished sooner gets the next expert: the link from the
    left, the CPU from the right. The link begins.
    """
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
    """Return the number of experts to load that makes the layer fastest by equation 4, including loads in flight. Among
    equally fast numbers it is the largest. `host`: CPU seconds of every missing expert, most important first.

    Algorithm 2 of the paper is not optimal. For example, with a load of 3 seconds and one expert that the CPU computes
    in 1 second, it loads the expert because the link is idle.
    """

    def seconds(loaded: int) -> float:
        link = costs.under_way + loaded * costs.load if loaded else 0.0
        return max(link, sum(host[loaded:]))

    return min(range(len(host), -1, -1), key=seconds)


def never_load(host: Sequence[float], costs: Costs) -> int:
    """Return 0: the CPU computes all missing experts (Fiddler, arXiv 2402.07033; llama.cpp's static split)."""
    return 0


BALANCERS: dict[str, Callable[[Sequence[float], Costs], int]] = {
    "paper": paper,
    "optimal": optimal,
    "host": never_load,
}
"""Functions by the name of the setting. Each takes the CPU seconds of the missing experts, most important first, and
returns how many of these experts are loaded."""

BALANCE = ("auto", "none", *BALANCERS)
"""none: all missing experts are loaded; auto: `optimal` if the device is not the CPU itself."""

BALANCE_ORDER = ("score", "tokens")
"""Which experts are loaded first. score: those of the highest router score, with equal CPU time for every expert
(second version). tokens: those with most tokens, with CPU time proportional to the tokens (first version)."""


class Sharing(Protocol):
    """The interface of an object that divides one layer's misses between loads and compute units that work in parallel
    with the device."""

    def split(self, missing: Sequence[Serve], routing: Routing) -> tuple[list[Serve], list[Serve]]:
        """Return the division of a decode step's misses: (experts to load, most important first; the other experts,
        each with the unit that computes it)."""

    def split_prompt(self, missing: Sequence[Serve], ahead: int) -> dict[ExpertKey, int]:
        """Return {expert: unit} for the missing experts of a prompt that other compute units compute. `ahead`: the
        number of loads that are necessary in any case."""

    @property
    def takes_all(self) -> bool:
        """Whether other units compute all missing experts, so that nothing is loaded."""


class Balance(NamedTuple):
    """The division of one layer's misses between link and CPU."""

    method: str
    order: str
    costs: Costs

    def split(self, missing: Sequence[Serve], routing: Routing) -> tuple[list[Serve], list[Serve]]:
        """Return (experts to load, most important first; experts that the CPU computes)."""
        ranked = sorted(missing, key=lambda serve: importance(serve, routing, self.order))
        tokens = [len(serve.routes) if self.order == "tokens" else 1 for serve in ranked]
        loaded = BALANCERS[self.method]([self.costs.host * count for count in tokens], self.costs)
        return ranked[:loaded], [serve._replace(unit=HOST) for serve in ranked[loaded:]]

    def split_prompt(self, missing: Sequence[Serve], ahead: int) -> dict[ExpertKey, int]:
        """Return {expert: `HOST`} for the missing experts of a prompt that the CPU computes. They are the experts with
        the fewest tokens, as many as make the layer faster.

        `ahead`: the number of loads that are necessary in any case. The division is always the optimal one, because
        only the CPU's time grows with the tokens (first version, section 5.6), and without loads the device would be
        idle during the whole prompt.
        """
        ranked = sorted(missing, key=lambda serve: (-len(serve.routes), serve.key))
        host = [max(self.costs.host, self.costs.token * len(serve.routes)) for serve in ranked]
        under_way = self.costs.under_way + ahead * self.costs.load
        loaded = optimal(host, self.costs._replace(under_way=under_way))
        return {serve.key: HOST for serve in ranked[loaded:]}

    @property
    def takes_all(self) -> bool:
        """Always false: the experts of a prompt that become resident are loaded, not computed by the CPU."""
        return False


def importance(serve: Serve, routing: Routing, order: str) -> tuple[float, ...]:
    """Return a missing expert's sort key for one of `BALANCE_ORDER`; the most important expert has the lowest key.
    Without scores, the expert's best position among a token's choices is used."""
    _, expert, _ = serve.key
    width = len(routing.top_k_index[0])
    if routing.scores is not None:
        score = max(routing.scores[route // width][expert] for route in serve.routes)
    else:
        score = -min(float(route % width) for route in serve.routes)
    tokens = float(len(serve.routes))
    return (-tokens, -score, expert) if order == "tokens" else (-score, -tokens, expert)
