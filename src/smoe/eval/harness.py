"""Runs tasks of the Language Model Evaluation Harness (`lm_eval`) token by token.

The harness would process contexts and answers in large batches, in which every expert is loaded and none is replaced.
Here its requests are processed as in generation, so that a threshold has the effect that users experience. It needs the
optional package `lm_eval`: `pip install lm_eval`. The harness downloads the tasks' data.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.eval.questions import Reader, Tick, answer
from smoe.generation.library_settings import end_tokens

_METRICS = ("exact_match", "acc", "em")
"""Names of metrics that score a single answer as right or wrong. Of these, the first one that a task has is used."""
_ANSWER_TOKENS = 256


class StepwiseLM(LM):  # type: ignore[misc]
    """A model in the form that the harness needs: log likelihoods and continuations of texts."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, tick: Tick) -> None:
        super().__init__()
        self._model = model
        self._tokenizer = tokenizer
        self._tick = tick

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        reader = Reader(self._model, self._tokenizer, self._tick)
        start = self._tokenizer.bos_token or self._tokenizer.eos_token or self._end()
        return [reader.likelihood(context or start, continuation) for context, continuation in _arguments(requests)]

    def _end(self) -> str:
        """Return the text of the end token. An empty context is replaced by this text if the tokenizer has no start
        token."""
        ends = sorted(end_tokens(self._model, self._tokenizer))
        return str(self._tokenizer.decode(ends[:1]))

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log likelihood of each text. A text longer than the context is divided into pieces. In each piece,
        the tokens after the first are predicted."""
        reader = Reader(self._model, self._tokenizer, self._tick)
        most = self._model.offload.context_tokens  # type: ignore[union-attr]
        found = []
        for (text,) in _arguments(requests):
            ids = list(self._tokenizer(text)["input_ids"])
            pieces = [ids[begin : begin + most] for begin in range(0, len(ids) - 1, most - 1)]
            found.append(sum(reader.likelihood_of(piece[:1], piece[1:])[0] for piece in pieces))
        return found

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        found = []
        for context, options in _arguments(requests):
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else list(stops)
            most = int(options.get("max_gen_toks", _ANSWER_TOKENS))
            reply = answer(self._model, self._tokenizer, context, most, stops, self._tick)
            found.append(min((reply.split(stop)[0] for stop in stops if stop), key=len, default=reply))
        return found


class Harness:
    """An exam (a function that asks a model questions) that consists of tasks of the harness, with at most `most`
    questions of each task."""

    def __init__(self, tasks: Sequence[str], folder: Path | None, most: int) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # lm_eval warns of every default of a task
        self._tasks = list(tasks)
        self._most = most
        self._manager = TaskManager(include_path=str(folder) if folder is not None else None)
        unknown = [name for name in tasks if name not in self._manager.all_tasks]
        if unknown:
            message = f"the evaluation harness has no task {unknown[0]!r}; lm_eval ls tasks lists them"
            raise ConfigError(message, setting="tasks", given=unknown[0], allowed="tasks that lm_eval ls tasks lists")

    def __call__(self, model: PreTrainedModel, tokenizer: Any, tick: Tick) -> list[bool]:
        """Return, for each question of each task, whether the answer was right."""
        found = simple_evaluate(
            StepwiseLM(model, tokenizer, tick),
            tasks=self._tasks,
            limit=self._most,
            task_manager=self._manager,
            bootstrap_iters=0,
            log_samples=True,
        )
        right: list[bool] = []
        for task, samples in sorted(found["samples"].items()):
            for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
                metric = next((name for name in _METRICS if name in sample), None)
                if metric is None:
                    raise ConfigError(
                        f"the lm_eval task {task!r} does not score answers as right or wrong; choose another task"
                    )
                right.append(bool(sample[metric]))
        return right


def _arguments(requests: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [request.args for request in requests]
