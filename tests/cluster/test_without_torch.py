"""Workers in a process where importing torch or transformers fails: the text is what the unmodified library writes.

Would catch an import of torch anywhere on a worker's way, another bit from kernels that stand alone, rows that such a
worker cannot compute and is asked for, a coordinator that forgets what it was when it comes again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import smoe
from smoe.cli.interrupts import REFUSED
from smoe.cluster.remote import Cluster
from smoe.cluster.stored_identity import Coordinator, invitation, read_coordinator, store_coordinator
from smoe.errors import ClusterError
from smoe.kernels import machine_code
from smoe.kernels.isa import widest
from smoe.kernels.many_rows import instruction_set
from smoe.kernels.spinning_pool import SpinningPool
from tests import oracle, promised
from tests.cluster.conftest import GiveUpWhen

Open = Callable[..., PreTrainedModel]
Join = Callable[..., "subprocess.Popen[bytes]"]
FITS: dict[str, Any] = {"dtype": torch.bfloat16, "hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 64}
BY_TURNS: dict[str, Any] = {"placement": "round-robin", "prefetch": "next-gate", "eviction": "lru"}
pytestmark = pytest.mark.skipif(not machine_code.is_known(), reason="x86-64 Linux only")


@pytest.fixture
def join(coordinator: Coordinator, tmp_path: Path) -> Iterator[Join]:
    """`join(folder, name, *options)`: a worker's process; what it says goes to the file NAME.log."""
    absent, started = tmp_path / "absent", list["subprocess.Popen[bytes]"]()
    for library in ("torch", "transformers"):
        (absent / library).mkdir(parents=True)
        (absent / library / "__init__.py").write_text(f"raise ImportError('no {library} on this machine')\n")

    def begin(folder: Path | None, name: str, *options: str) -> subprocess.Popen[bytes]:
        expecting, line = invitation(read_coordinator("test"))
        store_coordinator(expecting)
        path = os.pathsep.join([str(absent), str(Path(smoe.__file__).parents[1])])
        environment = {**os.environ, "PYTHONPATH": path, "XDG_CONFIG_HOME": str(tmp_path / name)}
        model = [] if folder is None else [str(folder)]
        given = ["--worker", name, "--slots", "3", "--threads", "1", "--no-torch", *options]
        with (tmp_path / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "smoe", "cluster", "join", line, *model, *given]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return started[-1]

    yield begin
    for process in started:
        process.terminate()
        process.wait(20)


def members_of(model: PreTrainedModel) -> dict[str, Any]:
    others = model.offload.executor.compute.others
    assert isinstance(others, Cluster)
    return {member.name: member for member in others.members}


@pytest.mark.parametrize("kernels", ["native", "torch", "own-order"])
def test_the_text_is_the_same(
    kernels: str, toy: Callable[..., Path], join: Join, open_model: Open, tmp_path: Path
) -> None:
    """For the coordinator after the coordinator; and whatever multiplies few rows there."""
    if kernels == "own-order":
        promised.needs(widest() is not None, "own order needs llvmlite and AVX2")
    else:
        promised.needs_machine_code()
        with SpinningPool(torch.get_num_threads()) as pool:
            promised.needs_products(pool, (2 * FITS["moe_intermediate_size"], FITS["hidden_size"]))
    folder = toy("qwen3_moe", **FITS)
    alone = oracle.greedy(open_model(folder, "minimum", kernels=kernels))
    worker = join(folder, "small")
    for _ in range(2):
        model = open_model(folder, "minimum", kernels=kernels, cluster="test", cluster_timeout_seconds=30.0, **BY_TURNS)
        oracle.assert_same_steps(oracle.greedy(model), alone)
        (member,) = members_of(model).values()
        assert member.experts > 30, "it has computed"
        model.offload.close()
    assert worker.poll() is None, (tmp_path / "small.log").read_text()


def test_beside_a_worker_with_torch(
    toy: Callable[..., Path],
    join: Join,
    start: Callable[..., Any],
    open_model: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both compute; of one expert's many rows in our own order, whoever may."""
    promised.needs(widest() is not None, "own order needs llvmlite and AVX2")
    folder = toy("qwen3_moe", **FITS, max_position_embeddings=2048)
    prompt = oracle.PROMPT.repeat(1, 2 if instruction_set() is None else 30)  # some experts get more rows than it takes
    room: dict[str, Any] = {"context_tokens": 2 * prompt.shape[1], "kernels": "own-order"}
    alone = oracle.greedy(open_model(folder, "minimum", **room), prompt)
    join(folder, "small")
    start(folder, 1)
    settings: dict[str, Any] = {"cluster": "test", "cluster_workers": 2, "cluster_timeout_seconds": 30.0}
    model = open_model(folder, "minimum", **room, **settings, **BY_TURNS)
    oracle.assert_same_steps(oracle.greedy(model, prompt), alone)
    members = members_of(model)
    assert members["small"].most_rows < prompt.shape[1] and members["w0"].most_rows > 1e9
    assert all(member.experts > 20 for member in members.values())
    assert not [record for record in caplog.records if "could not serve" in record.message]


def test_the_process_has_begun_anew(toy: Callable[..., Path], join: Join, open_model: Open) -> None:
    """What it holds is not what the command line is made of."""
    promised.needs_machine_code()
    folder = toy("qwen3_moe", **FITS)
    worker = join(folder, "small")
    open_model(folder, "minimum", cluster="test", cluster_timeout_seconds=30.0)
    assert b"smoe.light_worker" in Path(f"/proc/{worker.pid}/cmdline").read_bytes()
    mapped = Path(f"/proc/{worker.pid}/maps").read_text()
    assert "llvmlite" not in mapped and "libtorch" not in mapped


def test_a_model_that_needs_torch_is_refused_by_name(
    toy: Callable[..., Path], join: Join, open_model: Open, give_up_when: GiveUpWhen, tmp_path: Path
) -> None:
    folder = toy("qwen3_moe")
    worker = join(folder, "small")
    give_up_when(lambda _: worker.poll() is not None)
    with pytest.raises(ClusterError, match="0 of 1 workers"):
        open_model(folder, "minimum", cluster="test", cluster_timeout_seconds=30.0, dtype="float32")
    assert worker.wait(20) == REFUSED
    assert "the coordinator refuses worker" in (tmp_path / "small.log").read_text()


def test_what_it_needs_is_what_smoe_needs() -> None:
    """The same versions, and nothing that is not asked for elsewhere."""
    top = Path(__file__).parents[2]
    lines = (top / "requirements-worker.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    declared = (top / "pyproject.toml").read_text()
    assert len(wanted) == 6 and all(f'"{line}' in declared for line in wanted)


def test_it_ends_in_order(toy: Callable[..., Path], join: Join, tmp_path: Path) -> None:
    worker = join(toy("qwen3_moe", **FITS), "small")
    until = time.monotonic() + 30
    while "waits for the coordinator" not in (tmp_path / "small.log").read_text() and time.monotonic() < until:
        time.sleep(0.05)
    worker.terminate()
    assert worker.wait(20) == 143
    assert "small has ended" in (tmp_path / "small.log").read_text()
