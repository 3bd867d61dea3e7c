"""The engines of a comparison: for each, the commands of fresh processes, the files they read, and what they answer.

Adding one is a worker module (`bench/peers/worker.py` says what it must do), or functions that make the commands and
read the output of a program (`bench/peers/binaries.py`), and an entry in `ENGINES`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers import binaries
from bench.peers.binaries import binary, context_tokens
from bench.peers.isa import VARIABLES, Isa
from bench.peers.process import Command, Finished
from bench.peers.shape import read_gguf_shape
from bench.peers.words import prompt_texts, warmup_text
from bench.peers.worker import Measurement, Workload, workload_arguments

REPOSITORY = Path(__file__).resolve().parents[2]
LLAMA_PYTHON_VARIABLE = "SMOE_BENCH_LLAMA_PYTHON"


@dataclass(frozen=True)
class Setup:
    """Where the engines find what they need on this machine."""

    model: Path
    """Model directory with safetensors; the GGUF file where there is no directory."""
    gguf: Path
    """The same model for llama.cpp."""
    llama_python: str
    """Interpreter that has llama-cpp-python."""
    offload: Path
    """Folder for accelerate's offloaded tensors."""
    isa: Isa = "native"
    """Instructions that may be used."""

    def checkpoint(self) -> list[Path]:
        """The weight files of the model."""
        return sorted(self.model.glob("*.safetensors")) or [self.gguf]


def read_worker(finished: Sequence[Finished], workload: Workload) -> Measurement:
    """What a worker of ours reports: one line of JSON, its last."""
    (process,) = finished
    return Measurement(**json.loads(process.output.splitlines()[-1]))


@dataclass(frozen=True)
class Engine:
    """How one engine is started, and understood."""

    commands: Callable[[Setup, Workload, int | None], list[Command]]
    """Processes, one after the other, for a workload under a memory limit in bytes (None = unlimited)."""
    files: Callable[[Setup], list[Path]]
    """Files to drop from, or to bring into, the page cache before a run."""
    read: Callable[[Sequence[Finished], Workload], Measurement] = read_worker
    """The measurement in what they printed. Raises `BinaryError` where it is not in it."""
    variable: str | None = None
    """Of a program: the variable of the environment that names it."""
    isas: tuple[Isa, ...] = ("native", "avx2")
    """Instruction sets that it can be limited to."""


def default_llama_python() -> str:
    """The interpreter named by the environment, else the present one."""
    return os.environ.get(LLAMA_PYTHON_VARIABLE, sys.executable)


