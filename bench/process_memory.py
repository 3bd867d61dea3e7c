"""What the whole process holds beside the budget: after imports, loaded, after a short request, after long ones.

    python -m bench.process_memory [--case demo-20MiB ...] [--soak 1000] [--dtype bfloat16] [--out FILE]

Every case runs in a process of its own, on the embedded model. Resident memory is split as the system does: `anonymous`
and `file` (code of libraries). The bar is that from the first short request on the process grows by at most 64 MiB, and
over a soak of random requests not at all once the first have passed. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import smoe  # before torch, for which it sets how threads wait and how many kernels are kept

CASES: dict[str, dict[str, Any]] = {
    "demo-20MiB": {"memory": "20MiB", "context": 512, "prompts": [480, 470, 460]},
    "demo-48MiB": {"memory": "48MiB", "context": 1024, "prompts": [900, 900, 900]},
    "demo-soak": {"memory": "64MiB", "context": 1024, "prompts": [900, 900, 900]},
    "demo-lending-soak": {"memory": "30MiB", "context": 1024, "prompts": [900, 900, 900]},
}
_MOST_ROWS = 4
_NEW_TOKENS = 2
_SHORT = 8
_MIB = 2**20
_SETTINGS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def resident() -> dict[str, float]:
    """MiB of this process by kind."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split()[0].rstrip(":"): int(line.split()[1]) for line in lines}
    anonymous, whole = kib["Anonymous"] / 1024, kib["Rss"] / 1024
    return {"whole": round(whole, 1), "anonymous": round(anonymous, 1), "file": round(whole - anonymous, 1)}


def run_case(name: str, soak: int, dtype: str) -> dict[str, Any]:
    """One case, in this process."""
    import torch

    import smoe.load.build  # noqa: F401 - so that the first reading has all imports
    from smoe import from_pretrained

    case = CASES[name]
    stages = [("imports", resident())]
    model: Any = from_pretrained("demo", memory=case["memory"], context_tokens=case["context"], dtype=dtype)
    stages.append(("loaded", resident()))
    dice = random.Random(0)
    torch.manual_seed(0)

    def request(rows: int, tokens: int) -> None:
        ids = torch.randint(1, 4096, (rows, tokens))
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NEW_TOKENS, do_sample=False)

    request(1, _SHORT)
    stages.append(("first short request", resident()))
    for tokens in case["prompts"]:
        request(1, tokens)
        stages.append((f"prompt of {tokens}", resident()))
    for number in range(1, soak + 1 if name.endswith("soak") else 1):
        rows = dice.randint(1, _MOST_ROWS)
        request(rows, dice.randint(1, case["context"] // rows - _NEW_TOKENS))
        if number % max(1, soak // 20) == 0:
            stages.append((f"{number} random requests", resident()))
            print(*stages[-1], file=sys.stderr, flush=True)
    after = [now["whole"] for _, now in stages[2:]]
    late = after[len(after) // 2 :]
    return {
        "case": name,
        "memory": case["memory"],
        "dtype": dtype,
        "lent_mib": round(_lent_bytes(model.offload) / _MIB, 1),
        "held_by_ledger_mib": round(model.offload.peak_memory_bytes() / _MIB, 1),
        "grown_since_first_request_mib": round(max(after) - after[0], 1),
        "grown_in_the_second_half_mib": round(late[-1] - late[0], 1),
        "stages_mib": dict(stages),
    }


def _lent_bytes(engine: Any) -> int:
    """Of reserved memory, what holds experts while it is not in use."""
    return int((engine.ledger.most_slots - engine.ledger.cache_slots) * engine.store.expert_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--soak", type=int, default=1000, help="random requests of the soak")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(run_case(asked.case[0], asked.soak, asked.dtype)))
        return
    found = []
    for name in asked.case:
        command = [sys.executable, "-m", "bench.process_memory", "--here", "--case", name]
        command += ["--soak", str(asked.soak), "--dtype", asked.dtype]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        grown = found[-1]["grown_since_first_request_mib"]
        print(f"{name:<12} grows by {grown} MiB from the first short request on", file=sys.stderr)
    line = json.dumps({"bench": "process_memory", "machine": _machine(), "cases": found})
    if asked.out is not None:
        asked.out.write_text(line + "\n", encoding="utf8")
    print(line)


def _machine() -> dict[str, Any]:
    import torch
    import transformers

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "smoe": smoe.__version__},
        "settings": {name: os.environ.get(name) for name in _SETTINGS},
    }


if __name__ == "__main__":
    main()
