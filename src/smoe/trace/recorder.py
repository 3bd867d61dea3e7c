"""Records the routers' outputs of a running model in a trace.

    from smoe.trace.recorder import recording

    with recording(model, Path("run.trace")):
        model.generate(...)

Forward hooks receive the routers' logits. They exist only during a recording, and do not change results. For each layer
of a step, the logits are copied to the host and written, which takes about 0.1 ms in decode.
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
from smoe.runtime.seam import observed_routers
from smoe.runtime.step import Step
from smoe.trace.file import TraceWriter
from smoe.trace.record import PHASES, TracedLayer, TraceHeader


@contextmanager
def recording(
    model: PreTrainedModel, path: Path, *, name: str | None = None, replace: bool = False
) -> Iterator[Recorder]:
    """Record every pass of `model` (a result of `smoe.from_pretrained`) to `path` during the `with` block. After an
    error, no file is left.

    `name`: the model's name in the header. Raise `UnsupportedModelError` if the logits of a router cannot be observed,
    and the errors of `TraceWriter`.
    """
    engine: Engine = model.offload  # type: ignore[assignment]
    if any(isinstance(observer, Recorder) for observer in engine.executor.observers):
        raise EngineStateError("this model is being recorded already; end that recording first")
    header = _header(model, engine, name or model.config.name_or_path)
    with TraceWriter(path, header, replace=replace) as writer:
        recorder = Recorder(engine, writer)
        with observed_routers(model, engine), engine.observed_by(recorder):
            yield recorder
        recorder.settle()


class Recorder(StepObserver):
    """An observer of the engine that writes the routing of every step to a trace."""

    def __init__(self, engine: Engine, writer: TraceWriter) -> None:
        self.writer = writer
        self.steps = 0
        """The number of complete steps that were written."""
        self.sequences = 0
        """The number of sequences that were observed."""
        self._first_sequence = 0
        """The number, in the trace, of the sequence in row 0 of the next passes."""
        self._engine = engine
        self._layers = {layer.layer: layer for layer in writer.header.layers}
        self._passes = engine.executor.counters.forward_passes

    def number_from(self, sequence: int) -> None:
        """Give the sequence in row 0 of the next passes the number `sequence` in the trace, and the following rows the
        following numbers."""
        self._first_sequence = sequence

    def routed(self, step: Step) -> None:
        layer, logits, sequences = step.layer, step.logits, step.sequences
        if layer == self.writer.header.layers[0].layer:
            self.settle()  # a pass begins, so the last one has ended or failed
        traced, count = self._layers[layer], step.top_k_index.shape[0]
        if logits is None or logits.shape != (count, traced.experts):
            given = "nothing" if logits is None else f"{list(logits.shape)} numbers"
            raise UnsupportedModelError(
                f"the router of layer {layer} gives {given} instead of logits of {traced.experts} experts for {count} "
                "tokens, so this family cannot be recorded; it can be served all the same"
            )
        self.sequences = max(self.sequences, self._first_sequence + sequences)
        rows = self.writer.header.blank_rows(traced, count)
        rows["step"], rows["phase"] = self.steps, PHASES.index(step.phase)
        rows["sequence"] = self._first_sequence + np.arange(count) // (count // sequences)
        rows["router_logits"][:, : traced.experts] = logits.half().cpu().numpy()
        rows["top_k_index"][:, : traced.top_k] = step.top_k_index.cpu().numpy()
        rows["top_k_weights"][:, : traced.top_k] = step.top_k_weights.float().cpu().numpy()
        self.writer.append(rows)

    def settle(self) -> None:
        """Add the rows of the last forward pass to the trace if the pass has ended; otherwise remove them."""
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
                f"the router of layer {number} could not be found, so its logits cannot be read and this family "
                f"({model.config.model_type}) cannot be recorded; it can be served all the same"
            )
        rule = engine.rules.get(number) or _rule(model, engine, number, experts.experts)
        layers.append(
            TracedLayer(number, experts.experts, engine.anatomy.top_k[number], rule.as_json() if rule else None)
        )
    sizes = tuple(engine.store.slot_bytes[layer.layer] for layer in layers)
    return TraceHeader(name, model.config.model_type, engine.config.alpha, tuple(layers), expert_bytes=sizes)


def _rule(model: PreTrainedModel, engine: Engine, layer: int, experts: int) -> ScoringRule | None:
    """Return the scoring rule of a layer's router; None if it is unknown, because a trace is useful without scores
    too."""
    modules, name = dict(model.named_modules()), engine.anatomy.routers[layer]
    hidden, block = model.config.get_text_config().hidden_size, modules[name.rpartition(".")[0]]
    try:
        return find_rule(modules[name], block, hidden, experts, engine.anatomy.top_k[layer], layer)
    except UnsupportedModelError:
        return None
