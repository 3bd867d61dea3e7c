"""Devices by name, without torch, and whether this machine may have a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
"""Device files of GPU drivers: NVIDIA's, AMD's, and that of Linux under Windows."""


class AnyDevice(Protocol):
    """The interface that torch's device objects and our `Device` have in common."""

    @property
    def type(self) -> str:
        """The type of the device: `cpu` or `cuda`."""


class Device(NamedTuple):
    """A device of this machine, described without torch."""

    type: str


CPU = Device("cpu")


def may_have_gpu() -> bool:
    """Return whether a GPU driver is installed. Only torch can find out whether the GPU is usable."""
    if sys.platform == "win32":
        return (Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32" / "nvcuda.dll").exists()
    return any(map(os.path.exists, _GPU_NODES))


def gpu_name(device: Any) -> str:
    """Return the name of a GPU."""
    import torch

    return torch.cuda.get_device_name(device)


def gpu_names() -> list[str]:
    """Return the names of the GPUs that torch can use."""
    if not may_have_gpu():
        return []
    import torch

    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
