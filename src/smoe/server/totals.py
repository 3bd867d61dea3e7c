"""The totals of a server's work, printed when it ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from smoe.machine.process_memory import ProcessMemory, peak_bytes, process_memory
from smoe.server.events import CLIENT_GONE
from smoe.server.openapi import OPERATIONS
from smoe.server.serving import Serving

_OF_TEXT = frozenset(each.path for each in OPERATIONS if each.generates_text)


@dataclass(frozen=True)
class Totals:
    """The counts of one server's work since its start: requests, tokens, seconds and bytes."""

    requests: int
    """Requests for text, whatever their result."""
    other_requests: int
    """All other requests, whatever their result: for the page and its files, the list of models, token counts, health
    checks, metrics, and for something that this server does not have, such as embeddings."""
    refused_requests: int
    """Requests for text that were answered with 4xx."""
    failed_requests: int
    """Requests for text that were answered with 5xx, and streams that ended with an error."""
    abandoned_requests: int
    """Requests for text whose client disconnected before the response."""
    prompt_tokens: int
    """Tokens of prompts whose prefill began."""
    reused_tokens: int
    """Prompt tokens that were reused from the KV cache."""
    new_tokens: int
    busy_seconds: float
    """Seconds during which at least one request waited for a token."""
    hit_ratio: float | None
    """The share of the experts used in decoding that were in memory; None if no token was decoded."""
    bytes_read: int
    """Bytes of experts read from disk for requests: not those of the load and the first pass at the start."""
    peak_memory_bytes: int
    memory_budget_bytes: int
    process_peak_bytes: int | None
    process: ProcessMemory | None
    """The parts of the process's peak memory; None if the budget is a GPU's memory, or if the system does not report
    it."""

    @property
    def answered_requests(self) -> int:
        return self.requests - self.refused_requests - self.failed_requests - self.abandoned_requests

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all texts divided by `busy_seconds`; None if no request has waited for a token."""
        return self.new_tokens / self.busy_seconds if self.new_tokens and self.busy_seconds > 0 else None

    def as_json(self) -> dict[str, Any]:
        parts = None if self.process is None else self.process.as_json()
        return asdict(self) | {"process": parts, "tokens_per_second": self.tokens_per_second}


def _kind(status: int) -> str:
    """Return the kind of a response: `4xx` for a refusal, `5xx` for a failure, and the status of a client that left."""
    return str(status) if status == CLIENT_GONE else f"{status // 100}xx"


def totals_of(serving: Serving) -> Totals:
    """Return the totals of a server whose model is still open."""
    engine, meters = serving.engine, serving.meters
    statuses, others = Counter[str](), 0
    for (path, status), count in meters.count("smoe_http_requests").items():
        if path in _OF_TEXT:
            statuses[_kind(int(status))] += int(count)
        else:
            others += int(count)
    counters = serving.counters

    def whole(name: str) -> int:
        return int(sum(meters.count(name).values()))

    return Totals(
        requests=statuses.total(),
        other_requests=others,
        refused_requests=statuses["4xx"],
        failed_requests=statuses["5xx"],
        abandoned_requests=statuses[str(CLIENT_GONE)],
        prompt_tokens=whole("smoe_prompt_tokens"),
        reused_tokens=whole("smoe_prompt_tokens_reused"),
        new_tokens=whole("smoe_generated_tokens"),
        busy_seconds=serving.busy_seconds,
        hit_ratio=counters.hit_ratio if counters.decode_uses else None,
        bytes_read=counters.bytes_read,
        peak_memory_bytes=engine.peak_memory_bytes(),
        memory_budget_bytes=engine.ledger.budget_bytes,
        process_peak_bytes=peak_bytes(),
        process=process_memory(engine.peak_memory_bytes()) if engine.slot_memory.device.type == "cpu" else None,
    )
