"""What a model's name leads to: a folder, the hub, or one line that says what was tried and what would work."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError

from smoe import cli, from_pretrained
from smoe.errors import ConfigError, ModelError
from smoe.models import files, hub

HUB_ID = "Qwen/Qwen3-30B-A3B"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a model's folder, files of others, and a folder of models."""
    (tmp_path / "my-moe").mkdir()
    (tmp_path / "my-moe" / "config.json").write_text("{}")
    (tmp_path / "my-moe" / "model.safetensors").touch()
    (tmp_path / "gguf-only").mkdir()
    for name in ("big.gguf", "notes.txt", "gguf-only/big.Q4.gguf"):
        (tmp_path / name).touch()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mixtral-8x7b").mkdir()
    (tmp_path / "broken").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("other.gguf", "no file other.gguf"),
        ("/models/other.gguf", "no file /models/other.gguf"),
        ("owner/other.gguf", "no file .*give OWNER/REPO/FILE.gguf or OWNER/REPO:Q4_K_M"),
        ("models/mixtral-8x7b/other.gguf", "no file models/mixtral-8x7b/other.gguf"),
        ("my-moe/model.safetensors", "give its folder: .*my-moe"),
        ("my-moe/config.json", "give its folder: .*my-moe"),
        ("model.safetensors", "no file model.safetensors"),
        ("notes.txt", "is a file, not a model folder"),
        ("my-mo", "no folder my-mo .did you mean my-moe.\\)"),
        ("models/mixtral-8x7", "did you mean models/mixtral-8x7b"),
        ("./nothing", "no folder ./nothing"),
        ("nothing/at/all", "no folder nothing/at/all"),
        ("models", "no config.json"),
        ("broken", "leads nowhere"),
        ("gpt2", "no folder gpt2"),
        ("", "no model is named; give a model folder"),
        (" ", "no model is named; give a model folder"),
        ("https://huggingface.co/Qwen/Qwen3-30B-A3B", "is an address; the hub id is its last part, owner/name"),
        ("demoo", "no folder demoo .did you mean demo.\\)"),
        ("a\0b", "hub id"),
        ("x" * 5000, "hub id"),
        ("owner/name with spaces", "hub id"),
        ("~nobody-of-this-name/model", "hub id"),
    ],
)
def test_what_is_no_model_is_said_without_the_hub(
    model: str, said: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a GGUF file read as JSON, and a mistyped folder asked of the hub."""

    def ask(*_: Any) -> Any:
        raise AssertionError("the hub was asked")

    for name in ("cached", "has_config", "unreachable", "config_folder"):
        monkeypatch.setattr(hub, name, ask)
    for call in (files.local_place, lambda model: files.fetch(model, None), lambda m: files.refuse_unknown(m, None)):
        with pytest.raises(ModelError, match=said) as error:
            call(model)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", [HUB_ID, "mistralai/Mixtral-8x7B-v0.1", "owner/model.v2"])
def test_a_hub_id_is_one(model: str, here: Path) -> None:
    assert files.local_place(model) is None


@pytest.mark.parametrize("model", ["my-moe", "./my-moe", "big.gguf", "gguf-only", "demo"])
def test_a_model_on_disk_has_no_revision(model: str, here: Path) -> None:
    """Which would else be left out of account without a word."""
    for call in (files.described_place, files.fetch, files.refuse_unknown):
        with pytest.raises(ConfigError, match=f"`revision` is 'v2', but {model} is a model on disk") as error:
            call(model, "v2")
        assert error.value.facts == {"setting": "revision", "given": "v2", "allowed": "only with a hub id"}
        call(model, None)
    with pytest.raises(ConfigError, match="'v2'"):
        from_pretrained(model, revision="v2")


@pytest.mark.parametrize("command", ["plan", "generate", "chat", "pack", "verify", "record"])
@pytest.mark.parametrize("model", ["my-moe", "big.gguf"])
def test_commands_refuse_a_revision_of_a_model_on_disk(
    model: str, command: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"record": ["--out", "x.trace", "-p", "a"], "generate": ["-p", "a"]}.get(command, [])
    monkeypatch.setattr("sys.argv", ["smoe", command, model, "--revision", "v2", *more])
    with pytest.raises(SystemExit) as left:
        cli.main()
    shown = " ".join(capsys.readouterr().err.split())
    assert left.value.code == 2 and shown.count("error:") == 1
    assert f"--revision is 'v2', but {model} is a model on disk" in shown and "Traceback" not in shown


@pytest.mark.parametrize("call", [files.described_place, files.fetch])
def test_a_hub_model_has_the_revision_that_is_asked_for(
    call: Callable[..., Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    for name in ("config_folder", "cached"):
        monkeypatch.setattr(hub, name, lambda model, revision: asked.append((model, revision)) or here)
    assert call(HUB_ID, "v2") == here and asked == [(HUB_ID, "v2")]


def no_route(*_: Any, **__: Any) -> Any:
    raise OSError(101, "Network is unreachable")


def never(*_: Any, **__: Any) -> Any:
    threading.Event().wait(30)
    raise OSError("too late for anybody")


@pytest.mark.parametrize(
    ("connect", "said"),
    [(no_route, "Network is unreachable"), (never, "no answer in 0.05 s"), (None, "HF_HUB_OFFLINE")],
)
@pytest.mark.parametrize("command", ["plan", "generate", "chat", "pack", "verify", "record"])
def test_without_a_network_one_line_says_so(
    command: str,
    connect: Callable[..., Any] | None,
    said: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every command, before anything is asked of the hub's client, which would try again and again."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", connect is None)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "cache"))
    monkeypatch.setattr(hub, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT", raising=False)
    more = {"record": ["--out", "x.trace", "-p", "a"], "generate": ["-p", "a"]}.get(command, [])
    monkeypatch.setattr("sys.argv", ["smoe", command, HUB_ID, *more])
    with pytest.raises(SystemExit) as left:
        cli.main()
    shown = " ".join(capsys.readouterr().err.split())
    assert left.value.code == 2 and shown.count("error:") == 1
    assert said in shown and HUB_ID in shown and "cache" in shown and "Retrying" not in shown


def test_a_proxy_is_the_first_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind one, the hub's own address may never answer."""
    for name in ("NO_PROXY", "no_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    assert hub._first_hop("https://huggingface.co") == ("huggingface.co", 443)
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert hub._first_hop("https://huggingface.co") == ("proxy.example", 3128)


@pytest.mark.parametrize("has_config", [False, True])
def test_a_repository_of_gguf_files_is_named(has_config: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of its files is wanted its name does not say; would catch a download of all of them, or of none."""
    import huggingface_hub

    def no_config(*_: Any, **__: Any) -> str:
        raise EntryNotFoundError("no config.json")

    files_there = [SimpleNamespace(rfilename=name, size=1) for name in ("b-Q8_0.gguf", "a-Q4_K_M.gguf", "README.md")]
    monkeypatch.setattr(hub, "unreachable", lambda: None)
    monkeypatch.setattr(hub, "_cached_config", lambda model, revision: None)
    monkeypatch.setattr(hub, "cached", lambda model, revision: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_config)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=files_there))
    with pytest.raises(ModelError, match=rf"contains only GGUF files \(Q4_K_M, Q8_0\).*such as {HUB_ID}:Q4_K_M"):
        (files.fetch if has_config else files.described_place)(HUB_ID, None)


def test_of_weights_in_two_forms_those_that_are_read_are_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """gpt-oss has its weights a second time in a folder: would catch a download of twice the size, and one refused for
    want of room that nothing would take."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    names = ["config.json", "model-00001-of-00001.safetensors", "original/model.safetensors", "original/config.json"]
    siblings = [SimpleNamespace(rfilename=name, size=2**n) for n, name in enumerate(names)]
    asked: list[list[str]] = []

    def snapshot(_: str, *, allow_patterns: Any, ignore_patterns: Any, **more: Any) -> str:
        asked.append(list(filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)))
        return str(tmp_path)

    monkeypatch.setattr(hub, "unreachable", lambda: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    assert hub.size_bytes(HUB_ID, None) == 2
    assert hub.download(HUB_ID, None) == hub.cached(HUB_ID, None) == tmp_path
    assert asked == [["config.json", "model-00001-of-00001.safetensors", "original/config.json"]] * 2


def test_a_cached_configuration_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(hub, "_cached_config", lambda model, revision: tmp_path / "config.json")
    monkeypatch.setattr(hub, "unreachable", lambda: "no network")
    assert files.described_place(HUB_ID, None) == tmp_path
    files.refuse_unknown(HUB_ID, None)
