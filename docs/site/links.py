"""Links of the documentation, which hold on a code host and in the site alike.

A page links to what it speaks of by the way through the repository, as a code host wants it. The site (mkdocs.yml, of
which this is a hook) begins at `docs/`: what a page links to outside, a table of results or a source file, is taken
along under `repository/`, and the links to it are turned there while the site is made.

Without MkDocs this checks the same links: `python docs/site/links.py` names those that lead nowhere.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = "docs/"
TAKEN_ALONG = "repository/"
"""Where in the site lies what is outside `docs/`."""
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)
"""Begins a link that is not by a way through the repository."""

_LINK = re.compile(r"(?<=\]\()(?P<target>[^()\s]+)(?=\))")
_FENCE = re.compile(r"^ {0,3}(```+|~~~+).*?^ {0,3}\1[`~]*[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_HEADING = re.compile(r"^#{1,6} +(?P<title>.+?)(?: +#+)? *$", re.MULTILINE)


def pages(root: Path = ROOT) -> list[str]:
    """The documentation: all pages of `docs/`, and what they, and the first pages of the repository, link to."""
    found = [
        page.relative_to(root).as_posix() for page in [*sorted(root.glob("*.md")), *sorted(root.glob("docs/**/*.md"))]
    ]
    for page in found:  # grows
        for _, target, _ in links(root, page):
            if target.endswith(".md") and target not in found and (root / target).is_file():
                found.append(target)
    return found


def links(root: Path, page: str) -> Iterator[tuple[str, str, str]]:
    """Each link of a page to something in the repository: as it is written, what it means (`docs/x.md`, by a way from
    `root`; what is above it begins with `..`), and the heading in it, or ''."""
    text = (root / page).read_text(encoding="utf8")
    for match in _LINK.finditer(without_code(text)):
        if not ELSEWHERE.match(match["target"]):
            yield match["target"], *_meant(root, page, match["target"])


def broken(root: Path = ROOT) -> list[str]:
    """What is wrong with which link of which page."""
    wrong = []
    for page in pages(root):
        for written, target, heading in links(root, page):
            if not (root / target).is_file():
                wrong.append(f"{page}: {written} is not there")
            elif heading and heading not in anchors((root / target).read_text(encoding="utf8")):
                wrong.append(f"{page}: {written} names a heading that {target} has not")
    return wrong


def anchors(text: str) -> set[str]:
    """What the headings of a page are called in links: lower case, no punctuation, spaces as hyphens.

    One of several of the same title has a number, which hosts write in different ways: none of these is a name.
    """
    titles = Counter(slug(match["title"]) for match in _HEADING.finditer(_FENCE.sub("", text)))
    return {title for title, times in titles.items() if times == 1}


def slug(title: str, separator: str = "-") -> str:
    """A heading's name in links, as code hosts make it."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", separator)


def without_code(text: str) -> str:
    """The text, with blanks in the place of code: every other character stays where it is."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return _CODE.sub(blank, _FENCE.sub(blank, text))


def in_site(path: str) -> str:
    """Where a file of the repository lies in the site's sources."""
    return path.removeprefix(DOCS) if path.startswith(DOCS) else TAKEN_ALONG + path


def in_repository(path: str) -> str:
    """Where a source of the site lies in the repository."""
    return path.removeprefix(TAKEN_ALONG) if path.startswith(TAKEN_ALONG) else DOCS + path


def _meant(root: Path, page: str, written: str) -> tuple[str, str]:
    way, _, heading = written.partition("#")
    target = _plain(f"{page}/../{way}") if way else page
    if (root / target).is_dir():
        target += "/README.md"
    return target, heading


def _plain(path: str) -> str:
    """Without `.` and `..`, but for those that lead above the beginning."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


# -- what MkDocs calls ------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Headings are called in the site what a code host calls them; pages that are to come have their place kept."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slug
    absent = {page for page in config["extra"]["to_come"] if not (ROOT / DOCS / page).exists()}
    config["nav"] = [_there(entry, absent) for entry in config["nav"]]
    return config


def _there(entry: Any, absent: set[str]) -> Any:
    """An entry of the navigation, without pages that are not there yet."""
    if not isinstance(entry, dict):
        return entry
    return {
        title: [kept for kept in (_there(part, absent) for part in below) if kept] if isinstance(below, list) else below
        for title, below in entry.items()
        if not (isinstance(below, str) and below in absent)
    }


def on_files(files: Any, config: Any) -> Any:
    """What pages link to outside `docs/` comes along."""
    from mkdocs.structure.files import File

    wanted = {page for page in pages() if not page.startswith(DOCS)}
    wanted |= {target for page in pages() for _, target, _ in links(ROOT, page) if not target.startswith(DOCS)}
    for path in sorted(wanted):
        if (ROOT / path).is_file():
            files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links by ways through the repository become links by ways through the site."""
    here = in_repository(page.file.src_uri)
    up = "../" * page.file.src_uri.count("/")
    turned, done = [], 0
    for match in _LINK.finditer(without_code(markdown)):
        if ELSEWHERE.match(match["target"]) or match["target"].startswith("#"):
            continue
        target, heading = _meant(ROOT, here, match["target"])
        turned += [markdown[done : match.start()], up + in_site(target) + (f"#{heading}" if heading else "")]
        done = match.end()
    return "".join(turned) + markdown[done:]


if __name__ == "__main__":
    sys.exit("\n".join(broken()) or None)
