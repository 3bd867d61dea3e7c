"""Write the requirements with hashes: `make locked`, after a change of pyproject.toml or constraints.txt.

    requirements-locked.txt    everything that `smoe[serve,cluster]` needs, but torch and its libraries for GPUs
    requirements-build.txt     what builds smoe's own wheel

Versions are those of constraints.txt, what it does not name is the newest; for Python 3.11 and later, on every system.
torch is left out, as its builds for CPUs and GPUs have one version and different files; it opens no connection.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_OF_TORCH = re.compile(r"(torch|triton|cuda-[a-z-]+|nvidia-[a-z0-9-]+)==")
_FIXED = ("--generate-hashes", "--universal", "--python-version", "3.11", "--no-annotate", "--no-header", "--quiet")
_HEADER = "# Written by `make locked`; what is here, and how it is used: docs/container.md.\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        versions, build = Path(folder) / "versions.txt", Path(folder) / "build.in"
        wanted = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        versions.write_text("".join(line for line in wanted if not line.startswith("triton")))  # torch names its own
        build.write_text("\n".join(re.findall(r'^requires = \["(.+)"\]$', (ROOT / "pyproject.toml").read_text(), re.M)))
        extras = ("--extra", "serve", "--extra", "cluster", "--constraint", str(versions))
        _write("requirements-locked.txt", _compiled(str(ROOT / "pyproject.toml"), *extras))
        _write("requirements-build.txt", _compiled(str(build)))


def _compiled(*arguments: str) -> str:
    line = [sys.executable, "-m", "uv", "pip", "compile", *_FIXED, *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


def _write(name: str, text: str) -> None:
    """An entry is a line that does not begin with a space, and those after it that do."""
    entries = re.findall(r"^\S.*\n(?:[ ].*\n)*", text, re.M)
    ours = [entry for entry in entries if not _OF_TORCH.match(entry)]
    (ROOT / name).write_text(_HEADER + "".join(ours))


if __name__ == "__main__":
    main()
