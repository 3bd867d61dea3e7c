"""What faults cost in time, taken apart: the request that was lost, its layer, its token, and the tokens after it.

    worker     asked ------x
    main       | noticed ...... | others, and what they load .... |
    the layer  |<------------------- took so long --------------->|
    the token  | layers before | that layer | layers with a worker less |    the next tokens, with a worker less

What later layers and tokens take longer is the price of the memory and the disk that are gone, and is there with a
worker less whatever happened; what the layer takes longer is the fault's own.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

from smoe.cluster.requests import ExpertRequest
from smoe.cluster.requests_in_flight import UnderWay
from smoe.runtime.layer import LayerCompute

_HIT_SECONDS = 0.25
"""Tokens that begin so long after a fault count as hit by it, besides the one under way."""
_SETTLED_SECONDS = 1.5
"""After a fault, until tokens take what they usually do: a worker that comes back holds nothing."""


class Token(NamedTuple):
    """One step of main; moments on the clock of `time.monotonic`, which all processes share."""

    position: int
    began: float
    ended: float
    is_equal: bool
    """Whether its logits were those of one machine alone."""
    deadline: float
    """The longest that was allowed to a worker's request in it, seconds."""


class Fault(NamedTuple):
    """What was done to whom."""

    kind: str
    worker: int
    began: float
    ended: float


class Span(NamedTuple):
    """One layer's experts, from their plan to their sum."""

    layer: int
    began: float
    ended: float


class Lost(NamedTuple):
    """A request for which others stood in."""

    layer: int
    experts: int
    sent: float
    """0: nobody was asked, as it was known already."""
    deadline: float
    """Seconds."""
    noticed: float
    done: float
    """When all its rows were there."""


