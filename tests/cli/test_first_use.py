"""Every preset on first use: it runs, or its refusal ends with what to type, and that makes it run as it is printed.

Would catch: a refusal without a way out, commands that have grown apart from the options, a preset that needs two
things and names one.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

import smoe
from smoe.presets import PRESETS
from tests.cli.conftest import SIZE, Ran, Run


@pytest.fixture(autouse=True)
def quickly(quick: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measurements that take no time, a network that is soon trained, and no clusters but the test's."""
    monkeypatch.setattr("smoe.prediction.expert_mlp.network.__defaults__", ((32, 16),))
    monkeypatch.setattr("smoe.eval.train_expert_mlp.LEAST_EPOCHS", 2)
    monkeypatch.setattr("smoe.eval.train_expert_mlp.MOST_EPOCHS", 3)
    monkeypatch.setattr("smoe.cli.first_use.TRIED_TOKENS", 60)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    """To write packs into."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def printed(ran: Ran) -> list[list[str]]:
    """The commands behind a refusal, word by word, a comment and all."""
    assert ran.code == 2 and "to make it work:" in ran.err, ran.err
    _, _, behind = ran.err.partition("to make it work:\n")
    return [shlex.split(line) for line in behind.splitlines() if line.startswith("  smoe ")]


@pytest.mark.parametrize("preset", [name for name, switches in PRESETS.items() if "placement" not in switches])
def test_a_preset_runs_or_says_what_makes_it_run(preset: str, run: Run, model: Path) -> None:
    asked = ["smoe", "generate", str(model), *map(str, SIZE), "--preset", preset, "-p", "once", "--max-new-tokens", "2"]
    ran, needed = run(*asked[1:]), 0
    while ran.code != 0:
        commands, needed = printed(ran), needed + 1
        assert needed <= 2, "something is named again that has been done"
        assert commands[-1][: len(asked)] == asked
        for words in commands:
            ran = run(*words[1:])
        asked = commands[-1]
    assert ran.out.strip()


@pytest.mark.parametrize(("preset", "precision"), [("cluster", "int4"), ("od-moe", "int8")])
def test_a_preset_of_several_machines_names_its_pack_and_its_workers(
    preset: str, precision: str, run: Run, model: Path
) -> None:
    """The draft is the cluster's from the first run on: the coordinator, which does not know it yet, would want room
    for one."""
    asked = ["smoe", "generate", str(model), *map(str, SIZE), "--preset", preset, "-p", "once"]
    pack, up, again = printed(run(*asked[1:]))
    assert pack == ["smoe", "pack", str(model), "--precision", precision]
    assert up[: up.index("#")] == ["smoe", "cluster", "up", str(model), "--local", "2", "--draft"]
    assert again == [*asked, "--cluster", "local", "--set", "draft_on=cluster"]


def test_pyzmq_is_installed_first_where_it_is_missing(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoe.cli.first_use.find_spec", lambda name: None)
    refused = run("generate", model, *SIZE, "--preset", "cluster", "-p", "once")
    behind = refused.err.partition("to make it work:\n")[2]
    assert behind.splitlines()[0].split("#")[0].strip() == "pip install '.[cluster]'" and "smoe cluster up" in behind


def test_pyzmq_is_installed_in_one_way_only() -> None:
    """Would catch a page or a message that names another package or extra than `docs/cluster.md`."""
    root = Path(smoe.__file__).parents[2]
    files = [root / "README.md", *root.glob("docs/*.md"), *root.glob("src/smoe/**/*.py")]
    found = {
        way for file in files for way in re.findall(r"pip install [^\n#]*(?:zmq|cluster\])'?", file.read_text("utf8"))
    }
    assert found == {"pip install '.[cluster]'"}


def test_a_setting_of_a_preset_is_named_with_it(run: Run, model: Path) -> None:
    """Would catch an error about an option that nobody has typed."""
    line = ["generate", model, *SIZE, "-p", "once"]
    hint = "hint: --low-precision int4 comes from --preset hobbit."
    assert hint in run(*line, "--preset", "hobbit").err
    for typed in (["--low-precision", "int4"], ["--preset", "hobbit", "--low-precision", "int4"]):
        assert "comes from" not in run(*line, *typed).err


def test_what_to_type_is_the_command_with_all_that_was_typed(run: Run, model: Path) -> None:
    """Quotes and all."""
    text = 'it\'s "so" & so'
    (pack, again) = printed(run("generate", model, *SIZE, "--low-precision", "int4", "-p", text))
    assert pack == ["smoe", "pack", str(model), "--precision", "int4"]
    assert again == ["smoe", "generate", str(model), *map(str, SIZE), "--low-precision", "int4", "-p", text]
