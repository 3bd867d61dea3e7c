"""Sizes and durations at the border to people."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.errors import ConfigError
from smoe.units import (
    format_bytes,
    format_digits,
    format_remaining,
    format_seconds,
    parse_bytes,
    parse_link,
    parse_seconds,
    parse_share,
    plain_duration,
    plain_span,
)


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


@pytest.mark.parametrize(
    ("parse", "text", "says", "allowed"),
    [
        (parse_bytes, "lots", "`x` is 'lots', which is not a size; write for example 8GiB", "a size, for example 8GiB"),
        (parse_bytes, "8", "`x` is '8', which has no unit and would be 8 bytes", "a size with its unit, 8GiB or 8MiB"),
        (parse_share, "140%", "`x` is '140%', which is not a share above 0 and at most 100%", "a share above 0"),
        (parse_share, "5", "`x` is '5', .*; write 5%", "a share above 0"),
        (parse_seconds, "fast", "`x` is 'fast', which is not a time; write for example 40ms", "a time above 0"),
        (parse_seconds, "0ms", "`x` is '0ms', which is not a time above 0", "a time above 0"),
    ],
)
def test_an_error_names_its_setting_where_it_is_told(
    parse: Callable[..., float], text: str, says: str, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        parse(text, "x")
    facts = error.value.facts
    assert (facts["setting"], facts["given"]) == ("x", text) and str(facts["allowed"]).startswith(allowed)
    with pytest.raises(ConfigError, match=f"^'{text}' ") as error:
        parse(text)
    assert error.value.facts == {}


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
    [(0.00062, "620 us"), (0.0413, "41.3 ms"), (2.1, "2.1 s"), (119.4, "119 s"), (120, "2 min"), (200, "3 min 20 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.3, "less than a second"), (0.95, "a second"), (8.6, "9 seconds"), (34, "35 seconds"), (54, "55 seconds"),
        (56, "a minute"), (89, "a minute"), (200, "3 minutes"), (3300, "55 minutes"), (3500, "an hour"),
        (1e5, "a day"), (2.6e6, "30 days"),
    ],
)  # fmt: skip
def test_durations_in_words(seconds: float, text: str) -> None:
    assert plain_duration(seconds) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (60, 62, "about a minute"), (0.1, 0.2, "less than a second"), (120, 480, "2 to 8 minutes"),
        (20, 120, "20 seconds to 2 minutes"), (60, 300, "a minute to 5 minutes"),
        (0.2, 3, "less than a second to 3 seconds"),
    ],
)  # fmt: skip
def test_spans_in_words(low: float, high: float, text: str) -> None:
    assert plain_span(low, high) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (0.351, "0.35"), (9.996, "10.0"), (41.32, "41.3"), (99.96, "100"), (4130.4, "4,130")],
)
def test_figures_without_a_unit(value: float, text: str) -> None:
    assert format_digits(value) == text


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
    with pytest.raises(ConfigError, match=r"write (for example 40%|1\.5%)"):
        parse_share(text)


@pytest.mark.parametrize(
    ("text", "bytes_per_second"), [("1Gbit", 125e6), (" 100 Mbit/s", 12.5e6), ("2.5gbit", 312.5e6), ("64kbit", 8e3)]
)
def test_links_as_networks_are_named(text: str, bytes_per_second: float) -> None:
    assert parse_link(text) == bytes_per_second


@pytest.mark.parametrize("text", ["", "fast", "1Gb", "0Mbit", "-1Gbit", "1GB/s", "1Gbit per second"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="which is no link's rate; write for example 1Gbit or 100Mbit"):
        parse_link(text, "link")
