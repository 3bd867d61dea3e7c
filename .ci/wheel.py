"""The wheel that users install, and the source distribution. `make wheel` compares both with the repository.

`make dist` also stores them in `dist/`. `make wheel-test` installs the wheel by pip, pipx and uvx, and runs it.

Standard library only. Run as `python .ci/wheel.py [--out FOLDER] [--install] [--torch REQUIREMENT]`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "src/smoe/"
STORY = ("generate", "demo", "--memory", "20MiB", "--max-new-tokens", "20", "-p", "Once upon a time")
SERVE = ("serve", "demo", "--memory", "48MiB", "--context", "512", "--port", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="store wheel and source distribution in this folder")
    parser.add_argument("--install", action="store_true", help="install the wheel by pip, pipx and uvx, and run it")
    parser.add_argument("--torch", default="torch", help="the requirement to install first")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = built(Path(folder))
        wrong = differences(wheel)
        if wrong:
            sys.exit("\n".join(wrong))
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, every file of the package and no other")
        source = source_distribution(Path(folder))
        again = built(Path(folder) / "from-source", source)
        if contents(again) != contents(wheel):
            sys.exit(f"the wheel that {source.name} makes is not the wheel that the repository makes")
        print(f"{source.name}: {source.stat().st_size / 2**20:.1f} MiB, makes the same wheel")
        if given.out is not None:
            given.out.mkdir(exist_ok=True)
            print("stored:", *(shutil.copy(made, given.out) for made in (wheel, source)))
        if given.install:
            try_out(Path(folder), wheel, given.torch)


def built(folder: Path, source: Path = ROOT) -> Path:
    """The wheel, made as `pip install .` makes it."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("smoe-*.whl")
    return wheel


def source_distribution(folder: Path) -> Path:
    """The source distribution, made by the build backend that pyproject.toml names."""
    (backend,) = re.findall(r'^requires = \["(hatchling[^"]*)"\]', (ROOT / "pyproject.toml").read_text("utf8"), re.M)
    tools = folder / "tools"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools), backend]
    subprocess.run(install, check=True)
    make = f"from hatchling.build import build_sdist; build_sdist({str(folder)!r})"
    environment = {**os.environ, "PYTHONPATH": str(tools)}
    subprocess.run([sys.executable, "-c", make], cwd=ROOT, env=environment, check=True)
    (made,) = folder.glob("smoe-*.tar.gz")
    return made


def contents(wheel: Path) -> dict[str, int]:
    """Checksums of a wheel's files, by name, its own list of them left out."""
    with zipfile.ZipFile(wheel) as inside:
        return {each.filename: each.CRC for each in inside.infolist() if not each.filename.endswith("/RECORD")}


def differences(wheel: Path) -> list[str]:
    """What the wheel lacks, has too much, or has otherwise than the repository."""
    listed = subprocess.run(["git", "ls-files", "-z", PACKAGE], cwd=ROOT, check=True, capture_output=True, text=True)
    wanted = {path.removeprefix("src/") for path in listed.stdout.split("\0") if path}
    with zipfile.ZipFile(wheel) as inside:
        names = {name for name in inside.namelist() if not name.endswith("/")}
        about = {name for name in names if name.split("/")[0].endswith(".dist-info")}
        wrong = [f"{name} is not in the wheel" for name in sorted(wanted - names)]
        wrong += [f"{name} is in the wheel and not in the repository" for name in sorted(names - wanted - about)]
        changed = sorted(name for name in wanted & names if inside.read(name) != (ROOT / "src" / name).read_bytes())
        wrong += [f"{name} is another in the wheel" for name in changed]
        if not any(name.endswith("/LICENSE") for name in about):
            wrong.append("the licence is not in the wheel")
        metadata = inside.read(next(name for name in about if name.endswith("/METADATA"))).decode()
    if "\nRequires-Python: " not in metadata:
        wrong.append("the wheel does not say which Python it is for")
    return wrong


