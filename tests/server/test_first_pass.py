"""What a server does before anybody may ask: all that a request's first use would have to wait for, and nothing that a
request could see.

Would catch a first request that compiles a kernel, a prompt that is believed to have been read before, tokens counted
that nobody asked for, an error that is swallowed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedModel

from smoe.generation.loop import DecodeLoop
from smoe.generation.request import Piece, Request
from smoe.generation.sampling_settings import Sampling
from smoe.memory.movers import SlotMover
from smoe.memory.reading_threads import Ticket
from smoe.routing import Phase
from smoe.server.first_pass import first_pass
from smoe.server.serving import Serving
from smoe.server.settings import ServerConfig
from smoe.server.totals import totals_of
from tests import oracle
from tests.generation.test_loop import NoText

PROMPT = [0, 1, 2, 3, 4, 5, 6, 7, 300, 12]
"""It begins with what the first pass reads."""


def asked(model: PreTrainedModel, tokenizer: Any) -> tuple[list[int], Request]:
    tokens: list[int] = []
    request = Request(PROMPT, Sampling(max_new_tokens=6), lambda what: _add(tokens, what))
    loop = DecodeLoop(model, tokenizer)
    loop.hand_in(request)
    loop.run(until_idle=True)
    return tokens, request


def _add(tokens: list[int], what: object) -> None:
    if isinstance(what, Piece):
        tokens.append(what.token)


def test_it_reads_a_prompt_and_decodes(demo: PreTrainedModel, demo_tokenizer: Any) -> None:
    engine: Any = demo.offload
    with engine.recording() as routing:
        first_pass(demo, demo_tokenizer)
        phases = {step.phase for step in routing}
    assert phases == {Phase.PREFILL, Phase.DECODE}


def test_no_request_sees_it(demo: PreTrainedModel, demo_tokenizer: Any) -> None:
    without, _ = asked(demo, demo_tokenizer)
    first_pass(demo, demo_tokenizer)
    tokens, request = asked(demo, demo_tokenizer)
    assert tokens == without
    assert request.reused_tokens == 0


def test_a_server_counts_from_its_start(demo: PreTrainedModel, demo_tokenizer: Any) -> None:
    serving = Serving(demo, demo_tokenizer, "demo", ServerConfig())
    first_pass(demo, demo_tokenizer)
    serving.start()
    try:
        totals = totals_of(serving)
        assert (totals.requests, totals.new_tokens, totals.bytes_read, totals.hit_ratio) == (0, 0, 0, None)
        families = text_string_to_metric_families(serving.meters.shown().decode())
        shown = {each.name: each.samples[0].value for each in families if each.samples}
        assert shown["smoe_expert_read_bytes"] == shown["smoe_expert_uses"] == shown["smoe_forward_passes"] == 0
        assert "smoe_expert_hit_ratio" not in shown
    finally:
        serving.close()


def test_what_fails_is_raised(demo: PreTrainedModel, demo_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no arithmetic today")

    monkeypatch.setattr(demo, "forward", failing)
    with pytest.raises(RuntimeError, match="no arithmetic today"):
        first_pass(demo, demo_tokenizer)


def test_a_context_of_one_token_leaves_no_room(
    toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel], demo_tokenizer: Any
) -> None:
    model = open_model(toy("qwen3_moe"), "minimum", context_tokens=1)
    first_pass(model, demo_tokenizer)
    assert model.offload.stats().decode_uses == 0


def test_it_reads_no_expert_of_a_model_that_does_not_fit(
    toy: Callable[..., Path], open_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch gigabytes that are read before the address is printed, and slots that count as experts."""
    folder = toy("qwen3_moe")
    model = open_model(folder, "half", preload=False)
    engine, read, move = model.offload, list[Any](), SlotMover.move

    def noted(mover: SlotMover, ticket: Ticket, between: Callable[[], None] | None) -> int:
        read.append(ticket.load.key)
        return move(mover, ticket, between)

    monkeypatch.setattr(SlotMover, "move", noted)
    engine._arena.bytes.fill_(0xFF)  # NaN; proofs of kernels leave experts of other layers there
    with engine.recording() as routing:
        first_pass(model, NoText())
    assert routing and not read and not engine.executor.arrivals.table.ready
    assert engine.stats().tokens == 0, "the counters begin anew"
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert read
