"""Makes a short block of text that tells how fast a model ran on a machine, to be posted. The block names the model by
the last part of its path, and contains no user, host or folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import PurePath
from typing import Any

from smoe.benchmark.cells import TableCell
from smoe.config import EngineConfig
from smoe.machine.processor import BUSY_SHARE
from smoe.units import format_bytes, format_rate, format_seconds

SHARED_CELL = TableCell(128, 64, 1)
"""The measurement whose results are in the block of text."""
_SAID_APART = ("memory_bytes", "count", "resident_share", "context_tokens", "threads", "max_sequences")
_PRIVATE = ("cluster", "draft_on", "cache_records")
"""Settings whose values are names of the user's machines and files. The block only mentions that they are set."""


def shared_block(circumstances: Mapping[str, Any], cell: Mapping[str, Any], config: EngineConfig) -> str:
    """Return the block of text to be posted. `circumstances` and `cell`: parts of the output of `smoe bench --json`;
    `config`: the engine's settings."""
    versions, prompt = circumstances["versions"], cell["prompt_tokens"]
    speed, first = cell["tokens_per_second"], cell["ttft_seconds"]
    rows = {
        "model": _model(circumstances),
        "machine": _machine(circumstances["machine"], circumstances["threads"]),
        "settings": ", ".join(_settings(circumstances, config)),
        "speed": "-" if speed is None else f"{format_rate(speed)} over {cell['new_tokens']} tokens",
        "first token": "-" if first is None else f"{format_seconds(first)}, prompt of {prompt} tokens, model loaded",
        "experts": _experts(circumstances["resident_share"], cell),
        "limit": _limit(cell),
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("smoe", "torch", "transformers")),
    }
    waited = cell["waited_for_cores_share"]
    if waited is not None and waited >= BUSY_SHARE:
        rows["busy"] = f"other programs used this machine: {waited:.0%} of the time went to waiting for a core"
    lines = [f"{name:<12}{value}" for name, value in rows.items()]
    return "\n".join(["```text", *lines, "```"])


def _model(circumstances: Mapping[str, Any]) -> str:
    """Return a model's name without folders: a hub id unchanged, or the last part of a path."""
    given = str(circumstances["model"])
    is_hub_id = given.count("/") == 1 and not PurePath(given).is_absolute() and not given.startswith((".", "~"))
    name = given if is_hub_id else PurePath(given).name
    return f"{name}, {circumstances['experts']} experts in slots of {format_bytes(circumstances['slot_bytes'])}"


def _machine(machine: Mapping[str, Any], threads: int) -> str:
    parts = [machine["processor"], *machine["gpus"], f"{machine['cores']} cores, {threads} threads"]
    return ", ".join([*parts, f"{format_bytes(machine['memory_bytes'])} of RAM", machine["system"]])


def _settings(circumstances: Mapping[str, Any], config: EngineConfig) -> list[str]:
    """Return a text with the memory budget and every setting that differs from its default."""
    found = [
        f"memory {format_bytes(circumstances['memory_budget_bytes'])}",
        f"context {circumstances['context_tokens']}",
    ]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in _SAID_APART or value == field.default:
            continue
        found.append(field.name if field.name in _PRIVATE else f"{field.name} {value}")
    return found


def _experts(resident_share: float, cell: Mapping[str, Any]) -> str:
    share = f"{resident_share:.0%} resident"
    if cell["hit_ratio"] is None or cell["bytes_read_per_token"] is None:
        return share
    return (
        f"{share}, {cell['hit_ratio']:.1%} were in memory, {format_bytes(cell['bytes_read_per_token'])} read per token"
    )


def _limit(cell: Mapping[str, Any]) -> str:
    if cell["floor_share"] is None:
        return "-"
    return f"{cell['floor_share']:.0%} reached, set by the {cell['floor_bound_by']} ({cell['rates_source']})"
