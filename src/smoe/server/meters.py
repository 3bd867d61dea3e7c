"""The server's metrics for Prometheus (`/metrics`). Names begin with `smoe_`, those of the process with `process_`;
units are seconds, bytes, tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from smoe.generation.loop import DecodeLoop
from smoe.generation.request import End, Piece, Request
from smoe.metrics import Counters
from smoe.runtime.engine import Engine

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10)

disable_created_metrics()  # the start time of each counter: an additional series that Prometheus does not use


class Meters:
    """The metrics of one server. Only the decode loop's thread calls `on_event`; any thread may call the other
    methods."""

    def __init__(self, engine: Engine, loop: DecodeLoop, counters: Callable[[], Counters]) -> None:
        """`counters` returns the engine's counters since the server started."""
        self._registry = registry = CollectorRegistry()
        self._last_token_at: dict[int, float] = {}
        """The time of the last token of each running text."""
        self.answers = Counter(
            "smoe_http_requests_total",
            "HTTP responses sent, by path and status.",
            ("path", "status"),
            registry=registry,
        )
        self._texts = Counter("smoe_texts_total", "Finished texts, by reason.", ("reason",), registry=registry)
        self._prompt = Counter("smoe_prompt_tokens_total", "Tokens of the prompts started.", registry=registry)
        self._reused = Counter(
            "smoe_prompt_tokens_reused_total", "Prompt tokens reused from the KV cache.", registry=registry
        )
        self._new = Counter("smoe_generated_tokens_total", "Tokens generated.", registry=registry)
        self._first = Histogram(
            "smoe_time_to_first_token_seconds",
            "Time from the request to the first token.",
            buckets=_FIRST,
            registry=registry,
        )
        self._queued = Histogram(
            "smoe_queue_seconds", "Time from the request to the start of its prompt.", buckets=_FIRST, registry=registry
        )
        self._gap = Histogram(
            "smoe_time_between_tokens_seconds", "Time between two tokens of a text.", buckets=_GAP, registry=registry
        )
        registry.register(_Live(engine, loop, counters))  # type: ignore[arg-type]
        registry.register(_Process())  # type: ignore[arg-type]

    def on_event(self, request: Request, what: Piece | End) -> None:
        """Count one event of the decode loop: a generated token, or the end of a text."""
        now = time.perf_counter()
        if isinstance(what, End):
            self._last_token_at.pop(id(request), None)
            self._texts.labels(what.reason.value).inc()
            return
        self._new.inc()
        before = self._last_token_at.get(id(request))
        if before is not None:
            self._gap.observe(now - before)
        else:
            self._prompt.inc(len(request.ids))
            self._reused.inc(request.reused_tokens)
            self._queued.observe(request.begun - request.asked)
            self._first.observe(request.first - request.asked)
        self._last_token_at[id(request)] = now

    def count(self, name: str) -> dict[tuple[str, ...], float]:
        """Return {labels: value} of one counter, such as `smoe_generated_tokens`."""
        found = [each for each in self._registry.collect() if each.name == name]
        return {
            tuple(sample.labels.values()): sample.value
            for each in found
            for sample in each.samples
            if sample.name.endswith("_total")
        }

    def shown(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _Live:
    """Metrics of the engine and the decode loop. Their values are read whenever `/metrics` is requested."""

    def __init__(self, engine: Engine, loop: DecodeLoop, counters: Callable[[], Counters]) -> None:
        self._engine, self._loop, self._counters = engine, loop, counters

    def collect(self) -> Iterator[Metric]:
        counters, ledger = self._counters(), self._engine.ledger
        yield GaugeMetricFamily("smoe_texts_running", "Texts in prefill or decode.", self._loop.running)
        yield GaugeMetricFamily("smoe_texts_waiting", "Texts in the queue.", self._loop.waiting)
        yield GaugeMetricFamily("smoe_budget_bytes", "The memory budget.", ledger.budget_bytes)
        if counters.decode_uses:
            what = "Share of the experts used in decoding that were in memory. Absent before the first decode step."
            yield GaugeMetricFamily("smoe_expert_hit_ratio", what, counters.hit_ratio)
        for name, what, value in (
            ("expert_uses", "Experts used in decoding.", counters.decode_uses),
            ("expert_hits", "Experts used in decoding that were in memory.", counters.decode_hits),
            ("expert_loads", "Loads of missing experts.", counters.loads),
            ("expert_prefetches", "Prefetches of experts.", counters.prefetches),
            ("expert_prefetches_used", "Prefetches of experts that were used.", counters.prefetches_used),
            ("experts_substituted", "Routes computed by a substitute, or dropped.", counters.substituted),
            (
                "expert_read_bytes",
                "Bytes of experts read from disk since the server began to listen.",
                counters.bytes_read,
            ),
            ("expert_read_seconds", "Time with at least one read in flight.", counters.read_busy_seconds),
            ("expert_wait_seconds", "Time that forward passes waited for experts.", counters.wait_seconds),
            ("forward_seconds", "Time in forward passes of the model.", counters.forward_seconds),
            ("forward_passes", "Forward passes of the model.", counters.forward_passes),
        ):
            yield CounterMetricFamily(f"smoe_{name}", what, value)


class _Process:
    """The process's memory and CPU time, by the names that Prometheus's client libraries use."""

    def __init__(self) -> None:
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        with self._process.oneshot():
            memory, cpu = self._process.memory_info(), self._process.cpu_times()
            yield GaugeMetricFamily("process_resident_memory_bytes", "Memory in use.", memory.rss)
            yield GaugeMetricFamily("process_virtual_memory_bytes", "Address space.", memory.vms)
            yield CounterMetricFamily("process_cpu_seconds", "CPU time of all threads.", cpu.user + cpu.system)
            yield GaugeMetricFamily("process_threads", "Threads.", self._process.num_threads())
            yield GaugeMetricFamily(
                "process_start_time_seconds", "Start time of the process in Unix time.", self._process.create_time()
            )
            if psutil.POSIX:
                yield GaugeMetricFamily("process_open_fds", "Open files, sockets included.", self._process.num_fds())
