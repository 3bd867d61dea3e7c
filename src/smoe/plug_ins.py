"""Finds the class that a setting names: a built-in one, one of an installed package, or one that is given as
MODULE:CLASS.

    lru                a built-in class
    NAME               an entry point of the group, such as `smoe.evictions`, of an installed package
    MODULE:CLASS       a class of a module that Python can import
    FILE.py:CLASS      a class of a file

Only the class that was named is imported. Other built-in classes, and entry points of other packages, are not. A
plug-in cannot have the name of a built-in class.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from smoe.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

PLACE = "MODULE:CLASS"
"""The form in which users write a class that has no name."""


@dataclass(frozen=True)
class Catalogue(Generic[T]):
    """The classes that one setting can name: built-in ones, and those of packages, modules and files."""

    setting: str
    group: str
    """The group of entry points by which packages offer further classes."""
    base: type
    """The class from which all classes of this catalogue must be derived."""
    built_in: Mapping[str, str]
    """{name: MODULE:CLASS} of the built-in classes."""
    derive_from: type | None = None
    """The class from which messages tell users to derive theirs; None: `base`."""
    others: tuple[str, ...] = ()
    """Further values of the setting, which name no class."""

    def find(self, name: str) -> type[T]:
        """Return the class of this name. Raise `ConfigError` if there is none, or if the class cannot be used."""
        if name in self.built_in:
            found: type[T] = attribute_at(self.built_in[name])
            return found
        module, colon, attribute = name.rpartition(":")
        if colon and module and attribute:
            return self._checked(name, self._of_place(name, module, attribute))
        return self._checked(name, self._of_package(name))

    def refusal(self, name: object, why: str, allowed: str | None = None) -> ConfigError:
        """Return the error for the value `name` of the setting. `why`: the reason, a phrase that follows "it is
        ...;"."""
        return ConfigError(
            f"`{self.setting}` is {name!r}; {why}", setting=self.setting, given=name, allowed=allowed or self.allowed
        )

    @property
    def allowed(self) -> str:
        """A phrase that lists the allowed values."""
        return ", ".join((*self.others, *self.built_in, *sorted({point.name for point in self._installed()}), PLACE))

    def _installed(self) -> Sequence[EntryPoint]:
        """Return the entry points of installed packages without importing them. Two packages may use the same name."""
        from importlib.metadata import entry_points  # imports 30 modules, which built-in names do not need

        return [point for point in entry_points(group=self.group) if point.name not in self.built_in]

    def _of_package(self, name: str) -> Any:
        points = [point for point in self._installed() if point.name == name]
        if not points and _names_module(name):
            why = f"which names no class: add the name of a class, as in {name.rstrip(':')}:CLASS"
            raise self.refusal(name, why, PLACE)
        if not points:
            raise ConfigError.no_choice(self.setting, name, self.allowed.split(", "))
        if len({point.value for point in points}) > 1:
            places = " and ".join(point.value for point in points)
            raise self.refusal(name, f"several installed packages have it: {places}; give one of these", places)
        module, _, attribute = points[0].value.partition(":")
        return self._of_place(name, module, attribute)

    def _of_place(self, name: str, module: str, attribute: str) -> Any:
        try:
            place = _of_file(module) if module.endswith(".py") else import_module(module)
        except FileNotFoundError:
            raise self.refusal(name, f"there is no file {module}", "a file that exists") from None
        except Exception as error:  # a plug-in's module may raise any exception
            if isinstance(error, ModuleNotFoundError) and error.name in _prefixes(module):
                raise self.refusal(
                    name,
                    f"Python finds no module {error.name!r}: give its file (./{module}.py:{attribute}), install it, or "
                    "add its folder to PYTHONPATH",
                    "a module that Python can import, or a file",
                ) from None
            what = f"importing {module} failed with {type(error).__name__}: {error}"
            raise self.refusal(name, what, "a module that can be imported") from error
        if not hasattr(place, attribute):
            classes = {each: value for each, value in vars(place).items() if inspect.isclass(value)}
            offered = [each for each, value in classes.items() if self._is_complete(value)]
            have = f"it has {', '.join(offered)}" if offered else f"it has no class that inherits {self._base}"
            raise self.refusal(name, f"{module} has no {attribute}; {have}", ", ".join(offered))
        return getattr(place, attribute)

    def _checked(self, name: str, found: Any) -> type[T]:
        if not (inspect.isclass(found) and issubclass(found, self.base)):
            raise self.refusal(
                name, f"it is no class that inherits {self._base}; derive a class from that one", f"a {self._base}"
            )
        missing: frozenset[str] = getattr(found, "__abstractmethods__", frozenset())
        if missing:
            names = ", ".join(sorted(missing))
            raise self.refusal(name, f"the class does not define {names}; define these methods", "a complete class")
        return cast("type[T]", found)

    def _is_complete(self, kind: type) -> bool:
        return issubclass(kind, self.base) and not inspect.isabstract(kind)

    @property
    def _base(self) -> str:
        base = self.base if self.derive_from is None else self.derive_from
        return f"{base.__module__}.{base.__qualname__}"


def attribute_at(place: str) -> Any:
    """Return the object at MODULE:NAME."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _names_module(name: str) -> bool:
    """Return whether a name without a class looks like the file or the module of a plug-in."""
    return any(sign in name for sign in "./\\") or name.endswith(":")


def _prefixes(module: str) -> set[str]:
    """Return a module's name and the names of the packages that contain it: a, a.b and a.b.c for `a.b.c`."""
    parts = module.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


@cache
def _of_file(path: str) -> ModuleType:
    """Run a file as a module, once in each process, and return the module. Its classes can be pickled within the
    process."""
    name = "smoe_plug_in_" + "".join(letter if letter.isalnum() else "_" for letter in path.removesuffix(".py"))
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
