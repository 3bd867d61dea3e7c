"""The table of all settings in docs/settings.md, which is made from their declarations.

Would catch a setting that the page lacks. After a change: `python -m tests.docs.test_settings_table`.
"""

from __future__ import annotations

from pathlib import Path

from smoe.cli.settings import default_in_words, option_of
from smoe.config import SETTINGS

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
BEGIN, END = "<!-- made by tests/docs/test_settings_table.py -->", "<!-- end of the table -->"


def table() -> str:
    """Return the table."""
    rows = ["| setting | given as | allowed | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, each in SETTINGS.items():
        meaning = each.help.replace("{allowed}", each.allowed.words).replace("\\[", "[")
        cells = (f"`{name}`", f"`{option_of(name)}`", each.allowed.typed, default_in_words(name), meaning)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return the page with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf8")
    assert text == page(text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf8")), encoding="utf8")
