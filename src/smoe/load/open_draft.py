"""Loads a draft model, with an engine of its own, and can run it on a thread."""

from __future__ import annotations

from transformers import PreTrainedModel

from smoe.expert import EXACT
from smoe.kernels.threads import threads
from smoe.load.build import assemble
from smoe.load.divide import Divided
from smoe.load.draft_model import PlannedDraft
from smoe.load.engine_parts import scoring_rules
from smoe.load.resolve import Resolved
from smoe.memory.arena import Arena
from smoe.memory.pacing import Pacing
from smoe.models.twin import share_weights
from smoe.runtime.draft_model import Draft
from smoe.runtime.running_ahead import DraftRouting, RunningAhead
from smoe.runtime.seam import observe_routers

_THREADS = 1
"""The number of threads that compute the draft model; the model needs the others."""


def open_draft(planned: PlannedDraft, model: PreTrainedModel | None, computing: int = _THREADS) -> Draft:
    """Load a draft model that computes on `computing` threads.

    `model`: the loaded model without an engine, whose non-expert weights the draft model shares; None: the draft model
    loads its own weights.
    """
    spec, config, ledger = planned.spec, planned.config, planned.ledger
    stored, stores = {EXACT: planned.stored}, {EXACT: planned.store}
    with threads(computing):
        draft = planned.checkpoint.load_dense(spec, planned.device)
        if model is not None and planned.shares_weights:
            share_weights(draft, model)
        arena = Arena(ledger.sizes, planned.device, huge_pages=False)
        try:
            resolved = Resolved(planned.checkpoint, spec, config, planned.device, stored, stores)
            assemble(draft, arena, Pacing(), resolved, Divided(ledger, "of a draft model", config, spec))
        except BaseException:
            arena.close()
            raise
    engine = draft.offload
    without_rules = {layer: path for layer, path in engine.anatomy.routers.items() if layer not in engine.rules}
    observe_routers(draft, engine, without_rules)
    routing = Draft(draft, scoring_rules(draft, spec), planned.spares)
    engine.executor.add_observer(routing)
    return routing


def draft_on_thread(planned: PlannedDraft, model: PreTrainedModel) -> DraftRouting:
    """Load the draft model and run it on a thread. Return the object that gives its predictions. `model` is as for
    `open_draft`."""
    return DraftRouting(RunningAhead(open_draft(planned, model), planned.departure))
