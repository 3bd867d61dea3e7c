"""Stores where transformers finds the names that it exports, so that its import reads 2,500 files less.

transformers imports a model's module when one of its names is used first. To know the names, it reads the source of
every model at each import: half a second, and more if these files are not in the page cache (docs/log/library.md). A
command stores what transformers found, under a key that changes with the name, size or time of any of these files.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from smoe.private_cache import PrivateCache, is_possible

STRUCTURES = PrivateCache("imports", "lists of names", "json", b"smoe imports 1\n", 4 << 20)
"""The entries. One takes some 200 KB."""
_MODULE, _FUNCTION = "transformers.utils.import_utils", "create_import_structure_from_path"

Structure = Mapping[Any, Any]
"""What transformers found in a folder: for each set of required libraries the names by module, and for each subfolder
its own structure."""


def use_stored_structure() -> None:
    """Prepare the process so that a later import of transformers uses the stored names. No effect if transformers is
    imported already, or if this system does not tell which user owns a file."""
    found = importlib.util.find_spec("transformers")
    if "transformers" not in sys.modules and is_possible() and found is not None and found.origin is not None:
        sys.meta_path.insert(0, _Finder(Path(found.origin).parent / "models"))


class _Finder(MetaPathFinder, Loader):
    """Replaces one function of one module of transformers when this module is imported."""

    def __init__(self, models: Path) -> None:
        """`models`: the folder with the source of all models."""
        self._models = models
        self._loader: Loader | None = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return that this object loads the module. None: Python's next finder is used."""
        spec = PathFinder.find_spec(name, path) if name == _MODULE and self._loader is None else None
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module as its own loader makes it."""
        return self._loader.create_module(spec) if self._loader is not None else None

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and restore its own loader."""
        assert self._loader is not None and module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        scan = getattr(module, _FUNCTION, None)
        if scan is not None and module.__file__ is not None:
            setattr(module, _FUNCTION, _stored(scan, self._models, Path(module.__file__)))


def _stored(scan: Callable[[Any], Structure], models: Path, code: Path) -> Callable[[Any], Structure]:
    """Return a function as `scan`, whose result for the folder `models` is stored. `code`: the file with `scan`."""

    @functools.lru_cache
    def scanned(place: str | Path) -> Structure:
        if Path(place) not in (models, models / "__init__.py"):
            return scan(place)
        try:
            key = _state_of(models, code)
        except OSError:  # the files are elsewhere, or are just being replaced
            return scan(place)
        stored = STRUCTURES.read(key)
        if stored is not None:
            return decoded(json.loads(stored))
        structure = scan(place)
        with suppress(AttributeError, TypeError, ValueError):  # another version may return something else
            form = json.dumps(encoded(structure))
            if decoded(json.loads(form)) == structure:
                STRUCTURES.write(key, form.encode())
        return structure

    return scanned


def _state_of(models: Path, code: Path) -> bytes:
    """Return what the structure of `models` depends on: a digest of transformers' version, and of the paths, sizes and
    times of all sources."""
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    states = [(str(code), code.stat()), *((source.path, source.stat()) for source in _sources(models))]
    lines = sorted(f"{path}\0{found.st_size}\0{found.st_mtime_ns}\0" for path, found in states)
    return hashlib.sha256("".join([version, *lines]).encode()).digest()


def _sources(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield all files of source in a folder and its subfolders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _sources(entry.path)


def encoded(structure: Structure) -> list[Any]:
    """Return a structure as values of JSON."""
    names = [
        [sorted(needs), {module: sorted(names) for module, names in of.items()}]
        for needs, of in structure.items()
        if isinstance(needs, frozenset)
    ]
    return [names, {name: encoded(of) for name, of in structure.items() if isinstance(name, str)}]


def decoded(stored: Any) -> Structure:
    """Return the structure that `encoded` has changed into values of JSON."""
    names, folders = stored
    found = {frozenset(needs): {module: set(names) for module, names in of.items()} for needs, of in names}
    return found | {name: decoded(of) for name, of in folders.items()}
