"""Commands import neither torch's compiler nor its packages for several machines.

Every program here is a process of its own, because the tests' process has imported everything. Would catch a new import
of the compiler, which takes a second and 90 MiB, a family that computes other numbers without it, and a program in
which the compiler no longer works.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smoe import from_pretrained
from tests import zoo
from tests.fixtures import Toy

BEFORE = """
from smoe.cli.libraries import import_libraries
from smoe.config import EngineConfig
import_libraries({model!r}, EngineConfig(memory_bytes=256 << 20))
"""
LEFT_OUT = "torch._inductor", "torch._dynamo.convert_frame", "torch.distributed.tensor", "torch.distributed.fsdp"
LOGITS = """
import torch
from smoe import from_pretrained
ids, places = torch.load(sys.argv[1], weights_only=True), sys.argv[2:]
torch.set_num_threads(1)
found = []
with torch.no_grad():
    for place in places:
        model = from_pretrained(place, memory=256 << 20, dtype="float32")
        found.append(model(ids).logits)
        model.offload.close()
torch.save(found, sys.argv[1])
"""
COMPILES = """
import torch
{first}
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(2)).tolist() == [2, 2]
import torch._dynamo._trace_wrapped_higher_order_op as part
assert torch._dynamo._trace_wrapped_higher_order_op is part and torch._dynamo.is_compiling() is False
frames = sys.modules["torch._dynamo.convert_frame"]
assert frames.config is torch._dynamo.config and frames.counters is torch._dynamo.utils.counters, "imported once"
import torch._dynamo.backends.registry
assert "eager" in torch._dynamo.backends.registry.list_backends(exclude_tags=None)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
assert torch.distributed.is_available() and torch.distributed.get_world_size() == 1
torch.distributed.destroy_process_group()
"""


def run(program: str, *words: object) -> str:
    line = [sys.executable, "-c", f"import sys\n{program}", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_no_family_needs_what_is_left_out(toy: Toy, tmp_path: Path) -> None:
    ids, file = torch.tensor([[5, 9, 21, 7, 90, 3, 11, 40]]), tmp_path / "numbers.pt"
    folders = [toy(family) for family in zoo.FAMILIES]
    torch.save(ids, file)
    loaded = f"print(*[name for name in {LEFT_OUT} if name in sys.modules])"
    assert run(BEFORE.format(model=str(folders[0])) + LOGITS + loaded, file, *folders).split() == []
    for family, folder, found in zip(zoo.FAMILIES, folders, torch.load(file, weights_only=True), strict=True):
        model = from_pretrained(folder, memory=256 << 20, dtype="float32")
        with torch.no_grad():
            assert torch.equal(model(ids).logits, found), family
        model.offload.close()


@pytest.mark.parametrize(
    "first",
    [
        "",
        "from torch._dynamo.utils import counters",
        "import torch._dynamo.config as config; import torch._dynamo.convert_frame; config.verbose = False",
        "import torch._dynamo.backends.registry",
        "torch._dynamo.reset()",
        "import threading; threading.Thread(target=torch._dynamo.reset).start()",
    ],
)
def test_the_compiler_works_when_it_is_used(first: str) -> None:
    run(BEFORE.format(model="demo") + COMPILES.format(first=first))


@pytest.mark.parametrize("first", ["import torch._dynamo", "import transformers"])
def test_a_program_that_has_imported_the_libraries_is_left_alone(first: str) -> None:
    run(
        f"{first}\n{BEFORE.format(model='demo')}"
        "import torch\n"
        "from transformers.utils import is_torch_distributed_available\n"
        "assert 'torch._dynamo.convert_frame' in sys.modules and is_torch_distributed_available()"
    )
