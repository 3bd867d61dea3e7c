"""The declaration of a setting: its type and default, the allowed values, its owner, its option and its help.

`EngineConfig` (`config.py`) declares each setting once, as `name: type = setting(...)` with a docstring. Everything
else is derived from these declarations: the checks of the dataclass and their errors, the options of the command line
(`cli/options.py`), `--set NAME=VALUE` and `--set help` (`cli/settings.py`), and the table of docs/settings.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smoe.errors import ConfigError
from smoe.plug_ins import PLACE
from smoe.units import parse_bytes, parse_share

MEMORY = "Memory"
ENGINE = "Engine"
LOW = "Low copies of missing experts (HOBBIT)"
"""`MEMORY`, `ENGINE` and `LOW` are the headings of groups of options in `--help`."""

_TRUTH = {"true": True, "false": False, "on": True, "off": False}


class Allowed(ABC):
    """The values that a setting may have, and the conversion of a text on the command line to such a value."""

    words: str
    """A phrase that describes the allowed values."""
    typed: str
    """A phrase that describes how a value is written on the command line. It differs from `words` if a value has a
    unit."""
    option_type: type = str
    """The type in which the command line's parser passes an option's value to `parse`."""

    @abstractmethod
    def admits(self, value: Any) -> bool:
        """Return whether `value` is allowed. None is allowed if it is the setting's default."""

    @abstractmethod
    def parse(self, name: str, text: Any) -> Any:
        """Return the value for which `text` stands. Raise `ConfigError` if it stands for no value. Bounds are not
        checked here."""

    def refusal(self, name: str, value: Any) -> ConfigError:
        """Return the error for the setting `name` with a value that is not allowed."""
        return ConfigError.out_of_bounds(name, value, self.words)


class Text(Allowed):
    """Allows any text as a setting's value."""

    words = typed = "a text"

    def admits(self, value: Any) -> bool:
        return isinstance(value, str)

    def parse(self, name: str, text: str) -> str:
        return text


class OneOf(Allowed):
    """Allows one of several names as a setting's value."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.words = self.typed = ", ".join(names)

    def admits(self, value: Any) -> bool:
        return value in self.names

    def parse(self, name: str, text: str) -> str:
        return text

    def refusal(self, name: str, value: Any) -> ConfigError:
        return ConfigError.no_choice(name, value, self.names)


class ClassName(OneOf):
    """Allows the name of a built-in class, or of a plug-in's class, as a setting's value."""

    def __init__(self, names: tuple[str, ...], find: Callable[[str], type[Any]]) -> None:
        super().__init__(*names)
        self.words = self.typed = ", ".join((*names, PLACE))
        self.find = find
        """A function that returns the class of a name. It raises `ConfigError` if there is no such class."""

    def admits(self, value: Any) -> bool:
        """Return whether `value` is the name of a class. For a name without a class, raise `ConfigError` with the
        reason."""
        return isinstance(value, str) and (super().admits(value) or bool(self.find(value)))

    def refusal(self, name: str, value: Any) -> ConfigError:
        return ConfigError.no_choice(name, value, (*self.names, PLACE))


class Switch(Allowed):
    """Allows true or false as a setting's value."""

    words = typed = "true or false"
    option_type: type = bool

    def admits(self, value: Any) -> bool:
        return isinstance(value, bool)

    def parse(self, name: str, text: str) -> bool:
        if text.lower() not in _TRUTH:
            raise self.refusal(name, text)
        return _TRUTH[text.lower()]


class Count(Allowed):
    """Allows an integer from `least` to `most` as a setting's value. If `most` is None, there is no upper bound."""

    option_type: type = int

    def __init__(self, least: int = 1, most: int | None = None, of: str = "") -> None:
        self._least, self._most = least, most
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        self.words = self.typed = f"a whole number{of} {bounds}"

    def admits(self, value: Any) -> bool:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return is_whole and self._least <= value and (self._most is None or value <= self._most)

    def parse(self, name: str, text: str | int) -> int:
        try:
            return int(text)
        except ValueError:
            raise self.refusal(name, text) from None


