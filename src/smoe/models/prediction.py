"""Guessing the next layer's experts: by its router on this layer's input, or by running ahead into it.

    next gate     router input of layer l ------------------------------> router of l+1
    look-ahead    resident and shared experts of l -> attention of l+1 -> router of l+1

The look-ahead (SMoE, second version, section IV-C) runs the library's own modules: the layer's block once more, with
its experts answering what the resident ones gave, then the next decoder layer up to its router, where an exception
leaves it. No family's names are used. What it writes into the KV cache lies at the positions that the true pass writes
before it reads (`runtime/kv_cache.py`), so nothing is to be undone. A layer takes part once a pass has shown that its
output is its residual plus its block's output, bit by bit; for the others the next gate is asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.models.experts import ExpertsSite
from smoe.models.scoring import ScoringRule, in_order
from smoe.runtime.kv_cache import RowCache


class NextGate:
    """Predict a layer's experts by its own router on the layer before's router input.

    The simplest predictor that needs no training (Mixtral-Offloading, arXiv 2312.17238, section 3.2).
    """

    needs_partial = False

    def __init__(
        self,
        model: PreTrainedModel,
        sites: list[ExpertsSite],
        gates: Mapping[int, str],
        rules: Mapping[int, ScoringRule],
        what: str,
    ) -> None:
        modules = dict(model.named_modules())
        self._following = dict(itertools.pairwise(site.layer for site in sites))
        self._experts = {site.layer: site.experts for site in sites}
        self._routers = {layer: modules[name] for layer, name in gates.items()}
        self._rules = rules
        self._what = what
        self.alpha = 0.0
        """The substitution threshold that the layers will be served with."""
        self.silent: torch.Tensor | None = None
        """[T], True at positions that ask for no expert; None where all do."""

    def __call__(
        self, layer: int, hidden: torch.Tensor, partial: torch.Tensor | None = None
    ) -> tuple[int, list[int]] | None:
        after = self._following.get(layer)
        if after is None:
            return None
        router, experts = self._routers.get(after), self._experts[after]
        if router is None:  # a long prompt uses nearly every expert, whatever the router would say
            return (after, list(range(experts))) if hidden.shape[0] >= experts else None
        return after, self.ranked(after, router(hidden))

    def ranked(self, layer: int, output: tuple[Any, ...]) -> list[int]:
        """The experts worth a load by a router's output, best first.

        Where low-score experts may be substituted, only those predicted to be top-score (SMoE, second version); else,
        or where all that will be chosen are asked for (first version), those chosen.
        """
        if self.silent is not None:
            output = tuple(x[~self.silent] if isinstance(x, torch.Tensor) else x for x in output)
        index = _chosen(output)
        is_selective = self.alpha > 0 and self._what == "top-score"
        if is_selective and index.shape[1] < self._experts[layer]:
            return self._top_score(self._rules[layer], in_order(output)[0], index)
        if index.shape[0] == 1:
            return list(index[0].tolist())
        return list(torch.unique(index).tolist())

    def _top_score(self, rule: ScoringRule, logits: torch.Tensor, index: torch.Tensor) -> list[int]:
        """Experts that are top-score for some token, highest score first."""
        choice = rule.choice(rule.scores(logits))
        bound = choice.topk(index.shape[1] + 1, dim=-1).values[:, -1:]
        scores = choice.gather(-1, index)
        kept = scores >= (1 + self.alpha) * bound
        best: dict[int, float] = {}
        for expert, score in zip(index[kept].tolist(), scores[kept].tolist(), strict=True):
            best[expert] = max(score, best.get(expert, score))
        return sorted(best, key=lambda expert: (-best[expert], expert))


class LookAhead:
    """Predict the next layer's experts by running into it ahead of time. Used by the computing thread only."""

    needs_partial = True

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
        """Predictions made by running ahead; the others are the next gate's."""
        self._first = next(iter(self._stations.values()), None)
        self._kwargs: dict[str, dict[str, Any]] = {}
        """What the decoder layers of each kind are given in this pass."""
        for station in self._stations.values():
            station.decoder.register_forward_pre_hook(self._note_arguments(station), with_kwargs=True)
        for last in list(self._stations.values())[-1:]:
            last.decoder.register_forward_hook(self._let_go)

    def install(self) -> None:
        """Once the engine has taken the experts' place (`seam.attach`)."""
        for station in self._stations.values():
            station.install()

    @property
    def alpha(self) -> float:
        """The substitution threshold that the layers will be served with."""
        return self._next_gate.alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._next_gate.alpha = alpha

    @property
    def silent(self) -> torch.Tensor | None:
        """[T], True at positions that ask for no expert; None where all do."""
        return self._next_gate.silent

    @silent.setter
    def silent(self, silent: torch.Tensor | None) -> None:
        self._next_gate.silent = silent

    def __call__(
        self, layer: int, hidden: torch.Tensor, partial: torch.Tensor | None = None
    ) -> tuple[int, list[int]] | None:
        here, there = self._stations.get(layer), self._stations.get(layer + 1)
        if partial is None or here is None or there is None or not here.is_proven or there.number != here.number + 1:
            return self._next_gate(layer, hidden)
        kwargs = self._kwargs.get(there.kind)
        if kwargs is None or not _is_rewritable(kwargs):
            return self._next_gate(layer, hidden)
        self.peeks += 1
        return there.layer, self._next_gate.ranked(there.layer, there.peek(here.output_of(partial), kwargs))

    def _let_go(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The pass is over: its KV cache must not live longer for our sake."""
        self._kwargs.clear()

    def _note_arguments(self, station: _Station) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            if station.is_peeking:
                return
            station.begin(is_single=hidden.shape[-2] == 1)
            if station is self._first:
                self._kwargs.clear()  # masks and positions of the pass before
            self._kwargs[station.kind] = {name: value for name, value in kwargs.items() if name != "hidden_states"}

        return hook


class _PeekedError(Exception):
    """Leaves a decoder layer at its router."""

    def __init__(self, output: tuple[Any, ...]) -> None:
        self.output = output


class _Remembered(NamedTuple):
    """What a module has answered, and the versions at which input and answer were whole."""

    x: torch.Tensor
    x_version: int
    output: torch.Tensor
    output_version: int

    def answers(self, x: torch.Tensor) -> bool:
        """Whether `x` is the same numbers at the same place, under whatever shape, and nobody has written since."""
        is_same = x.data_ptr() == self.x.data_ptr() and x.numel() == self.x.numel() and x._version == self.x_version
        return is_same and self.output._version == self.output_version


class _Station:
    """One MoE layer: what the look-ahead has to know of it and to hold while it runs."""

    def __init__(self, modules: Mapping[str, nn.Module], site: ExpertsSite, router: str) -> None:
        path = site.name.split(".")
        depth = next(n for n in range(len(path), 0, -1) if isinstance(modules[".".join(path[: n - 1])], nn.ModuleList))
        self.layer = site.layer
        self.kind = ""
        self.number = int(path[depth - 1])
        self.decoder = modules[".".join(path[:depth])]
        self.is_proven: bool | None = None
        """Whether the layer's output is its residual plus its block's output; None: not seen yet."""
        self.is_peeking = False
        self._block = modules[".".join(path[:-1])]
        self._experts = modules[site.name]
        self._replay: torch.Tensor | None = None
        self._is_single = False
        self._given: torch.Tensor | None = None
        self._given_out: torch.Tensor | None = None
        self._residual: torch.Tensor | None = None
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._memo: dict[nn.Module, _Remembered] = {}
        modules[router].register_forward_hook(self._leave)
        for child in self.decoder.children():
            if child is not self._block:
                child.register_forward_hook(self._note_child)
        self._block.register_forward_pre_hook(self._note_block)
        self._block.register_forward_hook(self._note_block_output)
        self.decoder.register_forward_hook(self._prove)

    def install(self) -> None:
        """After the engine has taken the experts' place: from now on they may be asked to repeat an answer."""
        served = self._experts.forward

        def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return served(hidden, index, weights) if self._replay is None else self._replay

        self._experts.forward = forward  # type: ignore[method-assign]
        for child in self._block.children():
            if child is not self._experts:
                child.forward = self._remembering(child, child.forward)  # type: ignore[method-assign]

    def begin(self, is_single: bool) -> None:
        """A pass has come to this layer, with one new position or several."""
        self._is_single = is_single
        self._inputs.clear()
        self._memo.clear()
        self._given = self._residual = None

    def output_of(self, partial: torch.Tensor) -> torch.Tensor:
        """The layer's output if its experts' output were `partial` [T, H]."""
        assert self._given is not None and self._residual is not None
        self._replay = partial
        try:
            output = self._block(self._given)
        finally:
            self._replay = None
        ahead: torch.Tensor = self._residual + (output[0] if isinstance(output, tuple) else output)
        return ahead

    def peek(self, hidden: torch.Tensor, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the router says if the layer's input is `hidden`."""
        self.is_peeking = True
        try:
            self.decoder(hidden, **kwargs)
        except _PeekedError as peeked:
            return peeked.output
        finally:
            self.is_peeking = False
        raise AssertionError("the layer ended without asking its router")

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        if self.is_peeking:
            raise _PeekedError(output)

    def _note_child(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The child whose output is the block's input stands between it and the residual: a norm."""
        if self._is_single and not self.is_peeking and args and isinstance(output, torch.Tensor):
            self._inputs[output.data_ptr()] = (args[0], output)

    def _note_block(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_single or self.is_peeking or self._replay is not None or not args:
            return
        self._given = args[0]
        pair = self._inputs.get(args[0].data_ptr())
        self._residual = pair[0] if pair is not None else None
        if self._residual is None:
            self.is_proven = False

    def _note_block_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_single and self.is_proven is None and self._replay is None and not self.is_peeking:
            self._given_out = output[0] if isinstance(output, tuple) else output

    def _prove(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Once, with a real pass's numbers; later passes only let go of what they held."""
        if self._is_single and self.is_proven is None and self._residual is not None and self._given_out is not None:
            result = output[0] if isinstance(output, tuple) else output
            expected = self._residual + self._given_out
            self.is_proven = expected.shape == result.shape and bool(torch.equal(expected, result))
        self._given = self._given_out = self._residual = None
        self._inputs.clear()
        self._memo.clear()

    def _remembering(self, child: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The block runs twice on one input; its shared experts and router need not.

        A remembered output that somebody has written to since is computed anew.
        """

        def remembered(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._is_single or self.is_peeking or args or kwargs:
                return forward(x, *args, **kwargs)
            known = self._memo.get(child)
            if known is not None and known.answers(x):
                return known.output
            output = forward(x)
            if isinstance(output, torch.Tensor) and not output.is_inference():
                self._memo[child] = _Remembered(x, x._version, output, output._version)
            return output

        return remembered


def _is_rewritable(kwargs: Mapping[str, Any]) -> bool:
    """Whether running a layer ahead leaves nothing behind: our cache, with layers that address by position."""
    caches = [kwargs[name] for name in ("past_key_values", "past_key_value") if kwargs.get(name) is not None]
    return bool(caches) and all(isinstance(cache, RowCache) and cache.can_rewind for cache in caches)


def _chosen(output: Sequence[Any]) -> torch.Tensor:
    """The index tensor in a router's output: the last integer tensor."""
    return next(x for x in reversed(output) if isinstance(x, torch.Tensor) and not x.is_floating_point())
