"""A function of machine code that is being built: its arguments, calls, loops, and what is computed on a condition.

The body of a loop is a Python function that takes the carried values of one iteration and returns those of the next:

    (total,) = code.loop(zero, columns, 16, [nothing], lambda k, carried: [code.fma(..., carried[0])])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from llvmlite import ir

from smoe.kernels.kinds import BIT, FLOAT, LONG, POINTER, Value

_ARGUMENTS = {"*": POINTER, "&": POINTER, ".": FLOAT, "?": BIT}
"""The types of arguments by the first character of their names."""


@functools.lru_cache(maxsize=4096)
def integer(kind: ir.Type, value: int) -> Value:
    """Return a constant integer. Constants are shared, because a kernel needs each of a few values thousands of times,
    and llvmlite would make an object and a text of each."""
    return ir.Constant(kind, value)


class BuiltFunction:
    """A function that is being built."""

    def __init__(
        self,
        module: ir.Module,
        name: str,
        arguments: Sequence[str],
        is_local: bool = False,
        returns: ir.Type | None = None,
    ) -> None:
        """`arguments`: the names of the function's arguments. The first character of a name tells the type: `*` a
        pointer, `&` a pointer to memory that no other pointer reaches, `.` a float32, `?` a bit; other names are 64-bit
        integers. `is_local`: whether the function is called from this module only. `returns`: the type of the result,
        which `end` returns; None: no result."""
        types = [_ARGUMENTS.get(argument[0], LONG) for argument in arguments]
        self.function = ir.Function(module, ir.FunctionType(returns or ir.VoidType(), types), name)
        self.function.linkage = "internal" if is_local else ""
        self.arguments: list[Value] = list(self.function.args)
        for value, argument in zip(self.arguments, arguments, strict=True):
            if argument.startswith("&"):
                value.add_attribute("noalias")
        self.build = ir.IRBuilder(self.function.append_basic_block("entry"))
        self._module = module

    def number(self, value: Value | int) -> Value:
        """Return a 64-bit integer as a value of the generated code."""
        return integer(LONG, value) if isinstance(value, int) else value

    def call(self, name: str, arguments: Sequence[Value]) -> Value:
        """Add a call of a function that has been built already in the same module. Return its result."""
        return self.build.call(self._module.globals[name], arguments)

    def call_at(self, address: Value, arguments: Sequence[Value], returns: ir.Type | None = None) -> Value:
        """Add a call of the function at an address. Return its result."""
        kind = ir.FunctionType(returns or ir.VoidType(), [each.type for each in arguments])
        return self.build.call(_Callee(address, kind), arguments)

    def intrinsic(self, name: str, kind: ir.FunctionType, arguments: Sequence[Value]) -> Value:
        """Call an LLVM intrinsic, and return its result."""
        known = self._module.globals.get(name) or ir.Function(self._module, kind, name)
        return self.build.call(known, arguments)

    def loop(
        self,
        begin: Value,
        end: Value,
        step: Value | int,
        carried: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:
        """Build the loop `for index in range(begin, end, step)`, and return the carried values after it. `body(index,
        carried)` returns the carried values of the next iteration."""

        def turn(values: list[Value]) -> Sequence[Value]:
            following = body(values[0], values[1:])
            return [self.build.add(values[0], self.number(step)), *following]

        return self.loop_while([begin, *carried], lambda values: self.build.icmp_signed("<", values[0], end), turn)[1:]

    def repeat(
        self,
        begin: Value,
        end: Value,
        step: Value | int,
        carried: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
        may_be_empty: bool = False,
    ) -> list[Value]:
        """Build the same loop as `loop`, with its condition at the end: the body is computed once at least, unless the
        loop `may_be_empty`."""

        def turn(values: list[Value]) -> tuple[Sequence[Value], Value]:
            following = body(values[0], values[1:])
            later = self.build.add(values[0], self.number(step))
            return [later, *following], self.build.icmp_signed("<", later, end)

        begins = self.build.icmp_signed("<", begin, end) if may_be_empty else None
        return self.loop_until([begin, *carried], turn, begins)[1:]

    def loop_while(
        self,
        carried: Sequence[Value],
        condition: Callable[[list[Value]], Value],
        body: Callable[[list[Value]], Sequence[Value]],
    ) -> list[Value]:
        """Build a loop that lasts while the carried values meet the condition. Return these values after the loop.
        `body` returns those of the next iteration."""
        build, function = self.build, self.function
        before = build.block
        head, inside, after = (function.append_basic_block(name) for name in ("head", "inside", "after"))
        build.branch(head)
        build.position_at_end(head)
        values = [build.phi(value.type) for value in carried]
        build.cbranch(condition(values), inside, after)
        build.position_at_end(inside)
        following = body(list(values))
        _choose(values, before, carried, build.block, following)
        build.branch(head)
        build.position_at_end(after)
        return values

    def loop_until(
        self,
        carried: Sequence[Value],
        body: Callable[[list[Value]], tuple[Sequence[Value], Value]],
        begins: Value = None,
    ) -> list[Value]:
        """Build a loop whose `body` returns the carried values of the next iteration, and whether there is one. Return
        the values after the loop. The body is computed once at least, or only if `begins` holds."""
        build, function = self.build, self.function
        before, inside = build.block, function.append_basic_block("again")
        build.position_at_end(inside)
        values = [build.phi(value.type) for value in carried]
        following, is_more = body(list(values))
        last, after = build.block, function.append_basic_block("after")
        build.cbranch(is_more, inside, after)
        build.position_at_end(before)
        build.branch(inside) if begins is None else build.cbranch(begins, inside, after)
        build.position_at_end(after)
        _choose(values, before, carried, last, following)
        if begins is None:
            return list(following)
        found = [build.phi(value.type) for value in carried]
        _choose(found, before, carried, last, following)
        return found

    def either(
        self, condition: Value, values: Sequence[Value] = (), body: Callable[[], Sequence[Value]] = lambda: ()
    ) -> list[Value]:
        """Build the code of `body`, which is computed if `condition` holds. Return the values that `body` returns, or
        `values` if the condition does not hold."""
        build = self.build
        before, inside = build.block, self.function.append_basic_block("then")
        build.position_at_end(inside)
        others = body()
        last, after = build.block, self.function.append_basic_block("after")
        build.branch(after)
        build.position_at_end(before)
        build.cbranch(condition, inside, after)
        build.position_at_end(after)
        found = [build.phi(value.type) for value in values]
        _choose(found, before, values, last, others)
        return found

    def end(self, result: Value = None) -> None:
        """Build the function's end, which returns `result`, or nothing."""
        self.build.ret_void() if result is None else self.build.ret(result)


class _Callee:
    """The address of a function, as llvmlite calls it."""

    def __init__(self, address: Value, kind: ir.FunctionType) -> None:
        self.function_type, self.get_reference = kind, address.get_reference


def _choose(phis: Sequence[Value], one: Value, values: Sequence[Value], other: Value, others: Sequence[Value]) -> None:
    """Give each of `phis` its number of `values` after the block `one`, and its number of `others` after the block
    `other`."""
    for phi, value, second in zip(phis, values, others, strict=True):
        phi.add_incoming(value, one)
        phi.add_incoming(second, other)
