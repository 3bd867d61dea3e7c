"""The witness as published: the shape that training makes, the demo's tokens, exact with few experts in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from smoe.models.files import DEMO_FOLDER
from tests import oracle
from training.export import config_from_transformers
from training.model import SHAPES

WITNESS_FOLDER = Path(__file__).parents[2] / "training" / "witness"
NEW_TOKENS = 40


@pytest.mark.parametrize(("shape", "folder"), [("demo", DEMO_FOLDER), ("witness", WITNESS_FOLDER)])
def test_the_published_models_have_the_shapes_that_are_trained(shape: str, folder: Path) -> None:
    assert config_from_transformers(AutoConfig.from_pretrained(folder)) == SHAPES[shape]


def test_its_tokens_are_those_of_the_demo() -> None:
    """Else perplexities of the two could not be compared."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (WITNESS_FOLDER / name).read_bytes() == (DEMO_FOLDER / name).read_bytes(), name


@pytest.mark.skipif(not (WITNESS_FOLDER / "model.safetensors").exists(), reason="its weights are not in this tree")
def test_its_text_is_equal_with_few_experts_in_memory(open_model: Callable[..., PreTrainedModel]) -> None:
    prompt = AutoTokenizer.from_pretrained(WITNESS_FOLDER)("Once upon a time", return_tensors="pt").input_ids
    model = open_model(WITNESS_FOLDER, "minimum", kernels="native")  # torch's bits on every CPU
    ours = oracle.greedy(model, prompt, NEW_TOKENS)
    oracle.assert_same_steps(ours, oracle.greedy(oracle.reference(WITNESS_FOLDER), prompt, NEW_TOKENS))
    counters = model.offload.stats()
    assert counters.decode_hits < counters.decode_uses
