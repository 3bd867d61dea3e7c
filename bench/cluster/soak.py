"""Random faults while a model decodes: does a bit change, is a token lost, how long is the worst one, does memory grow?

The coordinator decodes the same tokens again and again; meanwhile a worker is killed and started again, frozen, cut
off, made ten times slower or made to lie, or a stranger sends noise, at random moments of tokens, by a seed. A token's
added latency is what it took beyond the median of the same token in other passes, so that its own loads do not count
(`aftermath.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from bench.cluster.acting import Dials, Times
from bench.cluster.aftermath import Fault, Token, judged, noting, table
from bench.cluster.child import Child
from bench.cluster.decoding import Decoding, open_model, steps, text_tokens
from bench.cluster.network import LINKS, Network, address
from bench.cluster.results import write
from bench.cluster.workers import NAME, Shape, Workers
from smoe.cluster.address import DEFAULT_PORT

_READY_SECONDS = 10.0
_LAST_WORDS_SECONDS = 2.0
"""For a liar to be refused and end."""
_END_SECONDS = 60.0
_NOISE_BYTES = 4096
_SLOWER = 10.0


def run(options: argparse.Namespace) -> None:
    """Decode, disturb, and say what came of it."""
    shape, load = Shape.of(options.model), options.load_ms / 1e3
    times = Times(load, options.expert_ms / 1e3)
    main_times = Times(load, options.expert_ms / 1e3, options.layer_ms / 1e3)
    asked = Decoding(shape, main_times, load, options.workers, {"preset": options.preset}, tokens=options.tokens)
    expected = _expected(asked)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            Network(options.workers + 1, LINKS[options.link]) as network,
            Workers(network, folder, shape, times, options.slots, options.workers) as workers,
        ):
            main = workers.main(lambda child: _decode(child, asked, expected))
            try:
                workers.hear(main, _END_SECONDS)
                faults, held = _disturb(options, network, workers, folder, main)
                main.say("enough")
                tokens, failures, spans, lost = workers.hear(main, _END_SECONDS)
            finally:
                main.kill()
    found = judged(tokens, faults, load, spans, lost)
    found |= {"failures": failures, "rss_bytes": held, "faults": [each._asdict() for each in faults]}
    write(options, found, table(found))
    if failures or not found["all_equal"]:
        raise SystemExit("a request was lost, or its logits were others")


# -- main -------------------------------------------------------------------------------------------------------------


def _expected(asked: Decoding) -> list[str]:
    """The checksums of every step's logits in one process without a cluster."""

    def alone(child: Child) -> None:
        plain = Decoding(asked.shape, Times(0.0, 0.0), 0.0, 0, tokens=asked.tokens)
        model = open_model(plain, Dials())
        with model.offload as engine, torch.no_grad():
            child.say([_checksum(logits) for logits, _ in steps(model, _ids(plain), plain.tokens, engine.new_cache())])

    child = Child("alone", alone)
    try:
        return list(child.hear(_END_SECONDS))
    finally:
        child.kill()


def _decode(child: Child, asked: Decoding, expected: Sequence[str]) -> None:
    """Pass after pass until enough is said; then all tokens, and what was raised."""
    model = open_model(asked, Dials())
    ids, tokens, failures = _ids(asked), list[Token](), list[str]()
    with model.offload as engine, torch.no_grad(), noting() as notes:
        while True:
            try:
                began = time.monotonic()
                for position, (logits, _) in enumerate(steps(model, ids, asked.tokens, engine.new_cache())):
                    ended = time.monotonic()
                    is_equal = _checksum(logits) == expected[position]
                    tokens.append(Token(position, began, ended, is_equal, max(notes.deadlines, default=0.0)))
                    notes.deadlines.clear()
                    began = ended
            except Exception as error:  # a lost request: counted, and the next pass begins
                failures.append(f"{type(error).__name__}: {error}")
            if len(tokens) == len(expected):
                child.say("decoding")
            with suppress(Exception):
                child.hear(0)
                break
    child.say((tokens, failures, notes.spans, notes.lost()))


def _ids(asked: Decoding) -> list[int]:
    return text_tokens(asked.shape.folder, asked.prompt)


def _checksum(logits: torch.Tensor) -> str:
    return hashlib.sha256(logits.float().numpy().tobytes()).hexdigest()


# -- faults -----------------------------------------------------------------------------------------------------------


