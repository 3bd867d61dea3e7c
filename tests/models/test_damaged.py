"""Checkpoints that lie, and files that change under a model: an error that names file and key, or right output."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from smoe.errors import CheckpointError, ModelError
from smoe.generation.chat import Chat
from smoe.generation.generate import generate
from smoe.generation.sampling_settings import Sampling
from smoe.load.tokenizer import load_tokenizer
from tests import oracle, zoo
from tests.models.test_checkpoints import copy_of, pack_folder
from tests.toy import save_toy

Open = Callable[..., PreTrainedModel]
Toy = Callable[..., Path]
SINGLE = "model.safetensors"


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe"])
def test_a_transposed_expert_is_not_believed(family: str, toy: Toy, open_model: Open, tmp_path: Path) -> None:
    """As many elements, other rows: the library would call it a mismatch, and so must we."""
    folder = copy_of(toy(family, dtype=torch.bfloat16), tmp_path)
    fused = "model.layers.1.block_sparse_moe.output_linear.weight"
    key = fused if family in zoo.FUSED else zoo.expert_keys(family, 1, 5)[2]

    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key] = tensors[key].transpose(-1, -2).contiguous()

    edit_tensors(folder, transpose)
    with pytest.raises(CheckpointError) as error:
        open_model(folder, "half")
    assert key in str(error.value) and SINGLE in str(error.value)


@pytest.mark.parametrize("stored", [torch.int16, torch.float64])
def test_an_expert_of_a_dtype_that_is_not_read(stored: torch.dtype, toy: Toy, open_model: Open, tmp_path: Path) -> None:
    folder = copy_of(toy("mixtral", dtype=torch.bfloat16), tmp_path)
    key = zoo.expert_keys("mixtral", 2, 7)[0]
    edit_tensors(folder, lambda tensors: tensors.update({key: tensors[key].to(stored)}))
    with pytest.raises(CheckpointError, match="smoe reads experts in BF16, F16, F32") as error:
        open_model(folder, "half")
    assert key in str(error.value) and SINGLE in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("is_packed_elsewhere", [False, True], ids=["in place", "converted"])
def test_an_expert_that_is_no_number_is_named(
    value: float, dtype: torch.dtype, is_packed_elsewhere: bool, toy: Toy, open_model: Open, tmp_path: Path
) -> None:
    """One element of one expert: found when the expert is first read, whichever way it is read."""
    folder = copy_of(toy("qwen3_moe", dtype=dtype), tmp_path)
    key = zoo.expert_keys("qwen3_moe", 2, 5)[1]
    edit_tensors(folder, lambda tensors: tensors[key].view(-1)[-1:].fill_(value))
    other = "float32" if dtype is not torch.float32 else "bfloat16"
    model = open_model(folder, "minimum", dtype=other if is_packed_elsewhere else "auto")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="NaN or infinity") as error:
            oracle.greedy(model)
        assert key in str(error.value) and SINGLE in str(error.value)


def test_an_expert_that_nobody_asks_for_may_be_anything(toy: Toy, open_model: Open, tmp_path: Path) -> None:
    """Its NaN reaches no output; which experts a text uses is known from a run on the sound files."""
    folder = toy("mixtral")
    prompt = oracle.PROMPT[:, :2]
    model = open_model(folder, "minimum", prefetch="none")
    used: set[tuple[int, int]] = set()
    fill = model.offload._transfers._mover._filler.fill
    model.offload._transfers._mover._filler.fill = lambda *load: (used.add(load[0][:2]), fill(*load))[1]
    expected = model(prompt).logits
    layer, expert = next((n, e) for n in range(4) for e in range(2, zoo.EXPERTS) if (n, e) not in used)
    copy = copy_of(folder, tmp_path)
    key = zoo.expert_keys("mixtral", layer, expert)[0]
    edit_tensors(copy, lambda tensors: tensors[key].fill_(float("nan")))
    assert torch.equal(open_model(copy, "minimum", prefetch="none")(prompt).logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_tensors_at_odd_offsets(shift: int, dtype: torch.dtype, toy: Toy, open_model: Open, tmp_path: Path) -> None:
    """The format does not align tensors. What transformers makes of such a file, we make of it."""
    folder = copy_of(toy("qwen3_moe", dtype=dtype), tmp_path)
    data = (folder / SINGLE).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    (folder / SINGLE).write_bytes(
        struct.pack("<Q", length + shift) + data[8 : 8 + length] + b" " * shift + data[8 + length :]
    )
    oracle.assert_same_steps(oracle.greedy(open_model(folder, "fifth")), oracle.reference_steps(folder))


SIZES = {
    "num_hidden_layers": [10**9, 10**18, -1, 3.5, "four", None, [4], 2000],
    "num_local_experts": [10**9, -8, 0, 9, 7],
    "num_experts_per_tok": [0, -2, 9, 10**9],
    "vocab_size": [10**12, 10**30, 0, -1],
    "hidden_size": [10**12, 63, 0],
    "num_attention_heads": [0, 3, 10**9],
    "head_dim": [10**12, 0, 7],
    "model_type": [None, 7, "", ["qwen3_moe"]],
    "layer_types": [["full_attention"], ["x"] * 4, 7],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in SIZES.items() for value in values])
def test_absurd_sizes_are_refused_at_once(key: str, value: Any, toy: Toy, open_model: Open, tmp_path: Path) -> None:
    """By comparison with bounds or with the files, before anything of that size is made."""
    folder = copy_of(toy("qwen3_moe", num_hidden_layers=4), tmp_path)
    edit_json(folder / "config.json", **{key: value})
    with pytest.raises(ModelError) as error:
        open_model(folder, 10**9)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("family", ["qwen2_moe", "granitemoe"])
def test_sizes_that_are_not_those_of_the_files_come_before_the_budget(
    family: str, toy: Toy, open_model: Open, tmp_path: Path
) -> None:
    """Would catch a damaged configuration that is taken for a model too large: the user would buy memory."""
    folder = copy_of(toy(family), tmp_path)
    key = {"qwen2_moe": "moe_intermediate_size", "granitemoe": "intermediate_size"}[family]
    edit_json(folder / "config.json", **{key: 10_000})
    with pytest.raises(ModelError, match=r"config\.json") as error:
        open_model(folder, 3 * 2**20)
    assert str(tmp_path) in str(error.value)


def test_a_width_that_no_layer_has_asks_for_no_memory(toy: Toy, open_model: Open, tmp_path: Path) -> None:
    """qwen3_moe names the width of dense layers; where all are sparse, nothing has it."""
    folder = copy_of(toy("qwen3_moe"), tmp_path)
    edit_json(folder / "config.json", intermediate_size=96_000_000)
    budget = 10 * 2**20
    assert open_model(folder, budget).offload.ledger.total_bytes <= budget


JSON_TEXTS = [
    b"",
    b"{",
    b"[1]",
    b"null",
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b"\xff\xfe{\0}\0",
    b'{"n": ' + b"9" * 6000 + b"}",
]


def test_a_dtype_that_is_no_name_is_refused(toy: Toy, open_model: Open, tmp_path: Path) -> None:
    """Would catch a model that is served in bf16 because nobody understood its dtype."""
    folder = copy_of(toy("mixtral"), tmp_path)
    edit_json(folder / "config.json", dtype=3)
    with pytest.raises(ModelError, match="dtype"):
        open_model(folder, 10**8)


@pytest.mark.parametrize("text", JSON_TEXTS, ids=lambda text: repr(text[:8]))
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_file_that_is_no_json_object(name: str, text: bytes, toy: Toy, open_model: Open, tmp_path: Path) -> None:
    folder = copy_of(toy("mixtral"), tmp_path)
    (folder / name).write_bytes(text)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_model(folder, 40)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", "2"),
        ("temperature", "hot"),
        ("top_p", 2),
        ("num_beams", 10**9),
        ("do_sample", 3),
        ("output_hidden_states", "false"),
    ],
)
def test_a_generation_that_cannot_be(key: str, value: Any, toy: Toy, open_model: Open, tmp_path: Path) -> None:
    folder = copy_of(toy("mixtral"), tmp_path)
    edit_json(folder / "generation_config.json", **{key: value})
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: the field '{key}'"):
        open_model(folder, "half")


@pytest.mark.parametrize("damage", [b"", b"{", b'{"version": "1.0", "model": 3}', b"[" * 200_000])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_none(name: str, damage: bytes, tmp_path: Path) -> None:
    folder = save_toy(tmp_path)
    if (name, damage[:2]) == ("tokenizer_config.json", b'{"'):
        damage = b'{"model_max_length": [1]}'
    (folder / name).write_bytes(damage)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_tokenizer(str(folder), None)


def test_a_tokenizer_of_another_model(open_model: Open, tmp_path: Path) -> None:
    """Its tokens are beyond the vocabulary: an index error deep inside the library otherwise."""
    folder = save_toy(tmp_path, vocab_size=60, eos_token_id=2)
    with pytest.raises(CheckpointError, match="'vocab_size' of 60"):
        generate(open_model(folder, "half"), load_tokenizer(str(folder), None), ["zzz"], Sampling(max_new_tokens=2))


@pytest.mark.parametrize("template", ["{% for", "{{ 1 / 0 }}", "{% include 'x' %}", "{{ messages | nothing }}"])
def test_a_chat_template_that_fails(template: str, open_model: Open, tmp_path: Path) -> None:
    folder = save_toy(tmp_path, template="{{ messages }}")
    (folder / "chat_template.jinja").write_text(template)
    chat = Chat(open_model(folder, "half"), load_tokenizer(str(folder), None), Sampling(max_new_tokens=2))
    with pytest.raises(CheckpointError, match="chat template") as error:
        chat.say("Hi")
    assert str(folder) in str(error.value)


# files that change under a loaded model


def overwrite(path: Path) -> None:
    """Other weights in the same file, as a download or an editor that writes in place does."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    with path.open("r+b") as file:
        file.write(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("change", [overwrite, truncate])
@pytest.mark.parametrize("is_packed", [False, True], ids=["checkpoint", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_file_that_changes_under_a_model_is_noticed(
    dtype: torch.dtype, is_packed: bool, change: Callable[[Path], None], toy: Toy, open_model: Open, tmp_path: Path
) -> None:
    """Would catch other text without a word, and a process that dies of a page that is gone (SIGBUS)."""
    folder = copy_of(toy("qwen3_moe", dtype=dtype), tmp_path)
    path = pack_folder(folder) if is_packed else folder / SINGLE
    model = open_model(folder, "minimum")
    assert not mapped_files(folder)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(toy("qwen3_moe", dtype=dtype)))
    change(path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="written or replaced") as error:
            oracle.greedy(model)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_file_that_is_replaced_or_deleted_is_still_open(how: str, toy: Toy, open_model: Open, tmp_path: Path) -> None:
    """What a safe download does: the weights that were indexed are there until the model is closed."""
    folder = copy_of(toy("mixtral"), tmp_path)
    model = open_model(folder, "minimum")
    (folder / SINGLE).unlink()
    if how == "replaced":
        (folder / SINGLE).write_bytes(bytes(1000))
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(toy("mixtral")))


def test_a_shard_that_is_replaced_before_it_is_opened_is_noticed(toy: Toy, open_model: Open, tmp_path: Path) -> None:
    folder = copy_of(toy("mixtral", max_shard_size="20KB"), tmp_path)
    model = open_model(folder, "minimum")
    unopened = sorted(set(model.offload.store.paths()) - set(model.offload._transfers._mover._reader._files))
    assert unopened
    for path in unopened:
        shutil.copy(path, tmp_path / "other")
        (tmp_path / "other").replace(path)
    with pytest.raises(CheckpointError, match="written or replaced"):
        oracle.greedy(model)


def mapped_files(folder: Path) -> set[str]:
    """Files of a checkpoint that this process has mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return set()
    return {line.split()[-1] for line in maps.read_text().splitlines() if str(folder) in line}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss", "qwen3_next"])
def test_nothing_stays_mapped(family: str, dtype: torch.dtype, toy: Toy, open_model: Open, tmp_path: Path) -> None:
    """Buffers and tied weights included; and the bits are still the library's, whose weights are mapped."""
    folder = copy_of(toy(family, dtype=dtype), tmp_path)
    model = open_model(folder, "fifth")
    assert not mapped_files(folder)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="cases run in forked processes")
@pytest.mark.slow
def test_sixty_mutations() -> None:
    """The beginning of the long run: `python -m tests.models.fuzz`."""
    command = [sys.executable, "-m", "tests.models.fuzz", "--count", "60", "--seed", "1", "--workers", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert json.loads(ran.stdout.splitlines()[-1])["cases"] == 60
