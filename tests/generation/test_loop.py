"""Requests that come and go: each gets what the library's own model gives it alone, whoever else is there."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from smoe.errors import ContextError, EngineBusyError, EngineStateError, ModelError
from smoe.generation.loop import UNSETTLED_STEPS, DecodeLoop
from smoe.generation.request import End, EndReason, Piece, Request
from smoe.generation.sampling_settings import Sampling
from tests import oracle, zoo

Open = Callable[..., Any]
RECURRENT = ("qwen3_next", "lfm2_moe")
"""A state has no positions, so such texts are decoded in turn."""
CHANCE = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(3, 128, (n,), generator=CHANCE).tolist() for n in (5, 23, 9, 40, 2)]


class NoText:
    """A tokenizer as far as a loop needs one that shows nothing."""

    pad_token_id = eos_token_id = bos_token_id = None

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(chr(64 + token) for token in ids)


def asked(ids: Sequence[int], tokens: int = 12, **more: Any) -> tuple[Request, list[Piece | End]]:
    heard: list[Piece | End] = []
    sampling = Sampling(max_new_tokens=tokens, ignores_end=True, **more)
    return Request(ids, sampling, heard.append), heard


@functools.lru_cache(maxsize=1)
def library_model(folder: Path) -> Any:
    return oracle.reference(folder)


def reference(folder: Path, ids: Sequence[int], tokens: int) -> list[int]:
    """The unmodified library, greedily."""
    made = library_model(folder).generate(
        torch.tensor([list(ids)]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    return [int(token) for token in made[0, len(ids) :]]


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_whoever_joins_or_leaves(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    """Three rows for five requests of several lengths, of which some come while others are decoded and one is given up:
    would catch keys of another text, a row that is moved too late, a place that is counted twice."""
    folder = toy(family)
    loop = DecodeLoop(open_model(folder, "half", max_sequences=3), NoText())
    lengths = [14, 5, 9, 11, 7]
    requests = [asked(ids, tokens) for ids, tokens in zip(PROMPTS, lengths, strict=True)]
    given_up, _ = asked(PROMPTS[1], 30)
    for request, _ in requests[:2]:
        loop.hand_in(request)
    loop.hand_in(given_up)
    for step in range(80):
        if step == 6:
            loop.hand_in(requests[2][0])
        if step == 8:
            given_up.is_cancelled = True
            loop.hand_in(requests[3][0])
        if step == 9:
            loop.hand_in(requests[4][0])
        loop.step()
    for (request, heard), tokens in zip(requests, lengths, strict=True):
        assert request.new_ids == reference(folder, request.ids, tokens)
        assert heard[-1][:1] == (EndReason.LENGTH,)
    assert len(given_up.new_ids) < 30
    assert loop._rows is not None and loop._rows.share_passes is (family not in RECURRENT)
    assert not loop.running and not loop.waiting


def test_steps_of_one_text_are_counted_apart(toy: Callable[..., Path], open_model: Open) -> None:
    """Would catch steps of two texts among them, the first steps of a text, and the steps of the last series left
    out."""
    loop = DecodeLoop(open_model(toy("mixtral"), max_sequences=2), NoText())
    for ids in (PROMPTS[0], PROMPTS[2]):
        request, _ = asked(ids, 9 + UNSETTLED_STEPS)
        loop.hand_in(request)
        loop.run(until_idle=True)
    assert loop.counters_of_one_text.forward_passes == loop.counters_of_one_text.tokens == 8 + 8
    long, short = asked(PROMPTS[0], 16 + UNSETTLED_STEPS)[0], asked(PROMPTS[2], 4 + UNSETTLED_STEPS)[0]
    for request in (long, short):
        loop.hand_in(request)
    loop.run(until_idle=True)
    counted = loop.counters_of_one_text
    assert counted.tokens == counted.forward_passes and 16 < counted.forward_passes < 16 + 15
    assert 0 < counted.decode_uses < loop._engine.stats().decode_uses


def test_a_text_of_which_enough_has_come_ends(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"), max_sequences=1)
    heard: list[Piece | End] = []

    def hear(what: Piece | End) -> None:
        heard.append(what)
        request.has_enough = len(heard) == 3

    request = Request(PROMPTS[1], Sampling(max_new_tokens=30, ignores_end=True), hear)
    loop = DecodeLoop(model, NoText())
    loop.hand_in(request)
    loop.run(until_idle=True)
    assert len(request.new_ids) == 3 and heard[3:] == [End(EndReason.STOP, "")]


def test_bits_are_those_of_each_alone(toy: Callable[..., Path], open_model: Open) -> None:
    """In bf16, with our kernels, not up to rounding: log probabilities of eight texts together are those of each."""
    model = open_model(toy("qwen3_moe", dtype=torch.bfloat16), "half", max_sequences=8)
    prompts = [[3 + n, 40, 50 + 7 * n, *range(9, 9 + 3 * n)] for n in range(8)]

    def logprobs(together: bool) -> list[list[float]]:
        loop, found = DecodeLoop(model, NoText()), []
        for ids in prompts:
            request, heard = asked(ids)
            request.logprobs = 0
            found.append(heard)
            loop.hand_in(request)
            if not together:
                loop.run(until_idle=True)
        loop.run(until_idle=True)
        return [[piece.logprob for piece in heard if isinstance(piece, Piece)] for heard in found]

    apart, together = logprobs(False), logprobs(True)
    if model.offload.arithmetic == "native":
        assert together == apart
    for ours, theirs in zip(together, apart, strict=True):
        assert ours == pytest.approx(theirs, abs=0.05)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_short_prompts_are_read_in_one_pass(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    """And decoded as if each had been read alone; in bf16 with the same bits. Would catch padding that is attended to,
    or that asks for experts, and a mask of another row."""
    folder = toy(family)
    model = open_model(folder, "half", max_sequences=4)
    loop = DecodeLoop(model, NoText())
    lengths = (5, 23, 9, 24)
    prompts = [[3 + n, *range(9 + 7 * n, 8 + 7 * n + length)] for n, length in enumerate(lengths)]
    requests = [asked(ids, 8)[0] for ids in prompts]
    for request in requests:
        loop.hand_in(request)
    before = model.offload.stats()
    loop.step()
    after = model.offload.stats() - before
    is_shared = family not in RECURRENT
    assert [len(request.new_ids) for request in requests] == [1] * (4 if is_shared else 1) + [0] * (
        0 if is_shared else 3
    )
    if is_shared:
        assert after.forward_passes == 2, "one of them is the proof, of the shortest"
        assert after.tokens == sum(lengths) + lengths[0]
    loop.run(until_idle=True)
    for request in requests:
        assert request.new_ids == reference(folder, request.ids, 8)


def test_a_text_that_is_gone_on_with_is_not_read_again(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("mixtral")
    model = open_model(folder, "half", max_sequences=2)
    loop = DecodeLoop(model, NoText())
    first, _ = asked(PROMPTS[3], 10)
    other, _ = asked(PROMPTS[1], 10)
    for request in (first, other):
        loop.hand_in(request)
    loop.run(until_idle=True)
    before = model.offload.stats().tokens
    conversation = [*PROMPTS[3], *first.new_ids, 17, 18, 19]
    again, _ = asked(conversation, 4)
    loop.hand_in(again)
    loop.run(until_idle=True)
    assert again.reused_tokens == len(PROMPTS[3]) + 9  # the last new token was never given to the model
    assert model.offload.stats().tokens - before == len(conversation) - again.reused_tokens + 3
    assert again.new_ids == reference(folder, conversation, 4)


def test_conversations_that_begin_alike_keep_their_rows(toy: Callable[..., Path], open_model: Open) -> None:
    """As all do that a chat template has written: three of them in turn, on four rows; of a fifth and sixth the one
    that nobody has wanted longest goes."""
    folder = toy("mixtral")
    loop = DecodeLoop(open_model(folder, "half", max_sequences=4), NoText())
    texts = [[7, 8, 9 + n, *range(20 + n, 30 + n)] for n in range(6)]

    def ask(n: int) -> int:
        request, _ = asked(texts[n], 3)
        loop.hand_in(request)
        loop.run(until_idle=True)
        assert request.new_ids == reference(folder, texts[n], 3)
        texts[n] = [*texts[n], *request.new_ids, 40, 41]
        return request.reused_tokens

    assert [ask(n) for n in (0, 1, 2)] == [0, 2, 2]
    for _ in range(2):
        known = [len(text) - 3 for text in texts[:3]]  # two tokens are the question, the one before was not computed
        assert [ask(n) for n in (0, 1, 2)] == known
    assert [ask(n) for n in (3, 4)] == [2, 2]  # the fourth row, then the first conversation's
    assert ask(1) > 10 and ask(0) == 2


def test_texts_share_a_beginning_that_is_still_in_use(toy: Callable[..., Path], open_model: Open) -> None:
    """As the answers to one question do."""
    folder = toy("mixtral")
    loop = DecodeLoop(open_model(folder, "half", max_sequences=3), NoText())
    requests = [asked([*PROMPTS[3], *tail], 8)[0] for tail in ((5,), (5,), (9, 9))]
    for request in requests:
        loop.hand_in(request)
    loop.run(until_idle=True)
    assert [request.reused_tokens for request in requests] == [0, len(PROMPTS[3]), len(PROMPTS[3])]
    for request in requests:
        assert request.new_ids == reference(folder, request.ids, 8)


def test_the_same_seed_draws_the_same_whoever_is_there(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"), "half", max_sequences=3)
    heat = {"temperature": 1.0, "top_k": 20, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    found = []
    for others in (0, 2):
        loop = DecodeLoop(model, NoText())
        ours, _ = asked(PROMPTS[0], 12, **heat)
        for request in (ours, *(asked(PROMPTS[n + 1], 9, temperature=1.0, seed=n)[0] for n in range(others))):
            loop.hand_in(request)
        loop.run(until_idle=True)
        found.append(ours.new_ids)
    assert found[0] == found[1]
    assert len(set(found[0])) > 3


def test_a_fault_fails_the_row_that_it_is_in(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN and an error of a pass, of one text of three: the others do not notice."""
    folder = toy("mixtral")
    loop = DecodeLoop(open_model(folder, "half", max_sequences=3), NoText())
    requests = [asked(ids, 10) for ids in PROMPTS[:3]]
    for request, _ in requests:
        loop.hand_in(request)
    while len(requests[2][0].new_ids) < 2:
        loop.step()
    rows: Any = loop._rows
    real, victim = rows._pass, requests[1][0].new_ids[-1]

    def failing(ids: list[list[int]], *rest: Any) -> torch.Tensor:
        if [victim] in ids:
            raise ModelError("the disk has gone")
        return real(ids, *rest)

    monkeypatch.setattr(rows, "_pass", failing)
    loop.step()
    monkeypatch.undo()
    loop.run(until_idle=True)
    ends = [heard[-1] for _, heard in requests]
    assert [end.reason for end in ends] == [EndReason.LENGTH, EndReason.FAILED, EndReason.LENGTH]
    assert str(ends[1].error) == "the disk has gone"
    for request, _ in (requests[0], requests[2]):
        assert request.new_ids == reference(folder, request.ids, 10)
    again, _ = asked(PROMPTS[1], 10)
    loop.hand_in(again)
    loop.run(until_idle=True)
    assert again.reused_tokens == 0, "what a failed text has left is not trusted"
    assert again.new_ids == reference(folder, PROMPTS[1], 10)