def _disturb(
    options: argparse.Namespace, network: Network, workers: Workers, folder: Path, main: Child
) -> tuple[list[Fault], dict[str, list[int]]]:
    """All faults, one after the other; and what main and the workers held meanwhile."""
    dice = random.Random(options.seed)
    faults: list[Fault] = []
    held: dict[str, list[int]] = {"main": [main.rss_bytes()], "worker": []}
    kinds = _kinds(network, workers, dice, options.down)
    asked = kinds.keys() & options.kinds.split(",") if options.kinds else kinds.keys()
    for number in range(1, options.faults + 1):
        time.sleep(dice.uniform(options.gap / 5 if options.least_gap is None else options.least_gap, options.gap))
        kind, worker = dice.choice(sorted(asked)), dice.choice(_ready(folder))
        began = time.monotonic()
        kinds[kind](worker)
        faults.append(Fault(kind, worker, began, time.monotonic()))
        if number % max(1, options.faults // 20) == 0:
            held["main"].append(main.rss_bytes())
            held["worker"].append(max(child.rss_bytes() for child in workers.running.values()))
            print(f"{number} faults, main holds {held['main'][-1] >> 20} MiB", file=sys.stderr, flush=True)
    return faults, held


def _kinds(network: Network, workers: Workers, dice: random.Random, down: float) -> dict[str, Callable[[int], None]]:
    """What can happen to a worker; each returns when it is over, for as far as that is ours to say."""

    def kill(n: int) -> None:
        workers.running[n].signal(signal.SIGKILL)
        time.sleep(down + dice.uniform(0.0, 0.3))
        workers.restart(n)

    def freeze(n: int) -> None:
        workers.running[n].signal(signal.SIGSTOP)
        time.sleep(dice.uniform(0.1, 0.6))
        workers.running[n].signal(signal.SIGCONT)

    def cable(n: int) -> None:
        network.plug(n, False)
        time.sleep(dice.uniform(0.1, 1.0))
        network.plug(n, True)

    def slow(n: int) -> None:
        workers.dials[n].slowness = _SLOWER
        time.sleep(dice.uniform(0.3, 0.8))
        workers.dials[n].slowness = 1.0

    def garbage(n: int) -> None:
        workers.dials[n].lies = True
        until = time.monotonic() + _LAST_WORDS_SECONDS
        while workers.running[n].is_alive and time.monotonic() < until:
            time.sleep(0.02)
        workers.restart(n)

    def noise(n: int) -> None:
        stranger = Child("stranger", lambda _: _make_noise(network, n, dice.randbytes(_NOISE_BYTES)))
        time.sleep(0.1)
        stranger.kill()

    return {"kill": kill, "freeze": freeze, "cable": cable, "slow": slow, "garbage": garbage, "noise": noise}


def _make_noise(network: Network, machine: int, noise: bytes) -> None:
    """To main's port, from a worker's machine."""
    network.enter(machine)
    with socket.create_connection((address(0), DEFAULT_PORT), timeout=1) as connection:
        connection.sendall(noise)
        time.sleep(0.05)


def _ready(folder: Path) -> list[int]:
    """The workers that main takes for ready, once there is one; main says it twice a second."""
    path = folder / "main" / "smoe" / "clusters" / NAME / "status.json"
    until = time.monotonic() + _READY_SECONDS
    while time.monotonic() < until:
        with suppress(OSError, ValueError):
            said = json.loads(path.read_text())["workers"]
            found = [int(each["name"][1:]) for each in said if each["state"] == "ready"]
            if found:
                return sorted(found)
        time.sleep(0.1)
    raise SystemExit(f"no worker has come back within {_READY_SECONDS:g} s; main's log: {_log(folder)}")


def _log(folder: Path) -> str:
    return (folder / "main.log").read_text(errors="replace")[-2000:]


def options_of(parser: argparse.ArgumentParser) -> None:
    """What can be asked."""
    parser.add_argument("model", type=Path, help="a folder")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", help="of faults, by commas; all of them where it is left out")
    parser.add_argument("--gap", type=float, default=0.5, help="the most seconds between two")
    parser.add_argument("--least-gap", type=float, help="the fewest; a fifth of --gap where it is left out")
    parser.add_argument("--down", type=float, default=0.0, help="seconds that a killed worker stays away, and 0 to 0.3")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--preset", default="exact", help="exact (finish) or od-moe")
    parser.add_argument("--link", default="1gbit", choices=list(LINKS))
    parser.add_argument("--tokens", type=int, default=24, help="of a pass")
    parser.add_argument("--slots", type=int, default=64, help="experts in each worker's memory")
    parser.add_argument("--load-ms", type=float, default=5.0)
    parser.add_argument("--expert-ms", type=float, default=0.0)
    parser.add_argument("--layer-ms", type=float, default=1.0)
