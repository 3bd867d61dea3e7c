"""smoe: runs Mixture-of-Experts language models that do not fit in fast memory, exactly, inside a fixed memory budget.

    from smoe import from_pretrained
    model = from_pretrained("demo", memory="24MiB")

Importing this package does not import torch and transformers; the first call does.
"""

import sys

from smoe.safe_path import drop_current_folder, is_program, is_run_by_name

if is_run_by_name():
    drop_current_folder()  # before any import, because a file in the current folder could draft an imported module
if is_program():
    from smoe.early_interrupt import leave_on_interrupt

    leave_on_interrupt()  # the imports below take a tenth of a second, in which Ctrl-C would print a traceback

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

if "torch" not in sys.modules:
    # OpenMP threads that sleep while they wait leave their core to the thread that computes the other experts
    # (docs/log/memory.md). The OpenMP runtime reads this variable when torch is first imported, so it must be set here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# oneDNN, and torch's layer above it, cache one kernel per number of rows: by default 1024 kernels of at least a quarter
# of a megabyte each, for no gain in speed (docs/log/memory.md). Both variables are read at the first bf16 product.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "1")

# A library logs nothing until its user configures logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from smoe.load.pretrained import from_pretrained
    from smoe.load.tokenizer import load_tokenizer
    from smoe.runtime.cancellation import Cancellation
    from smoe.runtime.offloaded_model import OffloadedModel

__version__ = "0.1.0"
__all__ = ["Cancellation", "OffloadedModel", "__version__", "from_pretrained", "load_tokenizer"]
_PLACES = {
    "Cancellation": "smoe.runtime.cancellation",
    "OffloadedModel": "smoe.runtime.offloaded_model",
    "from_pretrained": "smoe.load.pretrained",
    "load_tokenizer": "smoe.load.tokenizer",
}
"""The module of every exported name; a module is imported when its name is first used."""


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
