"""A process that compiles with LLVM and ends: `main` here, in a Python of its own, which `jit.py` starts.

    asker                          this process
    {"source", "features"} --->    LLVM's language in, an object file of this CPU's machine code out
    an object file         <---

It takes 90 MiB for a third of a second, and the calling process none of it. Without a source it says what this CPU has.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from smoe.cpu_isa import AARCH64, FAMILY
from smoe.kernels.arm_features import arm_features
from smoe.safe_path import WORKING_FOLDER, child_environment, module_line

_SECONDS = 60.0
"""Within which it must have answered."""


def host_features() -> dict[str, bool]:
    """LLVM's map of this CPU's extensions, by a process of its own; empty where there is no LLVM."""
    found: dict[str, bool] = json.loads(_asked({}))
    return found


def compiled(source: str, features: str) -> bytes:
    """An object file of machine code that may lie anywhere in memory, by a process of its own. Raises `RuntimeError`
    with what LLVM says where the text is wrong."""
    return _asked({"source": source, "features": features})


def features_here(llvm: Any) -> dict[str, bool]:
    """The extensions of this CPU by LLVM's names; of aarch64 those that our kernels ask for, as the system says it."""
    return arm_features() if FAMILY == AARCH64 else dict(llvm.get_host_cpu_features())


def parsed(llvm: Any, source: str, features: str, triple: str = "", **options: str) -> tuple[Any, Any]:
    """A module in LLVM's language, looked at, and the machine that it is for; by LLVM as it is loaded here.

    `triple`: LLVM's name of another machine than this. Of aarch64 it is any CPU with these features: what was tried on
    one, or emulated, is what all of them run.
    """
    if triple:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple(triple)
    else:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
    cpu = "generic" if triple or FAMILY == AARCH64 else llvm.get_host_cpu_name()
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3, **options)
    module = llvm.parse_assembly(source)
    module.verify()
    return module, machine


def object_file(llvm: Any, source: str, features: str, triple: str = "") -> bytes:
    """Machine code that may lie anywhere in memory."""
    module, machine = parsed(llvm, source, features, triple, reloc="pic", codemodel="small")
    found: bytes = machine.emit_object(module)
    return found


def _asked(request: dict[str, str]) -> bytes:
    """The answer of a process of its own."""
    done = subprocess.run(
        module_line("smoe.kernels.compiler"),
        input=json.dumps(request).encode(),
        capture_output=True,
        timeout=_SECONDS,
        cwd=WORKING_FOLDER,
        env=child_environment(),
    )
    if done.returncode:
        raise RuntimeError(f"LLVM has failed: {done.stderr.decode(errors='replace').strip()[-2000:]}")
    return done.stdout


def main() -> None:
    """Answer the request on stdin."""
    request = json.load(sys.stdin)
    try:
        import llvmlite.binding as llvm
    except ImportError:
        llvm = None
    if "source" not in request:
        answer = json.dumps({} if llvm is None else features_here(llvm)).encode()
    else:
        answer = object_file(llvm, request["source"], request["features"])
    sys.stdout.buffer.write(answer)
