"""Chooses the device on which a model computes."""

from __future__ import annotations

import torch

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.load.planned_device import no_device, planned_device
from smoe.machine.device import CPU


def choose_device(config: EngineConfig) -> torch.device:
    """Return the configured device. With `auto`: the first GPU if there is one, else the CPU. Raise `ConfigError` if
    the configured device cannot be used."""
    if planned_device(config) == CPU:
        return torch.device("cpu")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise no_device(config.device) from error
    if not torch.cuda.is_available():
        raise ConfigError(
            f"`device` is {config.device}, and no CUDA device is usable here; leave `device` out to run on the CPU",
            setting="device",
            given=config.device,
            allowed="cpu or emulated on this machine",
        )
    if (device.index or 0) >= torch.cuda.device_count():
        allowed = ", ".join(f"cuda:{number}" for number in range(torch.cuda.device_count()))
        raise ConfigError.no_choice("device", config.device, ["cpu", allowed, "emulated"])
    return device
