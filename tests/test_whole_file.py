"""A file is there whole, or as it was before."""

from __future__ import annotations

from pathlib import Path

import pytest

from smoe.whole_file import whole_file


@pytest.mark.parametrize("before", [None, b"old"])
def test_an_error_leaves_what_was_there(before: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(KeyboardInterrupt), whole_file(path) as file:
        file.write(b"half of the n")
        file.flush()
        assert (path.read_bytes() if path.exists() else None) == before, "nobody sees it before it is whole"
        raise KeyboardInterrupt
    assert [entry.name for entry in tmp_path.iterdir()] == ([] if before is None else ["f.json"])
    assert before is None or path.read_bytes() == before


def test_what_ends_well_takes_the_place(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(b"a longer file than the new one")
    with whole_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 1
