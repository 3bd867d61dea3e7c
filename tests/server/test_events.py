"""Server-sent events as bytes. Would catch an event that some clients take for two lines."""

from __future__ import annotations

import json

from smoe.server.events import event


def test_an_event_is_one_line_however_lines_are_split() -> None:
    value = {"text": "".join(map(chr, range(0x20FF))) + "\U0001f600"}
    written = event(value, "odd").decode()
    name, data, *rest = written.splitlines()
    assert (name, rest) == ("event: odd", [""])
    assert json.loads(data.removeprefix("data: ")) == value
