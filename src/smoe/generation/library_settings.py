"""Sampling settings in the form of transformers, and the tokens that end a text. Both come from the user's settings and
the checkpoint's."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from smoe.generation.sampling_settings import Sampling

COLDEST = 1e-20
"""The lowest temperature that differs from 0. Below it only the most probable token remains, and logits divided by the
temperature would exceed float32."""


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """Return the tokens that end a text, from the checkpoint's generation config or else the tokenizer."""
    own = getattr(model.generation_config, "eos_token_id", None)
    own = tokenizer.eos_token_id if own is None else own
    return set(own) if isinstance(own, (list, tuple)) else set() if own is None else {int(own)}


def pad_token(tokenizer: Any) -> int:
    """Return the tokenizer's padding token. If the tokenizer has none, return any other token: padding is masked, so
    the token has no effect."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def generation_config(model: PreTrainedModel, tokenizer: Any, sampling: Sampling, new_tokens: int) -> GenerationConfig:
    """Return the sampling settings in the form of transformers. `new_tokens`: the largest number of new tokens. For
    settings that are None, transformers uses the checkpoint's generation config or its own defaults."""
    ends = sorted(end_tokens(model, tokenizer))
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        **_choice(sampling),
        pad_token_id=pad_token(tokenizer),
        eos_token_id=ends or None,
        num_beams=1,
        use_cache=True,
    )
    if sampling.ignores_end:
        config.min_new_tokens = new_tokens
    return config


def _choice(sampling: Sampling) -> dict[str, Any]:
    """Return the settings that decide which token is chosen, as arguments of transformers' `GenerationConfig`."""
    given = {
        "temperature": sampling.temperature or None,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
        "min_p": sampling.min_p,
    }
    if sampling.temperature is None:  # a limit such as top_p implies sampling
        narrows = any(value is not None for value in (sampling.top_p, sampling.top_k, sampling.min_p))
        return given | ({"do_sample": True} if narrows else {})
    if sampling.temperature > COLDEST:
        given |= {"do_sample": True}
    else:  # the library's defaults, because it warns of unused settings
        given |= {"do_sample": False, "temperature": 1.0, "top_k": 50, "min_p": None}
    is_all_given = None not in (sampling.top_p, sampling.top_k, sampling.repetition_penalty)
    return given | ({"no_repeat_ngram_size": 0} if is_all_given else {})


_USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}
"""{setting: its default value in transformers}."""
_RARE = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size")


def choices_of(model: PreTrainedModel, sampling: Sampling) -> dict[str, tuple[Any, str]]:
    """Return {setting: (value, origin)} for all settings that decide which token is chosen. The origin is "given", "the
    model's" or "usual" (a default of transformers)."""
    given, own = _choice(sampling), model.generation_config
    if not (given.get("do_sample") if "do_sample" in given else own.do_sample):
        names: tuple[str, ...] = ("repetition_penalty",)
    else:
        names = (*_USUAL, *_RARE)
    found = {}
    for name in names:
        if given.get(name) is not None:
            found[name] = given[name], "given"
        elif getattr(own, name, None) is not None:
            found[name] = getattr(own, name), "the model's"
        elif name in _USUAL:
            found[name] = _USUAL[name], "usual"
    return found
