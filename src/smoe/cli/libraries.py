"""The libraries that running a model takes: seconds of imports, which make 390,000 objects and hardly any garbage."""

from __future__ import annotations

import gc

from smoe.config import EngineConfig


def import_libraries(model: str, config: EngineConfig) -> None:
    """Import them without Python's search for garbage, which is a fifth of what it takes (docs/log/library.md). Raises
    `BudgetError` before that where the budget cannot hold the model."""
    from smoe.report.early_refusal import refuse_early

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        refuse_early(model, config)
        import smoe.cli.session  # noqa: F401
    finally:
        if was_enabled:
            gc.enable()
