"""The n-gram table of Qwen3.8-Flash-Next, whose rows are read from disk when they are needed.

Oracle: transformers' model, which holds the table in memory. That the text is the same is tested with all families
(`test_families.py`), here with the table's tensors in several files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.memory.safetensors_index import StoredTensor
from smoe.models.checkpoint import checkpoint_at
from smoe.models.model_sizes import model_sizes
from smoe.models.quantised_linear import StoredEmbedding
from smoe.models.read_spec import read_spec
from smoe.models.stored_tables import check_table
from smoe.presets import configure
from tests import families, oracle
from tests import gguf_converted as converted
from tests.gguf_sparse import QWEN4

PROMPT = oracle.PROMPT.clamp(max=110)
TABLES = {f"model.layers.{layer}.ple.ple_embedding.ngram_embedding" for layer in (0, 2)}
SHARD = "model.layers.2.ple.ple_embedding.ngram_embedding.shard_{}.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve tensors for each table, whose numbers have one or two digits, in several files."""
    path = tmp_path_factory.mktemp("tables")
    families.save("qwen4_exp_text", path / "whole", split_ngram_parts=12)
    library = AutoModelForCausalLM.from_pretrained(path / "whole", dtype=torch.bfloat16)
    library.save_pretrained(path / "shards", max_shard_size="40KB")
    assert len(list((path / "shards").glob("*.safetensors"))) > 5
    return path / "shards"


def test_tables_take_no_memory_and_give_the_same_logits(
    folder: Path, open_model: Callable[..., PreTrainedModel]
) -> None:
    library, ours = families.reference(folder), open_model(folder, "half")
    oracle.assert_same_steps(oracle.greedy(ours, PROMPT), oracle.greedy(library, PROMPT))
    found = {name: module for name, module in ours.named_modules() if isinstance(module, StoredEmbedding)}
    assert found.keys() == TABLES
    for name, table in found.items():
        assert torch.equal(table.whole(), library.get_submodule(name).weight)
    spec = read_spec(folder, configure(context_tokens=64))
    counted = sum(each.numel() for name, each in library.named_parameters() if ".experts." not in name)
    rows = sum(table.num_embeddings * table.embedding_dim for table in found.values())
    # buffers are counted too, which are small
    assert 0 <= spec.weights_bytes - 2 * (counted - rows) < 2000
    assert ours.num_parameters() == library.num_parameters()


def test_a_missing_or_damaged_part_is_refused(
    folder: Path, tmp_path: Path, open_model: Callable[..., PreTrainedModel]
) -> None:
    tensors = {key: each for file in folder.glob("*.safetensors") for key, each in load_file(file).items()}
    for file in folder.glob("*.json"):
        if "index" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "model.safetensors"
    save_file({key: each for key, each in tensors.items() if key != SHARD.format(3)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"shard_0.* rows together, but by config.json it has \d+"):
        checkpoint_at(tmp_path).experts(read_spec(tmp_path, configure(context_tokens=64)))
    damaged = tensors[SHARD.format(11)].clone()
    damaged[:, 0] = np.nan
    save_file({**tensors, SHARD.format(11): damaged}, file, {"format": "pt"})
    model = open_model(tmp_path, "half")
    table = model.get_submodule("model.layers.2.ple.ple_embedding.ngram_embedding")
    table(torch.tensor([0]))
    with pytest.raises(CheckpointError, match=r"shard_11.* is NaN or infinite in BF16"):
        table(torch.tensor([0, table.num_embeddings - 1]))


def test_rows_of_a_quantised_table_are_read_from_a_gguf_file(
    tmp_path: Path, open_model: Callable[..., PreTrainedModel]
) -> None:
    library = converted.make(QWEN4)
    path = converted.write(tmp_path / "toy.gguf", QWEN4, library, Type.Q8_0)
    name = "model.layers.2.ple.ple_embedding.ngram_embedding"
    spec, ours = read_spec(path, configure(context_tokens=64)), open_model(path, "half", dtype="float32")
    table = ours.get_submodule(name)
    assert isinstance(table, StoredEmbedding) and table.form.name == "Q8_0"
    assert torch.equal(table.whole(), library.get_submodule(name).weight)
    assert spec.outline.tables == {f"{name}.weight"} and f"{name}.weight" not in spec.dense


def test_tensors_that_make_no_table(tmp_path: Path) -> None:
    part = StoredTensor(tmp_path / "file", 0, 40, "BF16", (5, 4), "part")
    check_table([part, part], (10, 4))
    for odd, shape in ((replace(part, shape=(4, 5)), (9, 4)), (replace(part, dtype="F16"), (10, 4))):
        with pytest.raises(CheckpointError, match="should be BF16 with 4 columns"):
            check_table([part, odd], shape)
    with pytest.raises(UnsupportedModelError, match="in I64 cannot be read one by one"):
        check_table([replace(part, dtype="I64")], (5, 4))


def test_no_vocabulary_is_a_table(folder: Path) -> None:
    """A plan, which reads no weights, leaves the tables out of memory too."""
    _, spec = model_sizes(folder, configure(context_tokens=64))
    assert spec.outline.tables == {f"{name}.weight" for name in TABLES}
