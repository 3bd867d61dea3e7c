"""Computes a model's configuration and outline by arithmetic, for the families of `families.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from smoe.memory.dtypes import F32, Dtype
from smoe.memory.store import Part
from smoe.models.families import FAMILIES, Family
from smoe.models.family_parts import head_dim, linear, norm
from smoe.models.outline import Anatomy, Buffer, ExpertsSite, Outline, Weight
from smoe.models.plain_config import PlainConfig, UndescribedError

_EXPERTS = re.compile(r"(?P<module>model\.(language_model\.)?layers\.(?P<layer>\d+)\..*experts)\.(?P<part>\w+)")
_OTHERS_CODE = re.compile(r".*(implementation|kernel(s|_config|_mapping)?)(_internal)?")
_OUTPUT = "lm_head.weight"


def plain_config(model_type: str, stated: Mapping[str, Any]) -> PlainConfig:
    """Return the configuration with the fields `stated` in a config.json. Raise `UndescribedError` if only transformers
    can read it."""
    family, whole = FAMILIES.get(model_type), stated
    if family is not None and family.is_nested:
        stated = _of_text(stated)
    if family is not None and family.usual_form is not None:
        stated = family.usual_form(dict(stated), whole)
    if family is None or "quantization_config" in stated or any(map(_OTHERS_CODE.fullmatch, stated)):
        raise UndescribedError(model_type)
    config = PlainConfig(model_type, stated, family.defaults, family.aliases, whole)
    for key, usual in {**family.usual, "hidden_act": "silu"}.items():
        if config.get(key, usual) != usual:
            raise UndescribedError(f"{key} {config.get(key)!r:.80}")
    config.settle(num_key_value_heads=config.num_key_value_heads or config.num_attention_heads)
    config.settle(_attn_implementation=family.attention)
    if config.get("qk_rope_head_dim") and config.get("kv_lora_rank"):
        config.settle(head_dim=config.qk_rope_head_dim)
    _check(config)
    return config


def _of_text(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the language model from a configuration that contains other models too."""
    text = stated.get("text_config")
    if not isinstance(text, Mapping):
        raise UndescribedError(f"text_config {text!r:.80}")
    outer = ("dtype", "torch_dtype", "quantization_config")
    return {key: stated[key] for key in outer if key in stated} | {k: v for k, v in text.items() if v is not None}


def _check(c: PlainConfig) -> None:
    """Raise `UndescribedError` if transformers could not build or run the model. The caller then uses transformers,
    which reports the error in more detail."""
    groups, chosen = c.get("n_group"), c.get("topk_group")
    experts = c.get("n_routed_experts") or c.get("num_experts") or 0
    is_odd = (
        not all((c.vocab_size, c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads))
        or c.num_attention_heads % c.num_key_value_heads
        or (c.hidden_size % c.num_attention_heads and (not c.get("head_dim") or c.model_type == "deepseek_v2"))
        or head_dim(c) % 2
        or (c.pad_token_id or 0) >= c.vocab_size
        or (groups is not None and (not groups or experts % groups or experts // groups < 2))
        or (groups is not None and not 1 <= (chosen or 0) <= groups)
        or (c.model_type != "deepseek" and c.get("n_shared_experts", 1) in (0, None))
    )
    if is_odd:
        raise UndescribedError(c.model_type)


def outline_by_family(config: PlainConfig, dtype: Dtype) -> Outline:
    """Return the outline of a model: the names and sizes of its weights, experts and caches. Raise `UndescribedError`
    if the description of the family does not cover the model."""
    family = FAMILIES[config.model_type]
    weights = _weights(config, family)
    if dtype == F32:
        weights = {name: weight._replace(is_wide=False) for name, weight in weights.items()}
    sites = _sites(weights, family)
    top_k = getattr(config, family.top_k)
    if not sites or not top_k or any(top_k > site.experts for site in sites):
        raise UndescribedError("its experts")
    a_token, a_text, a_text_wide = family.cached(config)
    routers = {site.layer: f"{family.place}.layers.{site.layer}.{family.router}" for site in sites}
    gates = {layer: name for layer, name in routers.items() if not _is_by_tokens(config, family, layer)}
    embedding = f"{family.place}.embed_tokens.weight"
    return Outline(
        weights=weights,
        buffers=_buffers(config, family, sites),
        sites=sites,
        anatomy=Anatomy(
            kv_bytes_per_token=a_token * dtype.itemsize,
            state_bytes_per_sequence=a_text * dtype.itemsize + a_text_wide * F32.itemsize,
            routers=routers,
            gates=gates if family.has_gates else {},
            top_k=dict.fromkeys(routers, top_k),
        ),
        embedding=None if config.tie_word_embeddings else embedding,
        tied={_OUTPUT: embedding} if config.tie_word_embeddings else {},
    )


def _is_by_tokens(c: PlainConfig, family: Family, layer: int) -> bool:
    return family.by_tokens is not None and family.by_tokens(c, layer)


def _weights(c: PlainConfig, family: Family) -> dict[str, Weight]:
    found = {f"{family.place}.embed_tokens.weight": Weight((c.vocab_size, c.hidden_size), is_plain=True)}
    for layer in range(c.num_hidden_layers):
        found.update(family.layer(f"{family.place}.layers.{layer}", c, layer))
    found.update(norm(family.final_norm, c.hidden_size, family.has_norm_bias))
    has_bias = family.head_bias is not None and getattr(c, family.head_bias)
    found.update(linear(_OUTPUT.removesuffix(".weight"), c.vocab_size, c.hidden_size, has_bias))
    if c.tie_word_embeddings:
        del found[_OUTPUT]
    if family.outside_layers is not None:
        found.update(family.outside_layers(c))
    return found


def _sites(weights: Mapping[str, Weight], family: Family) -> list[ExpertsSite]:
    parts: dict[tuple[int, str, int], list[Part]] = {}
    for name, weight in weights.items():
        match = _EXPERTS.fullmatch(name)
        if match is not None:
            experts, *shape = weight.shape
            site = int(match["layer"]), match["module"], experts
            parts.setdefault(site, []).append(Part(match["part"], tuple(shape)))
    return [
        ExpertsSite(
            *site,
            tuple(of),
            frozenset(part.name for part in of if family.is_transposed),
            takes_turns=family.takes_turns,
        )
        for site, of in sorted(parts.items())
    ]


def _buffers(c: PlainConfig, family: Family, sites: list[ExpertsSite]) -> dict[str, Buffer]:
    found = {} if family.buffers is None else dict(family.buffers(c))
    if family.rotary is not None:
        turned = (int(head_dim(c) * _turned_share(c, family)) + 1) // 2
        found |= {f"{family.rotary}.{name}": Buffer((turned,)) for name in ("inv_freq", "original_inv_freq")}
    for site in sites if family.correction is not None else ():
        if not _is_by_tokens(c, family, site.layer):
            name = f"{family.place}.layers.{site.layer}.{family.correction}"
            found[name] = Buffer((site.experts,), is_stored=True)
    return found


def _turned_share(c: PlainConfig, family: Family) -> float:
    """Return the fraction of a head's dimensions that rotary embeddings rotate."""
    share = c.rope_parameters.get("partial_rotary_factor", c.get("partial_rotary_factor"))
    if share is None and c.get("rotary_dim") is not None:
        share = c.rotary_dim / c.head_dim
    if share is None:
        return family.turned
    if not family.can_turn_less or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise UndescribedError(f"partial_rotary_factor is {share!r:.80}, which smoe does not support for this family")
    return float(share)
