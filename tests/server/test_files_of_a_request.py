"""Which files of the server a chat request passes through until the decode loop has it.

Would catch a request whose way is spread over more and more files, and a page that names other files.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from smoe.generation.loop import DecodeLoop
from tests.entered_files import Watch
from tests.server.conftest import served

PAGE = Path(__file__).parents[2] / "docs" / "way-of-a-token.md"
MOST_FROM_THE_SOCKET, MOST_FROM_THE_ROUTE = 12, 8
"""Files of the server; they may only become fewer."""
ROUTE = "server/serving.py"
"""What the route calls; before it come the connection and the checks that all requests pass."""
BY_THE_CLOCK = {"server/listening.py"}
"""Entered at any time, by no request."""


@pytest.fixture(scope="module")
def passed(demo: PreTrainedModel, demo_tokenizer: Any) -> list[str]:
    """In the order of their first entry."""
    watch, handed_in = Watch(), list[list[str]]()
    original = DecodeLoop.hand_in

    def noted(self: DecodeLoop, *given: Any) -> None:
        handed_in.append(list(watch.files))
        original(self, *given)

    threading.setprofile(watch)
    try:
        with pytest.MonkeyPatch.context() as patch, served(demo, demo_tokenizer) as running:
            patch.setattr(DecodeLoop, "hand_in", noted)
            running.chat()  # the first request also prepares what others share
            watch.files = {}
            running.chat()
    finally:
        threading.setprofile(None)
    return [file for file in handed_in[-1] if file.startswith("server/") and file not in BY_THE_CLOCK]


def test_a_request_passes_through_no_more_files(passed: list[str]) -> None:
    assert len(passed) <= MOST_FROM_THE_SOCKET, passed
    assert len(passed[passed.index(ROUTE) :]) <= MOST_FROM_THE_ROUTE, passed


def test_the_page_names_what_a_request_passes_through(passed: list[str]) -> None:
    assert [name for name in passed if f"`{name}`" not in PAGE.read_text()] == []
