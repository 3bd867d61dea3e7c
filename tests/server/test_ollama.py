"""Ollama's API: chat and generate, whole and in lines, tools and reasoning, what is said of the model. Would catch a
response that Ollama's clients cannot read, and an option that is lost on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from transformers import AutoTokenizer

from smoe import from_pretrained
from smoe.errors import TransferError
from smoe.generation.sampler import Sampler
from smoe.server import local_answers as local
from smoe.server.serving import IGNORED_FIELDS
from tests.server.conftest import Answered, Running, served
from tests.toy import save_toy

TEMPLATE = (
    "{% if tools %}tools <tool_call>: {{ tools | tojson }} {% endif %}{% for m in messages %}{{ m['role'] }}"
    "{{ m['name'] }}: {{ m['reasoning_content'] }}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "[{{ c['function']['name'] }} {{ c['function']['arguments']['city'] }}]{% endfor %}{{ '\n' }}{% endfor %}"
    "assistant:{{ reasoning_effort }}{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "warmth", "description": "says how it is", "parameters": CITY}}]
CALL = '<tool_call>{"name": "warmth", "arguments": {"city": "Oslo"}}</tool_call>'
ASKED: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "How warm is it?"}]}
PROMPT: dict[str, Any] = {"model": "demo:latest", "prompt": "How warm is it?"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = save_toy(tmp_path_factory.mktemp("ollama"), template=TEMPLATE, max_position_embeddings=2048)
    model = from_pretrained(folder, memory="16MiB", context_tokens=1024, max_sequences=2)
    with model.offload, served(model, AutoTokenizer.from_pretrained(folder)) as running:
        yield running


def posted(running: Running, path: str, body: dict[str, Any]) -> Answered:
    """As Ollama's documentation sends it: curl has a type of its own for JSON."""
    return running.http(
        "POST", path, json.dumps(body).encode(), **{"Content-Type": "application/x-www-form-urlencoded"}
    )


def whole(running: Running, path: str, body: dict[str, Any]) -> Any:
    answer = posted(running, path, {**body, "stream": False})
    assert answer.status == 200 and answer.headers["content-type"] == "application/json", answer.text
    kind: type[BaseModel] = local.OllamaChat if path == "/api/chat" else local.OllamaGenerated
    return kind.model_validate_json(answer.text)


def lines(running: Running, path: str, body: dict[str, Any]) -> list[Any]:
    answer = posted(running, path, body)
    assert answer.status == 200 and answer.headers["content-type"] == "application/x-ndjson", answer.text
    kind: type[BaseModel] = local.OllamaChat if path == "/api/chat" else local.OllamaGenerated
    found = [kind.model_validate_json(line) for line in answer.text.splitlines()]
    assert [each.done for each in found] == [False] * (len(found) - 1) + [True]  # type: ignore[attr-defined]
    return found


def test_a_chat_has_reasoning_text_and_calls(running: Running, script: Callable[[str], None]) -> None:
    script(f"I see.</think>So: {CALL}{CALL}")
    body = {**ASKED, "tools": TOOLS, "think": True, "options": {"num_predict": 400}}
    answer = whole(running, "/api/chat", body)
    message = answer.message
    assert (message.thinking, message.content) == ("I see.", "So: ")
    assert [(each.function.name, each.function.arguments) for each in message.tool_calls] == [
        ("warmth", {"city": "Oslo"})
    ] * 2
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.eval_count == len(f"I see.</think>So: {CALL}{CALL}") + 1 and answer.prompt_eval_count > 100
    assert answer.total_duration >= answer.eval_duration > 0 and answer.prompt_eval_duration > 0
    parts = lines(running, "/api/chat", body)
    assert "".join(each.message.thinking or "" for each in parts) == "I see."
    assert "".join(each.message.content for each in parts) == "So: "
    calls = [call for each in parts for call in each.message.tool_calls or []]
    assert [call.function.arguments for call in calls] == [{"city": "Oslo"}] * 2
    assert len(parts) > 5 and parts[-1].eval_count == answer.eval_count


