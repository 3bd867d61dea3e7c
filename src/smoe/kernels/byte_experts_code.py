"""The machine code that makes the tasks of a job for many tokens through experts (`byte_experts.py`).

In Python, with arrays, the tasks of a layer take 0.2 ms for 16 tokens and 1.2 ms for 128, while all threads wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from smoe.kernels import tasks
from smoe.kernels.builder import Code, text_of
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import LONG, Value

NAME = "make_byte_tasks"
WORDS = ("experts", "ups", "rows", "counts", "tokens", "addresses", "matrices", "lists", "sums", "fields", "size",
         "up_units", "rows_of_unit", "counters", "at_once", "finished", "nowhere", "wide", "wide_bytes", "table",
         "inner", "gated", "gated_bytes", "gate", "outputs", "totals", "hidden", "gains", "add_rows", "sum_unit",
         "units")  # fmt: skip
"""The names of the 8-byte words at the address `arguments`:

    experts, ups, rows      the number of experts, of the matrices before the gate, and of all rows
    counts, tokens          addresses of int64 [experts], the rows of each expert, and int64 [rows], the token of each
    addresses               address of int64 [experts, ups + 1], the addresses of the experts' matrices
    matrices                address of int64 [ups + 1, 8], `MATRIX_WORDS` of each matrix
    lists, sums, fields     addresses of the results: int64 [ups + 1, experts + 2 * rows], int64 [1 + 2 * rows], and
                            int64 [experts * (ups + 2) + 1, tasks.FIELDS]
    size                    the number of outputs in a unit
    up_units                the number of units of an expert before its gate
    rows_of_unit            the largest number of rows in a unit of a gate
    counters                address of int64 [experts], the counters of finished units
    at_once, finished,      addresses of other words that the threads share (`tasks.py`)
    nowhere
    wide, wide_bytes        address of the first row before the gate, and the bytes of a row
    table, inner, gate      the gate's table, its number of columns, and its function
    gated, gated_bytes      address of the first row after the gate, and the bytes of a row
    outputs, totals         addresses of bf16 [rows, hidden] and of the sums, float32 [tokens, hidden]
    hidden, gains           the number of columns of outputs and sums, and the address of float32 [rows]
    add_rows, sum_unit      the function of the sums, and the number of columns in a unit
    units                   receives the number of units of all tasks
