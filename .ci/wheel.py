"""The wheel that users install, and the source distribution: `make wheel` compares both with the repository,
`make wheel-test` installs the wheel into an empty environment and runs it.

Standard library only. Run as `python .ci/wheel.py [--install] [--torch REQUIREMENT]`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "src/smoe/"
SERVE = ("serve", "demo", "--memory", "48MiB", "--context", "512", "--port", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", action="store_true", help="install it into a fresh environment and run it there")
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
        if given.install:
            try_out(Path(folder) / "bare", wheel, given.torch)


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


def try_out(place: Path, wheel: Path, torch: str) -> None:
    """Install the wheel into an environment that has nothing, and use it as a user would: without extras, then as a
    server."""
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    programs = place / ("Scripts" if os.name == "nt" else "bin")
    # nothing of the repository may be found, nor what other runs have measured
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SMOE_", "VIRTUAL"))}
    clean |= {"XDG_CACHE_HOME": str(place / "cache"), "HF_HUB_OFFLINE": "1"}

    def run(*words: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
        program = str(programs / words[0])
        done = subprocess.run([program, *words[1:]], cwd=place, env=clean, capture_output=True, text=True)
        if (done.returncode != 0) != fails:
            sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    limits = str(ROOT / "constraints.txt")
    run("python", "-m", "pip", "install", "--quiet", "--no-compile", "-c", limits, torch)
    run("python", "-m", "pip", "install", "--quiet", "--no-compile", "-c", limits, str(wheel))
    print(run("smoe", "--version").stdout.strip())
    assert "site-packages" in run("python", "-c", "import smoe; print(smoe.__file__)").stdout, "another smoe was found"
    story = ("generate", "demo", "--memory", "20MiB", "--context", "512", "--max-new-tokens", "20")
    answer = json.loads(run("smoe", *story, "--json", "-p", "Once upon a time").stdout)
    print("smoe generate demo:", json.dumps(answer)[:200])
    run("smoe", "plan", "demo", "--memory", "20MiB", "--context", "512")
    commands = run("smoe", "--help").stdout
    for extra, command in (("serve", ("serve", "demo")), ("cluster", ("cluster", "up", "demo", "--local", "1"))):
        if not re.search(rf"^\W*{extra} ", commands, re.MULTILINE):
            continue
        run("smoe", extra, "--help")
        refusal = run("smoe", *command, fails=True)
        missing = f"smoe[{extra}]"
        assert missing in refusal.stderr.replace("\n", ""), f"{command} does not name {missing}:\n{refusal.stderr}"
        print(f"smoe {' '.join(command)}: says that {missing} is missing")
    run("python", "-m", "pip", "install", "--quiet", "--no-compile", "-c", limits, f"{wheel}[serve]")
    print("smoe serve demo:", asked([str(programs / "smoe"), *SERVE], place, clean))
    print("1 passed, 0 failed")


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
