"""What is promised on every machine, and what is adopted on some.

Bits are promised everywhere: where torch computes in another order than our kernels know, torch computes. Whether they
agree hangs on the CPU, on torch, oneDNN and MKL, and on the limits set for these, so a test that needs a kernel asks
with `needs` and is skipped, with the reason, where there is none. On the reference machine it fails instead: there a
kernel that disagrees is a kernel that is broken.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from smoe.cpu_isa import FAMILY
from smoe.kernels import jit, proof, spinning_pool
from smoe.kernels.isa import Isa

REFERENCE_CPUS = ("znver5",)
"""On these every kernel has been found to agree, with this torch:"""
REFERENCE_TORCH = "2.13.0"
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
          "SMOE_MAX_CPU_ISA")  # fmt: skip
"""Variables by which torch, oneDNN, MKL and our kernels are kept from vector extensions."""

LEFT_TO_TORCH = "not on this machine, where smoe leaves it to torch: "

_NO: Callable[..., Any] = lambda *_: False  # noqa: E731
_NONE: Callable[..., Any] = lambda *_: None  # noqa: E731
PROOFS: dict[str, dict[str, Callable[..., Any]]] = {
    "experts": {"smoe.compute.expert_math.agrees": _NO, "smoe.kernels.proof.agrees": _NO},
    "rows": {"smoe.compute.expert_math.agrees_on_rows": _NO, "smoe.kernels.proof.agrees_on_rows": _NO},
    "linears": {"smoe.fastpath.linear.part_that_agrees": _NONE, "smoe.kernels.proof.part_that_agrees": _NONE},
    "attention": {"smoe.fastpath.attention.agrees": _NO},
    "norms": {"smoe.fastpath.norm.agrees": _NO},
}
"""What `pytest --disagree` takes, by the names in `conftest.py`: one token through an expert, several, one through
another matrix, attention, RMSNorm; and where the proofs of each are."""

disagreeing: set[str] = set()
"""Kernels that this run has been told to find in disagreement with torch."""


def is_reference() -> bool:
    """Whether every kernel must agree with torch here."""
    is_limited = disagreeing or any(name in os.environ for name in LIMITS)
    cpu = "" if jit.llvm() is None else jit.llvm().get_host_cpu_name()
    return not is_limited and cpu in REFERENCE_CPUS and torch.__version__.split("+")[0] == REFERENCE_TORCH


def needs(is_there: bool, what: str) -> None:
    """Go on where `is_there`; elsewhere the test ends here, as failed on the reference machine, else as skipped."""
    if is_there:
        return
    if is_reference():
        pytest.fail(f"this is a machine on which there must be: {what}")
    pytest.skip(LEFT_TO_TORCH + what)


def holds(is_equal: bool, proof: Callable[[], bool], what: str) -> None:
    """What is promised of a kernel anywhere: its bits are torch's, or the proof says that they are not."""
    if not is_equal:
        assert not proof(), f"{what}: the bits are not torch's, and the proof does not notice"
        needs(False, what)


@functools.cache
def _multiplies(threads: int, outputs: int, columns: int, rows: int) -> bool:
    matrix = (torch.randn(outputs, columns, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16().t()
    with spinning_pool.SpinningPool(threads, several=rows > 1) as pool:
        return proof.agrees(pool, matrix) if rows == 1 else proof.agrees_on_rows(pool, matrix, rows)


def needs_products(pool: spinning_pool.SpinningPool, *shapes: tuple[int, int], rows: Sequence[int] = (1,)) -> None:
    """The test needs torch's bits of one row, or of so many, times matrices of these shapes [N, K]."""
    for outputs, columns in shapes:
        for count in rows:
            is_there = _multiplies(pool.threads, outputs, columns, count)
            needs(is_there, f"torch's order of sums for {count} rows and weights [{outputs}, {columns}]")


MACHINE_CODE = "machine code of our own (bf16 dot products, llvmlite, no limit on both)"
machine_code = pytest.mark.skipif(
    not spinning_pool.is_supported() and not is_reference(), reason=LEFT_TO_TORCH + MACHINE_CODE
)
"""Of what nothing can run without it: known before the test begins."""


def needs_machine_code() -> None:
    needs(spinning_pool.is_supported(), MACHINE_CODE)


def cells_of(isas: Sequence[Isa]) -> list[Any]:
    """A cell for each of these instruction sets that a CPU of this family may have."""
    return [
        pytest.param(isa, marks=pytest.mark.skipif(not isa.is_here, reason=f"this CPU has no {isa.name}"))
        for isa in isas
        if isa.family == FAMILY
    ]


def disagree(patch: pytest.MonkeyPatch, *kernels: str) -> None:
    """From now on the proofs say that these of `PROOFS` give other bits than torch's.

    On Intel's CPUs with AMX it is attention that does, without AVX-512 BF16 all of them.
    """
    if kernels:  # results that are stored for other loads must not be used, nor be stored for them
        patch.setenv("SMOE_DISAGREE", " ".join(sorted({*os.environ.get("SMOE_DISAGREE", "").split(), *kernels})))
    for kernel in kernels:
        for place, verdict in PROOFS[kernel].items():
            patch.setattr(place, verdict)
