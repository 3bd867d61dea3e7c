"""The rows of the KV cache in which texts are generated, and the reuse of earlier texts: if a new text has the same
beginning, the beginning is not computed again.

Rows that are decoded together have the lowest numbers. Some models cannot compute several texts in one pass: those with
recurrent layers or an unknown attention, and those whose attention was found to mix rows. Their texts are decoded one
after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe.generation.prompt_images import PromptImages, piece_end
from smoe.generation.row_text import RowText
from smoe.models.kv_cache import RowCache
from smoe.models.text_rows import TextRows
from smoe.runtime.engine import Engine

_NEAR = 0.05
"""The largest allowed difference between a text's logits in a batch and alone, as a fraction of the largest logit.
Rounding causes a tenth of it; the keys of another text cause far more."""

_log = logging.getLogger(__name__)


class Rows:
    """The rows of one KV cache: `max_sequences` rows with `context_tokens` positions each. Each row holds the keys and
    values of one text."""

    def __init__(self, model: PreTrainedModel, engine: Engine) -> None:
        self._model = model
        count = engine.config.max_sequences
        self._alone = engine.new_caches()
        self._texts: TextRows | None = None
        if all(cache.can_rewind for cache in self._alone):
            self._alone, self._texts = [], TextRows(engine.new_cache(count), model.config.get_text_config())
        self._held = [RowText() for _ in range(count)]
        self._images: list[PromptImages | None] = [None] * count
        """For each row, the images of the prompt for which the row was taken."""
        self._whole = [0] * count
        """For each row, the length of the prompt for which the row was taken. The rotary factors of all pieces of the
        prompt depend on this length."""
        self._rotary, self._piece = engine.rotary, engine.config.prefill_tokens
        self._image_pass = engine.passes.image_pass
        self._is_taken = [False] * count
        self._used = [0] * count
        """When each row was last taken: a larger number means later."""
        self._turns = 0
        can_share = self._texts is not None and engine.passes.rows_of_pass is not None
        self.share_passes: bool | None = None if can_share else False
        """Whether several texts in one pass have the same results as alone; None: not tested yet."""

    @property
    def is_lost(self) -> bool:
        """Whether another KV cache has taken the memory of these rows."""
        caches = self._alone if self._texts is None else [self._texts.whole]
        return any(cache.is_retired for cache in caches)

    @property
    def has_free(self) -> bool:
        """Whether a row of the KV cache is free for another text."""
        return not all(self._is_taken)

    def known(self, ids: Sequence[int]) -> int:
        """Return how many first tokens of this prompt are in a row of the KV cache already."""
        return max(self._common(ids))

    def take(self, ids: Sequence[int], images: PromptImages | None = None) -> tuple[int, int]:
        """Return (a free row for this prompt, the number of its first tokens that the row contains). The last token of
        the prompt is never counted, since its logits must be computed. `images`: the prompt's images.

        If the prompt continues the text of a free row, it gets this row. If only the beginning is the same, as in
        another conversation with the same template, the beginning is copied to an empty row, or to the least recently
        used one.
        """
        self._turns += 1
        free = [row for row, is_taken in enumerate(self._is_taken) if not is_taken]
        common = self._common(ids if images is None else images.keys, images)
        best = max(range(len(common)), key=lambda row: (common[row], not self._is_taken[row]))
        row = best
        if self._is_taken[best] or 2 * common[best] < len(self._held[best].ids):
            row = min(free, key=lambda row: (bool(self._held[row].ids), self._used[row]))
        if self._texts is not None:
            if row != best:
                self._texts.copy(best, row, common[best])
                self._held[row] = self._held[best].beginning(common[best])
                common[row] = common[best]
            self._texts.rewind(row, common[row])
        elif not common[row]:
            self._alone[row].reset()
        self._held[row].cut(common[row])
        self._is_taken[row], self._used[row], self._whole[row] = True, self._turns, len(ids)
        self._images[row] = images
        return row, common[row]

    def _common(self, keys: Sequence[int], images: PromptImages | None = None) -> list[int]:
        """Return, for each row, how many first tokens this prompt can reuse. The prompt's last token is not counted.
        Rows with other rotary factors count 0. `keys`: the tokens, with hashes in place of those of images."""
        factors = self._rotary.rule.factors(len(keys))
        common = [min(held.in_common(keys, factors), len(keys) - 1) for held in self._held]
        if images is not None:
            common = [images.reusable(n) for n in common]
        if self._texts is None:  # a recurrent state can only be continued at its end
            common = [n if n == len(self._held[row].ids) else 0 for row, n in enumerate(common)]
        return common

    def free(self, row: int, is_whole: bool) -> None:
        """Free a row of the KV cache. Its text stays until another text needs the row. If `is_whole` is false, the text
        is deleted."""
        self._is_taken[row] = False
        if not is_whole:
            self._restart(row)

    def _restart(self, row: int) -> None:
        self._held[row] = RowText()
        if self._texts is not None:
            self._texts.rewind(row, 0)
        else:
            self._alone[row].reset()

    def exchange(self, a: int, b: int) -> None:
        """Exchange the texts of two rows."""
        for own in (self._held, self._whole, self._is_taken, self._used, self._alone, self._images):
            _swap(own, a, b)
        if self._texts is not None:
            self._texts.exchange(a, b)

    def read(self, row: int, ids: Sequence[int]) -> torch.Tensor:
        """Process further tokens of the prompt in a row. Return the logits [V] after the last of these tokens."""
        return self._one(row, ids)

    def read_again(self, row: int, ids: Sequence[int]) -> torch.Tensor:
        """Process a whole prompt in a row, whose old content is deleted. Return the logits [V] after the last token."""
        self._restart(row)
        return self._one(row, ids)

    def read_together(self, first: int, prompts: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
        """Process whole prompts in one pass, in the rows from `first` on. Return the logits [V] after each prompt."""
        rows = range(first, first + len(prompts))
        if self.share_passes is None:
            shortest = min(range(len(prompts)), key=lambda n: len(prompts[n]))
            alone = self.read_again(rows[shortest], prompts[shortest])
            together = self._begin_together(first, prompts)
            if self._find_out([together[shortest]], [alone]):
                return together
        if not self.share_passes:
            return [self.read_again(row, ids) for row, ids in zip(rows, prompts, strict=True)]
        return self._begin_together(first, prompts)

    def _begin_together(self, first: int, prompts: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
        texts, longest = self._texts, max(map(len, prompts))
        assert texts is not None
        window = texts.new_window(first, [len(ids) for ids in prompts])
        lines = [[*([0] * (longest - len(ids))), *ids] for ids in prompts]
        positions = [[*([0] * (longest - len(ids))), *range(len(ids))] for ids in prompts]
        logits = self._pass(lines, window, positions)
        texts.note(window, first)
        for row, ids in enumerate(prompts, start=first):
            self._held[row] = RowText()
            self._held[row].extend(ids, self._rotary.rule.factors(len(ids)))
        return list(logits)

    def decode(self, tokens: Sequence[int]) -> Sequence[torch.Tensor | Exception]:
        """Process one token in each of the first rows of the KV cache. Return the logits [V] after each token. If rows
        are decoded one after the other, return the error of a row that has failed in place of its logits."""
        if len(tokens) == 1 or self.share_passes is False or any(map(self._is_switch, range(len(tokens)))):
            return [self._attempt(row, token) for row, token in enumerate(tokens)]
        if self.share_passes is None:
            return self._found_out(tokens)
        return self._together(tokens)

    def decode_alone(self, row: int, token: int) -> torch.Tensor:
        """Process one token in a row. Return the logits [V] after it. If the rotary factors change at this length, the
        whole text is computed again."""
        if not self._is_switch(row):
            return self._one(row, [token])
        keys, images = [*self._held[row].ids, token], self._images[row]
        ids = keys if images is None else images.ids_of(keys)
        self._restart(row)
        self._whole[row] = len(ids)
        while True:
            begin = len(self._held[row].ids)
            end = piece_end(images, begin, min(len(ids), begin + self._piece))
            logits = self._one(row, ids[begin:end])
            if end == len(ids):
                return logits

    def _attempt(self, row: int, token: int) -> torch.Tensor | Exception:
        try:
            return self.decode_alone(row, token)
        except Exception as error:  # affects this row only: earlier rows have their token
            return error

    def _is_switch(self, row: int) -> bool:
        return self._rotary.is_switch(len(self._held[row].ids))

    def _found_out(self, tokens: Sequence[int]) -> Sequence[torch.Tensor]:
        """Test whether texts can share a pass, by computing the first step of several rows both alone and together. A
        position may be written twice."""
        lengths = [len(self._held[row].ids) for row in range(len(tokens))]
        alone = []
        for row, token in enumerate(tokens):
            alone.append(self._one(row, [token]))
            self._take_back(row, lengths[row])
        together = self._together(tokens)
        if self._find_out(together, alone):
            return together
        for row, length in enumerate(lengths):
            self._take_back(row, length)
        return [self._one(row, [token]) for row, token in enumerate(tokens)]

    def _find_out(self, together: Sequence[torch.Tensor], alone: Sequence[torch.Tensor]) -> bool:
        self.share_passes = all(map(_are_near, together, alone))
        if not self.share_passes:
            _log.warning(
                "texts are computed one after the other, because this model's results differ if several texts are "
                "computed together; nothing needs to be done"
            )
        return self.share_passes

    def _together(self, tokens: Sequence[int]) -> Sequence[torch.Tensor]:
        texts, count = self._texts, len(tokens)
        assert texts is not None
        texts.align(range(count))
        window = texts.window(0, count)
        positions = [[length + self._shift(row)] for row, length in enumerate(texts.lengths[:count])]
        logits = self._pass([[token] for token in tokens], window, positions)
        texts.note(window, 0)
        for row, token in enumerate(tokens):
            self._held[row].extend([token], self._rotary.rule.factors(texts.lengths[row]))
        return list(logits)

    def _one(self, row: int, ids: Sequence[int]) -> torch.Tensor:
        begin, images = len(self._held[row].ids), self._images[row]
        cache = self._alone[row] if self._texts is None else self._texts.window(row)
        positions = [place + self._shift(row) for place in range(begin, begin + len(ids))]
        whole = max(self._whole[row], begin + len(ids))
        more, keys = {}, ids
        if images is not None and begin < len(images.ids):
            images.encode(begin, begin + len(ids), self._image_pass)
            more, keys = images.arguments(ids, begin), images.keys_of(ids, begin)
        with self._rotary.reading([whole]):
            logits = self._pass([list(ids)], cache, [positions], more)
        if self._texts is not None:
            self._texts.note(cache, row)  # type: ignore[arg-type]
        self._held[row].extend(keys, self._rotary.rule.factors(whole))
        return logits[0]

    def _shift(self, row: int) -> int:
        """Return the number that is added to the index of a generated token to get its position. It differs from 0 if
        the tokens of an image share positions."""
        images = self._images[row]
        return 0 if images is None else images.shift

    def _take_back(self, row: int, length: int) -> None:
        self._held[row].cut(length)
        assert self._texts is not None
        self._texts.forget(row, length)

    def _pass(
        self, ids: list[list[int]], cache: RowCache, positions: list[list[int]], more: Mapping[str, Any] = {}
    ) -> torch.Tensor:
        """Return the logits [rows, V] after the last token of each row. `ids`, `positions`: [rows, new tokens]; `more`:
        further arguments of the model's forward function, which replace the usual ones."""
        device = self._model.device
        given = torch.tensor(ids, device=device)
        other = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in more.items()}
        arguments = {"position_ids": torch.tensor(positions, device=device), "logits_to_keep": 1} | other
        output = self._model(input_ids=given, past_key_values=cache, use_cache=True, **arguments)
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def _swap(of_rows: list[Any], a: int, b: int) -> None:
    if of_rows:
        of_rows[a], of_rows[b] = of_rows[b], of_rows[a]


def _are_near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours.float() - theirs.float()).abs().max() <= _NEAR * theirs.float().abs().max())
