"""Fitting on paths and judging on others: training that can be repeated and interrupted, rates by hand.

Would catch: a random number that hangs on what ran before, an interrupt that changes the result, a network that learns
nothing, a rate that counts the first layer or a token of another sequence.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from smoe.eval import train_expert_mlp as training
from smoe.eval.train_expert_mlp import train_expert_mlp
from smoe.eval.tune_predictor import judge
from smoe.prediction.activation_path import Paths, RoutedLayer
from smoe.prediction.fitted import counted
from smoe.prediction.previous_token import PreviousToken

LAYERS = tuple(RoutedLayer(layer, 6, 2) for layer in range(3))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network and a training that take a second."""
    monkeypatch.setattr("smoe.prediction.expert_mlp.network.__defaults__", ((32, 16),))
    monkeypatch.setattr(training, "LEAST_EPOCHS", 4)
    monkeypatch.setattr(training, "MOST_EPOCHS", 6)


def paths(tokens: int = 120, seed: int = 1) -> Paths:
    """Layer 1 chooses what follows from layer 0, layer 2 what follows from both."""
    chance = np.random.default_rng(seed)
    first = np.sort(chance.permuted(np.tile(np.arange(6), (tokens, 1)), axis=1)[:, :2], axis=1)
    second, third = (first + 1) % 6, (first + first[:, ::-1]) % 6
    third[:, 1] = (third[:, 0] + 1) % 6
    return Paths(LAYERS, np.stack([first, second, third], axis=1), np.arange(tokens) // 30)


def test_the_same_seed_gives_the_same_bytes() -> None:
    first = train_expert_mlp(paths(), seed=3)
    torch.rand(7)  # what others draw is nothing to it
    again, other = train_expert_mlp(paths(), seed=3), train_expert_mlp(paths(), seed=4)
    assert save(dict(first.fitted.tensors)) == save(dict(again.fitted.tensors)) and first.losses == again.losses
    assert save(dict(first.fitted.tensors)) != save(dict(other.fitted.tensors))


def test_nobody_else_s_random_numbers_change() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train_expert_mlp(paths())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("done", [1, 3])
def test_an_interrupted_training_goes_on_to_the_same_end(done: int, tmp_path: Path) -> None:
    checkpoint, heard = tmp_path / "kept" / "run.training", []
    whole = train_expert_mlp(paths())

    def stop(epochs: int) -> None:
        if epochs == done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_expert_mlp(paths(), checkpoint=checkpoint, tick=stop)
    assert [file.name for file in checkpoint.parent.iterdir()] == ["run.training"]
    resumed = train_expert_mlp(paths(), checkpoint=checkpoint, tick=heard.append)
    assert heard[0] == done and resumed.losses == whole.losses
    assert save(dict(resumed.fitted.tensors)) == save(dict(whole.fitted.tensors))
    assert not checkpoint.exists()


@pytest.mark.parametrize("damage", ["other paths", "other seed", "cut short"])
def test_what_was_kept_of_another_training_is_not_gone_on_with(damage: str, tmp_path: Path) -> None:
    checkpoint, heard = tmp_path / "run.training", []

    def stop(epochs: int) -> None:
        if epochs == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_expert_mlp(paths(), checkpoint=checkpoint, tick=stop)
    if damage == "cut short":
        checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    train_expert_mlp(
        paths(seed=2 if damage == "other paths" else 1),
        seed=1 if damage == "other seed" else 0,
        checkpoint=checkpoint,
        tick=heard.append,
    )
    assert heard[0] == 0


def test_training_learns_and_ends_where_nothing_gets_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MOST_EPOCHS", 40)
    found, popular = train_expert_mlp(paths(2000)), counted("popularity", paths(2000))
    assert found.losses[-1][0] < 0.7 * found.losses[0][0]
    assert found.best_epoch <= len(found.losses) <= 40
    unseen = paths(100, seed=9)
    learned, simple = judge(found.fitted.predictor, unseen), judge(popular.predictor, unseen)
    assert learned.recall > simple.recall + 0.3 and learned.exact > simple.exact


@pytest.mark.parametrize(
    ("losses", "is_over"),
    [
        ([5, 4, 3], False),
        ([5, 4, 3, 4, 4], False),
        ([5, 4, 3, 4, 4, 4], True),
        ([5, 4, 3, 2, 1], False),
        ([6, 5, 4, 3, 2, 1], True),
    ],
)
def test_when_training_ends(losses: list[float], is_over: bool) -> None:
    """At least 4 epochs and at most 6 here, and 3 without a gain."""
    assert training._is_over(losses, 6) == is_over


def test_rates_by_hand() -> None:
    """The token before, over two sequences: nothing is known of the first token of either."""
    chosen = np.array(
        [
            [[0, 1], [0, 1], [0, 1]],
            [[2, 3], [1, 0], [0, 2]],  # layer 1 as before, of layer 2 one
            [[0, 1], [0, 1], [0, 1]],
            [[0, 1], [2, 3], [1, 0]],  # nothing, then both
        ]
    )
    found = judge(lambda: PreviousToken(LAYERS), Paths(LAYERS, chosen, np.array([0, 0, 1, 1])))
    assert found.predictions == 4 * 2
    assert (found.exact, found.at_least_one, found.recall) == (2 / 8, 3 / 8, 5 / 16)
