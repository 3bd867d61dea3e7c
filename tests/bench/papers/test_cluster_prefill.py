"""Prompts on a simulated cluster, by hand.

Would catch: a load that is hidden where there is no slot for it, rows that come back before their expert has come.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.papers.cluster_prefill import PromptTimes, prefill_seconds
from smoe.simulator.cluster import Wire

WIRE = Wire(100.0, 0.5, 0.25)
"""A row of 25 bytes takes half a second of a port, two rows in one message three quarters."""
PROMPT = PromptTimes(
    layers=1, layer=1.0, load=4.0, expert=0.5, rows=2, workers=1, row_bytes=25.0, wire=WIRE, batch_rows=1
)


def test_serially_each_waits_for_what_is_left_of_it() -> None:
    serial = replace(PROMPT, layers=3, workers=2, batch_rows=None, is_serial=True)
    way = 2 * 0.75 + 0.5
    assert prefill_seconds(serial) == pytest.approx(3 * (4.0 + 1.0 + way + 0.5 + way))


def test_rows_in_batches_come_back_beside_those_that_go_out() -> None:
    """They arrive at 2.0 and 2.5, the expert at 4.0; what is computed at 4.5 and 5.0 is back at 5.5 and 6.0."""
    assert prefill_seconds(PROMPT) == 6.0
    soon = replace(PROMPT, load=0.0)
    assert prefill_seconds(soon) == 1.0 + 2 * 0.5 + 0.5 + 0.5 + 0.5 + 0.5
    assert prefill_seconds(replace(soon, batch_rows=None)) == 1.0 + 0.75 + 0.5 + 0.5 + 0.5 + 0.75


@pytest.mark.parametrize(("slots", "ends"), [(1, 11.0), (2, 10.0)])
def test_the_next_layers_load_needs_a_slot(slots: int, ends: float) -> None:
    """With one it begins at 5.0 and ends at 9.0, with two at 4.0 and 8.0."""
    assert prefill_seconds(replace(PROMPT, layers=2, slots=slots)) == ends


def test_workers_share_the_port() -> None:
    """Four rows, each to another worker: the last one leaves at 3.0 and is back at 3.0 + 0.5 + 0.5 + 0.5 + 0.5."""
    assert prefill_seconds(replace(PROMPT, load=0.0, rows=1, workers=4)) == 5.0
