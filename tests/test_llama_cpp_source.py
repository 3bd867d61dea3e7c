"""What is taken of an archive of llama.cpp's sources; fetching one needs an index: `make test-optional` does it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from tests.llama_cpp_source import fetch, unpack


def test_what_tests_compare_with_is_taken(tmp_path: Path) -> None:
    wanted = {"models/ggml-vocab-x.gguf.inp", "models/templates/x.jinja", "tests/test-chat.cpp"}
    wanted |= {"conversion/base.py", "gguf-py/gguf/constants.py"}
    archive = tmp_path / "package-1.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        for name in (*(f"vendor/llama.cpp/{each}" for each in wanted), "vendor/llama.cpp/src/llama.cpp", "setup.py"):
            member = tarfile.TarInfo(f"package-1/{name}")
            member.size = 4
            made.addfile(member, io.BytesIO(b"text"))
    unpack(archive, tmp_path / "found")
    found = {path.relative_to(tmp_path / "found").as_posix() for path in (tmp_path / "found").rglob("*.*")}
    assert found == wanted
    fetch(tmp_path / "found")  # nothing is fetched a second time
