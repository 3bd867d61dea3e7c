"""The block that users post: all of its figures, and nothing that names the user.

Would catch a figure under the wrong name, a default among the settings, and a folder or a machine's name in the text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from smoe.benchmark.shared_block import shared_block
from smoe.config import EngineConfig

CIRCUMSTANCES: dict[str, Any] = {
    "model": "/home/ada/models/q30.gguf",
    "machine": {
        "processor": "AMD EPYC", "cores": 2, "memory_bytes": 24 << 30, "gpus": [], "system": "Linux x86_64",
    },
    "versions": {"smoe": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.7"},
    "threads": 2,
    "experts": 6144,
    "slot_bytes": 2 << 20,
    "memory_budget_bytes": 8 << 30,
    "context_tokens": 192,
    "resident_share": 0.424,
}  # fmt: skip
CELL: dict[str, Any] = {
    "prompt_tokens": 128,
    "new_tokens": 64,
    "batch": 1,
    "ttft_seconds": 4.1,
    "tokens_per_second": 3.27,
    "hit_ratio": 0.71,
    "bytes_read_per_token": 130 << 20,
    "floor_share": 0.62,
    "floor_bound_by": "disk",
    "rates_source": "smoe doctor",
    "waited_for_cores_share": 0.05,
}
CONFIG = EngineConfig(memory_bytes=8 << 30)
BLOCK = """\
```text
model       q30.gguf, 6144 experts in slots of 2.00 MiB
machine     AMD EPYC, 2 cores, 2 threads, 24.0 GiB of RAM, Linux x86_64
settings    memory 8.00 GiB, context 192, eviction lfu
speed       3.27 tokens/s over 64 tokens
first token 4.1 s, prompt of 128 tokens, model loaded
experts     42% resident, 71.0% were in memory, 130 MiB read per token
limit       62% reached, set by the disk (smoe doctor)
versions    smoe 0.1.0, torch 2.13.0, transformers 5.23.0
```"""


def test_every_line() -> None:
    assert shared_block(CIRCUMSTANCES, CELL, replace(CONFIG, eviction="lfu")) == BLOCK


@pytest.mark.parametrize(
    ("given", "name"),
    [("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B,"), ("./mine", "mine,"), ("~/a/b", "b,"), ("demo", "demo,")],
)
def test_models_are_named_without_their_folders(given: str, name: str) -> None:
    line = shared_block({**CIRCUMSTANCES, "model": given}, CELL, CONFIG).splitlines()[1]
    assert line.split()[1] == name


def test_what_a_cluster_is_called_is_not_said() -> None:
    text = shared_block(CIRCUMSTANCES, CELL, replace(CONFIG, cluster="attic"))
    assert "cluster" in text and "attic" not in text


def test_a_busy_machine_is_named() -> None:
    assert "34% of the time went to waiting" in shared_block(
        CIRCUMSTANCES, {**CELL, "waited_for_cores_share": 0.34}, CONFIG
    )
    assert "waiting" not in shared_block(CIRCUMSTANCES, {**CELL, "waited_for_cores_share": None}, CONFIG)


def test_what_was_not_measured_is_left_out() -> None:
    nothing = dict.fromkeys(("ttft_seconds", "tokens_per_second", "hit_ratio", "bytes_read_per_token", "floor_share"))
    text = shared_block(CIRCUMSTANCES, {**CELL, **nothing}, CONFIG)
    assert "None" not in text and "experts     42% resident\n" in text
