"""Calls modules of a model without their hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Disable all forward hooks of these modules during the `with` block, because a prediction is not a pass of the
    model.

    Users count calls with hooks, transformers records router logits with them, and the engine observes passes with
    them.
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
    """Return whether the module has forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
