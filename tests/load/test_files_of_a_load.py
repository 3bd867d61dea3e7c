"""Which files loading a model enters: counted, so that they become no more.

Would catch a load that is spread over more and more files. On other CPUs fewer kernels are tested, in fewer files.
"""

from __future__ import annotations

import sys
import threading

import pytest

from smoe import from_pretrained
from tests.entered_files import Watch

MOST_OF_A_LOAD = 122
"""Files of a load whose proofs an earlier load has made. They may only become fewer."""
OF_LOADING = ("load/", "models/", "machine/")
MOST_OF_LOADING = 47
"""Files of the packages that only prepare: they read, measure and divide."""


def entered() -> list[str]:
    watch = Watch()
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        model = from_pretrained("demo", memory="16MiB", device="cpu", context_tokens=512, prefill_tokens=256)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    model.offload.close()
    return list(watch.files)


@pytest.mark.usefixtures("proven_once")
def test_a_load_enters_no_more_files() -> None:
    """Of the embedded model. The first load also prepares what all models of a process share, and makes the proofs;
    another proof may follow when a measurement comes out otherwise."""
    entered()
    files = min((entered() for _ in range(3)), key=len)
    assert len(files) <= MOST_OF_A_LOAD, sorted(files)
    preparing = [file for file in files if file.startswith(OF_LOADING)]
    assert len(preparing) <= MOST_OF_LOADING, sorted(preparing)
