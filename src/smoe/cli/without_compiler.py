"""Imports transformers without torch's compiler and without torch's packages for several machines.

transformers marks functions for the compiler and tests for distributed tensors, so it imports both: 950 modules, which
take a second and 95 MiB (docs/log/library.md). No command compiles a model or distributes it by torch. Programs that
use smoe as a library may do both, so only commands leave them out.

A module of ours stands in for the compiler's. It has the names that transformers and torch use without compiling
anything. Whatever asks for another name, or imports a part of the compiler, gets the compiler itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_LIGHT_PARTS = ("torch._dynamo._trace_wrapped_higher_order_op",)
"""The parts of the compiler that transformers imports for its masks. They do not import the other parts."""


def leave_out_compiler() -> None:
    """Let the import of transformers, which follows, leave out the compiler and the packages for several machines. No
    effect if transformers or the compiler is imported already."""
    import torch

    if "transformers" in sys.modules or _COMPILER in sys.modules:
        return
    found = find_spec(_COMPILER)
    if found is not None:
        marks = sys.modules[_COMPILER] = _Marks(found)
        sys.meta_path.insert(0, _Parts(marks))
    _answer_that_nothing_is_distributed(torch.distributed)


class _Marks(ModuleType):
    """Stands in for the compiler's module. Its marks of functions and tensors have no effect. Every other name is
    looked up in the module itself, which is imported then."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name, "Marks without an effect, in place of the module of this name.")
        self.__spec__ = spec
        self.__path__ = spec.submodule_search_locations or []

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
        """Return the function, or a decorator that does."""
        return _unchanged if function is None else function

    @staticmethod
    def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    @staticmethod
    def allow_in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    @staticmethod
    def mark_static_address(*_: object, **__: object) -> None:
        """Leave a tensor unchanged."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions about a module, such as where its file is
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self.whole(), name)

    def whole(self) -> ModuleType:
        """Return the compiler's module. The first call imports it in place of this one."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        whole = importlib.import_module(self.__name__)
        for name in _LIGHT_PARTS:
            if name in sys.modules:
                setattr(whole, name.rpartition(".")[2], sys.modules[name])
        return whole


class _Parts(MetaPathFinder, Loader):
    """Imports the whole compiler when one of its parts is imported while `_Marks` stands in for it."""

    def __init__(self, marks: _Marks) -> None:
        self._marks = marks

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return where the module `name` is. None: another finder decides."""
        if not name.startswith(f"{_COMPILER}.") or name in _LIGHT_PARTS:
            return None
        if sys.modules.get(_COMPILER) is not self._marks:
            return None
        self._marks.whole()
        return ModuleSpec(name, self) if name in sys.modules else find_spec(name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the part, which was imported with the whole."""
        self._found = sys.modules[spec.name].__spec__
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Undo what Python has changed in the part: the note of how it was found."""
        module.__spec__ = self._found


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _answer_that_nothing_is_distributed(distributed: ModuleType) -> None:
    """Make transformers' test for torch's packages for several machines fail in this process. transformers stores the
    answer, so torch's function is replaced only for the moment of the question."""
    from transformers.utils.import_utils import is_torch_distributed_available

    is_available = distributed.is_available
    distributed.is_available = lambda: False  # type: ignore[attr-defined]
    try:
        is_torch_distributed_available()
    finally:
        distributed.is_available = is_available  # type: ignore[attr-defined]
