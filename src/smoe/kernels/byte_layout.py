"""The layout of a row of activations in 8 bits (`byte_rows.py`), which depends on the format of the matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

from smoe.formats.base import Format

_LINE = 64


class Layout(NamedTuple):
    """The layout of rows of 8-bit activations. If two formats have equal layouts, the same rows can be multiplied with
    matrices of both."""

    group: int
    """The number of elements that share a scale."""
    step: int
    """The distance between neighbouring elements of a group: 2 if the codes of even elements are stored before the odd
    ones, else 1."""

    @classmethod
    def of(cls, form: Format) -> Layout:
        """Return the layout of the activation rows that are multiplied with matrices of the quantized format `form`."""
        return cls(form.numbers // len(form.groups), form.groups[0].runs[0].step)

    @property
    def name(self) -> str:
        return f"{self.group}_{self.step}"

    def nbytes(self, columns: int) -> int:
        """Return the size in bytes of an activation row with this number of columns, rounded up to whole cache
        lines."""
        return -(-(columns + 8 * (columns // self.group)) // _LINE) * _LINE

    def nbytes_value(self, code: Any, columns: Any) -> Any:
        """Return the size in bytes of an activation row, `nbytes(columns)`, as a value of the machine code that is
        being generated. `code`: a `builder.Code`."""
        build = code.build
        groups = build.mul(build.udiv(columns, code.number(self.group)), code.number(8))
        whole = build.add(build.add(columns, groups), code.number(_LINE - 1))
        return build.mul(build.udiv(whole, code.number(_LINE)), code.number(_LINE))
