"""The parts of llama.cpp's sources that tests compare with: `python -m tests.llama_cpp_source FOLDER`.

Vocabularies with texts and their tokens, chat templates, the tests of what models write, and the converter. They are
taken from the source archive of a package that ships them, which pip fetches from the index that it is set up for; a
folder that has them already is left as it is. `SMOE_LLAMA_CPP=FOLDER` then names them to the tests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
_WITHIN = "vendor/llama.cpp/"
_WANTED = ("models/", "tests/test-chat.cpp", "conversion/", "gguf-py/gguf/")


def fetch(folder: Path) -> None:
    """Put the sources' parts into `folder`."""
    if all((folder / part).exists() for part in _WANTED):
        return
    with tempfile.TemporaryDirectory() as place:
        asked = ["--no-deps", "--no-binary", ":all:", "--dest", place, PACKAGE]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *asked], check=True)
        (archive,) = Path(place).glob("*.tar.gz")
        unpack(archive, folder)


def unpack(archive: Path, folder: Path) -> None:
    """Write the wanted files of a source archive below `folder`."""
    with tarfile.open(archive) as found:
        for member in found:
            name = member.name.partition(_WITHIN)[2]
            source = found.extractfile(member) if name.startswith(_WANTED) and member.isfile() else None
            if source is not None:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read())


def main() -> None:
    """Fetch them to the folder that is given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    fetch(parser.parse_args().folder)


if __name__ == "__main__":
    main()
