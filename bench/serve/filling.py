"""What a server keeps on purpose, filled to its bounds: growth that is looked for is growth without one.

Stored responses (the newest thousand) and the words that the tokenizer remembers (ten thousand in the library's).
"""

from __future__ import annotations

import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smoe.server.response_store import MOST_RESPONSES

_WORDS, _PROMPTS = 20_000, 80
_CHARACTERS = 600
"""Of a stored response's instructions: what it holds in all is about twice that."""
_CLIENTS = 4


def fill(port: int, model: str) -> None:
    """Have both filled; takes half a minute with the embedded model."""
    dice = random.Random(0)
    for _ in range(_PROMPTS):  # short ones: what a long one takes while it is split is not given back at once
        lengths = (dice.randint(2, 9) for _ in range(_WORDS // _PROMPTS))
        words = " ".join("".join(chr(dice.randrange(0x20, 0x2FF)) for _ in range(length)) for length in lengths)
        _ask(port, "/v1/completions", {"model": model, "prompt": words, "max_tokens": 1})  # too long to be read: 400
    padding = {"a": "x" * _CHARACTERS}
    body = {"model": model, "input": "Who?", "max_output_tokens": 1, "metadata": padding}
    with ThreadPoolExecutor(_CLIENTS) as clients:
        list(clients.map(lambda _: _ask(port, "/v1/responses", body), range(MOST_RESPONSES)))


def _ask(port: int, path: str, body: dict[str, Any]) -> None:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    line.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    line.getresponse().read()
    line.close()
