"""Imports without a search for garbage: it is on again after them, whatever they end with, and stays off where it was.

Would catch a program whose garbage is never collected.
"""

from __future__ import annotations

import builtins
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from smoe.cli.libraries import import_libraries
from smoe.config import EngineConfig


@pytest.fixture(autouse=True)
def enabled_afterwards() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_it_is_off_during_the_imports_alone(is_on: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    states, real = list[bool](), builtins.__import__

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "smoe.cli.session":
            states.append(gc.isenabled())
            if fails:
                raise ImportError(name)
        return real(name, *args, **kwargs)

    if not is_on:
        gc.disable()
    monkeypatch.setattr(builtins, "__import__", importing)
    if fails:
        with pytest.raises(ImportError):
            import_libraries("demo", EngineConfig())
    else:
        import_libraries("demo", EngineConfig())
    assert states == [False] and gc.isenabled() is is_on
