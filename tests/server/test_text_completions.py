"""Plain completions. Would catch prompts that are mixed up, and probabilities beside the wrong tokens."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from smoe.generation.generate import generate
from smoe.generation.sampling_settings import Sampling
from tests.server.conftest import Running, served

PROMPTS = ["Once upon a time", "The dog was", "One day, Tom"]


def complete(running: Running, prompt: Any, **fields: Any) -> Any:
    fields = {"max_tokens": 8, "temperature": 0, **fields}
    return running.client.completions.create(model="demo", prompt=prompt, **fields)


def test_each_prompt_is_gone_on_with_as_it_is_alone(running: Running, demo: Any, demo_tokenizer: Any) -> None:
    expected = [generate(demo, demo_tokenizer, [text], Sampling(max_new_tokens=8)).answers[0].text for text in PROMPTS]
    ids = [demo_tokenizer(text)["input_ids"] for text in PROMPTS]
    for prompt in (PROMPTS, ids):
        answer = complete(running, prompt)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert complete(running, PROMPTS[0]).choices[0].text == expected[0]
    assert complete(running, ids[1]).choices[0].text == expected[1]


def test_sixteen_tokens_unless_said_otherwise(running: Running) -> None:
    answer = complete(running, PROMPTS[0], max_tokens=openai.omit)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_a_stream_is_the_whole_text(running: Running) -> None:
    whole = complete(running, PROMPTS, n=2, max_tokens=12)
    texts = dict.fromkeys(range(6), "")
    last = None
    for chunk in complete(running, PROMPTS, n=2, max_tokens=12, stream=True, stream_options={"include_usage": True}):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert last is not None and last.usage.total_tokens == whole.usage.total_tokens


def test_logprobs_lie_beside_their_tokens(running: Running) -> None:
    choice = complete(running, PROMPTS[0], logprobs=2).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert [choice.text.startswith(token, place) for place, token in
            zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)] == [True] * 8  # fmt: skip
    for token, logprob, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values()) and len(top) == 2


def test_a_response_format_is_enforced(running: Running) -> None:
    schema = {"type": "object", "properties": {"age": {"enum": [7, 8]}}, "required": ["age"]}
    for form in ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
                 {"type": "json_object", "schema": schema}):  # fmt: skip
        texts = complete(running, PROMPTS, max_tokens=40, extra_body={"response_format": form}).choices
        assert [json.loads(choice.text)["age"] in (7, 8) for choice in texts] == [True] * 3
    free = complete(running, PROMPTS[0], extra_body={"response_format": {"type": "text"}}).choices[0].text
    assert free == complete(running, PROMPTS[0]).choices[0].text


def test_chats_name_of_the_limit_is_understood(running: Running) -> None:
    answer = complete(running, PROMPTS[0], max_tokens=openai.omit, extra_body={"max_completion_tokens": 3})
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"suffix": "the end"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
        ({"logprobs": 99}, "logprobs"),
        ({"extra_body": {"tools": [{"type": "function", "function": {"name": "f"}}]}}, "tools"),
        ({"extra_body": {"top_logprobs": 2}}, "top_logprobs"),
        ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format.type"),
        ({"extra_body": {"response_format": {"type": "json_object"}, "grammar": 'root ::= "x"'}}, "grammar"),
        ({"extra_body": {"response_format": {"type": "json_object"}, "ignore_eos": True}}, "ignore_eos"),
        ({"max_tokens": -2}, "max_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused(running: Running, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(running, fields.pop("prompt", "x"), **fields)
    assert isinstance(refused.value.body, dict) and refused.value.body["param"] == param


def test_more_context_is_advised_where_the_model_has_more(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    config = running.serving.model.config.get_text_config()
    own = running.serving.engine.context_tokens
    for positions, is_advised in ((own + 1, True), (own, False)):
        monkeypatch.setattr(config, "max_position_embeddings", positions)
        with served(running.serving.model, running.serving.tokenizer) as other:
            with pytest.raises(openai.BadRequestError, match="shorten the prompt") as error:
                other.client.completions.create(model="demo", prompt=[1] * own)
            assert ("smoe serve --context with a larger" in str(error.value)) == is_advised


def test_a_prompt_without_end_is_refused_by_its_beginning(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    tokenizer = running.serving.prompts._tokenizer

    def noting(text: Any, **fields: Any) -> Any:
        lengths.append(len(text if isinstance(text, str) else text[0]))
        return tokenizer(text, **fields)

    monkeypatch.setattr(running.serving.prompts, "_tokenizer", noting)
    room = running.serving.engine.context_tokens
    for text, tokens in (("once upon a time " * 60_000, 240_000), ("\u00e9" * 300_000, 600_000)):
        answer = running.http("POST", "/v1/completions", {"model": "demo", "prompt": text})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        found = re.search(rf"prompt is too long: about (\d+) tokens > {room} maximum; ", answer.error["message"])
        assert answer.error["param"] == "prompt" and found is not None and 0.9 < int(found[1]) / tokens < 1.1
    assert max(lengths) <= 16 * room
    assert len(running.serving.prompts.of_text(" " * 20 * room)) < room, "spaces are few tokens: looked at to the end"