def test_generate_answers_a_prompt(running: Running, script: Callable[[str], None]) -> None:
    script("I see.</think>Cold.")
    answer = whole(running, "/api/generate", {**PROMPT, "think": True})
    assert (answer.response, answer.thinking, answer.done_reason) == ("Cold.", "I see.", "stop")
    parts = lines(running, "/api/generate", {**PROMPT, "think": "low"})
    assert "".join(each.response for each in parts) == "Cold."
    assert "".join(each.thinking or "" for each in parts) == "I see." and parts[-1].model == "demo:latest"


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        ("/api/chat", ASKED, "user: How warm is it?\nassistant:"),
        ("/api/chat", {**ASKED, "think": "high"}, "user: How warm is it?\nassistant:high<think>"),
        ("/api/generate", PROMPT, "user: How warm is it?\nassistant:"),
        ("/api/generate", {**PROMPT, "system": "Short."}, "system: Short.\nuser: How warm is it?\nassistant:"),
        ("/api/generate", {**PROMPT, "raw": True}, "How warm is it?"),
        (
            "/api/chat",
            {
                "model": "demo",
                "messages": [
                    {"role": "user", "content": "Q"},
                    {
                        "role": "assistant",
                        "thinking": "T",
                        "tool_calls": [{"function": {"name": "warmth", "arguments": {"city": "Oslo"}}}],
                    },
                    {"role": "tool", "tool_name": "warmth", "content": "3"},
                ],
            },
            "user: Q\nassistant: T[warmth Oslo]\ntoolwarmth: 3\nassistant:",
        ),
    ],
)
def test_the_prompt_is_what_the_template_writes(running: Running, path: str, body: dict[str, Any], prompt: str) -> None:
    """Counted: one token a character."""
    answer = whole(running, path, {**body, "options": {"num_predict": 1}})
    assert answer.prompt_eval_count == len(prompt) and answer.eval_count == 1 and answer.done_reason == "length"


def test_options_decide_the_text(running: Running) -> None:
    def text(path: str, more: dict[str, Any] | None = None, **options: Any) -> str:
        body = {**(ASKED if path == "/api/chat" else {**PROMPT, "raw": True}), **(more or {})}
        answer = whole(running, path, {**body, "options": {"num_predict": 40, **options}})
        return str(answer.message.content if path == "/api/chat" else answer.response)

    for path in ("/api/chat", "/api/generate"):
        hot = {"temperature": 1.0, "seed": 5}
        assert text(path, **hot) == text(path, **hot) != text(path, temperature=1.0, seed=6)
        assert text(path, **hot, top_k=1) == text(path, temperature=0) == text(path, num_ctx=8, numa=False)
        whole_text = text(path, **hot)
        assert text(path, **hot, stop=[whole_text[3]]) == whole_text.partition(whole_text[3])[0]
        schema = {"type": "object", "properties": {"age": {"enum": [7, 8]}}, "required": ["age"]}
        assert json.loads(text(path, {"format": schema}, **hot))["age"] in (7, 8)
        assert text(path, {"format": "json"}, **hot).startswith("{")
        assert text(path, {"format": ""}, **hot) == whole_text


def test_texts_without_a_limit_fill_the_context(running: Running) -> None:
    for path, body, limit in (("/api/chat", ASKED, -1), ("/api/generate", {**PROMPT, "raw": True}, -2)):
        options = {"num_predict": limit, "temperature": 2.0, "seed": 3}
        answer = whole(running, path, {**body, "options": options})
        assert answer.done_reason == "stop" or answer.prompt_eval_count + answer.eval_count == 1024


