"""Words that this project used in a sense of its own, counted in source and documents: `python -m tests.plain_words`.

The field has other words for what they meant (a coordinator sends, a predictor observes, a value is stored), and a
sentence with a subject does without the rest. The log of experiments keeps the words of its days.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = ("said", "told", "heard", "kept", "beside", "nobody", "somebody", "whoever", "anew", "hangs", "foretold")
_ANY = re.compile(rf"(?<![a-z])({'|'.join(WORDS)})(?![a-z])", re.IGNORECASE)


def source() -> list[Path]:
    """The package."""
    return sorted((ROOT / "src" / "smoe").rglob("*.py"))


def documents() -> list[Path]:
    """What users and contributors read, the log of experiments left out."""
    pages = sorted(page for page in (ROOT / "docs").rglob("*.md") if "log" not in page.relative_to(ROOT).parts)
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages]


def counted(files: list[Path]) -> Counter[str]:
    """How often each word occurs, names that contain it (`told_by`) included."""
    found = Counter[str]()
    for path in files:
        found.update(word.lower() for word in _ANY.findall(path.read_text(encoding="utf8")))
    return found


def repeated_classes() -> dict[str, list[str]]:
    """Names that classes of several files have, and these files."""
    files = defaultdict[str, set[str]](set)
    for path in source():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(path.relative_to(ROOT).as_posix())
    return {name: sorted(where) for name, where in sorted(files.items()) if len(where) > 1}


def main() -> None:
    """Print the counts, and the source files with most of these words."""
    for name, files in (("source", source()), ("documents", documents())):
        found = counted(files)
        print(f"{name}: {found.total()} ({', '.join(f'{word} {times}' for word, times in found.most_common())})")
    by_package = Counter[str]()
    for path in source():
        by_package[path.relative_to(ROOT / "src" / "smoe").parts[0]] += counted([path]).total()
    print("by package:", ", ".join(f"{package} {times}" for package, times in by_package.most_common()))
    print("class names in several files:", ", ".join(repeated_classes()))


if __name__ == "__main__":
    main()
