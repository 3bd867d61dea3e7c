"""Which files loading a model enters: counted, so that they become no more.

Would catch a load that is spread over more and more files. On other CPUs fewer kernels are tested, in fewer files.
"""

from __future__ import annotations

import sys
import threading

from smoe import from_pretrained
from tests.entered_files import Watch

MOST_OF_A_LOAD = 131
"""Files, those of the tests of kernels among them: 124 on a CPU with AVX-512 BF16, 131 with AVX2. They may only become
fewer."""
OF_LOADING = ("load/", "models/", "machine/")
MOST_OF_LOADING = 52
"""Files of the packages that only prepare: they read, measure and divide."""


def test_a_load_enters_no_more_files() -> None:
    """The second load of the embedded model: the first one also prepares what all models of a process share."""
    watch = Watch()
    for _ in range(2):
        watch.files = {}
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            model = from_pretrained("demo", memory="15MiB", device="cpu", context_tokens=512, prefill_tokens=256)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        model.offload.close()
    assert len(watch.files) <= MOST_OF_A_LOAD, sorted(watch.files)
    preparing = [file for file in watch.files if file.startswith(OF_LOADING)]
    assert len(preparing) <= MOST_OF_LOADING, sorted(preparing)
