"""Chat completions as OpenAI's client asks for them. Would catch an answer that is not the model's, a stream that is
not the whole answer, a text that goes on for nobody."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from transformers import PreTrainedModel

from smoe.generation.generate import generate
from smoe.generation.sampling_settings import Sampling
from tests.server.conftest import ENDLESS, Running, eventually

QUESTIONS = [f"{who} went to the {where}. Question: What did {who} do?" for who in ("Lily", "Tom") for where in
             ("park", "house", "big tree", "shop")]  # fmt: skip
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Lily", "Tom"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def alone(model: PreTrainedModel, tokenizer: Any, question: str, tokens: int) -> str:
    """What `smoe generate` writes."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return generate(model, tokenizer, [text], Sampling(max_new_tokens=tokens)).answers[0].text


def test_models_are_listed(running: Running) -> None:
    assert [model.id for model in running.client.models.list()] == ["demo"]
    assert running.client.models.retrieve("demo").owned_by == "smoe"


def test_an_answer_is_what_the_model_writes_alone(running: Running, demo: Any, demo_tokenizer: Any) -> None:
    expected = [alone(demo, demo_tokenizer, question, 24) for question in QUESTIONS]
    assert len(set(expected)) > 2
    assert [running.chat(question, max_tokens=24).choices[0].message.content for question in QUESTIONS] == expected
    with ThreadPoolExecutor(8) as clients:  # twice as many as there are places
        together = list(clients.map(lambda question: running.chat(question, max_tokens=24), QUESTIONS))
    assert [answer.choices[0].message.content for answer in together] == expected


def test_usage_counts_tokens(running: Running, demo_tokenizer: Any) -> None:
    first, second = (running.chat("A question that nobody has asked before?", max_tokens=6) for _ in range(2))
    assert first.choices[0].finish_reason in ("length", "stop")
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1  # one token is read again


def test_what_texts_of_one_request_share_is_not_counted_as_cached(running: Running) -> None:
    usage = running.chat("Zebras zip zestfully, do they?", n=3, max_tokens=2).usage
    assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens // 2


