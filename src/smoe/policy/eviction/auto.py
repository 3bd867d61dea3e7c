"""The eviction policy `auto`: follows whichever of four simple rules misses least at present. It is the default of
exact serving.

No single rule is good everywhere. A decode token passes through all layers, so LRU has almost no hits if there are
fewer slots than layers x top-k: a cyclic scan. LFU never forgets the uses of a finished topic. Counts over a window
(`score.py` without scores) forget at once what would be useful for longer. Fading counts, which halve in `HALF_LIFE`
tokens (LRFU: D. Lee et al., IEEE Transactions on Computers 50(12), 2001), were the best on every text that was tried
(docs/evictions.md), so this rule is followed first. The others are for texts that were not tried.

The rule that is followed, the *leader*, is chosen again during the run. From time to time there is a *trial* of some
steps. Each other rule then has a *shadow cache*: a set of experts that starts with the content of the real cache, has
the same size and receives the same uses. The real cache does the same for the leader. Another rule becomes the leader
only if it clearly misses less. The choice depends only on the routing and the set of residents, not on a clock or the
order of loads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from math import inf

import numpy as np

from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.base import Eviction
from smoe.policy.eviction.ranked import lowest, lowest_residents
from smoe.policy.eviction.score import WINDOW
from smoe.routing import Phase, Routing

RULES = ("lru", "lfu", "window", "fading-counts")
"""The rules by which residents are ranked. Each has an array with a value for every expert; the resident with the
lowest value is evicted first."""
_LAST_USE, _USES, _RECENT_USES, _FADING_USES = range(len(RULES))

HALF_LIFE = 64
"""The number of tokens after which a use has half its weight in the fading counts. Values from 32 to 256 differ by less
than 2 % in misses on text."""
_RESCALE = 512
"""The number of half-lives after which the fading counts are divided by 2 to the power of this number. The division is
exact, and the counts stay in float64's range."""

TRIAL_STEPS = (32, 128)
"""The least and the largest number of steps of a trial. Between these two numbers, `TURNOVERS` ends a trial; `CLEAR`
ends it at any time."""
TURNOVERS = 4
"""A trial ends when the leader's misses reach this multiple of the number of slots: the shadow caches then no longer
depend on their first content."""
CLEAR = 4.0
"""A trial ends early when another rule has fewer misses than the leader by more than this multiple of the square root
of the leader's misses. Chance does not explain such a difference."""
REST = 7
"""The number of steps between two trials, as a multiple of the last trial's steps; at most `REST_STEPS`."""
REST_STEPS = 256
"""The largest number of steps between two trials. Shadow caches are simulated in an eighth of all steps, and in up to a
third if there are so few misses that they cost almost nothing."""
ALARM_STEPS = 8
"""Misses are counted over this many steps. If they are clearly more than in the last trial, the next trial starts at
once, because the topic of the text has changed."""
MARGIN = 0.01
"""The fraction by which another rule must miss less than the leader to replace it."""
_UNCOUNTED = 4096
"""The largest number of routings that wait until their uses are added to the counts of the rule `lfu`."""


