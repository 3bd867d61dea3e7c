"""Raises errors for operations of transformers models that would break a model with an engine.

Saving would omit the experts. The state lacks them, too, but adapters read it, so reading it only warns. Converting or
moving weights would miss the experts in their slots and exceed the budget. A copy would have no engine. Gradients do
not reach the experts, so adapters work but cannot be trained. Operations without effect (`.to("cpu")` on a CPU,
`.eval()`) are allowed, because pipelines and evaluation harnesses call them. `torch.compile` has no effect: the model
runs uncompiled.
"""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import Function
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from smoe.errors import EngineStateError

_WHY_NOT_COPIED = (
    "a loaded model cannot be copied or pickled: its experts are on disk, and its memory and threads belong to this "
    "process. Call smoe.from_pretrained again where a second one is needed; several threads can share one"
)
_FOR_INFERENCE = (
    "this model is for inference only: no gradient reaches its experts. Adapters (LoRA) can be used with it, not "
    "trained: train them with the unmodified transformers model, or call this one inside torch.no_grad()"
)
_REFUSED = {
    "gradient_checkpointing_enable": f"has an effect in training only: {_FOR_INFERENCE}",
    "enable_input_require_grads": f"has an effect in training only: {_FOR_INFERENCE}",
}
"""{method of the model: why calling it raises an error, as a phrase that follows the method's name}."""
_log = logging.getLogger(__name__)


def guard(model: PreTrainedModel) -> None:
    """Replace methods of `model` and its modules, in place, by ones that raise errors."""
    for module in model.modules():
        module._apply = _unchanged(module)  # type: ignore[method-assign]
    for name in ("save_pretrained", "push_to_hub"):
        setattr(model, name, _not_saved(model, name))
    for name, effect in _REFUSED.items():
        setattr(model, name, _refusing(name, effect))
    model.resize_token_embeddings = _not_resized(model)  # type: ignore[method-assign]
    model.state_dict = _warned_state(model)  # type: ignore[method-assign]
    model.train = _evaluated(model)  # type: ignore[method-assign]
    model.requires_grad_ = _without_gradients(model)  # type: ignore[method-assign]
    for name in ("__deepcopy__", "__reduce_ex__"):  # copy.deepcopy, pickle and torch.save call these
        setattr(model, name, not_copied)


def refuse_gradients(model: nn.Module, given: torch.Tensor) -> None:
    """Raise `EngineStateError` if a forward pass with the inputs `given` would compute gradients, of an adapter or of
    an input."""
    if torch.is_grad_enabled() and (given.requires_grad or any(each.requires_grad for each in model.parameters())):
        raise EngineStateError(_FOR_INFERENCE)


def without_backward(output: Any) -> Any:
    """Return a model's output. If gradients are enabled, `backward()` of its loss raises an error."""
    if torch.is_grad_enabled() and isinstance(output, ModelOutput) and isinstance(output.get("loss"), torch.Tensor):
        output["loss"] = _WithoutBackward.apply(output["loss"], torch.zeros((), requires_grad=True))
    return output


class _WithoutBackward(Function):
    """Returns its input unchanged, and raises an error in backward. The second input makes autograd call backward."""

    @staticmethod
    def forward(context: Any, loss: torch.Tensor, wanting: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> NoReturn:
        raise EngineStateError(_FOR_INFERENCE)


def uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` excluded from `torch.compile`, because it runs Python code and uses reading threads."""
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
    _log.warning("torch.compile does nothing for this model (%s): the model runs uncompiled", _WHY_UNCOMPILED)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _say_uncompiled() -> None:
    _warn_once()


def _unchanged(module: nn.Module) -> Callable[..., nn.Module]:
    """Return a replacement for a module's `_apply`, which `.to()`, `.float()`, `.cuda()` and similar methods call.
    The replacement raises an error if the call would change the dtype or device of the weights, and otherwise does
    nothing."""

    def apply(change: Callable[[torch.Tensor], torch.Tensor], *_: Any, **__: Any) -> nn.Module:
        tensors = itertools.chain(module.parameters(), module.buffers())
        like = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        if like is None:
            return module
        before = like.new_empty(0)
        try:
            after = change(before)
        except (AssertionError, RuntimeError) as error:  # no such device, or not in this torch
            why = str(error).splitlines()[0]
            raise _fixed(
                before,
                f"torch has no such device or type here ({why}). Leave the call out; the `device` of "
                "smoe.from_pretrained is where a model computes",
            ) from error
        if after.dtype is not before.dtype or after.device != before.device:
            wanted = "dtype" if after.device == before.device else "device"
            raise _fixed(
                before,
                f"it cannot become {_name(after.dtype)} on {after.device} while it is loaded. Leave the call out, or "
                f"load the model with smoe.from_pretrained(..., {wanted}=...)",
            )
        return module

    return apply


def _fixed(now: torch.Tensor, why: str) -> EngineStateError:
    return EngineStateError(
        f"this model computes in {_name(now.dtype)} on {now.device}, for which its experts and its memory budget were "
        "prepared; " + why
    )


def not_copied(*_: Any) -> NoReturn:
    """Raise the error for `copy` and `pickle` of a model or an engine."""
    raise EngineStateError(_WHY_NOT_COPIED)


def _not_saved(model: PreTrainedModel, name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> None:
        raise EngineStateError(
            f"{name} would write this model without its experts, which are read from {model.name_or_path} when they "
            "are needed; the weights have not changed, so copy or upload that checkpoint instead"
        )

    return refuse


def _refusing(name: str, effect: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise EngineStateError(f"{name} {effect}")

    return refuse


def _not_resized(model: PreTrainedModel) -> Callable[..., nn.Module]:
    def resize_token_embeddings(
        new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *_: Any, **__: Any
    ) -> nn.Module:
        size = model.config.get_text_config().vocab_size
        if new_num_tokens not in (None, size) or (pad_to_multiple_of and size % pad_to_multiple_of):
            raise EngineStateError(
                f"resize_token_embeddings would change the vocabulary of {size} tokens, for which this model's memory "
                "and kernels were prepared: resize the unmodified transformers model, save it, and load the result "
                "with smoe.from_pretrained"
            )
        unchanged: nn.Module = model.get_input_embeddings()
        return unchanged

    return resize_token_embeddings


def _warned_state(model: PreTrainedModel) -> Callable[..., Any]:
    """Return a replacement for `state_dict` that warns at the first call. Adapters and evaluation harnesses read the
    state of loaded models, so the call is allowed."""
    original = model.state_dict
    warn = functools.cache(warnings.warn)

    @functools.wraps(original)
    def state_dict(*args: Any, **kwargs: Any) -> Any:
        warn(
            f"state_dict() of this model lacks its routed experts, which are read from {model.name_or_path} when they "
            "are needed. Do not save it as the model: copy that checkpoint instead",
            stacklevel=2,
        )
        return original(*args, **kwargs)

    return state_dict


def _evaluated(model: PreTrainedModel) -> Callable[..., PreTrainedModel]:
    original = model.train

    def train(mode: bool = True) -> PreTrainedModel:
        if mode:
            raise EngineStateError(f".train() would turn dropout on; use .eval(): {_FOR_INFERENCE}")
        done: PreTrainedModel = original(mode)
        return done

    return train


def _without_gradients(model: PreTrainedModel) -> Callable[..., PreTrainedModel]:
    original = model.requires_grad_

    def requires_grad(requires_grad: bool = True) -> PreTrainedModel:
        if requires_grad:
            raise EngineStateError(_FOR_INFERENCE)
        done: PreTrainedModel = original(requires_grad)
        return done

    return requires_grad


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
