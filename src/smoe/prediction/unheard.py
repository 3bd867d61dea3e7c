"""Asking a model's modules without anybody hearing of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def unheard(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, no hook of these modules fires: a prediction is no pass of the model.

    Users count calls by hooks, the library records router logits by them, and our own tell a pass's course.
    """
    hooks_of = [(module, module._forward_hooks, module._forward_pre_hooks) for module in modules if has_hooks(module)]
    try:
        for module, _, _ in hooks_of:
            module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        yield
    finally:
        for module, hooks, pre_hooks in hooks_of:
            module._forward_hooks, module._forward_pre_hooks = hooks, pre_hooks


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook would fire."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
