"""Texts whose positions are turned by factors of their length: below, across and beyond the original length, together,
in pieces, and after texts that begin like them.

Would catch: keys of other factors that are used again, a row that has the factors of a longer text in the same pass,
a text that grows past the original length and is not read again where the library does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from smoe.generation.loop import DecodeLoop
from smoe.generation.request import End, Piece, Request
from smoe.generation.rows import Rows
from smoe.generation.sampler import Sampler
from smoe.generation.sampling_settings import Sampling
from tests import oracle, published_rope
from tests.generation.test_loop import NoText
from tests.published_rope import ORIGINAL, PUBLISHED

CHANCE = torch.Generator().manual_seed(5)
TEXT: list[int] = torch.randint(3, 110, (80,), generator=CHANCE).tolist()
OTHER: list[int] = torch.randint(3, 110, (80,), generator=CHANCE).tolist()
NAMES = [name for name, published in PUBLISHED.items() if published.is_by_length]
SAME_FOR_ALL_LENGTHS = ("Qwen3, YaRN by its card", "linear", "llama3", "yarn, by layers")
READ_AGAIN = ("Phi-3.5-MoE", "Phi-3.5-MoE, two scales")

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            folders[name] = published_rope.save(name, tmp_path_factory.mktemp("published"))
        return folders[name]

    return save


def theirs(name: str, folder: Path, ids: Sequence[int], tokens: int) -> list[torch.Tensor]:
    """Logits of the unmodified library, just loaded, greedily."""
    prompt = torch.tensor([list(ids)])
    return [logits[0] for logits in oracle.greedy(published_rope.reference(name, folder), prompt, tokens).logits]


def tokens_of_library(name: str, folder: Path, ids: Sequence[int], tokens: int) -> list[int]:
    made = oracle.greedy(published_rope.reference(name, folder), torch.tensor([list(ids)]), tokens).tokens
    return [int(token) for token in made[0, len(ids) :]]


class Asking:
    """Greedy requests to one loop, with the logits of each."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = DecodeLoop(model, NoText())
        self._logits: dict[Any, list[torch.Tensor]] = {}
        choose = Sampler.choose

        def noting(sampler: Sampler, logits: torch.Tensor) -> Any:
            self._logits.setdefault(sampler, []).append(logits.clone())
            return choose(sampler, logits)

        monkeypatch.setattr(Sampler, "choose", noting)

    def ask(self, *asked: tuple[Sequence[int], int]) -> tuple[list[Request], list[list[torch.Tensor]]]:
        """Prompts, and how many tokens each gets: all at once."""
        self._logits.clear()
        requests, events = [], list[Piece | End]()
        for ids, tokens in asked:
            sampling = Sampling(max_new_tokens=tokens, ignores_end=True)
            requests.append(Request(ids, sampling, events.append))
            self.loop.hand_in(requests[-1])
        self.loop.run(until_idle=True)
        assert not [what.error for what in events if isinstance(what, End) and what.error]
        return requests, list(self._logits.values())


