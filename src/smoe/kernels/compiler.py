"""Compiles LLVM text in a separate Python process, whose entry point is `main`. `jit.py` calls the functions here.

    calling process                   compiling process
    {"source", "features"}    --->    compiles LLVM text for this CPU
    an object file            <---

The compiling process takes 90 MiB for a third of a second, so the calling process need not. A request without a source
returns the CPU's features.
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
    """Return whether this CPU has each of LLVM's features, found out by a separate process. Empty without LLVM."""
    found: dict[str, bool] = json.loads(_asked({}))
    return found


def compiled(source: str, features: str) -> bytes:
    """Return the object file that a separate process compiles from LLVM text, in position-independent code.

    Raises `RuntimeError` with LLVM's message if the text is invalid.
    """
    return _asked({"source": source, "features": features})


def features_here(llvm: Any) -> dict[str, bool]:
    """Return, by LLVM's names, whether this CPU has each feature, found out in this process. On aarch64 only the
    features that kernels need are included, as the operating system reports them."""
    return arm_features() if FAMILY == AARCH64 else dict(llvm.get_host_cpu_features())


def parsed(llvm: Any, source: str, features: str, triple: str = "", **options: str) -> tuple[Any, Any]:
    """Return the module and the target machine for LLVM text, after verifying it, with LLVM in this process.

    `triple` names another machine than this one. On aarch64 the target is any CPU with these features, so that all CPUs
    run the code that was tested.
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
    """Return an object file with position-independent code, compiled in this process."""
    module, machine = parsed(llvm, source, features, triple, reloc="pic", codemodel="small")
    found: bytes = machine.emit_object(module)
    return found


def _asked(request: dict[str, str]) -> bytes:
    """Send a request to a new compiling process, and return its output."""
    done = subprocess.run(
        module_line("smoe.kernels.compiler"),
        input=json.dumps(request).encode(),
        capture_output=True,
        timeout=_SECONDS,
        cwd=WORKING_FOLDER,
        env=child_environment(),
    )
    if done.returncode:
        raise RuntimeError(
            f"LLVM could not compile smoe's kernels: {done.stderr.decode(errors='replace').strip()[-2000:]}"
        )
    return done.stdout


def main() -> None:
    """Handle the request that stdin contains, and write the result to stdout."""
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