def test_what_cannot_be_answered_is_refused_at_once(toy: Callable[..., Path], open_model: Open) -> None:
    loop = DecodeLoop(open_model(toy("mixtral"), "half", context_tokens=32), NoText(), most_waiting=1)
    with pytest.raises(ContextError, match="33 tokens, and memory is reserved for a context of 32"):
        loop.hand_in(asked([5] * 33)[0])
    loop.hand_in(asked([5])[0])
    with pytest.raises(EngineBusyError, match="1 requests are waiting already"):
        loop.hand_in(asked([5])[0])
    loop.close()
    with pytest.raises(EngineStateError, match="takes no more requests"):
        loop.hand_in(asked([5])[0])
    loop.run()
    assert not loop.waiting


def test_a_full_context_ends_a_text(toy: Callable[..., Path], open_model: Open) -> None:
    """While another one, that has moved it to the front, goes on."""
    folder = toy("mixtral")
    loop = DecodeLoop(open_model(folder, "half", max_sequences=2, context_tokens=48), NoText())
    long, heard = asked(PROMPTS[3], 100)
    short, _ = asked(PROMPTS[0], 40)
    for request in (short, long):
        loop.hand_in(request)
    loop.run(until_idle=True)
    assert len(long.ids) + len(long.new_ids) == 48 and heard[-1][0] is EndReason.LENGTH
    assert long.new_ids == reference(folder, long.ids, 8)
    assert short.new_ids == reference(folder, short.ids, 40)


