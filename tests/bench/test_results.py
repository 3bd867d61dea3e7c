"""Raw results: archives of days, and what documents cite from them.

Would catch a citation of a file that is in no archive, an archive that unpacks elsewhere, a figure that was changed in
a document and not measured again.
"""

from __future__ import annotations

import json
import re
import statistics
import tarfile
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
INDEX = (RESULTS / "README.md").read_text(encoding="utf8")
DOCUMENTS = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/peers/README.md"]
DOCUMENTS += sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))
CITED = re.compile(r"bench/results/(20\d\d-\d\d-\d\d)(\.tar\.gz)?(?:/([\w*.-]*[\w*]))?")
NAMED = re.compile(r"`([a-z0-9][\w*.]*-[\w*.-]*\.(?:jsonl?|txt))`")
"""A result that a document cites by its name alone; those of models and of this project's setup are no results."""
OTHERS = ("smoe-*.json", "requirements-*.txt")
SCALES = (1, 100, 1000, 2**-20)
"""A file has shares, seconds and bytes where documents have per cent, milliseconds and MiB."""


@cache
def files() -> dict[str, bytes]:
    """All results by their paths below `bench/results`, whether archived or not."""
    found = {path.relative_to(RESULTS).as_posix(): path.read_bytes() for path in RESULTS.glob("*/*")}
    for archive in sorted(RESULTS.glob("*.tar.gz")):
        with tarfile.open(archive) as inside:
            for member in inside:
                if not member.isdir():
                    file = inside.extractfile(member)
                    assert file is not None, f"{archive.name}: {member.name} is no plain file"
                    found[member.name] = file.read()
    return found


def matching(pattern: str) -> list[str]:
    return [name for name in files() if fnmatch(name, pattern)]


def rows() -> list[tuple[str, str, str]]:
    """The index of cited figures: document, figure, file."""
    table = INDEX.split("## Cited figures")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in row.split("|")] for row in table.splitlines() if row.startswith("| [")]
    return [(re.findall(r"\[(.*)\]", page)[0], figure, file.strip("`")) for _, page, figure, _, file, _ in cells]


def test_an_archive_unpacks_into_the_folder_of_its_day() -> None:
    days = {archive.name.removesuffix(".tar.gz") for archive in RESULTS.glob("*.tar.gz")}
    assert days and not [day for day in days if (RESULTS / day).exists()], "unpacked, or archived and not removed"
    for day in days:
        with tarfile.open(RESULTS / f"{day}.tar.gz") as inside:
            assert {Path(name).parts[0] for name in inside.getnames()} == {day}
            assert all(".." not in name and not name.startswith("/") for name in inside.getnames())


@pytest.mark.parametrize("page", DOCUMENTS)
def test_what_a_document_cites_is_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf8")
    for day, archive, name in CITED.findall(text):
        assert not archive or (RESULTS / f"{day}.tar.gz").is_file(), f"{day}.tar.gz is not there"
        assert matching(f"{day}/{name or '*'}"), f"{day} has no {name}"
    for name in NAMED.findall(text):
        assert any(fnmatch(name, other) for other in OTHERS) or matching(f"*/{name}"), f"no day has {name}"


def test_the_lists_of_days_name_files_that_are_there() -> None:
    for section in re.split(r"^## (?=20)", INDEX, flags=re.MULTILINE)[1:]:
        day = section[:10]
        named = [
            name
            for row in section.splitlines()
            if row.startswith("| `")
            for name in re.findall(r"`([^`]+)`", row.split("|")[1])
        ]
        whole = [name for name in named if re.fullmatch(r"[\w*][\w*.-]*\.(jsonl?|txt|md)", name)]
        assert whole and [name for name in whole if not matching(f"{day}/{name}")] == [], day


def test_every_cited_file_of_an_archive_has_a_figure_in_the_index() -> None:
    """A table as text (`.txt`) and its numbers (`.json`) count as one file."""
    indexed = {Path(name).stem for _, _, pattern in rows() for name in matching(pattern)}
    for page in DOCUMENTS:
        for day, _, name in CITED.findall((ROOT / page).read_text(encoding="utf8")):
            if name and (RESULTS / f"{day}.tar.gz").is_file():
                cited = {Path(each).stem for each in matching(f"{day}/{name}")}
                assert indexed & cited, f"{page} cites {day}/{name}"


@pytest.mark.parametrize(("page", "figure", "file"), rows(), ids=lambda value: value.replace("/", ":"))
def test_a_cited_figure_is_in_its_document_and_in_its_file(page: str, figure: str, file: str) -> None:
    text = (ROOT / page).read_text(encoding="utf8")
    assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d]|\.\d)", text), f"{page} does not have {figure}"
    digit = 10 ** -len(figure.partition(".")[2])
    numbers = [number for name in matching(file) for number in numbers_in(name)]
    assert any(abs(abs(number * scale) - float(figure)) < digit for number in numbers for scale in SCALES), file


def numbers_in(name: str) -> Iterator[float]:
    text = files()[name].decode()
    if name.endswith(".json"):
        yield from _numbers(json.loads(text))
    elif name.endswith(".jsonl"):
        for line in filter(str.strip, text.splitlines()):
            yield from _numbers(json.loads(line))
    else:
        yield from map(float, re.findall(r"\d+(?:\.\d+)?", text))


def _numbers(value: Any) -> Iterator[float]:
    """All numbers of a JSON value, and the medians of its lists of numbers."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        plain = [each for each in value if _is_number(each)]
        if plain and len(plain) == len(value):
            yield statistics.median(plain)
        for each in value:
            yield from _numbers(each)
    elif _is_number(value):
        yield value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
