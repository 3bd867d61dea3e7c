"""Checks whether the offloaded model computes exactly as the library's own modules, on this machine and model (`smoe
verify`).

A single token, a prompt, and a few decode steps run through the offloaded model with its engine's kernels, KV cache and
number of threads. Every part is compared during the pass, on its actual input, bit by bit:

* every layer's *experts*: those that were used are loaded again by safetensors' own reader, converted by the
  checkpoint's rules and run through the library's loop;
* every other *part* (attention, norms, projections, router, shared experts, embedding, output head): the library's
  own modules with the same weights (`models/twin.py`), on all threads; attention with a cache of the library that has
  seen the same passes;
* the *block* around the experts, with the library's own result for the experts, and with the router's result in this
  pass if that differed by rounding;
* the KV cache's sizes, from which masks are made.

The rest connects these parts and is the library's own code: equal parts make an equal model. The used experts of one
layer are in memory at a time, never the whole model. Several sequences at once and prompts read in chunks are not
compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from smoe.config import EngineConfig
from smoe.errors import BudgetError, ContextError
from smoe.fastpath.router import is_by_kernel
from smoe.kernels.proof import same_bits
from smoe.kernels.threads import threads
from smoe.load.selftest import is_same, library_result, quantised_rounding
from smoe.machine.available_memory import free_device_bytes
from smoe.memory.quantised_store import is_quantised
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import StoredLayer
from smoe.models.checkpoint import whole_checkpoint
from smoe.models.finish_spec import choose_context
from smoe.models.kv_cache import RowCache
from smoe.models.outline import ExpertsSite
from smoe.models.quantised_linear import QuantisedWeight
from smoe.models.read_spec import read_spec, spec_of_whole
from smoe.models.twin import ModelPart, parts_of, share_weights
from smoe.runtime.engine import Engine
from smoe.runtime.observer import StepObserver
from smoe.runtime.step import Step
from smoe.units import format_bytes

DECODE_STEPS = 2
PASSES = 2 + DECODE_STEPS
"""The number of forward passes that are compared: a single token, the prompt, and the decode steps after it."""
EXPERTS, LOW_COPIES, CACHE = "experts", "low copies", "KV cache"
"""Names in comparisons for what is not a module of the library, or is not compared as a module."""
QUANTISED, OWN_ORDER = "quantised weights", "own order"
_COPIES = 3
"""The number of copies of one layer's experts in memory while they are read, stacked and converted."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of one part of the model (such as attention or the experts of a layer) with the library, in one
    forward pass."""

    layer: int | None
    """The decoder layer; None for a part that belongs to no layer."""
    part: str
    phase: str
    position: int
    """The number of tokens that the model had processed before this pass."""
    tokens: int
    is_equal: bool
    is_near: bool
    """Whether the part is equal, or differs by rounding where that is allowed: for quantized weights, which the library
    computes from dequantized ones, and for sums in our own order."""
    is_finite: bool
    """Whether the library's result is finite; it is not for damaged weights."""
    largest_difference: float
    used: int | None = None
    """For experts: the number of experts that this pass used; None for other parts of the model."""
    experts: int | None = None

    @property
    def is_good(self) -> bool:
        return self.is_near and self.is_finite


@dataclass(frozen=True)
class Report:
    """The comparisons of a model with the library, and the modules that could not be compared."""

    comparisons: list[Comparison]
    not_compared: list[str]
    """Paths of modules that were not compared: they were never called, or called in a way that cannot be repeated."""
    may_round: list[str]
    """The reasons why results may differ by rounding: `QUANTISED`, `OWN_ORDER` or both."""
    self_test: str
    """When the model's kernels and experts were tested (`Engine.self_test`)."""

    @property
    def bad(self) -> list[Comparison]:
        return [comparison for comparison in self.comparisons if not comparison.is_good]

    @property
    def is_exact(self) -> bool:
        """Whether every compared part of the model is equal to the library's, bit by bit."""
        return not self.bad and all(comparison.is_equal for comparison in self.comparisons)


@dataclass(frozen=True)
class Reference:
    """What the model is compared with: the experts in the checkpoint itself (not in a packed file), and the library's
    modules, which have no weights yet."""

    sites: dict[int, ExpertsSite]
    experts: dict[int, StoredLayer]
    shell: PreTrainedModel
    dense: Mapping[str, StoredTensor]
    """The weights outside experts that stay quantized, by name."""
    low: dict[int, StoredLayer]
    """The experts' low-precision copies; empty where there are none."""
    part: str = EXPERTS
    """The name under which `experts` appear in comparisons."""


