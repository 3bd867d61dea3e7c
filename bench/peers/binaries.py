"""Engines that are programs of their own: their command lines, and what their output says.

They take text and sample: prompts are words of one token each (`words.py`), as many as forced tokens would be, and
every token is drawn from the likeliest 40, whose probabilities random weights make nearly alike, so that texts vary as
forced tokens do. A result whose prompt had another number of tokens is refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.peers.isa import Isa
from bench.peers.process import Chunk, Command, Finished
from bench.peers.shape import GgufShape
from bench.peers.worker import Measurement, Workload

SAMPLING = {"--temp": "1", "--top-k": "40", "--top-p": "1"}
"""Not the whole distribution: ik_llama.cpp counts as decoding the milliseconds that sorting a vocabulary takes."""
CONTEXT_SLACK = 64
BIGMOE_OWN_BYTES = 330 << 20
"""What the process holds beside weights and KV cache: its libraries, a graph's buffers, the reads in flight."""
BIGMOE_LEAST_CACHE_MIB = 16
BIGMOE_GRAPH_TOKENS = 512
"""Prompts go through in pieces of so many tokens, as in llama.cpp: buffers for 2,048 take 320 MiB."""
MIB = 1 << 20
LONGEST_ARGUMENT = 100_000
"""Bytes of a prompt on the command line. Linux allows 128 KiB for one argument; a longer prompt is a file."""


class BinaryError(Exception):
    """A program that is not there, or whose output is not what it should be."""


def binary(variable: str, isa: Isa) -> str:
    """The program that the environment names for an instruction set: `variable`, or with `_AVX2` at its end."""
    name = variable if isa == "native" else f"{variable}_{isa.upper()}"
    path = os.environ.get(name)
    if path is None:
        raise BinaryError(f"{name} is not set: it names the program that is measured (bench/peers/README.md)")
    if not os.access(path, os.X_OK):
        raise BinaryError(f"{name} is {path!r}, which is no program that can be run")
    return str(Path(path).resolve())


def context_tokens(workload: Workload) -> int:
    """Positions that every engine has room for."""
    return max(*workload.prompts, workload.warm_up) + workload.new_tokens + CONTEXT_SLACK


# --- llama-cli and llama-completion: a process for each prompt, the tokens after the longest --------------------------

PROMPT_TIME = re.compile(r"prompt eval time\s*=\s*([\d.]+) ms\s*/\s*(\d+) tokens")
DECODE_TIME = re.compile(r"(?<!prompt )eval time\s*=\s*([\d.]+) ms\s*/\s*(\d+) (runs|tokens)")
"""`runs` are those after the prompt; `tokens`, in ik_llama.cpp, are the prompt's own and those of the runs."""


def cli_commands(
    program: str, gguf: Path, workload: Workload, texts: Mapping[int, str], more: Sequence[str]
) -> list[Command]:
    """One process for each prompt length, shortest first. The first of the tokens is the prompt's own. The program's
    own warm-up runs only if the workload has a warm-up prompt."""
    longest = max(workload.prompts)
    words = [program, "-m", str(gguf), "-t", str(workload.threads), "-c", str(context_tokens(workload))]
    words += ["--seed", str(workload.seed), "--ignore-eos", "--no-display-prompt", *_words(SAMPLING), *more]
    words += [] if workload.warm_up else ["--no-warmup"]
    words += ["--override-kv", "tokenizer.ggml.add_bos_token=bool:false"]  # the prompt has its number of tokens
    counts = {length: workload.new_tokens + 1 if length == longest else 1 for length in sorted(workload.prompts)}
    return [_with_prompt([*words, "-n", str(count)], texts[length]) for length, count in counts.items()]


def _with_prompt(words: Sequence[str], text: str) -> Command:
    """A command with its prompt."""
    if len(text.encode()) > LONGEST_ARGUMENT:
        return Command([*words, "-f", "/dev/stdin"], text)
    return Command([*words, "-p", text])


def read_cli(finished: Sequence[Finished], workload: Workload) -> Measurement:
    """The measurement in the times that these programs print at their end."""
    found = Measurement()
    for length, process in zip(sorted(workload.prompts), finished, strict=True):
        milliseconds, tokens = _times(PROMPT_TIME, process)
        _check_count(f"a prompt of {length}", length, int(tokens))
        found.ttft_seconds[str(length)] = float(milliseconds) / 1e3
    last = finished[-1]
    milliseconds, count, unit = _times(DECODE_TIME, last)
    runs = int(count) - (unit == "tokens")
    _check_count("decoding", workload.new_tokens, runs)
    found.decode_seconds = [float(milliseconds) / 1e3 / runs] * runs
    first_token = next(chunk for chunk in last.chunks if chunk.text.strip() or not chunk.text)
    found.disk_bytes = _disk_bytes(first_token, last.chunks[-1])
    found.memory_bytes = _memory_bytes(last)
    return found


