"""Who is let in, and under which name.

Would catch: a second machine of the same host name that is refused, a name given twice, a number that grows a name
beyond its bound, an invitation that is good twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from smoe.cluster.admission import Admission, numbered
from smoe.cluster.stored_identity import MOST_NAME, Coordinator, is_name, read_coordinator
from tests import oracle
from tests.cluster.conftest import BY_TURNS, Start, cluster_of, member


@pytest.mark.parametrize(
    ("name", "taken", "expected"),
    [
        ("pi", (), "pi"),
        ("pi", ("pi",), "pi-2"),
        ("pi", ("pi", "pi-2", "pi-3"), "pi-4"),
        ("pi-2", ("pi-2",), "pi-2-2"),
        ("a" * MOST_NAME, ("a" * MOST_NAME,), "a" * (MOST_NAME - 2) + "-2"),
    ],
)
def test_a_name_that_is_taken_gets_a_number(name: str, taken: tuple[str, ...], expected: str) -> None:
    assert numbered(name, taken) == expected and is_name(expected)


def test_numbers_of_two_digits_fit_as_well() -> None:
    long = "a" * MOST_NAME
    taken = {long, *(f"{'a' * (MOST_NAME - 2)}-{n}" for n in range(2, 10))}
    assert numbered(long, taken) == f"{'a' * (MOST_NAME - 3)}-10"


def test_two_machines_of_one_host_name_are_two_workers(coordinator: Coordinator) -> None:
    first, second = member("raspberrypi"), member("raspberrypi")
    admission = Admission(read_coordinator("test"))
    for one in (first, second):
        assert admission.admitted(one.keys.public, {"name": one.name, "code": one.code}) == ""
    kept = read_coordinator("test").workers
    assert kept == {"raspberrypi": first.keys.public, "raspberrypi-2": second.keys.public}
    assert admission.name_of(second.keys.public) == "raspberrypi-2"
    assert admission.admitted(second.keys.public, {"name": second.name}) == "", "as it comes again, without invitation"
    stranger = member("x").keys.public
    assert "unknown, used or expired" in admission.admitted(stranger, {"name": "raspberrypi", "code": first.code})


def test_both_compute(toy: Callable[..., Path], start: Start, open_model: Callable[..., object]) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    start(folder, 2, name="pi")
    model = open_model(folder, "minimum", cluster="test", cluster_workers=2, **BY_TURNS)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert {each.name for each in cluster_of(model).members if each.experts} == {"pi", "pi-2"}
