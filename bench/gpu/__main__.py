"""Everything that needs a GPU, in one command, for the day there is one.

    make gpu GPU_PYTHON=python3 [GPU_OUT=runs/gpu]
    python -m bench.gpu --out runs/gpu [--only link] [--dry-run]

Needs no network and no installation: torch and transformers as they are, `PYTHONPATH=src`. Each part runs in a process
of its own, within its own limit, and leaves one JSON file; a part whose file is there is not run again, so a command
that was cut off goes on where it was. `--dry-run` runs every part small, on the emulated device: its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NEEDED = ("torch", "transformers", "safetensors", "huggingface_hub", "numpy", "psutil")
USEFUL = {
    "pytest": "no tests",
    "llvmlite": "the CPU's experts are multiplied by torch",
    "accelerate": "one peer less",
}
TOTAL_SECONDS = 35 * 60
NO_GPU = 3
"""Exit code where there is no GPU."""


def main() -> int:
    """Run what is missing; 0 where every part has its file."""
    options = _options()
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        print(f"gpu: {sys.executable} lacks {', '.join(lacking)}; nothing can run", file=sys.stderr)
        return 2
    if not options.dry_run:
        import torch

        if not torch.cuda.is_available():
            print("gpu: no CUDA device here; --dry-run tries the script itself on the CPU", file=sys.stderr)
            return NO_GPU
    from bench.gpu.parts import PARTS, Bench

    bench = Bench(options.out, options.dry_run)
    if options.here:
        save(options.out, options.only, PARTS[options.only].run(bench))
        return 0
    for name, loss in USEFUL.items():
        if find_spec(name) is None:
            print(f"gpu: {name} is missing: {loss}", file=sys.stderr)
    chosen = {name: part.seconds for name, part in PARTS.items() if options.only in (None, name)}
    return run_missing(chosen, options.out, [sys.executable, "-m", "bench.gpu", *_passed_on(options)], TOTAL_SECONDS)


def run_missing(parts: dict[str, int], out: Path, command: list[str], total_seconds: float) -> int:
    """Run each part without a file, `command --only NAME --here`, in its seconds; 1 where one has failed or no time
    was left."""
    out.mkdir(parents=True, exist_ok=True)
    began, failed = time.monotonic(), []
    for name, seconds in parts.items():
        if file_of(out, name).exists():
            print(f"gpu: {name}: done before", file=sys.stderr)
            continue
        left = total_seconds - (time.monotonic() - began)
        if left <= 0:
            print(f"gpu: {name}: no time left; the same command goes on with it", file=sys.stderr)
            failed.append(name)
            continue
        started = time.monotonic()
        problem = _run([*command, "--only", name, "--here"], out / f"{name}.log", min(seconds, left))
        if problem is None and not file_of(out, name).exists():
            problem = "it left no file"
        took = time.monotonic() - started
        print(f"gpu: {name}: {'done' if problem is None else problem}, {took:.0f} s", file=sys.stderr)
        if problem is not None:
            failed.append(name)
    found = {name: json.loads(file_of(out, name).read_text()) for name in parts if file_of(out, name).exists()}
    print(json.dumps({"parts": sorted(found), "failed": failed, "out": str(out)}))
    return 1 if failed else 0


def _run(command: list[str], log: Path, seconds: float) -> str | None:
    """What went wrong; the process and its children are gone afterwards."""
    with log.open("wb") as written:
        process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"ended after its {seconds:.0f} s, see {log}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return None if code == 0 else f"exit code {code}, see {log}"


def file_of(out: Path, name: str) -> Path:
    """Where a part's figures go."""
    return out / f"{name}.json"


def save(out: Path, name: str, figures: dict[str, Any]) -> None:
    """Whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    half = out / f"{name}.json.half"
    half.write_text(json.dumps({"part": name, **figures}, indent=1) + "\n")
    half.replace(file_of(out, name))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the JSON files")
    parser.add_argument("--only", help="one part instead of all")
    parser.add_argument("--dry-run", action="store_true", help="small, on the emulated device: tries the script")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from bench.gpu.parts import PARTS

    if options.only is not None and options.only not in PARTS:
        parser.error(f"unknown part {options.only!r}; choose one of: {', '.join(PARTS)}")
    return options


def _passed_on(options: argparse.Namespace) -> list[str]:
    return ["--out", str(options.out), *(["--dry-run"] if options.dry_run else [])]


if __name__ == "__main__":
    sys.exit(main())
