"""The one configuration tree: frozen, units in names, bounds checked, unknown keys refused.

What is found at run time (free bytes, slots) is a new value in the ledger and never written back here.
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
"""The alpha of a model without a measured quality cost: the papers use 0.25 to 0.35."""


@dataclass(frozen=True)
class EngineConfig:
    """How a model is served."""

    memory_bytes: int | None = None
    """Device memory for weights, workspace, KV cache, staging and slots; None: what is free less a margin."""
    count: str = "budget"
    """What `memory_bytes` counts: the budget alone, or the whole process on a CPU, of which the budget is what
    interpreter and libraries, measured at the start, leave."""
    resident_share: float | None = None
    """In place of `memory_bytes`: the share of the routed experts that stays in device memory, above 0 and at most 1;
    the budget is then what that takes."""
    host_memory_bytes: int | None = None
    """Pinned host memory on a GPU machine; None: what is free less a margin. Unused on a CPU."""
    context_tokens: int | None = None
    """Positions reserved for every sequence; None: 4096, or as many as the model was made for if that is fewer."""
    max_sequences: int = 1
    """Sequences that run together."""
    prefill_tokens: int = 2048
    """Tokens of all sequences in one step; longer prompts are read in chunks (their grade then is E1, not E0)."""
    lend_reserve: bool = True
    """Memory that is reserved for activations and positions holds experts while it is not used, on a CPU under Linux;
    not where `resident_share` says how many experts there are."""
    threads: int | None = None
    """Computing threads of every request; None: torch's number, at most the CPUs that the process may use."""
    io_threads: int = 2
    """Reading threads; two saturate a disk with requests of 4 MB. On a single CPU the default becomes one."""
    dtype: str = "auto"
    """Element type of weights and activations; auto: the checkpoint's own."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; auto: the first GPU if there is one. `emulated`: a test bench on the CPU with
    the times of the device of `profile`."""
    profile: str = "rtx-a6000"
    """For the device `emulated`: a profile that comes with the program, or a JSON file."""
    dilation: float | None = None
    """For the device `emulated`: how much slower than reported it really runs; None: as this machine needs."""
    emulated_expert_bytes: int | None = None
    """For the device `emulated`: pace link, device and CPU as if every expert had this size; None: its own."""
    eviction: str = "auto"
    """Which resident expert is forgotten first; auto: by whichever of several rules misses least at present."""
    score_window: int = 64
    """For the eviction `score`: steps before the present one over which scores are averaged (the papers' n)."""
    cache_weights: tuple[float, ...] | None = None
    """For the eviction `multidimensional`: what last use (lru), uses (lfu), uses in high precision (lhu) and distance
    of the layer (fld) count; None: what `smoe tune --cache` has found for this model, else the usual."""
    cache_records: str | None = None
    """For the eviction `multidimensional`: whose uses count, this sequence's (the default) or all since the start."""
    expert_cache: str = "budget"
    """How many experts stay: as many as the budget allows; or `top-k`, no more than one token wants of one layer, and
    what is under way, whatever the budget (DuoServe-MoE, section 5.1)."""
    pools: str = "global"
    """Whose slots a layer may take: anybody's, or those of its own share."""
    prefetch: str = "auto"
    """What brings experts in before their layer runs in decode; auto: for experts of 1 MiB and more, as long as it is
    found to pay, next-gate on a CPU, and look-ahead on a machine with a device, where the next layer's attention costs
    little."""
    prefetch_trial: bool | None = None
    """Prefetch in decode only while a clock finds that it pays; None: with `prefetch` auto."""
    prefetch_asked: str | None = None
    """When a predictor is asked in decode that sees nothing but what routers have chosen: once the router has spoken,
    before the experts (the default); concurrently, on a thread of its own; or so, but what it names begins to load only
    when the first of them is done (first-expert: DuoServe-MoE, section 5.3)."""
    prefetch_what: str = "top-score"
    """Which predicted experts are worth a load: those predicted to be top-score by `alpha` (all, where it is 0), or all
    that are predicted to be chosen."""
    prefetch_depth: int | None = None
    """For the prefetch `stacked-gates` or `corrected-gates`: how many layers ahead is looked at most for experts to
    bring in (HOBBIT's p); None: `DEFAULT_PREFETCH_DEPTH`. A layer is looked at where those before it have all that is
    predicted for them."""
    shadow_precision: str | None = None
    """For the prefetch `shadow`: the precision of the copy that runs ahead, from the file that `smoe pack --precision`
    wrote; None: int4."""
    shadow_departure: str | None = None
    """For the prefetch `shadow`: whether it begins the next token from its own guess (at-once, the default), or once
    the model has chosen it (late: OD-MoE, section 3.2)."""
    shadow_on: str | None = None
    """For the prefetch `shadow`: where it runs, on a thread of main, or on a machine of the `cluster`; None: there,
    where one belongs to it, else on main."""
    shadow_spares: int | None = None
    """For the prefetch `shadow`: experts of a layer that it names in addition to those that it has chosen; None:
    none."""
    balance: str = "none"
    """Which missing experts the CPU computes, on a machine with a device (SMoE's CPU-load balancer); such
    a layer's result has grade E2."""
    balance_order: str = "score"
    """Which of them are loaded first."""
    cluster: str | None = None
    """The name of a cluster of machines whose workers compute experts that are missing here (`smoe cluster`)."""
    placement: str | None = None
    """For a cluster: who computes which of them; None: finish."""
    cluster_workers: int = 1
    """For a cluster: how many must be there before the first token; more may come later."""
    cluster_timeout_seconds: float = 60.0
    """For a cluster: how long they are waited for."""
    cluster_verify: float = 0.0
    """For a cluster: the share of the experts that workers compute which is recomputed here, when there is time; a
    worker whose bits differ is put out."""
    recent_costs: int = RECENT
    """Measured loads and CPU computations that the balancer's costs are the means of (the papers' p)."""
    prefill_balance: bool = True
    """Where the CPU computes missing experts, it also computes those of a prompt's that have few tokens, as many as
    shorten the layer."""
    prefill_keep: str = "last-uses"
    """Which experts of a prompt stay in the cache: those that its last tokens use most, in each layer; or those that
    the eviction policy ranks above residents, in whichever layer."""
    direct_io: str = "auto"
    """Bypass the page cache; auto: unless free RAM outside the budget holds the whole model."""

    preload: bool | None = None
    """Read every expert once the model is loaded, in the background and behind what is asked for; None: where the
    budget holds them all."""
    precision: str = "auto"
    """The routed experts in fewer bits, from the file that `smoe pack --precision` wrote (lossy); auto: as the
    checkpoint has them."""
    low_precision: str = "none"
    """Lower copies of the experts, from the file that `smoe pack --precision` wrote, for missing experts of little
    importance (HOBBIT, arXiv 2411.01433); none: there are no such copies."""
    low_share: float = DEFAULT_LOW_SHARE
    """The share of the slots' bytes for low copies."""
    low_threshold: float = 1.0
    """HOBBIT's T1: a missing expert comes as its low copy where the routing weights that are larger than its own, of
    the token's choices, sum up to more than this share. 1: never. Lossy below it."""
    skip_threshold: float = 1.0
    """HOBBIT's T2: above this share a missing expert is left out. 1: never. Lossy below it."""
    precision_shares: tuple[float, ...] | None = None
    """In place of both: shares in per cent of a token's choices that ask for their own copy, for the low one and for
    none; the thresholds are those of the model's profile (`load/importance_profile.py`), else as they are given."""
    low_meanwhile: bool = False
    """A low copy that is in memory serves an expert that asks for its own, which is brought in meanwhile. Lossy."""
    max_perplexity_increase: float | None = None
    """Answer every miss by what costs least within so much more perplexity, as a share (0.01 is one per cent): a
    resident substitute, a low copy, the expert itself, the CPU, or dropping it, at the prices that the model has been
    found to have (`smoe tune --prices`). Lossy; None: misses are answered as the other switches say."""
    tpot_seconds: float | None = None
    """The same for a time per token: as little quality as it takes is given up."""
    upgrade: bool = False
    """While nothing else is read, experts that low copies have served are brought in themselves."""
    activations: str = AUTO
    """What activations are rounded to before quantised weights multiply them on a CPU. bf16 (or dtype): not at all.
    int8: to 8 bits, with a scale for 16 to 128 numbers. auto: int8 where kernels for it are proven, else bf16."""
    dense_precision: str = "as-stored"
    """Quantised non-expert weights: as the file has them, or unpacked to `dtype` when they are loaded."""
    kernels: str = "auto"
    """What multiplies few rows by a matrix and what attends with one token on a CPU, in bf16. torch: the library.
    native: our kernels, where they were found to give torch's bits. own-order: our kernels in an order of sums of their
    own, equal to torch's up to rounding (grade E1). auto: the faster of torch and native; where torch's bits cannot be
    had, as without AVX-512 BF16, own-order if it is a tenth faster. On a GPU, what takes few tokens through experts:
    torch, or our kernels where they are proven (native), and no slower (auto), in bf16, fp16 and fp32 alike."""
    alpha: float = 0.0
    """Substitution threshold (SMoE): experts chosen with scores below (1 + alpha) times that of rank k+1 may be
    replaced by resident ones with scores above (1 - alpha) times it. 0: never. Lossy where it is not 0; `smoe eval`
    prices it."""
    alpha_as_priced: bool = False
    """Take the alpha that this model has been priced for (`load/priced_alpha.py`), `alpha` only where it has none."""
    substitutes: str = "replace"
    """What becomes of a missing low-score expert: replaced by a resident one, or dropped without a replacement."""
    substitute_weights: str = "own"
    """What a substitute weighs: its own score by the router's rule, or what the expert that it replaces would have."""
    share_substitutes: bool = True
    """In a batch, prefer substitutes that serve several of its sequences."""

    turn_timeout_seconds: float | None = None
    """How long a request waits for one of another thread to end, from 0 (not at all); None: as long as it takes."""
    reproducible: bool = False
    """The same text every time, also where experts are substituted: what is resident then never depends on timing, for
    which decode goes without prefetch. Exact serving is reproducible anyway, but where `kernels` auto may take our own
    order of sums by measuring it: with this it keeps torch's bits."""

    @property
    def needs_scores(self) -> bool:
        """Whether a policy asks for every expert's score, not only for the choice, or a predictor makes scores."""
        if self.alpha > 0 or self.prices_answers:
            return True
        return eviction_kind(self.eviction).needs_scores or predictor_kind(self.prefetch).needs_scores

    @property
    def prices_answers(self) -> bool:
        """Whether every miss is answered by what costs least within a budget."""
        return self.max_perplexity_increase is not None or self.tpot_seconds is not None

    @property
    def has_low(self) -> bool:
        """Whether there are low copies."""
        return self.low_precision != "none"

    @property
    def keeps_experts(self) -> bool:
        """Whether main does, while workers are there: not where these take turns at all of them."""
        return self.placement != "round-robin"

    @property
    def eviction_settings(self) -> EvictionSettings:
        """What an eviction policy is made from."""
        return EvictionSettings(self.eviction, self.pools, self.score_window, self.cache_weights, self.cache_records)

    @property
    def lossy(self) -> list[str]:
        """What makes the text differ from the unmodified model's, by more than rounding."""
        low, by_shares = f"missing experts in {self.low_precision}", self.precision_shares is not None
        reasons = {
            f"alpha {self.alpha:g}": self.alpha > 0,
            f"experts in {self.precision}": self.precision != "auto",
            f"{low} by shares": by_shares,
            f"{low} beyond {self.low_threshold:g}": self.has_low and self.low_threshold < 1 and not by_shares,
            f"none beyond {self.skip_threshold:g}": self.skip_threshold < 1 and not by_shares,
            f"low copies meanwhile ({self.low_precision})": self.low_meanwhile,
            f"misses answered for {100 * (self.max_perplexity_increase or 0):.3g} % of perplexity at most": (
                self.max_perplexity_increase is not None
            ),
            f"misses answered for {self.tpot_seconds} s a token": self.tpot_seconds is not None,
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
                KINDS[name](value)  # a plug-in, or refused
                continue
            if name in CHOICES:
                raise ConfigError.no_choice(name, value, CHOICES[name])
            raise ConfigError.out_of_bounds(name, value, allowed_of(name))
        self._check_together()

    def _check_together(self) -> None:
        """Settings that go only, or not at all, with others."""
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
        """Who shares misses out is one alone."""
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
        """It has fewer bits than the model."""
        fewer = PRECISION[PRECISION.index(self.precision) + 1 :]
        wanted = self.shadow_precision or DEFAULT_SHADOW
        if self.prefetch == SHADOW and wanted not in fewer:
            raise ConfigError(
                f"`shadow_precision` {wanted} is no lower than `precision` {self.precision}; choose one of: "
                f"{', '.join(fewer) or 'none is'}",
                setting="shadow_precision",
                given=self.shadow_precision,
                allowed=", ".join(fewer),
            )

    def _check_low(self) -> None:
        """What is for low copies needs some, of fewer bits than the others; T1 is no larger than T2."""
        for name in ("low_threshold", "precision_shares", "low_meanwhile", "upgrade", "low_share"):
            if getattr(self, name) != getattr(EngineConfig, name) and not self.has_low:
                raise ConfigError.idle(name, getattr(self, name), "`low_precision` int4, or another")
        self._check_answers()
        if not self.has_low:
            return
        lower = PRECISION[PRECISION.index(self.precision) + 1 :]
        if self.low_precision not in lower:
            raise ConfigError(
                f"`low_precision` {self.low_precision} is no lower than `precision` {self.precision}; choose one of: "
                f"{', '.join(('none', *lower))}",
                setting="low_precision",
                given=self.low_precision,
                allowed=", ".join(("none", *lower)),
            )
        if self.low_threshold > self.skip_threshold:
            raise ConfigError(
                f"`low_threshold` {self.low_threshold:g} is above `skip_threshold` {self.skip_threshold:g}: experts "
                "would be left out that are too important for a low copy; give at most that, or a higher "
                "`skip_threshold`",
                setting="low_threshold",
                given=self.low_threshold,
                allowed=f"at most {self.skip_threshold:g}",
            )

    def _check_answers(self) -> None:
        """A budget decides what others would decide, and by measured times."""
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
        """Only our kernels for CPUs round activations, and they compute in bf16."""
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
