"""Plans the draft model (setting `prefetch` draft): a copy of the model in fewer bits, with an engine of its own.

Its experts come from a file of `smoe pack --precision`, and all of them stay in memory. Its other weights are the
model's own memory, unless the file has them in quantized form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from smoe.bounds import DEFAULT_DRAFT, DEPARTURE, EMULATED
from smoe.config import EngineConfig
from smoe.errors import ConfigError, UnpreparedError, UnsupportedModelError
from smoe.load.draft_size import draft_config
from smoe.load.ledger import demand_of, open_store
from smoe.memory.store import ExpertStore, StoredLayer
from smoe.models.checkpoint import Checkpoint
from smoe.models.read_spec import read_spec
from smoe.models.spec import LibrarySpec, ModelSpec
from smoe.policy.budget import Ledger, allocate, full_bytes
from smoe.policy.registry import DRAFT

if TYPE_CHECKING:
    from smoe.cluster.following import Following


class PlannedDraft(NamedTuple):
    """A draft model's files and the memory that it needs, known before its weights are read."""

    checkpoint: Checkpoint
    spec: LibrarySpec
    config: EngineConfig
    ledger: Ledger
    stored: Mapping[int, StoredLayer]
    """The stored tensors of every layer's experts."""
    store: ExpertStore
    device: torch.device
    departure: str
    spares: int

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the draft model takes in addition to the model's."""
        return self.ledger.budget_bytes - (self.ledger.demand.weights_bytes if self.shares_weights else 0)

    @property
    def shares_weights(self) -> bool:
        """Whether the draft model's non-expert weights are the model's own memory."""
        return not self.spec.dense


def check_draft(spec: ModelSpec, config: EngineConfig) -> None:
    """Raise `ConfigError` if the device is emulated, and `UnsupportedModelError` for a family with a recurrent
    state."""
    if config.device == EMULATED:
        raise ConfigError(
            f"`prefetch={DRAFT}` runs the draft model on this CPU, and `device={EMULATED}` does not emulate the "
            "draft model's times; change one of the two settings",
            setting="prefetch",
            given=DRAFT,
            allowed=f"other predictors on the device {EMULATED}",
        )
    if spec.anatomy.state_bytes_per_sequence:
        raise UnsupportedModelError(
            f"`prefetch={DRAFT}`: this family has layers with a recurrent state, which cannot be set to an earlier "
            "position; use another `prefetch`"
        )


def planned_draft(
    checkpoint: Checkpoint, spec: ModelSpec, config: EngineConfig, device: torch.device
) -> PlannedDraft | None:
    """Return the draft model that the settings request on this machine, or None. Only headers are read.

    Raises `ConfigError` if the model is not packed in the draft model's precision, and the errors of `check_draft`.
    """
    if config.prefetch != DRAFT or config.draft_on == "cluster":
        return None
    check_draft(spec, config)
    own = draft_config(spec, config)
    its, experts = _its_experts(checkpoint, own)
    store = open_store(checkpoint, its, experts, device)
    demand = demand_of(its, own, device, store)
    ledger = allocate(full_bytes(demand), demand)
    departure, spares = config.draft_start or DEPARTURE[0], config.draft_extra or 0
    return PlannedDraft(checkpoint, its, own, ledger, experts, store, device, departure, spares)


def _its_experts(checkpoint: Checkpoint, own: EngineConfig) -> tuple[LibrarySpec, Mapping[int, StoredLayer]]:
    try:
        spec = read_spec(checkpoint.place, own)
        return spec, checkpoint.experts(spec)
    except ConfigError as error:
        why = str(error).removeprefix(f"`precision={own.precision}`: ")
        raise UnpreparedError(
            f"a draft model in {own.precision} needs its experts packed: {why}, or choose another precision "
            "(`draft_precision`), or another `prefetch`",
            setting="draft_precision",
            given=own.precision,
            allowed="a precision in which the model is packed",
        ) from error


def placed_draft(config: EngineConfig) -> EngineConfig:
    """Return the settings after deciding where the draft model runs: on a machine of the cluster that is reserved for
    it, else on the coordinator."""
    if config.prefetch != DRAFT or config.draft_on is not None:
        return config
    place = "coordinator"
    if config.cluster is not None:
        from smoe.cluster.stored_identity import read_coordinator

        place = "cluster" if read_coordinator(config.cluster).drafts else "coordinator"
    return replace(config, draft_on=place)


def is_apart(config: EngineConfig) -> bool:
    """Return whether the draft model runs on another machine. `config` must be a result of `placed_draft`."""
    return config.prefetch == DRAFT and config.draft_on == "cluster"


def following(spec: ModelSpec, config: EngineConfig) -> Following:
    """Return the coordinator's connection to a draft model on another machine, which follows the coordinator's text.
    Raise the errors of `check_draft`."""
    from smoe.cluster.following import Following

    check_draft(spec, config)
    experts = {site.layer: site.experts for site in spec.sites}
    chosen, spares = spec.anatomy.top_k, config.draft_extra or 0
    named = {layer: min(count, chosen[layer] + spares) for layer, count in experts.items()}
    wanted = {
        "context_tokens": spec.context_tokens,
        "dtype": str(spec.dtype),
        "activations": config.activations,
        "draft_precision": config.draft_precision or DEFAULT_DRAFT,
        "draft_start": config.draft_start or DEPARTURE[0],
        "draft_extra": spares,
    }
    return Following(wanted, experts, named, spec.context_tokens)
