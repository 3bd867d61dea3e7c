"""Generation beside the library's own loop, and what may go wrong on the way to a text."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from smoe import from_pretrained
from smoe.errors import ConfigError, ContextError, ModelError
from smoe.generation.chat import Chat
from smoe.generation.detokenizer import TextStream
from smoe.generation.generate import encode, generate, generate_batch
from smoe.generation.library_batch import pad
from smoe.generation.loop import UNSETTLED_STEPS
from smoe.generation.sampling_settings import Sampling
from tests.toy import ASCII, END, TEMPLATE, ascii_tokenizer, byte_tokenizer, save_toy

BYTES = byte_tokenizer(sorted(pre_tokenizers.ByteLevel.alphabet()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(tmp_path_factory.mktemp("generation"))


@pytest.fixture(scope="module")
def model(folder):
    torch.set_num_threads(1)
    loaded = from_pretrained(folder, memory="4MiB", context_tokens=64, max_sequences=2, threads=1)
    yield loaded
    loaded.offload.close()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def _shown(stream: TextStream, ids: list[int]) -> list[str]:
    return [stream.push(token) for token in ids] + [stream.flush()]


# -- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["plain", "naïve – “quoted”", "日本語 text 🙂 end", "👩‍👩‍👧 family"])
def test_characters_come_whole(text):
    """Every token here is one byte, so most characters take several."""
    pieces = _shown(TextStream(BYTES, BYTES("before ")["input_ids"], ()), BYTES(text)["input_ids"])
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    ids = BYTES("a🙂")["input_ids"][:-1]
    pieces = _shown(TextStream(BYTES, [], ()), ids)
    assert "".join(pieces[:-1]) == "a" and "�" in pieces[-1]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one STOP two", ("STOP",), "one "),
        ("one STO two", ("STOP",), "one STO two"),
        ("aab", ("ab",), "a"),
        ("first\n\nsecond", ("\n\n",), "first"),
        ("x END y STOP", ("STOP", "END"), "x "),
        ("STOP", ("STOP",), ""),
        ("ends with STO", ("STOP",), "ends with STO"),
    ],
)
def test_stop_strings_across_tokens(text, stop, expected):
    stream = TextStream(BYTES, [], stop)
    pieces = _shown(stream, BYTES(text)["input_ids"])
    assert "".join(pieces) == stream.text == expected
    assert stream.found_stop == any(s in text for s in stop)


def test_no_part_of_a_stop_string_is_ever_shown():
    stream = TextStream(BYTES, [], ("STOP",))
    for token in BYTES("go STOP")["input_ids"]:
        assert "S" not in stream.push(token)


# -- generation ---------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_librarys_greedy_loop(model, tokenizer):
    answer = generate(model, tokenizer, ["Hello"], Sampling(max_new_tokens=20)).answers[0]
    ids = tokenizer(["Hello"], return_tensors="pt")["input_ids"]
    theirs = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
    assert answer.token_ids == theirs


def test_the_checkpoints_own_sampling_defaults_are_not_used(model, tokenizer):
    before = generate(model, tokenizer, ["Hello"], Sampling(max_new_tokens=12)).answers[0].token_ids
    own = model.generation_config
    saved = own.to_dict()
    own.do_sample, own.temperature, own.top_k, own.repetition_penalty = True, 3.0, 5, 2.0
    try:
        assert generate(model, tokenizer, ["Hello"], Sampling(max_new_tokens=12)).answers[0].token_ids == before
    finally:
        own.update(**saved)


def test_streamed_text_is_the_text(model, tokenizer):
    pieces: list[str] = []
    result = generate(model, tokenizer, ["Hello"], Sampling(max_new_tokens=20), lambda row, text: pieces.append(text))
    assert "".join(pieces) == result.answers[0].text
    assert result.answers[0].text == tokenizer.decode(result.answers[0].token_ids, skip_special_tokens=True)


def test_rows_of_a_batch_are_what_they_are_alone(model, tokenizer):
    prompts = ["Hi", "A rather longer prompt"]
    together = generate(model, tokenizer, prompts, Sampling(max_new_tokens=12))
    alone = [generate(model, tokenizer, [prompt], Sampling(max_new_tokens=12)).answers[0] for prompt in prompts]
    assert [a.token_ids for a in together.answers] == [a.token_ids for a in alone]
    assert [a.prompt_tokens for a in together.answers] == [2, 22]


def test_the_first_steps_of_a_text_do_not_count_as_later_ones(model, tokenizer):
    tokens = UNSETTLED_STEPS + 4
    result = generate(model, tokenizer, ["Hello"], Sampling(max_new_tokens=tokens, ignores_end=True))
    assert (result.unsettled_counters.forward_passes, result.later_counters.forward_passes) == (UNSETTLED_STEPS, 3)
    assert result.later_seconds_per_token == pytest.approx(sum(result.step_seconds[-3:]) / 3)


def test_times_and_counters(model, tokenizer):
    started = time.perf_counter()
    result = generate(model, tokenizer, ["Hello"], Sampling(max_new_tokens=9, ignores_end=True))
    assert result.new_tokens == len(result.token_times) == 9
    assert len(result.step_seconds) == 8 and result.decode_counters.forward_passes == 8
    assert result.counters.forward_passes == 9
    assert 0 < result.ttft_seconds < time.perf_counter() - started
    assert result.tpot_median_seconds <= result.tpot_p95_seconds
    assert result.tokens_per_second == pytest.approx(8 / result.decode_seconds)
    assert result.later_counters.forward_passes == 0 and result.later_seconds_per_token is None
    assert result.waited_share is None or 0 <= result.waited_share <= 1


def test_end_token_ends_and_is_not_text(model, tokenizer, monkeypatch):
    ids = generate(model, tokenizer, ["Hello"], Sampling(max_new_tokens=8)).answers[0].token_ids
    monkeypatch.setattr(model.generation_config, "eos_token_id", ids[3])
    answer = generate(model, tokenizer, ["Hello"], Sampling(max_new_tokens=8)).answers[0]
    end = ids.index(ids[3])
    assert answer.token_ids == ids[: end + 1] and answer.finish_reason == "end"
    assert answer.text == tokenizer.decode(ids[:end])


def test_a_prompt_that_is_too_long_is_refused_before_any_compute(model, tokenizer):
    before = model.offload.stats()
    with pytest.raises(ContextError, match="64 tokens, and memory is reserved"):
        generate(model, tokenizer, ["x" * 64], Sampling())
    assert model.offload.stats() == before


def test_the_last_position_of_the_context_can_be_used(model, tokenizer):
    result = generate(model, tokenizer, ["x" * 60], Sampling(max_new_tokens=50, ignores_end=True))
    assert result.new_tokens == 4 and "at most 4 new tokens" in result.notes[0]


def test_nan_logits_are_refused(model, tokenizer, monkeypatch):
    head = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: head(hidden) * float("nan"))
    with pytest.raises(ModelError, match="NaN"):
        generate(model, tokenizer, ["Hello"], Sampling(max_new_tokens=4))


def test_empty_prompt(model, tokenizer):
    with pytest.raises(ConfigError, match="prompt 2 is empty"):
        encode(tokenizer, ["x", ""])


def test_interrupt_keeps_what_there_is_and_the_engine_goes_on(model, tokenizer):
    count = 0

    def write(row: int, text: str) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt

    expected = generate(model, tokenizer, ["Hello"], Sampling(max_new_tokens=20)).answers[0]
    result = generate(model, tokenizer, ["Hello"], Sampling(max_new_tokens=20), write)
    answer = result.answers[0]
    assert result.was_interrupted and answer.finish_reason == "interrupted"
    assert answer.token_ids == expected.token_ids[:4] and expected.text.startswith(answer.text) and answer.text
    assert generate(model, tokenizer, ["Hello"], Sampling(max_new_tokens=20)).answers[0].text == expected.text


@pytest.mark.parametrize(
    "bad", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"stop": ("",)}]
)
def test_sampling_is_checked(bad):
    with pytest.raises(ConfigError):
        Sampling(**bad)


def test_padding_goes_to_the_left():
    batch = pad([[1, 2, 3], [4]], 9)
    assert batch.input_ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]


# -- chat ---------------------------------------------------------------------------------------------------------


def _without_memory(model, tokenizer, ids: list[int], tokens: int) -> list[int]:
    return generate_batch(model, tokenizer, [ids], Sampling(max_new_tokens=tokens)).answers[0].token_ids


def test_a_turn_on_a_kept_cache_is_a_turn_from_scratch(model, tokenizer):
    """The cache goes on from turn to turn and nobody can tell from the words."""
    chat = Chat(model, tokenizer, Sampling(max_new_tokens=6))
    chat.say("One")
    answer = chat.say("Two").answers[0]
    assert chat.reused_tokens == 3 + 6 - 1  # the last token's keys are not computed yet
    ids = chat._ids[: -len(answer.token_ids)]
    assert answer.token_ids == _without_memory(model, tokenizer, ids, 6)


def test_template_turns_reuse_the_common_beginning(model):
    tokenizer = ascii_tokenizer(TEMPLATE)
    chat = Chat(model, tokenizer, Sampling(max_new_tokens=3))
    chat.say("a")
    passes = model.offload.stats().tokens
    answer = chat.say("b").answers[0]
    computed = model.offload.stats().tokens - passes
    assert chat.reused_tokens >= len("user: a\nassistant:")
    assert computed == answer.prompt_tokens - chat.reused_tokens + len(answer.token_ids) - 1
    ids = chat._ids[: -len(answer.token_ids)]
    assert answer.token_ids == _without_memory(model, tokenizer, ids, 3)


@pytest.mark.parametrize("parses", [False, True])
def test_text_of_a_control_token_stays_text_from_turn_to_turn(model, parses):
    """And the beginning of the conversation is reused as it is elsewhere."""
    tokenizer = ascii_tokenizer(TEMPLATE)
    chat = Chat(model, tokenizer, Sampling(max_new_tokens=3), parses_control_tokens=parses)
    first = chat.say(f"a{END}").answers[0]
    assert first.prompt_tokens == len(f"user: a{END}\nassistant:") - (len(END) - 1) * parses
    chat.say(END)
    assert chat.reused_tokens >= first.prompt_tokens
    assert chat._ids.count(tokenizer.eos_token_id) == 2 * parses


def test_ctrl_c_ends_a_turn_whose_template_does_not_end(model):
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = ascii_tokenizer(f"{{% if messages[0].content == 'x' %}}{loops}{{% endif %}}{TEMPLATE}")
    chat = Chat(model, tokenizer, Sampling(max_new_tokens=3))
    chat.say("a")
    chat.reset()
    threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        chat.say("x")
    assert chat.say("a").answers[0].text


def test_an_answers_own_tokens_are_kept_where_its_text_would_be_cut_otherwise(tmp_path):
    """The answer's first two letters have a token of their own, which the model did not choose."""
    folder = save_toy(tmp_path / "merging", vocab_size=len(ASCII) + 2)
    model = from_pretrained(folder, memory="16MiB", context_tokens=64, threads=1)
    template = TEMPLATE.replace(": {{ m", ":{{ m")  # so that an answer stands in the text as it was generated
    plain = ascii_tokenizer(template)
    answer = Chat(model, plain, Sampling(max_new_tokens=4)).say("a").answers[0]
    assert len(answer.text) == 4 and answer.text == answer.text.strip()
    merging = byte_tokenizer(ASCII, template, [(answer.text[0], answer.text[1])])
    chat = Chat(model, merging, Sampling(max_new_tokens=4))
    first = chat.say("a").answers[0]
    chat.say("b")
    assert len(merging(first.text)["input_ids"]) < len(first.token_ids) == 4
    assert chat.reused_tokens == first.prompt_tokens + 4 - 1
    model.offload.close()


