"""A conversation in which every token is computed once: all turns use the same row of the KV cache.

The tokens of each turn are compared with those in the row (`rows.py`), and only the new ones are computed. Without a
chat template, each message continues the text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from smoe.conversation.conversation import Conversation
from smoe.conversation.prompt import ConversationPrompts, Written
from smoe.errors import ChatTemplateError
from smoe.generation.detokenizer import OnText
from smoe.generation.generate import Generation, generate_batch
from smoe.generation.library_settings import end_tokens
from smoe.generation.loop import DecodeLoop
from smoe.generation.sampling_settings import Sampling
from smoe.runtime.engine import Engine


class Chat:
    """One conversation with one model. Turn n (from 0) is sampled with the seed `sampling.seed` + n."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, sampling: Sampling, *, parses_control_tokens: bool = False
    ) -> None:
        """`parses_control_tokens`: whether the text of a control token in a message becomes that token."""
        engine: Engine = model.offload  # type: ignore[assignment]
        self._prompts = ConversationPrompts(
            tokenizer, engine.context_tokens, parses_control_tokens=parses_control_tokens
        )
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._messages: list[dict[str, str]] = []
        self._ids: list[int] = []
        """All tokens so far; the row of the KV cache contains the first of them."""
        self._text = ""
        """The rendered conversation so far, including the last answer."""
        self._loop = DecodeLoop(model, tokenizer)
        self._turns = 0
        self.reused_tokens = 0
        """The number of tokens of the last turn that were reused from the KV cache."""

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template, which marks the turns. Otherwise each message continues the text."""
        return self._prompts.template.exists

    @property
    def tokens(self) -> int:
        """The number of tokens of the conversation so far."""
        return len(self._ids)

    def say(self, message: str, on_text: OnText | None = None) -> Generation:
        """Generate the answer to `message`. If the answer is interrupted, its beginning stays in the conversation. If
        the turn fails, the conversation is unchanged."""
        text, ids = self._next_turn(message)
        sampling = replace(self._sampling, seed=self._sampling.seed + self._turns)
        generation = generate_batch(self._model, self._tokenizer, [ids], sampling, on_text, self._loop)
        self.reused_tokens = generation.reused_tokens
        self._turns += 1
        answer = generation.answers[0]
        self._ids, self._text = ids + answer.token_ids, text + answer.text
        self._messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer.text.strip()}]
        return generation

    def reset(self) -> None:
        """Delete the conversation. The seed is not reset, so the same question may get a different answer."""
        self._messages.clear()
        self._ids, self._text = [], ""
        self._loop = DecodeLoop(self._model, self._tokenizer)

    def _next_turn(self, message: str) -> tuple[str, list[int]]:
        """Return the conversation with `message` added, as (its text, its tokens). The text is empty if there is no
        template."""
        if self.has_template:
            turns = [*self._messages, {"role": "user", "content": message}]
            try:
                written = self._prompts.write(Conversation(turns))
            except ChatTemplateError as error:
                name = self._tokenizer.name_or_path
                raise type(error)(f"the chat template in {name} cannot write this conversation: {error}") from error
            return written.text, self._tokens_of(written)
        if not self._ids:
            return "", list(self._tokenizer(message)["input_ids"])
        return "", self._without_end() + self._plain("\n" + message)

    def _tokens_of(self, written: Written) -> list[int]:
        """Return the tokens of a rendered conversation. If it begins with the conversation so far, the tokens so far
        are used and only the new text is tokenized, because tokenizing a generated answer again may give other
        tokens."""
        if self._ids and written.text.startswith(self._text):
            return self._without_end() + self._prompts.encode(written, len(self._text))
        return self._prompts.encode(written)

    def _without_end(self) -> list[int]:
        """Return the tokens of the conversation so far. An end token of the last answer is left out, because the
        template writes its own."""
        ends = end_tokens(self._model, self._tokenizer)
        return self._ids[:-1] if self._ids[-1] in ends else list(self._ids)

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
