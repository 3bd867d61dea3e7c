"""Refuses a budget that cannot hold a model, and an empty prompt, before the libraries that would load the model are
imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.load.device import planned_device
from smoe.load.ledger import fit_context, make_ledger, open_if_here, outside_budget
from smoe.machine.device import CPU
from smoe.memory.checkpoint_json import read_object
from smoe.models.files import local_place
from smoe.models.model_sizes import by_arithmetic
from smoe.models.plain_config import UndescribedError
from smoe.policy.budget import minimum_bytes
from smoe.policy.registry import predictor_kind

_WITHOUT_TOKENS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes of transformers that have no special tokens unless the files name some."""


def refuse_early(model: str, config: EngineConfig) -> None:
    """Raise `BudgetError` if a local model does not fit its budget: the same error as loading would raise, but sooner.

    The check covers only model families and settings that need no library. Workers and low-precision copies are checked
    when the model is loaded. If the budget is sufficient, weight files are not read.
    """
    device, place = planned_device(config), local_place(model)
    asks_for_more = config.cluster is not None or config.has_low or config.precision != "auto"
    asks_for_more |= predictor_kind(config.prefetch).has_weights  # these take a part of the budget
    if config.memory_bytes is None or asks_for_more or place is None:
        return
    if device != CPU or config.device == EMULATED:
        return
    try:
        checkpoint, spec = by_arithmetic(place, config)
        outside = outside_budget(spec, config)
        spec, fitted, _ = fit_context(spec, config, lambda each: each.demand(config, each.least_slot_bytes()), outside)
        others = sum(outside.values()) if config.count == "process" else 0
        if minimum_bytes(spec.demand(fitted, spec.least_slot_bytes())) + others <= config.memory_bytes:
            return
        store = open_if_here(checkpoint, spec, CPU)
    except UndescribedError:
        return
    make_ledger(spec, fitted, CPU, store, outside=outside)


def refuse_empty_prompts(model: str, prompts: Sequence[str]) -> None:
    """Raise `ConfigError` for an empty prompt if the files of a local model show that it has no token with which a text
    begins: the same error as the tokenizer would cause, but sooner."""
    empty = [number for number, prompt in enumerate(prompts, start=1) if not prompt]
    place = local_place(model)
    if empty and place is not None and _begins_without_token(place):
        raise ConfigError.empty_prompt(empty[0], "")


def _begins_without_token(place: Path) -> bool:
    """Return whether the files in a folder show that its tokenizer turns an empty text into no token. False if only the
    tokenizer itself can show it."""
    files = [place / name for name in ("tokenizer_config.json", "tokenizer.json")]
    if not all(path.is_file() for path in files) or (place / "special_tokens_map.json").exists():
        return False
    settings, tokenizer = map(read_object, files)
    has_none = settings.get("tokenizer_class") in _WITHOUT_TOKENS or "bos_token" in settings
    after = tokenizer.get("post_processor") or {"type": "ByteLevel"}
    adds_nothing = after["type"] in ("ByteLevel", "TemplateProcessing") and not after.get("special_tokens")
    return has_none and settings.get("bos_token") is None and adds_nothing
