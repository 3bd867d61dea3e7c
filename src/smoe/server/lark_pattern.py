"""Regular expressions for grammars in Lark's syntax.

In most formats of calls, the input of a custom tool is a string within JSON, where llguidance can enforce a regular
expression but no grammar. A grammar without recursion, such as that of a patch, can be written as one.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from smoe.server.api_errors import ApiError, refused

_LONGEST = 100_000
"""The maximum number of characters of a regular expression, and of a grammar."""
_DEEPEST = 50
"""The maximum number of nested rules and groups."""
_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_COMMON = {
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "CR": r"\r",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": _NUMBER,
    "SIGNED_INT": "[+-]?[0-9]+",
    "SIGNED_NUMBER": f"[+-]?{_NUMBER}",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""{name of a terminal that a grammar may import: its regular expression}, as in Lark's library `common`."""
_STATEMENT = re.compile(r"[ \t]*(?:[?!]?(?P<rule>[A-Za-z_][\w-]*)(?:\.-?\d+)?[ \t]*:|%(?P<directive>\w+))(?P<rest>.*)")
_IMPORT = re.compile(
    r"\s*common\s*(?:\.\s*(?P<one>\w+)\s*(?:->\s*(?P<alias>\w+))?|\((?P<several>[\w\s,]+)\))\s*(?://.*)?"
)
_TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|->\s*\w+)"""  # the name of an alternative changes no text
    r"""|(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regexp>/(?:\\.|[^/\\\n])+/[imslux]*)"""
    r"""|(?P<repeat>~\s*(?P<least>\d+)(?:\s*\.\.\s*(?P<most>\d+))?|\{\s*\d*\s*,?\s*\d*\s*\})"""
    r"""|(?P<name>[A-Za-z_][\w-]*)|(?P<sign>\.\.|[()\[\]|?*+])"""
)
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def pattern_of_lark(grammar: str, param: str) -> str:
    """Return a regular expression for the texts that match a grammar. Raises an `ApiError` that names the request's
    field `param` for a grammar that is invalid, recursive, or uses a part of the syntax that is not supported."""
    if len(grammar) > _LONGEST:
        raise _invalid(f"it is longer than {_LONGEST} characters", param)
    try:
        return _Rules(grammar, param).pattern_of("start")
    except RecursionError:
        raise _invalid("its rules and groups are nested too deeply", param) from None


class _LarkToken(NamedTuple):
    kind: str
    text: str


class _Rules:
    """The rules of one grammar."""

    def __init__(self, grammar: str, param: str) -> None:
        self._param = param
        self._bodies: dict[str, str] = {}
        self._patterns: dict[str, str] = {}
        self._open: list[str] = []
        """The rules that are being converted, outermost first."""
        last = None
        for line in grammar.splitlines():
            found = _STATEMENT.fullmatch(line)
            if found is not None and found["directive"] is not None:
                self._import(found["directive"], found["rest"])
            elif found is not None:
                last = found["rule"]
                self._bodies[last] = found["rest"]
            elif last is not None:
                self._bodies[last] += "\n" + line
            elif line.strip() and not line.lstrip().startswith(("//", "#")):
                raise _invalid(f"the line {line.strip()[:60]!r} belongs to no rule", param)

    def pattern_of(self, name: str) -> str:
        """Return the regular expression of a rule or a terminal."""
        if name in self._open:
            raise _invalid(f"the rule {name!r} contains itself; write it without recursion", self._param)
        if name not in self._patterns:
            if name not in self._bodies:
                raise _invalid(f"it has no rule {name[:60]!r}", self._param)
            if len(self._open) > _DEEPEST:
                raise _invalid(f"it has more than {_DEEPEST} levels of rules", self._param)
            self._open.append(name)
            self._patterns[name] = _Expression(self, self._tokens(self._bodies[name]), self._param).pattern()
            self._open.pop()
        return self._patterns[name]

    def _import(self, directive: str, rest: str) -> None:
        found = _IMPORT.fullmatch(rest) if directive == "import" else None
        if found is None:
            raise _invalid(
                f"%{directive}{rest[:60]} is not supported, only %import of terminals of common", self._param
            )
        names = [found["one"]] if found["one"] is not None else [each.strip() for each in found["several"].split(",")]
        for name in names:
            if name not in _COMMON:
                raise _invalid(f"common.{name[:60]} is not supported; write it as a terminal", self._param)
            self._patterns[found["alias"] or name] = _COMMON[name]

    def _tokens(self, body: str) -> list[_LarkToken]:
        tokens, place = [], 0
        while place < len(body):
            found = _TOKEN.match(body, place)
            if found is None:
                raise _invalid(f"{body[place : place + 60].strip()!r} is not supported", self._param)
            kind = next(kind for kind in ("blank", "string", "regexp", "repeat", "name", "sign") if found[kind])
            if kind != "blank":
                tokens.append(_LarkToken(kind, found[0]))
            place = found.end()
        return tokens


class _Expression:
    """The body of one rule: alternatives of sequences."""

    def __init__(self, rules: _Rules, tokens: list[_LarkToken], param: str) -> None:
        self._rules, self._tokens, self._param = rules, tokens, param
        self._place = self._depth = 0

    def pattern(self) -> str:
        pattern = self._alternatives()
        if self._place < len(self._tokens):
            raise _invalid(f"{self._tokens[self._place].text!r} has no beginning", self._param)
        return pattern

    def _alternatives(self) -> str:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _invalid(f"it has more than {_DEEPEST} levels of groups", self._param)
        found, is_one = self._sequence(), True
        while self._takes("|"):
            found, is_one = self._checked(f"{found}|{self._sequence()}"), False
        self._depth -= 1
        return found if is_one else f"(?:{found})"

    def _sequence(self) -> str:
        found = ""
        while (token := self._next()) is not None and token.text not in ("|", ")", "]"):
            self._place += 1
            found = self._checked(found + self._repeated(self._atom(token)))
        return found

    def _atom(self, token: _LarkToken) -> str:
        match token.kind:
            case "string":
                text = self._text_of(token)
                if not self._takes(".."):
                    return f"(?i:{_escaped(text)})" if token.text.endswith("i") else _escaped(text)
                end = self._next()
                self._place += 1
                last = self._text_of(end) if end is not None and end.kind == "string" else ""
                if len(text) != 1 or len(last) != 1 or text > last:
                    raise _invalid("a range must have two characters in order", self._param)
                return f"[{_escaped(text)}-{_escaped(last)}]"
            case "regexp":
                inner, _, given = token.text[1:].replace("\\/", "/").rpartition("/")
                flags = "".join(flag for flag in given if flag in "imsx")
                return f"(?{flags}:{inner})" if flags or "|" in inner else inner
            case "name":
                return self._rules.pattern_of(token.text)
        if token.text in "([":
            inner = self._alternatives()
            if not self._takes(")" if token.text == "(" else "]"):
                raise _invalid(f"{token.text!r} has no end", self._param)
            return inner if token.text == "(" else f"(?:{inner})?"
        raise _invalid(f"{token.text!r} follows nothing", self._param)

    def _repeated(self, atom: str) -> str:
        token = self._next()
        if token is None or not (token.kind == "repeat" or token.text in ("?", "*", "+")):
            return atom
        self._place += 1
        if token.kind == "repeat" and token.text.startswith("~"):
            least, _, most = (part.strip() for part in token.text[1:].partition(".."))
            return f"(?:{atom}){{{least},{most or least}}}"
        return f"(?:{atom}){''.join(token.text.split())}"

    def _text_of(self, token: _LarkToken) -> str:
        quoted = token.text.removesuffix("i")
        try:
            return str(json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", quoted).replace("\\'", "'"), strict=False))
        except ValueError:
            raise _invalid(f"{quoted[:60]} is no string", self._param) from None

    def _next(self) -> _LarkToken | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _takes(self, sign: str) -> bool:
        token = self._next()
        found = token is not None and token == _LarkToken("sign", sign)
        self._place += found
        return found

    def _checked(self, pattern: str) -> str:
        if len(pattern) > _LONGEST:
            raise _invalid(f"as a regular expression it has more than {_LONGEST} characters", self._param)
        return pattern


def _escaped(text: str) -> str:
    """Return a regular expression that matches a text only."""
    return "".join(_CONTROLS.get(each) or _SPECIAL.sub(r"\\\g<0>", each) for each in text)


def _invalid(why: str, param: str) -> ApiError:
    return refused(
        f"the Lark grammar of a custom tool in '{param}' cannot be enforced: {why}", param, "invalid_grammar"
    )
