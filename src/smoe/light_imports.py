"""Imports transformers without torch's compiler and its packages for several machines.

transformers imports them to mark functions that the compiler must skip, and to check for distributed tensors. smoe uses
neither. Both together are 950 modules: a quarter of the time of all imports, and 60 MB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_OF_MASKS = f"{_COMPILER}._trace_wrapped_higher_order_op"


def import_lightly(load: Callable[[], None]) -> None:
    """Call `load`, which imports transformers, without the compiler. If that fails, as it may with a package that needs
    the compiler, call it again with the compiler."""
    try:
        with without_compiler():
            load()
    except Exception:
        load()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Make modules that are imported in the `with` block run without torch's compiler and without `torch.distributed`.

    Decorators of the compiler return their functions unchanged. transformers considers `torch.distributed` unavailable,
    also afterwards. Only for programs of smoe's own: a user's program may compile other models, or distribute them.
    Does nothing if the compiler or transformers is already imported.
    """
    if _COMPILER in sys.modules or "transformers" in sys.modules:
        yield
        return
    import torch
    import torch.distributed

    is_available = torch.distributed.is_available
    sys.modules[_COMPILER] = torch._dynamo = _NoCompiler(_COMPILER)
    sys.modules[_OF_MASKS] = masks = ModuleType(_OF_MASKS)
    masks.TransformGetItemToIndex = _transform_item_to_index  # type: ignore[attr-defined]
    torch.distributed.is_available = _no
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        del sys.modules[_COMPILER], sys.modules[_OF_MASKS], torch._dynamo


class _NoCompiler(ModuleType):
    """Stands in for `torch._dynamo`: each of its attributes is a decorator without effect."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _undecorated


def _transform_item_to_index() -> Any:
    """Return an instance of the compiler's class of this name, in which masks of unusual attention are computed."""
    return import_module(_OF_MASKS).TransformGetItemToIndex()


def _undecorated(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    return _undecorated if function is None else function


def _no() -> bool:
    return False