def test_a_stream_is_the_whole_answer(running: Running) -> None:
    whole = running.chat(QUESTIONS[0], max_tokens=24, logit_bias=ENDLESS)
    chunks = list(
        running.chat(
            QUESTIONS[0], max_tokens=24, logit_bias=ENDLESS, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert len([text for text in texts if text]) > 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 24 and not chunks[-1].choices


def test_a_stop_string_ends_the_text_before_it(running: Running) -> None:
    text = running.chat(QUESTIONS[0], max_tokens=24, logit_bias=ENDLESS).choices[0].message.content
    stop = text[10:14]
    stopped = running.chat(QUESTIONS[0], max_tokens=24, logit_bias=ENDLESS, stop=[stop, "never"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    streamed = running.chat(QUESTIONS[0], max_tokens=24, logit_bias=ENDLESS, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text[: text.index(stop)]


def test_several_texts_draw_their_own_tokens_again_and_again(running: Running) -> None:
    asked = {"n": 2, "temperature": 1.5, "seed": 5, "max_tokens": 12, "logit_bias": ENDLESS}
    first, second = running.chat(**asked), running.chat(**asked)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert texts == [choice.message.content for choice in second.choices]
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (running.chat().usage.prompt_tokens, 24)
    streamed = {0: "", 1: ""}
    for chunk in running.chat(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [streamed[0], streamed[1]] == texts


def test_a_repetition_penalty_has_two_names(running: Running) -> None:
    texts = [
        running.chat(max_tokens=24, logit_bias=ENDLESS, extra_body=body).choices[0].message.content
        for body in ({}, {"repetition_penalty": 3.0}, {"repeat_penalty": 3.0})
    ]
    assert texts[0] != texts[1] == texts[2]


def test_values_that_change_nothing_are_taken(running: Running) -> None:
    """As clients send them; a number of `logprobs` is that of plain completions."""
    plain = running.chat(max_tokens=3).choices[0].message.content
    for fields in ({"stop": ""}, {"stop": [""]}, {"extra_body": {"best_of": 1}}, {"logprobs": False}):
        assert running.chat(**{"max_tokens": 3, **fields}).choices[0].message.content == plain, fields
    listed = running.chat(max_tokens=3, logprobs=2, logit_bias=ENDLESS).choices[0].logprobs.content
    assert [len(each.top_logprobs) for each in listed] == [2, 2, 2]
    assert running.chat(max_tokens=1, logprobs=0).choices[0].logprobs.content[0].top_logprobs == []


def test_logprobs_are_the_models(running: Running, demo: Any, demo_tokenizer: Any) -> None:
    answer = running.chat(max_tokens=4, logprobs=True, top_logprobs=3, logit_bias=ENDLESS).choices[0]
    said = answer.logprobs.content
    assert "".join(each.token for each in said) == answer.message.content
    assert bytes(byte for each in said for byte in each.bytes).decode() == answer.message.content
    text = demo_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who went to the park?"}], add_generation_prompt=True, tokenize=False
    )
    with torch.no_grad(), demo.offload.passes.turn():
        logits = demo(**demo_tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[0, -1].float()
    best = logits.log_softmax(0).topk(3)
    assert [each.logprob for each in said[0].top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-3)
    assert [each.token for each in said[0].top_logprobs] == [demo_tokenizer.decode([n]) for n in best.indices]
    running.chat(max_tokens=4)  # now its prompt is kept: of fewer rows, which some CPUs add up in another order
    said = running.chat(max_tokens=4, logprobs=True, top_logprobs=3, logit_bias=ENDLESS).choices[0].logprobs.content
    streamed = running.chat(max_tokens=4, logprobs=True, top_logprobs=3, logit_bias=ENDLESS, stream=True)
    tokens = [each for chunk in streamed for each in (chunk.choices[0].logprobs or Empty).content]
    assert [each.logprob for each in tokens] == [each.logprob for each in said]


class Empty:
    content = ()


def test_json_keeps_to_its_schema(running: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    for seed in range(3):
        answer = running.chat(max_tokens=60, response_format=form, temperature=1.0, seed=seed).choices[0]
        value = json.loads(answer.message.content)
        assert value["name"] in ("Lily", "Tom") and 1 <= value["age"] <= 9 and answer.finish_reason == "stop"
    begun = running.chat(max_tokens=12, response_format={"type": "json_object"}).choices[0]
    assert begun.message.content.startswith("{")


def test_hardly_any_heat_is_none(running: Running) -> None:
    greedy = running.chat(max_tokens=8, logit_bias=ENDLESS).choices[0].message.content
    body = {"logit_bias": ENDLESS, "extra_body": {"repetition_penalty": 1.0}}
    for temperature in (1e-30, 5e-324):
        assert running.chat(max_tokens=8, temperature=temperature, **body).choices[0].message.content == greedy
    assert running.chat(max_tokens=8, temperature=1e-19, top_p=1, **body).choices


def test_no_share_of_the_probability_is_the_likeliest_token_alone(running: Running) -> None:
    greedy = running.chat(max_tokens=16, logit_bias=ENDLESS).choices[0].message.content
    hot = {"max_tokens": 16, "logit_bias": ENDLESS, "temperature": 2, "seed": 3}
    assert running.chat(**hot).choices[0].message.content != greedy
    assert running.chat(**hot, top_p=0).choices[0].message.content == greedy
    assert running.chat(**hot, extra_body={"min_p": 1}).choices[0].message.content == greedy


def test_values_that_change_nothing_change_nothing(running: Running) -> None:
    more: dict[str, Any] = {"n": 1, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
    more["extra_body"] = {"top_k": -1, "min_p": 0, "typical_p": 1, "repeat_penalty": 1.0, "best_of": 1, "echo": False}
    for fields in ({}, {"temperature": 1.5, "seed": 4}):
        plain, same = (running.chat(max_tokens=16, **fields, **each).choices[0] for each in ({}, more))
        assert same.message.content == plain.message.content and same.logprobs is None
    asked = {"model": "demo", "prompt": "Once", "max_tokens": 8, "temperature": 0}
    plain, same = (running.client.completions.create(**asked, **each).choices[0] for each in ({}, more))
    assert (same.text, same.logprobs) == (plain.text, None)
    wanted = {"model": "demo", "input": "Who?", "max_output_tokens": 8, "temperature": 0}
    plain, same = (
        running.http("POST", "/v1/responses", each) for each in (wanted, wanted | {"n": 1, "logit_bias": {}})
    )
    assert json.loads(same.text)["output"][0]["content"] == json.loads(plain.text)["output"][0]["content"]


def test_no_seed_is_any_seed(running: Running) -> None:
    asked = {"temperature": 2, "max_tokens": 24, "logit_bias": ENDLESS, "seed": -1}
    assert len({running.chat(**asked).choices[0].message.content for _ in range(3)}) > 1


def test_the_last_message_is_gone_on_with(running: Running, demo: Any, demo_tokenizer: Any) -> None:
    begun = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": "The little"}]
    text = demo_tokenizer.apply_chat_template(begun[:1], add_generation_prompt=True, tokenize=False) + " The little"
    expected = generate(demo, demo_tokenizer, [text], Sampling(max_new_tokens=12)).answers[0].text
    for more in ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}):
        assert running.chat(messages=begun, max_tokens=12, extra_body=more).choices[0].message.content == expected
        streamed = running.chat(messages=begun, max_tokens=12, extra_body=more, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected
    closed = running.chat(messages=begun, extra_body={"add_generation_prompt": False}).usage.prompt_tokens
    opened = running.chat(messages=begun, extra_body={"continue_final_message": False}).usage.prompt_tokens
    answer_begins = len(demo_tokenizer.encode("Answer:", add_special_tokens=False))
    assert opened - closed == answer_begins


def test_penalties_and_biases_change_what_is_said(running: Running, demo_tokenizer: Any) -> None:
    plain = running.chat(max_tokens=32, logit_bias=ENDLESS).choices[0].message.content
    assert running.chat(max_tokens=32, logit_bias=ENDLESS, frequency_penalty=2).choices[0].message.content != plain
    assert running.chat(max_tokens=32, logit_bias=ENDLESS, presence_penalty=2).choices[0].message.content != plain
    token = demo_tokenizer.encode(" dog")[0]
    assert running.chat(max_tokens=3, logit_bias={str(token): 100}).choices[0].message.content == " dog" * 3


def cancelled(running: Running) -> float:
    """Texts that were, so far."""
    for line in running.http("GET", "/metrics").text.splitlines():
        if line.startswith('smoe_texts_total{reason="cancelled"}'):
            return float(line.split()[1])
    return 0.0


def test_a_client_that_leaves_a_stream_frees_its_place(running: Running) -> None:
    before = cancelled(running)
    stream = running.chat(max_tokens=300, logit_bias=ENDLESS, stream=True)
    next(iter(stream))
    eventually(lambda: running.serving.running == 1)
    stream.close()
    eventually(lambda: running.serving.running == 0)
    assert cancelled(running) == before + 1


def test_a_client_that_leaves_while_it_waits_frees_its_place(running: Running) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "n": 6, "logit_bias": ENDLESS}
    data = json.dumps(body).encode()
    host, port = running.url.removeprefix("http://").split(":")
    before = cancelled(running)
    with socket.create_connection((host, int(port))) as line:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        line.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        eventually(lambda: running.serving.running == 4 and running.serving.waiting == 2)
    eventually(lambda: running.serving.running == running.serving.waiting == 0)
    assert cancelled(running) == before + 6


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "between 0 and 2"),
    ({"temperature": 2.1}, "temperature", "between 0 and 2"),
    ({"top_p": 2}, "top_p", "between 0 and 1"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens", "at least 1"),
    ({"presence_penalty": 3}, "presence_penalty", "between"),
    ({"n": 0}, "n", "between 1 and 128"),
    ({"stop": ["x" * 257]}, "stop", "of at most 256 characters"),
    ({"stop": ["x"] * 99}, "stop", "16"),
    ({"logit_bias": {"lily": 1}}, "logit_bias", "token ids are numbers"),
    ({"logit_bias": {"4096": 1}}, "logit_bias", "4095"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "between -100"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"messages": []}, "messages", "1 to 10000"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "you must provide"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "must be a string"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "system"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "text only"),
    ({"messages": [{"role": "user", "content": "x " * 900}]}, "messages", "maximum context length is 384"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "does not support tools"),
    ({"tool_choice": "required"}, "tool_choice", "needs"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "king"}}}},
        "response_format",
        "cannot be enforced",
    ),
    ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs", "may not contain"),
    ({"extra_body": {"web_search_options": {}}}, "web_search_options", "not supported"),
    ({"seed": 2**70}, "seed", "9223372036854775807"),
    ({"extra_body": {"typical_p": 0.5}}, "typical_p", "leave it out, or give 1"),
    ({"extra_body": {"mirostat": 2}}, "mirostat", "leave it out, or give 0"),
    ({"extra_body": {"continue_final_message": True}}, "continue_final_message", "role assistant"),
    (
        {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
        "add_generation_prompt",
        "must be false",
    ),
    (
        {
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}],
            "response_format": {"type": "json_object"},
            "extra_body": {"continue_final_message": True},
        },
        "continue_final_message",
        "cannot be combined",
    ),
]


