"""How a row of activations in 8 bits is laid out for the formats of a kind (`byte_rows.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smoe.formats.base import Format

_LINE = 64


@dataclass(frozen=True)
class Layout:
    """Formats of equal layouts can be multiplied with the same rows."""

    group: int
    """Numbers that share a scale."""
    step: int
    """Between neighbouring numbers of a group: 2 where codes of even places come first."""

    @classmethod
    def of(cls, form: Format) -> Layout:
        """The layout of the rows that matrices of this format are multiplied with."""
        return cls(form.numbers // len(form.groups), form.groups[0].runs[0].step)

    @property
    def name(self) -> str:
        return f"{self.group}_{self.step}"

    def nbytes(self, columns: int) -> int:
        """Bytes of a row of so many numbers, to whole cache lines."""
        return -(-(columns + 8 * (columns // self.group)) // _LINE) * _LINE

    def nbytes_value(self, code: Any, columns: Any) -> Any:
        """The same in machine code: `code` is a `builder.Code`."""
        build = code.build
        groups = build.mul(build.udiv(columns, code.number(self.group)), code.number(8))
        whole = build.add(build.add(columns, groups), code.number(_LINE - 1))
        return build.mul(build.udiv(whole, code.number(_LINE)), code.number(_LINE))
