"""What a trace says about use, against numbers worked out by hand.

Would catch: a sequence that goes on into the next, padding that is counted, the weights' order taken for the choice's,
a guess judged on what it was learned from.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log2
from pathlib import Path

import numpy as np
import pytest

from smoe.errors import ConfigError
from smoe.policy.prediction import Sight
from smoe.prediction.activation_path import joined
from smoe.prediction.affinity import Affinity, affinity_of
from smoe.routing import Phase, Routing
from smoe.trace.file import Trace, TraceWriter
from smoe.trace.paths import paths_in
from smoe.trace.ranks import reuse_by_rank, shares_by_rank, stretches
from smoe.trace.usage import affinities, bits, by_sequence, entropy, next_token, times_even
from tests.trace.written import Token, header_of, random_tokens, write

HEADER = header_of(experts=4, top_k=2)
TOKENS = [
    Token(([0, 1], [3, 2])),
    Token(([1, 2], [3, 2])),
    Token(([0, 3], [2, 3])),
    Token(([0, 3], [0, 1]), sequence=1),
    Token(([2, 0], [0, 1]), sequence=1),
]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return write(tmp_path / "a.trace", HEADER, TOKENS)


def test_what_the_next_token_uses_again(trace: Trace) -> None:
    """Layer 1: (0 1 -> 1 2), (1 2 -> 0 3) and, in the other sequence, (0 3 -> 2 0)."""
    found = next_token([trace])
    assert found.heaviest.tolist() == pytest.approx([1 / 3, 1.0])
    assert found.share.tolist() == pytest.approx([(1 / 2 + 0 + 1 / 2) / 3, 1.0])
    assert found.some.tolist() == pytest.approx([2 / 3, 1.0])
    assert found.chance.tolist() == [0.5, 0.5] and found.chance_of_some.tolist() == pytest.approx([5 / 6] * 2)
    assert next_token([trace, trace]).share.tolist() == pytest.approx(found.share.tolist())


def test_the_heaviest_is_not_always_the_first(tmp_path: Path) -> None:
    """Of 0 and 1, 1 weighs more and comes again; 1 and 2 do not."""
    header = header_of(experts=4, top_k=2, layers=1)
    tokens = [Token(([0, 1],), heaviest=1), Token(([1, 2],)), Token(([3, 0],))]
    assert next_token([write(tmp_path / "b.trace", header, tokens)]).heaviest.tolist() == [0.5]


def test_of_two_mixtral_experts_hobbits_chances(tmp_path: Path) -> None:
    header = header_of(experts=8, top_k=2, layers=1)
    found = next_token([write(tmp_path / "b.trace", header, random_tokens(header, 4))])
    assert found.chance[0] == 0.25 and round(found.chance_of_some[0], 2) == 0.46  # section 3.4


def test_popularity_and_entropy(trace: Trace) -> None:
    paths = paths_in(trace)
    assert times_even(paths)[0].tolist() == pytest.approx([4 * n / 10 for n in (4, 2, 2, 2)])
    found = entropy(paths, list(stretches(trace)))
    shares = (0.4, 0.2, 0.2, 0.2)
    assert found.used[0] == pytest.approx(-sum(share * log2(share) for share in shares))
    scores = [exp(logit) for logit in (2.0, 1.875, -1.25, -1.375)]  # of the first token, where 0 and 1 are chosen
    assert next(iter(stretches(trace))).shares[0].tolist() == pytest.approx([s / sum(scores) for s in scores], rel=1e-3)
    assert found.of_a_token is not None and (found.of_a_token < 2).all() and found.most.tolist() == [2.0, 2.0]
    assert bits(np.array([[0.25] * 4, [1.0, 0.0, 0.0, 0.0]])).tolist() == [2.0, 0.0]


def test_concentration_and_reuse_by_rank(trace: Trace) -> None:
    """Rank 3 is the first of the others by number. Within one token: only the pairs of one sequence."""
    scores = np.exp([2.0, 1.875])
    shares = shares_by_rank(stretches(trace))
    assert shares.shape == (10, 4) and (np.diff(shares, axis=1) < 0).all()
    assert (shares[:, 0] / shares[:, 1]).tolist() == pytest.approx([scores[0] / scores[1]] * 10, rel=1e-3)
    layer_1 = [part for part in stretches(trace) if part.layer == 1]
    # ranks of layer 1: 0 1 2 3 -> {1, 2};  1 2 0 3 -> {0, 3};  0 3 1 2 -> {2, 0}
    assert reuse_by_rank(layer_1, ahead=1).tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3])


def test_sequences_keep_to_themselves(trace: Trace) -> None:
    found = by_sequence(paths_in(trace))
    assert not found.has_parts and found.tokens.tolist() == [3, 2]
    assert found.times_even[0, 0].tolist() == pytest.approx([4 * n / 6 for n in (2, 2, 1, 1)])
    assert found.times_even[1, 1].tolist() == pytest.approx([2.0, 2.0, 0.0, 0.0])


def test_one_sequence_is_cut_into_parts(tmp_path: Path) -> None:
    """The first half uses the experts 0 and 1, the second 2 and 3."""
    header = header_of(4, 2, layers=1)
    tokens = [Token(([0, 1],))] * 32 + [Token(([2, 3],))] * 32
    found = by_sequence(paths_in(write(tmp_path / "b.trace", header, tokens)))
    assert found.has_parts and found.tokens.tolist() == [16] * 4
    assert found.times_even[:, 0].tolist() == [[2.0, 2.0, 0.0, 0.0]] * 2 + [[0.0, 0.0, 2.0, 2.0]] * 2
    short = write(tmp_path / "c.trace", header, tokens[:31])
    with pytest.raises(ConfigError, match="too short"):
        by_sequence(paths_in(short))


def test_affinity_knows_what_popularity_does_not(tmp_path: Path) -> None:
    """Layer 2 has expert a + 2 where layer 1 had a; a is 0, 1, 0, 1 ..."""
    header = header_of(experts=4, top_k=1)
    tokens = [Token(([n % 2], [n % 2 + 2])) for n in range(32)]
    found = affinities(paths_in(write(tmp_path / "b.trace", header, tokens)))
    assert found.by_affinity.tolist() == [1.0] and found.by_popularity.tolist() == [0.5] and found.gain == 0.5
    assert found.follows.tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0] * 4, [0] * 4]
    with pytest.raises(ConfigError, match="15 tokens are too few"):
        affinities(paths_in(write(tmp_path / "c.trace", header, tokens[:15])))


def test_affinity_is_judged_as_the_predictor_would_be(tmp_path: Path) -> None:
    header = header_of(experts=6, top_k=2, layers=3)
    paths = paths_in(write(tmp_path / "b.trace", header, random_tokens(header, 60)))
    learned, judged = paths.split(0.5)
    predictor, right = Affinity(paths.layers, affinity_of(learned)), [0, 0]
    for token in judged.chosen.tolist():
        for n, layer in enumerate(paths.layers):
            predictor.observe(Routing(layer.layer, Phase.DECODE, layer.experts, [token[n]]))
            for named in predictor.predict(Sight(layer.layer, None)):
                right[n] += len(set(named.experts) & set(token[n + 1]))
    assert affinities(paths).by_affinity.tolist() == pytest.approx([count / 60 for count in right])


def test_padding_and_layers_of_different_widths(tmp_path: Path) -> None:
    header = replace(HEADER, layers=(HEADER.layers[0], replace(HEADER.layers[1], experts=3, top_k=1)))
    with TraceWriter(tmp_path / "b.trace", header) as writer:
        for layer, chosen in zip(header.layers, ([0, 1], [2, 3]), strict=True):
            rows = header.blank_rows(layer, 2)  # the second token is padding
            rows["top_k_index"][0], rows["phase"] = chosen, 1
            writer.append(rows)
        writer.keep()
    trace = Trace(tmp_path / "b.trace")
    paths = paths_in(trace)
    assert paths.chosen.tolist() == [[[0, 1], [2, -1]]]
    table = times_even(paths)
    assert (
        table[0].tolist() == [2.0, 2.0, 0.0, 0.0] and table[1, :3].tolist() == [0.0, 0.0, 3.0] and np.isnan(table[1, 3])
    )
    assert [len(trace.of_layer(layer)) for layer in header.layers] == [1, 1]
    with pytest.raises(ConfigError, match="more than one token"):
        next_token([trace])


def test_first_tokens_only(trace: Trace) -> None:
    assert paths_in(trace, 2).chosen.tolist() == joined([paths_in(trace)]).chosen[:2].tolist()
    assert sum(len(part.order) for part in stretches(trace, 2)) == 4
