"""Which device a model computes on."""

from __future__ import annotations

import torch

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.errors import ConfigError


def choose_device(config: EngineConfig) -> torch.device:
    """The device asked for, else the first GPU, else the CPU."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == EMULATED:
        return torch.device("cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise _no_device(config.device) from error
    if device.type not in ("cpu", "cuda"):
        raise _no_device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"`device` is {config.device}, and no CUDA device is usable here; leave `device` out to run on the CPU",
            setting="device",
            given=config.device,
            allowed="cpu or emulated on this machine",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        allowed = ", ".join(f"cuda:{number}" for number in range(torch.cuda.device_count()))
        raise ConfigError.no_choice("device", config.device, ["cpu", allowed, "emulated"])
    return device


def _no_device(given: str) -> ConfigError:
    return ConfigError.out_of_bounds("device", given, "auto, cpu, cuda, a numbered GPU such as cuda:1, or emulated")