"""
MATRIX_WORDS = ("rows_at", "rows_bytes", "to", "to_bytes", "function", "outputs", "columns", "units")
"""The words of a matrix: address of the first row that is multiplied, and the bytes of a row; the same of the results;
the function of the product; outputs and columns of the matrix; the number of units of a product."""


def module_of(isa: Isa) -> str:
    """Return the LLVM text of the function `make_byte_tasks(arguments)`."""
    module = ir.Module()
    code = Code(module, isa, NAME, ("*arguments",))
    made = _TasksCode(code)
    build, zero, given = code.build, code.number(0), made.given
    _, units = code.loop(zero, given["experts"], 1, [zero, zero], made.ups)
    _, units = code.loop(zero, given["experts"], 1, [zero, units], made.downs)
    made.sum(units)
    sums = build.sdiv(build.add(given["hidden"], build.sub(given["sum_unit"], code.number(1))), given["sum_unit"])
    code.store(build.add(units, sums), code.element(code.arguments[0], LONG, WORDS.index("units")), 8)
    code.end()
    return text_of(module, isa.attributes)


class _TasksCode:
    """The parts of the function, as methods that add their code."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.given = code.given(code.arguments[0], WORDS)
        self._at = {name: code.pointer(value) for name, value in self.given.items()}

    def ups(self, i: Value, carried: list[Value]) -> list[Value]:
        """Make the tasks before the gate of expert number `i`. `carried`: the expert's first row, and its first
        unit."""
        code, (first, begin) = self.code, carried
        count = self._word("counts", i)
        counter = self._counter(i)

        def product(m: Value, units: list[Value]) -> list[Value]:
            matrix = self._matrix(m)
            rows = self._list(i, m, first, count, matrix, lambda row: self._word("tokens", row))
            number = code.build.add(code.build.mul(i, self.given["ups"]), m)
            waits = self.given["at_once"], code.number(0)
            self._product(number, units[0], matrix, waits, counter, rows, self._address(i, m))
            return [code.build.add(units[0], matrix["units"])]

        (units,) = code.loop(code.number(0), self.given["ups"], 1, [begin], product)
        return [code.build.add(first, count), units]

    def downs(self, i: Value, carried: list[Value]) -> list[Value]:
        """Make the tasks of the gate and of the last product of expert number `i`. `carried` as in `ups`."""
        code, build, given, (first, begin) = self.code, self.code.build, self.given, carried
        count, counter = self._word("counts", i), self._counter(i)
        size = code.smaller(count, given["rows_of_unit"])
        gates = build.sdiv(build.add(count, build.sub(size, code.number(1))), size)
        number = build.add(build.mul(given["experts"], given["ups"]), build.mul(i, code.number(2)))
        wide, gated = (build.add(given[name], build.mul(given[f"{name}_bytes"], first)) for name in ("wide", "gated"))
        self._task(number, (begin, count, size, self._kind, counter, given["up_units"], counter, given["gate"], wide,
                            given["table"], gated, given["inner"], code.number(0)))  # fmt: skip
        matrix = self._matrix(given["ups"])
        rows = self._list(i, given["ups"], first, count, matrix, lambda row: row)
        waits, begins = (counter, build.add(given["up_units"], gates)), build.add(begin, gates)
        following = build.add(number, code.number(1))
        self._product(following, begins, matrix, waits, given["nowhere"], rows, self._address(i, given["ups"]))
        return [build.add(first, count), build.add(begins, matrix["units"])]

    def sum(self, units: Value) -> None:
        """Make the task of the sums, after `units` units of other tasks."""
        code, build, given = self.code, self.code.build, self.given
        code.store(given["rows"], self._at["sums"], 8)

        def add(row: Value, _: list[Value]) -> list[Value]:
            entry = code.element(self._at["sums"], LONG, build.add(build.mul(row, code.number(2)), code.number(1)))
            token = self._word("tokens", row)
            for n, (name, number, width) in enumerate((("outputs", row, 2), ("totals", token, 4))):
                offset = build.mul(build.mul(number, given["hidden"]), code.number(width))
                code.store(build.add(given[name], offset), code.element(entry, LONG, n), 8)
            return []

        code.loop(code.number(0), given["rows"], 1, [], add)
        number = build.mul(given["experts"], build.add(given["ups"], code.number(2)))
        self._task(number, (units, given["hidden"], given["sum_unit"], self._kind, given["finished"], units,
                            given["nowhere"], given["add_rows"], given["sums"], given["gains"], code.number(0),
                            given["hidden"], code.number(0)))  # fmt: skip

    @property
    def _kind(self) -> Value:
        return self.code.number(tasks.FORMAT)

    def _word(self, name: str, n: Value) -> Value:
        """Return word number `n` of an array."""
        return self.code.load(LONG, self.code.element(self._at[name], LONG, n), 8)

    def _counter(self, i: Value) -> Value:
        """Return the address of the counter of expert number `i`."""
        return self.code.build.add(self.given["counters"], self.code.build.mul(i, self.code.number(8)))

    def _matrix(self, m: Value) -> dict[str, Value]:
        """Return the words of matrix number `m`."""
        place = self.code.build.mul(m, self.code.number(len(MATRIX_WORDS)))
        return self.code.given(self.code.element(self._at["matrices"], LONG, place), MATRIX_WORDS)

    def _address(self, i: Value, m: Value) -> Value:
        """Return the address of matrix number `m` of expert number `i`."""
        build = self.code.build
        each = build.add(self.given["ups"], self.code.number(1))
        return self._word("addresses", build.add(build.mul(i, each), m))

    def _list(
        self, i: Value, m: Value, first: Value, count: Value, matrix: dict[str, Value], source: Callable[[Value], Value]
    ) -> Value:
        """Write the list of rows of a matrix of expert number `i`: `count` rows from number `first` on. `source`
        returns the number of the row that is multiplied. Return the list's address."""
        code, build, given = self.code, self.code.build, self.given
        twice = code.number(2)
        width = build.add(given["experts"], build.mul(given["rows"], twice))
        place = build.add(build.mul(m, width), build.add(i, build.mul(first, twice)))
        at = code.element(self._at["lists"], LONG, place)
        code.store(count, at, 8)

        def row(n: Value, _: list[Value]) -> list[Value]:
            number = build.add(first, n)
            entry = code.element(at, LONG, build.add(build.mul(n, twice), code.number(1)))
            for part, (name, index) in enumerate((("rows", source(number)), ("to", number))):
                begin = matrix["rows_at" if name == "rows" else name]
                address = build.add(begin, build.mul(matrix[f"{name}_bytes"], index))
                code.store(address, code.element(entry, LONG, part), 8)
            return []

        code.loop(code.number(0), count, 1, [], row)
        return build.ptrtoint(at, LONG)

    def _product(
        self,
        number: Value,
        begin: Value,
        matrix: dict[str, Value],
        waits: tuple[Value, Value],
        counter: Value,
        rows: Value,
        address: Value,
    ) -> None:
        """Write the task of a product. `waits`: the address of a counter, and the number that it must reach."""
        zero = self.code.number(0)
        self._task(number, (begin, matrix["outputs"], self.given["size"], self._kind, *waits, counter,
                            matrix["function"], rows, address, zero, matrix["columns"], zero))  # fmt: skip

    def _task(self, number: Value, fields: Sequence[Value]) -> None:
        """Write task number `number`."""
        at = self.code.build.mul(number, self.code.number(tasks.FIELDS))
        assert len(fields) == tasks.FIELDS, "a task has a fixed number of fields"
        for n, field in enumerate(fields):
            place = self.code.build.add(at, self.code.number(n))
            self.code.store(field, self.code.element(self._at["fields"], LONG, place), 8)
