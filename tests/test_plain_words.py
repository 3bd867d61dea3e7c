"""Plain English and plain names, by counts that may only fall. Lower a bound when you lower its count."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.plain_words import counted, documents, repeated_classes, source

ROOT = Path(__file__).parents[1]
MOST_IN_SOURCE = 194
MOST_IN_DOCUMENTS = 5
MOST_REPEATED_CLASSES = 5
SUBJECTS_SINCE = "6af7e3f93ac2720fe44ac874987ea70ab149f2a5"
"""The commits after this one have subjects of the form `area: what changed`."""
TOO_LONG = "models, server, machine: one base for like calls and families, plain names"
"""The subject of one commit of the past (19831041), which cannot be changed any more."""
SUBJECT = re.compile(r"[a-z0-9_., -]+: \S.*")
MOST_OF_A_SUBJECT = 72


def test_listed_words_become_fewer_in_the_source() -> None:
    """`python -m tests.plain_words` says where they are."""
    assert counted(source()).total() <= MOST_IN_SOURCE


def test_listed_words_become_fewer_in_documents() -> None:
    assert counted(documents()).total() <= MOST_IN_DOCUMENTS


def test_names_that_contain_a_word_are_counted_and_longer_words_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("told_by = heardable = Told('nobody, kept_back')\n")
    assert counted([tmp_path / "a.py"]) == {"told": 2, "nobody": 1, "kept": 1}


def test_a_class_has_a_name_of_its_own() -> None:
    assert len(repeated_classes()) <= MOST_REPEATED_CLASSES, repeated_classes()


def subjects() -> list[str]:
    """Of the commits since `SUBJECTS_SINCE`; skips where the history is not there."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs the repository's history")
    log = ["git", "log", "--no-merges", "--format=%s", f"{SUBJECTS_SINCE}..HEAD"]
    ran = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        pytest.skip("needs the repository's history")
    return ran.stdout.splitlines()


def is_plain(subject: str) -> bool:
    """Whether a commit's subject has an area, says what changed, and fits a line."""
    return len(subject) <= MOST_OF_A_SUBJECT and SUBJECT.fullmatch(subject) is not None


def test_commits_say_what_changed_where() -> None:
    assert {subject for subject in subjects() if not is_plain(subject)} <= {TOO_LONG}


@pytest.mark.parametrize("subject", ["Eight workers are equal", "docs:", "cluster: " + "x" * 64, "Docs: capital"])
def test_other_subjects_are_found(subject: str) -> None:
    assert not is_plain(subject)
