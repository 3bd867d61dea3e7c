"""The documentation's links, by the rule that also makes them the site's (docs/site/links.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from smoe.presets import PRESETS, configure

ROOT = Path(__file__).parents[2]


def _links() -> ModuleType:
    spec = importlib.util.spec_from_file_location("links", ROOT / "docs" / "site" / "links.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


links = _links()


def test_every_link_leads_to_a_file_and_every_heading_in_one_is_there() -> None:
    pages = links.pages()
    assert {"README.md", "docs/log/README.md", "docs/papers/smoe.md", "bench/results/README.md"} <= set(pages)
    assert not links.broken()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[a](b.md)", []),
        ("[a](b.md#two-words)", []),
        ("[a](b.md#code-in-it-twice--here)", []),
        ("[a](../README.md), [b](#a-heading)\n\n# A heading", []),
        ("[a](sub) [b](https://example.org/none.md) `[c](none.md)`\n```\n[d](none.md)\n```\n", []),
        ("[a](c.md)", ["docs/a.md: c.md is not there"]),
        ("![a](c.png)", ["docs/a.md: c.png is not there"]),
        ("[a](b.md#three)", ["docs/a.md: b.md#three names a heading that docs/b.md has not"]),
        ("[a](b.md#again)", ["docs/a.md: b.md#again names a heading that docs/b.md has not"]),
        ("[a](../../README.md)", ["docs/a.md: ../../README.md is not there"]),
    ],
)
def test_a_broken_link_is_named(tmp_path: Path, text: str, wrong: list[str]) -> None:
    (tmp_path / "docs" / "sub").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# First\n")
    (tmp_path / "docs" / "sub" / "README.md").write_text("# Below\n")
    (tmp_path / "docs" / "a.md").write_text(text)
    headings = ("Two words", "`Code` in it: twice & here", "Again", "Again")
    (tmp_path / "docs" / "b.md").write_text("".join(f"# {title}\n\n" for title in headings))
    assert links.broken(tmp_path) == wrong


@pytest.mark.parametrize(
    ("page", "written", "in_site"),
    [
        ("index.md", "[a](start.md#two)", "[a](start.md#two)"),
        ("index.md", "[a](../README.md#models)", "[a](repository/README.md#models)"),
        ("papers/smoe.md", "![a](smoe-price.png) [b](../log/a.md)", "![a](../papers/smoe-price.png) [b](../log/a.md)"),
        ("papers/smoe.md", "[a](../../src/smoe/units.py)", "[a](../repository/src/smoe/units.py)"),
        ("repository/README.md", "[a](docs/start.md) `[b](docs/start.md)`", "[a](../start.md) `[b](docs/start.md)`"),
        ("repository/README.md", "[a](#models) [b](https://example.org)", "[a](#models) [b](https://example.org)"),
        ("repository/bench/results/README.md", "[a](../peers/)", "[a](../../../repository/bench/peers/README.md)"),
    ],
)
def test_links_are_turned_to_where_the_site_has_their_targets(page: str, written: str, in_site: str) -> None:
    made = links.on_page_markdown(written, SimpleNamespace(file=SimpleNamespace(src_uri=page)), None, None)
    assert made == in_site


def _entries(navigation: Any) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    below = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for entry in below for page in _entries(entry)]


def test_every_page_has_its_place_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf8"))
    named = [links.in_repository(page) for page in _entries(site["nav"])]
    assert len(named) == len(set(named))
    to_come = {links.in_repository(page) for page in site["extra"]["to_come"]}
    assert all((ROOT / page).is_file() for page in named if page not in to_come)
    assert {page for page in links.pages() if page.startswith("docs/")} <= set(named)


def test_a_page_to_come_leaves_no_hole_in_the_navigation() -> None:
    config = {
        "mdx_configs": {},
        "extra": {"to_come": ["none.md", "start.md"]},
        "nav": [{"Home": "index.md"}, {"Use": [{"Soon": "none.md"}, {"Start": "start.md"}]}],
    }
    assert links.on_config(config)["nav"] == [{"Home": "index.md"}, {"Use": [{"Start": "start.md"}]}]


def test_the_page_of_presets_names_all_and_says_which_change_the_text() -> None:
    rows = (ROOT / "docs" / "presets.md").read_text(encoding="utf8").splitlines()
    said = {
        name.strip(" `"): "lossy" in row.split("|")[2]
        for row in rows
        if row.startswith("| `") and row.split("|")[2].strip(" *") in ("exact", "lossy")
        for name in row.split("|")[1].split(",")
    }
    assert said == {name: bool(configure(name).lossy) for name in PRESETS}
