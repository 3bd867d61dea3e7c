"""The rules about several settings of `EngineConfig`: settings that exclude each other, and settings that need each
other.

A setting that has no effect without another one is declared with its `owner` (`setting_declaration.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smoe.bounds import AS_DTYPE, DEFAULT_DRAFT, EMULATED, INT8, PRECISION
from smoe.errors import ConfigError, UnpreparedError
from smoe.policy.registry import DRAFT, ONLINE_EVICTION, eviction_kind
from smoe.units import format_bytes

if TYPE_CHECKING:
    from smoe.config import EngineConfig


def check_together(config: EngineConfig) -> None:
    """Raise `ConfigError` if settings exclude each other, or if a setting lacks another that it needs."""
    if config.memory_bytes is not None and config.resident_share is not None:
        raise ConfigError(
            f"a budget of {format_bytes(config.memory_bytes)} and a share of {100 * config.resident_share:.3g}% of "
            "the experts both set the memory; leave out `memory` or `resident`",
            setting="resident_share",
            given=config.resident_share,
            allowed="only without `memory`",
        )
    if config.count == "process" and (config.memory_bytes is None or config.device in ("cuda", EMULATED)):
        raise ConfigError(
            "`count=process` makes `memory` the limit of the whole process, which works only on a CPU; give "
            "`memory`, and leave out `device` or give `device=cpu`",
            setting="count",
            given=config.count,
            allowed="process with `memory` on a CPU",
        )
    if config.expert_cache != "budget" and (config.resident_share is not None or config.has_low):
        other = "resident_share" if config.resident_share is not None else "low_precision"
        raise ConfigError(
            f"`expert_cache={config.expert_cache}` keeps no experts in memory between tokens, and `{other}` needs "
            "such experts: leave out one of the two",
            setting="expert_cache",
            given=config.expert_cache,
            allowed=f"budget with `{other}`",
        )
    _check_activations(config)
    _check_low(config)
    _check_cluster(config)
    _check_draft(config)
    _check_images(config)
    if config.device == "cpu" and config.balance not in ("auto", "none"):
        raise UnpreparedError(
            f"`balance={config.balance}` (an option, or part of a preset) needs a device in addition to the CPU: "
            "use `device=cuda` or `device=emulated`, or another preset",
            setting="balance",
            given=config.balance,
            allowed="auto or none on a CPU",
        )
    if config.reproducible and config.alpha > 0 and not eviction_kind(config.eviction).is_orderless:
        allowed = " or ".join(name for name in ONLINE_EVICTION if eviction_kind(name).is_orderless)
        raise ConfigError(
            f"with `reproducible` and an alpha above 0, `eviction={config.eviction}` would depend on the order in "
            f"which loads finish; choose one of these values of `eviction`: {allowed}",
            setting="eviction",
            given=config.eviction,
            allowed=allowed,
        )


def _check_cluster(config: EngineConfig) -> None:
    """Raise `ConfigError` if `cluster` is combined with another setting that decides about missing experts."""
    if config.cluster is None:
        return
    others = {
        "balance": config.balance not in ("auto", "none"),
        "reproducible": config.reproducible and config.alpha > 0,
        "device": config.device == EMULATED,
        "max_perplexity_increase": config.prices_answers,
    }
    for name in (name for name, is_given in others.items() if is_given):
        raise ConfigError(
            "with `cluster`, workers compute the missing experts, which cannot be combined with "
            f"`{name}={getattr(config, name)}`: leave out one of the two",
            setting=name,
            given=getattr(config, name),
            allowed="only without `cluster`",
        )


def _check_images(config: EngineConfig) -> None:
    """Raise `ConfigError` if `images` is combined with other models or machines, which get tokens only."""
    others = {"cluster": config.cluster is not None, "prefetch": config.prefetch == DRAFT}
    for name in (name for name, is_given in others.items() if is_given and config.images):
        raise ConfigError(
            f"`images` cannot be combined with `{name}={getattr(config, name)}`, which gets tokens and no images: "
            "leave out one of the two",
            setting="images",
            given=True,
            allowed=f"false with `{name}={getattr(config, name)}`",
        )


def _check_draft(config: EngineConfig) -> None:
    """Raise `ConfigError` if the draft model does not have a lower precision than the model."""
    fewer = PRECISION[PRECISION.index(config.precision) + 1 :]
    wanted = config.draft_precision or DEFAULT_DRAFT
    if config.prefetch == DRAFT and wanted not in fewer:
        raise ConfigError(
            f"`draft_precision={wanted}` is not lower than `precision={config.precision}`; choose one of: "
            f"{', '.join(fewer) or '(there is none)'}",
            setting="draft_precision",
            given=config.draft_precision,
            allowed=", ".join(fewer),
        )


def _check_low(config: EngineConfig) -> None:
    """Raise `ConfigError` if low-precision copies do not have fewer bits than the experts, or if T1 (`low_threshold`)
    is above T2 (`skip_threshold`)."""
    _check_answers(config)
    if not config.has_low:
        return
    lower = PRECISION[PRECISION.index(config.precision) + 1 :]
    if config.low_precision not in lower:
        raise ConfigError(
            f"`low_precision={config.low_precision}` is not lower than `precision={config.precision}`; choose one of: "
            f"{', '.join(('none', *lower))}",
            setting="low_precision",
            given=config.low_precision,
            allowed=", ".join(("none", *lower)),
        )
    if config.low_threshold > config.skip_threshold:
        raise ConfigError(
            f"`low_threshold={config.low_threshold:g}` is above `skip_threshold={config.skip_threshold:g}`: experts "
            "would be dropped that are too important for a low-precision copy; give a `low_threshold` of at most "
            f"{config.skip_threshold:g}, or a higher `skip_threshold`",
            setting="low_threshold",
            given=config.low_threshold,
            allowed=f"at most {config.skip_threshold:g}",
        )


def _check_answers(config: EngineConfig) -> None:
    """Raise `ConfigError` if a limit of perplexity or time is combined with other settings that decide about
    misses."""
    if not config.prices_answers:
        return
    budget = "max_perplexity_increase" if config.max_perplexity_increase is not None else "tpot_seconds"
    others = {
        "tpot_seconds": budget != "tpot_seconds" and config.tpot_seconds is not None,
        "alpha": config.alpha > 0 or config.alpha_as_priced,
        "low_threshold": config.low_threshold < 1,
        "skip_threshold": config.skip_threshold < 1,
        "low_meanwhile": config.low_meanwhile,
        "reproducible": config.reproducible,
    }
    for name in (name for name, is_given in others.items() if is_given):
        raise ConfigError(
            f"`{budget}` chooses by measured times how every miss is resolved, and cannot be combined with `{name}` "
            "(an option, or part of a preset): leave out one of the two, or use `preset=balanced`",
            setting=budget,
            given=getattr(config, budget),
            allowed=f"only without `{name}`",
        )


def _check_activations(config: EngineConfig) -> None:
    """Raise `ConfigError` if int8 activations are combined with a device, kernels or dtype that cannot use them."""
    if config.activations != INT8:
        return
    allowed: dict[str, tuple[str, ...]] = {
        "device": ("auto", "cpu"),
        "kernels": ("auto", "native"),
        "dtype": ("auto", "bfloat16"),
    }
    for name, choices in allowed.items():
        if getattr(config, name) not in choices:
            other = f"`{name}={getattr(config, name)}`"
            raise ConfigError(
                f"`activations={config.activations}` is for smoe's own kernels on a CPU, in bfloat16, and cannot be "
                f"combined with {other}: leave out one of the two",
                setting="activations",
                given=config.activations,
                allowed=f"{AS_DTYPE} with {other}",
            )