def worker_environment(threads: int, isa: Isa = "native") -> dict[str, str]:
    """Environment of every process: this repository importable, `threads` threads, no downloads."""
    paths = [str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    ours = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return os.environ | VARIABLES[isa] | ours


def _worker(module: str, workload: Workload, *extra: str, python: str = sys.executable) -> list[Command]:
    return [Command([python, "-m", f"bench.peers.{module}", *workload_arguments(workload), *extra])]


def _transformers(experts: str) -> Engine:
    def commands(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[Command]:
        return _worker("transformers_run", workload, "--experts", experts)

    return Engine(commands, Setup.checkpoint)


def _accelerate_commands(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[Command]:
    return _worker("transformers_run", workload, "--experts", "grouped_mm", "--offload", str(setup.offload))


def _accelerate_files(setup: Setup) -> list[Path]:
    return setup.checkpoint() + sorted(path for path in setup.offload.glob("*") if path.is_file())


def _gguf_file(setup: Setup) -> list[Path]:
    return [setup.gguf]


def _llama(mode: str) -> Engine:
    def commands(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[Command]:
        gguf = Workload(**{**vars(workload), "model": setup.gguf})
        return _worker("llama_run", gguf, "--mode", mode, python=setup.llama_python)

    return Engine(commands, _gguf_file, isas=("native",))


def _smoe(*switches: str) -> Engine:
    """With settings, each as NAME=VALUE."""

    def commands(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[Command]:
        given = (f"context_tokens={context_tokens(workload)}", *switches)
        extra = [part for switch in given for part in ("--set", switch)]
        if limit_bytes is not None:
            extra += ["--memory", str(limit_bytes - smoe_baseline_bytes(workload.threads))]
        else:
            extra.append("--ready")  # the other engines read all weights before the first prompt, too
        return _worker("smoe_run", workload, *extra)

    return Engine(commands, Setup.checkpoint)


def _smoe_gguf(*switches: str) -> Engine:
    """The same on the file that llama.cpp reads."""
    smoe = _smoe(*switches)

    def commands(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[Command]:
        return smoe.commands(setup, Workload(**{**vars(workload), "model": setup.gguf}), limit_bytes)

    return Engine(commands, _gguf_file)


def smoe_baseline_bytes(threads: int) -> int:
    """Resident bytes of a process that has imported smoe, torch and transformers and done nothing.

    The limit holds for the whole process, the budget for what smoe allocates: this is the difference.
    """
    command = [sys.executable, "-m", "bench.peers.smoe_run", "--baseline"]
    environment = worker_environment(threads)
    answer = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return int(answer.stdout.split()[-1])


def _cli(variable: str, *more: str, in_memory: Sequence[str] = (), below_memory: Sequence[str] = ()) -> Engine:
    """A program like llama.cpp's, with `more` options, and others where memory is not limited, or is.

    Where it is not, weights are to be read at load: the first prompt would else pay for mapping every page of them.
    """

    def commands(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[Command]:
        options = [*more, *(in_memory if limit_bytes is None else below_memory)]
        texts = prompt_texts(setup.gguf, workload)
        return binaries.cli_commands(binary(variable, setup.isa), setup.gguf, workload, texts, options)

    return Engine(commands, _gguf_file, binaries.read_cli, variable)


def _bigmoe(variable: str) -> Engine:
    def commands(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[Command]:
        program, shape = binary(variable, setup.isa), read_gguf_shape(setup.gguf)
        texts, warmup = prompt_texts(setup.gguf, workload), warmup_text(setup.gguf, workload)
        return [binaries.bigmoe_command(program, setup.gguf, shape, workload, texts, warmup, limit_bytes)]

    return Engine(commands, _gguf_file, binaries.read_bigmoe, variable)


IK_VARIABLE = "SMOE_BENCH_IK_LLAMA_CLI"
LLAMA_CLI_VARIABLE = "SMOE_BENCH_LLAMA_COMPLETION"
BIGMOE_VARIABLE = "SMOE_BENCH_BIGMOE_CLI"

ENGINES: dict[str, Engine] = {
    "smoe": _smoe(),
    "smoe-own-order": _smoe("kernels=own-order"),
    "smoe-gguf": _smoe_gguf(),
    "smoe-gguf-int8": _smoe_gguf("activations=int8"),
    "smoe-gguf-own-order": _smoe_gguf("kernels=own-order"),
    "llama.cpp": _llama("mmap"),
    "llama.cpp-mapped": _llama("mapped-only"),
    "llama.cpp-direct": _llama("direct"),
    "llama.cpp-cli": _cli(LLAMA_CLI_VARIABLE, "-no-cnv", in_memory=["--load-mode", "none"]),
    "llama.cpp-cli-no-repack": _cli(LLAMA_CLI_VARIABLE, "-no-cnv", "--no-repack"),
    "ik-llama.cpp": _cli(IK_VARIABLE, in_memory=["--no-mmap"], below_memory=["--prefetch-experts"]),
    "ik-llama.cpp-mapped": _cli(IK_VARIABLE),
    "ik-llama.cpp-repacked": _cli(IK_VARIABLE, "-rtr"),
    "bigmoe": _bigmoe(BIGMOE_VARIABLE),
    "transformers": _transformers("grouped_mm"),
    "transformers-eager": _transformers("eager"),
    "accelerate": Engine(_accelerate_commands, _accelerate_files),
}
