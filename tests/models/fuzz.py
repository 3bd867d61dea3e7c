"""Damaged checkpoints by the hundred: each must end in an error of ours that names the file, or in right output.

    python -m tests.models.fuzz --count 1400 --seed 0

Every case is a mutated copy of one of three toy checkpoints (one file, several shards, fused experts), loaded, run and
talked to in a process of its own with a time limit and a limit of memory. Right output is that of the unmutated files,
or what transformers alone makes of the mutated ones. The last line is JSON: cases by outcome.

    error       one of smoe/errors.py that names the file or the folder
    nameless    one of smoe/errors.py that does not
    right       the output is right
    wrong       the output is neither that of the files as they were nor what transformers makes of them
    foreign     somebody else's exception
    hang        no end within the time limit
    crash       the process died
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as library_logging

from smoe import from_pretrained
from smoe.errors import SmoeError
from smoe.generation.chat import Chat
from smoe.generation.generate import generate
from smoe.generation.sampling_settings import Sampling
from smoe.load.tokenizer import load_tokenizer
from smoe.models.registration import register_local_families
from tests.models.mutations import mutate
from tests.toy import TEMPLATE, save_toy

BASES: dict[str, dict[str, Any]] = {
    "one file": {"family": "qwen2_moe", "dtype": torch.bfloat16},
    "shards": {"family": "qwen3_moe", "dtype": torch.float32, "max_shard_size": "60KB"},
    "fused": {"family": "granitemoe", "dtype": torch.float16},
}
LIMIT_SECONDS = 20.0
"""Beyond it a case hangs; a good one takes half a second of processor time."""
EXTRA_BYTES = 4 << 30
"""Address space a case may take beyond what the process has already."""
CONTEXT, NEW_TOKENS = 64, 5
GOOD = ("error", "right")

Outcome = dict[str, Any]


def save_base(name: str, folder: Path) -> Path:
    """One of the three checkpoints, with tokenizer, chat template and generation configuration."""
    options = dict(BASES[name])
    save_toy(folder, options.pop("family"), TEMPLATE, num_hidden_layers=2, **options)
    assert (folder / "generation_config.json").exists()
    return folder


def ours(folder: Path) -> list[Any]:
    """What we make of a checkpoint: logits, and the tokens of a prompt, a text and a conversation."""
    model = from_pretrained(folder, memory="3MiB", context_tokens=CONTEXT)
    try:
        logits, tokens = _greedy(model)
        tokenizer = load_tokenizer(str(folder), None)
        text = generate(model, tokenizer, ["Once"], Sampling(max_new_tokens=NEW_TOKENS)).answers[0]
        turn = Chat(model, tokenizer, Sampling(max_new_tokens=NEW_TOKENS)).say("Hi")
        return [logits, tokens, text.token_ids, turn.answers[0].token_ids, turn.prompt_tokens]
    finally:
        model.offload.close()


def theirs(folder: Path) -> list[Any]:
    """The same by transformers alone."""
    register_local_families()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation="eager").eval()
    logits, tokens = _greedy(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = tokenizer("Once", return_tensors="pt")["input_ids"]
    if tokenizer.chat_template is None:
        turn = tokenizer("Hi", return_tensors="pt")["input_ids"]
    else:
        said = [{"role": "user", "content": "Hi"}]
        turn = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        turn = turn["input_ids"]
    return [logits, tokens, _continued(model, plain), _continued(model, turn), turn.shape[1]]


@torch.no_grad()
def _greedy(model: Any) -> tuple[torch.Tensor, list[int]]:
    prompt = torch.arange(5, 45)[None]
    logits = model(prompt).logits
    return logits, model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()


def _continued(model: Any, ids: torch.Tensor) -> list[int]:
    ones = torch.ones_like(ids)  # else the library takes its padding token for padding wherever it stands
    whole = model.generate(
        ids, attention_mask=ones, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1, repetition_penalty=1.0
    )
    new: list[int] = whole[0, ids.shape[1] :].tolist()
    return new


def is_same(one: list[Any], other: list[Any]) -> bool:
    return torch.equal(one[0], other[0]) and one[1:] == other[1:]


def judge(folder: Path, expected: list[Any], names: tuple[str, ...]) -> Outcome:
    """Load, run and talk; what came of it. An error must hold one of `names`."""
    try:
        result = ours(folder)
    except SmoeError as error:
        message = str(error)
        is_named = any(name in message for name in names)
        return {"outcome": "error" if is_named else "nameless", "message": f"{type(error).__name__}: {message}"}
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames) if "/smoe/" in f.filename), "?")
        return {"outcome": "foreign", "message": f"{place} {type(error).__name__}: {error}"}
    if is_same(result, expected):
        return {"outcome": "right", "message": "as before"}
    try:
        reference = theirs(folder)
    except BaseException as error:
        return {"outcome": "wrong", "message": f"transformers: {type(error).__name__}: {error}"}
    return {"outcome": "right" if is_same(result, reference) else "wrong", "message": "beside transformers"}


def run_case(number: int, seed: int, base: Path, name: str, expected: list[Any], limit: float) -> Outcome:
    """One mutation in a process of its own."""
    rng = random.Random(f"{seed}-{number}")
    folder = Path(tempfile.mkdtemp(prefix=f"case{number}-", dir=base.parent))
    try:
        shutil.copytree(base, folder, dirs_exist_ok=True)
        mutation = mutate(folder, rng)
        found = _in_child(
            lambda: judge(folder, expected, (str(folder), mutation.file)), folder.parent / f"{number}.out", limit
        )
    finally:
        shutil.rmtree(folder)
        for outside in folder.parent.glob(f"outside-{folder.name}*"):
            outside.unlink()
    is_keyed = not mutation.key or mutation.key in found["message"] or found["outcome"] != "error"
    return {"case": number, "base": name, **mutation._asdict(), **found, "names_key": is_keyed}


def _in_child(work: Any, report: Path, limit: float) -> Outcome:
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _answer(work, report)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - started > limit:
            os.kill(child, signal.SIGUSR1)  # where it hangs goes to the report
            time.sleep(0.3)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"outcome": "hang", "message": _read(report)[-1500:], "seconds": limit}
        time.sleep(0.005)
    seconds = round(time.monotonic() - started, 2)
    text = _read(report)
    try:
        return {**json.loads(text), "seconds": seconds}
    except ValueError:
        return {"outcome": "crash", "message": f"status {ended[1]} {text[-500:]}", "seconds": seconds}


def _answer(work: Any, report: Path) -> None:
    """In the child: never returns."""
    try:
        out = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        with os.fdopen(out, "w") as file:
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_BYTES, used + EXTRA_BYTES))
            file.write(json.dumps(work()))
            file.flush()
    finally:
        os._exit(0)


def _read(report: Path) -> str:
    text = report.read_text(errors="replace") if report.exists() else ""
    report.unlink(missing_ok=True)
    return text


def fuzz(numbers: range, seed: int, workers: int, limit: float = LIMIT_SECONDS) -> Iterator[Outcome]:
    """The cases of these numbers, as they end; the same seed and number give the same case."""
    torch.set_num_threads(1)
    library_logging.disable_progress_bar()
    library_logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as top:
        bases = {name: save_base(name, Path(top) / name.replace(" ", "-")) for name in BASES}
        expected = {name: ours(folder) for name, folder in bases.items()}
        for name, folder in bases.items():
            assert is_same(expected[name], theirs(folder)), f"{name}: not even the files as they are come out right"

        def case(number: int) -> Outcome:
            name = list(BASES)[number % len(BASES)]
            return run_case(number, seed, bases[name], name, expected[name], limit)

        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(case, numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--all", action="store_true", help="print the good cases too")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    for each in fuzz(range(asked.first, asked.first + asked.count), asked.seed, asked.workers):
        counts[each["outcome"]] += 1
        counts["without key"] += not each["names_key"]
        if asked.all or each["outcome"] not in GOOD:
            print(json.dumps(each), flush=True)
    keyless = counts.pop("without key")
    print(json.dumps({"seed": asked.seed, "cases": counts.total(), **counts, "errors_without_key": keyless}))
    sys.exit(0 if counts.keys() <= set(GOOD) else 1)


if __name__ == "__main__":
    main()