def reference_of(model: str, config: EngineConfig, revision: str | None, tokens: int) -> Reference:
    """Return the reference for comparing a model: the experts' positions in the checkpoint, and the library's modules.

    Raises `BudgetError` if one layer's experts and a cache of `tokens` positions do not fit into RAM, and
    `ContextError` for a short context.
    """
    spec = read_spec(model, config, revision)
    context = choose_context(spec.config, config)
    if tokens + DECODE_STEPS > context:
        raise ContextError(
            f"a prompt of {tokens} tokens and {DECODE_STEPS} decoded tokens do not fit in the context of {context}; "
            "give fewer `tokens`, or more `context_tokens`",
            setting="tokens",
            given=tokens,
            allowed=f"a whole number from 2 to {context - DECODE_STEPS} in this context",
        )
    checkpoint = whole_checkpoint(model, revision)
    spec = spec_of_whole(checkpoint, spec, config)
    experts = checkpoint.experts(spec)
    elements = max(site.experts * sum(math.prod(part.shape) for part in site.parts) for site in spec.sites)
    layer_bytes = elements * spec.dtype.itemsize  # the library's are not quantised
    needed = _COPIES * layer_bytes + spec.anatomy.kv_bytes_per_token * (tokens + DECODE_STEPS)
    free, source = free_device_bytes(torch.device("cpu"))
    if needed > free:
        raise BudgetError(
            f"checking needs up to {format_bytes(needed)} for one layer's experts ({format_bytes(layer_bytes)}, read, "
            f"stacked and converted) and a second KV cache; {format_bytes(free)} are free ({source}): close other "
            "programs, give a smaller `memory`, or check a shorter prompt with `tokens`",
            setting="tokens",
            given=tokens,
            allowed="fewer, or with more free memory",
        )
    low = {} if spec.low is None else checkpoint.experts(spec.low)
    return Reference({site.layer: site for site in spec.sites}, experts, spec.shell, spec.dense, low)


def verify(
    model: PreTrainedModel, reference: Reference, input_ids: torch.Tensor, on_part: Callable[[Comparison], None]
) -> Report:
    """Run the first token of `input_ids` [1, T], then all tokens and a few decode steps, and return the report. Every
    part of every pass is compared with the library when it is computed; `on_part` receives each comparison."""
    comparing = _Comparing(model, reference, on_part)
    engine, ids = comparing.engine, input_ids.to(model.device)
    with comparing.listening():
        comparing.run(engine.new_cache(), ids[:, :1])
        cache = comparing.reset()
        for _ in range(1 + DECODE_STEPS):
            ids = comparing.run(cache, ids)
    return Report(comparing.found, comparing.not_compared(), comparing.may_round, engine.self_test)


def verify_low_copies(
    model: PreTrainedModel, reference: Reference, input_ids: torch.Tensor, on_part: Callable[[Comparison], None]
) -> Report:
    """Compare the model, with low-precision copies for all experts, with the library on the dequantized weights."""
    engine: Engine = model.offload  # type: ignore[assignment]
    with engine.executor.by_low_copies():
        return verify(model, replace(reference, experts=reference.low, part=LOW_COPIES), input_ids, on_part)


