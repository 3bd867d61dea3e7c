"""Imports programs of the repository's folder `bench`, which the installed package does not contain."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import smoe
from smoe.errors import ConfigError


def from_checkout(module: str, command: str) -> ModuleType:
    """Import `bench.MODULE` from the repository that contains this package.

    Raises `ConfigError` if the package was installed without the repository; `command` is what the user typed.
    """
    root = Path(smoe.__file__).resolve().parents[2]
    if not root.joinpath("bench", *module.split(".")).with_suffix(".py").is_file():
        raise ConfigError(
            f"'{command}' runs programs from the folder 'bench' of the source repository, which the installed "
            "package does not contain. Clone the repository, run 'pip install -e .' there, and repeat the command"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))  # not only for this import: processes that a simulation starts get this path
    return import_module(f"bench.{module}")
