"""The estimated description of a folder's model that smoe cannot run, from the usual fields of its config.json.

Attention, experts and shared experts are assumed to have the shapes that they have in most families. Weight files are
not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.memory.checkpoint_json import read_object
from smoe.memory.dtypes import Dtype
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import Part
from smoe.models.config_file import check_config
from smoe.models.family_parts import Weights, experts, gated, head_dim, heads, latent, linear, norm, norms, router
from smoe.models.file_bytes import FileBytes, expected_bytes
from smoe.models.outline import Anatomy, ExpertsSite, Outline, Weight
from smoe.models.packed import Contents, Packed, bytes_in_precision
from smoe.models.plain_config import PlainConfig
from smoe.models.released_schemes import stated_in
from smoe.models.rough_precision import nearest_precision, stated_bits
from smoe.models.safetensors_sizes import SafetensorsSizes
from smoe.models.spec import ModelSpec
from smoe.models.usual_fields import usual_config

_ROUGH = (
    "all sizes are estimates: smoe reads the fields of config.json by their usual meaning, and assumes usual attention "
    "and gated experts of three matrices"
)
_UNKNOWN_BITS = (
    "the experts are quantized in a way that smoe does not read, and the settings do not say with how many bits: the "
    "sizes are those of unquantized experts"
)


class RoughFolder(SafetensorsSizes):
    """A `Described` model of any family in a folder, with estimated sizes."""

    def fields(self) -> tuple[str, dict[str, Any]]:
        return check_config(self.place), dict(read_object(self.config_place))

    def model_config(self) -> PlainConfig:
        return self._read[0]

    def outline(self, dtype: Dtype) -> Outline:
        return rough_outline(self._read[0], dtype)

    def has_weights(self) -> bool:
        return False

    def quantised_bytes(self, spec: ModelSpec) -> Mapping[int, int] | None:
        if spec.precision != "auto":
            return bytes_in_precision(spec)
        try:
            is_read = self._scheme is not None and not self._scheme.is_reordered
            if self._stated is None or self._has_mxfp4 or is_read:
                return super().quantised_bytes(spec)
        except (CheckpointError, UnsupportedModelError):
            pass  # quantized in a way that smoe does not read
        precision = nearest_precision(self._settings)
        return None if precision is None else bytes_in_precision(replace(spec, precision=precision))

    def quantised_dense(self, spec: ModelSpec) -> Mapping[str, StoredTensor]:
        try:
            return super().quantised_dense(spec)
        except (CheckpointError, UnsupportedModelError):
            return {}

    def file_bytes(self, spec: ModelSpec) -> FileBytes:
        plain = expected_bytes(spec.outline, spec.own_dtype, None, False)
        if spec.stored_bytes is None or plain.experts is None:
            return plain
        own = sum(site.experts * spec.stored_bytes[site.layer] for site in spec.sites)
        return FileBytes(plain.together - plain.experts + own, own)

    def doubts(self, spec: ModelSpec) -> tuple[str, ...]:
        is_unknown = spec.stored_bytes is None and bool(self._settings) and stated_bits(self._settings) is None
        return (_ROUGH, *([_UNKNOWN_BITS] if is_unknown else []), *self._read[1])

    def packed(self, contents: Contents) -> Packed | None:
        return None

    def check_servable(self) -> None:
        """Do nothing: smoe cannot run the model anyway."""

    @cached_property
    def _read(self) -> tuple[PlainConfig, tuple[str, ...]]:
        return usual_config(*self.fields())

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        """The quantization settings; empty if the files state none."""
        try:
            stated = self._stated
        except CheckpointError:  # of the file of modelopt
            stated = stated_in(read_object(self.config_place), self.config_place)
        return {} if stated is None else stated.fields


def rough_outline(c: PlainConfig, dtype: Dtype) -> Outline:
    """Return the outline of a model with the sizes in a configuration of `usual_config`, and with the parts that most
    families have. `dtype`: that of the KV cache."""
    weights = dict(_weights(c))
    sites = [
        ExpertsSite(layer, f"model.layers.{layer}.mlp.experts", c.num_experts, tuple(_parts(weights, layer)))
        for layer in c.expert_layers
    ]
    routers = {site.layer: f"model.layers.{site.layer}.mlp.gate" for site in sites}
    embedding = "model.embed_tokens.weight"
    return Outline(
        weights=weights,
        buffers={},
        sites=sites,
        anatomy=Anatomy(
            kv_bytes_per_token=_cached_numbers(c) * c.num_hidden_layers * dtype.itemsize,
            state_bytes_per_sequence=0,
            routers=routers,
            gates=routers,
            top_k=dict.fromkeys(routers, c.num_experts_per_tok),
        ),
        embedding=None if c.tie_word_embeddings else embedding,
        tied={"lm_head.weight": embedding} if c.tie_word_embeddings else {},
    )


def _has_latent_cache(c: PlainConfig) -> bool:
    return all(c.get(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))


def _cached_numbers(c: PlainConfig) -> int:
    """Return how many numbers the KV cache has for a token in a layer."""
    if _has_latent_cache(c):
        return int(c.kv_lora_rank + c.qk_rope_head_dim)
    return 2 * int(c.num_key_value_heads) * head_dim(c)


def _weights(c: PlainConfig) -> Weights:
    yield "model.embed_tokens.weight", Weight((c.vocab_size, c.hidden_size), is_plain=True)
    with_experts = set(c.expert_layers)
    for layer in range(c.num_hidden_layers):
        name = f"model.layers.{layer}"
        yield from norms(name, c)
        if _has_latent_cache(c):
            yield from latent(f"{name}.self_attn", c)
        else:
            yield from heads(f"{name}.self_attn", c)
        if layer in with_experts:
            yield from _of_experts(f"{name}.mlp", c)
        else:
            yield from gated(f"{name}.mlp", c, c.get("intermediate_size") or c.moe_intermediate_size)
    yield from norm("model.norm", c.hidden_size)
    if not c.tie_word_embeddings:
        yield from linear("lm_head", c.vocab_size, c.hidden_size)


def _of_experts(name: str, c: PlainConfig) -> Weights:
    yield from router(f"{name}.gate", c, c.num_experts)
    yield from experts(name, c, c.num_experts, c.moe_intermediate_size)
    shared = c.get("shared_expert_intermediate_size") or c.shared_experts * c.moe_intermediate_size
    if shared:
        yield from gated(f"{name}.shared_experts", c, shared)


def _parts(weights: Mapping[str, Weight], layer: int) -> Iterator[Part]:
    for part in ("gate_up_proj", "down_proj"):
        yield Part(part, weights[f"model.layers.{layer}.mlp.experts.{part}"].shape[1:])
