"""Texts in the rows of one cache, beside a plain dict of lists."""

from __future__ import annotations

import random

import pytest
import torch

from smoe.models.kv_cache import RowCache
from smoe.models.text_rows import TextRows
from tests import zoo

ROWS, CAPACITY = 4, 24


class Pages:
    """A cache whose keys are the tokens themselves; `texts` is what ought to be there."""

    def __init__(self, family: str) -> None:
        self.config = zoo.make(family).config.get_text_config()
        self.rows = TextRows(RowCache(self.config, ROWS, CAPACITY), self.config)
        self.texts: dict[int, list[int]] = {row: [] for row in range(ROWS)}

    def write(self, first: int, tokens: list[list[int]]) -> None:
        """A pass over new tokens of the rows `first` and following; what attention sees of each is its own text."""
        window = self.rows.window(first, len(tokens))
        given = torch.tensor(tokens, dtype=torch.float32).view(len(tokens), 1, -1, 1).expand(-1, 2, -1, 3)
        window.begin(given.shape[2], len(tokens))
        for layer in window.layers:
            keys, values = layer.update(given, -given)
            assert torch.equal(keys, -values)
            for n, new in enumerate(tokens):
                whole = [*self.texts[first + n], *new]
                shown = keys[n, 0, -len(whole) :, 0].tolist()
                assert shown == whole[-len(shown) :]
                window_size = getattr(layer, "sliding_window", None)
                assert len(shown) >= min(len(whole), window_size or len(whole))
        window.commit()
        self.rows.note(window, first)
        for n, new in enumerate(tokens):
            self.texts[first + n] += new


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_moves(family: str, seed: int) -> None:
    """Every text is whole whatever is written, exchanged, copied, taken back or brought into line around it."""
    chance, pages = random.Random(seed), Pages(family)
    rows, texts = pages.rows, pages.texts

    def some(most: int) -> list[int]:
        return [chance.randrange(1000) for _ in range(chance.randint(1, most))]

    for _ in range(120):
        a, b = chance.randrange(ROWS), chance.randrange(ROWS)
        move = chance.choice(["read", "decode", "decode", "decode", "exchange", "copy", "rewind", "forget"])
        if move == "read" and len(texts[a]) < CAPACITY:
            rows.rewind(a, len(texts[a]))
            pages.write(a, [some(CAPACITY - len(texts[a]))])
        elif move == "decode":
            count = a + 1
            if all(0 < len(texts[row]) < CAPACITY for row in range(count)):
                rows.align(range(count))
                pages.write(0, [[chance.randrange(1000)] for _ in range(count)])
        elif move == "exchange":
            rows.exchange(a, b)
            texts[a], texts[b] = texts[b], texts[a]
        elif move == "copy" and a != b:
            length = chance.randint(0, len(texts[a]))
            rows.copy(a, b, length)
            texts[b] = texts[a][:length]
        elif move == "rewind":
            length = chance.randint(0, len(texts[a]))
            rows.rewind(a, length)
            texts[a] = texts[a][:length]
        elif move == "forget":
            length = chance.randint(0, len(texts[a]))
            rows.forget(a, length)
            texts[a] = texts[a][:length]
    assert rows.lengths == [len(texts[row]) for row in range(ROWS)]


def test_a_window_claims_nothing_of_the_budget_and_ends_with_its_cache() -> None:
    pages = Pages("mixtral")
    pages.write(0, [[1, 2, 3]])
    window = pages.rows.window(0)
    assert (window.nbytes, window.reserved_tokens) == (0, 0) and pages.rows.whole.nbytes > 0
    pages.rows.whole.retire()
    with pytest.raises(Exception, match="uses the part of the memory budget"):
        window.begin(1, 1)


def test_layers_without_positions_have_no_window() -> None:
    config = zoo.make("qwen3_next").config
    rows = TextRows(RowCache(config, 2, 8), config)
    with pytest.raises(ValueError, match="recurrent state"):
        rows.window(0)
