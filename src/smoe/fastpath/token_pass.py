"""Computes one token through a whole model: embedding, decoder layers, last norm and output layer, one after the other.

If our kernels compute every decoder layer for one token (`fast_layer.py`), transformers' forward function of the
model only adds positions, masks that hide nothing, and some twenty calls. So it is replaced for one token. The
replacement is tested with stubs for the layers: the first layer must receive the same bits as before, and the logits
must be equal. transformers computes all other calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.fastpath.fast_layer import FastLayer, RowExperts, hooks_of
from smoe.kernels.proof import same_bits
from smoe.kernels.verdicts import Verdicts
from smoe.models.kv_cache import RowCache

_PROOF_IDS = (0, 1)
_PLAIN = {"input_ids", "past_key_values", "use_cache", "logits_to_keep", "attention_mask", "position_ids",
          "return_dict", "cache_position"}  # fmt: skip
"""Arguments that a call may contain; others must be None or False."""
_ASKS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Outputs that a model's config may request."""

Layer = Callable[[torch.Tensor, Any, int], torch.Tensor]
"""A function (hidden states [1, 1, H], position embeddings, layer number) -> [1, 1, H]."""


ResidentLayers = Callable[[], Sequence[RowExperts] | None]
"""A function that returns, for each layer, a function that replaces its mlp for one token. None if the mlp must run."""


def none_resident() -> None:
    return None


def speed_up(
    model: PreTrainedModel,
    layers: Mapping[nn.Module, FastLayer],
    resident_layers: ResidentLayers = none_resident,
    verdicts: Verdicts | None = None,
) -> bool:
    """Replace a model's forward function, for one token, if our function reproduces its bits. Return whether it was
    replaced.

    `layers`: the decoder layers with a forward function of ours. `resident_layers` is called before each token if all
    layers may skip their mlp. `verdicts`: known results of proofs; this function adds its own.
    """
    text = next((module for module in model.modules() if _is_text(module, layers)), None)
    head = model.get_output_embeddings()
    if text is None or head is None or not layers:
        return False
    own = [layers[layer] for layer in text.layers]  # type: ignore[union-attr]
    ours = TokenPass(model, text, head, own, resident_layers)
    subject = type(model), type(text), type(head), len(own)
    output = (verdicts or Verdicts()).of("token pass", subject, ours.proven_output)
    if output is None:
        return False
    ours.return_as(output)

    @functools.wraps(ours.library)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return ours.forward(*args, **kwargs)

    model.forward = forward  # type: ignore[method-assign]
    return True


def _is_text(module: nn.Module, layers: Mapping[nn.Module, FastLayer]) -> bool:
    """Return whether a module consists of an embedding, the decoder layers `layers`, a norm and a rotary embedding, and
    nothing else."""
    names = dict(module.named_children())
    own = names.get("layers")
    if names.keys() != {"embed_tokens", "layers", "norm", "rotary_emb"} or not isinstance(own, nn.ModuleList):
        return False
    return len(own) == len(layers) and all(layer in layers for layer in own)