def try_out(folder: Path, wheel: Path, torch: str) -> None:
    """Install and use the wheel as users do: by pip, by pipx and by uvx, each in an environment with nothing else.

    The wheels of all dependencies are downloaded once. The three programs find smoe and these wheels there and have no
    index, so the commands are those of the documentation.
    """
    packages, tools = folder / "packages", folder / "tools-of-installers"
    wheels = ("-m", "pip", "wheel", "--quiet", "--wheel-dir", str(packages), "-c", str(ROOT / "constraints.txt"))
    subprocess.run([sys.executable, *wheels, torch, f"{wheel}[serve]", "pip"], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
    subprocess.run([str(program(tools, "python")), "-m", "pip", "install", "--quiet", "uv", "pipx"], check=True)
    for way in (by_pip, by_pipx, by_uvx):
        place = folder / way.__name__
        place.mkdir()
        way(place, tools, packages)
        shutil.rmtree(place)  # a gigabyte each
    print("3 passed, 0 failed")


def by_pip(place: Path, tools: Path, packages: Path) -> None:
    """`pip install smoe`: the commands, and what they answer where an extra or the repository is missing."""
    environment = place / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    clean = bare(place, packages)

    def run(*words: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
        return done(program(environment, words[0]), words[1:], place, clean, fails=fails)

    run("python", "-m", "pip", "install", "--quiet", "--no-compile", "smoe")
    print("pip install smoe:", run("smoe", "--version").stdout.strip())
    assert "site-packages" in run("python", "-c", "import smoe; print(smoe.__file__)").stdout, "another smoe was found"
    answer = json.loads(run("smoe", *STORY, "--json").stdout)
    print("  smoe generate demo:", json.dumps(answer)[:200])
    run("smoe", "plan", "demo", "--memory", "20MiB", "--context", "512")
    commands = run("smoe", "--help").stdout
    for extra, command, missing in (
        ("serve", ("serve", "demo"), "pip install '.[serve]'"),
        ("cluster", ("cluster", "up", "demo", "--local", "1"), "pip install '.[cluster]'"),
    ):
        if not re.search(rf"^\W*{extra} ", commands, re.MULTILINE):
            continue
        run("smoe", extra, "--help")
        refusal = run("smoe", *command, fails=True)
        assert missing in refusal.stderr.replace("\n", ""), f"{command} does not name {missing}:\n{refusal.stderr}"
        print(f"  smoe {' '.join(command)}: advises {missing}")
    for command in (("simulate", "--paper", "smoe"), ("bench", "demo", "--ablation", "smoe")):
        refusal = run("smoe", *command, fails=True)
        assert refusal.returncode == 2 and "pip install -e ." in refusal.stderr, refusal.stderr
        print(f"  smoe {' '.join(command)}: says that it needs the repository")


def by_pipx(place: Path, tools: Path, packages: Path) -> None:
    """`pipx install 'smoe[serve]'`: the server answers."""
    clean = bare(place, packages)
    done(program(tools, "pipx"), ["install", "--python", sys.executable, "smoe[serve]"], place, clean)
    smoe = place / "bin" / ("smoe.exe" if os.name == "nt" else "smoe")
    print("pipx install 'smoe[serve]':", done(smoe, ["--version"], place, clean).stdout.strip())
    print("  smoe serve demo:", asked([str(smoe), *SERVE], place, clean))


def by_uvx(place: Path, tools: Path, packages: Path) -> None:
    """`uvx smoe`: a text."""
    options = ("--no-config", "--no-index", "--find-links", str(packages), "--python", sys.executable)
    text = done(program(tools, "uvx"), [*options, "smoe", *STORY, "--quiet"], place, bare(place, packages)).stdout
    assert text.strip(), "uvx smoe generate demo wrote nothing"
    print("uvx smoe generate demo:", text.strip()[:80])


def bare(place: Path, packages: Path) -> dict[str, str]:
    """An environment in which nothing of the repository or of other runs is found, and installers have no index."""
    ours = ("PYTHON", "SMOE_", "VIRTUAL", "PIP_", "PIPX_", "UV_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    folders = {"XDG_CACHE_HOME": "cache", "PIPX_HOME": "pipx", "PIPX_BIN_DIR": "bin", "UV_TOOL_DIR": "uv"}
    clean |= {name: str(place / folder) for name, folder in folders.items()}
    clean |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages)}
    clean |= {"PIPX_DEFAULT_BACKEND": "pip"}  # it would take uv, which is installed next to it, and uv has flags only
    return clean | {"UV_CACHE_DIR": str(place / "cache" / "uv"), "HF_HUB_OFFLINE": "1"}


def program(environment: Path, name: str) -> Path:
    """A program of a virtual environment."""
    return environment / ("Scripts" if os.name == "nt" else "bin") / name


def done(
    program: Path, words: Sequence[str], place: Path, environment: dict[str, str], *, fails: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; the end of this program if it fails and should not, or the other way round."""
    run = subprocess.run([str(program), *words], cwd=place, env=environment, capture_output=True, text=True)
    if (run.returncode != 0) != fails:
        sys.exit(f"{program.name} {' '.join(words)} ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
    return run


def asked(command: list[str], place: Path, environment: dict[str, str]) -> str:
    """Start a server, ask it for a text, end it; what it wrote."""
    server = subprocess.Popen(command, cwd=place, env=environment, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        said = ""
        while not (found := re.search(r"serving demo at (http://\S+)", said)):
            line = server.stderr.readline()
            if not line:
                sys.exit(f"{' '.join(command)} ended before it served:\n{said}")
            said += line
        body = json.dumps({"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}).encode()
        request = urllib.request.Request(f"{found[1]}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            text: str = json.loads(answer.read())["choices"][0]["text"]
        assert text.strip(), "it answered with nothing"
        server.terminate()
        code = server.wait(60)
        assert os.name == "nt" or code == 128 + signal.SIGTERM, f"it ended with {code}"
        return text
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


if __name__ == "__main__":
    main()