def assert_same(ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(ours) == len(expected)
    for step, (mine, of_library) in enumerate(zip(ours, expected, strict=True)):
        assert torch.equal(mine.float(), of_library.float()), f"step {step} differs"


def assert_near(ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Rounding apart: read in other pieces, or after keys that were read in other pieces."""
    assert len(ours) == len(expected)
    for step, (mine, of_library) in enumerate(zip(ours, expected, strict=True)):
        assert oracle.relative_error(mine, of_library) < 1e-4, f"step {step} differs"


@pytest.mark.parametrize("name", [*NAMES, *SAME_FOR_ALL_LENGTHS])
def test_texts_one_after_the_other_have_the_librarys_bits(
    name: str, saved: Callable[[str], Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer text before a shorter one: the library's own `dynamic` factors would stay those of the longer one."""
    folder = saved(name)
    asking = Asking(open_model(folder, "half"), monkeypatch)
    for ids, tokens in ((TEXT[:50], 4), (OTHER[: ORIGINAL - 3], 8), (TEXT[1:38], 3), (OTHER[2:12], 3)):
        _, (ours,) = asking.ask((ids, tokens))
        assert_same(ours, theirs(name, folder, ids, tokens))


@pytest.mark.parametrize("name", NAMES)
def test_no_beginning_is_used_again_with_other_factors(
    name: str, saved: Callable[[str], Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that grows past the original length: what was turned for the shorter text is read again."""
    folder = saved(name)
    asking = Asking(open_model(folder, "half"), monkeypatch)
    (below,), _ = asking.ask((TEXT[: ORIGINAL - 12], 4))
    grown = [*TEXT[: ORIGINAL - 12], *below.new_ids[:3]]
    still_below = [*grown, *OTHER[: ORIGINAL - len(grown)]]
    (again,), (ours,) = asking.ask((still_below, 1))
    assert again.reused_tokens == len(grown), "below the original length nothing has changed"
    assert_near(ours, theirs(name, folder, still_below, 1))
    beyond = [*still_below, *OTHER[:9]]
    (long,), (ours,) = asking.ask((beyond, 3))
    assert long.reused_tokens == 0
    assert_same(ours, theirs(name, folder, beyond, 3))
    (short,), (ours,) = asking.ask((still_below[:-2], 2))
    assert short.reused_tokens == 0
    assert_same(ours, theirs(name, folder, still_below[:-2], 2))


@pytest.mark.parametrize("name", NAMES)
def test_beyond_the_original_length_a_beginning_is_used_where_its_factors_are_the_same(
    name: str, saved: Callable[[str], Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(name)
    asking = Asking(open_model(folder, "half"), monkeypatch)
    asking.ask((TEXT[:40], 2))
    (request,), (ours,) = asking.ask((TEXT[:50], 3))
    has_one_set = "longrope" in str(PUBLISHED[name].fields)
    assert request.reused_tokens == (40 if has_one_set else 0)
    assert_near(ours, theirs(name, folder, TEXT[:50], 3))


@pytest.mark.parametrize("name", READ_AGAIN)
def test_a_text_that_was_read_again_is_gone_on_with(
    name: str, saved: Callable[[str], Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(name)
    asking = Asking(open_model(folder, "half"), monkeypatch)
    (first,), _ = asking.ask((TEXT[: ORIGINAL - 2], 7))
    grown = [*TEXT[: ORIGINAL - 2], *first.new_ids[:-1]]
    more = [*grown, *OTHER[:4]]
    (second,), (ours,) = asking.ask((more, 2))
    assert second.reused_tokens == len(grown), "after the switch all of it has the long factors"
    assert_near(ours, theirs(name, folder, more, 2))


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_one_pass_have_factors_of_their_own(
    name: str, saved: Callable[[str], Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text beyond the original length, one that grows across it, one below: read together, decoded together."""
    folder = saved(name)
    asking = Asking(open_model(folder, "half", max_sequences=3, prefill_tokens=192), monkeypatch)
    asked = [(TEXT[:45], 8), (OTHER[: ORIGINAL - 3], 8), (OTHER[10:19], 8)]
    requests, _ = asking.ask(*asked)
    for request, (ids, tokens) in zip(requests, asked, strict=True):
        assert request.new_ids == tokens_of_library(name, folder, ids, tokens)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_a_prompt_have_the_factors_of_the_whole(
    name: str, saved: Callable[[str], Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a text that is read again for one more token."""
    folder = saved(name)
    asking = Asking(open_model(folder, "half", prefill_tokens=10), monkeypatch)
    for ids, tokens in ((TEXT[:45], 3), (OTHER[: ORIGINAL - 2], 5)):
        _, (ours,) = asking.ask((ids, tokens))
        assert_near(ours, theirs(name, folder, ids, tokens))


def test_a_row_that_fails_to_be_read_again_leaves_the_others_alone(
    saved: Callable[[str], Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch rows that have had their token and are given it a second time."""
    name = "Phi-3.5-MoE"
    folder = saved(name)
    model = open_model(folder, "half", max_sequences=2)
    loop, begun = DecodeLoop(model, NoText()), Rows._restart
    events: list[list[Piece | End]] = [[], []]
    failed: list[int] = []
    asked = [(OTHER[:9], 8), (TEXT[: ORIGINAL - 3], 8)]
    requests = [
        Request(ids, Sampling(max_new_tokens=tokens, ignores_end=True), mine.append)
        for (ids, tokens), mine in zip(asked, events, strict=True)
    ]
    for request in requests:
        loop.hand_in(request)

    def failing(rows: Rows, row: int) -> None:
        if rows._is_switch(row) and not failed:
            failed.append(row)
            raise RuntimeError("no memory")
        begun(rows, row)

    monkeypatch.setattr(Rows, "_restart", failing)
    loop.run(until_idle=True)
    assert isinstance(events[1][-1], End) and str(events[1][-1].error) == "no memory"
    assert requests[0].new_ids == tokens_of_library(name, folder, *asked[0])
