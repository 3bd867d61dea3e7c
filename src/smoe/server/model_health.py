"""Whether the model can still be used: what the ends of texts say of it.

CheckpointError    its files were written or replaced since they were loaded: failed, until it is loaded again
TransferError      a disk that cannot be read: failed after several in succession, until a text ends well
"""

from __future__ import annotations

import logging

from smoe.errors import CheckpointError, TransferError
from smoe.generation.request import End, EndReason

_log = logging.getLogger(__name__)
_MOST_UNREAD = 3
"""Texts in succession that a disk has failed; fewer may be a passing fault."""
_ENDED_WELL = (EndReason.END, EndReason.STOP, EndReason.LENGTH)


class ModelHealth:
    """The health of one model. `note` belongs to the decode loop's thread; what it finds may be read by any."""

    def __init__(self) -> None:
        self.lost: Exception | None = None
        """Why no text can be made any more."""
        self._unread: list[TransferError] = []

    @property
    def failure(self) -> Exception | None:
        """Why texts cannot be made now; None where they can."""
        return self.lost or (self._unread[-1] if len(self._unread) >= _MOST_UNREAD else None)

    def note(self, end: End) -> None:
        """A text has ended."""
        if isinstance(end.error, CheckpointError):
            self.lose(end.error)
        elif isinstance(end.error, TransferError):
            self._unread = [*self._unread, end.error][-_MOST_UNREAD:]
        elif end.reason in _ENDED_WELL:
            self._unread = []

    def lose(self, error: Exception) -> None:
        """No text can be made any more."""
        if self.lost is None:
            _log.error("the model can no longer be used: %s", error)
            self.lost = error