@pytest.mark.parametrize(
    ("asked", "param", "words"), REFUSALS, ids=[f"{p}-{n}" for n, (_, p, _) in enumerate(REFUSALS)]
)
def test_what_cannot_be_done_is_refused_in_the_apis_words(
    running: Running, asked: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        running.chat(**asked)
    body = refused.value.body
    assert isinstance(body, dict) and set(body) == {"message", "type", "param", "code"}
    assert (body["param"], body["type"]) == (param, "invalid_request_error")
    assert words in body["message"] and "`" not in body["message"]
    assert "--" not in body["message"].replace("smoe serve --", ""), "options are named with their command"
    assert running.serving.running == running.serving.waiting == 0


def test_a_model_that_is_not_here_is_not_found(running: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="this server serves 'demo'") as error:
        running.client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
    assert error.value.code == "model_not_found"


def test_many_clients_at_once_leave_nothing_behind(running: Running) -> None:
    """Some leave, some stay, some are refused; those that stay get what they get alone."""
    expected = running.chat(QUESTIONS[1], max_tokens=16, logit_bias=ENDLESS).choices[0].message.content
    found: list[str] = []

    def ask(number: int) -> None:
        if number % 3 == 0:
            stream = running.chat(QUESTIONS[2], max_tokens=200, logit_bias=ENDLESS, stream=True)
            next(iter(stream))
            stream.close()
        elif number % 3 == 1:
            with pytest.raises(openai.BadRequestError):
                running.chat(top_p=7)
        else:
            found.append(running.chat(QUESTIONS[1], max_tokens=16, logit_bias=ENDLESS).choices[0].message.content)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
    eventually(lambda: running.serving.running == running.serving.waiting == 0)
