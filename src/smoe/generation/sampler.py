"""Chooses the next token of one text from logits. It uses the logits processors of transformers, a random generator of
its own, and a constraint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from smoe.errors import ModelError
from smoe.generation.request import Constraint, Likely
from smoe.generation.sampling_settings import Sampling


class Sampler:
    """Chooses the tokens of one text. Equal seeds, prompts and logits give equal tokens, whatever other texts are
    generated."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: GenerationConfig,
        sampling: Sampling,
        prompt: Sequence[int],
        logprobs: int | None,
        constraint: Constraint | None,
    ) -> None:
        """`config`: `sampling` in the form of transformers (`choices.generation_config`)."""
        prepared: GenerationConfig
        prepared, _ = model._prepare_generation_config(config)
        model._prepare_special_tokens(prepared, True, device=model.device)
        self._draws = bool(prepared.do_sample)
        self._processors = model._get_logits_processor(prepared, input_ids_seq_length=len(prompt), device=model.device)
        self._generator = torch.Generator(model.device).manual_seed(sampling.seed)
        self._ids = torch.tensor([list(prompt)], device=model.device) if len(self._processors) else None
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._bias = dict(sampling.logit_bias)
        self._window = sampling.repetition_window
        self._counts: dict[int, int] = {}
        """How often each token has occurred after the prompt."""
        self._logprobs = logprobs
        self._constraint = constraint

    def choose(self, logits: torch.Tensor) -> tuple[int, float | None, tuple[Likely, ...]]:
        """Return (the next token, its log probability, the most probable tokens) from logits [V]. The probabilities are
        returned if they were requested. Raise `ModelError` if the logits contain NaN."""
        scores = logits.to(dtype=torch.float32, copy=True).unsqueeze(0)
        if bool(torch.isnan(scores).any()):
            raise ModelError(
                "the model computed NaN; its weights or its config.json are damaged (check with smoe verify) or its "
                "dtype is too narrow (try `dtype=bfloat16` or float32)"
            )
        plain = scores[0].log_softmax(0) if self._logprobs is not None else None
        self._penalise(scores[0])
        if self._constraint is not None:
            self._constraint.narrow(scores[0])
        if self._ids is not None:
            scores = self._processed(self._ids, scores)
        if self._draws:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        else:
            token = int(scores.argmax())
        self._note(token)
        if plain is None:
            return token, None, ()
        best = plain.topk(self._logprobs or 0)
        top = tuple(map(Likely, best.indices.tolist(), best.values.tolist()))
        return token, float(plain[token]), top

    def _processed(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits after the logits processors of transformers. If a window is set, the processor that
        penalises repetition gets the last tokens only."""
        if self._window is None:
            processed: torch.Tensor = self._processors(ids, scores)
            return processed
        for processor in self._processors:
            is_windowed = isinstance(processor, RepetitionPenaltyLogitsProcessor)
            scores = processor(ids[:, -self._window :] if is_windowed else ids, scores)
        return scores

    def _penalise(self, scores: torch.Tensor) -> None:
        """Apply OpenAI's presence and frequency penalties, and the bias of single tokens."""
        if self._counts and (self._presence or self._frequency):
            tokens = torch.tensor(list(self._counts), device=scores.device)
            counts = torch.tensor(list(self._counts.values()), device=scores.device, dtype=scores.dtype)
            scores[tokens] -= self._presence + self._frequency * counts
        for token, bias in self._bias.items():
            scores[token] += bias

    def _note(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._constraint is not None:
            self._constraint.take(token)
        if self._ids is not None:
            self._ids = torch.cat([self._ids, self._ids.new_tensor([[token]])], 1)
