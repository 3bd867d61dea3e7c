"""What the kernels for GPUs become: compiled for GPUs that need not be here, by Triton and the ptxas that it brings.

    python -m bench.gpu.compiled --formats Q4_K,INT4 --tokens 1,8 --capability 80,90 [--hidden 2048] [--inner 768]

Prints a line of JSON for each kernel: registers of a thread, bytes that spill out of them, bytes of shared memory,
loads from the device's memory by their width (those of 8 bytes are addresses and routes), and how long compiling took.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smoe.formats.registry import FORMATS
from smoe.gpu_kernels.activation import Activation
from smoe.gpu_kernels.compiled import kernels_of
from smoe.gpu_kernels.source import ExpertKind, MatrixLayout, tile_for

DENSE = "bf16"
_POINTERS = {"table": "*i64", "x": "*bf16", "inner": "*fp32", "rows": "*fp32"}
_POINTERS |= {"weights": "*bf16", "order": "*i64", "out": "*bf16", "counts": "*i32"}
_NUMBERS = {"experts": "i32", "programs": "i32"}
_LOAD = re.compile(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.[a-z](\d+)\b")


def kind_of(name: str, hidden: int, inner: int, alignment: int = 16) -> ExpertKind:
    """Experts of a format, as files have them: quantised ones with gate and up apart."""
    activation = Activation("silu")
    if name == DENSE:
        return ExpertKind(
            hidden, inner, "bfloat16", (MatrixLayout(2 * inner, hidden),), MatrixLayout(hidden, inner), activation
        )
    up, down = (MatrixLayout(*shape, FORMATS[name], False, alignment) for shape in ((inner, hidden), (hidden, inner)))
    return ExpertKind(hidden, inner, "bfloat16", (up, up), down, activation)


def compiled(kind: ExpertKind, tokens: int, capability: int) -> Iterator[dict[str, Any]]:
    """The kernel of a kind, and the sum alone, for a GPU of this capability (80: A100, 90: H100)."""
    from triton import compile as compile_for
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels, tile = kernels_of(kind, tokens), tile_for(tokens)
    constants = {"WIDTH": 8, "HIDDEN": kind.hidden}
    for name in kernels._fields if tokens == 1 else ("experts_of",):
        kernel, began = getattr(kernels, name), time.perf_counter()
        names = list(kernel.arg_names)
        given = {each: (_POINTERS | _NUMBERS).get(each, "constexpr") for each in names}
        fixed = {(names.index(each),): constants[each] for each in names if each in constants}
        aligned = {(n,): [["tt.divisibility", 16]] for n, each in enumerate(names) if each in _POINTERS}
        source = ASTSource(kernel, given, constexprs=fixed, attrs=aligned)
        target = GPUTarget("cuda", capability, 32)
        made = compile_for(source, target=target, options={"num_warps": tile.warps})
        seconds = time.perf_counter() - began
        yield {"kernel": name, "seconds": round(seconds, 2), **_used(made.asm["ptx"], capability)}


def _used(ptx: str, capability: int) -> dict[str, Any]:
    import triton

    tool = "ptxas-blackwell" if capability >= 100 else "ptxas"
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    name = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [str(assembler), "-v", f"--gpu-name={name}", str(file), "-o", str(file.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    widths = Counter(int(count or 1) * int(bits) // 8 for count, bits in _LOAD.findall(ptx))

    def number(pattern: str) -> int:
        found = re.search(pattern, said)
        return int(found.group(1)) if found else 0

    return {
        "registers": number(r"Used (\d+) registers"),
        "spilled_bytes": number(r"(\d+) bytes spill stores"),
        "shared_bytes": number(r"(\d+) bytes smem"),
        "loads": {f"{width} bytes": widths[width] for width in sorted(widths)},
    }


def main() -> int:
    """0 where all were compiled."""
    parser = argparse.ArgumentParser(prog="bench.gpu.compiled", description=__doc__.split("\n")[0])
    parser.add_argument("--formats", default=",".join([DENSE, *FORMATS]))
    parser.add_argument("--tokens", default="1")
    parser.add_argument("--capability", default="90")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--alignment", type=int, default=16, help="of the matrices in their slots, in bytes")
    options = parser.parse_args()
    for name in options.formats.split(","):
        kind = kind_of(name, options.hidden, options.inner, options.alignment)
        for tokens in map(int, options.tokens.split(",")):
            for capability in map(int, options.capability.split(",")):
                for row in compiled(kind, tokens, capability):
                    print(json.dumps({"format": name, "tokens": tokens, "sm": capability, **row}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
