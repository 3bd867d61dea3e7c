"""The eviction policies that take part in a tournament, with the settings that they have when the model is loaded with
them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from smoe.errors import ConfigError, SmoeError
from smoe.load.cache_weights import cache_weights_of
from smoe.load.engine_parts import scoring_rules
from smoe.load.learned import learned_by
from smoe.load.learned_file import NotLearnedError
from smoe.models.spec import LibrarySpec
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.registry import ONLINE_EVICTION, eviction_kind
from smoe.runtime.engine import Engine


class Refused(NamedTuple):
    """Why a policy or predictor cannot take part in a tournament."""

    why: str
    lacking: str = ""
    """What must be learned before the policy or predictor can take part; empty if there is another reason."""


def refused_by(error: Exception) -> Refused:
    """Return why a policy or predictor cannot take part in a tournament, from the error that loading it has raised."""
    cause = error.__cause__
    return Refused(str(error), str(cause) if isinstance(cause, NotLearnedError) else "")


def evictions_of(model: PreTrainedModel, spec: LibrarySpec) -> tuple[dict[str, EvictionSettings], dict[str, Refused]]:
    """Return ({policy: its settings} of the policies that can take part, {policy: the reason} of the others).

    `learned` uses the estimate that was trained for the model. `multidimensional` uses the weights that were fitted for
    the model, if there are any.
    """
    found: dict[str, EvictionSettings] = {}
    refused: dict[str, Refused] = {}
    for name in ONLINE_EVICTION:
        try:
            found[name] = _settings(name, model, spec)
        except (SmoeError, OSError) as error:  # if a folder cannot be read, policies that need it are left out
            refused[name] = refused_by(error)
    return found, refused


def _settings(name: str, model: PreTrainedModel, spec: LibrarySpec) -> EvictionSettings:
    """Return the settings of one eviction policy. Raise `SmoeError` if the loaded model cannot use the policy."""
    engine: Engine = model.offload  # type: ignore[assignment]
    place = Path(spec.config.name_or_path)
    usual = replace(engine.config.eviction_settings, name=name)
    kind = eviction_kind(name)
    if kind.needs_scores and not engine.rules:
        scoring_rules(model, spec)  # raises the error that says why there are none
        raise ConfigError(
            "the model was loaded without the routers' scores, which the eviction policy needs; load the model with "
            f"`eviction={name}`",
            setting="eviction",
        )
    if kind.learned:
        return replace(usual, next_use=learned_by(kind, name, place, spec).next_use)
    if "cache_weights" in kind.settings and usual.cache_weights is None:
        weights, _ = cache_weights_of(place)
        return replace(usual, cache_weights=weights)
    return usual
