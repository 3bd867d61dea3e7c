"""Counters of a running engine and what they mean (prose: `docs/metrics.md`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass
class Counters:
    """What has happened since the engine started; subtract two snapshots for an interval."""

    forward_passes: int = 0
    tokens: int = 0
    """Real tokens that went through the model."""
    decode_uses: int = 0
    """Expert uses in decode steps: one for each expert, layer and step."""
    decode_hits: int = 0
    """Those whose experts were resident or under way when the layer's plan was made."""
    prefill_uses: int = 0
    prefill_hits: int = 0
    loads: int = 0
    """Demand loads started."""
    low_score: int = 0
    """Routes of decode steps whose expert was low-score by the substitution threshold."""
    low_score_missing: int = 0
    """Those of them whose expert was not in memory."""
    top_score_missing: int = 0
    """Routes of decode steps whose expert was top-score and not at hand."""
    substituted: int = 0
    """Routes served by a substitute, or dropped; what is left out within a budget is `skipped`."""
    routes: int = 0
    """Routes of decode steps on which substitution was asked to decide."""
    low_served: int = 0
    """Decode uses that low copies served, where importance decides."""
    low_loads: int = 0
    """Demand loads of low copies in decode steps."""
    skipped: int = 0
    """Experts that decode steps left out for their little importance."""
    upgrades: int = 0
    """Loads begun for experts that a low copy served."""
    prefetches: int = 0
    prefetches_used: int = 0
    """Prefetched experts that their layer then wanted."""
    prefetches_top_score: int = 0
    """Prefetched experts that were top-score when their layer came; counted where substitution decides."""
    bytes_read: int = 0
    """Bytes read from disk for experts, alignment included."""
    read_busy_seconds: float = 0.0
    """Time during which at least one read was running."""
    forward_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Forward time spent waiting for an expert to arrive."""
    compute_seconds: float = 0.0
    """Forward time spent computing experts."""
    late_seconds: float = 0.0
    """On an emulated device: reported time by which this machine was slower than the profile."""
    host_computed: int = 0
    """Decode uses that the CPU computed in parallel with the device."""
    prefill_host_computed: int = 0
    """Prefill uses, likewise."""
    host_seconds: float = 0.0
    """Time that the CPU spent on them."""
    host_wait_seconds: float = 0.0
    """Forward time spent waiting for what the CPU computes in parallel with the device."""
    device_wait_seconds: float = 0.0
    """Forward time in which the host waited for a GPU to reach a layer's router and say what it chose."""
    look_aheads: int = 0
    """Layers of decode steps that looked ahead; the others had no time for it, or nothing to wait for."""
    look_ahead_seconds: float = 0.0
    """Forward time spent running the next layer's attention and router ahead, or waiting for a predictor that is
    asked concurrently with the experts and beginning its loads."""
    plan_seconds: float = 0.0
    """Forward time spent in our own Python for planning and bookkeeping."""

    @property
    def hit_ratio(self) -> float:
        """Share of decode uses that needed no load of their own; 1 where nothing was used."""
        return self.decode_hits / self.decode_uses if self.decode_uses else 1.0

    @property
    def kept_share(self) -> float:
        """The share of the experts computed here that needed no load: what was loaded before was still there."""
        elsewhere = self.host_computed + self.prefill_host_computed
        uses = self.decode_uses + self.prefill_uses - elsewhere
        return max(0.0, 1.0 - (self.loads + self.prefetches) / uses) if uses else 0.0

    @property
    def elsewhere_seconds(self) -> float:
        """What the experts' time does not count as computing: waiting and looking ahead."""
        return self.wait_seconds + self.host_wait_seconds + self.look_ahead_seconds

    @property
    def dense_seconds(self) -> float:
        """Forward time outside the experts: attention, norms, router, shared experts, logits."""
        ours = self.elsewhere_seconds + self.compute_seconds + self.plan_seconds + self.device_wait_seconds
        return max(0.0, self.forward_seconds - ours)

    def copy(self) -> Counters:
        return replace(self)

    def __sub__(self, earlier: Counters) -> Counters:
        before = asdict(earlier)
        return Counters(**{name: value - before[name] for name, value in asdict(self).items()})
