"""Formats by name, ggml's where it has one. Adding one is one declaration and one line here."""

from __future__ import annotations

from smoe.formats.base import Format
from smoe.formats.k_quants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from smoe.formats.mxfp4 import MXFP4, MXFP4_PAIRS
from smoe.formats.rounded import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0

FORMATS: dict[str, Format] = {
    each.name: each for each in (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, MXFP4, MXFP4_PAIRS)
}