def test_an_interrupted_turn_stays_in_the_conversation(model, tokenizer):
    def stop(row: int, text: str) -> None:
        raise KeyboardInterrupt

    chat = Chat(model, tokenizer, Sampling(max_new_tokens=6))
    first = chat.say("One", stop).answers[0]
    second = chat.say("Two").answers[0]
    assert len(first.token_ids) == 1
    ids = chat._ids[: -len(second.token_ids)]
    assert tokenizer.decode(ids) == f"One{first.text}\nTwo"
    assert second.token_ids == _without_memory(model, tokenizer, ids, 6)


def test_two_conversations_on_one_model_take_turns(model, tokenizer):
    """There is room for one cache: would catch a conversation that ends where another has begun."""
    one, two = (Chat(model, tokenizer, Sampling(max_new_tokens=4)) for _ in range(2))
    for chat in (one, two):
        chat.say("One")
    answer = one.say("Two").answers[0]
    assert one.reused_tokens == 0
    assert answer.token_ids == _without_memory(model, tokenizer, one._ids[: -len(answer.token_ids)], 4)


def test_a_failed_turn_leaves_the_conversation_as_it_was(model, tokenizer):
    chat = Chat(model, tokenizer, Sampling(max_new_tokens=4))
    chat.say("One")
    before = list(chat._ids)
    with pytest.raises(ContextError):
        chat.say("x" * 80)
    assert chat._ids == before
    answer = chat.say("Two").answers[0]
    assert answer.token_ids == _without_memory(model, tokenizer, chat._ids[: -len(answer.token_ids)], 4)


def test_recurrent_layers_start_again_instead_of_going_back(tmp_path):
    folder = save_toy(tmp_path / "recurrent", "qwen3_next", template=TEMPLATE)
    model = from_pretrained(folder, memory="16MiB", context_tokens=64, threads=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = Chat(model, tokenizer, Sampling(max_new_tokens=3))
    chat.say("a")
    answer = chat.say("b").answers[0]
    ids = chat._ids[: -len(answer.token_ids)]
    assert answer.token_ids == _without_memory(model, tokenizer, ids, 3)
    model.offload.close()


def test_the_end_token_has_a_name():
    assert ascii_tokenizer().eos_token == END