class Adaptive(Eviction):
    """The policy `auto`: follows the best of `RULES`, which it chooses with shadow caches (simulated caches without
    weights). `victims` costs O(L x E); in a trial, each layer with misses costs as much for every rule."""

    name = "auto"
    is_orderless = True

    def __init__(self) -> None:
        self._width = 0
        """The number of experts of the widest layer: expert e of layer l has index l * width + e in all arrays."""
        self._values = [np.zeros(0) for _ in RULES]
        """[L x E] for each rule. The values of `lfu` and `window` are up to date only while `_is_counting`."""
        self._is_resident = np.zeros(0, dtype=bool)
        """[L x E]: whether each expert is resident. No other field records residency, so an interrupt cannot cause
        contradictions."""
        self._leader = _FADING_USES
        self._weight = 1.0
        """The value that a use adds to a fading count. It grows from step to step, which makes all earlier uses fade
        alike."""
        self._recent: dict[int, deque[np.ndarray]] = {}
        """For each layer, the indices of the experts used in each of its last steps."""
        self._uncounted: list[np.ndarray] = []
        """The indices of the experts used in each of the steps that the values of `lfu` do not include yet."""
        self._clock = 0
        """The number of routings observed."""
        self._steps = 0
        """The number of passes over the layers. A pass begins when the layer number does not rise."""
        self._layer = -1
        """The layer of the last routing that was observed."""
        self._is_full = False
        """Whether any expert has been evicted. Before the first eviction all rules are equal."""
        self._trial: _Trial | None = None
        self._next_trial = 0
        self._usual = inf
        """The leader's misses in `ALARM_STEPS` steps, as measured in the last trial."""
        self._missed = 0
        """The leader's misses since they were last compared with `_usual`."""

    @property
    def rule(self) -> str:
        """The name of the rule that is followed now, one of `RULES`."""
        return RULES[self._leader]

    @property
    def _is_counting(self) -> bool:
        """Whether the values of `lfu` and `window` are needed now. Otherwise they are computed later, all at once."""
        return self._trial is not None or self._leader in (_USES, _RECENT_USES)

    def insert(self, key: ExpertKey) -> None:
        self._fit(key[0], key[1] + 1)
        self._is_resident[key[0] * self._width + key[1]] = True

    def remove(self, key: ExpertKey) -> None:
        self._is_resident[key[0] * self._width + key[1]] = False
        self._is_full = True

    def residents(self) -> set[ExpertKey]:
        places = (divmod(place, self._width) for place in self._is_resident.nonzero()[0].tolist())
        return {(*place, EXACT) for place in places}

    def observe(self, routing: Routing) -> None:
        layer, experts, rows = routing.layer, routing.experts, routing.top_k_index
        self._fit(layer, experts)
        if layer <= self._layer:
            self._begin_step()
        self._layer = layer
        self._clock += 1
        first = layer * self._width
        chosen = [[first + expert for expert in row if expert != experts] for row in rows]
        used = np.array(chosen[0] if len(chosen) == 1 else sorted(set().union(*chosen)), dtype=np.intp)
        self._values[_LAST_USE][used] = self._clock
        fading = self._values[_FADING_USES]
        if routing.phase is Phase.DECODE:
            fading[used] += self._weight
            self._remember(layer, used, [used])
            missed = self._is_resident[used].tolist().count(False)
            self._missed += missed
            if self._trial is not None:
                self._trial.charge(self._values, used, missed)
            return
        steps = [np.array(row, dtype=np.intp) for row in chosen]
        for step in steps:  # each of a prompt's tokens stands for a step
            fading[step] += self._weight
        self._remember(layer, used, steps)

    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        return lowest_residents(self._values[self._leader], self._is_resident, self._width, count, shield)

    def worth(self, key: ExpertKey) -> float:
        """Return an expert's value by the leading rule; 0 for a layer or an expert that was never observed."""
        place, values = key[0] * self._width + key[1], self._values[self._leader]
        return float(values[place]) if key[1] < self._width and place < len(values) else 0.0

    def _remember(self, layer: int, used: np.ndarray, steps: list[np.ndarray]) -> None:
        """Store the uses of one layer for the rules `lfu` and `window`. `used`: the indices of the experts that the
        observed routing uses; `steps`: the indices used in each of its steps, several for a prompt."""
        recent = self._recent.get(layer)
        if recent is None:
            recent = self._recent[layer] = deque(maxlen=WINDOW + 1)
        self._uncounted.append(used)
        is_counting = self._is_counting
        for step in steps:
            if not len(step):
                continue  # padding
            if is_counting:
                if len(recent) > WINDOW:
                    self._values[_RECENT_USES][recent[0]] -= 1
                self._values[_RECENT_USES][step] += 1
            recent.append(step)
        if is_counting or len(self._uncounted) >= _UNCOUNTED:
            self._count_uses()

    def _count_uses(self) -> None:
        uncounted, self._uncounted = self._uncounted, []
        if len(uncounted) == 1:
            self._values[_USES][uncounted[0]] += 1
        elif uncounted:
            self._values[_USES] += np.bincount(np.concatenate(uncounted), minlength=len(self._is_resident))

    def _count_all(self) -> None:
        """Add the uses that were stored for later to the values of the rules `lfu` and `window`."""
        self._count_uses()
        steps = [step for recent in self._recent.values() for step in recent]
        if steps:
            counts = np.bincount(np.concatenate(steps), minlength=len(self._is_resident))
            self._values[_RECENT_USES] = counts.astype(np.float64)

    def _begin_step(self) -> None:
        """Begin a pass over all layers: older uses fade, and a trial may begin or end."""
        self._steps += 1
        if self._steps % (HALF_LIFE * _RESCALE) == 0:
            self._values[_FADING_USES] *= 2.0**-_RESCALE
        self._weight = 2.0 ** (self._steps % (HALF_LIFE * _RESCALE) / HALF_LIFE)
        if self._steps % ALARM_STEPS == 0:
            if self._missed > self._usual + CLEAR * self._usual**0.5:
                self._next_trial = self._steps
            self._missed = 0
        trial = self._trial
        if trial is None:
            if self._is_full and self._steps >= self._next_trial and self._is_resident.any():
                self._count_all()
                self._trial = _Trial(self._leader, self._is_resident, self._steps)
        elif trial.is_over(self._steps):
            winner = trial.winner()
            self._usual = trial.misses[winner] * ALARM_STEPS / (self._steps - trial.began)
            rest = REST if winner == self._leader else 1  # a new leader is tested again soon
            self._leader, self._trial = winner, None
            self._next_trial = self._steps + min(rest * (self._steps - trial.began), REST_STEPS)

    def _fit(self, layer: int, experts: int) -> None:
        """Enlarge the arrays if they do not have this layer or this many experts."""
        before = self._width
        if experts <= before and (layer + 1) * before <= len(self._is_resident):
            return
        self._count_all()
        layers = max(layer + 1, len(self._is_resident) // before if before else 0)
        self._width = width = max(before, experts)
        place = np.arange(len(self._is_resident))
        place += place // max(1, before) * (width - before)
        self._values = [_spread(values, place, layers * width) for values in self._values]
        self._is_resident = _spread(self._is_resident, place, layers * width)
        for number, recent in self._recent.items():
            self._recent[number] = deque((place[step] for step in recent), maxlen=WINDOW + 1)
        self._trial = None


class _Trial:
    """The comparison of the rules since the trial began: the misses that each rule would have had."""

    def __init__(self, leader: int, resident: np.ndarray, began: int) -> None:
        self.began = began
        self._leader = leader
        self._slots = int(resident.sum())
        self.misses = [0] * len(RULES)
        self._shadows = {rule: resident.copy() for rule in range(len(RULES)) if rule != leader}

    def charge(self, values: list[np.ndarray], used: np.ndarray, missed: int) -> None:
        """Record one layer of a decode step that uses the experts at the indices `used`. `missed`: how many of these
        experts the leader's cache has missed. The leader is the rule that is followed now."""
        self.misses[self._leader] += missed
        for rule, shadow in self._shadows.items():
            missing = shadow[used].tolist().count(False)
            if not missing:
                continue
            self.misses[rule] += missing
            shadow[used] = False  # so that the used experts do not evict each other
            others = self._slots - (len(used) - missing)
            surplus = min(others, others + len(used) - self._slots)
            if surplus > 0:
                shadow[lowest(values[rule], shadow, surplus)] = False
            shadow[used[: self._slots]] = True

    def is_over(self, step: int) -> bool:
        least, most = TRIAL_STEPS
        steps, misses = step - self.began, self.misses[self._leader]
        return (
            steps >= most
            or (steps >= least and misses >= TURNOVERS * self._slots)
            or misses - min(self.misses) > CLEAR * misses**0.5
        )

    def winner(self) -> int:
        """Return the rule to follow from now on: the rule with the fewest misses if it is clearly better than the
        leader, otherwise the leader."""
        best = min(range(len(RULES)), key=lambda rule: (self.misses[rule], rule))
        return best if self.misses[best] < (1 - MARGIN) * self.misses[self._leader] else self._leader


def _spread(old: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """Return an array of length `size` that has the values of `old` at the indices `place`, and zeros elsewhere."""
    new = np.zeros(size, dtype=old.dtype)
    new[place] = old
    return new
