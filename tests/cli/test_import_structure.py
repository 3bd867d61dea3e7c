"""A command finds the names of transformers in the user's cache folder instead of the source of every model.

Would catch: source files that are read nevertheless, names that differ from those of transformers, names of files that
have changed since, an import that fails because an entry is damaged or cannot be written.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers.utils import import_utils

from smoe.cli import import_structure
from smoe.cli.import_structure import STRUCTURES, _Finder, _state_of, _stored, decoded, encoded

IMPORT = """
import sys
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
from smoe.cli.import_structure import use_stored_structure
use_stored_structure()
import transformers
from transformers import Qwen3MoeForCausalLM, BertTokenizer
from transformers.utils import import_utils
assert import_utils.__loader__ is import_utils.__spec__.loader
print(type(import_utils.__loader__).__name__)
print(len([path for path in opened if "/transformers/models/" in path and path.endswith(".py")]))
print(len(dir(transformers)), len(dir(transformers.models)))
"""
SOURCES = {
    "__init__.py": "",
    "ant/__init__.py": "",
    "ant/modeling_ant.py": '__all__ = ["AntModel"]\n',
    "bee/__init__.py": "",
    "bee/configuration_bee.py": '__all__ = ["BeeConfig", "BeeHive"]\n',
}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with the source of models."""
    for name, text in SOURCES.items():
        path = tmp_path / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "models"


class Scans:
    """transformers' own function, and the folders for which it was called."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def __call__(self, place: Any) -> Any:
        self.places.append(str(place))
        import_utils.create_import_structure_from_path.cache_clear()
        return import_utils.create_import_structure_from_path(place)


def lines(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_the_second_import_reads_no_source_of_a_model() -> None:
    first, second = lines(IMPORT), lines(IMPORT)
    assert int(first[1]) > 500
    assert int(second[1]) < 20  # those of the two models
    assert first[0] == second[0] == "SourceFileLoader"
    assert first[2:] == second[2:]


def test_the_names_are_those_that_transformers_finds() -> None:
    models = Path(import_utils.__file__).parents[1] / "models"
    theirs = import_utils.create_import_structure_from_path(str(models))
    assert len(theirs) > 100
    assert decoded(encoded(theirs)) == theirs


def test_names_are_stored(models: Path) -> None:
    scans = Scans()
    first = _stored(scans, models, Path(__file__))(models)
    assert first["bee"] == {frozenset(): {"configuration_bee": {"BeeConfig", "BeeHive"}}}
    for place in (models, str(models), models / "__init__.py"):
        assert _stored(scans, models, Path(__file__))(place) == first
    assert scans.places == [str(models)]


def test_a_changed_source_is_read_again(models: Path) -> None:
    scans = Scans()
    _stored(scans, models, Path(__file__))(models)
    (models / "bee/configuration_bee.py").write_text('__all__ = ["BeeConfig", "BeeQueen"]\n')
    assert _stored(scans, models, Path(__file__))(models)["bee"] == {
        frozenset(): {"configuration_bee": {"BeeConfig", "BeeQueen"}}
    }
    (models / "cat").mkdir()
    (models / "cat/modeling_cat.py").write_text('__all__ = ["CatModel"]\n')
    assert "cat" in _stored(scans, models, Path(__file__))(models)
    assert len(scans.places) == 3


def test_other_folders_are_left_to_transformers(models: Path) -> None:
    scans = Scans()
    found = _stored(scans, models, Path(__file__))(str(models / "ant"))
    assert list(found.values()) == [{"modeling_ant": {"AntModel"}}]
    assert not STRUCTURES.folder.exists()


def test_a_damaged_entry_is_replaced(models: Path) -> None:
    scans = Scans()
    first = _stored(scans, models, Path(__file__))(models)
    (entry,) = STRUCTURES.folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-9])
    assert _stored(scans, models, Path(__file__))(models) == first
    assert _stored(scans, models, Path(__file__))(models) == first
    assert len(scans.places) == 2


@pytest.mark.parametrize(
    "structure",
    [
        {frozenset(): {"modeling_ant": {"AntModel": "AntModel"}}},
        {frozenset(): ["modeling_ant"]},
        {frozenset(): {"modeling_ant": None}},
        {frozenset([None, "torch"]): {"modeling_ant": {"AntModel"}}},
        {frozenset(): {"modeling_ant": {b"AntModel"}}},
        {"ant": ["AntModel"]},
        ["AntModel"],
    ],
)
def test_what_cannot_be_stored_as_it_is_is_not_stored(structure: Any, models: Path) -> None:
    assert _stored(lambda place: structure, models, Path(__file__))(models) is structure
    assert not STRUCTURES.folder.exists()


def test_sources_that_cannot_be_examined_are_left_to_transformers(models: Path) -> None:
    scans = Scans()
    assert _stored(scans, models, models / "gone.py")(models)["ant"]
    assert scans.places == [str(models)]


def test_another_module_is_left_to_python(models: Path) -> None:
    finder = _Finder(models)
    assert finder.find_spec("transformers.utils.hub", None) is None
    assert finder.find_spec("json", None) is None


def test_a_version_without_the_function_is_imported_as_it_is(models: Path, tmp_path: Path) -> None:
    package = tmp_path / "transformers" / "utils"
    package.mkdir(parents=True)
    (package / "import_utils.py").write_text("NAMES = 3\n")
    spec = _Finder(models).find_spec(import_structure._MODULE, [str(package)])
    assert spec is not None and spec.loader is not None
    module = ModuleType(spec.name)
    module.__spec__, module.__file__ = spec, spec.origin
    spec.loader.exec_module(module)
    assert module.NAMES == 3
    assert not hasattr(module, import_structure._FUNCTION)


def test_the_state_depends_on_the_sources_and_the_code(models: Path) -> None:
    code = models.parent / "code.py"
    code.write_text("1")
    first = _state_of(models, code)
    (models / "ant" / "notes.txt").write_text("no source")
    assert _state_of(models, code) == first
    code.write_text("12")
    assert _state_of(models, code) != first
