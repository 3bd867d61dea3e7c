"""The supported architectures of GGUF files: names of sizes, implied values, and how stored tensors become weights.

A new architecture is one entry in one of the three tables, and a toy model in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.memory.gguf_header import GgufHeader
from smoe.models import gguf_attention_families, gguf_latent_families, gguf_state_families
from smoe.models.gguf_family import Entries, GgufFamily

FAMILIES: Mapping[str, GgufFamily] = {
    **gguf_attention_families.FAMILIES,
    **gguf_latent_families.FAMILIES,
    **gguf_state_families.FAMILIES,
}
"""The families by the architecture's name in the file."""


_NO_CLASS = "transformers has no class for it"
_DEPENDS_ON_NUMBERS = (
    "what transformers' class computes depends on the values of its weights, so it cannot be examined without them"
)
_REFUSED = {
    **dict.fromkeys(
        ("arctic", "bailingmoe", "grok", "grovemoe", "kimi-k3", "llada-moe", "maple", "smallthinker"),
        _NO_CLASS,
    ),
    "clip": "it is the part of another model that sees images (mmproj): give that model's own file",
    "deepseek2-ocr": "it reads images of texts",
    "dflash": "it is a draft model of another model: give that model's own file",
    "glm5-next": _DEPENDS_ON_NUMBERS,
    "minimax-01": "transformers stores its keys and values in a cache that only this family has",
    "nomic-bert-moe": "it embeds texts and generates none",
    "phimoe": "its files lack the factors of its scaled positions (short_mscale, long_mscale)",
    "qwen4exp": _DEPENDS_ON_NUMBERS,
    "rnd1": "it generates text by diffusion, not token by token",
    "step35": "transformers does not expose its experts to other implementations",
}
"""The reasons why some known architectures are not supported."""


def architecture_of(header: GgufHeader) -> str:
    """Return the name of a file's architecture; raises `UnsupportedModelError` if smoe does not read it."""
    name = header.metadata.get("general.architecture")
    if header.metadata.get("general.type") == "imatrix":
        raise UnsupportedModelError(
            f"{header.path} is no model, but an importance matrix (imatrix), by which one was quantised"
        )
    if not isinstance(name, str):
        raise CheckpointError(f"{header.path} does not say which architecture it is for; download it again")
    if name in _REFUSED:
        raise UnsupportedModelError(
            f"{header.path} holds a model of the architecture {name!r}, which smoe does not read: {_REFUSED[name]}. "
            "docs/families.md lists what works"
        )
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{header.path} holds a model of the architecture {name!r:.80}; of GGUF files smoe reads "
            f"{', '.join(FAMILIES)}: take the model's safetensors release, which may well work"
        )
    return name


def family_of(entries: Entries) -> GgufFamily:
    """Return the description of the family that computes the model in a file."""
    family = FAMILIES[entries.architecture]
    other = None if family.variant is None else family.variant(entries)
    return other or family
