"""The phases that come before the work of a command that runs a model, and take seconds: they are shown.

Importing the libraries makes 390,000 objects, almost all of which stay in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from smoe.config import EngineConfig
from smoe.garbage import collection_paused, exclude_libraries


def import_libraries(model: str, config: EngineConfig | None) -> None:
    """Import the libraries, without the parts that no command uses (`without_compiler.py`), without the source of all
    models (`import_structure.py`), and with garbage collection off, which saves a fifth of the time
    (docs/log/library.md).

    Raises `BudgetError` before the import if the budget cannot hold the model. `config`: None if the command does not
    load the model within a budget.
    """
    from smoe.cli.console import doing
    from smoe.cli.import_structure import use_stored_structure
    from smoe.cli.without_compiler import leave_out_compiler
    from smoe.report.early_refusal import refuse_early

    with doing("importing the libraries"), collection_paused():
        if config is not None:
            refuse_early(model, config)
        use_stored_structure()
        leave_out_compiler()
        import smoe.cli.session  # noqa: F401

        exclude_libraries()


@contextmanager
def reading(what: str, model: str) -> Iterator[None]:
    """Show that a part of the model's files is read. Nothing is shown for a model of the hub, because a download has
    bars of its own."""
    from smoe.cli.console import doing
    from smoe.models.files import local_place

    if local_place(model) is None:
        yield
        return
    with doing(f"reading the {what} of {model}"):
        yield


def token_ids(model: str, revision: str | None, documents: Sequence[str], tokens: int | None = None) -> list[int]:
    """Return the tokens of documents, one document after the other; at most `tokens` of them."""
    import transformers

    from smoe.cli.console import doing
    from smoe.load.tokenizer import load_tokenizer

    transformers.logging.set_verbosity_error()  # a text longer than the model's context is no fault here
    with reading("tokenizer", model):
        tokenizer = load_tokenizer(model, revision)
    with doing("reading the text"):
        return [token for document in documents for token in tokenizer(document)["input_ids"]][:tokens]
