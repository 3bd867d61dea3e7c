"""Imports transformers without torch's compiler and without torch's packages for several machines.

transformers marks functions for the compiler and tests for distributed tensors, so it imports both: 950 modules, which
take a second and 90 MiB (docs/log/library.md). No command compiles a model or distributes it by torch. Programs that
use smoe as a library may do both, so only commands leave them out.

A module of ours stands in for the compiler's. It has the names that transformers and torch use without compiling
anything. Another name, or the import of a part of the compiler, imports the compiler itself. Functions that were marked
by `disable` before stay unmarked.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_LIGHT_PARTS = ("torch._dynamo._trace_wrapped_higher_order_op",)
"""The parts of the compiler that transformers imports for its masks. They do not import the other parts."""


def leave_out_compiler() -> None:
    """Prepare the process so that a later import of transformers imports neither the compiler nor the packages for
    several machines. No effect if transformers or the compiler is imported already."""
    import torch

    if "transformers" in sys.modules or _COMPILER in sys.modules:
        return
    found = find_spec(_COMPILER)
    if found is not None:
        marks = sys.modules[_COMPILER] = _Marks(found)
        sys.meta_path.insert(0, _Parts(marks))
    _leave_out_distribution(torch.distributed)


class _Marks(ModuleType):
    """Stands in for the compiler's module. Its marks of functions and tensors import nothing. Every other name is
    looked up in the module itself, which is imported then."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name, "Marks for the compiler, in place of the module of this name.")
        self.__spec__ = spec
        self.__path__ = spec.submodule_search_locations or []
        self._lock = Lock()
        self._allowed: list[Callable[..., Any]] = []

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
        """Return the function, or a decorator that does."""
        return _unchanged if function is None else function

    @staticmethod
    def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
        """Mark a function as the compiler does."""
        function._dynamo_marked_constant = True  # type: ignore[attr-defined]
        return function

    def allow_in_graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function. It is marked when the compiler is imported."""
        self._allowed.append(function)
        return function

    @staticmethod
    def mark_static_address(tensor: Any, guard: bool = False) -> None:
        """Mark a tensor as the compiler does."""
        tensor._dynamo_static_input_type = "guarded" if guard else "unguarded"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # names that Python's import system looks up
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self.whole(), name)

    def whole(self) -> ModuleType:
        """Return the compiler's module. The first call imports it in place of this one."""
        with self._lock:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
        whole = importlib.import_module(self.__name__)
        for name in _LIGHT_PARTS:
            if name in sys.modules:
                setattr(whole, name.rpartition(".")[2], sys.modules[name])
        while self._allowed:
            whole.allow_in_graph(self._allowed.pop())
        return whole


class _Parts(MetaPathFinder, Loader):
    """Imports the whole compiler when one of its parts is imported while `_Marks` stands in for it."""

    def __init__(self, marks: _Marks) -> None:
        self._marks = marks
        self._found: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return that this object loads the module `name`. None: Python's next finder is used.

        The compiler is not imported here: Python holds the lock of all imports, and would import the part once more.
        """
        if not name.startswith(f"{_COMPILER}.") or name in _LIGHT_PARTS:
            return None
        if sys.modules.get(_COMPILER) is not self._marks:
            return None
        return ModuleSpec(name, self) if PathFinder.find_spec(name, path) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the part, which is imported with the whole or after it."""
        self._marks.whole()
        part = importlib.import_module(spec.name)
        self._found[spec.name] = part.__spec__
        return part

    def exec_module(self, module: ModuleType) -> None:
        """Restore the part's own `__spec__`, which Python has replaced."""
        found = self._found.pop(module.__name__)
        if module.__spec__ is not found:  # Python cannot replace it in the compiler's module of settings
            module.__spec__ = found


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _leave_out_distribution(distributed: ModuleType) -> None:
    """Make transformers' test for torch's packages for several machines fail in this process. transformers stores the
    result, so torch's function is replaced only while the test runs."""
    from transformers.utils.import_utils import is_torch_distributed_available

    is_available = distributed.is_available
    distributed.is_available = lambda: False  # type: ignore[attr-defined]
    try:
        is_torch_distributed_available()
    finally:
        distributed.is_available = is_available  # type: ignore[attr-defined]
