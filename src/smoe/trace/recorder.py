"""Listening to a running model and writing down what its routers say.

    from smoe.trace.recorder import recording

    with recording(model, Path("run.trace")):
        model.generate(...)

The routers' logits come by forward hooks, which are there only while something is recorded; nothing that is computed
changes. A layer of a step costs a copy of its logits to the host and a write: some 0.1 ms in decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from smoe.errors import EngineStateError, UnsupportedModelError
from smoe.models.scoring import ScoringRule, find_rule
from smoe.runtime.engine import Engine
from smoe.runtime.observer import StepObserver
from smoe.runtime.seam import routers_heard
from smoe.runtime.step import Step
from smoe.trace.file import TraceWriter
from smoe.trace.record import PHASES, TracedLayer, TraceHeader


@contextmanager
def recording(
    model: PreTrainedModel, path: Path, *, name: str | None = None, replace: bool = False
) -> Iterator[Recorder]:
    """Inside, every pass of `model` (one of `smoe.from_pretrained`) is written to `path`; after an error nothing is.

    `name`: what the header calls the model. Raises `UnsupportedModelError` for routers whose logits cannot be observed,
    and what `TraceWriter` raises.
    """
    engine: Engine = model.offload  # type: ignore[assignment]
    if any(isinstance(observer, Recorder) for observer in engine.executor.observers):
        raise EngineStateError("this model is being recorded already; end that recording first")
    header = _header(model, engine, name or model.config.name_or_path)
    with TraceWriter(path, header, replace=replace) as writer:
        recorder = Recorder(engine, writer)
        with routers_heard(model, engine), engine.observed_by(recorder):
            yield recorder
        recorder.settle()


class Recorder(StepObserver):
    """Writes down what it hears."""

    def __init__(self, engine: Engine, writer: TraceWriter) -> None:
        self.writer = writer
        self.steps = 0
        """Whole steps written."""
        self.sequences = 0
        """Sequences observed."""
        self.first_sequence = 0
        """Number, in the trace, of the sequence in row 0 of the passes to come."""
        self._engine = engine
        self._layers = {layer.layer: layer for layer in writer.header.layers}
        self._passes = engine.executor.counters.forward_passes

    def routed(self, step: Step) -> None:
        layer, logits, sequences = step.layer, step.logits, step.sequences
        if layer == self.writer.header.layers[0].layer:
            self.settle()  # a pass begins, so the one before has ended or failed
        traced, count = self._layers[layer], step.top_k_index.shape[0]
        if logits is None or logits.shape != (count, traced.experts):
            given = "nothing" if logits is None else f"{list(logits.shape)} numbers"
            raise UnsupportedModelError(
                f"the router of layer {layer} gives {given} instead of logits of {traced.experts} experts for {count} "
                "tokens, so this family cannot be recorded; it can be served all the same"
            )
        self.sequences = max(self.sequences, self.first_sequence + sequences)
        rows = self.writer.header.blank_rows(traced, count)
        rows["step"], rows["phase"] = self.steps, PHASES.index(step.phase)
        rows["sequence"] = self.first_sequence + np.arange(count) // (count // sequences)
        rows["router_logits"][:, : traced.experts] = logits.half().cpu().numpy()
        rows["top_k_index"][:, : traced.top_k] = step.top_k_index.cpu().numpy()
        rows["top_k_weights"][:, : traced.top_k] = step.top_k_weights.float().cpu().numpy()
        self.writer.append(rows)

    def settle(self) -> None:
        """Keep the rows of the last pass if it has ended, else forget them."""
        passes = self._engine.executor.counters.forward_passes
        if passes != self._passes:
            self.writer.keep()
            self.steps += 1
        else:
            self.writer.drop()
        self._passes = passes


def _header(model: PreTrainedModel, engine: Engine, name: str) -> TraceHeader:
    layers = []
    for number, experts in sorted(engine.store.layers.items()):
        if number not in engine.anatomy.routers:
            raise UnsupportedModelError(
                f"the router of layer {number} could not be found, so its logits cannot be heard and this family "
                f"({model.config.model_type}) cannot be recorded; it can be served all the same"
            )
        rule = engine.rules.get(number) or _rule(model, engine, number, experts.experts)
        layers.append(
            TracedLayer(number, experts.experts, engine.anatomy.top_k[number], rule.as_json() if rule else None)
        )
    sizes = tuple(engine.store.slot_bytes[layer.layer] for layer in layers)
    return TraceHeader(name, model.config.model_type, engine.config.alpha, tuple(layers), expert_bytes=sizes)


def _rule(model: PreTrainedModel, engine: Engine, layer: int, experts: int) -> ScoringRule | None:
    """The router's rule, or None: a trace is of use without scores too."""
    modules, name = dict(model.named_modules()), engine.anatomy.routers[layer]
    hidden, block = model.config.get_text_config().hidden_size, modules[name.rpartition(".")[0]]
    try:
        return find_rule(modules[name], block, hidden, experts, engine.anatomy.top_k[layer], layer)
    except UnsupportedModelError:
        return None
