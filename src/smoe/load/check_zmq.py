"""Checks that pyzmq is installed. This module imports nothing heavy, because workers without torch use it too."""

from __future__ import annotations

from smoe.errors import ConfigError

INSTALL = "pip install '.[cluster]'"
"""The command, in the copy of the repository, that installs pyzmq."""


def check_zmq() -> None:
    """Raise `ConfigError` if pyzmq is not installed. The machines of a cluster communicate by it."""
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"a cluster needs pyzmq, which is not installed; run, in the copy of the repository: {INSTALL}",
            setting="cluster",
            given="a cluster",
            allowed="requires pyzmq",
        ) from error
