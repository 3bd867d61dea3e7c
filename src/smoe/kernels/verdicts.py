"""The results of proofs: comparisons of our code with the library's. Each proof is made at most once for all parts of a
model that it holds for, and its result may come from an earlier load (`load/stored_proofs.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

V = TypeVar("V", bound="bool | int | str | None")


class Verdicts:
    """The results of the proofs of one model, by the proof's name and its subject."""

    def __init__(self, known: Mapping[str, Any] | None = None) -> None:
        """`known`: the results of an earlier load, which must have had the same code, machine and files."""
        self._known = dict(known or {})
        self._made: dict[str, Any] = {}

    def of(self, proof: str, subject: object, prove: Callable[[], V]) -> V:
        """Return the result of a proof. `prove` makes it unless it is known.

        `subject`: what the result holds for, as numbers, texts, types, and tuples of these.
        """
        name = f"{proof}: {_described(subject)}"
        if name not in self._known:
            self._known[name] = self._made[name] = prove()
        found: V = self._known[name]
        return found

    @property
    def made(self) -> int:
        """The number of proofs that this load has made."""
        return len(self._made)

    @property
    def all(self) -> Mapping[str, Any]:
        """All results by name: of this load and of earlier ones."""
        return self._known


def _described(subject: object) -> str:
    """Return a text that is equal in two processes only for equal subjects. Raise `TypeError` if a part of the subject
    is not one of the types that have such a text."""
    if isinstance(subject, type):
        return f"{subject.__module__}.{subject.__qualname__}"
    if subject is None or isinstance(subject, (bool, int, float, str)):
        return repr(subject)
    if isinstance(subject, tuple):
        return f"({', '.join(map(_described, subject))})"
    raise TypeError(f"{type(subject).__name__} cannot be a part of a proof's subject")
