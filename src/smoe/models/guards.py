"""What an ordinary model can do and one with an engine behind it cannot, refused before it does harm.

Saving would write a model without experts; converting or moving the weights would leave those in the slots behind, and
the budget; gradients would miss the experts. What changes nothing (`.to("cpu")` on a CPU, `.eval()`) works, as
pipelines and evaluation harnesses ask for it. Compiling is declined: the model runs as it is, at once.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.errors import EngineStateError

_log = logging.getLogger(__name__)


def guard(model: PreTrainedModel) -> None:
    """Put the refusals on `model` and its modules, in place."""
    for module in model.modules():
        module._apply = _unchanged(module)  # type: ignore[method-assign]
    for name in ("save_pretrained", "push_to_hub"):
        setattr(model, name, _not_saved(model, name))
    model.train = _evaluated(model)  # type: ignore[method-assign]
    model.requires_grad_ = _without_gradients(model)  # type: ignore[method-assign]


def uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, as `torch.compile` leaves it alone: Python and reading threads are in its midst."""
    alone: Callable[..., Any] = torch.compiler.disable(forward, reason=_WHY_UNCOMPILED)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _say_uncompiled()
        return alone(*args, **kwargs)

    return run


_WHY_UNCOMPILED = "experts are loaded while the model runs"


@functools.cache
def _warn_once() -> None:
    _log.warning("torch.compile does nothing for this model (%s): it runs uncompiled", _WHY_UNCOMPILED)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _say_uncompiled() -> None:
    _warn_once()


def _unchanged(module: nn.Module) -> Callable[..., nn.Module]:
    """For `.to()`, `.float()`, `.cuda()` and all others that send every weight through a function."""

    def apply(change: Callable[[torch.Tensor], torch.Tensor], *_: Any, **__: Any) -> nn.Module:
        tensors = itertools.chain(module.parameters(), module.buffers())
        like = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        if like is None:
            return module
        before = like.new_empty(0)
        after = change(before)
        if after.dtype is not before.dtype or after.device != before.device:
            raise EngineStateError(
                f"this model computes in {_name(before.dtype)} on {before.device}, and its experts and its memory "
                f"budget with it; it cannot become {_name(after.dtype)} on {after.device} while it is loaded: call "
                "smoe.from_pretrained again with dtype=... or device=..."
            )
        return module

    return apply


def _not_saved(model: PreTrainedModel, name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> None:
        raise EngineStateError(
            f"{name} would write this model without its experts, which are read from {model.name_or_path} as they are "
            "needed; nothing in it has changed, so copy or upload that checkpoint instead"
        )

    return refuse


def _evaluated(model: PreTrainedModel) -> Callable[..., PreTrainedModel]:
    original = model.train

    def train(mode: bool = True) -> PreTrainedModel:
        if mode:
            raise EngineStateError("this model is for inference only: .train() would turn dropout on; use .eval()")
        done: PreTrainedModel = original(mode)
        return done

    return train


def _without_gradients(model: PreTrainedModel) -> Callable[..., PreTrainedModel]:
    original = model.requires_grad_

    def requires_grad(requires_grad: bool = True) -> PreTrainedModel:
        if requires_grad:
            raise EngineStateError("this model is for inference only: no gradient reaches its experts")
        done: PreTrainedModel = original(requires_grad)
        return done

    return requires_grad


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
