"""The base of all requests' fields: which are not supported, and which model the request is for."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from smoe.server.problem import refused


def _tell_unsupported(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Describe in a schema the values that unsupported fields may have."""
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
    """This request's names for the library's settings, where they differ."""
    takes_any_model: ClassVar[bool] = False
    """Whether `model` may be any name: agents send the names of their maker's models."""
    tags: ClassVar[tuple[str, ...]] = ("",)
    """What may follow the model's name."""

    @classmethod
    def harmless(cls) -> dict[str, tuple[Any, ...]]:
        """Return the fields that are not supported, with the values that change nothing."""
        return cls.unsupported

    @property
    def asked_model(self) -> str | None:
        """The name of the model that the request is for; None: whichever is served."""
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
        """The library's settings of this request, each with its name here."""
        return {name: name for name in type(self).model_fields} | self.names


def _is_same(value: Any, other: Any) -> bool:
    """Compare as JSON does: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
