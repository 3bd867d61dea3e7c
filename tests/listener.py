"""A listener to a draft that runs ahead: remembers what it was told."""

from __future__ import annotations

from typing import Any

from smoe.policy.prediction import Prediction


class Heard:
    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        """(position, layer, *experts), and (position,) from which on nothing holds."""

    def expect(self, position: int, named: Prediction) -> None:
        self.said.append((position, named.layer, *named.experts))

    def withdraw(self, position: int) -> None:
        self.said.append((position,))
