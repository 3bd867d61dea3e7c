"""Predicts the next layer's experts by running the first part of that layer early.

    resident and shared experts of layer l -> attention of l+1 -> router of l+1

This is SMoE's look-ahead (second version, section IV-C). It calls the library's own modules. First the MoE block of
layer l runs once more, with the output of its resident experts in place of the output of all of its experts. Then the
next decoder layer runs up to its router, where an exception stops it. No model family is hard-coded. The early run
writes to the KV cache only at positions that the regular pass overwrites before it reads them (`models/kv_cache.py`),
so nothing must be undone.

A layer is predicted in this way only after a regular pass has shown, bit by bit, that its output is the sum of its
residual and its block's output. For other layers, the predictor `next-gate` is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel

from smoe.kernels.proof import same_bits
from smoe.models.kv_cache import RowCache
from smoe.models.outline import ExpertsSite
from smoe.policy.prediction import Moment, Prediction, Predictor, Sight
from smoe.prediction.next_gate import NextGate
from smoe.prediction.without_hooks import has_hooks, without_hooks


class LookAhead(Predictor):
    """Predicts the next layer's experts by running the first part of that layer early. Only the computing thread may
    use it."""

    asked = Moment.RESIDENTS_DONE

    def __init__(
        self, model: PreTrainedModel, sites: list[ExpertsSite], routers: Mapping[int, str], next_gate: NextGate
    ) -> None:
        modules = dict(model.named_modules())
        self._next_gate = next_gate
        self._stations = {
            site.layer: _Station(modules, site, routers[site.layer]) for site in sites if site.layer in routers
        }
        kinds = getattr(model.config.get_text_config(), "layer_types", None)
        for station in self._stations.values():
            station.kind = kinds[station.number] if kinds else ""
        self.peeks = 0
        """The number of predictions made by running a layer early. All other predictions were made by the predictor
        `next-gate`."""
        self._first = next(iter(self._stations.values()), None)
        self._kwargs: dict[str, dict[str, Any]] = {}
        """The arguments of this pass for the decoder layers of each layer type."""
        for station in self._stations.values():
            station.decoder.register_forward_pre_hook(self._note_arguments(station), with_kwargs=True)
        for last in list(self._stations.values())[-1:]:
            last.decoder.register_forward_hook(self._let_go)

    def install(self) -> None:
        """Wrap the layers' experts, after the engine has replaced them (`seam.attach`)."""
        for station in self._stations.values():
            station.install()

    def predict(self, sight: Sight) -> Sequence[Prediction]:
        here, there = self._stations.get(sight.layer), self._stations.get(sight.layer + 1)
        if sight.partial is None or here is None or there is None or not here.is_proven:
            return self._next_gate.predict_by(self.grading, sight)
        kwargs = self._kwargs.get(there.kind)
        if there.number != here.number + 1 or kwargs is None or not _is_rewritable(kwargs) or _has_any_global_hook():
            return self._next_gate.predict_by(self.grading, sight)
        self.peeks += 1
        output = there.peek(here.output_of(sight.partial), kwargs)
        return (self._next_gate.named(there.layer, output, self.grading, sight.rows),)

    def _let_go(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Delete the stored arguments of the decoder layers at the end of a pass, so that the pass's KV cache can be
        freed."""
        self._kwargs.clear()

    def _note_arguments(self, station: _Station) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            station.begin(is_single=hidden.shape[-2] == 1)
            if station is self._first:
                self._kwargs.clear()  # masks and positions of the pass before
            self._kwargs[station.kind] = {name: value for name, value in kwargs.items() if name != "hidden_states"}

        return hook


class _PeekedError(Exception):
    """Raised to stop a decoder layer at its router. It contains the router's output."""

    def __init__(self, output: tuple[Any, ...]) -> None:
        self.output = output


class _Remembered(NamedTuple):
    """The last input and output of a module, and how often each tensor had been written to (torch's version
    counters)."""

    x: torch.Tensor
    x_version: int
    output: torch.Tensor
    output_version: int

    def answers(self, x: torch.Tensor) -> bool:
        """Return whether the stored output is valid for the input `x`: `x` is the memory of the stored input, in any
        shape, and neither the input nor the output has been written to since."""
        is_same = x.data_ptr() == self.x.data_ptr() and x.numel() == self.x.numel() and x._version == self.x_version
        return is_same and self.output._version == self.output_version


class _Station:
    """One MoE layer that can be run early: its modules, and the tensors of the current pass that running it early
    needs."""

    def __init__(self, modules: Mapping[str, nn.Module], site: ExpertsSite, router: str) -> None:
        path = site.name.split(".")
        depth = next(n for n in range(len(path), 0, -1) if isinstance(modules[".".join(path[: n - 1])], nn.ModuleList))
        self.layer = site.layer
        self.kind = ""
        self.number = int(path[depth - 1])
        self.decoder = modules[".".join(path[:depth])]
        self.is_proven: bool | None = None
        """Whether the layer's output is the sum of its residual and its block's output; None: not tested yet."""
        self._is_peeking = False
        self._block = modules[".".join(path[:-1])]
        self._experts = modules[site.name]
        self._router = modules[router]
        self._parts = list(self.decoder.modules())
        self._replay: torch.Tensor | None = None
        self._is_single = False
        self._given: torch.Tensor | None = None
        self._given_out: torch.Tensor | None = None
        self._residual: torch.Tensor | None = None
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._memo: dict[nn.Module, _Remembered] = {}
        for child in self.decoder.children():
            if child is not self._block:
                child.register_forward_hook(self._note_child)
        self._block.register_forward_pre_hook(self._note_block)
        self._block.register_forward_hook(self._note_block_output)
        self.decoder.register_forward_hook(self._prove)

    def install(self) -> None:
        """Wrap the engine's experts so that they can return a given output. Wrap the other modules of the MoE block so
        that they can return their last output."""
        served = self._experts.forward

        def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return served(hidden, index, weights) if self._replay is None else self._replay

        self._experts.forward = forward  # type: ignore[method-assign]
        for child in self._block.children():
            if child is not self._experts:
                child.forward = self._remembering(child, child.forward)  # type: ignore[method-assign]

    def begin(self, is_single: bool) -> None:
        """Delete the tensors of the last pass. `is_single`: whether the new pass has one position; passes with more
        positions are not observed."""
        self._is_single = is_single
        self._inputs.clear()
        self._memo.clear()
        self._given = self._residual = None

    def output_of(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer, computed with `partial` [T, H] in place of the output of its experts."""
        assert self._given is not None and self._residual is not None
        self._replay = partial
        try:
            with without_hooks(self._parts):
                output = self._block(self._given)
        finally:
            self._replay = None
        ahead: torch.Tensor = self._residual + (output[0] if isinstance(output, tuple) else output)
        return ahead

    def peek(self, hidden: torch.Tensor, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the router's output for the layer input `hidden`, without computing the experts."""
        self._is_peeking = True
        try:
            with without_hooks(self._parts), _leaving(self._router):
                self.decoder(hidden, **kwargs)
        except _PeekedError as peeked:
            return peeked.output
        finally:
            self._is_peeking = False
        raise AssertionError("the layer ended without calling its router")

    def _note_child(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Store the input and output of a child module. When the MoE block runs, the child whose output is the block's
        input is the norm, and the norm's input is the residual."""
        if self._is_single and args and isinstance(output, torch.Tensor):
            self._inputs[output.data_ptr()] = (args[0], output)

    def _note_block(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_single or not args:
            return
        self._given = args[0]
        pair = self._inputs.get(args[0].data_ptr())
        self._residual = pair[0] if pair is not None else None
        if self._residual is None:
            self.is_proven = False

    def _note_block_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_single and self.is_proven is None:
            self._given_out = output[0] if isinstance(output, tuple) else output

    def _prove(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Test once, with the values of a regular pass, whether the layer's output is the sum of its residual and its
        block's output. In later passes, only release tensors."""
        if self._is_single and self.is_proven is None and self._residual is not None and self._given_out is not None:
            result = output[0] if isinstance(output, tuple) else output
            expected = self._residual + self._given_out
            self.is_proven = same_bits(expected, result)
        self._given = self._given_out = self._residual = None
        self._inputs.clear()
        self._memo.clear()

    def _remembering(self, child: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of `forward` that stores its last output and returns it when called with the same input.
        The block runs twice on the same input, and its shared experts and router need not be computed twice.

        An output is computed again if it was written to since. It is also computed again if the module contains modules
        with hooks, since the hooks must be called in the regular pass.
        """
        inside = list(child.modules())[1:]

        def remembered(*args: Any, **kwargs: Any) -> Any:
            if not self._is_single or self._is_peeking or len(args) != 1 or kwargs:
                return forward(*args, **kwargs)
            (x,) = args
            known = self._memo.get(child)
            if known is not None and known.answers(x) and not any(map(has_hooks, inside)):
                return known.output
            output = forward(x)
            if isinstance(output, torch.Tensor) and not output.is_inference():
                self._memo[child] = _Remembered(x, x._version, output, output._version)
            return output

        return remembered


@contextmanager
def _leaving(router: nn.Module) -> Iterator[None]:
    """Make every call of the router raise `_PeekedError` with its output, during the `with` block."""

    def leave(module: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        raise _PeekedError(output)

    handle = router.register_forward_hook(leave)
    try:
        yield
    finally:
        handle.remove()


def _is_rewritable(kwargs: Mapping[str, Any]) -> bool:
    """Return whether running a layer early leaves no trace in the KV cache. This is so if the cache is a `RowCache`
    whose layers write by position."""
    caches = [kwargs[name] for name in ("past_key_values", "past_key_value") if kwargs.get(name) is not None]
    return bool(caches) and all(isinstance(cache, RowCache) and cache.can_rewind for cache in caches)
