"""A conversation that computes every token once: the decode loop keeps its row from turn to turn.

Each turn's tokens are compared with what the row holds (`rows.py`), and only what is new is computed. Without a chat
template the text is simply continued.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from smoe.conversation.conversation import Conversation
from smoe.conversation.prompt import ConversationPrompts, Written
from smoe.errors import ChatTemplateError
from smoe.generation.choices import end_tokens
from smoe.generation.detokenizer import OnText
from smoe.generation.generate import Generation, generate_batch
from smoe.generation.loop import DecodeLoop
from smoe.generation.sampling import Sampling
from smoe.runtime.engine import Engine


class Chat:
    """One conversation with one model. Turn n draws with the n-th seed from that of `sampling` on."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, sampling: Sampling, *, parses_control_tokens: bool = False
    ) -> None:
        """`parses_control_tokens`: text of control tokens in messages becomes those tokens."""
        engine: Engine = model.offload  # type: ignore[assignment]
        self._prompts = ConversationPrompts(
            tokenizer, engine.context_tokens, parses_control_tokens=parses_control_tokens
        )
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._messages: list[dict[str, str]] = []
        self._ids: list[int] = []
        """All tokens so far; the loop's row holds a beginning of them."""
        self._text = ""
        """What the template made of the conversation so far, and the last answer."""
        self._loop = DecodeLoop(model, tokenizer)
        self._turns = 0
        self.reused_tokens = 0
        """Tokens of the last turn that the cache had already."""

    @property
    def has_template(self) -> bool:
        """Whether turns are marked; else the text is simply continued."""
        return self._prompts.template.exists

    @property
    def tokens(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._ids)

    def say(self, message: str, on_text: OnText | None = None) -> Generation:
        """One turn. An interrupted answer stays in the conversation as far as it came; a failed turn leaves none."""
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
        """Forget the conversation. The seed goes on: asked again, the model may answer otherwise."""
        self._messages.clear()
        self._ids, self._text = [], ""
        self._loop = DecodeLoop(self._model, self._tokenizer)

    def _next_turn(self, message: str) -> tuple[str, list[int]]:
        """The conversation with one more message: its text, where there is a template, and its tokens."""
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
        """Earlier messages keep their tokens: an answer may be cut into others than its text would be."""
        if self._ids and written.text.startswith(self._text):
            return self._without_end() + self._prompts.encode(written, len(self._text))
        return self._prompts.encode(written)

    def _without_end(self) -> list[int]:
        """The tokens so far, less the end token of the last answer: the template writes its own."""
        ends = end_tokens(self._model, self._tokenizer)
        return self._ids[:-1] if self._ids[-1] in ends else list(self._ids)

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
