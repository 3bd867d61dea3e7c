"""A device by its name, without torch, and whether this machine may have another one than its CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
"""What the drivers of GPUs put there: NVIDIA's, AMD's, and that of Linux under Windows."""


class AnyDevice(Protocol):
    """torch's, or one by its name."""

    @property
    def type(self) -> str:
        """`cpu` or `cuda`."""


class Device(NamedTuple):
    """One of this machine's."""

    type: str


CPU = Device("cpu")


def may_have_gpu() -> bool:
    """Whether a GPU's driver is here; torch knows whether there is one that it can use."""
    if sys.platform == "win32":
        return (Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32" / "nvcuda.dll").exists()
    return any(map(os.path.exists, _GPU_NODES))


def gpu_name(device: Any) -> str:
    """What a GPU is called."""
    import torch

    return torch.cuda.get_device_name(device)


def gpu_names() -> list[str]:
    """The GPUs that torch can use."""
    if not may_have_gpu():
        return []
    import torch

    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
