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


class InUseError(PermissionError):
    """As Windows refuses to rename over a file that somebody reads."""

    winerror = 32


@pytest.mark.parametrize(("tries", "comes"), [(3, True), (99, False)])
def test_a_reader_is_waited_for_and_not_for_ever(
    tries: int, comes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace, slept = tmp_path / "f.json", Path.replace, []
    path.write_bytes(b"old")

    def in_use(self: Path, target: Path) -> Path:
        if len(slept) < tries:
            raise InUseError(13, "Permission denied")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", in_use)
    monkeypatch.setattr("smoe.whole_file.time.sleep", slept.append)
    try:
        with whole_file(path) as file:
            file.write(b"new")
    except PermissionError:
        assert not comes
    assert path.read_bytes() == (b"new" if comes else b"old") and len(list(tmp_path.iterdir())) == 1
    assert 0.5 < sum(slept) < 2 or comes


def test_what_is_not_ours_to_write_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refused)
    monkeypatch.setattr("smoe.whole_file.time.sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(PermissionError), whole_file(tmp_path / "f.json"):
        pass
