"""Muon for the hidden matrices, AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by its nearest semi-orthogonal matrix, found with a few
Newton-Schulz steps. Each expert is orthogonalised on its own: stacked tensors [E, rows, columns] are batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration; they push singular values to between about 0.7 and 1.2."""


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of [..., rows, columns], approximately."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates this parameter: attention and expert matrices, not embeddings, routers, norms or biases."""
    router = name.endswith("mlp.gate.weight") or "shared_expert_gate" in name
    return parameter.ndim >= 2 and "embed_tokens" not in name and not router


def split_gate_up(name: str, update: Tensor) -> list[Tensor]:
    """The independent matrices of a parameter: gate and up are stacked in one tensor but orthogonalised apart."""
    return list(update.chunk(2, dim=-2)) if name.endswith("mlp.gate_up_proj") else [update]


def gradient_of(name: str, parameter: Tensor) -> Tensor:
    """The gradient of a parameter, which every backward pass of the model fills."""
    assert parameter.grad is not None, f"{name} took no part in the loss"
    return parameter.grad


class MuonAdamW:
    """Both optimizers over the named parameters of a model; `scale` multiplies every learning rate."""

    def __init__(
        self,
        model: nn.Module,
        muon_lr: float = 0.012,
        adam_lr: float = 3e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.02,
        eps: float = 1e-10,
    ) -> None:
        named = list(model.named_parameters())
        self.muon = {name: p for name, p in named if is_hidden_matrix(name, p)}
        self.adam = {name: p for name, p in named if name not in self.muon}
        self.muon_lr, self.adam_lr, self.momentum, self.betas = muon_lr, adam_lr, momentum, betas
        self.weight_decay, self.eps = weight_decay, eps
        self.count = 0
        self.buffers = {name: [torch.zeros_like(p)] for name, p in self.muon.items()}
        self.buffers |= {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in self.adam.items()}

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update every parameter from its gradient and clear the gradients."""
        self.count += 1
        for name, parameter in self.muon.items():
            self._muon_step(name, parameter, self.muon_lr * scale)
        for name, parameter in self.adam.items():
            self._adam_step(name, parameter, self.adam_lr * scale)

    def _muon_step(self, name: str, parameter: Tensor, lr: float) -> None:
        gradient, buffer = gradient_of(name, parameter), self.buffers[name][0]
        buffer.lerp_(gradient, 1 - self.momentum)
        nesterov = gradient.lerp(buffer, self.momentum)
        parameter.mul_(1 - lr * self.weight_decay)
        pieces = split_gate_up(name, parameter)
        for piece, update in zip(pieces, split_gate_up(name, nesterov), strict=True):
            rows, columns = piece.shape[-2:]
            piece.add_(orthogonalise(update), alpha=-lr * max(1.0, rows / columns) ** 0.5)
        parameter.grad = None

    def _adam_step(self, name: str, parameter: Tensor, lr: float) -> None:
        gradient, (first, second) = gradient_of(name, parameter), self.buffers[name]
        first.lerp_(gradient, 1 - self.betas[0])
        second.lerp_(gradient.square(), 1 - self.betas[1])
        mean = first / (1 - self.betas[0] ** self.count)
        root = (second / (1 - self.betas[1] ** self.count)).sqrt_().add_(self.eps)
        parameter.addcdiv_(mean, root, value=-lr)
        parameter.grad = None

    def state_dict(self) -> dict[str, object]:
        """Everything needed to continue exactly."""
        return {"count": self.count, "buffers": self.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; the parameter names must agree."""
        if state["buffers"].keys() != self.buffers.keys():
            raise ValueError("the checkpoint belongs to another model: its parameter names differ")
        self.count = state["count"]
        for name, tensors in state["buffers"].items():
            for mine, saved in zip(self.buffers[name], tensors, strict=True):
                mine.copy_(saved)