class _Comparing(StepObserver):
    """Compares a model with its twin, the library's own modules with the same weights. One thread may use it, while no
    other thread uses the model."""

    def __init__(self, model: PreTrainedModel, reference: Reference, on_part: Callable[[Comparison], None]) -> None:
        self.engine: Engine = model.offload  # type: ignore[assignment]
        self.found: list[Comparison] = []
        self._model = model
        self._reference = reference
        has_codes = is_quantised(reference.experts) or bool(reference.dense)
        self._has_own_order = self.engine.arithmetic == "own-order"
        self.may_round = [QUANTISED] * has_codes + [OWN_ORDER] * self._has_own_order
        self._rounding = quantised_rounding(model.dtype) if has_codes or self._has_own_order else 0.0
        """The allowed difference by rounding, relative to the largest value."""
        self._on_part = on_part
        self._threads = torch.get_num_threads()
        """The number of threads that the library alone would use."""
        self._modules = dict(model.named_modules())
        self._twin = reference.shell
        share_weights(self._twin, model)
        self._parts = parts_of(model, list(reference.sites.values()))
        self._twins = {part.path: self._twin.get_submodule(part.path) for part in self._parts}
        self._theirs = DynamicCache(config=model.config)
        """The library's KV cache for the running sequence."""
        self._ours: RowCache | None = None
        self._tokens = 0
        self._is_serving = False
        """Whether the engine is computing experts. Calls of other modules in this time are predictions, and are not
        compared."""
        self._versions: dict[str, list[int]] = {}
        self._seen: set[str] = set()
        self._unrepeatable: set[str] = set()
        self._last: dict[int, tuple[tuple[torch.Tensor, ...], torch.Tensor]] = {}
        """The input of the current layer's experts in this pass, and the library's result for this input."""
        routers = self.engine.anatomy.routers.values()
        self._routers = {path: self._twins[path].forward for path in routers if path in self._twins}
        """The library's own computation of each router, by path."""
        self._rounded: dict[str, Any] = {}
        """The last results of routers that differ from the library's by rounding, by path. The library's block is
        computed with them: it might choose another expert of the same score, whose result differs by more."""

    def reset(self) -> RowCache:
        """Start another sequence, with new KV caches for the model and for the library."""
        self._theirs = DynamicCache(config=self._model.config)
        return self.engine.new_cache()

    def run(self, cache: RowCache, ids: torch.Tensor) -> torch.Tensor:
        """Run one forward pass over ids [1, T]. Return the likeliest next token [1, 1]."""
        self._ours, self._tokens = cache, ids.shape[1]
        self._rounded.clear()
        has_same_shapes = _same_shapes(cache, self._theirs, self._tokens)
        self._say(None, CACHE, has_same_shapes, has_same_shapes, True, 0.0)
        logits = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(dim=-1)  # type: ignore[no-any-return]

    def not_compared(self) -> list[str]:
        return sorted({part.path for part in self._parts} - self._seen | self._unrepeatable)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """During the `with` block, repeat every call of a compared module with the library's module."""
        with ExitStack() as made:
            for part in self._parts:
                module = self._modules[part.path]
                before = module.register_forward_pre_hook(self._note(part), prepend=True, with_kwargs=True)
                made.callback(before.remove)
                made.callback(module.register_forward_hook(self._follow(part), with_kwargs=True).remove)
            for layer, site in self._reference.sites.items():
                made.callback(_replace_forward(self._twin.get_submodule(site.name), self._library_experts(layer)))
            for path in self._routers:
                made.callback(_replace_forward(self._twins[path], self._library_router(path)))
            made.enter_context(self.engine.observed_by(self))
            yield

    # -- parts --------------------------------------------------------------------------------------------------------

    def _note(self, part: ModelPart) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._is_serving:
                self._versions[part.path] = [tensor._version for tensor in _tensors((args, kwargs))]

        return hook

    def _follow(self, part: ModelPart) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._is_serving:
                return
            if [tensor._version for tensor in _tensors((args, kwargs))] != self._versions[part.path]:
                self._unrepeatable.add(part.path)  # the module wrote to its input
                return
            self._seen.add(part.path)
            given = {name: self._theirs if value is self._ours else value for name, value in kwargs.items()}
            self._rounded.pop(part.path, None)
            with torch.no_grad(), self._all_threads():
                theirs = self._twins[part.path](*(self._theirs if x is self._ours else x for x in args), **given)
            pairs = list(zip(_tensors(output), _tensors(theirs), strict=True))
            has_experts = any(site.name.startswith(f"{part.path}.") for site in self._reference.sites.values())
            has_codes = any(isinstance(each, QuantisedWeight) for each in module.modules())
            may_round = self._has_own_order or has_experts or has_codes or is_by_kernel(module)
            is_equal = all(same_bits(a, b) for a, b in pairs)
            is_near = all(self._is_near(a, b, may_round) for a, b in pairs if not _is_choice(b))
            is_near = is_near and all(_is_same_choice(a, b, pairs, may_round) for a, b in pairs if _is_choice(b))
            if part.path in self._routers and is_near and not is_equal:
                self._rounded[part.path] = output
            self._say(
                part.layer,
                part.name,
                is_equal,
                is_near,
                not any(bool(b.isnan().any()) for _, b in pairs),  # infinity is allowed: routers use it to mask experts
                max((_difference(a, b) for a, b in pairs), default=0.0),
            )

        return hook

    def _library_router(self, path: str) -> Callable[..., Any]:
        """Return the computation of a router in the library's block: the library's own, unless the router's last result
        differed by rounding."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._rounded[path] if path in self._rounded else self._routers[path](*args, **kwargs)

        return forward

    # -- experts ------------------------------------------------------------------------------------------------------

    def routed(self, step: Step) -> None:
        self._is_serving = True

    def computed(self, step: Step, output: torch.Tensor) -> None:
        """Compare the result of a layer's experts with the library's."""
        self._is_serving = False
        self._last.clear()
        layer, index = step.layer, step.top_k_index
        theirs = self._library_experts(layer)(step.hidden, index, step.top_k_weights)
        used, experts = len(torch.unique(index)), self._reference.sites[layer].experts
        is_finite = bool(torch.isfinite(theirs).all())
        is_near = self._is_near(output, theirs, True)
        difference = _difference(output, theirs)
        self._say(layer, self._reference.part, same_bits(output, theirs), is_near, is_finite, difference, used, experts)

    def _is_near(self, ours: torch.Tensor, theirs: torch.Tensor, may_round: bool) -> bool:
        if same_bits(ours, theirs):
            return True
        return may_round and self._rounding > 0 and is_same(ours, theirs, self._rounding)

    def _library_experts(self, layer: int) -> Callable[..., torch.Tensor]:
        """Return the result of the library's loop on experts that are read again from the files. The last result is
        reused for an equal input in this pass."""

        def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            given = (hidden, index, weights)
            known = self._last.get(layer)
            if known is not None and all(same_bits(a, b) for a, b in zip(given, known[0], strict=True)):
                return known[1]
            site = self._reference.sites[layer]
            used = torch.unique(index).tolist()
            position = torch.zeros(site.experts, dtype=torch.long, device=index.device)
            position[used] = torch.arange(len(used), device=index.device)
            module, checkpoint = self._modules[site.name], self._reference.experts[layer]
            with self._all_threads():
                theirs = library_result(module, checkpoint, used, hidden, position[index], weights)
            self._last[layer] = given, theirs
            return theirs

        return forward

    def _say(
        self,
        layer: int | None,
        part: str,
        is_equal: bool,
        is_near: bool,
        is_finite: bool,
        difference: float,
        used: int | None = None,
        experts: int | None = None,
    ) -> None:
        assert self._ours is not None
        phase = "decode" if self._tokens == 1 else "prefill"
        position = self._ours.length
        comparison = Comparison(
            layer, part, phase, position, self._tokens, is_equal, is_near, is_finite, difference, used, experts
        )
        self.found.append(comparison)
        self._on_part(comparison)

    @contextmanager
    def _all_threads(self) -> Iterator[None]:
        """During the `with` block, let torch use all threads, as the library alone would; the engine may have limited
        it to one."""
        with threads(self._threads):
            yield


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace a module's computation. Return a function that restores it."""
    before = vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]

    def restore() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return restore


