"""The time of every product of one token, ours beside ik_llama.cpp's, and the floor that memory sets.

    python -m bench.token_products FILE.gguf --rival .../llama-cli --printing .../llama-cli [--isa avx2]

All weights are in memory. *Ours*: the kernels give several products to the threads in one piece (a job). Here, in
every other token, each job is divided into one part for each product, and the parts run one after the other, each
timed, with its waiting for the last thread. In the pauses between timed parts the helper thread fetches the weights of
the next layer's attention, which counts for no product. The tokens between them run undivided jobs. The time of a whole
token is the median of these, without sampling. *The rival* is ik_llama.cpp with repacked weights (`-rtr`). `--printing`
names a build with `IK_PRINT_TIMING` 1 in its `ggml.c`, which prints the time of its first thread in every operation,
and that thread's waiting for the others. The time of a whole token is that of `--rival`, a build that does not print:
the mean of a text after its prompt, with sampling. `--isa` limits ours; the rival's programs must be built for the same
instructions. *Floor*: the bytes of the weights in the file over the rate at which all threads together read memory,
measured in the same round. (Our router's weights are bf16 in memory, half of the file's.) Each round is a process of
ours, then one of each of the rival's programs.
"""

from __future__ import annotations

import smoe  # isort: skip  # before torch, whose libraries otherwise set the number of threads
import argparse
import ctypes
import gc
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gguf import GGUFReader

from bench.peers.binaries import DECODE_TIME
from bench.peers.conditions import CpuWatch, machine, memory_read_rate, wait_until_quiet
from bench.peers.isa import ISAS, VARIABLES
from smoe.kernels import tasks
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.token_attention import TokenAttention

PROMPT_TOKENS, NEW_TOKENS, WARM_TOKENS = 16, 64, 24
QKV, ATTENTION, OUTPUT, ROUTER, UP, DOWN, HEAD, REST, WAITING = (
    "q, k, v", "attention", "output of attention", "router", "gate and up", "down", "output matrix", "all else",
    "waiting for the other thread",
)  # fmt: skip
GROUPS = QKV, ATTENTION, OUTPUT, ROUTER, UP, DOWN, HEAD, REST, WAITING
_TENSORS = (
    (re.compile(r"attn_[qkv]\.weight"), QKV),
    (re.compile(r"attn_output\.weight"), OUTPUT),
    (re.compile(r"ffn_gate_inp\.weight"), ROUTER),
    (re.compile(r"ffn_(gate|up)_exps\.weight"), UP),
    (re.compile(r"ffn_down_exps\.weight"), DOWN),
    (re.compile(r"^output\.weight"), HEAD),
)
"""The tensors of a GGUF file that each product reads."""
_OPERATIONS = (
    (re.compile(r"MUL_MAT\([QKV]cur"), QKV),
    (re.compile(r"FLASH_ATTN_EXT"), ATTENTION),
    (re.compile(r"MUL_MAT\((attn_out|kqv_out)"), OUTPUT),
    (re.compile(r"MUL_MAT\(ffn_moe_logits"), ROUTER),
    (re.compile(r"(MOE_FUSED_UP_GATE|MUL_MAT_ID\(ffn_moe_(gate|up))"), UP),
    (re.compile(r"MUL_MAT_ID\(ffn_moe_down"), DOWN),
    (re.compile(r"MUL_MAT\(result_output"), HEAD),
    (re.compile(r"ggml_barrier"), WAITING),
)
"""ik_llama.cpp's operations by product."""
_LINE = re.compile(r"([A-Z_]+|ggml_barrier)\((.*)\): (\d+) us$")
"""A line of the rival's. The rounding of rows (`quantize`) is left out, because it is a part of its product's time."""
_FIRST_OPERATION = "GET_ROWS(inp_embd)"
_WORKER = "--worker"
_KIND = 3
"""The index of a task's kind among its fields."""


