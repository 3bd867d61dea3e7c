"""Fields that clients of local servers send: llama.cpp's, Ollama's, vLLM's and instructor's. Would catch one that is
refused, and one that is accepted and does nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from smoe import from_pretrained
from smoe.generation.sampler import Sampler
from smoe.server.serving import Serving
from smoe.server.texts import TextRequest
from tests.server.conftest import ENDLESS, Running, served
from tests.toy import save_toy

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
    "{{ reasoning_effort or '' }}"
)
CHANNELS = (
    "{# <|channel|> #}{{ tools | tojson if tools else '' }}{% for m in messages %}<|start|>{{ m['role'] }}<|message|>"
    "{{ m['content'] }}<|end|>{% endfor %}<|start|>assistant"
)
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
CALL = "<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
ANSWER = 'root ::= ("yes" | "no") " " [0-9]+\n'
GRAMMARS: list[Any] = [
    ANSWER,
    'start: ("yes" | "no") " " /[0-9]{1,3}/\n',
    {"type": "gbnf", "value": ANSWER},
    {"type": "lark", "value": '%llguidance {}\nstart: ("yes" | "no") " " /[0-9]+/\n'},
    {"type": "regex", "value": "(yes|no) [0-9]{1,3}"},
]
SCHEMA = {"type": "object", "properties": {"age": {"enum": [7, 8]}}, "required": ["age"]}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A toy whose template begins reasoning, in a context of 200 tokens."""
    folder: Path = save_toy(tmp_path_factory.mktemp("thinks"), template=TEMPLATE, max_position_embeddings=2048)
    model = from_pretrained(folder, memory="16MiB", context_tokens=200, max_sequences=2)
    with model.offload, served(model, AutoTokenizer.from_pretrained(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def channelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A toy that writes messages with headers, as gpt-oss does."""
    marks = [AddedToken(mark, special=True) for mark in ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")]
    folder: Path = save_toy(
        tmp_path_factory.mktemp("channels"), template=CHANNELS, added=marks, max_position_embeddings=1024
    )
    model = from_pretrained(folder, memory="16MiB", context_tokens=500, max_sequences=2)
    with model.offload, served(model, AutoTokenizer.from_pretrained(folder)) as running:
        yield running


@pytest.fixture
def prefer(thinker: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the tokens of a text the likeliest ones; what constrains the choice still does."""
    choose = Sampler.choose

    def write(text: str, of: Running = thinker) -> None:
        ids = [*of.serving.tokenizer(text, add_special_tokens=False)["input_ids"], *of.serving.ends]
        left: dict[int, tuple[Sampler, Iterator[int]]] = {}

        def chosen(sampler: Sampler, logits: torch.Tensor) -> Any:
            _, following = left.setdefault(id(sampler), (sampler, iter(ids)))
            likely = torch.full_like(logits, -50.0)
            likely[next(following, ids[-1])] = 50.0
            return choose(sampler, likely)

        monkeypatch.setattr(Sampler, "choose", chosen)

    return write


def budgeted(thinker: Running, **body: Any) -> Any:
    return thinker.chat("Is it?", max_tokens=60, extra_body=body)


def test_reasoning_ends_after_its_budget(thinker: Running, prefer: Callable[[str], None]) -> None:
    """One token a character: the mark takes the places of the eight characters after the budget."""
    prefer("I see it 12345678Yes.")
    for budget, thought in ((9, "I see it "), (1, "I"), (0, None)):
        message = budgeted(thinker, thinking_budget_tokens=budget).choices[0].message
        assert (getattr(message, "reasoning_content", None) or "").strip() == (thought or "").strip()
        assert message.content == "I see it 12345678Yes."[budget + len("</think>") :].lstrip()
    prefer("I see.</think>Yes.")
    for budget in (9, 500, -1):
        message = budgeted(thinker, thinking_budget_tokens=budget).choices[0].message
        assert (message.reasoning_content, message.content) == ("I see.", "Yes.")


def test_reasoning_that_begins_again_is_ended_at_once(thinker: Running, prefer: Callable[[str], None]) -> None:
    prefer("I see</think>Yes <think>12345678so.")
    answer = budgeted(thinker, thinking_budget_tokens=12).choices[0].message  # "I see</think"
    assert (answer.reasoning_content, answer.content) == ("I see", "Yes <think></think>so.")


def test_each_text_has_its_own_budget(thinker: Running, prefer: Callable[[str], None]) -> None:
    prefer("I see it 12345678Yes.")
    answer = thinker.chat("Is it?", n=2, max_tokens=60, extra_body={"thinking_budget_tokens": 5})
    assert [choice.message.reasoning_content for choice in answer.choices] == ["I see"] * 2


def test_anthropics_budget_and_openais_effort_are_the_same_wishes(
    thinker: Running, prefer: Callable[[str], None]
) -> None:
    prefer("I see it 12345678Yes.")
    body = {"model": "demo", "max_tokens": 60, "messages": [{"role": "user", "content": "Is it?"}]}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 5}}
    blocks = json.loads(thinker.http("POST", "/v1/messages", body | thinking).text)["content"]
    assert [block.get("thinking", block.get("text")) for block in blocks] == ["I see", "5678Yes."]
    refused = thinker.http("POST", "/v1/messages", body | {"thinking": {"type": "enabled", "budget_tokens": "5"}})
    assert refused.status == 400 and "'thinking.budget_tokens' must be a whole number" in refused.text
    prefer("Yes.")
    message = thinker.chat("Is it?", reasoning_effort="none", max_tokens=60).choices[0].message
    assert getattr(message, "reasoning_content", None) is None and message.content == "Yes."
    off = {"model": "demo", "input": "Is it?", "chat_template_kwargs": {"enable_thinking": False}}
    assert [each["type"] for each in json.loads(thinker.http("POST", "/v1/responses", off).text)["output"]] == [
        "message"
    ]


