"""Error messages for invalid request fields: what was given, and what is allowed.

pydantic reports the position and the kind of an error. The allowed values come from the JSON schema that also describes
the API.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from smoe.server.api_errors import ApiError, refused

_LONGEST_SHOWN = 60
_LONGEST_NAME = 80
_BOUNDS = {
    "greater_than_equal": ("ge", "_below_min_value"),
    "greater_than": ("gt", "_below_min_value"),
    "less_than_equal": ("le", "_above_max_value"),
}
_LENGTHS = {
    "too_long": "array_above_max_length",
    "string_too_short": "string_below_min_length",
    "string_too_long": "string_above_max_length",
}
_PLURALS = {"string": "strings", "integer": "whole numbers", "number": "numbers", "object": "objects", "array": "lists"}


class _Place(NamedTuple):
    """The position of a validation error in a request body: the field, its schema and the given value."""

    name: str
    """The field's name as OpenAI writes it, such as `messages[0].role`; without keys that the client chose."""
    shown: str
    """The field's name including keys that the client chose, for the message."""
    schema: dict[str, Any]
    given: Any


def refusal_of(kind: type[BaseModel], error: ValidationError, body: Any) -> ApiError:
    """Return the `ApiError` for the first invalid field of a request."""
    errors = error.errors(include_url=False, include_context=True, include_input=False)
    if not errors[0]["loc"]:
        return refused(f"the body must be a JSON object; it is {shown(body)}")
    place = _place(kind, errors[0]["loc"], body)
    here = [each for each in errors if _place(kind, each["loc"], body).name == place.name]
    # of a union, the branch that the value has the type of, if there is one
    first = next((each for each in here if not each["type"].endswith("_type")), here[0])
    found = first["type"]
    if found in ("missing", "union_tag_not_found"):
        name = place.name + (".role" if found == "union_tag_not_found" else "")
        return refused(f"you must provide '{name}'", name, "missing_required_parameter")
    if found == "union_tag_invalid":
        roles = _roles(place.schema)
        role = place.given.get("role") if isinstance(place.given, dict) else None
        code = "invalid_value" if isinstance(role, str) else "invalid_type"
        return refused(f"'{place.name}.role' is {shown(role)}; it must be {roles}", f"{place.name}.role", code)
    allowed = words_of(place.schema, kind)
    code = _code(first) if _is_of_type(place.given, place.schema, kind) else "invalid_type"
    return refused(f"'{place.shown}' is {shown(place.given)}; it must be {allowed}", place.name, code)


def shown(value: Any) -> str:
    """Return a value of a request as a short JSON text for an error message."""
    if value == [] or value == {}:
        return "an empty list" if value == [] else "an empty object"
    text = _beginning(value)
    if len(text) <= _LONGEST_SHOWN:
        return text
    if isinstance(value, (list, dict)):
        return f"a list of {len(value)}" if isinstance(value, list) else f"an object of {len(value)} fields"
    return f"{text[:_LONGEST_SHOWN]}..."


def _beginning(value: Any) -> str:
    """Return the beginning of a value's JSON text. A large value is not serialized to its end."""
    if isinstance(value, str):
        return json.dumps(value[: _LONGEST_SHOWN + 1], ensure_ascii=False)
    text = ""
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        text += part[: _LONGEST_SHOWN + 1]
        if len(text) > _LONGEST_SHOWN:
            break
    return text


