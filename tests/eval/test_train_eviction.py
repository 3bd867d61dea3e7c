"""What is learned from traces: against another solution of the same equations, and by the misses it saves.

Would catch: layers taken at the wrong token, a part that is fitted to the past, chance in training, layers without
experts taken for others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from smoe.errors import ConfigError
from smoe.eval import train_eviction as module
from smoe.eval.train_eviction import LayersShape, train
from smoe.policy.eviction.belady import Belady
from smoe.policy.eviction.learned import DISCOUNT, Learned
from smoe.policy.registry import make_eviction
from smoe.routing import Phase, Routing
from smoe.simulator.replay import replay

EXPERTS, TOP_K, SLOTS = 16, 2, 24
LAYERS = (1, 2, 4)
SHAPE = LayersShape(LAYERS, EXPERTS, TOP_K)


def topics(seed: int, tokens: int) -> list[Routing]:
    """A walk over topics, each with favourites of its own in every layer, the same for every seed: what one layer
    chooses says what the others will."""
    favourites = random.Random(0)
    liked = [{layer: favourites.sample(range(EXPERTS), 4) for layer in LAYERS} for _ in range(6)]
    chance = random.Random(seed)
    found, topic = [], 0
    for _ in range(tokens):
        if chance.random() < 0.1:
            topic = chance.randrange(len(liked))
        for layer in LAYERS:
            found.append(Routing(layer, Phase.DECODE, EXPERTS, [chance.sample(liked[topic][layer], TOP_K)]))
    return found


def misses(policy: Learned | Belady, trace: Sequence[Routing]) -> int:
    return replay(trace, SLOTS, 2, policy).misses


@pytest.fixture(scope="module")
def trained() -> Learned:
    return Learned(train([topics(1, 1500), topics(2, 1500)], SHAPE))


def test_it_misses_less_on_text_that_it_has_not_seen(trained: Learned) -> None:
    trace = topics(3, 600)
    ours = misses(trained, trace)
    rivals = {name: replay(trace, SLOTS, 2, make_eviction(name)).misses for name in ("lru", "lfu", "score", "auto")}
    assert misses(Belady(trace), trace) < ours < 0.9 * min(rivals.values()), (ours, rivals)


def test_the_same_traces_give_the_same_numbers_and_ticks() -> None:
    heard: list[tuple[int, int]] = []
    first = train([topics(1, 300)], SHAPE, lambda done, total: heard.append((done, total)))
    second = train([topics(1, 300)], SHAPE)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
    assert heard[-1][0] == heard[-1][1] and heard == sorted(heard)
    assert first.source.shape[:2] == (5, EXPERTS) and first.rate == TOP_K / EXPERTS
    assert not first.source[[0, 3]].any() and not first.target[[0, 3]].any(), "layers without experts"


def test_the_target_is_the_discount_to_the_next_use() -> None:
    """By looking ahead from every token; a prompt's tokens are tokens."""
    trace = topics(4, 40)
    history = module._history(trace, SHAPE)
    for row, layer in enumerate(LAYERS):
        of_layer = [routing.top_k_index[0] for routing in trace if routing.layer == layer]
        for expert in range(EXPERTS):
            for token in range(40):
                later = (n for n, chosen in enumerate(of_layer[token + 1 :]) if expert in chosen)
                ahead = next(later, None)
                expected = 0.0 if ahead is None else DISCOUNT**ahead
                assert history.target[token, row, expert] == pytest.approx(expected, rel=1e-5)
    prompt = [
        Routing(layer, Phase.PREFILL, EXPERTS, [r.top_k_index[0] for r in trace if r.layer == layer])
        for layer in LAYERS
    ]
    assert np.array_equal(module._history(prompt, SHAPE).uses, history.uses)


def test_the_second_part_solves_the_ridge_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of full rank it is what least squares with rows for the penalty gives (NumPy's own)."""
    size = len(LAYERS) * EXPERTS
    monkeypatch.setattr(module, "RANK", size)
    history = module._history(topics(5, 300), SHAPE)
    weights = np.zeros(module.FEATURES)
    second = module._second_part([history], 0.125, weights, lambda: None)  # type: ignore[arg-type]
    mean = history.uses.mean(axis=0)
    context, missing = module._context_and_missing(history, mean, 0.125, weights, lambda: None)  # type: ignore[arg-type]
    heard, wanted = [], []
    moments = range(len(LAYERS))
    for token in range(1, len(context)):
        for last in moments:
            heard.append([*context[token, : last + 1].ravel(), *context[token - 1, last + 1 :].ravel()])
            wanted.append([*missing[token, : last + 1].ravel(), *missing[token - 1, last + 1 :].ravel()])
    x, y = np.array(heard), np.array(wanted)
    penalty = np.sqrt(module.PENALTY * len(moments)) * np.eye(size)
    solution = np.linalg.lstsq(
        np.vstack([x - x.mean(axis=0), penalty]), np.vstack([y - y.mean(axis=0), np.zeros((size, size))]), rcond=None
    )[0]
    ours = second.source.reshape(size, -1) @ second.target.reshape(size, -1).T
    assert np.allclose(ours, solution, atol=1e-6)
    assert np.allclose(second.offset.ravel(), y.mean(axis=0) - x.mean(axis=0) @ solution, atol=1e-6)


def test_too_little_to_learn_from_is_refused() -> None:
    with pytest.raises(ConfigError, match="150 tokens are too few") as refused:
        train([topics(1, 100), topics(2, 50)], SHAPE)
    assert refused.value.setting == "cache"
