"""Chooses the device on which a model computes, as far as possible without importing torch."""

from __future__ import annotations

import re

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.machine.device import CPU, AnyDevice, may_have_gpu

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
    from smoe.load.device import choose_device

    return choose_device(config)


def no_device(given: str) -> ConfigError:
    """Return the error for a device name that is invalid."""
    return ConfigError.out_of_bounds("device", given, "auto, cpu, cuda, a numbered GPU such as cuda:1, or emulated")
