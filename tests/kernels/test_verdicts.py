"""Results of proofs: each is made once, and a known one is not made again.

Would catch a result that is taken for another subject, and a subject whose text differs from process to process.
"""

from __future__ import annotations

import pytest

from smoe.kernels.verdicts import Verdicts


def never() -> bool:
    raise AssertionError("the result is known")


def test_a_proof_is_made_once_for_each_subject() -> None:
    verdicts = Verdicts()
    assert verdicts.of("norm", (int, 4, 1e-6, ("a", None)), lambda: True) is True
    assert verdicts.of("norm", (int, 4, 1e-6, ("a", None)), never) is True
    assert verdicts.of("norm", (int, 4, 1e-5, ("a", None)), lambda: False) is False
    assert verdicts.of("norm", (float, 4, 1e-6, ("a", None)), lambda: 3) == 3
    assert verdicts.of("linear", (int, 4, 1e-6, ("a", None)), lambda: None) is None
    assert verdicts.of("linear", (int, 4, 1e-6, ("a", None)), never) is None
    assert verdicts.made == 4


def test_known_results_are_not_made_again() -> None:
    first = Verdicts()
    first.of("router", ((8, 4), "bf16"), lambda: "8 2 1")
    second = Verdicts(first.all)
    assert second.of("router", ((8, 4), "bf16"), never) == "8 2 1"
    assert second.made == 0 and second.all == first.all
    second.of("router", ((8, 5), "bf16"), lambda: None)
    assert second.made == 1 and len(second.all) == 2 and len(first.all) == 1


@pytest.mark.parametrize(("one", "other"), [((1, 2), ("1, 2",)), ((1,), (True,)), ((1, (2,)), ((1, 2),)), ("1", 1)])
def test_different_subjects_have_different_texts(one: object, other: object) -> None:
    verdicts = Verdicts()
    verdicts.of("p", one, lambda: True)
    verdicts.of("p", other, lambda: False)
    assert verdicts.made == 2


@pytest.mark.parametrize("subject", [object(), [1], {1: 2}, lambda: None])
def test_subjects_without_a_lasting_text_are_refused(subject: object) -> None:
    with pytest.raises(TypeError, match="cannot be a part"):
        Verdicts().of("p", (1, subject), lambda: True)
