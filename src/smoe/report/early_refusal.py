"""Refuses what cannot be loaded, such as a budget that cannot hold a model, a packed file that is missing, and an empty
prompt, before the libraries that would load the model are imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.load.check_cluster import check_cluster
from smoe.load.device import planned_device
from smoe.load.ledger import fit_context, make_ledger, open_if_here, outside_budget
from smoe.machine.device import CPU
from smoe.memory.checkpoint_json import read_object
from smoe.models.described import described_at
from smoe.models.family_outline import plain_config
from smoe.models.files import local_place
from smoe.models.finish_spec import choose_context
from smoe.models.library_names import refuse_unknown_family
from smoe.models.model_sizes import by_arithmetic
from smoe.models.packed import not_packed, pack_path
from smoe.models.plain_config import UndescribedError
from smoe.policy.budget import minimum_bytes
from smoe.policy.registry import predictor_kind

_WITHOUT_TOKENS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes of transformers that have no special tokens unless the files name some."""


def refuse_early(model: str, config: EngineConfig) -> None:
    """Raise the error that loading would raise, but sooner: for a cluster that does not exist; and if the model is
    local, for files that are missing or of another kind, for a family that transformers lacks, for a context that the
    model does not have, for a precision in which it is not packed, and for a budget that does not hold it.

    The other checks cover only model families and settings that need no library. If the budget is sufficient, weight
    files are not read.
    """
    check_cluster(config)
    place = local_place(model)
    if place is None:
        return
    try:
        described = described_at(place)
        choose_context(plain_config(*described.fields()), config)
        if not described.has_weights():
            described.tensors()  # raises the error
        _refuse_missing_packs(place, config)
        if config.memory_bytes is not None and _decides_alone(config):
            _refuse_budget(place, config, config.memory_bytes)
    except UndescribedError:
        if place.is_dir():
            refuse_unknown_family(place / "config.json", read_object(place / "config.json"))


def _refuse_missing_packs(place: Path, config: EngineConfig) -> None:
    """Raise `UnpreparedError` if the packed file of a precision is missing."""
    whole = {} if config.precision == "auto" else {"precision": config.precision}
    low = {"low_precision": config.low_precision} if config.has_low else {}
    for setting, precision in (whole | low).items():
        if not pack_path(place, precision).exists():
            raise not_packed(place, precision, setting)


def _decides_alone(config: EngineConfig) -> bool:
    """Return whether the model's memory can be computed from its headers and the settings alone. It cannot with
    workers, low-precision copies, packs and predictors, which are checked when the model is loaded."""
    is_plain = config.cluster is None and not config.has_low and config.precision == "auto"
    is_here = config.device != EMULATED and planned_device(config) == CPU
    return is_plain and is_here and not predictor_kind(config.prefetch).has_weights


def _refuse_budget(place: Path, config: EngineConfig, memory_bytes: int) -> None:
    """Raise `BudgetError` if the model does not fit its budget."""
    checkpoint, spec = by_arithmetic(place, config)
    outside = outside_budget(spec, config)
    spec, fitted, _ = fit_context(spec, config, lambda each: each.demand(config, each.least_slot_bytes()), outside)
    others = sum(outside.values()) if config.count == "process" else 0
    if minimum_bytes(spec.demand(fitted, spec.least_slot_bytes())) + others > memory_bytes:
        make_ledger(spec, fitted, CPU, open_if_here(checkpoint, spec, CPU), outside=outside)


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
