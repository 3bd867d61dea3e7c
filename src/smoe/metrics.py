"""The counters of a running engine. `docs/metrics.md` explains them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass
class Counters:
    """Numbers of events, and seconds, since the engine started. The difference of two snapshots describes an
    interval."""

    forward_passes: int = 0
    tokens: int = 0
    """The number of tokens that went through the model, without padding."""
    decode_uses: int = 0
    """The number of uses of experts in decode steps: one for each expert, layer and step."""
    decode_hits: int = 0
    """The number of decode uses whose expert was resident or in flight when the layer was planned."""
    prefill_uses: int = 0
    prefill_hits: int = 0
    loads: int = 0
    """The number of loads that were started because a layer needed the expert (demand loads)."""
    low_score: int = 0
    """The number of routes of decode steps whose expert is low-score by the substitution threshold."""
    low_score_missing: int = 0
    """The number of low-score routes whose expert is neither resident nor top-score for another token."""
    top_score_missing: int = 0
    """The number of routes of decode steps whose expert is top-score and not resident."""
    substituted: int = 0
    """The number of routes that a substitute computed or that were dropped. If misses are resolved by quality cost,
    dropped routes are counted in `skipped` instead."""
    routes: int = 0
    """The number of routes of decode steps to which the substitution threshold was applied."""
    low_served: int = 0
    """The number of decode uses that were computed with low-precision copies."""
    low_loads: int = 0
    """The number of demand loads of low-precision copies in decode steps."""
    skipped: int = 0
    """The number of experts that decode steps dropped because of low importance."""
    upgrades: int = 0
    """The number of loads of full copies for experts that were computed with low-precision copies."""
    prefetches: int = 0
    prefetches_used: int = 0
    """The number of prefetched experts that their layer has used."""
    prefetches_top_score: int = 0
    """The number of prefetched experts that were top-score in their layer; counted only if the substitution threshold
    is applied."""
    bytes_read: int = 0
    """The number of bytes read from disk for experts, alignment included."""
    bytes_cached: int = 0
    """The part of `bytes_read` that was copied from the page cache although reads are direct."""
    read_busy_seconds: float = 0.0
    """The seconds during which at least one read was running."""
    forward_seconds: float = 0.0
    wait_seconds: float = 0.0
    """The part of the forward time in which the engine waited for loads of experts."""
    compute_seconds: float = 0.0
    """The part of the forward time in which experts were computed."""
    late_seconds: float = 0.0
    """On an emulated device: the reported seconds by which this machine was slower than the emulated one."""
    host_computed: int = 0
    """The number of decode uses that the CPU computed in parallel with the device."""
    prefill_host_computed: int = 0
    """The number of prefill uses that the CPU computed in parallel with the device."""
    host_seconds: float = 0.0
    """The seconds that the CPU spent on `host_computed` and `prefill_host_computed`."""
    host_wait_seconds: float = 0.0
    """The part of the forward time in which the engine waited for experts that the CPU computes in parallel with the
    device."""
    device_wait_seconds: float = 0.0
    """The part of the forward time in which the host waited until a GPU had computed a layer's router output."""
    look_aheads: int = 0
    """The number of layers of decode steps in which a look-ahead was made. In the other layers, there was no time for a
    look-ahead, or no load to wait for."""
    look_ahead_seconds: float = 0.0
    """The part of the forward time spent on predictions. It consists of running the next layer's attention and router,
    or waiting for a predictor on another thread, and of starting the predicted loads."""
    plan_seconds: float = 0.0
    """The part of the forward time spent in smoe's Python code for planning and bookkeeping."""

    @property
    def hit_ratio(self) -> float:
        """The fraction of decode uses that needed no demand load; 1 if there were no uses."""
        return self.decode_hits / self.decode_uses if self.decode_uses else 1.0

    @property
    def kept_share(self) -> float:
        """The fraction of expert uses on the main compute unit that needed no load, neither by demand nor by prefetch;
        0 if there were no uses."""
        elsewhere = self.host_computed + self.prefill_host_computed
        uses = self.decode_uses + self.prefill_uses - elsewhere
        return max(0.0, 1.0 - (self.loads + self.prefetches) / uses) if uses else 0.0

    @property
    def elsewhere_seconds(self) -> float:
        """The part of the forward time that is spent on experts but not on computing them: waiting for loads and
        looking ahead."""
        return self.wait_seconds + self.host_wait_seconds + self.look_ahead_seconds

    @property
    def dense_seconds(self) -> float:
        """The part of the forward time outside the experts: attention, norms, routers, shared experts and logits."""
        ours = self.elsewhere_seconds + self.compute_seconds + self.plan_seconds + self.device_wait_seconds
        return max(0.0, self.forward_seconds - ours)

    def copy(self) -> Counters:
        return replace(self)

    def __add__(self, other: Counters) -> Counters:
        return Counters(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __sub__(self, earlier: Counters) -> Counters:
        before = asdict(earlier)
        return Counters(**{name: value - before[name] for name, value in asdict(self).items()})
