"""All formats by name; the names are ggml's where ggml has the format. A new format is one declaration and one line
here."""

from __future__ import annotations

from smoe.formats.base import Format
from smoe.formats.grouped import INT2, INT3, INT4
from smoe.formats.i_quants import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_NL, IQ4_XS
from smoe.formats.k_quants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from smoe.formats.mxfp4 import MXFP4, MXFP4_PAIRS
from smoe.formats.released import RELEASED
from smoe.formats.rounded import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from smoe.formats.ternary import TQ2_0

_OF_GGML = (
    *(Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, MXFP4),
    *(IQ4_NL, IQ4_XS, IQ3_XXS, IQ3_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S, IQ1_M, TQ2_0),
)

GGML: dict[str, Format] = {each.name: each for each in _OF_GGML}
"""The formats of GGUF files."""
OWN: dict[str, Format] = {each.name: each for each in (INT4, INT3, INT2)}
"""The formats that `smoe pack` writes in addition to ggml's."""
OPENAI: dict[str, Format] = {MXFP4_PAIRS.name: MXFP4_PAIRS}
"""The formats that OpenAI's checkpoints have in slots."""
FORMATS = GGML | OWN | OPENAI | RELEASED

PRECISIONS: dict[str, tuple[Format, ...]] = {
    "int8": (Q8_0,),
    "int4": (INT4, Q4_1),
    "int3": (Q3_K, INT3, Q4_1),
    "int2": (Q2_K, INT2, INT4, Q4_1),
}
"""The formats of `smoe pack` by precision. The first one is used whose blocks divide a row."""


def format_of(precision: str, columns: int) -> Format | None:
    """Return the format with which `smoe pack` stores rows of this number of columns in a precision such as `int4`.
    Return None if no format's block length divides the row."""
    return next((form for form in PRECISIONS[precision] if form.fits(columns)), None)
