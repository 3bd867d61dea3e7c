"""The architectures of GGUF files that smoe reads: names of sizes, implied values, and how stored tensors become
weights.

To support a new architecture, add an entry to one of the five tables, and a toy model to the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from smoe.errors import CheckpointError, NotMoEError, UnsupportedModelError
from smoe.memory.gguf_header import GgufHeader
from smoe.models import (
    gguf_attention_families,
    gguf_latent_families,
    gguf_sparse_families,
    gguf_state_families,
    gguf_window_families,
)
from smoe.models.gguf_family import Entries, GgufFamily

FAMILIES: Mapping[str, GgufFamily] = {
    **gguf_attention_families.FAMILIES,
    **gguf_latent_families.FAMILIES,
    **gguf_sparse_families.FAMILIES,
    **gguf_state_families.FAMILIES,
    **gguf_window_families.FAMILIES,
}
"""{name of the architecture in a file: description of its family}."""

OTHER_TYPES = {
    "adapter": "an adapter (LoRA) of one: give the model's own file",
    "imatrix": "an importance matrix (imatrix), by which one was quantised",
}
"""{type of a GGUF file that is not a model: what it is}."""
OTHER_KINDS = {
    "clip": "it is the part of another model that sees images (mmproj): give that model's own file",
    "deepseek2-ocr": "it reads images of texts",
    "dflash": "it is a draft model of another model: give that model's own file",
    "llama-embed": "it embeds texts and generates none",
    "nomic-bert-moe": "it embeds texts and generates none",
    "rnd1": "it generates text by diffusion, not token by token",
}
"""{architecture that is not a language model: what it is}."""
_NO_CLASS = "transformers has no class for it"
_REFUSED = {
    **dict.fromkeys(("arctic", "deci", "grok", "grovemoe", "kimi-k3", "maple", "minicpm", "smallthinker"), _NO_CLASS),
    "llada-moe": "it generates text by diffusion, not token by token",
    "minimax-01": "transformers stores its keys and values in a cache that only this family has",
    "mistral3": "transformers' class for it has no experts",
    "phimoe": "its files lack the factors of its scaled positions (short_mscale, long_mscale)",
    "step35": "transformers does not expose its experts to other implementations",
}
"""{known architecture whose files with experts are not supported: the reason}."""


def architecture_of(header: GgufHeader) -> str:
    """Return the name of a file's architecture. Raises `UnsupportedModelError` if smoe does not read it, and
    `NotMoEError` if it is an unknown one without experts."""
    metadata = header.metadata
    name, kind = metadata.get("general.architecture"), metadata.get("general.type")
    if isinstance(kind, str) and kind in OTHER_TYPES:
        raise UnsupportedModelError(f"{header.path} is not a model, but {OTHER_TYPES[kind]}")
    if not isinstance(name, str):
        raise CheckpointError(f"{header.path} does not state the architecture of its model; download it again")
    if name in FAMILIES:
        return name
    reason = OTHER_KINDS.get(name)
    if reason is None and not metadata.get(f"{name}.expert_count"):
        raise not_moe(header.path, name)
    reason = reason or _REFUSED.get(name)
    if reason is not None:
        raise UnsupportedModelError(
            f"{header.path} holds a model of the architecture {name!r}, which smoe does not read: {reason}. "
            "docs/families.md lists what works"
        )
    raise UnsupportedModelError(
        f"{header.path} holds a model of the architecture {name!r:.80}, which smoe does not read. docs/families.md "
        "lists what works: try the model's safetensors release, which may be supported"
    )


def not_moe(path: Path, architecture: str) -> NotMoEError:
    """Return the error for a GGUF file of a dense model, which has no routed experts."""
    return NotMoEError(
        f"{path} holds a model of the architecture {architecture!r:.80} that has no routed experts: it is a dense "
        "model, and smoe runs Mixture-of-Experts models only; give another file, or run this one with llama.cpp"
    )


def family_of(entries: Entries) -> GgufFamily:
    """Return the description of the family that computes the model in a file."""
    family = FAMILIES[entries.architecture]
    other = None if family.variant is None else family.variant(entries)
    return other or family
