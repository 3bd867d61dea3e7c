"""docs/families.md against what really happens to the families of the installed transformers.

Would catch: a family that a newer transformers brings and nobody has looked at, one that is said to be served and is
not, or no longer bit by bit, and a refusal that says something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from smoe import from_pretrained
from smoe.errors import ModelError, UnsupportedModelError
from smoe.models.registration import LOCAL_FAMILIES
from tests import families, oracle, zoo

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
PROMPT = oracle.PROMPT.clamp(max=110)
"""Without the numbers that stand for images."""
NEW_TOKENS = 6
TWINS = {"aria_text", "gemma4_text", "llama4_text", "minimax_m3_vl_text", "qwen3_5_moe_text", "qwen4_exp_text"}
"""The text part of a family that is tried as a whole."""
BY_FILES = {"inkling2_text"}
"""Refused for how its files are."""


class Row(NamedTuple):
    served: str
    has_scores: bool
    reason: str
    """Words of the refusal."""


def _rows() -> dict[str, Row]:
    found = {}
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[0].startswith("`") and cells[2] != "served":
            words = re.search(r"\*([^*]+)\*", cells[6])
            for model_type in re.findall(r"`([^`]+)`", cells[0]):
                assert model_type not in found, f"{model_type} has two rows"
                found[model_type] = Row(cells[2], cells[5] == "yes", words[1] if words else "")
    return found


ROWS = _rows()
INSTALLED = frozenset(families.model_types())
IS_OLDER = Version(transformers.__version__) < Version("5.23")
OTHERWISE = {"aria", "deepseek_v4", "jamba", "qwen4_exp", "qwen4_exp_text"} if IS_OLDER else set()
"""What the page says of these is not so in transformers 5.17."""
TRIED = INSTALLED - {*zoo.FAMILIES} - TWINS - OTHERWISE
SERVED = [model_type for model_type, row in ROWS.items() if row.served.startswith("E0") and model_type in TRIED]
REFUSED = [model_type for model_type, row in ROWS.items() if row.served == "no" and model_type in TRIED]


def test_every_family_has_its_row() -> None:
    """A transformers with a new family ends here: try it, and say in docs/families.md what has come out."""
    assert {row.served for row in ROWS.values()} == {"E0", "E0 in 16 bits", "no", "not tried"}
    assert not INSTALLED - ROWS.keys()
    assert {*zoo.FAMILIES, *LOCAL_FAMILIES} <= ROWS.keys()
    assert all(ROWS[family].served == "E0" for family in zoo.FAMILIES)


@pytest.mark.parametrize("model_type", SERVED)
def test_served_families_write_what_the_library_writes(
    model_type: str, tmp_path: Path, open_model: Callable[..., PreTrainedModel]
) -> None:
    folder = families.save(model_type, tmp_path)
    expected = oracle.greedy(families.reference(folder), PROMPT, NEW_TOKENS)
    switches = {"eviction": "score"} if ROWS[model_type].has_scores else {}
    model = open_model(folder, "minimum", **switches)
    oracle.assert_same_steps(oracle.greedy(model, PROMPT, NEW_TOKENS), expected)
    assert len(model.offload.anatomy.routers) == len(model.offload.anatomy.top_k), (
        "a router that the probe does not see"
    )
    model.offload.close()
    if not ROWS[model_type].has_scores:
        with pytest.raises(UnsupportedModelError, match="without `alpha`"):
            open_model(folder, "minimum", alpha=0.2)


@pytest.mark.parametrize("model_type", REFUSED)
def test_others_are_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    if model_type in BY_FILES:
        families.save(model_type, tmp_path)
    else:
        CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=ROWS[model_type].reason):
        from_pretrained(tmp_path, context_tokens=64)


@pytest.mark.parametrize(("family", "budget"), [("llama4", "fifth"), ("dbrx", "half"), ("jamba", "full")])
def test_more_budgets_and_guesses(
    family: str, budget: str, tmp_path: Path, open_model: Callable[..., PreTrainedModel]
) -> None:
    folder = families.save(family, tmp_path)
    model = open_model(folder, budget, prefetch="look-ahead")
    oracle.assert_same_steps(oracle.greedy(model, PROMPT), oracle.greedy(families.reference(folder), PROMPT))


def test_llama4_with_two_experts_a_token(tmp_path: Path) -> None:
    config = families.config_of("llama4_text")
    config.num_experts_per_tok = 2
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="one expert per token"):
        from_pretrained(tmp_path)


def test_in_32_bits_llama4_differs_in_the_last_bit_of_prompts_alone(
    tmp_path: Path, open_model: Callable[..., PreTrainedModel]
) -> None:
    families.save("llama4_text", tmp_path, torch.float32)
    theirs = oracle.greedy(families.reference(tmp_path, torch.float32))
    ours = oracle.greedy(open_model(tmp_path, "half"))
    assert oracle.relative_error(ours.prefill, theirs.prefill) < 1e-5
    assert torch.equal(ours.tokens, theirs.tokens)
