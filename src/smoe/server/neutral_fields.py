"""Fields of other servers' APIs that this server does not support. Many clients send them in every request with a value
that has no effect.

The server accepts the value without effect and refuses any other value (`RequestFields.check_unsupported`).
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "bad_words": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "echo": (False,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "skip_special_tokens": (True,),
    "smoothing_factor": (0,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
"""The fields, each with its values that have no effect; null is always one of them."""


class NeutralFields(BaseModel):
    """The fields of other servers' APIs that every request may have."""

    bad_words: Any = None
    best_of: Any = None
    dry_multiplier: Any = None
    dynatemp_range: Any = None
    early_stopping: Any = None
    echo: Any = None
    epsilon_cutoff: Any = None
    eta_cutoff: Any = None
    guidance_scale: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    include_stop_str_in_output: Any = None
    length_penalty: Any = None
    min_tokens: Any = None
    mirostat: Any = None
    no_repeat_ngram_size: Any = None
    num_beams: Any = None
    penalty_alpha: Any = None
    skip_special_tokens: Any = None
    smoothing_factor: Any = None
    spaces_between_special_tokens: Any = None
    stop_token_ids: Any = None
    structured_outputs: Any = None
    suffix: Any = None
    tfs_z: Any = None
    top_a: Any = None
    top_n_sigma: Any = None
    typical_p: Any = None
    use_beam_search: Any = None
    xtc_probability: Any = None
    # ignored: what they are about is off
    dynatemp_exponent: Any = None
    mirostat_eta: Any = None
    mirostat_tau: Any = None
    xtc_threshold: Any = None