class Notes:
    """What main writes down while it decodes."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.deadlines: list[float] = []
        self._lost: list[tuple[ExpertRequest, float, list[float]]] = []

    def lose(self, request: ExpertRequest) -> None:
        """Others are asked from now on."""
        done: list[float] = []
        self._lost.append((request, time.monotonic(), done))
        for future in request.futures:
            future.add_done_callback(lambda _: done.append(time.monotonic()))

    def lost(self) -> list[Lost]:
        """All of them."""
        return [
            Lost(each.wanted[0].key[0], len(each.wanted), each.sent, each.due - each.sent, noticed, max(done))
            for each, noticed, done in self._lost
            if done
        ]


@contextmanager
def noting() -> Iterator[Notes]:
    """Inside, layers and what was lost are written down."""
    notes = Notes()
    before: Any = LayerCompute.decode, LayerCompute.prefill, UnderWay._ask, UnderWay.stand_in
    decode, prefill, ask, stand_in = before

    def timed(run: Any) -> Any:
        def noted(compute: LayerCompute, plan: Any, *given: Any) -> Any:
            began = time.monotonic()
            result = run(compute, plan, *given)
            if compute.others is not None:  # a draft has none
                notes.spans.append(Span(plan.layer, began, time.monotonic()))
            return result

        return noted

    def asked(under_way: UnderWay, request: ExpertRequest) -> None:
        ask(under_way, request)
        if request.trial is None and request.sent:
            notes.deadlines.append(request.due - request.sent)

    def stood_in(under_way: UnderWay, request: ExpertRequest) -> None:
        notes.lose(request)
        stand_in(under_way, request)

    patched: Any = LayerCompute, UnderWay
    patched[0].decode, patched[0].prefill = timed(decode), timed(prefill)
    patched[1]._ask, patched[1].stand_in = asked, stood_in
    try:
        yield notes
    finally:
        patched[0].decode, patched[0].prefill, patched[1]._ask, patched[1].stand_in = before


# -- what comes of it -------------------------------------------------------------------------------------------------


def judged(
    tokens: Sequence[Token], faults: Sequence[Fault], load: float, spans: Sequence[Span] = (), lost: Sequence[Lost] = ()
) -> dict[str, Any]:
    """What faults added to the tokens that they hit, by kind, beside what may be added: a load, and 50 ms (a kill) or
    the longest deadline of that token (all else); and where it went (`taken_apart`). Prompts (position 0) apart."""
    usual, layers = _usual(tokens, faults), _Layers(tokens, faults, spans)
    by_kind: dict[str, dict[str, Any]] = {}
    for fault in faults:
        hit = [each for each in tokens if each.ended > fault.began and each.began < fault.began + _HIT_SECONDS]
        apart = taken_apart(fault, tokens, usual, layers, lost) if hit else {"position": 1}
        hit = [each for each in hit if (each.position == 0) == (apart["position"] == 0)]
        name = fault.kind if apart["position"] else f"{fault.kind} in a prompt"
        row = by_kind.setdefault(name, {"faults": 0, "added_seconds": [], "beyond_seconds": [], "apart": []})
        row["faults"] += 1
        added = [(each.ended - each.began - usual[each.position], each) for each in hit]
        if added:
            worst, token = max(added)
            allowed = load + (0.05 if fault.kind == "kill" else token.deadline)
            row["added_seconds"].append(worst)
            row["beyond_seconds"].append(worst - allowed)
            row["apart"].append(apart)
    quiet = [each.ended - each.began - usual[each.position] for each in _undisturbed(tokens, faults) if each.position]
    return {
        "tokens": len(tokens),
        "all_equal": all(each.is_equal for each in tokens),
        "usual_seconds": median(usual.values()),
        "undisturbed_added_seconds": sorted(quiet)[int(0.99 * len(quiet))] if quiet else None,
        "kinds": by_kind,
    }


def taken_apart(
    fault: Fault, tokens: Sequence[Token], usual: Mapping[int, float], layers: _Layers, lost: Sequence[Lost]
) -> dict[str, Any]:
    """Seconds. `noticing`: from the fault, or from when the first lost request was sent, to others being asked; `anew`:
    from then until the last row was there; `layer`: what the layers that lost something took longer than usual, of the
    token where that is most, with their `deadline`; `token`: what all of that token did; `later`: what a token did that
    began after it, before the fault was over (the middle one)."""
    here = [each for each in lost if fault.began <= each.noticed < fault.ended + _HIT_SECONDS]
    found: dict[str, Any] = {"lost": len(here)}
    if here:
        first = min(here, key=lambda each: each.noticed)
        together = [each for each in here if each.layer == first.layer and each.noticed < first.done]
        found["noticing"] = first.noticed - max(fault.began, min(each.sent or each.noticed for each in together))
        found["anew"] = max(each.done for each in together) - first.noticed
    costs = dict[int, float]()
    for each in here:
        n, added = layers.added(each)
        costs[n] = costs.get(n, 0.0) + added
    at_fault = bisect_right([each.began for each in tokens], fault.began) - 1
    worst = max(costs, key=lambda n: costs[n], default=max(0, at_fault))
    token = tokens[worst]
    found["position"], found["layer"] = token.position, costs.get(worst, 0.0)
    found["deadline"] = max((each.deadline for each in here if each.sent), default=0.0)
    found["token"] = token.ended - token.began - usual[token.position]
    later = [each for each in tokens if each.began >= token.ended and each.ended <= max(fault.ended, token.ended + 0.3)]
    found["later"] = median(each.ended - each.began - usual[each.position] for each in later) if later else None
    return found


class _Layers:
    """What layers take, by token."""

    def __init__(self, tokens: Sequence[Token], faults: Sequence[Fault], spans: Sequence[Span]) -> None:
        self._tokens, self._begins = tokens, [each.began for each in tokens]
        self._by_token: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            self._by_token[self._token(span.began)].append(span)
        quiet, seconds = set(_undisturbed(tokens, faults)), defaultdict[tuple[int, int], list[float]](list)
        for n, token in enumerate(tokens):
            for span in self._by_token[n] if token in quiet else ():
                seconds[token.position, span.layer].append(span.ended - span.began)
        self._usual = {place: median(each) for place, each in seconds.items()}
        self._counted = set[tuple[int, int]]()

    def added(self, lost: Lost) -> tuple[int, float]:
        """(number of its token, what its layer took longer than usual), a layer once; 0 where nothing is known."""
        n = self._token(lost.noticed)
        for span in self._by_token[n]:
            usual = self._usual.get((self._tokens[n].position, span.layer))
            if span.layer == lost.layer and usual is not None and (n, span.layer) not in self._counted:
                self._counted.add((n, span.layer))
                return n, span.ended - span.began - usual
        return n, 0.0

    def _token(self, moment: float) -> int:
        return max(0, bisect_right(self._begins, moment) - 1)


def _usual(tokens: Sequence[Token], faults: Sequence[Fault]) -> dict[int, float]:
    """By position, the median of what it took where nothing was wrong (or of all, where something always was)."""
    found: dict[int, float] = {}
    undisturbed = _undisturbed(tokens, faults)
    for position in {each.position for each in tokens}:
        here = [each for each in undisturbed if each.position == position]
        chosen = here or [each for each in tokens if each.position == position]
        found[position] = median(each.ended - each.began for each in chosen)
    return found


def _undisturbed(tokens: Sequence[Token], faults: Sequence[Fault]) -> list[Token]:
    spans = [(fault.began, fault.ended + _SETTLED_SECONDS) for fault in faults]
    return [each for each in tokens if not any(each.ended > begin and each.began < end for begin, end in spans)]


def table(found: Mapping[str, Any]) -> str:
    """For people."""
    count = sum(row["faults"] for row in found["kinds"].values())
    lines = [
        f"{count} faults in {found['tokens']} tokens of {1e3 * found['usual_seconds']:.0f} ms; logits "
        f"{'equal' if found['all_equal'] else 'NOT EQUAL'} throughout, {len(found['failures'])} requests lost",
        f"without a fault, the worst in a hundred takes {1e3 * (found['undisturbed_added_seconds'] or 0):.0f} ms more",
    ]
    for kind, row in sorted(found["kinds"].items()):
        added = row["added_seconds"] or [0.0]
        late = sum(each > 0 for each in row["beyond_seconds"])
        most = max([0.0, *row["beyond_seconds"]])
        lines.append(
            f"{kind}: {row['faults']}, adds {1e3 * median(added):.0f} ms in the middle, {1e3 * max(added):.0f} at "
            f"most; {late} beyond what is allowed, by {1e3 * most:.0f} ms at most"
        )
        lines += [f"    {what}: {_spread(row['apart'], what)}" for what in _PARTS]
    main, workers = found["rss_bytes"]["main"], found["rss_bytes"]["worker"]
    lines.append(f"main held {main[0] >> 20} MiB at the start, {main[-1] >> 20} at the end, {max(main) >> 20} at most")
    if workers:
        lines.append(f"the largest worker {workers[0] >> 20} MiB at the start, {workers[-1] >> 20} at the end")
    return "\n".join(lines) + "\n"


_PARTS = ("noticing", "anew", "layer", "deadline", "token", "later")


def _spread(apart: Sequence[Mapping[str, Any]], what: str) -> str:
    values = [1e3 * each[what] for each in apart if each.get("lost") and each.get(what) is not None]
    if not values:
        return "none"
    return f"{median(values):.0f} ms ({min(values):.0f} to {max(values):.0f}) of {len(values)}"
