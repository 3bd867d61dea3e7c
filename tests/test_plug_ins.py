"""Classes that are not part of the package: found by the place that is given, and nothing else is run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smoe.config import SETTINGS
from smoe.errors import ConfigError
from smoe.plug_ins import Catalogue
from smoe.policy.eviction.base import Eviction
from smoe.policy.eviction.lru import LRU
from smoe.policy.registry import EVICTIONS, PREDICTORS, eviction_kind
from smoe.presets import configure
from tests.installed import install

SOURCE = """
from smoe.policy.eviction.lru import LRU

class Mine(LRU):
    name = "mine"

class Offline(LRU):
    only_replayed = "reads tea leaves"

Nothing = 5
"""
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module into a folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("plug_in_")]:
        monkeypatch.delitem(sys.modules, name)

    def write(name: str, source: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(source, encoding="utf8")
        return path

    return write


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a package with entry points."""

    def offer(package: str, group: str, **points: str) -> None:
        install(tmp_path / "site", package, group, points)

    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path)
    return offer


def refusal(name: str, catalogue: Catalogue[Eviction] = EVICTIONS) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        catalogue.find(name)
    assert caught.value.setting == "eviction" and caught.value.given == name and caught.value.allowed
    assert str(caught.value).startswith(f"`eviction` is {name!r}; ")
    return caught.value


def test_a_file_is_run_once(write: Write) -> None:
    path = write("plug_in_a", SOURCE + "print('run')")
    found = EVICTIONS.find(f"{path}:Mine")
    assert issubclass(found, LRU) and found.name == "mine" and found is EVICTIONS.find(f"{path}:Mine")
    assert type(eviction_kind(f"{path}:Mine")()).__name__ == "Mine"
    assert configure(eviction="./plug_in_a.py:Mine").eviction == "./plug_in_a.py:Mine"


def test_a_policy_without_a_name_has_that_of_its_class(write: Write) -> None:
    """Would catch a policy that serves a model, and whose report then fails."""
    body = "def insert(self, key): ...\n    remove = residents = observe = victims = insert"
    source = f"from smoe.policy.eviction.base import Eviction\nclass Unnamed(Eviction):\n    {body}"
    policy = EVICTIONS.find(f"{write('plug_in_unnamed', source)}:Unnamed")()
    assert (policy.name, policy.rule) == ("Unnamed", "Unnamed")


def test_a_module_needs_no_file(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("plug_in_b", SOURCE)
    why = refusal("plug_in_b:Mine")
    assert "Python finds no module 'plug_in_b'" in str(why) and "./plug_in_b.py:Mine" in str(why)
    monkeypatch.syspath_prepend(tmp_path)
    assert EVICTIONS.find("plug_in_b:Mine").name == "mine"


def test_what_cannot_be_used_is_refused(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("plug_in_c", SOURCE)
    write("plug_in_broken", "import nothing_of_this_name")
    write("plug_in_half", "from smoe.policy.eviction.base import Eviction\nclass Half(Eviction): ...")
    monkeypatch.syspath_prepend(tmp_path)
    for name, why in (
        ("./plug_in_none.py:Mine", "there is no file ./plug_in_none.py"),
        ("plug_in_c:Yours", "plug_in_c has no Yours; it has LRU, Mine, Offline"),
        ("plug_in_c:Nothing", "no class that inherits smoe.policy.eviction.base.Eviction"),
        ("smoe.prediction.previous_token:PreviousToken", "no class that inherits"),
        ("plug_in_half:Half", "does not define insert, observe, remove, residents, victims"),
        ("plug_in_broken:Mine", "importing plug_in_broken failed with ModuleNotFoundError"),
        ("fifo", "choose one of: auto, lru"),
        (":Mine", "choose one of"),
        ("mine:", "which names no class: add the name of a class, as in mine:CLASS"),
        ("./plug_in_c.py", "which names no class: add the name of a class, as in ./plug_in_c.py:CLASS"),
        ("my.policies", "as in my.policies:CLASS"),
    ):
        assert why in str(refusal(name)), name


def test_a_predictor_is_derived_from_the_class_that_the_page_names(write: Write) -> None:
    """Would catch the advice to derive it from `PredictorKind`, which has no `predict`."""
    path = write("plug_in_other_kind", SOURCE)
    for name in ("Mine", "Yours"):
        with pytest.raises(ConfigError, match=r"class that inherits smoe\.policy\.prediction\.Predictor(;|$)"):
            PREDICTORS.find(f"{path}:{name}")


@pytest.mark.parametrize("given", ["next_gate", 5, ("auto",)], ids=repr)
@pytest.mark.parametrize("setting", ["prefetch", "eviction"])
def test_a_wrong_name_is_refused_with_all_values(setting: str, given: object) -> None:
    """Would catch a list without the values that name no class, or without the form of a plug-in."""
    with pytest.raises(ConfigError, match=r"choose one of: auto, .*, MODULE:CLASS$") as refused:
        configure(**{setting: given})
    assert set(SETTINGS[setting].allowed.names) <= set(str(refused.value).partition("of: ")[2].split(", "))


def test_a_policy_for_replays_serves_no_requests(write: Write) -> None:
    path = write("plug_in_d", SOURCE)
    assert EVICTIONS.find(f"{path}:Offline").only_replayed
    with pytest.raises(ConfigError, match="reads tea leaves: use it in smoe replay"):
        configure(eviction=f"{path}:Offline")


def test_a_package_offers_a_name(write: Write, offer: Callable[..., None]) -> None:
    write("plug_in_e", SOURCE)
    write("plug_in_other", "raise RuntimeError('nothing asked for this')")
    offer("mine", "smoe.evictions", mine="plug_in_e:Mine", other="plug_in_other:X", lru="plug_in_other:X")
    assert EVICTIONS.find("mine").name == "mine" and configure(eviction="mine").eviction == "mine"
    assert EVICTIONS.find("lru") is LRU, "a package cannot take a built-in name"
    assert "belady, mine, other, MODULE:CLASS" in str(refusal("yours"))
    assert "mine" not in PREDICTORS.allowed and "plug_in_other" not in sys.modules
    assert "nothing asked for this" in str(refusal("other"))


def test_two_packages_with_one_name(write: Write, offer: Callable[..., None]) -> None:
    write("plug_in_f", SOURCE)
    offer("mine", "smoe.evictions", mine="plug_in_f:Mine")
    offer("theirs", "smoe.evictions", mine="plug_in_f:Offline")
    why = refusal("mine")
    assert "plug_in_f:Mine" in str(why) and "plug_in_f:Offline" in str(why) and "give one of these" in str(why)
