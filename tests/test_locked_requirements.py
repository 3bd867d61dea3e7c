"""The requirements with hashes, and what uses them.

Would catch: a package that faces the network and is not pinned by its files, versions that are not those of the tests,
an image whose base or parser is whatever is newest.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKED, BUILD = ROOT / "requirements-locked.txt", ROOT / "requirements-build.txt"
NETWORK = {
    "fastapi", "starlette", "pydantic", "pydantic-core", "uvicorn", "h11", "anyio", "prometheus-client", "llguidance",
    "pyzmq", "huggingface-hub", "hf-xet", "transformers", "tokenizers", "safetensors", "requests", "urllib3", "certifi",
    "idna", "jinja2", "gguf", "numpy",
}  # fmt: skip


def entries(path: Path) -> dict[str, list[str]]:
    """Each entry's text by its name; a package may have several, for different systems."""
    found: dict[str, list[str]] = {}
    for entry in re.findall(r"^[a-zA-Z].*\n(?:[ ].*\n)*", path.read_text(), re.M):
        found.setdefault(entry.split("==")[0], []).append(entry)
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("path", [LOCKED, BUILD])
def test_every_package_has_one_version_and_hashes(path: Path) -> None:
    for name, texts in entries(path).items():
        for text in texts:
            assert re.match(rf"{re.escape(name)}==[\w.]+ ", text), text.splitlines()[0]
            assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", text)) >= 1, name
    assert "://" not in path.read_text(), "which index has them is the user's choice"


def test_what_faces_the_network_is_there() -> None:
    assert entries(LOCKED).keys() >= NETWORK
    assert "hatchling" in entries(BUILD)


def test_versions_are_those_of_the_tests() -> None:
    locked = entries(LOCKED)
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if "==" not in line or line.startswith("#") or 'python_version < "3.11"' in line:
            continue
        name, version = line.split(";")[0].strip().split("==")
        for text in locked.get(canonical(name), []):
            assert f"=={version} " in text, f"{name}: make locked"


def test_no_later_transformers_is_installed_than_was_tested() -> None:
    """A plain `pip install .` takes the newest that is allowed, and each minor version may change what the engine hooks
    into."""
    (allowed,) = re.findall(r'"transformers>=[\d.]+,<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    (tested,) = re.findall(
        r"^transformers==(\d+)\.(\d+)\S* ; python_version >=", (ROOT / "constraints.txt").read_text(), re.M
    )
    assert (int(allowed[0]), int(allowed[1])) == (int(tested[0]), int(tested[1]) + 1)


def test_all_of_our_requirements_are_locked_but_torch() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    asked += project["optional-dependencies"]["cluster"]
    names = {canonical(re.split(r"[^\w.-]", each)[0]) for each in asked}
    assert names - entries(LOCKED).keys() == {"torch"}


def test_the_image_takes_them_and_a_base_by_its_digest() -> None:
    text = (ROOT / "Containerfile").read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.M)
    assert set(bases) == {"${BASE}"}
    assert re.search(r'^ARG BASE="python:3\.11-slim@sha256:[0-9a-f]{64}"$', text, re.M)
    for name in (LOCKED.name, BUILD.name):
        assert f"--no-deps --require-hashes -r /source/{name}" in text
    ignored = next(path for path in (ROOT / ".containerignore", ROOT / ".dockerignore") if path.exists())
    assert {f"!{LOCKED.name}", f"!{BUILD.name}"} <= set(ignored.read_text().splitlines())


def test_the_server_takes_the_pinned_parser_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    from smoe.server.protocol import spoken_by

    class Other:
        """As of httptools: uvicorn's first choice."""

    monkeypatch.setitem(sys.modules, "httptools", Other())  # type: ignore[arg-type]
    config = spoken_by(lambda: None)
    config.load()
    assert config.http_protocol_class.__name__ == "H11Protocol"  # type: ignore[union-attr]
    assert config.ws_protocol_class is None and config.loop == "asyncio"
