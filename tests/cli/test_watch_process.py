"""`smoe generate --watch` as a process: the page's address, the page, what it is told, an end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from typing import Any

from tests.forked import Forked

WORDS = ("generate", "demo", "--watch", "-p", "Tom had", "--memory", "48MiB", "--context", "128", "--threads", "1")
TOKENS = 40


def test_a_run_is_watched_from_its_first_token_to_its_end() -> None:
    """Would catch a run that does not wait for whoever looks, a page that never hears of the end, a process that stays
    because somebody still looks."""
    line = [sys.executable, "-m", "smoe", *WORDS, "--max-new-tokens", str(TOKENS), "--json"]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Forked(line, text=True, **pipes) as run:
        try:
            said, found = "", None
            while found is None:
                words = run.stderr.readline()  # type: ignore[union-attr]
                assert words, f"ended before it could be watched: {said}"
                said += words
                found = re.search(r"when (http://\S+) is opened", words)
            with urllib.request.urlopen(found[1], timeout=60) as page:
                assert b"<title>" in page.read()
            with urllib.request.urlopen(f"{found[1]}/watch", timeout=60) as feed:
                lines = feed.read().decode().splitlines()  # until it says that there is no more
            out, err = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 0, err
    looks = [json.loads(each.removeprefix("data: ")) for each in lines if each.startswith("data: ")]
    report = json.loads(out)
    assert "".join(look.get("text", "") for look in looks) == "Tom had" + report["text"]
    assert any(look.get("over") for look in looks)
    assert report["new_tokens"] <= TOKENS and report["text"]
