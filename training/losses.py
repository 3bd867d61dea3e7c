"""What training minimises: the cross-entropy of a tied head in small pieces, and the routers' balance.

Letters as in `training.model`: T tokens, K chosen experts, E experts, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from training.model import MoeModel, Routing

LOSS_CHUNK = 256
"""Tokens whose logits are held at a time: 4 MB at a vocabulary of 4096."""


def balance_losses(routing: Routing) -> tuple[Tensor, Tensor]:
    """The Switch load-balancing loss and the router z-loss, each summed over layers.

    Balance is E * sum_e f_e p_e with f_e the share of the T * K choices and p_e the mean probability of expert e: 1 for
    a uniform router. The z-loss is the mean squared log-partition.
    """
    balance = z_loss = torch.zeros(())
    for router_logits, top_k_index in zip(routing.router_logits, routing.top_k_index, strict=True):
        router_logits = router_logits.float()
        experts = router_logits.shape[-1]
        share = torch.bincount(top_k_index.reshape(-1), minlength=experts) / top_k_index.numel()
        balance = balance + experts * (share * router_logits.softmax(-1).mean(0)).sum()
        z_loss = z_loss + router_logits.logsumexp(-1).square().mean()
    return balance, z_loss


class ChunkedCrossEntropy(torch.autograd.Function):
    """Per-token cross-entropy of a tied head without ever holding all [T, V] logits.

    A chunk of logits fits in the cache; its gradient is taken at once, for the weights the tokens have in the loss.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, chunk: int) -> Tensor:
        """hidden [T, H], head [V, H], targets [T], weights [T] (of the sum that is the loss) -> losses [T]"""
        losses = hidden.new_empty(hidden.shape[0])
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        for begin in range(0, hidden.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            logits = hidden[rows] @ head.t()
            logits -= logits.amax(-1, keepdim=True)
            at_target = logits.gather(1, targets[rows, None])[:, 0]
            total = logits.exp_().sum(-1, keepdim=True)
            losses[rows] = total[:, 0].log() - at_target
            logits.mul_(weights[rows, None] / total)
            logits.scatter_add_(1, targets[rows, None], -weights[rows, None])
            grad_hidden[rows] = logits @ head
            grad_head.addmm_(logits.t(), hidden[rows])
        ctx.save_for_backward(grad_hidden, grad_head)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The loss must be the weighted sum announced in `forward`, hence `grad` equals the weights."""
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden, grad_head, None, None, None


def token_loss(model: MoeModel, hidden_states: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy in nats and the unweighted per-token losses [T].

    hidden_states [B, S, H], targets [B, S], weights [B, S]
    """
    share = weights.reshape(-1) / weights.sum()
    hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
    losses = ChunkedCrossEntropy.apply(hidden, model.embed_tokens.weight, targets.reshape(-1), share, LOSS_CHUNK)
    return (losses * share).sum(), losses.detach()
