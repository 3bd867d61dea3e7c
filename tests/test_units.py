"""Sizes and durations at the border to people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.errors import ConfigError
from smoe.units import format_bytes, format_remaining, format_seconds, parse_bytes, parse_share


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * 2**30),
        ("8G", 8 * 2**30),
        ("8g", 8 * 2**30),
        ("2GB", 2 * 10**9),
        (" 512 MiB ", 512 * 2**20),
        ("1.5KiB", 1536),
        ("0.5TB", 5 * 10**11),
        ("4096", 4096),
        ("4096B", 4096),
        (4096, 4096),
    ],
)
def test_sizes_as_people_type_them(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 bananas", "8GiB8", "1e9", "0x10", "8,5GiB", "٨GiB!", "nan"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["8", "1.5", " 512 "])
def test_a_size_without_its_unit_is_asked_for_it(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{text.strip()}GiB or {text.strip()}MiB"):
        parse_bytes(text)


@given(count=st.integers(0, 10**15))
def test_what_we_print_we_read(count: int) -> None:
    """Within the three digits printed; would catch a unit that is off by 1024."""
    assert parse_bytes(format_bytes(count).replace(" ", "")) == pytest.approx(count, rel=0.006, abs=1)


@given(count=st.integers(1, 10**15))
def test_three_digits_at_most_four(count: int) -> None:
    digits = format_bytes(count).split()[0].replace(".", "")
    assert len(digits) <= 4


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00062, "620 us"), (0.0413, "41.3 ms"), (2.1, "2.1 s"), (119.4, "119 s"), (200, "3 min 20 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (41.2, "42 s"), (89, "1 min"), (170, "3 min"), (7790, "2 h 10 min")]
)
def test_what_remains_is_no_finer_than_a_guess(seconds: float, text: str) -> None:
    assert format_remaining(seconds) == text


@pytest.mark.parametrize(
    ("text", "share"), [("40%", 0.4), ("0.4", 0.4), (" 100 % ", 1.0), ("1", 1.0), ("12.5%", 0.125)]
)
def test_shares_as_people_type_them(text: str, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["", "%", "0", "0%", "101%", "1.5", "-4%", "half"])
def test_what_is_no_share_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="40%"):
        parse_share(text)
