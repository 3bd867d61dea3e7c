"""Compile with LLVM in a separate Python process: `main` is its entry point, and `jit.py` starts it.

    calling process                  this process
    {"source", "features"} --->    LLVM text in, an object file for this CPU out
    an object file         <---

The compiling process takes 90 MiB for a third of a second, and the calling process none of it. A request without a
source returns the CPU's features.
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
"""The timeout for a request."""


def host_features() -> dict[str, bool]:
    """Return LLVM's map of this CPU's features, found by a separate process; empty without LLVM."""
    found: dict[str, bool] = json.loads(_asked({}))
    return found


def compiled(source: str, features: str) -> bytes:
    """Compile LLVM text in a separate process and return the object file, in position-independent code.

    Raises `RuntimeError` with LLVM's message if the text is invalid.
    """
    return _asked({"source": source, "features": features})


def features_here(llvm: Any) -> dict[str, bool]:
    """Return this CPU's features by LLVM's names; on aarch64 those that kernels need, read from the system."""
    return arm_features() if FAMILY == AARCH64 else dict(llvm.get_host_cpu_features())


def parsed(llvm: Any, source: str, features: str, triple: str = "", **options: str) -> tuple[Any, Any]:
    """Parse and verify LLVM text; return the module and the target machine, using LLVM in this process.

    `triple` names another machine than this one. On aarch64 the target is any CPU with these features, so that all run
    the code that was tested.
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
    """Return an object file in position-independent code, compiled in this process."""
    module, machine = parsed(llvm, source, features, triple, reloc="pic", codemodel="small")
    found: bytes = machine.emit_object(module)
    return found


def _asked(request: dict[str, str]) -> bytes:
    """Send a request to a new compiling process and return its result."""
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
    """Handle the request on stdin."""
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