def _times(pattern: re.Pattern[str], process: Finished) -> tuple[str, ...]:
    """The groups of the last line of times that `pattern` finds."""
    matches: list[tuple[str, ...]] = pattern.findall(process.errors) or pattern.findall(process.output)
    if not matches:
        raise BinaryError(f"no line of the output is like {pattern.pattern!r}")
    return matches[-1]


# --- bmoe-cli: a session that is asked for one prompt after the other -------------------------------------------------


def bigmoe_command(
    program: str,
    gguf: Path,
    shape: GgufShape,
    workload: Workload,
    texts: Mapping[int, str],
    warmup: str | None,
    limit_bytes: int | None,
) -> Command:
    """One session: the warm-up prompt, if there is one, every prompt, and the tokens after the longest."""
    context = context_tokens(workload)
    words = [program, "-m", str(gguf), "-t", str(workload.threads), "-c", str(context), "--moe-stream", "--overlap"]
    words += ["--ubatch", str(min(context, BIGMOE_GRAPH_TOKENS)), "--io-threads", "4", "--force-cache", "--session"]
    words += ["--cache-mb", str(bigmoe_cache_mib(shape, context, limit_bytes)), "--seed", str(workload.seed)]
    longest = max(workload.prompts)
    asked = [] if warmup is None else [(warmup, 1)]
    asked += [(texts[length], workload.new_tokens if length == longest else 1) for length in sorted(workload.prompts)]
    lines = [
        {"cmd": "generate", "id": number, "prompt": text, "n_predict": count, "think": False, "clear_kv": True}
        for number, (text, count) in enumerate(asked)
    ]
    return Command([*words, *_words(SAMPLING)], "".join(json.dumps(line) + "\n" for line in [*lines, {"cmd": "close"}]))


def bigmoe_cache_mib(shape: GgufShape, context: int, limit_bytes: int | None) -> int:
    """Room for experts in what the process does not need for anything else; for all of them where nothing limits it."""
    if limit_bytes is None:
        return -(-shape.all_expert_bytes // MIB)
    room = limit_bytes - shape.resident_bytes - context * shape.key_value_bytes - BIGMOE_OWN_BYTES
    return max(BIGMOE_LEAST_CACHE_MIB, room // MIB)


def read_bigmoe(finished: Sequence[Finished], workload: Workload) -> Measurement:
    """The measurement in a session's lines."""
    (process,) = finished
    found = Measurement()
    lengths = sorted(workload.prompts)
    done = _lines(process.output, "BMOE_DONE")
    ready = _lines(process.output, "BMOE_READY")
    warmups = 1 if workload.warm_up else 0
    if len(done) != warmups + len(lengths) or not ready:
        raise BinaryError(f"the session answered {len(done)} of {warmups + len(lengths)} prompts")
    answers = done[warmups:]
    for length, answer in zip(lengths, answers, strict=True):
        _check_count(f"a prompt of {length}", length, answer["n_prompt"])
        found.ttft_seconds[str(length)] = answer["prefill_s"]
    tokens = _lines(process.output, "BMOE_PROGRESS")[-workload.new_tokens :]
    _check_count("decoding", workload.new_tokens, answers[-1]["tokens"])
    found.load_seconds = ready[0]["load_s"]
    found.warmup_seconds = sum(warmup["prefill_s"] for warmup in done[:warmups])
    found.decode_seconds = [token["wall_ms"] / 1e3 for token in tokens]
    found.disk_bytes = {"decode": int(MIB * sum(token["read_mb"] for token in tokens))}
    found.memory_bytes = _memory_bytes(process)
    found.resident_expert_bytes = int(MIB * answers[-1]["cache_resident_mib"])
    return found


def _lines(output: str, name: str) -> list[dict[str, float]]:
    """What the lines that begin with `name` say."""
    return [json.loads(line.split(" ", 1)[1]) for line in output.splitlines() if line.startswith(f"{name} ")]


# --- both -------------------------------------------------------------------------------------------------------------


def _words(options: Mapping[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


def _check_count(what: str, expected: int, found: float) -> None:
    if found != expected:
        raise BinaryError(f"{what} took {found} tokens, not {expected}")


def _disk_bytes(first_token: Chunk, end: Chunk) -> dict[str, int | None]:
    """Bytes until the first token was there, and from then on."""
    before, total = first_token.disk_bytes, end.disk_bytes
    return {"load and prompt": before, "decode": None if before is None or total is None else total - before}


def _memory_bytes(process: Finished) -> dict[str, int]:
    """The last that was counted before the process ended."""
    return next((chunk.memory_bytes for chunk in reversed(process.chunks) if chunk.memory_bytes), {})
