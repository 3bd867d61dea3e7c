"""Prevents Python's garbage collector from searching objects that are not garbage: while many are created, and
afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_AT_FIRST = gc.get_freeze_count()
"""The number of objects that Python itself has excluded from garbage collection: 375 in version 3.12, otherwise 0."""
_has_libraries: list[bool] = [False]
"""Whether `exclude_libraries` has excluded objects, and no block has begun since."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """Disable the collection of reference cycles in the whole process during the `with` block. Afterwards restore the
    previous state."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def exclude_libraries() -> None:
    """Exclude all objects that exist now from garbage collection, until the next block of `present_objects_excluded`
    ends. No effect if objects are excluded already.

    Called when the libraries have been imported: four collections while a model is loaded would search their objects,
    which takes 0.7 s."""
    if not _are_excluded():
        gc.freeze()
        _has_libraries[0] = True


@contextmanager
def present_objects_excluded() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection during the `with` block.

    With the libraries and a model loaded, a full collection takes 0.2 to 0.3 s, in the middle of a prompt or an answer.
    """
    is_first = _has_libraries[0] or not _are_excluded()
    _has_libraries[0] = False
    gc.freeze()
    try:
        yield
    finally:
        if is_first:  # otherwise objects that an outer block excludes would be collected
            gc.unfreeze()


def _are_excluded() -> bool:
    return gc.get_freeze_count() > _AT_FIRST
