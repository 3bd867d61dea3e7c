"""Chooses the device on which a model computes, as far as possible without importing torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.machine.device import CPU, AnyDevice, may_have_gpu

if TYPE_CHECKING:
    import torch

_NAMES = re.compile(r"(cpu|cuda)(:\d+)?")


def planned_device(config: EngineConfig) -> AnyDevice | None:
    """Return the CPU if it is configured or the only possible device. Return None if torch must decide.

    Raises `ConfigError` if the configured device name is invalid.
    """
    if config.device == EMULATED or (config.device == "auto" and not may_have_gpu()):
        return CPU
    if config.device != "auto" and not _NAMES.fullmatch(config.device):
        raise no_device(config.device)
    return CPU if config.device.startswith("cpu") else None


def device_for(config: EngineConfig) -> AnyDevice:
    """Return the configured device. With `auto`: the first GPU if there is one, else the CPU. torch is imported only if
    there may be a GPU."""
    planned = planned_device(config)
    if planned is not None:
        return planned
    return choose_device(config)


def no_device(given: str) -> ConfigError:
    """Return the error for a device name that is invalid."""
    return ConfigError.out_of_bounds("device", given, "auto, cpu, cuda, a numbered GPU such as cuda:1, or emulated")


def choose_device(config: EngineConfig) -> torch.device:
    """Return the configured device. With `auto`: the first GPU if there is one, else the CPU. Raise `ConfigError` if
    the configured device cannot be used."""
    import torch  # not at the top: commands that need no model do not import it

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
