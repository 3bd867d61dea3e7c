"""What workers have been told to bring in before it is asked for: nothing twice, and nobody of more than fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from smoe.expert import EXACT, ExpertKey


class Told:
    """Of the token under way and the next one. Belongs to the computing thread."""

    def __init__(self) -> None:
        self._token = 0
        self._units: dict[tuple[int, int], dict[int, int]] = {}
        """Who was told, by token and layer and then by expert."""
        self._asked: dict[int, int] = {}
        """Who of them is being asked, by expert: what they were told of is still to be used."""

    def begin_token(self) -> None:
        """What was said of the next token is of this one from now on; what was not asked for is forgotten."""
        self._token += 1
        self._units = {at: told for at, told in self._units.items() if at[0] >= self._token}

    def ask(self, layer: int) -> None:
        """A layer's experts are about to be asked for: once the next layer's are, nothing of it is outstanding."""
        self._asked = self._units.pop((self._token, layer), {})

    def outstanding(self, unit: int) -> int:
        """Experts that a worker has been told of and not used yet."""
        return sum(each == unit for told in (*self._units.values(), self._asked) for each in told.values())

    def new(self, layer: int, is_next: bool, experts: Iterable[int]) -> list[ExpertKey]:
        """Of these experts those that nobody has been told of for this token."""
        told = self._units.get((self._token + is_next, layer), {})
        return [(layer, expert, EXACT) for expert in experts if expert not in told]

    def given(self, unit: int, layer: int, is_next: bool) -> list[int]:
        """The experts of a layer that are this one's to bring in."""
        told = self._units.get((self._token + is_next, layer), {})
        return [expert for expert, whose in told.items() if whose == unit]

    def tell(
        self, is_next: bool, units: Mapping[ExpertKey, int], slots: Mapping[int, int]
    ) -> dict[int, list[ExpertKey]]:
        """What to tell each of `units` (workers by expert) now: as much as fits into its `slots`."""
        found: dict[int, list[ExpertKey]] = {}
        for key, unit in units.items():
            if self.outstanding(unit) < slots[unit]:
                self._units.setdefault((self._token + is_next, key[0]), {})[key[1]] = unit
                found.setdefault(unit, []).append(key)
        return found