def test_reading_leaves_half_of_the_time_to_those_who_decode(toy: Callable[..., Path], open_model: Open) -> None:
    """On a clock of our own: a prompt's pieces, each as long as four steps, let four steps through after each."""
    model = open_model(toy("mixtral"), "half", max_sequences=2, prefill_tokens=8, context_tokens=96)
    loop, log, clock = DecodeLoop(model, NoText()), list[str](), [0.0]
    loop._engine = _Clocked(model.offload, clock)  # type: ignore[assignment]
    for name, seconds in (("_read", 4.0), ("_decode", 1.0)):
        setattr(loop, name, _noted(getattr(loop, name), name, log, clock, seconds))
    first, _ = asked(PROMPTS[0], 30)
    loop.hand_in(first)
    while len(first.new_ids) < 3:
        loop.step()
    log.clear()
    loop.hand_in(asked(PROMPTS[3], 2)[0])  # five pieces of 8
    loop.run(until_idle=True)
    assert [*map(len, "".join("r" if each == "_read" else "d" for each in log).split("r"))][:5] == [0, 4, 4, 4, 4]


def test_the_state_of_a_prefill_counts_the_tokens_that_are_read(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"), "half", max_sequences=2, prefill_tokens=8, context_tokens=96)
    loop = DecodeLoop(model, NoText())
    assert loop.prefill is None
    request, _ = asked(PROMPTS[3], 2)
    loop.hand_in(request)
    read = []
    while not request.new_ids:
        loop.step()
        if loop.prefill is not None:
            read.append((loop.prefill.tokens_read, loop.prefill.tokens))
    assert read == [(8 * piece, len(request.ids)) for piece in range(1, len(read) + 1)] and len(read) == 4
    loop.run(until_idle=True)
    assert loop.prefill is None


class _Clocked:
    """An engine with another clock."""

    def __init__(self, engine: Any, clock: list[float]) -> None:
        self._engine, self._clock = engine, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def now(self) -> float:
        return self._clock[0]


def _noted(of: Callable[..., Any], name: str, log: list[str], clock: list[float], seconds: float) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        log.append(name)
        clock[0] += seconds
        return of(*args)

    return run


def test_requests_come_from_any_thread(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("mixtral")
    loop = DecodeLoop(open_model(folder, "half", max_sequences=4), NoText())
    thread = threading.Thread(target=loop.run)
    thread.start()
    requests = [asked(ids, 6)[0] for ids in PROMPTS]
    senders = [threading.Thread(target=loop.hand_in, args=(request,)) for request in requests]
    for each in senders:
        each.start()
    for each in senders:
        each.join()
    loop.close()
    thread.join(60)
    assert not thread.is_alive()
    for request in requests:
        assert request.new_ids == reference(folder, request.ids, 6)