def main() -> None:
    """Print the table of medians over the rounds, and everything as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rival", type=Path, required=True, help="ik_llama.cpp's llama-cli")
    parser.add_argument("--printing", type=Path, required=True, help="one that prints the time of each operation")
    parser.add_argument("--isa", choices=ISAS, default="native")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    parser.add_argument(_WORKER, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(ours(given.model, given.threads)))
        return
    rounds = [measure_round(given) for _ in range(given.rounds)]
    sizes = product_bytes(given.model)
    print(table(rounds, sizes))
    report = {"model": given.model.name, "isa": given.isa, "threads": given.threads, "machine": machine(),
              "bytes": sizes, "rounds": rounds}  # fmt: skip
    if given.out is not None:
        given.out.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))


def measure_round(given: argparse.Namespace) -> dict[str, Any]:
    """Measure memory's rate, ours and the rival's, in this order."""
    was_quiet = wait_until_quiet()
    rate = memory_read_rate(given.threads)
    environment = {**os.environ, **VARIABLES[given.isa]}
    again = [sys.executable, "-m", "bench.token_products", str(given.model), "--rival", str(given.rival)]
    again += ["--printing", str(given.printing), "--threads", str(given.threads), _WORKER]
    with CpuWatch() as watch_ours:
        done = subprocess.run(again, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    with CpuWatch() as watch_rival:
        rival = rivals(given)
    return {
        "quiet": was_quiet,
        "memory_bytes_per_second": rate,
        "ours": json.loads(done.stdout.splitlines()[-1]),
        "rival": rival,
        "others_cores": [watch_ours.use.others, watch_rival.use.others],
    }


def product_bytes(model: Path) -> dict[str, int]:
    """Return the bytes of weights that one token reads, by product."""
    reader = GGUFReader(model)
    fields = {name.partition(".")[2]: field for name, field in reader.fields.items()}
    experts, used = (int(fields[name].contents()) for name in ("expert_count", "expert_used_count"))
    sizes = dict.fromkeys(GROUPS, 0)
    for tensor in reader.tensors:
        for pattern, group in _TENSORS:
            if pattern.search(tensor.name):
                share = used / experts if "_exps" in tensor.name else 1
                sizes[group] += round(int(tensor.n_bytes) * share)
    return sizes


class DividedJobs:
    """Stands in for `SpinningPool.run_packed`, which runs every job of a token, and adds up the time of jobs. While
    `is_on`, it runs each job in parts, one for each product, and adds up the time of each product."""

    def __init__(self, model: Any) -> None:
        self._group_of = _addresses()
        self._vocabulary = model.config.vocab_size
        self._run = SpinningPool.run_packed
        self.is_on = False
        self.seconds: dict[str, float] = defaultdict(float)
        self.outputs: dict[str, int] = defaultdict(int)
        """The number of outputs of the products in divided jobs."""
        self.jobs = 0.0

    def stand_in(self) -> None:
        """Replace the pool's function."""
        divided = self

        def run_packed(pool: SpinningPool, *given: Any) -> None:
            begin = time.perf_counter()
            divided.run_one(pool, *given)
            divided.jobs += time.perf_counter() - begin

        SpinningPool.run_packed = run_packed  # type: ignore[assignment, method-assign]

    def run_one(
        self, pool: SpinningPool, packed: bytes | int, nbytes: int, units: int, is_long: bool, counts: int = 0
    ) -> None:
        """Run a job as the pool does, in parts while `is_on`. Jobs with arguments after their tasks stay whole; a token
        has none."""
        if not self.is_on or nbytes % (8 * tasks.FIELDS):
            self._run(pool, packed, nbytes, units, is_long, counts)
            return
        content = packed if isinstance(packed, bytes) else ctypes.string_at(packed, nbytes)
        fields = struct.unpack(f"{nbytes // 8}q", content)
        all_tasks = [fields[at : at + tasks.FIELDS] for at in range(0, len(fields), tasks.FIELDS)]
        before = 0
        for group, part in self._parts(all_tasks):
            sizes = [-(-task[1] // task[2]) for task in part]
            self.outputs[group] += sum(task[1] for task in part if task[1] > 1)
            firsts = itertools.accumulate(sizes, initial=0)
            moved = [_moved(task, first, before, pool.finished) for task, first in zip(part, firsts, strict=False)]
            words = [word for task in moved for word in task]
            alone = struct.pack(f"{len(words)}q", *words)
            begin = time.perf_counter()
            self._run(pool, alone, len(alone), sum(sizes), is_long, counts)
            self.seconds[group] += time.perf_counter() - begin
            counts = 0  # later parts wait for the counters of earlier ones
            before += sum(sizes)

    def _parts(self, all_tasks: Sequence[tuple[int, ...]]) -> list[tuple[str, list[tuple[int, ...]]]]:
        """Return (product, tasks) in an order in which the tasks can run."""
        if any(task[_KIND] == tasks.COMBINE for task in all_tasks):
            pairs = list(zip(_groups_of_experts(all_tasks), all_tasks, strict=True))
            pairs.sort(key=lambda pair: GROUPS.index(pair[0]))  # gates come between the second products
        else:
            pairs = list(zip(self._groups(all_tasks), all_tasks, strict=True))
        by_group = itertools.groupby(pairs, key=lambda pair: pair[0])
        return [(group, [task for _, task in some]) for group, some in by_group]

    def _groups(self, all_tasks: Sequence[tuple[int, ...]]) -> list[str]:
        """Return the product of each task in a job without experts. The rounding of a row belongs to the product that
        reads it."""
        groups = list[str]()
        for _, outputs, _, kind, _, _, _, *arguments in reversed(all_tasks):
            if kind == tasks.FORMAT and not arguments[2] and groups:
                groups.append(groups[-1])
            else:
                of = arguments[0] if kind == tasks.CALL else arguments[2 if kind == tasks.FORMAT else 1]
                groups.append(self._group_of.get(of, HEAD if outputs == self._vocabulary else REST))
        return groups[::-1]


def _groups_of_experts(all_tasks: Sequence[tuple[int, ...]]) -> list[str]:
    """Return the product of each task in a job of experts, whose first products come before all gates. A gate belongs
    to gate and up."""
    groups, gates = list[str](), 0
    for _, outputs, _, kind, _, _, _, *arguments in all_tasks:
        is_gate = kind == tasks.GATE or (kind == tasks.FORMAT and outputs == 1 and arguments[2] != 0)
        gates += is_gate
        if kind in {tasks.COMBINE, tasks.CALL}:
            groups.append(REST)
        else:
            groups.append(UP if is_gate or not gates else DOWN)
    return groups


def _addresses() -> dict[int, str]:
    """Return the products of the attention's matrices and of the router, and the attention itself, by address."""
    found: dict[int, str] = {}
    for layer in (each for each in gc.get_objects() if type(each) is TokenAttention):
        parts = layer.parts
        found |= {each.at(): QKV for each in (parts.q, parts.k, parts.v)} | {parts.o.at(): OUTPUT}
        found[layer._arguments.attention[0]] = ATTENTION
        if layer._routing is not None:
            found[layer._routing.projection.at()] = ROUTER
    return found


def _moved(task: tuple[int, ...], first: int, before: int, finished_at: int) -> tuple[int, ...]:
    """Return a task of a part of a job, with its first unit in that part. A task that waits until units of the job are
    finished waits for those of the part; `before`: the number of units in earlier parts."""
    _, outputs, size, kind, wait_at, wait_for, *others = task
    if wait_at == finished_at:
        wait_for -= before
    return first, outputs, size, kind, wait_at, wait_for, *others


def ours(model: Path, threads: int) -> dict[str, Any]:
    """Return our milliseconds by product, of undivided jobs, and of whole tokens with undivided jobs."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    loaded: Any = smoe.from_pretrained(str(model), memory="16GiB", context_tokens=256)
    loaded.offload.wait_ready()
    cache, chance = loaded.offload.new_cache(), torch.Generator().manual_seed(1)
    texts = torch.randint(0, loaded.config.vocab_size, (1, PROMPT_TOKENS + WARM_TOKENS + NEW_TOKENS), generator=chance)
    prompt, *singles = texts.split([PROMPT_TOKENS] + [1] * (WARM_TOKENS + NEW_TOKENS), 1)
    given = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    loaded(prompt, **given)
    for token in singles[:WARM_TOKENS]:
        loaded(token, **given)
    divided = DividedJobs(loaded)
    divided.stand_in()
    products, jobs, whole = list[dict[str, float]](), list[float](), list[float]()
    for number, token in enumerate(singles[WARM_TOKENS:]):
        divided.is_on = number % 2 == 1
        divided.seconds, divided.jobs = defaultdict(float), 0.0
        begin = time.perf_counter()
        loaded(token, **given)
        seconds = time.perf_counter() - begin
        if divided.is_on:
            products.append(divided.seconds)
        else:
            jobs.append(divided.jobs)
            whole.append(seconds)
    found: dict[str, float] = {group: 1e3 * median(each[group] for each in products) for group in GROUPS}
    missing = [group for group, milliseconds in found.items() if not milliseconds and group != WAITING]
    if missing:
        raise SystemExit(f"no time of {', '.join(missing)}: the model's jobs are not those that this program divides")
    return {
        "milliseconds": found,
        "jobs_milliseconds": 1e3 * median(jobs),
        "token_milliseconds": 1e3 * median(whole),
    }


def rivals(given: argparse.Namespace) -> dict[str, Any]:
    """Return ik_llama.cpp's milliseconds by product, and of whole tokens with all that its own clock counts."""
    decoded = passes_of(_output_of(given.printing, given))[-NEW_TOKENS // 2 :]
    return {
        "milliseconds": {group: median(each[group] for each in decoded) for group in GROUPS},
        "token_milliseconds": whole_token(_output_of(given.rival, given)),
    }


def whole_token(lines: Iterable[str]) -> float:
    """Return the milliseconds of a token after the prompt, the mean over a text, from the lines that the rival
    prints."""
    milliseconds, count, unit = next(found.groups() for line in lines if (found := DECODE_TIME.search(line)))
    return float(milliseconds) / (int(count) - (unit == "tokens"))


def passes_of(lines: Iterable[str]) -> list[dict[str, float]]:
    """Return the milliseconds by product of each pass of the rival's, from the lines that it prints."""
    passes = list[dict[str, float]]()
    for line in lines:
        if _FIRST_OPERATION in line:
            passes.append(dict.fromkeys(GROUPS, 0.0))
        found = _LINE.search(line)
        if found is not None and passes:
            name = f"{found[1]}({found[2]})"
            group = next((group for pattern, group in _OPERATIONS if pattern.match(name)), REST)
            passes[-1][group] += int(found[3]) / 1e3
    return passes


def _output_of(program: Path, given: argparse.Namespace) -> list[str]:
    """Let a program of the rival's write a text. Return the lines that it prints."""
    words = [str(program.resolve()), "-m", str(given.model.resolve()), "-t", str(given.threads), "-c", "256", "-rtr"]
    words += ["-n", str(NEW_TOKENS), "--temp", "1", "--top-k", "40", "--seed", "1", "--ignore-eos"]
    words += ["--no-display-prompt", "-p", "The people of the town walked to the river in the early morning and looked"]
    with tempfile.TemporaryDirectory() as folder:  # for the program's log
        done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    return done.stdout.decode(errors="replace").splitlines()


def table(rounds: Sequence[dict[str, Any]], sizes: dict[str, int]) -> str:
    """Return the table of medians over the rounds, with their ranges, in Markdown."""
    lines = ["| product | MB a token | smoe, ms | ik_llama.cpp, ms | floor, ms |", "| --- | --- | --- | --- | --- |"]
    for group in GROUPS:
        ours_ms, rival_ms = ([each[whose]["milliseconds"][group] for each in rounds] for whose in ("ours", "rival"))
        floors = [1e3 * sizes[group] / each["memory_bytes_per_second"] for each in rounds]
        weight = (f"{sizes[group] / 1e6:.1f}", f"{median(floors):.2f}") if sizes[group] else ("", "")
        ours_cell = _range(ours_ms) if group != WAITING else "in each product"
        lines.append(f"| {group} | {weight[0]} | {ours_cell} | {_range(rival_ms)} | {weight[1]} |")
    total = sum(sizes.values())
    floors = [1e3 * total / each["memory_bytes_per_second"] for each in rounds]
    sums = [[sum(each[whose]["milliseconds"].values()) for each in rounds] for whose in ("ours", "rival")]
    lines.append(f"| sum | {total / 1e6:.1f} | {_range(sums[0])} | {_range(sums[1])} | {median(floors):.2f} |")
    lines.append(f"| jobs undivided | | {_range([each['ours']['jobs_milliseconds'] for each in rounds])} | | |")
    whole = [_range([each[whose]["token_milliseconds"] for each in rounds]) for whose in ("ours", "rival")]
    lines.append(f"| whole token | | {whole[0]} | {whole[1]} | |")
    return "\n".join(lines)


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
