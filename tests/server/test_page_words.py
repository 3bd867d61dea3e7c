"""What the page at `/` says about memory, run by node without a browser.

Would catch a number of experts below the cells that the map fills, and a curve that ends above what the text says.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from smoe.server.watching import PAGE

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")
MIB = 2**20
LENDING = {"slots": 293, "most_slots": 768, "expert_bytes": 36864}


def said(module: str, code: str) -> Any:
    """The value of an expression; `page` has what a file of the page exports."""
    assert NODE is not None
    script = f"const page = await import({json.dumps((PAGE / module).as_uri())}); console.log(JSON.stringify({code}))"
    command = [NODE, "--input-type=module", "--no-warnings", "--experimental-default-type=module", "-e", script]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize(
    ("most", "words"),
    [
        (768, "293 of 768 always fit in memory, all until a long text needs the memory"),
        (400, "293 of 768 always fit in memory, up to 400 until a long text needs the memory"),
        (293, "293 of 768 fit in memory"),
    ],
)
def test_how_many_experts_fit(most: int, words: str) -> None:
    assert said("map.js", f"page.fitting({json.dumps(LENDING | {'most_slots': most})}, 768)") == words


def test_a_replay_lends_nothing() -> None:
    assert said("map.js", "[page.fitting({slots: 5}, 8), page.fitting({slots: 8}, 8)]") == [
        "5 of 8 fit in memory",
        "all fit in memory",
    ]


def test_experts_in_lent_memory_are_counted() -> None:
    found = said("figures.js", f"[[0, 0.5], [0, 1], [{16 * MIB}, 1]].map(of => page.usedBytes({10 * MIB}, ...of))")
    assert found == ["10 MiB, 50 % full", "10 MiB", "26 MiB, of which 16 MiB are reserved for longer texts"]


def curve_words(here: int, misses: list[float]) -> str:
    """What stands above a curve that ends at 300 experts."""
    figures = {"model": LENDING, "here": here, "hits": None, "slots": [0, 300], "misses": misses}
    at = "size => misses[0] + (misses[1] - misses[0]) * Math.min(1, size / 300)"
    code = f"(({{misses, ...of}}) => Object.assign(Object.create(page.Figures.prototype), of).inWords({at}, 300))"
    found: str = said("figures.js", f"{code}({json.dumps(figures)})")
    return found


def test_what_the_curve_says_fits_the_curve() -> None:
    """With experts in lent memory all that were used fit, and the misses that remain are first uses."""
    assert curve_words(766, [1, 0.4]) == (
        "All experts used recently fit: more memory would change nothing. "
        "The curve ends at 40 %: the first use of an expert is a miss with any memory."
    )
    assert curve_words(766, [1, 0]) == "All experts used recently fit: more memory would change nothing."
    assert "with room for 10.3 MiB of experts, as here" in curve_words(280, [1, 0.1])


@pytest.mark.parametrize(
    ("status", "tokens", "words"),
    [
        (200, 100, ". The conversation is full: New starts another one."),
        (200, 512, ". This message alone is too long: shorten it."),
        (400, 0, ". This message alone is too long: shorten it."),
        (503, 0, ""),
    ],
)
def test_a_new_conversation_is_advised_only_if_the_message_fits_alone(status: int, tokens: int, words: str) -> None:
    answer = json.dumps({"input_tokens": tokens} if status == 200 else {"error": {"message": "no"}})
    code = (
        "(globalThis.sessionStorage = { getItem: () => null }, "
        f"globalThis.fetch = async () => new Response({json.dumps(answer)}, {{ status: {status} }}), "
        "await page.Chat.prototype.remedy.call({ name: 'demo', context: 512 }, 'Hello'))"
    )
    assert said("chat.js", code) == words
