"""A config.json that would choose which code computes, or have it fetched from the hub.

Would catch: a kernel of the hub that is asked for, an attention that is not the one which smoe chooses.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers.integrations.hub_kernels as hub_kernels
import transformers.modeling_utils as modeling

from smoe import from_pretrained
from smoe.errors import UnsupportedModelError
from smoe.models.library_family import check_implementations
from smoe.models.safetensors_folder import SafetensorsFolder
from tests.toy import save_toy

FIELDS = (
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
)
REPOSITORY = "kernels-community/flash-attn2"


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of the hub."""
    asked: list[Any] = []

    def ask(*given: Any, **named: Any) -> Any:
        asked.append(given or named)
        raise AssertionError(f"the hub was asked for {given or named}")

    monkeypatch.setattr(hub_kernels, "get_kernel", ask)
    monkeypatch.setattr(modeling, "lazy_import_flash_attention", ask)
    monkeypatch.setattr(socket.socket, "connect", ask)
    return asked


Edit = Callable[[dict[str, Any]], None]


def edited(folder: Path, edit: Edit) -> Path:
    place = folder / "config.json"
    config = json.loads(place.read_text())
    edit(config)
    place.write_text(json.dumps(config))
    return folder


def implementations(folder: Path) -> tuple[Any, Any]:
    model = from_pretrained(folder, memory="4MiB", context_tokens=64)
    with model.offload:
        text = model.config.get_text_config()
        return text._attn_implementation, text._experts_implementation


@pytest.mark.parametrize("value", ["eager", "flash_attention_2", "flex_attention", "paged|sdpa", "nonsense", None])
@pytest.mark.parametrize("field", FIELDS)
def test_a_choice_is_overwritten(tmp_path: Path, hub: list[Any], field: str, value: str | None) -> None:
    folder = save_toy(tmp_path, "qwen3_moe")
    usual = implementations(folder)
    assert usual == ("sdpa", "eager")
    assert implementations(edited(folder, lambda config: config.update({field: value}))) == usual
    assert hub == []


@pytest.mark.parametrize("value", ["eager", "flex_attention", {"": "eager", "text_config": "flex_attention"}])
@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_choice_in_a_nested_configuration_is_overwritten(tmp_path: Path, field: str, value: Any) -> None:
    nested = {"text_config": {field: value}, "vision_config": {field: "eager"}, field: value}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", **nested}))
    config = SafetensorsFolder(tmp_path).config()
    for each in (config, config.text_config, config.vision_config):
        assert (each._attn_implementation, each._experts_implementation) == (None, "eager")


@pytest.mark.parametrize("field", [*FIELDS, "kernel_config", "kernels", "hub_kernels"])
@pytest.mark.parametrize("place", ["top", "text_config", "dict", "list", "key"])
def test_a_name_of_the_hub_is_refused_by_field(tmp_path: Path, hub: list[Any], field: str, place: str) -> None:
    folder = save_toy(tmp_path, "qwen3_moe")
    values: dict[str, dict[str, Any]] = {
        "top": {field: REPOSITORY},
        "text_config": {"text_config": {field: REPOSITORY + ":flash_attn"}},
        "dict": {field: {"": "eager", "text_config": REPOSITORY}},
        "list": {"layers": [{field: f"paged|{REPOSITORY}@main"}]},
        "key": {field: {REPOSITORY: "eager"}},
    }
    edited(folder, lambda config: config.update(values[place]))
    with pytest.raises(UnsupportedModelError, match=rf"{field}.*kernels-community/flash-attn2.*remove the field"):
        from_pretrained(folder, memory="4MiB", context_tokens=64)
    assert hub == []


@pytest.mark.parametrize("switch", ["use_kernels", "allow_all_kernels", "kernel_config"])
def test_switches_of_the_loader_do_nothing_in_a_file(tmp_path: Path, hub: list[Any], switch: str) -> None:
    folder = save_toy(tmp_path, "qwen3_moe")
    assert implementations(edited(folder, lambda config: config.update({switch: True}))) == ("sdpa", "eager")
    assert hub == []


@pytest.mark.parametrize(
    "config",
    [
        {"conv_kernel": 4, "linear_conv_kernel_dim": 4, "mamba_d_conv": 4},
        {"_name_or_path": "owner/name", "attn_implementation": "sdpa"},
        {"vision_config": {"kernel_size": [1, 2]}, "auto_map": {"AutoConfig": "owner/name--configuration.C"}},
    ],
)
def test_other_fields_with_such_names_or_values_are_none_of_it(config: dict[str, Any]) -> None:
    check_implementations(config, Path("config.json"))