class TokenPass:
    """The forward function of a model. Our kernels compute one token; transformers' function computes every other
    call."""

    def __init__(
        self,
        model: PreTrainedModel,
        text: nn.Module,
        head: nn.Module,
        layers: Sequence[FastLayer],
        resident_layers: ResidentLayers,
    ) -> None:
        self.library: Callable[..., Any] = model.forward
        self._model, self._text, self._head, self._layers = model, text, head, list(layers)
        self._modules = dict(text.named_children())
        known = {text, head, *text.children(), *text.layers}  # type: ignore[misc]
        self._parts = [
            (of._modules, name, each) for of in model.modules() for name, each in of._modules.items() if each in known
        ]
        self._hooks = hooks_of([text, *text.layers])  # type: ignore[misc]
        self._output: Callable[..., Any] = dict
        self._resident_layers = resident_layers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output as transformers' forward function does."""
        cache = kwargs.get("past_key_values")
        if args or not isinstance(cache, RowCache) or not self._is_plain(kwargs, cache) or not self._is_untouched():
            return self.library(*args, **kwargs)
        through = self._layer_of(cache)
        if through is None:
            return self.library(**kwargs)
        logits = self._logits(kwargs["input_ids"], kwargs.get("position_ids"), cache, through)
        return self._output(logits=logits, past_key_values=cache)

    def _is_plain(self, kwargs: Mapping[str, Any], cache: RowCache) -> bool:
        """Return whether a call asks only for the logits of one token that follows the tokens in the KV cache."""
        ids, mask, position = kwargs.get("input_ids"), kwargs.get("attention_mask"), kwargs.get("position_ids")
        if not isinstance(ids, torch.Tensor) or ids.shape != (1, 1) or cache.rows != 1 or cache.row_lengths is not None:
            return False
        if kwargs.get("return_dict") is False or kwargs.get("use_cache") is False or not cache.length:
            return False
        if not isinstance(kwargs.get("logits_to_keep", 0), int) or (position is not None and position.shape != (1, 1)):
            return False
        if any(value is not None and value is not False for name, value in kwargs.items() if name not in _PLAIN):
            return False
        if mask is not None and (mask.dim() != 2 or mask.shape[1] != cache.length + 1 or not bool((mask != 0).all())):
            return False
        return not any(getattr(self._model.config, name, False) for name in _ASKS)

    def _is_untouched(self) -> bool:
        """Return whether all modules of the model are still the tested ones, and none of them has a hook."""
        if any(self._hooks) or not self._layers[0].is_sdpa:
            return False
        return all(modules[name] is module for modules, name, module in self._parts)

    def _layer_of(self, cache: RowCache) -> Layer | None:
        """Return a function that computes one decoder layer with this KV cache. Return None if transformers' function
        must compute one of the layers."""
        places = [layer.place_in(cache) if layer.is_untouched() else None for layer in self._layers]
        if None in places:
            return None
        experts = self._resident_layers() if all(layer.may_skip_block() for layer in self._layers) else None

        def through(hidden: torch.Tensor, embeddings: Any, index: int) -> torch.Tensor:
            own = None if experts is None else experts[index]
            return self._layers[index].one_token(hidden, embeddings, places[index], own)  # type: ignore[arg-type]

        return through

    def _logits(
        self, ids: torch.Tensor, position: torch.Tensor | None, cache: RowCache, through: Layer
    ) -> torch.Tensor:
        """Return the logits [1, 1, vocabulary size] for a token's id and position, both [1, 1]."""
        modules = self._modules
        hidden = modules["embed_tokens"](ids)
        if position is None:
            position = torch.tensor([[cache.length]])
        embeddings = modules["rotary_emb"](hidden, position)
        for index in range(len(self._layers)):
            hidden = through(hidden, embeddings, index)
        logits: torch.Tensor = self._head(modules["norm"](hidden))
        return logits

    def return_as(self, output: str) -> None:
        """Return outputs of this class, given as its module and its name, from now on."""
        module, name = output.split()
        self._output = getattr(sys.modules[module], name)

    def proven_output(self) -> str | None:
        """Return the class of transformers' output, as its module and its name, if our function agrees with
        transformers': the first layer must receive the same bits, and the same logits must follow from the last layer's
        output. Otherwise return None."""
        cache = RowCache(self._model.config.get_text_config(), 1, 2)
        cache.begin_after(1)
        try:
            outputs = {self._agreeing_output(torch.tensor([[id]]), cache) for id in _PROOF_IDS}
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):  # takes other arguments
            return None
        return outputs.pop() if len(outputs) == 1 else None

    def _agreeing_output(self, ids: torch.Tensor, cache: RowCache) -> str | None:
        """Return the class of transformers' output for one token, as its module and its name; None if a bit
        differs."""
        mine: list[torch.Tensor] = []
        theirs: list[torch.Tensor] = []

        def stand_in(seen: list[torch.Tensor], hidden: torch.Tensor, embeddings: Any) -> torch.Tensor:
            seen += [hidden, *embeddings]
            return hidden.flip(-1)

        with torch.no_grad():
            ours = self._logits(ids, None, cache, lambda hidden, embeddings, _: stand_in(mine, hidden, embeddings))
            with _stand_ins(self._text.layers, functools.partial(stand_in, theirs)):  # type: ignore[arg-type]
                output = self.library(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        given = {name for name, value in output.items() if value is not None}
        is_same = same_bits(ours, output.logits) and len(mine) == len(theirs)
        if not is_same or given != {"logits", "past_key_values"} or not all(map(same_bits, mine, theirs)):
            return None
        of = type(output)
        return (
            f"{of.__module__} {of.__name__}" if getattr(sys.modules[of.__module__], of.__name__, None) is of else None
        )


@contextmanager
def _stand_ins(layers: Sequence[nn.Module], stand_in: Callable[[torch.Tensor, Any], torch.Tensor]) -> Iterator[None]:
    """Replace decoder layers by `stand_in`, which takes hidden states and position embeddings, during the `with`
    block."""

    def forward(
        hidden_states: torch.Tensor, attention_mask: None = None, *, position_embeddings: Any, **_: Any
    ) -> torch.Tensor:
        if attention_mask is not None:
            raise ValueError("a mask for one token")
        return stand_in(hidden_states, position_embeddings)

    before = [layer.forward for layer in layers]
    for layer in layers:
        layer.forward = forward  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.forward = own  # type: ignore[method-assign]
