"""Finds what could be improved on a machine, and gives advice: the second half of `smoe doctor`."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Literal

import psutil
import torch
from huggingface_hub import constants

from smoe.cpu_isa import max_cpu_isa
from smoe.errors import ConfigError
from smoe.kernels.isa import widest
from smoe.kernels.jit import is_available
from smoe.kernels.spinning_pool import is_supported
from smoe.machine.available_memory import least_room, less_margin
from smoe.machine.macos_memory import pressure
from smoe.machine.measure import Profile
from smoe.machine.processor import BUSY_SHARE, waited_share
from smoe.memory.expert_files import direct_name
from smoe.units import format_bytes

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SLOW_ARITHMETIC = 0.4
"""The fraction of the memory bandwidth below which arithmetic limits the speed of resident experts."""
_SLOW_DISK = 0.5e9
_TIGHT_MEMORY_SHARE = 0.5
_LITTLE_DISK_BYTES = 20 * 2**30


@dataclass(frozen=True)
class Finding:
    """One fact about the machine, how good it is, and advice if it could be better."""

    grade: Literal["good", "better", "bad"]
    text: str
    advice: str = ""


def models_folder(asked: Path | None) -> Path:
    """Return the folder whose disk is measured: the folder `asked`, else the hub's cache folder or its closest existing
    parent.

    If neither the cache folder nor a parent is writable, return the folder for temporary files.
    """
    if asked is not None:
        if not asked.is_dir():
            what = "is a file" if asked.exists() else "is not there"
            message = f"`folder` is {str(asked)!r}, which {what}; give the folder in which models are stored"
            raise ConfigError(message, setting="folder", given=str(asked), allowed="a folder")
        return asked
    cache = Path(constants.HF_HUB_CACHE)
    return next((p for p in [cache, *cache.parents] if p.is_dir() and _takes_files(p)), Path(gettempdir()))


def _takes_files(folder: Path) -> bool:
    """Return whether a file can be created in a folder. (Permissions alone would allow /proc, and for root every
    folder.)"""
    try:
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def examine(profile: Profile, folder: Path) -> list[Finding]:
    """Return all findings about a machine, in the order of the memory hierarchy."""
    found = [
        _gpu(),
        _free_memory(profile),
        _pressure(),
        _huge_pages(),
        _direct_io(profile, folder),
        _disk_rate(profile),
        _disk_room(folder),
        _arithmetic(profile),
        _kernel(),
        _waiting(),
        _busy(),
    ]
    return [finding for finding in found if finding is not None]


def _kernel() -> Finding | None:
    if torch.cuda.is_available():
        return None
    if is_supported():
        return Finding("good", "bf16 experts are multiplied by smoe's own kernels (AVX-512 BF16)")
    if max_cpu_isa() != "all":
        return Finding("good", f"smoe's own CPU kernels are limited by SMOE_MAX_CPU_ISA={max_cpu_isa()}: {_without()}")
    if not is_available():
        return Finding("better", "smoe's own CPU kernels cannot be compiled", "pip install llvmlite")
    return Finding("good", f"this CPU has no AVX-512 BF16: {_without()}")


def _without() -> str:
    """Return a text that names the code that multiplies bf16 experts (torch or smoe's kernel), for a CPU on which
    smoe's kernels cannot have torch's bits."""
    isa = widest()
    if isa is None:
        return "torch multiplies"
    return f"bf16 is multiplied by torch, or by smoe's own kernel ({isa.name}), equal up to rounding, if that is faster"


def _busy() -> Finding | None:
    """Return a finding if other programs used the processor cores during the measurement, else None."""
    waited = waited_share()
    if waited is None or waited < BUSY_SHARE:
        return None
    text = f"measuring waited {waited:.0%} of its time for a core that other programs had: the rates are too low"
    return Finding("better", text, "run smoe doctor again when other programs are idle")


def _gpu() -> Finding:
    if torch.cuda.is_available():
        return Finding("good", f"GPU: {torch.cuda.get_device_name(0)}")
    if torch.version.cuda is None:
        return Finding(
            "good",
            "no GPU in use: this PyTorch is built for the CPU",
            "if there is a GPU, install a PyTorch built for it; smoe then uses it by itself",
        )
    return Finding("better", "PyTorch is built for CUDA but finds no usable GPU", "check the driver with nvidia-smi")


def _free_memory(profile: Profile) -> Finding:
    available, total = int(psutil.virtual_memory().available), int(profile.machine["memory_bytes"])
    room, why = least_room(), "more memory means fewer reads from disk"
    takes = f"without --memory, smoe takes at most {format_bytes(less_margin(room.nbytes))}"
    if room.nbytes < available:
        is_tight = room.nbytes < total * _TIGHT_MEMORY_SHARE
        text = f"{format_bytes(room.nbytes)} of {format_bytes(total)} RAM for smoe: {room.source}; {takes}"
        return Finding("better" if is_tight else "good", text, f"{room.advice}: {why}" if is_tight else "")
    text = f"{format_bytes(available)} of {format_bytes(total)} RAM available; {takes}"
    if available < total * _TIGHT_MEMORY_SHARE:
        return Finding("better", text, f"{room.advice}: {why}")
    return Finding("good", text)


def _pressure() -> Finding | None:
    found = pressure() if sys.platform == "darwin" else None
    if found is None:
        return None
    text = f"macOS says that memory is short ({found}): it compresses and swaps memory, also that of experts"
    return Finding("better", text, "close other programs, or give smoe less: a slot that is swapped is read twice")


def _huge_pages() -> Finding | None:
    try:
        chosen = _HUGE_PAGES.read_text(encoding="utf8")
    except OSError:
        return None
    if "[never]" in chosen:
        return Finding(
            "better",
            "transparent huge pages are off: reads past the page cache come in many small pieces",
            f"as root: echo madvise > {_HUGE_PAGES}",
        )
    return Finding("good", "transparent huge pages are on for programs that request them, as smoe does")


def _direct_io(profile: Profile, folder: Path) -> Finding:
    if profile.disk_is_direct:
        return Finding("good", f"experts can be read past the page cache ({direct_name()})")
    if sys.platform == "win32":
        return Finding(
            "better",
            "on Windows experts are read through the system's cache, one read at a time for each file",
            "run smoe on Linux or under WSL for faster reads",
        )
    return Finding(
        "better",
        f"the file system of {folder} does not read past the page cache ({direct_name()})",
        f"put models on a local {_file_systems()} disk; until then the page cache competes with the budget for RAM",
    )


def _file_systems() -> str:
    return "APFS" if sys.platform == "darwin" else "ext4, xfs or btrfs"


def _disk_rate(profile: Profile) -> Finding:
    rate = profile.disk_bytes_per_second
    if rate < _SLOW_DISK:
        return Finding(
            "bad",
            f"the disk gives {rate / 1e9:.2g} GB/s: loading missing experts will be slow",
            "put models on an NVMe SSD (smoe doctor --folder PATH measures another disk), or give more memory",
        )
    return Finding("good", f"the disk gives {rate / 1e9:.2g} GB/s at expert size")


def _disk_room(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    text = f"{format_bytes(free)} free on the disk of {folder}"
    if free < _LITTLE_DISK_BYTES:
        return Finding("better", text, "MoE checkpoints take 10 to 100 GiB and more; set HF_HOME to a larger disk")
    return Finding("good", text)


def _arithmetic(profile: Profile) -> Finding:
    share = profile.expert_bytes_per_second / profile.memory_bytes_per_second
    text = f"experts in memory compute at {share:.0%} of the rate at which memory can be read"
    if share < _SLOW_ARITHMETIC:
        return Finding(
            "better", text, "try other --threads (the number of physical cores is best), and measure on an idle machine"
        )
    return Finding("good", text)


def _waiting() -> Finding:
    policy = os.environ.get("OMP_WAIT_POLICY", "").upper()
    if policy == "PASSIVE":
        return Finding("good", "waiting threads sleep (OMP_WAIT_POLICY=PASSIVE)")
    return Finding(
        "better",
        f"waiting threads spin (OMP_WAIT_POLICY={policy or 'unset'}) and take the core from working ones",
        "unset OMP_WAIT_POLICY, or set it to PASSIVE",
    )
