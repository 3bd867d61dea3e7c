"""Counters of a running engine (explained in `docs/metrics.md`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass
class Counters:
    """Event counts and times since the engine started; the difference of two snapshots describes an interval."""

    forward_passes: int = 0
    tokens: int = 0
    """The number of tokens that went through the model, without padding."""
    decode_uses: int = 0
    """The number of expert uses in decode steps: one per expert, layer and step."""
    decode_hits: int = 0
    """The number of decode uses whose expert was resident or in flight when the layer was planned."""
    prefill_uses: int = 0
    prefill_hits: int = 0
    loads: int = 0
    """The number of demand loads that were started."""
    low_score: int = 0
    """The number of routes of decode steps whose expert is low-score by the substitution threshold."""
    low_score_missing: int = 0
    """The number of low-score routes whose expert is neither resident nor top-score for another token."""
    top_score_missing: int = 0
    """The number of routes of decode steps whose expert is top-score and not resident."""
    substituted: int = 0
    """The number of routes that a substitute served or that were dropped. If misses are priced, dropped ones are in
    `skipped` instead."""
    routes: int = 0
    """The number of routes of decode steps to which the substitution threshold was applied."""
    low_served: int = 0
    """The number of decode uses that low-precision copies served."""
    low_loads: int = 0
    """The number of demand loads of low-precision copies in decode steps."""
    skipped: int = 0
    """The number of experts that decode steps dropped for their little importance."""
    upgrades: int = 0
    """The number of loads that were started for experts that a low-precision copy served."""
    prefetches: int = 0
    prefetches_used: int = 0
    """The number of prefetched experts that their layer then used."""
    prefetches_top_score: int = 0
    """The number of prefetched experts that were top-score in their layer; counted only if the substitution threshold
    is applied."""
    bytes_read: int = 0
    """The number of bytes read from disk for experts, alignment included."""
    read_busy_seconds: float = 0.0
    """The time during which at least one read was running."""
    forward_seconds: float = 0.0
    wait_seconds: float = 0.0
    """The part of the forward time spent waiting for experts to be loaded."""
    compute_seconds: float = 0.0
    """The part of the forward time spent computing experts."""
    late_seconds: float = 0.0
    """On an emulated device: the reported time by which this machine was slower than the emulated one."""
    host_computed: int = 0
    """The number of decode uses that the CPU computed in parallel with the device."""
    prefill_host_computed: int = 0
    """The number of prefill uses that the CPU computed in parallel with the device."""
    host_seconds: float = 0.0
    """The time that the CPU spent on these decode and prefill uses."""
    host_wait_seconds: float = 0.0
    """The part of the forward time spent waiting for experts that the CPU computes in parallel with the device."""
    device_wait_seconds: float = 0.0
    """The part of the forward time in which the host waited until a GPU had computed a layer's router output."""
    look_aheads: int = 0
    """The number of layers of decode steps that looked ahead. The others had no time for it, or nothing to wait for."""
    look_ahead_seconds: float = 0.0
    """The part of the forward time spent on predictions: running the next layer's attention and router, or waiting for
    a predictor on another thread, and starting its loads."""
    plan_seconds: float = 0.0
    """The part of the forward time spent in smoe's Python code for planning and bookkeeping."""

    @property
    def hit_ratio(self) -> float:
        """The share of decode uses that needed no demand load; 1 if there were none."""
        return self.decode_hits / self.decode_uses if self.decode_uses else 1.0

    @property
    def kept_share(self) -> float:
        """The share of expert uses on the main compute unit that needed no load, by demand or prefetch; 0 if there were
        none."""
        elsewhere = self.host_computed + self.prefill_host_computed
        uses = self.decode_uses + self.prefill_uses - elsewhere
        return max(0.0, 1.0 - (self.loads + self.prefetches) / uses) if uses else 0.0

    @property
    def elsewhere_seconds(self) -> float:
        """The part of the experts' time that is not computation: waiting and looking ahead."""
        return self.wait_seconds + self.host_wait_seconds + self.look_ahead_seconds

    @property
    def dense_seconds(self) -> float:
        """The part of the forward time outside the experts: attention, norms, routers, shared experts and logits."""
        ours = self.elsewhere_seconds + self.compute_seconds + self.plan_seconds + self.device_wait_seconds
        return max(0.0, self.forward_seconds - ours)

    def copy(self) -> Counters:
        return replace(self)

    def __sub__(self, earlier: Counters) -> Counters:
        before = asdict(earlier)
        return Counters(**{name: value - before[name] for name, value in asdict(self).items()})
