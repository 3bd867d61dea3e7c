"""Checks that pyzmq is installed. This module imports nothing heavy, because workers without torch use it too."""

from __future__ import annotations

from smoe.errors import ConfigError


def check_zmq() -> None:
    """Raise `ConfigError` if pyzmq is not installed. The machines of a cluster communicate by it."""
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "a cluster needs pyzmq, which is not installed; run: pip install pyzmq",
            setting="cluster",
            given="a cluster",
            allowed="requires pyzmq",
        ) from error
