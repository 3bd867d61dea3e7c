"""Would catch: a trial that never ends, that keeps the slower way, or that never looks again."""

from __future__ import annotations

import random

import pytest

from smoe.policy.trial import MARGIN, STAY, TURN, TURNS, LookAheadTrial, Trial


def live(trial: Trial, steps: int, on: float, off: float, noise: float = 0.0) -> float:
    """The share of steps that ran with it on."""
    chance, share = random.Random(0), 0
    for _ in range(steps):
        share += trial.is_on
        trial.note((on if trial.is_on else off) * (1 + chance.uniform(-noise, noise)))
    return share / steps


@pytest.mark.parametrize(("on", "off", "stays"), [(1.0, 1.2, True), (1.2, 1.0, False), (1.0, 1.0 - MARGIN / 2, True)])
def test_the_faster_way_is_kept(on: float, off: float, stays: bool) -> None:
    trial = Trial()
    live(trial, TURN * TURNS, on, off)
    assert trial.is_on is stays
    assert live(trial, STAY - 1, on, off) == stays
    assert (trial.trials, trial.switches_off) == (1, int(not stays))


@pytest.mark.parametrize("right", [0.3, 0.7])
def test_guesses_that_are_mostly_wrong_end_it_at_once(right: float) -> None:
    """In a trial and after it; the next one begins as if nothing had been."""
    trial, guesses, correct = Trial(), 0, 0.0
    for step in range(2 * STAY):
        was_on = trial.is_on
        guesses += 10 * was_on
        correct += (0.7 if step < 2 * TURN else right) * 10 * was_on
        trial.note(1.0, guesses, int(correct))
        if right < 0.5 and 2 * TURN + 6 <= step < 2 * TURN + STAY:
            assert not trial.is_on, step
    assert trial.switches_off == (2 if right < 0.5 else 0)


@pytest.mark.parametrize(("wrong", "right", "stays"), [(9, 0, True), (10, 0, False), (15, 2, True), (16, 2, False)])
def test_few_guesses_end_it_if_nearly_all_are_wrong(wrong: int, right: int, stays: bool) -> None:
    """0.6^9 = 0.0101 and 0.6^10 = 0.0060; of 17 and 18, at most two: 0.0123 and 0.0082."""
    trial = Trial()
    trial.note(1.0, wrong + right, right)
    assert trial.is_on is stays


def test_what_ended_one_trial_does_not_end_the_next() -> None:
    trial = Trial()
    trial.note(1.0, 12, 0)
    for _ in range(STAY):
        assert not trial.is_on
        trial.note(1.0, 12, 0)
    assert trial.is_on
    trial.note(1.0, 14, 1)
    assert trial.is_on, "two prefetches, one of them used, say little"


def test_predictions_that_are_mostly_right_do_not_end_it() -> None:
    chance = random.Random(1)
    for _ in range(200):
        trial, made, right = Trial(), 0, 0
        for _ in range(TURN):
            made += 5
            right += sum(chance.random() < 0.6 for _ in range(5))
            trial.note(1.0, made, right)
        assert trial.switches_off == 0


def test_a_prompts_guesses_are_passed_over() -> None:
    trial = Trial()
    trial.note(1.0, 10, 9)
    trial.pass_over(500, 9)
    trial.note(1.0, 560, 60)
    assert trial.is_on
    trial.note(1.0, 620, 61)
    assert not trial.is_on


def test_noise_does_not_decide() -> None:
    trial = Trial()
    live(trial, TURN * TURNS, 1.3, 1.0, noise=0.2)
    assert not trial.is_on


def test_it_looks_again() -> None:
    trial = Trial()
    live(trial, TURN * TURNS + STAY, 1.3, 1.0)
    assert trial.is_on, "a new trial begins with it on"
    live(trial, TURN * TURNS, 1.0, 1.3)
    assert trial.is_on
    assert (trial.trials, trial.switches_off) == (2, 1)


def test_the_first_step_of_a_turn_does_not_count() -> None:
    """It lives on what the turn before it left: a cache that prefetches have filled."""
    trial = Trial()
    for step in range(TURN * TURNS):
        first = step % TURN == 0
        trial.note(100.0 if first and trial.is_on else 1.0)
    assert trial.is_on


def test_a_look_ahead_needs_a_wait_as_long_as_itself() -> None:
    trial = LookAheadTrial()
    assert not trial.fits(0), "nothing is waited for"
    assert trial.fits(1), "nothing is known: find out"
    trial.note_cost(0.3)
    assert trial.fits(1), "the wait is not known"
    trial.note_wait(1, 0.1)
    trial.note_wait(3, 0.9)
    assert (trial.fits(1), trial.fits(3)) == (False, True)
    for _ in range(100):
        trial.note_wait(1, 0.5)  # the link has become slower
    assert trial.fits(1)