def shortened(name: str) -> str:
    """Return the name of a field as a short text for a message; a client may send names of any length."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."


def words_of(schema: dict[str, Any], kind: type[BaseModel]) -> str:
    """Describe in words what a JSON schema allows."""
    schema = _resolved(schema, kind)
    choices = _choices(schema)
    if len(choices) > 1:
        return (" or " if len(choices) == 2 else ", or ").join(words_of(each, kind) for each in choices)
    if "oneOf" in schema:
        return "an object"
    if "enum" in schema or "const" in schema:
        values = [each for each in schema.get("enum", [schema.get("const")]) if each is not None]
        return ("one of: " if len(values) > 1 else "") + ", ".join(map(shown, values))
    type_ = schema.get("type")
    if type_ in ("integer", "number"):
        return ("a whole number" if type_ == "integer" else "a number") + _bounds(schema)
    if type_ == "string":
        return "a string" + _lengths(schema, "minLength", "maxLength", "characters")
    if type_ == "array":
        items = _resolved(schema.get("items", {}), kind)
        what = _PLURALS.get("object" if "oneOf" in items else items.get("type", ""), "values")
        if what == "lists":
            what = f"lists of {_PLURALS.get(items['items'].get('type', ''), 'values')}"
        return "a list" + _lengths(schema, "minItems", "maxItems", what)
    if type_ == "object" and "maxProperties" in schema:
        return f"an object of at most {schema['maxProperties']} fields"
    return {"boolean": "true or false", "object": "an object"}.get(str(type_), "left out")


def _bounds(schema: dict[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and most is not None:
        return f" between {_number(least)} and {_number(most)}"
    above = schema.get("exclusiveMinimum")
    words = [
        f"{word} {_number(value)}"
        for word, value in (("of at least", least), ("above", above), ("at most", most))
        if value is not None
    ]
    return " " + " and ".join(words) if words else ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _lengths(schema: dict[str, Any], least_name: str, most_name: str, what: str) -> str:
    least, most = schema.get(least_name), schema.get(most_name)
    if least is None and most is None:
        return "" if what == "characters" else f" of {what}"
    if least is None:
        return f" of at most {most} {what}"
    return f" of {what}, at least {least}" if most is None else f" of {least} to {most} {what}"


def _code(error: Any) -> str:
    found, facts = error["type"], error.get("ctx", {})
    if found in _BOUNDS:
        bound, code = _BOUNDS[found]
        return ("integer" if isinstance(facts[bound], int) else "decimal") + code
    if found == "too_short":
        return "empty_array" if facts["actual_length"] == 0 else "array_below_min_length"
    if found == "too_long" and facts["field_type"] == "Dictionary":
        return "object_above_max_properties"
    if found.endswith("_type"):
        return "invalid_type"
    if found == "none_required":
        return "unsupported_parameter"
    return _LENGTHS.get(found, "invalid_value")


_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "array": list, "object": dict, "boolean": bool
}  # fmt: skip


def _is_of_type(given: Any, schema: dict[str, Any], kind: type[BaseModel]) -> bool:
    """Return whether a value has one of the JSON types that a schema allows."""
    schema = _resolved(schema, kind)
    if choices := _choices(schema):
        return any(_is_of_type(given, each, kind) for each in choices)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return any(type(given) is type(value) for value in values)
    allowed = _TYPES.get(schema.get("type", ""))
    return allowed is None or (isinstance(given, allowed) and (isinstance(given, bool) == (allowed is bool)))


def _place(kind: type[BaseModel], loc: Sequence[str | int], body: Any) -> _Place:
    """Return the field that pydantic's error path `loc` names, with its schema and the given value. Branches of unions
    in the path are not part of the field's name."""
    schema, given, name, is_ours = _schema_of(kind), body, "", True
    path = ""
    for part in loc:
        schema = _resolved(schema, kind)
        if "oneOf" in schema:  # the part is the role in the message
            schema = schema["discriminator"]["mapping"].get(str(part), {})
            schema = {"$ref": schema} if isinstance(schema, str) else schema
            continue
        if len(_choices(schema)) > 1:
            break
        if isinstance(part, int):
            schema, step = schema.get("items", {}), f"[{part}]"
            given = given[part] if isinstance(given, list) and part < len(given) else None
        else:
            is_ours &= "properties" in schema
            more = schema.get("additionalProperties")
            schema = schema.get("properties", {}).get(part, more if isinstance(more, dict) else {})
            step = shortened(part) if not path else f".{shortened(part)}"
            given = given.get(part) if isinstance(given, dict) else None
        path += step
        name += step if is_ours else ""
    return _Place(name, path, _resolved(schema, kind), given)


def _choices(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas of the types that a union allows, except null; empty for a schema that is no union."""
    return [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]


def _resolved(schema: dict[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Return a schema with its top-level reference resolved and null removed."""
    while True:
        if "$ref" in schema:
            schema = _schema_of(kind)["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        elif len(choices := _choices(schema)) == 1:
            schema = choices[0]
        else:
            return schema


def _roles(schema: dict[str, Any]) -> str:
    return "one of: " + ", ".join(map(shown, schema["discriminator"]["mapping"]))


@functools.cache
def _schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    return kind.model_json_schema()
