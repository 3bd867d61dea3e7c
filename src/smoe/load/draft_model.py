"""The draft model (`prefetch` draft): a copy of the model in fewer bits, with an engine of its own, that runs ahead.

Its experts come from a file of `smoe pack --precision` and all stay in memory. The other weights are the model's own
memory, unless the file keeps them quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.bounds import DEPARTURE, EMULATED
from smoe.config import EngineConfig
from smoe.errors import ConfigError, UnpreparedError, UnsupportedModelError
from smoe.expert import EXACT
from smoe.kernels.threads import threads
from smoe.load.assembly import Budget, assemble, scoring_rules
from smoe.load.draft_size import draft_config
from smoe.load.known import ResolvedSettings
from smoe.load.learned import LearnedValues
from smoe.load.ledger import demand_of, open_store
from smoe.memory.arena import Arena
from smoe.memory.pacing import Pacing
from smoe.memory.store import ExpertStore, StoredLayer
from smoe.models.checkpoint import Checkpoint
from smoe.models.read_spec import read_spec
from smoe.models.spec import LibrarySpec, ModelSpec
from smoe.models.twin import share_weights
from smoe.policy.budget import Ledger, allocate, full_bytes
from smoe.policy.registry import DRAFT
from smoe.runtime.draft_model import Draft
from smoe.runtime.running_ahead import DraftRouting, RunningAhead
from smoe.runtime.seam import observe_routers

_THREADS = 1
"""The number of threads that the draft model computes on; the model needs the others."""


class PlannedDraft(NamedTuple):
    """The draft model's files and memory demand, before anything large is read."""

    checkpoint: Checkpoint
    spec: LibrarySpec
    config: EngineConfig
    ledger: Ledger
    store: ExpertStore
    device: torch.device
    departure: str
    spares: int

    @property
    def nbytes(self) -> int:
        """The number of bytes of memory in addition to the model's."""
        return self.ledger.budget_bytes - (self.ledger.demand.weights_bytes if self._shares_weights else 0)

    @property
    def _shares_weights(self) -> bool:
        return not self.spec.dense

    def open(self, model: PreTrainedModel | None, computing: int = _THREADS) -> Draft:
        """Open the draft model on `computing` threads.

        `model` is the loaded model without an engine, whose weights are shared; with None the draft model loads its
        own.
        """
        with threads(computing):
            draft = self.checkpoint.load_dense(self.spec, self.device)
            if model is not None and self._shares_weights:
                share_weights(draft, model)
            arena = Arena(self.ledger.sizes, self.device, huge_pages=False)
            try:
                budget = Budget(self.ledger, "of a draft model", ResolvedSettings(self.config, {}), LearnedValues())
                stores, experts = {EXACT: self.store}, {EXACT: self.checkpoint.experts(self.spec)}
                assemble(draft, self.spec, self.config, budget, stores, arena, experts, Pacing())
            except BaseException:
                arena.close()
                raise
        engine = draft.offload
        without_rules = {layer: path for layer, path in engine.anatomy.routers.items() if layer not in engine.rules}
        observe_routers(draft, engine, without_rules)
        draft_routing = Draft(draft, scoring_rules(draft, self.spec), self.spares)
        engine.executor.observers.append(draft_routing)
        return draft_routing

    def on_thread(self, model: PreTrainedModel) -> DraftRouting:
        """Run the draft model on a thread; `model` is as for `open`."""
        return DraftRouting(RunningAhead(self.open(model), self.departure))


def check_draft(spec: ModelSpec, config: EngineConfig) -> None:
    """Raise `ConfigError` for the emulated device, and `UnsupportedModelError` for a family with a recurrent state."""
    if config.device == EMULATED:
        raise ConfigError(
            f"`prefetch` {DRAFT} computes on this CPU, and the `device` {EMULATED} does not emulate its times; "
            "change one of the two",
            setting="prefetch",
            given=DRAFT,
            allowed=f"other predictors on the device {EMULATED}",
        )
    if spec.anatomy.state_bytes_per_sequence:
        raise UnsupportedModelError(
            f"`prefetch` {DRAFT}: this family has layers with a recurrent state, which cannot be set to a position; "
            "use another `prefetch`"
        )


def planned_draft(
    checkpoint: Checkpoint, spec: ModelSpec, config: EngineConfig, device: torch.device
) -> PlannedDraft | None:
    """Return the configured draft model on the coordinator, or None; only headers are read.

    Raises `ConfigError` if the model is not packed in its precision, and the errors of `check_draft`.
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
    return PlannedDraft(checkpoint, its, own, ledger, store, device, departure, spares)


def _its_experts(checkpoint: Checkpoint, own: EngineConfig) -> tuple[LibrarySpec, Mapping[int, StoredLayer]]:
    try:
        spec = read_spec(checkpoint.place, own)
        return spec, checkpoint.experts(spec)
    except ConfigError as error:
        why = str(error).removeprefix(f"`precision` {own.precision}: ")
        raise UnpreparedError(
            f"a draft model in {own.precision} needs its experts packed: {why}, or choose another precision "
            "(`draft_precision`), or another `prefetch`",
            setting="draft_precision",
            given=own.precision,
            allowed="a precision in which the model is packed",
        ) from error
