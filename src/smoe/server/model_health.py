"""Whether the model can still be used, judged by how texts end.

CheckpointError    files were changed since they were loaded: failed, until the model is loaded again
TransferError      the disk cannot be read: failed after several in succession, until a text ends well
"""

from __future__ import annotations

import logging

from smoe.errors import CheckpointError, TransferError
from smoe.generation.request import End, EndReason

_log = logging.getLogger(__name__)
_MOST_UNREAD = 3
"""The number of read errors in succession after which the model has failed; fewer may be a temporary fault."""
_ENDED_WELL = (EndReason.END, EndReason.STOP, EndReason.LENGTH)


class ModelHealth:
    """Whether one model can still be used, judged by how its texts end. Only the decode loop's thread calls `note`; any
    thread may read the result."""

    def __init__(self) -> None:
        self.lost: Exception | None = None
        """The error after which the model can never be used again; None if there was no such error."""
        self._unread: list[TransferError] = []

    @property
    def failure(self) -> Exception | None:
        """The error because of which the model cannot be used now; None if it can be used."""
        return self.lost or (self._unread[-1] if len(self._unread) >= _MOST_UNREAD else None)

    def note(self, end: End) -> None:
        """Record how a text has ended, with its error if there was one."""
        if isinstance(end.error, CheckpointError):
            self.lose(end.error)
        elif isinstance(end.error, TransferError):
            self._unread = [*self._unread, end.error][-_MOST_UNREAD:]
        elif end.reason in _ENDED_WELL:
            self._unread = []

    def lose(self, error: Exception) -> None:
        """Record that the model can never be used again."""
        if self.lost is None:
            _log.error("the model can no longer be used: %s", error)
            self.lost = error
