"""The engines of a comparison: for each, the command of a fresh process and the files it reads.

Adding one is a worker module (`bench/peers/worker.py` says what it must do) and an entry in `ENGINES`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.worker import Workload, workload_arguments

REPOSITORY = Path(__file__).resolve().parents[2]
LLAMA_PYTHON_VARIABLE = "SMOE_BENCH_LLAMA_PYTHON"


@dataclass(frozen=True)
class Setup:
    """Where the engines find what they need on this machine."""

    model: Path
    """Model directory with safetensors."""
    gguf: Path
    """The same model for llama.cpp."""
    llama_python: str
    """Interpreter that has llama-cpp-python."""
    offload: Path
    """Folder for accelerate's offloaded tensors."""

    def checkpoint(self) -> list[Path]:
        """The weight files of the model directory."""
        return sorted(self.model.glob("*.safetensors"))


@dataclass(frozen=True)
class Engine:
    """How one engine is started."""

    command: Callable[[Setup, Workload, int | None], list[str]]
    """Command line for a workload under a memory limit in bytes (None = unlimited)."""
    files: Callable[[Setup], list[Path]]
    """Files to drop from, or to bring into, the page cache before a run."""


def default_llama_python() -> str:
    """The interpreter named by the environment, else the present one."""
    return os.environ.get(LLAMA_PYTHON_VARIABLE, sys.executable)


def worker_environment(threads: int) -> dict[str, str]:
    """Environment of every worker: this repository importable, `threads` threads, no downloads."""
    paths = [str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _worker(module: str, workload: Workload, *extra: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", f"bench.peers.{module}", *workload_arguments(workload), *extra]


def _transformers(experts: str) -> Engine:
    def command(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[str]:
        return _worker("transformers_run", workload, "--experts", experts)

    return Engine(command, Setup.checkpoint)


def _accelerate_command(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[str]:
    return _worker("transformers_run", workload, "--experts", "grouped_mm", "--offload", str(setup.offload))


def _accelerate_files(setup: Setup) -> list[Path]:
    return setup.checkpoint() + sorted(path for path in setup.offload.glob("*") if path.is_file())


def _llama(mode: str) -> Engine:
    def command(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[str]:
        gguf = Workload(**{**vars(workload), "model": setup.gguf})
        return _worker("llama_run", gguf, "--mode", mode, python=setup.llama_python)

    return Engine(command, lambda setup: [setup.gguf])


def _smoe(*switches: str) -> Engine:
    """With settings, each as NAME=VALUE."""

    def command(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[str]:
        extra = [part for switch in switches for part in ("--set", switch)]
        if limit_bytes is not None:
            extra += ["--memory", str(limit_bytes - smoe_baseline_bytes(workload.threads))]
        return _worker("smoe_run", workload, *extra)

    return Engine(command, Setup.checkpoint)


def _smoe_gguf(*switches: str) -> Engine:
    """The same on the file that llama.cpp reads."""
    smoe = _smoe(*switches)

    def command(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[str]:
        return smoe.command(setup, Workload(**{**vars(workload), "model": setup.gguf}), limit_bytes)

    return Engine(command, lambda setup: [setup.gguf])


def smoe_baseline_bytes(threads: int) -> int:
    """Resident bytes of a process that has imported smoe, torch and transformers and done nothing.

    The limit holds for the whole process, the budget for what smoe allocates: this is the difference.
    """
    command = [sys.executable, "-m", "bench.peers.smoe_run", "--baseline"]
    environment = worker_environment(threads)
    answer = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return int(answer.stdout.split()[-1])


ENGINES: dict[str, Engine] = {
    "smoe": _smoe(),
    "smoe-own-order": _smoe("kernels=own-order"),
    "smoe-gguf": _smoe_gguf(),
    "smoe-gguf-int8": _smoe_gguf("activations=int8"),
    "llama.cpp": _llama("mmap"),
    "llama.cpp-mapped": _llama("mapped-only"),
    "llama.cpp-direct": _llama("direct"),
    "transformers": _transformers("grouped_mm"),
    "transformers-eager": _transformers("eager"),
    "accelerate": Engine(_accelerate_command, _accelerate_files),
}
