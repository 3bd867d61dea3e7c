"""The predictor that a model's settings mean, and the learned values that they need. Learned values count in the memory
budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smoe.bounds import DEFAULT_PREFETCH_DEPTH, EMULATED
from smoe.config import EngineConfig
from smoe.machine.device import AnyDevice
from smoe.models.spec import ModelSpec
from smoe.plug_ins import attribute_at
from smoe.policy.eviction.base import Eviction
from smoe.policy.prediction import PredictorKind
from smoe.policy.registry import eviction_kind, predictor_kind

if TYPE_CHECKING:
    from smoe.load.learned_file import ModelShape

_PREFETCH_PAYS_BYTES = 1 << 20
"""The size in bytes below which reading an expert is faster than predicting it. For larger ones the gain is measured
(docs/log/prefetch.md)."""


class LearnedValues(NamedTuple):
    """The values (`LearnedValue`) that `smoe tune` has learned for one model, by the setting that needs each. A value
    is None if the settings do not need it."""

    prefetch: Any = None
    eviction: Any = None

    @property
    def nbytes(self) -> int:
        """The size in bytes of the learned values. Router corrections are not included, because the memory budget
        counts them with their predictor."""
        return sum(each.nbytes for each in self if each is not None)

    @property
    def reasons(self) -> dict[str, str]:
        """Texts that say where values come from, by setting."""
        return {setting: each.origin for setting, each in self._asdict().items() if each is not None and each.origin}


def expected_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the size in bytes that the configured predictor will have once it has been fitted; 0 if it stores only
    counts."""
    return predictor_kind(config.prefetch).bytes_to_fit(spec)


def learned_of(config: EngineConfig, place: Path, spec: ModelSpec) -> LearnedValues:
    """Return the learned values that the settings need, for the model in `place`. Raises `ConfigError` if one has not
    been learned for these weights."""
    depth = config.prefetch_depth or DEFAULT_PREFETCH_DEPTH
    kinds: dict[str, Any] = {"prefetch": predictor_kind(config.prefetch), "eviction": eviction_kind(config.eviction)}
    return LearnedValues(
        **{setting: learned_by(kind, getattr(config, setting), place, spec, depth) for setting, kind in kinds.items()}
    )


def learned_by(
    kind: type[PredictorKind] | type[Eviction], name: str, place: Path, spec: ModelSpec, depth: int = 1
) -> Any:
    """Return the learned value that a policy or predictor of this class and name needs; None if it needs none. Raises
    `ConfigError` as `learned_of` does."""
    return attribute_at(kind.learned).read(name, place, model_shape(spec, depth)) if kind.learned else None


def model_shape(spec: ModelSpec, depth: int) -> ModelShape:
    """Return what a learned value must fit, for predictions at most `depth` layers ahead."""
    from smoe.load.learned_file import ModelShape  # requires torch

    hidden_size = int(spec.config.get_text_config().hidden_size)
    return ModelShape({site.layer: site.experts for site in spec.sites}, hidden_size, depth)


def predictor_name(spec: ModelSpec, config: EngineConfig, device: AnyDevice) -> str:
    """Return the name of the predictor for decode. It is "none" if a prediction could change the results of a run that
    must be reproducible, or if prefetching does not pay."""
    if config.reproducible and config.alpha > 0:
        return "none"
    if config.prefetch != "auto":
        return config.prefetch
    is_emulated = config.device == EMULATED
    stands_for = config.emulated_expert_bytes if is_emulated else None
    if (spec.expert_bytes if stands_for is None else stands_for) < _PREFETCH_PAYS_BYTES:
        return "none"
    return "look-ahead" if device.type != "cpu" or is_emulated else "next-gate"
