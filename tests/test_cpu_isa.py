"""Whose instruction sets a machine has, and how far kernels may go there.

Would catch: a Mac or a Windows machine of aarch64 taken for x86 by its other name, the other family's limit accepted.
"""

from __future__ import annotations

import pytest

from smoe import cpu_isa
from smoe.cpu_isa import AARCH64, X86, family_of, max_cpu_isa
from smoe.errors import ConfigError


@pytest.mark.parametrize(
    ("machine", "is_wide", "family"),
    [
        ("x86_64", True, X86),
        ("AMD64", True, X86),
        ("aarch64", True, AARCH64),
        ("arm64", True, AARCH64),
        ("ARM64", True, AARCH64),
        ("aarch64", False, X86),
        ("armv7l", True, X86),
        ("riscv64", True, X86),
    ],
)
def test_systems_have_names_of_their_own(machine: str, is_wide: bool, family: str) -> None:
    assert family_of(machine, is_wide) == family


@pytest.mark.parametrize(("family", "own", "other"), [(X86, "avx2", "neon"), (AARCH64, "neon_dotprod", "avx2")])
def test_each_family_has_limits_of_its_own(family: str, own: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_isa, "CPU_ISA", cpu_isa._LEVELS[family])
    for value, kept in ((own, own), (f" {own.upper()} ", own), ("none", "none"), ("", "all")):
        monkeypatch.setenv("SMOE_MAX_CPU_ISA", value)
        assert max_cpu_isa() == kept
    monkeypatch.setenv("SMOE_MAX_CPU_ISA", other)
    with pytest.raises(ConfigError, match=f"SMOE_MAX_CPU_ISA is '{other}'; choose one of: none, {own.split('_')[0]}"):
        max_cpu_isa()
