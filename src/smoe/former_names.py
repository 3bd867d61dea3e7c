"""Former names of settings and of their values. They work until version 0.2; each use logs the present name once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

_log = logging.getLogger(__name__)

_SETTINGS = {
    "shadow_precision": "draft_precision",
    "shadow_departure": "draft_start",
    "shadow_on": "draft_on",
    "shadow_spares": "draft_extra",
}
_VALUES = {
    ("activations", "bf16"): "dtype",
    ("prefetch", "shadow"): "draft-model",
    ("draft_on", "main"): "coordinator",
    ("prefetch_asked", "beside"): "concurrent",
}


def present_name(setting: str) -> str:
    """Return the present name of a setting."""
    if setting not in _SETTINGS:
        return setting
    _hint(setting, _SETTINGS[setting])
    return _SETTINGS[setting]


def present_value(setting: str, value: Any) -> Any:
    """Return the present name of the value of the setting `setting`, which has its present name."""
    if not isinstance(value, str) or (setting, value) not in _VALUES:
        return value
    present = _VALUES[setting, value]
    _hint(f"{setting}={value}", f"{setting}={present}")
    return present


def present_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which former names and values are replaced by the present ones."""
    named = {present_name(setting): value for setting, value in settings.items()}
    return {setting: present_value(setting, value) for setting, value in named.items()}


@cache
def _hint(former: str, present: str) -> None:
    _log.warning("`%s` is now `%s`; the former name works until version 0.2", former, present)
