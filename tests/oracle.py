"""The two sides of a comparison: the unmodified transformers model, and ours at a chosen budget."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from smoe import from_pretrained
from smoe.config import EngineConfig
from smoe.kernels.spinning_pool import is_supported
from smoe.load.draft_model import planned_draft
from smoe.load.ledger import demand_of, open_store
from smoe.models.checkpoint import checkpoint_at
from smoe.models.read_spec import read_spec
from smoe.models.registration import register_local_families
from smoe.policy.budget import Demand, full_bytes, minimum_bytes
from smoe.presets import configure
from tests import promised

CONTEXT = 96
PROMPT_TOKENS = 24
NEW_TOKENS = 16
BUDGETS = ("full", "half", "fifth", "minimum")

PROMPT = torch.randint(3, 128, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(11))
"""One prompt, long enough that every layer of a toy uses nearly all of its 8 experts."""


class Steps(NamedTuple):
    """What a greedy run of a model gives."""

    prefill: torch.Tensor
    """Logits of every prompt position: [1, tokens, vocabulary]."""
    logits: tuple[torch.Tensor, ...]
    """Logits of the first new token and of every decode step after it."""
    tokens: torch.Tensor

    def first(self, new_tokens: int) -> Steps:
        """What a run with fewer new tokens gives."""
        return Steps(self.prefill, self.logits[:new_tokens], self.tokens[:, : PROMPT_TOKENS + new_tokens])


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: torch.Tensor = PROMPT, new_tokens: int = NEW_TOKENS, **more: Any) -> Steps:
    """Prefill the prompt, then generate greedily; stopping early is not allowed."""
    prefill = model(prompt, attention_mask=more.get("attention_mask")).logits
    result = model.generate(
        prompt,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **more,
    )
    return Steps(prefill, result.logits, result.sequences)


def reference(folder: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """transformers alone, eager experts: what grade E0 is equal to."""
    register_local_families()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    return model.eval()


@cache
def reference_steps(folder: Path, dtype: torch.dtype | str = "auto") -> Steps:
    """`greedy` of the reference, once for each checkpoint."""
    return greedy(reference(folder, dtype))


def demand(folder: Path, **switches: Any) -> Demand:
    """What a checkpoint asks of the budget, with the slot size that its store really needs."""
    config = configure(**{"context_tokens": CONTEXT, **switches})
    own = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    files = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in own)
    return _demand(folder, config, files)


@cache
def _demand(folder: Path, config: EngineConfig, _files: tuple[tuple[str, int, int], ...]) -> Demand:
    plan = read_spec(folder, config)
    cpu, checkpoint = torch.device("cpu"), checkpoint_at(folder)
    needs = demand_of(plan, config, cpu, open_store(checkpoint, plan, checkpoint.experts(plan), cpu))
    draft = planned_draft(checkpoint, plan, config, cpu)
    return needs if draft is None else replace(needs, draft_bytes=draft.nbytes)


def budget_bytes(folder: Path, budget: str | int, **switches: Any) -> int:
    """Bytes of a named budget, or of one with exactly that many cache slots (toys: two staging slots)."""
    needs = demand(folder, **switches)
    if budget == "full":
        return full_bytes(needs)
    slots = {"half": needs.total_experts // 2, "fifth": needs.total_experts // 5, "minimum": needs.top_k}
    wanted = max(needs.top_k, budget if isinstance(budget, int) else slots[budget])
    return minimum_bytes(needs) + (wanted - needs.top_k) * needs.slot_bytes


def open_model(folder: Path | str, budget: str | int = "half", **switches: Any) -> PreTrainedModel:
    """Our model inside a named budget or a number of cache slots; whoever opens it closes `model.offload`.

    Experts are read when they are wanted, so that tests can say when, unless `preload` says otherwise; and where our
    kernels cannot have torch's bits, torch computes, whatever is faster. A budget has the slots that its name says,
    whatever else is in use.
    """
    kernels = "auto" if is_supported() and not promised.disagreeing else "native"
    usual = {"context_tokens": CONTEXT, "preload": False, "lend_reserve": False, "kernels": kernels}
    switches = usual | switches
    return from_pretrained(folder, memory=budget_bytes(folder, budget, **switches), **switches)


def assert_same_steps(ours: Steps, theirs: Steps) -> None:
    """Bit for bit, every position and every step."""
    assert torch.equal(ours.prefill, theirs.prefill), "prefill logits differ"
    assert len(ours.logits) == len(theirs.logits)
    for step, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        assert torch.equal(a, b), f"logits differ at decode step {step} by {(a - b).abs().max().item():.3g}"
    assert torch.equal(ours.tokens, theirs.tokens)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
