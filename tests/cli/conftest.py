"""Commands are run in this process, as the `smoe` command would run them; `Ran` is what a shell would see."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from smoe import cli, from_pretrained
from smoe.trace.recorder import recording
from tests import oracle
from tests.fixtures import cache_with
from tests.toy import save_toy

SIZE = ("--memory", "2700KiB", "--context", 128)
"""Room for some of the checkpoint's experts."""


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout; fails where there is anything else."""
        assert self.out.count("\n") == 1 and self.out.endswith("\n"), self.out
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Run = Callable[..., Ran]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def traces(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of the checkpoint, of a prompt and 24 and 40 new tokens. Nobody may change them."""
    model = from_pretrained(checkpoint, memory="4MiB", context_tokens=128)
    folder = tmp_path_factory.mktemp("traces")
    paths = [folder / f"{name}.trace" for name in ("first", "second")]
    with model.offload:
        for path, tokens in zip(paths, (24, 40), strict=True):
            with recording(model, path):
                model.generate(oracle.PROMPT % 90, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return paths


@pytest.fixture(autouse=True)
def one_thread_and_no_profile(tmp_path: Path, object_code: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", cache_with(object_code, tmp_path / "cache"))
    monkeypatch.delenv("SMOE_DEBUG", raising=False)
    monkeypatch.setattr("smoe.machine.measure.measure_memory", lambda seconds, memory=None: 20e9)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    os.environ.pop("SMOE_DEBUG", None)  # --debug sets it for the process


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["smoe", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return Ran(int(code), *capsys.readouterr())

    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Measurements that take no time; a text for those that ask for one."""
    for name, tokens in (("PROMPT_TOKENS", 8), ("WARM_TOKENS", 4), ("TIMED_TOKENS", 6)):
        monkeypatch.setattr(f"bench.mechanisms.ablation.{name}", tokens)
    monkeypatch.setattr("smoe.eval.tune._WARM_TOKENS", 4)
    monkeypatch.setattr("smoe.eval.tune._TIMED_TOKENS", 6)
    monkeypatch.setattr("smoe.cli.tune._LEAST_PRICED_TOKENS", 40)
    monkeypatch.setattr("smoe.machine.measure.measure_disk", lambda *args, **named: (0.3e9, False))
    monkeypatch.setattr("smoe.machine.measure.measure_experts", lambda *args, **named: 4e9)
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "once upon a time there was a cat " * 8}) + "\n")
    return text