def test_reasoning_in_a_channel_ends_after_its_budget(channelled: Running, prefer: Callable[..., None]) -> None:
    """The forced header takes the places of tokens that the model prefers."""
    forced = len(channelled.serving.tokenizer.encode(FINAL))
    for thought in ("I see", ""):
        prefer(ANALYSIS + thought + "x" * forced + "Yes.", channelled)
        message = budgeted(channelled, thinking_budget_tokens=len(thought)).choices[0].message
        assert (getattr(message, "reasoning_content", None) or "", message.content) == (thought, "Yes.")
    prefer(f"{ANALYSIS}I see{FINAL}Yes.", channelled)
    for budget in (5, 500, -1):
        message = budgeted(channelled, thinking_budget_tokens=budget).choices[0].message
        assert (message.reasoning_content, message.content) == ("I see", "Yes.")


def test_a_call_may_follow_reasoning_in_a_channel(channelled: Running, prefer: Callable[..., None]) -> None:
    """The model chooses between an answer and a call where the two headers differ."""
    way, answer = (channelled.serving.tokenizer.encode(text) for text in (CALL, FINAL))
    place = next(number for number, (a, b) in enumerate(zip(way, answer, strict=False)) if a != b)
    ask = {"thinking_budget_tokens": 5, "tools": [NOW], "max_tokens": 150}
    prefer(f"{ANALYSIS}I see{'x' * place}c{'x' * (len(way) - place - 1)}{{}}", channelled)
    message = budgeted(channelled, **ask).choices[0].message
    assert message.reasoning_content == "I see" and message.tool_calls[0].function.name == "now"
    assert message.tool_calls[0].function.arguments == "{}"
    prefer(f"{ANALYSIS}I see{'x' * place}f{'x' * (len(answer) - place - 1)}Yes.", channelled)
    assert budgeted(channelled, **ask).choices[0].message.content == "Yes."


