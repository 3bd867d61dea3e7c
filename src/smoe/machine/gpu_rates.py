"""Measures the rates of a GPU: of its memory, of the link to it, and of its arithmetic."""

from __future__ import annotations

import torch

from smoe.machine.best_time import best_time

_LINK_BYTES = 256 * 2**20


def measure_link() -> float:
    """Return the rate of copies from page-locked host memory to the GPU, in bytes per second."""
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8).pin_memory()
    device = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    return _LINK_BYTES / best_time(copy, 0.5)


def measure_device_memory() -> float:
    """Return the rate at which the GPU reads its memory, in bytes per second."""
    words = torch.zeros(2**30 // 8, dtype=torch.int64, device="cuda")

    def read() -> None:
        words.sum()
        torch.cuda.synchronize()

    return 2**30 / best_time(read, 0.5)


def measure_arithmetic(device: torch.device) -> float:
    """Return the rate of a bf16 product of many rows, in operations per second. It limits the speed of prompts. Takes
    0.1 s."""
    rows, matrix = (torch.ones(size, 1024, dtype=torch.bfloat16, device=device) for size in (256, 1024))

    def multiply() -> None:
        product = torch.nn.functional.linear(rows, matrix)
        product[0, 0].item()  # wait for the result

    return 2 * 256 * 1024 * 1024 / best_time(multiply, 0.1)