def _is_choice(result: torch.Tensor) -> bool:
    """Return whether a result of a router contains numbers of experts, [T, K]."""
    return not result.is_floating_point() and result.dim() == 2


def _is_same_choice(
    ours: torch.Tensor, theirs: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], may_round: bool
) -> bool:
    """Return whether two choices of experts [T, K] are equal, or differ only by experts of equal scores, up to rounding
    if results `may_round`. `pairs`: all results of the router, ours and the library's; one of them has the scores
    [T, E]."""
    if ours.shape != theirs.shape or torch.equal(ours, theirs):
        return ours.shape == theirs.shape
    of_all = [each for _, each in pairs if each.is_floating_point() and each.dim() == 2]
    scores = max(of_all, key=lambda each: each.shape[1], default=None)
    if not may_round or scores is None or scores.shape[1] <= ours.shape[1]:
        return False
    is_valid = int(ours.min()) >= 0 and int(ours.max()) < scores.shape[1]
    in_order = ours.sort(1).values
    if not is_valid or bool((in_order[:, 1:] == in_order[:, :-1]).any()):
        return False
    chosen, expected = (scores.gather(1, each.long()).float() for each in (ours, theirs))
    allowed = quantised_rounding(scores.dtype) / 2 * torch.maximum(chosen.abs(), expected.abs())
    return bool((((chosen - expected).abs() <= allowed) | (ours == theirs)).all())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in the arguments or the result of a call, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    if same_bits(ours, theirs) or not ours.numel():
        return 0.0
    return float((ours.float() - theirs.float()).abs().nan_to_num(float("inf")).max())


def _same_shapes(ours: RowCache, theirs: DynamicCache, tokens: int) -> bool:
    """Return whether the model's cache and the library's give masks of equal shapes for this number of new tokens."""
    pairs = zip(ours.layers, theirs.layers, strict=True)
    return all(a.get_mask_sizes(tokens) == b.get_mask_sizes(tokens) for a, b in pairs if type(a) is not type(b))
