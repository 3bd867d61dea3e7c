"""The settings of an engine, in one immutable class that checks them.

Each setting is declared once, with `setting` (`setting_declaration.py`): here, or in `policy/eviction/policies.py` if
only one eviction policy uses it. Rules about several settings are in
`config_checks.py`. Names contain units. Values that are found at run time, such as free bytes and the number of slots,
are stored in the ledger and never written back here.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, fields
from typing import Any

from smoe.bounds import (
    ACTIVATIONS,
    ALWAYS,
    AUTO,
    DEFAULT_DRAFT,
    DEFAULT_PREFETCH_DEPTH,
    DEPARTURE,
    DIRECT_IO,
    DTYPES,
    EMULATED,
    INT8,
    KERNELS,
    LOW_PRECISION,
    MOST_DRAFT_EXTRA,
    MOST_IO_THREADS,
    MOST_PREFETCH_DEPTH,
    MOST_THREADS,
    ONCE,
    PRECISION,
)
from smoe.config_checks import check_together
from smoe.errors import ConfigError
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.eviction.policies import PolicySettings
from smoe.policy.load_or_compute import BALANCE, BALANCE_ORDER, RECENT
from smoe.policy.placement import PLACEMENT
from smoe.policy.prediction import ASKED
from smoe.policy.registry import (
    EXPERT_CACHE,
    ONLINE_EVICTION,
    POOLS,
    PREFETCH,
    PREFETCH_WHAT,
    eviction_kind,
    predictor_kind,
)
from smoe.policy.step import PREFILL_KEEP
from smoe.setting_declaration import (
    LOW,
    MEMORY,
    ClassName,
    Count,
    Number,
    NumberTuple,
    OneOf,
    Setting,
    Share,
    Size,
    Switch,
    Text,
    setting,
)

DEFAULT_ALPHA = 0.3
"""The default `alpha` for a model whose quality cost was not measured; the papers use 0.25 to 0.35."""


@dataclass(frozen=True)
class EngineConfig(PolicySettings):
    """The settings with which a model is loaded and served."""

    memory_bytes: int | None = setting(
        None,
        Size(),
        "Memory budget for the model, e.g. 8GiB. Default: the free memory less a margin.",
        option="--memory",
        left_out="the free memory less a margin",
        panel=MEMORY,
    )
    """The bytes of device memory for weights, workspace, KV cache and expert slots. None: the free memory less a
    margin."""
    count: str = setting(
        "budget",
        OneOf("budget", "process"),
        "Instead of --memory: a memory limit for the whole process, including Python and its libraries. Only on a CPU.",
        option="--process-memory",
        panel=MEMORY,
    )
    """What `memory_bytes` limits. budget: the entries of the budget. process: the whole process, on a CPU; the memory
    of the interpreter and its libraries is measured at the start and subtracted."""
    resident_share: float | None = setting(
        None,
        Share("a number above 0 and at most 1", lambda value: 0 < value <= 1),
        "Instead of --memory: a budget that has room for this share of the experts, e.g. 40%.",
        option="--resident",
        left_out="as `memory_bytes` has room for",
        panel=MEMORY,
    )
    """The fraction of the routed experts that stay in device memory, above 0 and at most 1. The budget is computed from
    it, so it excludes `memory_bytes`."""
    host_memory_bytes: int | None = setting(
        None,
        Size(),
        "With a GPU: pinned host memory for experts, e.g. 16GiB. Default: the free memory less a margin.",
        option="--host-memory",
        left_out="the free memory less a margin",
        panel=MEMORY,
    )
    """The bytes of pinned host memory on a machine with a GPU. None: the free memory less a margin. Unused on a CPU."""
    context_tokens: int | None = setting(
        None,
        Count(),
        "Number of tokens of prompt and answer together for which memory is reserved, for every sequence. "
        "\\[default: 4096, or the model's maximum if that is less]",
        option="--context",
        left_out="4096, or the model's maximum if that is less",
        panel=MEMORY,
    )
    """The number of positions that are reserved for each sequence. None: 4096, or the model's maximum if that is
    less."""
    max_sequences: int = setting(
        1,
        Count(),
        "Number of sequences that run at the same time. \\[default: smoe serve 4, smoe generate one for each prompt, "
        "other commands 1]",
        option="--max-sequences",
        panel=MEMORY,
    )
    """The number of sequences that run at the same time."""
    prefill_tokens: int = setting(
        2048, Count(), "Maximum number of tokens of one forward pass; longer prompts are processed in chunks."
    )
    """The number of tokens, over all sequences, that one step processes. Longer prompts are processed in chunks, and
    their results have grade E1 instead of E0."""
    images: bool = setting(
        False,
        Switch(),
        "Load the model's image encoder too, so that prompts can contain images. It takes part of the memory budget.",
        option="--images",
        panel=MEMORY,
    )
    """Whether the image encoder is loaded, and memory is reserved for images in prompts. Only for some families, and
    not for GGUF files."""
    image_tokens: int = setting(
        1024,
        Count(70),
        "With --images: maximum number of tokens of one image. Larger images are scaled down.",
        owner="images",
    )
    """The largest number of tokens that one image takes. Larger images are scaled down. The memory for the image
    encoder's activations depends on it."""
    lend_reserve: bool = setting(
        True,
        Switch(),
        "Let experts use the memory that is reserved for activations and for keys and values, as long as it is free.",
    )
    """Whether experts use the memory that is reserved for activations and KV cache while it is free (on a CPU under
    Linux; not with `resident_share`)."""
    device: str = setting(
        "auto",
        Text(),
        "Device that computes: cpu, cuda, cuda:1, or emulated (to compare settings for a GPU without one). "
        "\\[default: the first GPU, else cpu]",
        option="--device",
    )
    """`cpu`, `cuda`, `cuda:1` and so on. auto: the first GPU, else the CPU. `emulated`: the CPU, with the timing of the
    device that `profile` describes, for tests."""
    threads: int | None = setting(
        None,
        Count(1, MOST_THREADS),
        "Number of threads that compute.",
        option="--threads",
        left_out="as many as torch uses, at most the CPUs of the process",
    )
    """The number of computing threads per request. None: torch's number, limited to the CPUs that the process may
    use."""
    io_threads: int = setting(
        2, Count(1, MOST_IO_THREADS), "Number of threads that read from disk; one or two saturate a disk."
    )
    """The number of reading threads; two saturate a disk with requests of 4 MB. On a single CPU the default is one."""
    dtype: str = setting(
        "auto",
        OneOf(*DTYPES),
        "Data type of the computation: {allowed}; auto is the checkpoint's own.",
        option="--dtype",
    )
    """The data type of weights and activations. auto: the checkpoint's."""
    precision: str = setting(
        "auto",
        OneOf(*PRECISION),
        "LOSSY: use a copy of all experts in fewer bits, which smoe pack --precision has written: int8, int4, int3, "
        "int2.",
        option="--precision",
    )
    """The precision of the routed experts, from a file that `smoe pack --precision` wrote (lossy). auto: the
    checkpoint's."""
    activations: str = setting(
        AUTO,
        OneOf(*ACTIVATIONS),
        "On a CPU: the type of activations that are multiplied with quantised weights: int8 (8 bits), or dtype (the "
        "model's own type). Default: int8 if its kernels pass a self-test and are faster, else dtype.",
        option="--activations",
    )
    """The precision of activations that are multiplied with quantized weights on a CPU. dtype: not rounded.
    int8: rounded to 8 bits, with a scale for every 16 to 128 values. auto: int8 if kernels for it have passed a
    self-test here, else dtype."""
    dense_precision: str = setting(
        "as-stored",
        OneOf("as-stored", "dtype"),
        "Non-expert weights that are quantised: leave them as they are stored, or convert them to --dtype.",
    )
    """The precision of quantized weights other than experts: as stored in the file, or converted to `dtype` when they
    are loaded."""
    eviction: str = setting(
        "auto",
        ClassName(ONLINE_EVICTION, eviction_kind),
        "Rule that chooses the resident expert to evict (docs/evictions.md): {allowed} (a plug-in).",
        option="--eviction",
    )
    """The eviction policy, which chooses the resident expert to evict. auto: whichever of several policies has the
    fewest misses at present. A plug-in is given as MODULE:CLASS."""
    expert_cache: str = setting(
        "budget",
        OneOf(*EXPERT_CACHE),
        "Number of experts in memory: as many as fit in the budget, or only as many as a token uses in a layer.",
    )
    """How many experts stay resident. budget: as many as fit. top-k: as many as one token chooses in one layer, in
    addition to those in flight, whatever the budget (DuoServe-MoE, section 5.1)."""
    pools: str = setting(
        "global",
        OneOf(*POOLS),
        "global: all layers share the memory for experts; layer: each layer has a fixed part of it.",
        option="--pools",
    )
    """Which slots a layer may use. global: all slots; layer: its own equal share."""
    prefetch: str = setting(
        "auto",
        ClassName(PREFETCH, predictor_kind),
        "Predictor of the next experts, which are then loaded early (docs/settings.md describes each): {allowed} "
        "(a plug-in).",
        option="--prefetch",
    )
    """The predictor whose experts are loaded before their layer runs, in decode. A plug-in is given as MODULE:CLASS.

    auto is for experts of at least 1 MiB, and only while measured times show a gain. It is next-gate on a CPU. On a
    device, where the next layer's attention costs little, it is look-ahead.
    """
    prefetch_trial: bool | None = setting(
        None,
        Switch(),
        "Prefetch only while measured times show that it saves time.",
        left_out="true with --prefetch auto, else false",
    )
    """Whether to prefetch in decode only while measured times show a gain. None: only if `prefetch` is auto."""
    prefetch_asked: str | None = setting(
        None,
        OneOf(*ASKED),
        "With a predictor that uses only earlier routing: run it before the experts are computed, or concurrently.",
        left_out="before, or first-expert with --preset duoserve",
        owner="prefetch",
    )
    """When a predictor runs that uses only the routers' choices. before: between router and experts (the default);
    concurrent: on another thread, while experts are computed; first-expert: likewise, but its loads begin when the
    first expert is done (DuoServe-MoE, section 5.3)."""
    prefetch_what: str = setting(
        "top-score",
        OneOf(*PREFETCH_WHAT),
        "With --alpha: prefetch only those predicted experts that have top scores, or all predicted experts.",
    )
    """Which predicted experts are loaded. top-score: those predicted to be top-score, given `alpha` (all if `alpha` is
    0). chosen: all that are predicted to be chosen."""
    prefetch_depth: int | None = setting(
        None,
        Count(1, MOST_PREFETCH_DEPTH),
        "With --prefetch stacked-gates or corrected-gates: maximum number of layers that are predicted ahead.",
        left_out=str(DEFAULT_PREFETCH_DEPTH),
        owner="prefetch",
    )
    """For the prefetch `stacked-gates` or `corrected-gates`: the greatest number of layers to predict in advance
    (HOBBIT's p). None: `DEFAULT_PREFETCH_DEPTH`. A layer is predicted only once all predicted experts of the layers
    before it are in memory."""
    draft_precision: str | None = setting(
        None,
        OneOf(*PRECISION[1:]),
        "With --prefetch draft-model: the precision of the draft model.",
        left_out=DEFAULT_DRAFT,
        owner="prefetch",
    )
    """With `prefetch` draft-model: the precision of the draft model, whose experts are in a file that `smoe pack
    --precision` wrote. None: int4."""
    draft_start: str | None = setting(
        None,
        OneOf(*DEPARTURE),
        "With --prefetch draft-model: begin a token from the draft model's guess, or wait for the model's token.",
        left_out=DEPARTURE[0],
        owner="prefetch",
    )
    """With `prefetch` draft-model: whether the draft model begins the next token from its own prediction (at-once, the
    default) or once the model has sampled it (late: OD-MoE, section 3.2)."""
    draft_on: str | None = setting(
        None,
        OneOf("coordinator", "cluster"),
        "With --prefetch draft-model: run the draft model on the coordinator, or on another machine of the cluster.",
        left_out="cluster if it has a draft model, else coordinator",
        owner="prefetch",
    )
    """With `prefetch` draft-model: whether the draft model runs on a thread of the coordinator or on a machine of
    the `cluster`. None: in the cluster if one of its machines has a draft model, else on the coordinator."""
    draft_extra: int | None = setting(
        None,
        Count(0, MOST_DRAFT_EXTRA),
        "With --prefetch draft-model: number of experts per layer that are predicted in addition to the draft "
        "model's choice.",
        left_out="0",
        owner="prefetch",
    )
    """With `prefetch` draft-model: the number of experts predicted per layer in addition to those that the draft model
    chooses. None: 0."""
    balance: str = setting(
        "none",
        OneOf(*BALANCE),
        "With a GPU: which missing experts the CPU computes. none: no experts; optimal: as many as make each layer "
        "fastest; paper: as SMoE's published algorithm chooses; host: all; auto: as optimal, if there is a GPU.",
        option="--balance",
    )
    """Which missing experts the CPU computes, on a machine with a device (SMoE's CPU-load balancer). Layers in which
    the CPU computes experts have results of grade E2."""
    balance_order: str = setting(
        "score",
        OneOf(*BALANCE_ORDER),
        "With --balance: load those missing experts first that have the highest scores, or that most tokens use.",
    )
    """Which missing experts are loaded first. score: those of the highest router score; tokens: those with most
    tokens."""
    recent_costs: int = setting(
        RECENT, Count(), "With --balance: number of recent loads and computations whose times are averaged."
    )
    """The number of recent loads and CPU computations whose mean is the balancer's cost (the papers' p)."""
    prefill_balance: bool = setting(
        True, Switch(), "With --balance: let the CPU compute missing experts for prompts, too."
    )
    """Whether the CPU also computes missing experts of prompts: those with few tokens, as long as that shortens the
    layer."""
    prefill_keep: str = setting(
        "last-uses",
        OneOf(*PREFILL_KEEP),
        "Experts that stay resident after a prompt: those that its last tokens used, or those that --eviction ranks "
        "highest.",
    )
    """Which experts stay resident after a prompt. last-uses: in each layer, those that the prompt's last tokens use
    most. eviction: those that the eviction policy ranks highest, over all layers."""
    cluster: str | None = setting(
        None,
        Text(),
        "Name of a cluster (smoe cluster up); its workers compute experts that are not in this machine's memory.",
        option="--cluster",
        left_out="none",
    )
    """The name of a cluster whose workers compute experts that are not in this machine's memory (`smoe cluster`)."""
    placement: str | None = setting(
        None,
        OneOf(*PLACEMENT),
        "With --cluster: give each expert to the machine that finishes it first, or to groups of workers in turn.",
        left_out="finish",
    )
    """For a cluster: how experts are assigned to machines. finish: each expert to the machine that finishes it first;
    round-robin: to groups of workers in turn. None: finish."""
    cluster_workers: int = setting(
        1,
        Count(0, 1000),
        "With --cluster: number of workers that must have connected before the first token is computed.",
    )
    """For a cluster: the number of workers that must have connected before the first token; more may connect later."""
    cluster_timeout_seconds: float = setting(
        60.0,
        Number("a number of seconds of at least 0", lambda value: 0 <= value < math.inf),
        "With --cluster: maximum number of seconds that smoe waits for these workers.",
    )
    """For a cluster: how many seconds to wait until `cluster_workers` workers have connected."""
    cluster_verify: float = setting(
        0.0,
        Number("a number from 0 (none) to 1 (all), as 1/64", lambda value: 0 <= value <= 1),
        "With --cluster: share of the workers' results that this machine recomputes as a check, such as 1/64.",
    )
    """For a cluster: the fraction of the workers' results that this machine recomputes when it has time. A worker whose
    results differ in any bit is excluded."""
    direct_io: str = setting(
        "auto",
        OneOf(*DIRECT_IO),
        "Whether reads from disk bypass the operating system's page cache. auto: yes, unless RAM can hold the "
        "whole model.",
    )
    """Whether reads bypass the page cache. auto: on, unless free RAM outside the budget holds the whole model; ranges
    that are in the page cache are then copied from there (`memory/page_cache.py`)."""
    self_test: str = setting(
        ONCE,
        OneOf(ONCE, ALWAYS),
        "Compare smoe's kernels with torch, and experts with transformers: at the first load of a model, or always.",
    )
    """When loading compares kernels with torch and experts with transformers. once: at the first load of a model, and
    again when anything changes that the results depend on (`load/stored_proofs.py`). always: at every load."""
    preload: bool | None = setting(
        None,
        Switch(),
        "Read every expert in the background as soon as the model is loaded.",
        left_out="true if the budget holds every expert; smoe serve and smoe chat also fill free memory while idle "
        "(false: they do not)",
    )
    """Whether every expert is read in the background once the model is loaded, after all other reads. None: only if the
    budget holds all experts; otherwise `smoe serve` and `smoe chat` fill free slots while they compute no text."""
    profile: str = setting(
        "rtx-a6000",
        Text(),
        "Description of a machine: rtx-a6000, rtx-4060-ti, laptop-cpu, ... or a JSON file. With smoe plan: the machine "
        "to forecast for. With --device emulated: the machine whose times are emulated.",
        option="--profile",
        owner="device",
    )
    """The profile of the device `emulated`: the name of a built-in one, or a JSON file."""
    dilation: float | None = setting(
        None,
        Number("a number of at least 1", lambda value: value >= 1),
        "With --device emulated: factor by which the real run is slower than the emulated times that are reported.",
        left_out="as fast as this machine allows",
        owner="device",
    )
    """The factor by which the device `emulated` runs slower than it reports. None: the smallest factor that this
    machine can sustain."""
    emulated_expert_bytes: int | None = setting(
        None,
        Size(),
        "With --device emulated: size that every expert is assumed to have when times are emulated.",
        left_out="the model's own",
        owner="device",
    )
    """The size of an expert in bytes for which the device `emulated` computes the times of transfers and kernels. None:
    the model's real size."""
    kernels: str = setting(
        "auto",
        OneOf(*KERNELS),
        "Code that computes matrix products and attention for few tokens: {allowed}. native: smoe's kernels, with "
        "the same bits as torch, and torch where they lack them. own-order: smoe's kernels, equal up to rounding, "
        "faster if the model is in RAM. auto: the fastest with torch's bits where smoe's kernels have them, otherwise "
        "the fastest.",
        option="--kernels",
    )
    """The kernels for matrix products with few rows and for attention of one token, on a CPU in bf16.

    torch: the library. native: smoe's kernels where they were found to give torch's bits. own-order: smoe's kernels,
    which add in another order and equal torch up to rounding (grade E1). auto: the faster of torch and native; if
    torch's bits cannot be had, as without AVX-512 BF16, own-order if it is a tenth faster. For quantized weights, and
    on x86 CPUs without AVX-512 BF16, nothing is timed: smoe's kernels are used. Those of quantized models add in
    torch's order if attention has torch's bits on this CPU, else in their own order.

    On a GPU, in bf16, fp16 and fp32: the kernels for experts with few tokens. torch: the library; native: smoe's where
    they are proven; auto: smoe's if they are also not slower.
    """
    alpha: float = setting(
        0.0,
        Number("a number from 0 (exact) to 1", lambda value: 0 <= value <= 1),
        "LOSSY above 0: replace missing experts by resident experts of similar router score; 0.3 is usual, and a "
        "higher value replaces more experts. Default of --preset smoe: the alpha that smoe tune found for the model, "
        "else 0.3.",
        option="--alpha",
        implies="smoe",
        replaces={"alpha_as_priced": False},
    )
    """SMoE's substitution threshold (lossy). Let S be the score of rank k+1, the best expert that is not chosen. A
    missing expert that is chosen with a score below (1 + alpha) S may be replaced by a resident expert with a score
    above (1 - alpha) S. 0: never. `smoe eval` measures its quality cost."""
    alpha_as_priced: bool = setting(
        False, Switch(), "Use the alpha that smoe tune has found for the model, if there is one."
    )
    """Whether to use the alpha that was tuned for this model by its quality cost (`load/priced_alpha.py`). If there is
    none, `alpha` is used."""
    substitutes: str = setting(
        "replace",
        OneOf("replace", "drop"),
        "With --alpha: replace a missing expert of low score by a resident expert, or drop the missing expert.",
    )
    """What happens to a missing low-score expert with `alpha`. replace: a resident expert replaces it. drop: its routes
    are dropped."""
    substitute_weights: str = setting(
        "own",
        OneOf("own", "inherited"),
        "With --alpha: weight of a substitute's output: by the substitute's own score, or by the missing expert's "
        "score.",
    )
    """The routing weight of a substitute. own: by its own score and the router's rule; inherited: that of the expert
    that it replaces."""
    share_substitutes: bool = setting(
        True, Switch(), "With --alpha: in a batch, prefer substitutes that serve several sequences."
    )
    """Whether, in a batch, substitutes that serve several of its sequences are preferred."""
    low_precision: str = setting(
        "none",
        OneOf(*LOW_PRECISION),
        "LOSSY: load missing experts that matter little to a token in fewer bits, from a copy that smoe pack "
        "--precision has written: int8, int4, int3, int2.",
        option="--low-precision",
        implies="hobbit",
        panel=LOW,
    )
    """The precision of additional copies, from a file that `smoe pack --precision` wrote, which replace missing experts
    of little importance (HOBBIT, arXiv 2411.01433). none: no such copies."""
    low_share: float = setting(
        0.15,
        Share("a number above 0 and below 1", lambda value: 0 < value < 1),
        "Share of the memory for experts that holds low-precision copies. \\[default: 15%]",
        option="--low-share",
        panel=LOW,
        owner="low_precision",
    )
    """The fraction of the slots' bytes that low-precision copies get."""
    precision_shares: tuple[float, ...] | None = setting(
        None,
        NumberTuple(
            "three numbers whose sum is 100, for own copies, low copies (above 0) and none, as 67, 30, 3",
            lambda value: len(value) == 3 and min(value) >= 0 < value[1] and math.isclose(sum(value), 100),
        ),
        "Which per cent of the chosen experts are computed in full precision, in low precision, and not at all; "
        "needs a "
        "profile of the model (smoe tune --shares). --preset hobbit uses 67,30,3.",
        option="--precision-shares",
        left_out="none",
        panel=LOW,
        form="OWN,LOW,NONE",
        owner="low_precision",
        replaces={"low_threshold": 1.0, "skip_threshold": 1.0},
    )
    """The percentages of a token's experts to compute with full copies, with low-precision copies, and not at all. The
    model's importance profile (`load/importance_profile.py`) converts them to thresholds. Without a profile,
    `low_threshold` and `skip_threshold` are used."""
    low_threshold: float = setting(
        1.0,
        Number("a number from 0 to 1 (exact)", lambda value: 0 <= value <= 1),
        "Instead of --precision-shares: use a low-precision copy of a missing expert if the larger routing weights of "
        "the token sum to more than this (HOBBIT's T1), from 0 to 1.",
        option="--low-threshold",
        panel=LOW,
        owner="low_precision",
        replaces={"precision_shares": None},
    )
    """HOBBIT's T1: a missing expert is replaced by its low-precision copy if the token's larger routing weights sum to
    more than this (lossy). 1: never."""
    skip_threshold: float = setting(
        1.0,
        Number("a number from 0 to 1 (exact)", lambda value: 0 <= value <= 1),
        "LOSSY: drop a missing expert if the token's experts with larger routing weights have weights that sum to more "
        "than this (HOBBIT's T2), from 0 to 1.",
        option="--skip-threshold",
        panel=LOW,
        replaces={"precision_shares": None},
    )
    """HOBBIT's T2: a missing expert is dropped if the token's larger routing weights sum to more than this (lossy). 1:
    never."""
    max_perplexity_increase: float | None = setting(
        None,
        Share("a number above 0 and at most 1 (0.01 is 1 %)", lambda value: 0 < value <= 1, most_typed=0.5),
        "LOSSY: resolve each miss in the fastest way (a substitute, a low-precision copy, the CPU, a load, or "
        "dropping the expert) within this increase of perplexity, e.g. 1%; needs smoe tune --prices. In smoe tune "
        "it has another meaning: find the largest alpha within this increase.",
        option="--max-perplexity-increase",
        implies="balanced",
        left_out="no bound",
        panel=LOW,
    )
    """The increase of perplexity, as a fraction (0.01 is one per cent), within which every miss is resolved in the
    fastest way. The ways are a resident substitute, a low-precision copy, a load, the CPU, or dropping the expert.
    Their quality costs come from `smoe tune --prices`. Lossy. None: other settings decide about misses."""
    tpot_seconds: float | None = setting(
        None,
        Number("a number of seconds above 0", lambda value: 0 < value < math.inf),
        "LOSSY: time per token that is to be met by resolving misses in faster ways (smoe generate: --tpot).",
        left_out="no bound",
        replaces={"max_perplexity_increase": None},
    )
    """A target in seconds per token. Within it, misses are resolved at the least quality cost, in the same ways as for
    `max_perplexity_increase`. Lossy. None: no target."""
    low_meanwhile: bool = setting(
        False,
        Switch(),
        "LOSSY: compute an important missing expert with its low-precision copy, if that copy is in memory, while "
        "its full copy is loaded for later tokens. Without this option, the token waits for the full copy.",
        option="--low-meanwhile",
        panel=LOW,
        owner="low_precision",
    )
    """Whether an important missing expert is computed with a low-precision copy in memory while its full copy is
    loaded. Lossy."""
    upgrade: bool = setting(
        False,
        Switch(),
        "While the disk is idle, load the full copies of experts that were computed with low-precision copies.",
        option="--upgrade",
        panel=LOW,
        owner="low_precision",
    )
    """Whether full copies are loaded, while nothing else is read, for experts that were computed with low-precision
    copies."""
    turn_timeout_seconds: float | None = setting(
        None,
        Number("a number of seconds of at least 0", lambda value: 0 <= value < math.inf),
        "Maximum number of seconds that a request waits for another thread's request to end.",
        left_out="no limit",
    )
    """How many seconds a request waits for another thread's request to end; 0: not at all. None: without limit."""
    reproducible: bool = setting(
        False,
        Switch(),
        "Generate the same text in every run, also with --alpha. Cannot be used with --preset balanced.",
        option="--reproducible",
    )
    """Whether every run gives the same text, also if experts are substituted. Residency then never depends on timing,
    so decode does not prefetch.

    Without substitution the text is the same anyway, with one exception: `kernels` auto may choose own-order by
    measured times. With this setting it uses kernels with torch's bits.
    """

    @property
    def needs_scores(self) -> bool:
        """Whether a policy or predictor needs the scores of all experts, not only the chosen ones."""
        if self.alpha > 0 or self.prices_answers:
            return True
        return eviction_kind(self.eviction).needs_scores or predictor_kind(self.prefetch).needs_scores

    @property
    def prices_answers(self) -> bool:
        """Whether every miss is resolved by quality cost, within a limit of perplexity or of time per token."""
        return self.max_perplexity_increase is not None or self.tpot_seconds is not None

    @property
    def has_low(self) -> bool:
        """Whether missing experts may be replaced by low-precision copies."""
        return self.low_precision != "none"

    @property
    def keeps_experts(self) -> bool:
        """Whether the coordinator has resident experts while workers are connected. With round-robin placement it has
        none."""
        return self.placement != "round-robin"

    @property
    def eviction_settings(self) -> EvictionSettings:
        """The settings from which the eviction policy is made."""
        of_policies = {each.name: getattr(self, each.name) for each in fields(PolicySettings)}
        return EvictionSettings(self.eviction, self.pools, **of_policies)

    @property
    def lossy(self) -> list[str]:
        """Descriptions of the settings by which the text may differ from the unmodified model's by more than
        rounding."""
        return list(self.lossy_settings.values())

    @property
    def lossy_settings(self) -> dict[str, str]:
        """{setting: description} of the settings by which the text may differ from the unmodified model's by more than
        rounding."""
        low, by_shares = f"missing experts in {self.low_precision}", self.precision_shares is not None
        reasons = {
            "alpha": (self.alpha > 0, f"alpha {self.alpha:g}"),
            "precision": (self.precision != "auto", f"experts in {self.precision}"),
            "precision_shares": (by_shares, f"{low} by shares"),
            "low_threshold": (
                self.has_low and self.low_threshold < 1 and not by_shares,
                f"{low} beyond {self.low_threshold:g}",
            ),
            "skip_threshold": (self.skip_threshold < 1 and not by_shares, f"none beyond {self.skip_threshold:g}"),
            "low_meanwhile": (self.low_meanwhile, f"low copies meanwhile ({self.low_precision})"),
            "max_perplexity_increase": (
                self.max_perplexity_increase is not None,
                f"misses resolved within {100 * (self.max_perplexity_increase or 0):.3g} % more perplexity",
            ),
            "tpot_seconds": (self.tpot_seconds is not None, f"misses resolved within {self.tpot_seconds} s a token"),
            "activations": (self.activations == INT8, f"activations in {self.activations}"),
        }
        return {name: reason for name, (applies, reason) in reasons.items() if applies}

    def __post_init__(self) -> None:
        for name, each in SETTINGS.items():
            value = getattr(self, name)
            if not (value is None and DEFAULTS[name] is None) and not each.allowed.admits(value):
                raise each.allowed.refusal(name, value)
        for name, each in SETTINGS.items():
            value = getattr(self, name)
            if each.owner and value != DEFAULTS[name] and not belongs_to(name, getattr(self, each.owner)):
                raise ConfigError.idle(name, value, owner_in_words(name))
        check_together(self)


