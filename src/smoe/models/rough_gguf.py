"""The description of a model in a GGUF file of an architecture that smoe does not read, from the file's header.

The sizes of experts and of all other weights are exact, because the header has the shape and type of every tensor. The
size of the KV cache is an estimate for usual attention.

    blk.N.ffn_gate_exps.weight, ffn_up_exps, ffn_down_exps   one tensor for all experts of layer N, [E, rows, columns]
    blk.N.ffn_gate.E.weight, ffn_up.E, ffn_down.E            one tensor for expert E, the form until early 2024
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from smoe.errors import CheckpointError
from smoe.formats.registry import FORMATS
from smoe.memory.dtypes import Dtype
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import Part
from smoe.models.gguf_config import entries_named
from smoe.models.gguf_families import OTHER_KINDS, OTHER_TYPES, architecture_of
from smoe.models.gguf_family import Entries
from smoe.models.gguf_sizes import GgufSizes
from smoe.models.outline import Anatomy, ExpertsSite, Outline, Weight
from smoe.models.packed import Contents, Packed, bytes_in_precision
from smoe.models.plain_config import PlainConfig
from smoe.models.spec import ModelSpec
from smoe.models.usual_fields import LackingSizesError

_FUSED = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<kind>\w+)_exps\.(?P<suffix>\w+)")
_APART = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<kind>gate|up|down)\.(?P<expert>\d+)\.(?P<suffix>\w+)")
_LAYER = re.compile(r"blk\.(\d+)\.")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_ROUGH = (
    "the sizes of experts and other weights are those in the header of the file; the size of the KV cache is an "
    "estimate for usual attention"
)


class _ExpertTensor(NamedTuple):
    """A tensor of the experts of a layer: one matrix or bias of one expert or of all."""

    layer: int
    is_down: bool
    experts: int
    """E for a tensor of all experts, otherwise 0."""
    tensor: StoredTensor

    @property
    def matrix(self) -> tuple[int, ...]:
        """The shape of one expert's matrix [rows, columns], or of its bias or scale."""
        return self.tensor.shape[1:] if self.experts else self.tensor.shape


