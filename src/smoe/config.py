"""The settings of an engine, in one immutable class that checks them.

Names contain units. Values found at run time (free bytes, slots) are in the ledger and never written back here.
"""

from __future__ import annotations

from dataclasses import dataclass

from smoe.bounds import (
    AUTO,
    BF16,
    CHOICES,
    DEFAULT_LOW_SHARE,
    DEFAULT_SHADOW,
    EMULATED,
    INT8,
    KINDS,
    LIMITS,
    NUMBERS,
    OWNERS,
    PRECISION,
    SWITCHES,
    allowed_of,
    belongs_to,
    is_allowed,
    values_of_owner,
)
from smoe.errors import ConfigError, UnpreparedError
from smoe.policy.balance import RECENT
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.registry import ONLINE_EVICTION, SHADOW, eviction_kind, predictor_kind
from smoe.units import format_bytes

DEFAULT_ALPHA = 0.3
"""The default `alpha` for a model whose quality cost was not measured; the papers use 0.25 to 0.35."""


@dataclass(frozen=True)
class EngineConfig:
    """The settings by which a model is served."""

    memory_bytes: int | None = None
    """The bytes of device memory for weights, workspace, KV cache, staging and slots. None: the free memory less a
    margin."""
    count: str = "budget"
    """What `memory_bytes` limits: budget: the budget; process: the whole process, on a CPU. In the second case the
    memory of interpreter and libraries is measured at the start and subtracted."""
    resident_share: float | None = None
    """The share of the routed experts to keep in device memory, above 0 and at most 1, from which the budget is
    computed. It excludes `memory_bytes`."""
    host_memory_bytes: int | None = None
    """The bytes of pinned host memory on a machine with a GPU. None: the free memory less a margin. Unused on a CPU."""
    context_tokens: int | None = None
    """The number of positions reserved per sequence. None: 4096, or the model's maximum if that is less."""
    max_sequences: int = 1
    """The number of sequences that run together."""
    prefill_tokens: int = 2048
    """The number of tokens, over all sequences, that one step processes. Longer prompts are processed in chunks, and
    their results have grade E1 instead of E0."""
    lend_reserve: bool = True
    """Whether experts use the memory reserved for activations and positions while it is free (on a CPU under Linux; not
    with `resident_share`)."""
    threads: int | None = None
    """The number of computing threads per request. None: torch's number, limited to the CPUs that the process may
    use."""
    io_threads: int = 2
    """The number of reading threads; two saturate a disk with requests of 4 MB. On a single CPU the default is one."""
    dtype: str = "auto"
    """The data type of weights and activations. auto: the checkpoint's."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1` and so on. auto: the first GPU, else the CPU. `emulated`: the CPU, with the timing of the
    device that `profile` describes, for tests."""
    profile: str = "rtx-a6000"
    """The profile of the device `emulated`: the name of a built-in one, or a JSON file."""
    dilation: float | None = None
    """The factor by which the device `emulated` runs slower than it reports. None: as much as this machine needs."""
    emulated_expert_bytes: int | None = None
    """The size of an expert in bytes by which the device `emulated` times transfers and computation. None: its real
    size."""
    eviction: str = "auto"
    """The eviction policy, which chooses the resident expert to evict. auto: the policy of several that has the fewest
    misses at present."""
    score_window: int = 64
    """For the eviction `score`: the number of earlier steps over which scores are averaged (the papers' n)."""
    cache_weights: tuple[float, ...] | None = None
    """For the eviction `multidimensional`: the weights of the last use (lru), the uses (lfu), the uses in high
    precision (lhu) and the distance to the layer (fld). None: those that `smoe tune --cache` found for this model, else
    the usual ones."""
    cache_records: str | None = None
    """For the eviction `multidimensional`: whether uses are counted in this sequence (the default) or since the
    start."""
    expert_cache: str = "budget"
    """How many experts stay resident. budget: as many as fit; top-k: as many as one token chooses in one layer, besides
    those in flight, whatever the budget (DuoServe-MoE, section 5.1)."""
    pools: str = "global"
    """Which slots a layer may use. global: all; layer: its own share."""
    prefetch: str = "auto"
    """The predictor whose experts are loaded before their layer runs, in decode. auto, for experts of at least 1 MiB
    and while measured times show a gain: next-gate on a CPU; look-ahead on a device, where the next layer's attention
    costs little."""
    prefetch_trial: bool | None = None
    """Whether to prefetch in decode only while measured times show a gain. None: only if `prefetch` is auto."""
    prefetch_asked: str | None = None
    """When a predictor runs that uses only the routers' choices. before: between router and experts (the default);
    beside: concurrently with the experts, on another thread; first-expert: likewise, but its loads begin when the first
    expert is done (DuoServe-MoE, section 5.3)."""
    prefetch_what: str = "top-score"
    """Which predicted experts are loaded. top-score: those predicted to be top-score by `alpha` (all if it is 0);
    chosen: all that are predicted to be chosen."""
    prefetch_depth: int | None = None
    """For the prefetch `stacked-gates` or `corrected-gates`: the greatest number of layers to predict in advance
    (HOBBIT's p). None: `DEFAULT_PREFETCH_DEPTH`. A layer is predicted only once all predicted experts of the layers
    before it are in memory."""
    shadow_precision: str | None = None
    """For the prefetch `shadow`: the precision of the draft model, whose experts are in a file that `smoe pack
    --precision` wrote. None: int4."""
    shadow_departure: str | None = None
    """For the prefetch `shadow`: whether the draft model begins the next token from its own prediction (at-once, the
    default) or once the model has sampled it (late: OD-MoE, section 3.2)."""
    shadow_on: str | None = None
    """For the prefetch `shadow`: whether the draft model runs on a thread of the coordinator (main) or on a machine of
    the `cluster`. None: in the cluster if one of its machines has a draft model, else on the coordinator."""
    shadow_spares: int | None = None
    """For the prefetch `shadow`: the number of experts predicted per layer in addition to those that the draft model
    chooses. None: 0."""
    balance: str = "none"
    """How to choose the missing experts that the CPU computes, on a machine with a device (SMoE's CPU-load balancer).
    Layers that use it have results of grade E2."""
    balance_order: str = "score"
    """Which missing experts are loaded first: those of the highest score, or of the most tokens."""
    cluster: str | None = None
    """The name of a cluster, whose workers compute experts that are not in this machine's memory (`smoe cluster`)."""
    placement: str | None = None
    """For a cluster: the method that assigns experts to machines. None: finish."""
    cluster_workers: int = 1
    """For a cluster: the number of workers that must have connected before the first token; more may connect later."""
    cluster_timeout_seconds: float = 60.0
    """For a cluster: the seconds to wait for these workers."""
    cluster_verify: float = 0.0
    """For a cluster: the share of the workers' results that this machine recomputes when it has time. A worker whose
    bits differ is excluded."""
    recent_costs: int = RECENT
    """The number of recent loads and CPU computations whose mean is the balancer's cost (the papers' p)."""
    prefill_balance: bool = True
    """Whether the CPU also computes missing experts of prompts: those with few tokens, as long as that shortens the
    layer."""
    prefill_keep: str = "last-uses"
    """Which experts stay in the cache after a prompt. last-uses: in each layer those that its last tokens use most;
    eviction: those that the eviction policy prefers, over all layers."""
    direct_io: str = "auto"
    """Whether reads bypass the page cache. auto: on, unless free RAM outside the budget holds the whole model."""

    preload: bool | None = None
    """Whether every expert is read in the background once the model is loaded, after all other reads. None: if the
    budget holds all experts."""
    precision: str = "auto"
    """The precision of the routed experts, from a file that `smoe pack --precision` wrote (lossy). auto: the
    checkpoint's."""
    low_precision: str = "none"
    """The precision of additional copies, from a file that `smoe pack --precision` wrote, which replace missing experts
    of little importance (HOBBIT, arXiv 2411.01433). none: no such copies."""
    low_share: float = DEFAULT_LOW_SHARE
    """The share of the slots' bytes that holds low-precision copies."""
    low_threshold: float = 1.0
    """HOBBIT's T1: a missing expert is replaced by its low-precision copy if the token's larger routing weights sum to
    more than this (lossy). 1: never."""
    skip_threshold: float = 1.0
    """HOBBIT's T2: a missing expert is dropped if the token's larger routing weights sum to more than this (lossy). 1:
    never."""
    precision_shares: tuple[float, ...] | None = None
    """The percentages of a token's choices to serve by full copies, by low-precision copies, and not at all. The
    model's importance profile (`load/importance_profile.py`) converts them to thresholds; without one, the given
    thresholds apply."""
    low_meanwhile: bool = False
    """Whether a low-precision copy in memory serves a missing expert that deserves its full copy, which is loaded
    meanwhile. Lossy."""
    max_perplexity_increase: float | None = None
    """The increase of perplexity, as a share (0.01 is one per cent), within which every miss is resolved in the fastest
    way. The ways are a resident substitute, a low-precision copy, a load, the CPU, or dropping the expert. Their
    quality costs come from `smoe tune --prices`. Lossy. None: other settings decide about misses."""
    tpot_seconds: float | None = None
    """The seconds per token within which misses are resolved at the least quality cost, otherwise as for
    `max_perplexity_increase`."""
    upgrade: bool = False
    """Whether full copies of experts that low-precision copies have served are loaded while nothing else is read."""
    activations: str = AUTO
    """The precision of activations that quantized weights multiply on a CPU. bf16 (or dtype): not rounded; int8: 8
    bits, with a scale per 16 to 128 values; auto: int8 if kernels for it are proven here, else bf16."""
    dense_precision: str = "as-stored"
    """The precision of quantized weights other than experts: as stored in the file, or converted to `dtype` when they
    are loaded."""
    kernels: str = "auto"
    """The kernels for matrix products with few rows and for attention of one token, on a CPU in bf16.

    torch: the library. native: smoe's kernels where they were found to give torch's bits. own-order: smoe's kernels,
    which add in another order and equal torch up to rounding (grade E1). auto: the faster of torch and native; if
    torch's bits cannot be had, as without AVX-512 BF16, own-order if it is a tenth faster.

    On a GPU, in bf16, fp16 and fp32: the kernels for experts with few tokens. torch: the library; native: smoe's where
    they are proven; auto: smoe's if they are also not slower.
    """
    alpha: float = 0.0
    """SMoE's substitution threshold (lossy). Experts chosen with scores below (1 + alpha) times that of rank k+1 may
    be replaced by resident ones with scores above (1 - alpha) times it. 0: never. `smoe eval` measures its quality
    cost."""
    alpha_as_priced: bool = False
    """Whether to use the alpha whose quality cost was measured for this model (`load/priced_alpha.py`); `alpha` applies
    only without one."""
    substitutes: str = "replace"
    """How a missing low-score expert is resolved: replace: by a resident expert; drop: without a replacement."""
    substitute_weights: str = "own"
    """The routing weight of a substitute: own: by its own score and the router's rule; inherited: that of the expert
    that it replaces."""
    share_substitutes: bool = True
    """Whether a batch prefers substitutes that serve several of its sequences."""

    turn_timeout_seconds: float | None = None
    """The seconds that a request waits for another thread's request to end; 0: not at all. None: without limit."""
    reproducible: bool = False
    """Whether every run gives the same text, also if experts are substituted. Residency then never depends on timing,
    so decode does not prefetch. Without substitution the text is the same anyway, unless `kernels` auto chooses
    own-order by measured times; with this setting it uses torch's bits."""

    @property
    def needs_scores(self) -> bool:
        """Whether a policy or predictor needs the scores of all experts, not only the chosen ones."""
        if self.alpha > 0 or self.prices_answers:
            return True
        return eviction_kind(self.eviction).needs_scores or predictor_kind(self.prefetch).needs_scores

    @property
    def prices_answers(self) -> bool:
        """Whether every miss is resolved by quality cost, within a limit of perplexity or time."""
        return self.max_perplexity_increase is not None or self.tpot_seconds is not None

    @property
    def has_low(self) -> bool:
        """Whether missing experts may be replaced by low-precision copies."""
        return self.low_precision != "none"

    @property
    def keeps_experts(self) -> bool:
        """Whether the coordinator keeps experts while workers are connected; with round-robin placement it does not."""
        return self.placement != "round-robin"

    @property
    def eviction_settings(self) -> EvictionSettings:
        """The settings from which the eviction policy is made."""
        return EvictionSettings(self.eviction, self.pools, self.score_window, self.cache_weights, self.cache_records)

    @property
    def lossy(self) -> list[str]:
        """Descriptions of the settings that change the text by more than rounding."""
        low, by_shares = f"missing experts in {self.low_precision}", self.precision_shares is not None
        reasons = {
            f"alpha {self.alpha:g}": self.alpha > 0,
            f"experts in {self.precision}": self.precision != "auto",
            f"{low} by shares": by_shares,
            f"{low} beyond {self.low_threshold:g}": self.has_low and self.low_threshold < 1 and not by_shares,
            f"none beyond {self.skip_threshold:g}": self.skip_threshold < 1 and not by_shares,
            f"low copies meanwhile ({self.low_precision})": self.low_meanwhile,
            f"misses resolved within {100 * (self.max_perplexity_increase or 0):.3g} % more perplexity": (
                self.max_perplexity_increase is not None
            ),
            f"misses resolved within {self.tpot_seconds} s a token": self.tpot_seconds is not None,
            f"activations in {self.activations}": self.activations == INT8,
        }
        return [reason for reason, applies in reasons.items() if applies]

    def __post_init__(self) -> None:
        for name in (*LIMITS, *CHOICES, *SWITCHES, *NUMBERS):
            value = getattr(self, name)
            is_left_out = value is None and getattr(EngineConfig, name) is None
            if is_left_out or is_allowed(name, value):
                continue
            if name in KINDS and isinstance(value, str):
                KINDS[name](value)  # raises for a name that is no class or plug-in
                continue
            if name in CHOICES:
                raise ConfigError.no_choice(name, value, CHOICES[name])
            raise ConfigError.out_of_bounds(name, value, allowed_of(name))
        self._check_together()

    def _check_together(self) -> None:
        """Raise `ConfigError` for settings that exclude each other or need another."""
        if self.memory_bytes is not None and self.resident_share is not None:
            raise ConfigError(
                f"a budget of {format_bytes(self.memory_bytes)} and {100 * self.resident_share:.3g}% of the experts "
                "both set the memory; give one of `memory` and `resident`",
                setting="resident_share",
                given=self.resident_share,
                allowed="only without `memory`",
            )
        if self.count == "process" and (self.memory_bytes is None or self.device in ("cuda", EMULATED)):
            raise ConfigError(
                "`count` process means that `memory` is the size of the whole process, on a CPU; give `memory`, and no "
                "`device` with a memory of its own",
                setting="count",
                given=self.count,
                allowed="process with `memory` on a CPU",
            )
        for name, owner in OWNERS.items():
            if getattr(self, name) is not None and not belongs_to(name, getattr(self, owner)):
                needed = f"`{owner}` {' or '.join(values_of_owner(name))}"
                raise ConfigError.idle(name, getattr(self, name), needed)
        if self.expert_cache != "budget" and (self.resident_share is not None or self.has_low):
            other = "resident_share" if self.resident_share is not None else "low_precision"
            raise ConfigError(
                f"`expert_cache` {self.expert_cache} keeps no experts resident, which excludes `{other}`: leave out "
                "one of the two",
                setting="expert_cache",
                given=self.expert_cache,
                allowed=f"budget with `{other}`",
            )
        self._check_activations()
        self._check_low()
        self._check_cluster()
        self._check_shadow()
        if self.device == "cpu" and self.balance not in ("auto", "none"):
            raise UnpreparedError(
                f"`balance` {self.balance} (an option, or part of a preset) needs a device in addition to the CPU: "
                "use `device` cuda or `device` emulated, or another preset",
                setting="balance",
                given=self.balance,
                allowed="auto or none on a CPU",
            )
        if self.reproducible and self.alpha > 0 and not eviction_kind(self.eviction).is_orderless:
            allowed = " or ".join(name for name in ONLINE_EVICTION if eviction_kind(name).is_orderless)
            raise ConfigError(
                f"with `reproducible` and an alpha above 0, `eviction` {self.eviction} would depend on the order in "
                f"which loads finish; use `eviction` {allowed}",
                setting="eviction",
                given=self.eviction,
                allowed=allowed,
            )

    def _check_cluster(self) -> None:
        """Raise `ConfigError` if `cluster` is combined with another setting that decides about missing experts."""
        if self.cluster is None:
            return
        others = {
            "balance": self.balance not in ("auto", "none"),
            "reproducible": self.reproducible and self.alpha > 0,
            "device": self.device == EMULATED,
            "max_perplexity_increase": self.prices_answers,
        }
        for name in (name for name, is_given in others.items() if is_given):
            raise ConfigError(
                f"with a `cluster` its workers compute what is missing, which does not go with `{name}` "
                f"{getattr(self, name)}: leave one of the two out",
                setting=name,
                given=getattr(self, name),
                allowed="only without `cluster`",
            )

    def _check_shadow(self) -> None:
        """Raise `ConfigError` unless the draft model has a lower precision than the model."""
        fewer = PRECISION[PRECISION.index(self.precision) + 1 :]
        wanted = self.shadow_precision or DEFAULT_SHADOW
        if self.prefetch == SHADOW and wanted not in fewer:
            raise ConfigError(
                f"`shadow_precision` {wanted} is not lower than `precision` {self.precision}; choose one of: "
                f"{', '.join(fewer) or '(there is none)'}",
                setting="shadow_precision",
                given=self.shadow_precision,
                allowed=", ".join(fewer),
            )

    def _check_low(self) -> None:
        """Raise `ConfigError` for settings of low-precision copies without such copies, for copies that do not have
        fewer bits, or if T1 is above T2."""
        for name in ("low_threshold", "precision_shares", "low_meanwhile", "upgrade", "low_share"):
            if getattr(self, name) != getattr(EngineConfig, name) and not self.has_low:
                raise ConfigError.idle(name, getattr(self, name), "`low_precision` int4, or another")
        self._check_answers()
        if not self.has_low:
            return
        lower = PRECISION[PRECISION.index(self.precision) + 1 :]
        if self.low_precision not in lower:
            raise ConfigError(
                f"`low_precision` {self.low_precision} is not lower than `precision` {self.precision}; choose one of: "
                f"{', '.join(('none', *lower))}",
                setting="low_precision",
                given=self.low_precision,
                allowed=", ".join(("none", *lower)),
            )
        if self.low_threshold > self.skip_threshold:
            raise ConfigError(
                f"`low_threshold` {self.low_threshold:g} is above `skip_threshold` {self.skip_threshold:g}: experts "
                "would be dropped that are too important for a low-precision copy; give at most that, or a higher "
                "`skip_threshold`",
                setting="low_threshold",
                given=self.low_threshold,
                allowed=f"at most {self.skip_threshold:g}",
            )

    def _check_answers(self) -> None:
        """Raise `ConfigError` if a limit of perplexity or time is combined with other settings that decide about
        misses."""
        if not self.prices_answers:
            return
        budget = "max_perplexity_increase" if self.max_perplexity_increase is not None else "tpot_seconds"
        others = {
            "tpot_seconds": budget != "tpot_seconds" and self.tpot_seconds is not None,
            "alpha": self.alpha > 0 or self.alpha_as_priced,
            "low_threshold": self.low_threshold < 1,
            "skip_threshold": self.skip_threshold < 1,
            "low_meanwhile": self.low_meanwhile,
            "reproducible": self.reproducible,
        }
        for name in (name for name, is_given in others.items() if is_given):
            raise ConfigError(
                f"`{budget}` decides by measured times what becomes of every miss, and does not go with `{name}` (an "
                "option, or part of a preset): leave one of the two out, or use `preset` balanced",
                setting=budget,
                given=getattr(self, budget),
                allowed=f"only without `{name}`",
            )

    def _check_activations(self) -> None:
        """Raise `ConfigError` if int8 activations are combined with a device, kernels or dtype that cannot use them."""
        if self.activations != INT8:
            return
        allowed: dict[str, tuple[str, ...]] = {
            "device": ("auto", "cpu"),
            "kernels": ("auto", "native"),
            "dtype": ("auto", "bfloat16"),
        }
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                other = f"`{name}` {getattr(self, name)}"
                raise ConfigError(
                    f"`activations` {self.activations} is for smoe's own kernels on a CPU, in bfloat16, and does not "
                    f"go with {other}: leave one of the two out",
                    setting="activations",
                    given=self.activations,
                    allowed=f"{BF16} with {other}",
                )