def test_an_enforced_answer_has_the_header_of_an_answer(
    channelled: Running, thinker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch JSON as a header, and JSON within reasoning that the template has begun."""
    wanted, ask = list[TextRequest](), Serving.ask

    def noted(serving: Serving, texts: Sequence[TextRequest], *rest: Any) -> Any:
        wanted.extend(texts)
        return ask(serving, texts, *rest)

    monkeypatch.setattr(Serving, "ask", noted)
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "max_tokens": 40}
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    for running, more, end in (
        (channelled, {}, "<|start|>assistant<|channel|>final<|message|>"),
        (thinker, {}, "assistant:<think></think>"),
        (thinker, on, "assistant:<think></think>"),
    ):
        answer = running.chat("Is it?", **form, extra_body=more).choices[0].message
        assert json.loads(answer.content)["age"] in (7, 8) and not hasattr(answer, "reasoning_content")
        assert running.serving.tokenizer.decode(wanted[-1].ids).endswith(end)
    running = channelled
    call = running.chat("Is it?", tools=[NOW], tool_choice="required", max_tokens=90).choices[0].message.tool_calls[0]
    assert call.function.name == "now" and running.serving.tokenizer.decode(wanted[-1].ids).endswith("assistant")


def test_a_schema_leaves_calls_possible(channelled: Running, prefer: Callable[..., None]) -> None:
    """As agents with a structured answer ask. Would catch an agent that answers without its tools, and text that is
    neither a call nor of the schema."""
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    fields: dict[str, Any] = {"response_format": form, "tools": [NOW], "max_tokens": 150}
    header = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
    prefer(header + "{}", channelled)
    choice = channelled.chat("Is it?", **fields).choices[0]
    assert choice.message.tool_calls[0].function.name == "now" and choice.finish_reason == "tool_calls"
    for text in ('<|channel|>final<|message|>{"age": 7}', "<|channel|>finally", "Yes, it is seven."):
        prefer(text, channelled)
        message = channelled.chat("Is it?", **fields).choices[0].message
        assert message.tool_calls or json.loads(message.content)["age"] in (7, 8)
    prefer('<|channel|>final<|message|>{"age": 8}', channelled)
    assert json.loads(channelled.chat("Is it?", **fields).choices[0].message.content) == {"age": 8}
    prefer('{"age": 8}', channelled)
    none = channelled.chat("Is it?", **fields, tool_choice="none").choices[0].message
    assert json.loads(none.content) == {"age": 8}, "without calls the header is part of the prompt"


@pytest.mark.parametrize("grammar", GRAMMARS, ids=["gbnf", "lark", "as gbnf", "as lark", "regex"])
def test_a_grammar_is_followed(thinker: Running, grammar: Any) -> None:
    """The toy's own choices are chance: without the grammar no text is like this."""
    for seed in (1, 2):
        fields = {"temperature": 1.0, "seed": seed, "max_tokens": 60, "extra_body": {"grammar": grammar}}
        choice = thinker.chat("Is it?", **fields).choices[0]
        pattern = "(yes|no) [0-9]+" if choice.finish_reason == "stop" else "(yes|no) [0-9]*"
        assert re.fullmatch(pattern, choice.message.content)
        texts = thinker.client.completions.create(model="demo", prompt=["a", "b"], n=1, **fields).choices
        assert all(re.fullmatch("(yes|no) [0-9]*", text.text) for text in texts) and len(texts) == 2
    body = {"model": "demo", "input": "Is it?", "max_output_tokens": 60, "grammar": grammar, "temperature": 1.0}
    for stream in (False, True):
        answer = thinker.http("POST", "/v1/responses", {**body, "stream": stream})
        assert answer.status == 200 and re.search('"text": ?"(yes|no) [0-9]*"', answer.text), answer.text


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root ::= (", "cannot be enforced"),
        ("start: nowhere\n", "cannot be enforced"),
        ({"type": "regex", "value": "("}, "cannot be enforced"),
        ({"type": "json", "value": "x"}, "must be a JSON schema with the type json"),
        ({"type": "regex", "value": {}}, "must be a JSON schema with the type json"),
        ("x" * 300_000, "longer than 200000 characters"),
        (5, "'grammar' is 5; it must be a string or an object"),
    ],
)
def test_a_wrong_grammar_is_refused(thinker: Running, grammar: Any, words: str) -> None:
    for ask in (
        lambda: thinker.chat("Is it?", extra_body={"grammar": grammar}),
        lambda: thinker.client.completions.create(model="demo", prompt="a", extra_body={"grammar": grammar}),
    ):
        with pytest.raises(openai.BadRequestError, match=re.escape(words)) as error:
            ask()
        assert error.value.param == "grammar"


