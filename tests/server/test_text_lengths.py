"""Texts over HTTP whose positions are turned by factors of their length, and contexts that YaRN makes longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests import oracle, published_rope
from tests.published_rope import ORIGINAL
from tests.server.conftest import Running, served
from tests.toy import ascii_tokenizer

NAMES = ("Phi-3.5-MoE, two scales", "dynamic", "longrope in another family", "Qwen3, YaRN by its card")
TOKENIZER = ascii_tokenizer()
TEXT = [3 + 7 * n % 89 for n in range(80)]


@pytest.fixture(scope="module", params=NAMES)
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("served")
    own = {"vocab_size": len(TOKENIZER), "eos_token_id": len(TOKENIZER) - 1}
    return request.param, published_rope.save(request.param, folder, **own)


@pytest.fixture
def running(toy: tuple[str, Path], open_model: Callable[..., Any]) -> Iterator[Running]:
    with served(open_model(toy[1], "half", max_sequences=2), TOKENIZER) as server:
        yield server


def complete(running: Running, ids: list[int], tokens: int) -> Any:
    banned = {str(len(TOKENIZER) - 1): -100}
    return running.client.completions.create(
        model="demo", prompt=ids, max_tokens=tokens, temperature=0, logit_bias=banned
    )


def test_a_conversation_across_the_original_length(running: Running, toy: tuple[str, Path]) -> None:
    name, folder = toy
    reused = []
    for end, tokens in ((ORIGINAL - 8, 4), (ORIGINAL - 2, 6), (ORIGINAL + 14, 3), (ORIGINAL - 6, 3)):
        ids = TEXT[:end]
        made = oracle.greedy(published_rope.reference(name, folder), torch.tensor([ids]), tokens).tokens[0, end:]
        answer = complete(running, ids, tokens)
        assert answer.choices[0].text == TOKENIZER.decode(made)
        reused.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert reused[1] >= ORIGINAL - 8, "below the original length nothing has changed"
    is_by_length, is_read_again = published_rope.PUBLISHED[name].is_by_length, name.startswith("Phi")
    assert reused[2] == (0 if is_by_length and not is_read_again else ORIGINAL - 2)
    assert not is_read_again or reused[3] == 0, "all that is there was turned for a long text"


def test_what_is_beyond_the_context_is_refused(running: Running) -> None:
    room = running.serving.engine.context_tokens
    with pytest.raises(openai.BadRequestError, match="smoe serve --context"):
        complete(running, TEXT[:10] * 20, 1)
    assert room > ORIGINAL + 8, "more than `max_position_embeddings`"
