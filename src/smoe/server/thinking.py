"""Separates a model's reasoning from its answer: `<think>` ... `</think>` at the beginning of a text, as of Qwen3 and
DeepSeek. Clients get the reasoning in a field of its own.

    <think> I see. </think> Yes.     the model begins to reason, or does not
    I see. </think> Yes.             the prompt contains the beginning, as some templates write it

Space around either part is removed.
"""

from __future__ import annotations

from smoe.generation.detokenizer import overlap

BEGIN, END = "<think>", "</think>"
TOKENS = (BEGIN, END)
"""The markers. Where decoding leaves them out as special tokens, the caller adds their text to `push`."""


def may_think(template: str) -> bool:
    """Return whether a model with this chat template writes reasoning in this form."""
    return BEGIN in template or END in template


def is_begun(prompt: str) -> bool:
    """Return whether a prompt ends with the marker that begins reasoning."""
    return prompt.rstrip().endswith(BEGIN)


def is_open(text: str) -> bool:
    """Return whether a text ends within reasoning."""
    return text.rfind(BEGIN) > text.rfind(END)


class Thinking:
    """Parses one text piece by piece; `push` and `flush` return (reasoning, answer)."""

    def __init__(self, is_begun: bool) -> None:
        self._held = ""
        self._is_begun, self._is_over = is_begun, False
        self._is_blank = True
        """Whether the current part has only spaces so far."""

    @property
    def is_thinking(self) -> bool:
        return self._is_begun and not self._is_over

    def push(self, text: str) -> tuple[str, str]:
        """Parse the next piece of text."""
        if self._is_over:
            return "", self._inner(text)
        self._held += text
        if not self._is_begun:
            begin = self._held.lstrip()
            if begin.startswith(BEGIN):
                self._is_begun, self._held = True, begin.removeprefix(BEGIN)
            elif BEGIN.startswith(begin):
                return "", ""
            else:
                self._is_over, self._is_blank = True, False  # an answer without reasoning keeps its initial space
                return "", self._all()
        return self._thought()

    def flush(self) -> tuple[str, str]:
        """Parse the end of the text; the reasoning may be incomplete."""
        held = self._all()
        return (self._inner(held.rstrip()), "") if self.is_thinking else ("", held)

    def _thought(self) -> tuple[str, str]:
        end = self._held.find(END)
        if end >= 0:
            thought, answer = self._inner(self._held[:end].rstrip()), self._held[end + len(END) :]
            self._held, self._is_over, self._is_blank = "", True, True
            return thought, self._inner(answer)
        cut = len(self._held[: len(self._held) - overlap(self._held, END)].rstrip())
        thought, self._held = self._held[:cut], self._held[cut:]
        return self._inner(thought), ""

    def _inner(self, text: str) -> str:
        """Remove the space at the beginning of a part."""
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return text

    def _all(self) -> str:
        held, self._held = self._held, ""
        return held
