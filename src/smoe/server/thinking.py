"""What a model thinks before it answers: `<think>` ... `</think>` at the beginning of what it writes, as Qwen3 and
DeepSeek have it. Clients get it in a field of its own, not in the answer.

    <think> I see. </think> Yes.     the model begins to think, or does not
    I see. </think> Yes.             the prompt has begun for it, as some templates do

Space around either part is neither's.
"""

from __future__ import annotations

from smoe.generation.detokenizer import overlap

BEGIN, END = "<think>", "</think>"
TOKENS = (BEGIN, END)
"""What is looked for; where texts leave it out, as a special token, the caller of `push` writes it."""


def may_think(template: str) -> bool:
    """Whether a model of this chat template writes thoughts in this form."""
    return BEGIN in template or END in template


def is_begun(prompt: str) -> bool:
    """Whether a prompt ends within a thought."""
    return prompt.rstrip().endswith(BEGIN)


def is_open(text: str) -> bool:
    """Whether a text ends within a thought."""
    return text.rfind(BEGIN) > text.rfind(END)


class Thinking:
    """Reads one text as it comes; `push` and `flush` return (reasoning, answer)."""

    def __init__(self, is_begun: bool) -> None:
        self._held = ""
        self._is_begun, self._is_over = is_begun, False
        self._is_blank = True
        """Whether the present part has only blanks so far."""

    @property
    def is_thinking(self) -> bool:
        return self._is_begun and not self._is_over

    def push(self, text: str) -> tuple[str, str]:
        """Some more."""
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
                self._is_over, self._is_blank = True, False  # an answer keeps the space that it begins with
                return "", self._all()
        return self._thought()

    def flush(self) -> tuple[str, str]:
        """That was all: a thought may have been cut off."""
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
        """Without the space that a part begins with."""
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return text

    def _all(self) -> str:
        held, self._held = self._held, ""
        return held