def _in_order() -> list[Field[Any]]:
    """Return the fields of `EngineConfig` in their order for users: the settings of eviction policies follow
    `eviction`."""
    declared, of_policies = fields(EngineConfig), len(fields(PolicySettings))
    after = [each.name for each in declared].index("eviction") + 1
    return [*declared[of_policies:after], *declared[:of_policies], *declared[after:]]


SETTINGS: dict[str, Setting] = {each.name: each.metadata["setting"] for each in _in_order()}
"""The declaration of each setting, by name."""
DEFAULTS = {each.name: each.default for each in fields(EngineConfig)}
"""The default value of each setting, by name."""


def belongs_to(name: str, value: Any) -> bool:
    """Return whether the setting `name` has an effect if `value` is the value of its owner, the other setting that it
    belongs to."""
    owner = SETTINGS[name].owner
    if owner == "device":
        return bool(value == EMULATED)
    if owner == "images":
        return bool(value)
    if owner == "low_precision":
        return bool(value != "none")
    allowed = SETTINGS[owner].allowed
    assert isinstance(allowed, ClassName), owner
    settings: tuple[str, ...] = allowed.find(value).settings
    return name in settings


def owner_in_words(name: str) -> str:
    """Return a phrase that names the owner of the setting `name`, the other setting that it belongs to, with the
    owner's values for which the setting has an effect."""
    owner = SETTINGS[name].owner
    allowed = SETTINGS[owner].allowed
    if not isinstance(allowed, ClassName):
        return {
            "device": f"`device={EMULATED}`",
            "images": "`images=true`",
            "low_precision": "`low_precision=int4`, or another precision",
        }[owner]
    first, *others = (value for value in allowed.names if belongs_to(name, value))
    return " or ".join((f"`{owner}={first}`", *others))
