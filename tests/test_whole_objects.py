"""Objects are whole when they are made: no module assigns attributes of objects whose class another module defines.

Records (dataclasses) are for their users to fill in. The types of objects are what annotations, constructors and
returns say; where they say nothing, nothing is checked. Would catch an object that is completed, or switched to another
mode, by code far from its class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple, TypeAlias

SOURCE = Path(__file__).parent.parent / "src"
_ITEMS = {"list", "Sequence", "Iterable", "Iterator", "Collection", "tuple", "set", "frozenset", "deque"}
_VALUES = {"dict", "Mapping", "OrderedDict"}
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Known(NamedTuple):
    """A type: an annotation, and the module in which its names have their meaning."""

    module: Module
    annotation: ast.expr


class Class(NamedTuple):
    module: Module
    node: ast.ClassDef

    @property
    def is_record(self) -> bool:
        return any("dataclass" in ast.unparse(each) for each in self.node.decorator_list)


class Module:
    def __init__(self, name: str, text: str, project: dict[str, Module]) -> None:
        self.name, self.tree, self._project = name, ast.parse(text), project

    @cached_property
    def defined(self) -> dict[str, ast.ClassDef | Function]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef | Function)}

    @cached_property
    def _imported(self) -> dict[str, tuple[str, str]]:
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        return {alias.asname or alias.name: (node.module or "", alias.name) for node in found for alias in node.names}

    def functions(self) -> Iterator[tuple[Function, Class | None]]:
        """All functions, and the classes whose methods they are."""
        classes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]
        of = {each: Class(self, node) for node in classes for each in node.body}
        yield from ((node, of.get(node)) for node in ast.walk(self.tree) if isinstance(node, Function))

    def find(self, name: str) -> tuple[Module, ast.ClassDef | Function] | None:
        """The class or function that a name means here, and the module that defines it."""
        if name in self.defined:
            return self, self.defined[name]
        source, original = self._imported.get(name, ("", ""))
        return self._project[source].find(original) if source in self._project else None


def class_of(known: Known | None) -> Class | None:
    """The class of an object of a type, if it is one of ours; of `X | None` that of X."""
    match known:
        case Known(module, ast.BinOp(left=left, right=right)):
            return class_of(Known(module, left)) or class_of(Known(module, right))
        case Known(module, ast.Name(id=name)):
            found = module.find(name)
            return Class(found[0], found[1]) if found is not None and isinstance(found[1], ast.ClassDef) else None
        case Known(module, ast.Constant(value=str(text))):
            return class_of(Known(module, ast.parse(text, mode="eval").body))
    return None


def item_of(known: Known | None) -> Known | None:
    """The type of the items of a list or of the values of a mapping."""
    match known:
        case Known(module, ast.Subscript(value=ast.Name(id=name), slice=inside)):
            parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
            return Known(module, parts[-1] if name in _VALUES else parts[0]) if name in _ITEMS | _VALUES else None
    return None


@cache
def member(of: Class, name: str) -> Known | None:
    """The type of an attribute, or of what a method returns."""
    for node in ast.walk(of.node):
        match node:
            case ast.AnnAssign(target=ast.Name(id=found) | ast.Attribute(attr=found), annotation=known):
                if found == name:
                    return Known(of.module, known)
            case ast.FunctionDef(name=found, returns=ast.expr() as known) if found == name:
                return Known(of.module, known)
    for method in [each for each in of.node.body if isinstance(each, ast.FunctionDef)]:
        for target, value in assigned(method):
            match target:
                case ast.Attribute(value=ast.Name(id="self"), attr=found) if found == name:
                    if known := Scope(of.module, method, of, with_locals=False).type_of(value):
                        return known
    for base in of.node.bases:
        above = class_of(Known(of.module, base))
        if above is not None and (known := member(above, name)) is not None:
            return known
    return None


def assigned(function: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Every target of an assignment in a function, and the value."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                yield from zip(targets, values, strict=True)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from ((each, value) for each in (target.elts if isinstance(target, ast.Tuple) else [target]))
            case ast.AugAssign(target=target, value=value):
                yield target, value


class Scope:
    """The names in one function and their types."""

    def __init__(self, module: Module, function: Function, of: Class | None, with_locals: bool = True) -> None:
        self._module, self._function = module, function
        given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        self._names = {each.arg: Known(module, each.annotation) for each in given if each.annotation is not None}
        if of is not None:
            self._names["self"] = Known(of.module, ast.Name(of.node.name))
        for node in ast.walk(function) if with_locals else ():
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=known):
                    self._names[name] = Known(module, known)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._note(name, self.type_of(value))
                case ast.withitem(context_expr=value, optional_vars=ast.Name(id=name)):
                    self._note(name, self.type_of(value))
                case (
                    ast.For(target=ast.Name(id=name), iter=value)
                    | ast.comprehension(target=ast.Name(id=name), iter=value)
                ):
                    self._note(name, item_of(self.type_of(value)))

    def _note(self, name: str, known: Known | None) -> None:
        if known is not None:
            self._names[name] = known

    def type_of(self, node: ast.expr) -> Known | None:
        match node:
            case ast.Name(id=name):
                return self._names.get(name)
            case ast.Attribute(value=value, attr=name):
                of = class_of(self.type_of(value))
                return None if of is None else member(of, name)
            case ast.Subscript(value=value):
                return item_of(self.type_of(value))
            case ast.Call(func=ast.Name(id=name)):
                found = self._module.find(name)
                if found is not None and isinstance(found[1], ast.ClassDef):
                    return Known(self._module, ast.Name(name))
                return Known(found[0], found[1].returns) if found is not None and found[1].returns else None
            case ast.Call(func=ast.Attribute(value=value, attr="values")):
                return self.type_of(value)
            case ast.Call(func=ast.Attribute() as method):
                return self.type_of(method)
            case ast.IfExp(body=body, orelse=orelse):
                return self.type_of(body) or self.type_of(orelse)
            case ast.BoolOp(values=values):
                return next(filter(None, map(self.type_of, values)), None)
        return None


def completed_elsewhere(texts: dict[str, str]) -> list[str]:
    """The assignments to attributes of objects whose class, no record, another module defines; `texts`: by module."""
    project: dict[str, Module] = {}
    project |= {name: Module(name, text, project) for name, text in texts.items()}
    found = set()
    for module in project.values():
        for function, of in module.functions():
            targets = [target for target, _ in assigned(function) if isinstance(target, ast.Attribute)]
            targets = [target for target in targets if ast.unparse(target.value) != "self"]
            scope = Scope(module, function, of) if targets else None
            for target in targets:
                owner = class_of(scope.type_of(target.value))
                if owner is not None and owner.module is not module and not owner.is_record:
                    found.add(f"{module.name}: {ast.unparse(target)} of {owner.module.name}.{owner.node.name}")
    return sorted(found)


def test_no_object_is_completed_elsewhere() -> None:
    texts = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): path.read_text(encoding="utf8")
        for path in SOURCE.rglob("*.py")
    }
    assert completed_elsewhere(texts) == []


def test_the_check_sees_what_it_should() -> None:
    """An argument, an attribute, the items of a list, what a call makes; neither records nor the class's own module."""
    own = """
class Thing:
    def __init__(self) -> None:
        self.mode = 0
def own(thing: Thing) -> None:
    thing.mode = 1
@dataclass
class Record:
    mode: int
"""
    other = """
from a import Record, Thing
class Holder:
    def __init__(self, things: list[Thing], maybe: Thing | None) -> None:
        self.things, self.maybe = things, maybe
    def change(self) -> None:
        self.maybe.mode = 1
        for each in self.things:
            each.mode = 2
def make(record: Record) -> None:
    record.mode = 3
    thing = Thing()
    thing.mode = 4
"""
    assert completed_elsewhere({"a": own, "b": other}) == [
        "b: each.mode of a.Thing",
        "b: self.maybe.mode of a.Thing",
        "b: thing.mode of a.Thing",
    ]
