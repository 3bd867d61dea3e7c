"""How the process of a worker without torch ends. Would catch: a first signal that raises where it can be lost, a
second one that is ignored, a signal before the worker can be ended.
"""

from __future__ import annotations

import signal

import pytest

from smoe.light_worker import EndingFlag


def test_the_first_signal_sets_a_flag_and_the_second_raises() -> None:
    ending, calls = EndingFlag(), list[str]()
    ending.check()
    ending.call(lambda: calls.append("ended"))
    ending.on_signal(signal.SIGTERM, None)
    assert calls == ["ended"] and ending.signal == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        ending.check()
    with pytest.raises(KeyboardInterrupt):
        ending.on_signal(signal.SIGINT, None)
    assert ending.signal == signal.SIGTERM, "the first one is the reason"


def test_a_signal_before_the_worker_serves() -> None:
    ending = EndingFlag()
    ending.on_signal(signal.SIGINT, None)
    ending.call(lambda: None)
    with pytest.raises(KeyboardInterrupt):
        ending.check()