def test_logprobs_are_those_of_chat_completions(running: Running) -> None:
    options = {"num_predict": 3, "temperature": 0}
    expected = running.chat("How warm is it?", max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    for path, body in (("/api/chat", ASKED), ("/api/generate", PROMPT)):
        asked = {**body, "options": options, "logprobs": True, "top_logprobs": 2}
        for found in (whole(running, path, asked).logprobs, [p for each in lines(running, path, asked)
                                                             for p in each.logprobs or []]):  # fmt: skip
            assert [each.token for each in found] == [each.token for each in expected]
            assert found[0].logprob == pytest.approx(expected[0].logprob) and len(found[0].top_logprobs) == 2


def test_a_request_without_a_prompt_loads_the_model(running: Running) -> None:
    assert whole(running, "/api/chat", {"model": "demo", "messages": []}).done_reason == "load"
    assert whole(running, "/api/chat", {"messages": []}).model == "demo"
    named = whole(running, "/api/generate", {"prompt": "x", "options": {"num_predict": 1}})
    assert named.model == "demo" and named.eval_count == 1
    assert whole(running, "/api/generate", {"model": "demo", "keep_alive": 0}).done_reason == "load"


def folder_of(running: Running) -> Path:
    return Path(running.serving.model.config.name_or_path)


def test_what_is_said_of_the_model(running: Running) -> None:
    for path in ("/api/tags", "/api/ps"):
        (model,) = local.OllamaModels.model_validate_json(running.http("GET", path).text).models
        assert model.name == model.model == "demo" and model.details.family == "qwen2_moe"
        assert model.size == sum(path.stat().st_size for path in folder_of(running).glob("*.safetensors"))
        parameters = running.serving.model.num_parameters()
        assert model.details.parameter_size == f"{parameters / 1000:.0f}K" and 1000 <= parameters < 1_000_000
        assert (model.details.format, model.details.quantization_level) == ("safetensors", "F32")
        assert model.size_vram == (0 if path == "/api/ps" else None), "the CPU computes it"
    assert json.loads(running.http("GET", "/api/ps").text)["models"][0]["context_length"] == 1024
    for body in ({"model": "demo"}, {"name": "demo:latest"}, {"model": "demo", "verbose": True}):
        shown = local.OllamaShown.model_validate_json(posted(running, "/api/show", body).text)
        assert shown.capabilities == ["completion", "tools", "thinking"] and shown.template == TEMPLATE
        assert shown.model_info["qwen2_moe.context_length"] == 1024
    local.OllamaVersion.model_validate_json(running.http("GET", "/api/version").text)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {**ASKED, "model": "other"}, 404, "the model 'other' does not exist here"),
        ("/api/chat", {**ASKED, "options": {"temperature": 5}}, 400, "'temperature' is 5; it must be a number"),
        (
            "/api/generate",
            {**PROMPT, "options": {"num_predict": -3}},
            400,
            "'options.num_predict' is -3; it must be a whole number of at least 1 or one of: -1, -2",
        ),
        ("/api/chat", {**ASKED, "options": {"mirostat": 2}}, 400, "'mirostat' is not supported"),
        ("/api/chat", {"model": "demo", "messages": [{"role": "king", "content": "x"}]}, 400, "'messages[0].role'"),
        ("/api/chat", {"model": "demo", "messages": [{"role": "user", "images": ["x"]}]}, 400, "reads text only"),
        ("/api/chat", {**ASKED, "format": {"type": "king"}}, 400, "'format' cannot be enforced"),
        ("/api/chat", {**ASKED, "format": "xml"}, 400, "'format'"),
        ("/api/generate", {**PROMPT, "suffix": "x"}, 400, "'suffix' is not supported"),
        ("/api/generate", {**PROMPT, "prompt": "x" * 3000}, 400, "maximum context length is 1024"),
        ("/api/generate", {**PROMPT, "tools": TOOLS}, 400, "'tools' is not supported"),
        ("/api/generate", {**PROMPT, "raw": True, "system": "x"}, 400, "'system' needs the chat template"),
        ("/api/generate", {**PROMPT, "raw": True, "format": {"type": "king"}}, 400, "'format' cannot be enforced"),
        ("/api/show", {"model": "other"}, 404, "does not exist here"),
        ("/api/embed", {"model": "demo", "input": "x"}, 501, "it has no embeddings"),
        ("/api/embeddings", {"model": "demo", "prompt": "x"}, 501, "it has no embeddings"),
        ("/api/pull", {"model": "other"}, 501, "/api/pull is not supported: this server serves 'demo' and no other"),
        ("/api/create", {"model": "other"}, 501, "/api/create is not supported"),
        ("/api/nowhere", {}, 404, "there is no /api/nowhere here"),
    ],
)
def test_errors_have_ollamas_form(running: Running, path: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = posted(running, path, body)
    assert answer.status == status and words in local.OllamaRefusal.model_validate_json(answer.text).error


def test_unknown_fields_and_options_are_listed(running: Running) -> None:
    body = {**ASKED, "options": {"num_predict": 1, "temprature": 1}, "temperature": 1}
    answer = posted(running, "/api/chat", body)
    assert answer.status == 200 and answer.headers[IGNORED_FIELDS] == "options.temprature,temperature"


def test_an_error_in_a_stream_is_a_line(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(sampler: Sampler, logits: Any) -> Any:
        raise TransferError("a block could not be read")

    monkeypatch.setattr(Sampler, "choose", fail)
    (line,) = posted(running, "/api/chat", ASKED).text.splitlines()
    assert "could not be read from disk" in local.OllamaRefusal.model_validate_json(line).error


def test_ollamas_client_reads_it(running: Running, script: Callable[[str], None]) -> None:
    ollama = pytest.importorskip("ollama")
    with ollama.Client(host=running.url) as client:
        script(f"I see.</think>So: {CALL}")
        asked: dict[str, Any] = {**ASKED, "tools": TOOLS, "think": True}
        answer = client.chat(**asked)
        assert (answer.message.thinking, answer.message.content) == ("I see.", "So: ")
        assert answer.message.tool_calls[0].function.arguments == {"city": "Oslo"} and answer.done_reason == "stop"
        parts = list(client.chat(**asked, stream=True))
        assert "".join(part.message.content or "" for part in parts) == "So: " and parts[-1].eval_count > 10
        again = [*ASKED["messages"], answer.message, {"role": "tool", "tool_name": "warmth", "content": "3"}]
        assert client.chat(model="demo", messages=again, tools=TOOLS).done
        script("Cold.")
        assert client.generate(model="demo", prompt="Warm?").response == "Cold."
        assert "".join(part.response for part in client.generate(model="demo", prompt="Warm?", stream=True)) == "Cold."
        assert (
            [model.model for model in client.list().models] == ["demo"] == [model.model for model in client.ps().models]
        )
        assert client.show("demo").modelinfo["qwen2_moe.context_length"] == 1024
        with pytest.raises(ollama.ResponseError, match="it has no embeddings"):
            client.embed(model="demo", input="x")
        with pytest.raises(ollama.ResponseError, match="does not exist here"):
            client.chat(model="other", messages=ASKED["messages"])
