"""Weights beside the experts. Would catch a default dtype that two threads, each building a model, leave behind for the
whole process: what is made without a dtype is then too small for what is written to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from smoe.models.read_spec import read_spec
from smoe.presets import configure


def test_threads_that_build_models_leave_the_default_dtype_alone(toy: Callable[..., Path]) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16)

    def build() -> None:
        for _ in range(6):
            read_spec(folder, configure(context_tokens=64))

    together = [threading.Thread(target=build) for _ in range(4)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    assert torch.get_default_dtype() is torch.float32