def test_what_excludes_a_grammar_is_refused(thinker: Running) -> None:
    for body, param in (
        ({"grammar": ANSWER, "response_format": {"type": "json_object"}}, "grammar"),
        ({"grammar": ANSWER, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            thinker.chat("Is it?", extra_body=body)
        assert error.value.param == param


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},  # instructor's JSON_SCHEMA, llama.cpp
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    ],
)
def test_a_schema_has_several_places(thinker: Running, form: dict[str, Any]) -> None:
    content = thinker.chat("Who?", response_format=form, max_tokens=60).choices[0].message.content
    assert json.loads(content)["age"] in (7, 8)
    as_grammar = thinker.chat("Who?", max_tokens=60, extra_body={"grammar": {"type": "json", "value": SCHEMA}})
    assert json.loads(as_grammar.choices[0].message.content)["age"] in (7, 8)


def test_texts_may_be_as_long_as_the_context(thinker: Running) -> None:
    endless = {"logit_bias": {str(end): -100 for end in thinker.serving.ends}}
    for fields in ({"max_tokens": -1}, {"max_completion_tokens": -1}, {"max_tokens": None}):
        answer = thinker.chat("Is it?", **endless, **fields)
        assert answer.usage.total_tokens == 200 and answer.choices[0].finish_reason == "length"
    text = thinker.client.completions.create(model="demo", prompt="abc", max_tokens=-1, **endless)
    assert text.usage.total_tokens == 200
    for name in ("n_predict", "num_predict"):
        assert thinker.chat("Is it?", max_tokens=None, **endless, extra_body={name: 3}).usage.completion_tokens == 3


def test_the_end_token_can_be_ignored(running: Running) -> None:
    """The bias alone would end the text with its first token."""
    ended = {"logit_bias": {"0": 100}}
    assert running.chat(max_tokens=9, **ended).usage.completion_tokens == 1
    answer = running.chat(max_tokens=9, **ended, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 9 and answer.choices[0].finish_reason == "length"
    assert ENDLESS.keys() == {"0"}


def test_a_penalty_has_a_window(running: Running) -> None:
    def tokens(**body: Any) -> list[str]:
        answer = running.chat(max_tokens=24, logit_bias=ENDLESS, logprobs=True, extra_body=body)
        return [each.token for each in answer.choices[0].logprobs.content]

    def text(**body: Any) -> str:
        return "".join(tokens(**body))

    assert text(repeat_penalty=3.0, repeat_last_n=0) == text()
    plain, after = tokens(), tokens(repeat_penalty=3.0, repeat_last_n=1)
    again = next((n for n in range(1, len(plain)) if plain[n] == plain[n - 1]), len(plain))
    assert (after[:again] == plain[:again] and after[again : again + 1] != plain[again : again + 1]) or after == plain
    assert text(repeat_penalty=3.0, repeat_last_n=-1) == text(repeat_penalty=3.0) != text()
    assert text(repeat_penalty=3.0, repeat_last_n=4) not in (text(), text(repeat_penalty=3.0))
