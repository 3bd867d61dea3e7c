"""Imports the libraries that run a model. This takes seconds and makes 390,000 objects, almost all of which stay in
use."""

from __future__ import annotations

from smoe.config import EngineConfig
from smoe.garbage import collection_paused


def import_libraries(model: str, config: EngineConfig) -> None:
    """Import the libraries, with garbage collection off, which saves a fifth of the time (docs/log/library.md).

    Raises `BudgetError` before the import if the budget cannot hold the model.
    """
    from smoe.cli.console import doing
    from smoe.report.early_refusal import refuse_early

    with doing("importing the libraries"), collection_paused():
        refuse_early(model, config)
        import smoe.cli.session  # noqa: F401
