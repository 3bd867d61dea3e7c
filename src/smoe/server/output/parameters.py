"""Reads a function's parameters from its JSON schema: the values that each argument may have.

Output formats that write arguments as plain text need the schema: in `<parameter=zip>0150</parameter>`, the schema
decides whether the value is a string or a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from smoe.server.api_errors import refused

_LITERALS = {"True": True, "False": False, "None": None}
"""{text: value} of the constants of Python's syntax."""
WHOLE_PATTERN = "x-smoe-pattern"
"""A keyword of the schemas that are made here: a regular expression for the whole of a string. JSON schemas have only
`pattern`, for a part of it, or with anchors."""
_ROOT = "whole"
_DEEPEST = 16
"""The maximum number of references that are followed in succession."""
_IN_LINE = re.compile(r"\\.|[/\n\r]", re.S)
_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


def parameters_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, of the type object. Raises an `ApiError` for another type."""
    parameters = function.get("parameters") or {}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        message = f"the 'parameters' of the tool {function['name'][:80]!r} must be a schema of the type object"
        raise refused(message, "tools", "invalid_json_schema")
    return {**parameters, "type": "object"}


def properties_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return {name: schema} of a function's arguments, with references in the schemas resolved."""
    found = parameters.get("properties")
    properties = found if isinstance(found, dict) else {}
    return {name: resolved(schema, parameters) for name, schema in properties.items()}


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema to which the reference in `schema` points, or `schema` itself if it is no reference. References
    within the result are not resolved."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = _at(root, reference)
    return schema if isinstance(schema, dict) else {}


def standing_alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema`, a part of the schema `root`, in a form that can be used alone. If it has references, the result
    is a copy that contains `root` under `$defs`."""
    if '"$ref"' not in json.dumps(schema):
        return dict(schema)
    return {**_with_root(schema), "$defs": {_ROOT: _with_root(root)}}


def _with_root(value: Any) -> Any:
    """Return a copy of a schema in which references to the root refer to the root's copy in `$defs`."""
    if isinstance(value, list):
        return [_with_root(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: f"#/$defs/{_ROOT}{each[1:]}"
        if key == "$ref" and isinstance(each, str) and each.startswith("#")
        else _with_root(each)
        for key, each in value.items()
    }


def _at(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference (`#/...`) names; None if there is no such part."""
    for step in reference.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


def alternatives(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas that a schema lists under `anyOf` or `oneOf`; an empty list without them."""
    return next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), [])


def types_of(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows; an empty set if the schema allows any type."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if others := alternatives(schema):
        each = [types_of(one) for one in others]
        return frozenset().union(*each) if all(each) else frozenset()
    if isinstance(schema.get("enum"), list):
        return frozenset(_type_of(value) for value in schema["enum"])
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [] if kind is None else [kind]
    return frozenset(kind for kind in kinds if isinstance(kind, str))


def is_text(schema: Any) -> bool:
    """Return whether a schema allows only strings."""
    return types_of(schema) == {"string"}


def arguments_of(
    schema: Mapping[str, Any], root: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield (name, schema, whether it is required) for each property of an object's schema."""
    required, properties = schema.get("required"), schema.get("properties")
    for key, inner in (properties if isinstance(properties, dict) else {}).items():
        yield key, resolved(inner, schema if root is None else root), isinstance(required, list) and key in required


def part_of(schema: Mapping[str, Any], key: str) -> Any:
    """Return the value of `key` in a schema, or in its first alternative that has this key; an empty dict if none has
    it."""
    for one in (schema, *alternatives(schema)):
        if isinstance(one, Mapping) and isinstance(one.get(key), Mapping):
            return one[key]
    return {}


def fixed_texts(schema: Mapping[str, Any]) -> list[str]:
    """Return the strings that a schema allows by `enum` or `const`; an empty list if it allows other values."""
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return values if values and all(isinstance(value, str) for value in values) else []


def pattern_of(schema: Mapping[str, Any]) -> str:
    """Return a regular expression for the strings that a schema allows by their length, or by `WHOLE_PATTERN`. In the
    grammar's notation, it stands between slashes in one line."""
    if isinstance(schema.get(WHOLE_PATTERN), str):
        return _IN_LINE.sub(lambda found: _ESCAPES.get(found[0], found[0]), f"(?:{schema[WHOLE_PATTERN]})")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return "(?s:.*)" if not least and most == "" else f"(?s:.{{{least},{most}}})"


def value_of(text: str, schema: Any) -> Any:
    """Return the value of an argument that was written as text. If the text is JSON of a type that the schema allows,
    return the parsed value, otherwise the text itself."""
    kinds, plain = types_of(schema), text.strip()
    try:
        value = _LITERALS[plain] if plain in _LITERALS else json.loads(plain, strict=False)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    kind = _type_of(value)
    fits = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    return value if fits or "string" not in kinds else text


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "object")