class Size(Count):
    """Allows a number of bytes as a setting's value. As a text it has a unit, such as 9MiB."""

    option_type: type = str

    def __init__(self) -> None:
        super().__init__(of=" of bytes")
        self.typed = "a size, such as 9MiB"

    def parse(self, name: str, text: str | int) -> int:
        nbytes = parse_bytes(str(text), name)
        if not nbytes:
            raise ConfigError(
                f"`{name}` is {str(text)!r}; it must be above 0, for example 8GiB",
                setting=name,
                given=text,
                allowed="a size above 0",
            )
        return nbytes


class Number(Allowed):
    """Allows a number for which `test` returns true as a setting's value."""

    option_type: type = float

    def __init__(self, words: str, test: Callable[[float], bool]) -> None:
        self.words = self.typed = words
        self._test = test

    def admits(self, value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and self._test(value)

    def parse(self, name: str, text: str | float) -> float:
        try:
            above, is_fraction, below = str(text).partition("/")
            return float(above) / float(below) if is_fraction else float(above)
        except (ValueError, ZeroDivisionError):
            raise self.refusal(name, text) from None


class Share(Number):
    """Allows a number from 0 to 1 as a setting's value. As a text it may have a per cent sign."""

    option_type: type = str

    def __init__(self, words: str, test: Callable[[float], bool], most_typed: float = 1.0) -> None:
        """`most_typed`: the largest number for which a text may stand. A larger number is refused, because a per cent
        sign was probably forgotten."""
        super().__init__(words, test)
        self._most = most_typed

    def parse(self, name: str, text: str | float) -> float:
        share = parse_share(str(text), name)
        if share > self._most:
            raise ConfigError(
                f"`{name}={text}` means {share:.0%}; give at most {self._most:.0%}, such as 1% or 0.01",
                setting=name,
                given=text,
                allowed=f"a share above 0 and at most {self._most:.0%}",
            )
        return share


class NumberTuple(Allowed):
    """Allows several numbers, for which `test` returns true, as a setting's value. In a text they are separated by
    commas."""

    def __init__(self, words: str, test: Callable[[tuple[float, ...]], bool]) -> None:
        self.words = self.typed = words
        self._test = test

    def admits(self, value: Any) -> bool:
        return isinstance(value, tuple) and self._test(value)

    def parse(self, name: str, text: str) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in text.split(","))
        except ValueError:
            raise self.refusal(name, text) from None


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting, without its type and default."""

    allowed: Allowed
    help: str
    """The text of `--help` or `--set help`. For the latter it should fit on one line."""
    option: str = ""
    """The option of the command line; empty: the setting is given by `--set`."""
    panel: str = ENGINE
    """The heading under which `--help` lists the option."""
    form: str | None = None
    """A description of the option's value for `--help`, if it is not obvious."""
    left_out: str = ""
    """For a setting with the default None: a phrase that describes the value that is used then."""
    owner: str = ""
    """Another setting, without certain values of which this one has no effect (`config.belongs_to`); empty: none."""
    replaces: Mapping[str, Any] = field(default_factory=dict)
    """{other setting: value}. If this setting is given, these values replace those of a preset."""
    implies: str = ""
    """The preset of a command line that gives this setting and no preset; empty: `exact`. If several given settings
    imply a preset, the one that is declared last counts."""


def setting(default: Any, allowed: Allowed, help: str, **more: Any) -> Any:
    """Return a field of the dataclass `EngineConfig` that declares a setting. `more`: further fields of `Setting`."""
    if "implies" in more:
        help = f"{help} Without a preset it implies the preset {more['implies']}."
    return field(default=default, metadata={"setting": Setting(allowed, help, **more)})
