"""How weights are prefetched on each maker's CPUs.

Would catch: the prefetch that suits Zen 5 on Zen 4, where it is as slow as none; an Intel CPU taken for one of AMD.
"""

from __future__ import annotations

import pytest

from smoe.kernels import isa

ZEN_4 = {"sse4a", "avx512bf16"}
ZEN_5 = {"sse4a", "avx512bf16", "avxvnni", "movdir64b"}
SAPPHIRE_RAPIDS = {"avx512bf16", "avxvnni", "movdir64b"}


@pytest.mark.parametrize(
    ("features", "locality", "by_itself"),
    [(ZEN_4, 2, True), (ZEN_5, 0, False), (SAPPHIRE_RAPIDS, 2, False)],
    ids=["Zen 4", "Zen 5", "Sapphire Rapids"],
)
def test_how_weights_are_prefetched(
    features: set[str], locality: int, by_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa, "cpu_has", lambda *needed: features.issuperset(needed))
    assert isa.read_once_locality() == locality
    assert isa.cpu_prefetches_rows() is by_itself
