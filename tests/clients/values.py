"""What the clients send in these tests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "warmth", "description": "How warm a city is", "parameters": CITY},
}
QUESTION = "How warm is it?"
ASKED: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]


class Person(BaseModel):
    """What a structured answer has."""

    name: Literal["Tom", "Lily"]
    age: Literal[7, 8]
