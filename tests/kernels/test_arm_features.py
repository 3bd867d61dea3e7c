"""What two systems say of a CPU of aarch64, played by their own functions' stand-ins.

Would catch: a bit or a name of another feature, and instructions used that nobody said were there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from smoe.kernels import arm_features
from smoe.kernels.arm_features import arm_features as found

AT_HWCAP, ATOMICS, ASIMDDP = 16, 1 << 8, 1 << 20
"""Linux: asm/hwcap.h."""
NAMES = {"lse": b"hw.optional.arm.FEAT_LSE", "dotprod": b"hw.optional.arm.FEAT_DotProd"}
SUBSETS: Sequence[tuple[str, ...]] = ((), ("lse",), ("dotprod",), ("lse", "dotprod"))


def on(platform: str, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_features.sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)


class GetAuxVal(SimpleNamespace):
    """With room for the types of its arguments, as a library's function has."""

    def __call__(self, which: int) -> int:
        return int(self.bits) if which == AT_HWCAP else 0


@pytest.mark.parametrize("has", SUBSETS)
def test_linux(has: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    others = ~(ATOMICS | ASIMDDP) & 0xFFFFFFFF  # all else is there: a wrong bit would be seen
    bits = others | ATOMICS * ("lse" in has) | ASIMDDP * ("dotprod" in has)
    on("linux", SimpleNamespace(getauxval=GetAuxVal(bits=bits)), monkeypatch)
    assert found() == {"neon": True, "lse": "lse" in has, "dotprod": "dotprod" in has}


@pytest.mark.parametrize("has", SUBSETS)
def test_macos(has: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that an older system does not know is refused, and its value left alone."""

    def sysctlbyname(name: bytes, value: Any, size: Any, new: None, length: Any) -> int:
        known = {NAMES[each] for each in has}
        if name in known:
            value._obj.value = 1
        return 0 if name in known else -1

    on("darwin", SimpleNamespace(sysctlbyname=sysctlbyname), monkeypatch)
    assert found() == {"neon": True, "lse": "lse" in has, "dotprod": "dotprod" in has}


def test_what_another_system_does_not_say_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_features.sys, "platform", "win32")
    assert found() == {"neon": True, "lse": False, "dotprod": False}
