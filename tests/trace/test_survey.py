"""A survey of traces: what it refuses, what it leaves out and says so; and every picture drawn from next to nothing.

Would catch: two models in one picture, a picture that needs what a trace does not have, memory of the wrong layers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from smoe.errors import ConfigError
from smoe.trace.curves import turns
from smoe.trace.file import Trace, TraceWriter
from smoe.trace.pictures import PICTURES, drawn, miss_ratio
from smoe.trace.survey import survey
from tests.trace.written import Token, header_of, random_tokens, write

HEADER = header_of(experts=8, top_k=2)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return write(tmp_path / "a.trace", HEADER, random_tokens(HEADER, 40))


def test_every_picture_and_every_number(trace: Trace) -> None:
    found = survey([trace])
    assert found.left_out == {} and (found.tokens, found.recorded, found.sequences) == (40, 40, 2)
    pictures = drawn(found, "png")
    assert list(pictures) == list(PICTURES) and all(content.startswith(b"\x89PNG") for content in pictures.values())
    assert b"<svg" in drawn(found, "svg")["entropy"]
    numbers = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert found.ranks is not None and found.curves is not None
    assert numbers["ranks"]["reuse"] == pytest.approx(found.ranks.reuse.tolist(), rel=1e-5)
    assert numbers["curves"]["misses"] == {name: list(counts) for name, counts in found.curves.misses.items()}
    assert np.shape(numbers["times_even"]) == (2, 8) and np.shape(numbers["affinity"]["follows"]) == (8, 8)


def test_traces_of_one_model_are_taken_together(trace: Trace, tmp_path: Path) -> None:
    other = write(tmp_path / "b.trace", replace(HEADER, model="toy again"), random_tokens(HEADER, 40, seed=4))
    one, both = survey([trace]), survey([trace, other])
    assert (both.tokens, both.sequences, both.names) == (80, 4, ("toy", "toy again"))
    assert one.curves is not None and both.curves is not None and both.curves.steps == 2 * one.curves.steps
    even = (one.times_even + survey([other]).times_even) / 2
    np.testing.assert_allclose(both.times_even, even, rtol=1e-5)


@pytest.mark.parametrize("other", [header_of(9, 2), header_of(8, 2, layers=3), replace(HEADER, model_type="another")])
def test_traces_of_different_models_are_refused(trace: Trace, tmp_path: Path, other: object) -> None:
    assert isinstance(other, type(HEADER))
    second = write(tmp_path / "b.trace", other, random_tokens(other, 4))
    with pytest.raises(ConfigError, match=r"b\.trace is of another model .* in a run of its own"):
        survey([trace, second])


def test_a_trace_without_tokens_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "b.trace", HEADER):
        pass
    with pytest.raises(ConfigError, match="no tokens"):
        survey([Trace(tmp_path / "b.trace")])


def test_what_cannot_be_said_is_left_out_with_its_reason(tmp_path: Path) -> None:
    """A prompt of three tokens, routers of no known rule: use and entropy remain."""
    header = header_of(8, 2, rule=None)
    found = survey([write(tmp_path / "b.trace", header, [Token(([0, 1], [2, 3]), phase=0)] * 3)])
    assert found.left_out.keys() == {"ranks", "by_sequence", "affinity", "curves"}
    assert "follows no rule that smoe knows" in found.left_out["ranks"] and "only prompts" in found.left_out["curves"]
    assert list(drawn(found, "png")) == ["activation-by-sequence", "affinity", "entropy"]
    assert found.entropy.of_a_token is None and found.entropy.used.tolist() == [1.0, 1.0]
    json.dumps(found.as_json(), allow_nan=False)


def test_layers_of_different_widths(tmp_path: Path) -> None:
    """Ranks have no common meaning then; the rest is drawn."""
    first, second = HEADER.layers
    header = replace(HEADER, layers=(first, replace(second, experts=5, top_k=1)))
    tokens = [Token((chosen[0], [n % 5])) for n, (chosen, *_) in enumerate(random_tokens(HEADER, 40))]
    path = tmp_path / "b.trace"
    with TraceWriter(path, header) as writer:
        for step, token in enumerate(tokens):
            for layer, chosen in zip(header.layers, token.chosen, strict=True):
                rows = header.blank_rows(layer, 1)
                rows["step"], rows["phase"] = step, 1
                rows["top_k_index"][:, : layer.top_k] = chosen
                rows["top_k_weights"][:, : layer.top_k] = 1 / layer.top_k
                rows["router_logits"][:, : layer.experts] = np.isin(np.arange(layer.experts), chosen)
                writer.append(rows)
            writer.keep()
    found = survey([Trace(path)])
    assert found.left_out.keys() == {"ranks"} and "differ" in found.left_out["ranks"]
    assert found.affinity is not None and found.affinity.follows.shape == (8, 5)
    assert set(drawn(found, "png")) == set(PICTURES) - {"reuse-by-rank", "score-concentration"}
    assert found.as_json()["times_even"][1][5:] == [None] * 3


def test_memory_is_what_the_trace_says(trace: Trace, tmp_path: Path) -> None:
    known = replace(HEADER, expert_bytes=(4096, 8192))
    sized = write(tmp_path / "b.trace", known, random_tokens(HEADER, 4))
    assert sized.header == known and survey([sized]).experts_bytes == 8 * 4096 + 8 * 8192
    assert survey([trace]).experts_bytes is None and survey([trace, sized]).experts_bytes == 8 * 12288
    assert survey([sized], experts_bytes=99).experts_bytes == 99
    packed = write(tmp_path / "c.trace", replace(HEADER, expert_bytes=(4096, 4096)), random_tokens(HEADER, 4))
    assert survey([sized, packed]).experts_bytes is None


def test_titles_say_what_is_seen(trace: Trace, tmp_path: Path) -> None:
    found = survey([trace])
    titles = {name: PICTURES[name](found).get_suptitle() for name in PICTURES}  # type: ignore[union-attr]
    assert found.curves is not None and found.ranks is not None
    knee = turns(found.curves, "auto").knee
    assert knee is not None and f"The first {100 * found.curves.shares[knee]:.0f} %" in titles["miss-ratio"]
    assert f"in {100 * found.ranks.reuse[0]:.0f} % of cases" in titles["reuse-by-rank"]
    same = write(tmp_path / "b.trace", HEADER, [Token(([0, 1], [2, 3]))] * 30)
    assert title_of(same) == "Experts in memory from 12 to 25 %: 3.87 misses a token less, evenly, all the rest 0"
    once = write(tmp_path / "c.trace", HEADER, [Token(([0, 1], [2, 3]))])
    assert title_of(once) == "With 12 % of the experts in memory hardly more is missed than with all"


def title_of(trace: Trace) -> str:
    figure = miss_ratio(survey([trace]))
    assert figure is not None
    return str(figure.get_suptitle())


def test_first_tokens_only_and_it_is_said(trace: Trace) -> None:
    found = survey([trace], tokens=10)
    assert (found.tokens, found.recorded) == (10, 40) and "the first 10 tokens of 40" in found.size
    assert found.curves is not None and found.curves.steps == 10


def test_a_model_of_many_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoe.trace.curves.SHARES", (0.5, 1.0))
    header = header_of(experts=40, top_k=4, layers=60)
    found = survey([write(tmp_path / "b.trace", header, random_tokens(header, 17))], tokens=17)
    assert set(drawn(found, "png")) == set(PICTURES)
