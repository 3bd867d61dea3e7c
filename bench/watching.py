"""What it costs a decode step to be watched: the same tokens with the page's events read by somebody, and not, in turn.

    python -m bench.watching MODEL --memory 2GiB --rounds 3

One process with the model, its page and a thread that reads /watch over the loopback, ten looks a second, and throws
everything away (a browser that draws on the same machine would take more, and is its own affair). Each round decodes
the same forced tokens four times: alone, watched, watched, alone, and every second round the other way round, so that a
drift of the machine falls on both. Of each round the ratio of the median steps (watched over not) and of the means is
taken; the last line is JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timezone
from statistics import mean, median
from time import perf_counter, sleep
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from bench.versions import TEXT
from smoe import from_pretrained
from smoe.machine.processor import processor_name
from smoe.models.checkpoint import whole_checkpoint
from smoe.server.run_page import shown

PROMPT_TOKENS, WARM_TOKENS, CONTEXT_TOKENS = 64, 24, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--memory", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    asked = parser.parse_args()
    model = from_pretrained(asked.model, memory=asked.memory, context_tokens=CONTEXT_TOKENS)
    tokenizer = whole_checkpoint(asked.model, None).tokenizer()
    ids = tokenizer(TEXT.read_text(encoding="utf8")).input_ids[: PROMPT_TOKENS + WARM_TOKENS + asked.tokens]
    rounds = []
    engine: Any = model.offload
    with engine, shown(engine, "model") as page:
        address, watched = page.address.removeprefix("http://"), page.watching
        engine.wait_ready()
        steps(model, ids)
        for number in range(asked.rounds):
            found: dict[bool, list[float]] = {False: [], True: []}
            made, spent = 0, 0.0
            for is_first in (True, False, False, True):
                is_watched = is_first == bool(number % 2)
                with watching(address) if is_watched else nullcontext():
                    before, began = watched.looks, perf_counter()
                    found[is_watched] += steps(model, ids)
                    made, spent = made + watched.looks - before, spent + (perf_counter() - began) * is_watched
            rounds.append(compared(found[False], found[True]) | {"looks_a_second": made / spent})
            last = rounds[-1]
            print(
                f"round {number + 1}: {last['alone_ms']:.3f} ms a step alone, {last['watched_ms']:.3f} watched, "
                f"{100 * (last['ratio'] - 1):+.2f} % (means {100 * (last['ratio_of_means'] - 1):+.2f} %), "
                f"{last['looks_a_second']:.1f} looks a second"
            )
    ratio = median(each["ratio"] for each in rounds)
    print(f"median of the rounds {100 * (ratio - 1):+.2f} %")
    print(json.dumps(circumstances(asked) | {"ratio": ratio, "rounds": rounds}))


def compared(alone: list[float], watched: list[float]) -> dict[str, float]:
    return {
        "alone_ms": 1e3 * median(alone),
        "watched_ms": 1e3 * median(watched),
        "ratio": median(watched) / median(alone),
        "ratio_of_means": mean(watched) / mean(alone),
    }


def circumstances(asked: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": asked.model.rsplit("/", 1)[-1],
        "memory": asked.memory,
        "tokens": asked.tokens,
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def steps(model: PreTrainedModel, ids: list[int]) -> list[float]:
    """Seconds of every step after the warm ones, from a prompt that is read anew."""
    engine: Any = model.offload
    cache, seconds = engine.new_cache(), []
    with torch.no_grad():
        model(input_ids=torch.tensor([ids[:PROMPT_TOKENS]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        for token in ids[PROMPT_TOKENS:]:
            began = perf_counter()
            model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            seconds.append(perf_counter() - began)
    return seconds[WARM_TOKENS:]


@contextmanager
def watching(address: str) -> Iterator[None]:
    """Inside, somebody reads all that is told."""
    line = http.client.HTTPConnection(address)
    line.request("GET", "/watch")
    answer, is_over = line.getresponse(), threading.Event()

    def read() -> None:
        while not is_over.is_set() and answer.readline():
            pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    sleep(0.3)
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        line.close()


if __name__ == "__main__":
    main()