class RoughGguf(GgufSizes):
    """A `Described` model in a GGUF file of any architecture, with sizes from the header."""

    def fields(self) -> tuple[str, dict[str, Any]]:
        return self._entries.architecture, dict(self._entries.values)

    def has_weights(self) -> bool:
        return False

    def model_config(self) -> PlainConfig:
        return self._config

    def outline(self, dtype: Dtype) -> Outline:
        weights = {key: Weight(each.shape, is_plain=len(each.shape) == 2) for key, each in self._dense.items()}
        sites = list(self._sites())
        weights |= {
            f"{site.name}.{part.name}": Weight((site.experts, *part.shape)) for site in sites for part in site.parts
        }
        routers = {site.layer: f"blk.{site.layer}.ffn_gate_inp" for site in sites}
        return Outline(
            weights=weights,
            buffers={},
            sites=sites,
            anatomy=Anatomy(
                kv_bytes_per_token=self._cached_numbers * dtype.itemsize,
                state_bytes_per_sequence=0,
                routers=routers,
                gates=routers,
                top_k=dict.fromkeys(routers, self._config.num_experts_per_tok),
            ),
            embedding=_EMBEDDING if _OUTPUT in weights and _EMBEDDING in weights else None,
        )

    def quantised_bytes(self, spec: ModelSpec) -> Mapping[int, int] | None:
        if spec.precision != "auto":
            return bytes_in_precision(spec)
        counts = {site.layer: site.experts for site in spec.sites}
        return {
            layer: sum(piece.tensor.nbytes for piece in self._pieces[layer]) // experts
            for layer, experts in counts.items()
        }

    def quantised_dense(self, spec: ModelSpec) -> Mapping[str, StoredTensor]:
        return {key: each for key, each in self._dense.items() if len(each.shape) == 2 and each.dtype in FORMATS}

    def doubts(self, spec: ModelSpec) -> tuple[str, ...]:
        return (_ROUGH,)

    def packed(self, contents: Contents) -> Packed | None:
        return None

    @cached_property
    def _entries(self) -> Entries:
        header = self._headers[0]
        name, kind = (header.metadata.get(f"general.{key}") for key in ("architecture", "type"))
        if str(name) in OTHER_KINDS or str(kind) in OTHER_TYPES:
            architecture_of(header)  # raises the error that the file is not a language model
        return entries_named(header, str(name), self._tensors)

    @cached_property
    def _config(self) -> PlainConfig:
        """The sizes of the model, by transformers' names of fields."""
        chosen, layers = self._number("expert_used_count"), self._layer_count
        embedding = self._tensors.get(_EMBEDDING)
        rows, columns = (0, 0) if embedding is None or len(embedding.shape) != 2 else embedding.shape
        hidden = self._number("embedding_length") or columns
        needed = {"expert_used_count": chosen, "block_count": layers, "embedding_length": hidden}
        lacking = [f"the entry '{self._entries.architecture}.{key}'" for key, value in needed.items() if not value]
        lacking += [] if self._pieces else ["tensors blk.N.ffn_*_exps.weight of experts"]
        if lacking:
            raise LackingSizesError(f"the header of {self.place} lacks {' and '.join(lacking)}")
        heads = self._number("attention.head_count") or max(1, hidden // 128)
        stated = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "vocab_size": rows,
            "num_attention_heads": heads,
            "head_dim": self._number("attention.key_length") or max(1, hidden // heads),
            "intermediate_size": self._number("feed_forward_length"),
            "num_experts_per_tok": chosen,
            "max_position_embeddings": self._number("context_length") or None,
        }
        return PlainConfig(self._entries.architecture, stated, {}, {}, {})

    @property
    def _layer_count(self) -> int:
        """The number of layers without those for multi-token prediction, which are not computed."""
        found = [int(match[1]) + 1 for key in self._tensors if (match := _LAYER.match(key))]
        stated = self._number("block_count") or max(found, default=0)
        return max(0, stated - self._number("nextn_predict_layers"))

    @property
    def _cached_numbers(self) -> int:
        """The numbers that the KV cache has for a token in all layers."""
        c, latent = self._config, self._number("attention.kv_lora_rank")
        if latent:
            return int(c.num_hidden_layers * (latent + self._number("rope.dimension_count")))
        width = c.head_dim + (self._number("attention.value_length") or c.head_dim)
        heads = self._entries.values.get("attention.head_count_kv")
        if isinstance(heads, list):
            counts = [count for count in heads[: c.num_hidden_layers] if type(count) is int and count >= 0]
            if counts:
                return sum(counts) * int(width)
        return (self._number("attention.head_count_kv") or c.num_attention_heads) * int(width * c.num_hidden_layers)

    @cached_property
    def _pieces(self) -> Mapping[int, list[_ExpertTensor]]:
        """{layer: the tensors of its experts}."""
        found = defaultdict[int, list[_ExpertTensor]](list)
        layers = self._layer_count
        for key, tensor in self._tensors.items():
            piece = _piece(key, tensor)
            if piece is not None and piece.layer < layers:
                found[piece.layer].append(piece)
        return dict(sorted(found.items()))

    @cached_property
    def _dense(self) -> Mapping[str, StoredTensor]:
        """The tensors of the computed layers that do not belong to routed experts."""
        layers, found = self._layer_count, {}
        for key, tensor in self._tensors.items():
            match = _LAYER.match(key)
            if _piece(key, tensor) is None and (match is None or int(match[1]) < layers):
                found[key] = tensor
        return found

    def _sites(self) -> Iterator[ExpertsSite]:
        """Yield the experts of each layer, with the rows of all matrices but `down` joined to one matrix."""
        for layer, pieces in self._pieces.items():
            matrices = [piece for piece in pieces if len(piece.matrix) == 2]
            down = next((piece for piece in matrices if piece.is_down), None)
            others = [piece for piece in matrices if not piece.is_down]
            if down is None or not others:
                raise CheckpointError(f"{self.place} lacks matrices of the experts of layer {layer}; download it again")
            experts = down.experts or sum(piece.is_down for piece in matrices)
            rows = sum(piece.matrix[0] * (piece.experts or 1) for piece in others) // experts
            parts = (Part("gate_up_proj", (rows, others[0].matrix[1])), Part("down_proj", down.matrix))
            yield ExpertsSite(layer, f"blk.{layer}.experts", experts, parts)

    def _number(self, key: str) -> int:
        """Return a metadata entry that is a size: the largest one of a list, or 0 if there is none."""
        value = self._entries.values.get(key)
        values = value if isinstance(value, list) else [value]
        return max([each for each in values if type(each) is int and each > 0], default=0)


def _piece(key: str, tensor: StoredTensor) -> _ExpertTensor | None:
    """Return the tensor as a part of routed experts; None for any other tensor."""
    match, fused = _APART.fullmatch(key), _FUSED.fullmatch(key)
    if fused is not None:
        return _ExpertTensor(int(fused["layer"]), fused["kind"] == "down", tensor.shape[0], tensor)
    return None if match is None else _ExpertTensor(int(match["layer"]), match["kind"] == "down", 0, tensor)
