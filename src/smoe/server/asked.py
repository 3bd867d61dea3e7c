"""The base class of the fields of all requests: which fields are not supported, and for which model a request is."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from smoe.server.problem import refused


def _tell_unsupported(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Add to a JSON schema, for each field without effect in this server, the only values that requests may give: those
    that change nothing."""
    for name, harmless in kind.harmless().items() if issubclass(kind, AskedFields) else ():
        schema["properties"][name] = {
            "enum": [None, *harmless],
            "default": None,
            "description": "Not supported: leave it out.",
        }


class AskedFields(BaseModel):
    """The base of the fields of all requests."""

    model_config = ConfigDict(
        extra="ignore", strict=True, use_attribute_docstrings=True, json_schema_extra=_tell_unsupported
    )
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that would change the response but are not supported, with the values that change nothing."""
    names: ClassVar[dict[str, str]] = {}
    """{name of a library setting: its name in this kind of request}, where the two names differ."""
    takes_any_model: ClassVar[bool] = False
    """Whether `model` may be any name: agents send the names of their maker's models."""
    tags: ClassVar[tuple[str, ...]] = ("",)
    """The suffixes that may follow the model's name in a request, such as a tag."""

    @classmethod
    def harmless(cls) -> dict[str, tuple[Any, ...]]:
        """Return the fields that are not supported, with the values that change nothing."""
        return cls.unsupported

    @property
    def asked_model(self) -> str | None:
        """The name of the model that the request is for; None: the model that is served."""
        return None

    def check_unsupported(self) -> None:
        """Raise an `ApiError` for a field whose value would change the response but is not supported."""
        for name, harmless in self.harmless().items():
            value = getattr(self, name)
            if value is not None and not any(_is_same(value, each) for each in harmless):
                only = "".join(f", or give {json.dumps(each)}" for each in harmless)
                message = f"'{name}' is not supported by this server; leave it out{only}"
                raise refused(message, name, "unsupported_parameter")

    @property
    def settings(self) -> dict[str, str]:
        """{name of a library setting that this request sets: its name in the request}."""
        return {name: name for name in type(self).model_fields} | self.names


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON, where true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
