"""What cannot be served is refused early, by the right kind of error, saying what to do."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from smoe import errors, from_pretrained
from smoe.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    ModelError,
    NotMoEError,
    SmoeError,
    UnsupportedModelError,
)
from smoe.models import files, hub
from tests import oracle, zoo

Open = Callable[..., PreTrainedModel]


@pytest.fixture
def mixtral(toy: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint that the test may damage."""
    return Path(shutil.copytree(toy("mixtral"), tmp_path / "mixtral"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_the_tree_is_the_one_drawn() -> None:
    """Every error is in the docstring, under its parent, and nothing else is."""
    drawn = errors.__doc__ or ""
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
    assert all(issubclass(cls, SmoeError) and cls.__name__ in drawn and cls.__doc__ for cls in classes)
    assert all(issubclass(cls, ModelError) for cls in (NotMoEError, UnsupportedModelError, CheckpointError))


@pytest.mark.parametrize(
    ("given", "choices", "meant"),
    [
        ("balancd", ["balanced", "exact"], " (did you mean balanced?)"),
        ("HOBBIT", ["hobbit", "exact"], " (did you mean hobbit?)"),
        ("fast", ["balanced", "exact"], ""),
        ("int5", ["int4", "int8"], ""),
        (5, ["on", "off"], ""),
    ],
)
def test_a_misspelt_choice_gets_a_suggestion(given: object, choices: list[str], meant: str) -> None:
    """Would catch a number of bits that is suggested in place of another."""
    error = ConfigError.no_choice("preset", given, choices)
    assert str(error) == f"`preset` is {given!r}{meant}; choose one of: {', '.join(choices)}"


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder", "~/no-such-folder", "a/b/c"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        from_pretrained(name)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "no_such_model"}', "{}"])
def test_a_config_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="config"):
        from_pretrained(tmp_path)


def test_a_dense_model_has_nothing_to_offload(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(NotMoEError, match="dense"):
        from_pretrained(tmp_path)


UNDECORATED: dict[str, dict[str, Any]] = {
    "jetmoe": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "kv_channels": 16,
        "vocab_size": 64,
        "num_local_experts": 4,
    },
    "longcat_flash": {"num_layers": 2, "hidden_size": 64, "vocab_size": 64, "n_routed_experts": 4},
}


@pytest.mark.parametrize("family", UNDECORATED)
def test_experts_that_the_library_does_not_expose(family: str, tmp_path: Path) -> None:
    """Refused before weights are read: a config alone is enough."""
    config = AutoConfig.for_model(family, **UNDECORATED[family])
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config)  # it is a model that the library could build
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="exactness"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("method", ["mxfp4", "eetq", "gptq", "bitsandbytes"])
def test_quantised_checkpoints(method: str, mixtral: Path) -> None:
    edit_config(mixtral, quantization_config={"quant_method": method})
    with pytest.raises(UnsupportedModelError, match=f"{method}.*(unquantised|take one of these releases)"):
        from_pretrained(mixtral, context_tokens=64)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_nan_outside_the_experts(key: str, value: float, mixtral: Path, open_model: Open) -> None:
    edit_tensors(mixtral, lambda tensors: tensors[key].view(-1).__setitem__(5, value))
    with pytest.raises(CheckpointError, match=key):
        open_model(mixtral)


def test_a_missing_weight(mixtral: Path, open_model: Open) -> None:
    edit_tensors(mixtral, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        open_model(mixtral)


def test_a_missing_expert(mixtral: Path, open_model: Open) -> None:
    edit_tensors(mixtral, lambda tensors: tensors.pop(zoo.expert_keys("mixtral", 2, 7)[2]))
    with pytest.raises(CheckpointError, match="expert 7 of layer 2"):
        open_model(mixtral)


@pytest.mark.parametrize("part", [0, 1])
def test_half_an_expert(part: int, mixtral: Path, open_model: Open) -> None:
    """Only gate, or only up: the fused part has half its elements."""
    edit_tensors(mixtral, lambda tensors: tensors.pop(zoo.expert_keys("mixtral", 1, 3)[part]))
    with pytest.raises(CheckpointError, match="layer 1, expert 3"):
        open_model(mixtral)


@pytest.mark.parametrize(
    "changes", [{"intermediate_size": 48}, {"num_local_experts": 9}, {"hidden_size": 128}, {"num_hidden_layers": 5}]
)
def test_a_config_for_another_checkpoint(changes: dict[str, int], mixtral: Path, open_model: Open) -> None:
    edit_config(mixtral, **changes)
    with pytest.raises(CheckpointError):
        open_model(mixtral)


def test_more_experts_in_the_file_than_in_the_config(mixtral: Path, open_model: Open) -> None:
    """Would catch experts that are quietly left out."""
    edit_config(mixtral, num_local_experts=4)
    with pytest.raises(CheckpointError):
        open_model(mixtral)


@pytest.mark.parametrize("memory", ["lots", "8 bananas", "-1GiB", "", 0, -5])
def test_memory_that_is_no_size(memory: str | int, mixtral: Path) -> None:
    with pytest.raises(ConfigError):
        from_pretrained(mixtral, memory=memory, context_tokens=64)


def test_too_little_memory_is_refused_before_loading(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loading(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read before the budget was checked")

    monkeypatch.setattr("smoe.models.safetensors_folder.SafetensorsFolder.load_dense", no_loading)
    with pytest.raises(BudgetError, match="non-expert weights"):
        from_pretrained(mixtral, memory="64KiB", context_tokens=64)


def test_a_context_beyond_the_model(mixtral: Path) -> None:
    with pytest.raises(ConfigError, match="256"):
        from_pretrained(mixtral, context_tokens=257)


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:99", "nonsense", "meta"])
def test_devices_that_are_not_here(device: str, mixtral: Path) -> None:
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError):
        from_pretrained(mixtral, device=device, context_tokens=64)


def test_a_repository_s_code_is_never_run(mixtral: Path, tmp_path: Path) -> None:
    """Neither for a known family with an auto_map, by its type or by its class alone, nor for an unknown one."""
    witness = tmp_path / "was run"
    (mixtral / "evil.py").write_text(f"open({str(witness)!r}, 'w').close()\nclass C: pass\nclass M: pass\n")
    auto_map = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    edit_config(mixtral, auto_map=auto_map)
    model = from_pretrained(mixtral, context_tokens=64, memory="64MiB")
    model(oracle.PROMPT)
    model.offload.close()
    edit_config(mixtral, auto_map=auto_map, model_type="unheard_of")
    from_pretrained(mixtral, context_tokens=64, memory="64MiB").offload.close()
    edit_config(mixtral, auto_map=auto_map, model_type="unheard_of", architectures=["UnheardOf"])
    with pytest.raises(ModelError):
        from_pretrained(mixtral, context_tokens=64)
    assert not witness.exists()


def test_a_hub_model_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what was asked for and what to check."""
    with pytest.raises(ModelError) as error:
        from_pretrained("nobody/no-such-moe")
    assert "nobody/no-such-moe" in str(error.value)
    assert "network" in str(error.value) or "internet" in str(error.value)


def test_a_download_that_does_not_fit_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    class Api:
        def model_info(self, *_: Any, **__: Any) -> Any:
            siblings = [type("F", (), {"rfilename": "model-1.safetensors", "size": 10**18})()]
            return type("Info", (), {"siblings": siblings})()

    def snapshot(*_: Any, local_files_only: bool = False, **__: Any) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        raise AssertionError("the download was started")

    monkeypatch.setattr(hub, "unreachable", lambda: None)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(errors.DiskSpaceError, match="downloading big/moe"):
        files.fetch("big/moe", None)
