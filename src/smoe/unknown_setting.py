"""The error for an unknown setting. It suggests a similar name or, for another library's argument, what to use here."""

from __future__ import annotations

from difflib import get_close_matches

from smoe.config import SETTINGS
from smoe.errors import ConfigError

_SHORT = {"memory_bytes": "memory", "resident_share": "resident", "host_memory_bytes": "host_memory"}
"""{field of `EngineConfig`: its name as an argument of `from_pretrained`}, where the two names differ."""
_NAMES = sorted({_SHORT.get(name, name) for name in SETTINGS} | {"preset", "revision"})
"""The names of the arguments of `from_pretrained`."""
_WHERE = "help(smoe.config.EngineConfig) and docs/python.md list all settings"
_BITS = "give `precision=int4` once `smoe pack --precision int4` has written such experts."
_CONTEXT = "did you mean `context_tokens`?"
_HUB = "set it in the environment: HF_TOKEN, HF_HOME, HF_HUB_OFFLINE=1."
_KERNELS = "leave it out; `kernels` says what computes."
_NOT_NEEDED = "leave it out; experts are read from the checkpoint as they are needed."
_OTHERS = {
    "attn_implementation": _KERNELS,
    "cache_dir": _HUB,
    "context": _CONTEXT,
    "device_map": "leave it out; `memory` says how much stays in memory, `device` where it computes.",
    "experts_implementation": _KERNELS,
    "load_in_4bit": _BITS,
    "load_in_8bit": _BITS,
    "local_files_only": _HUB,
    "low_cpu_mem_usage": _NOT_NEEDED,
    "max_length": _CONTEXT,
    "max_memory": "did you mean `memory`?",
    "max_model_len": _CONTEXT,
    "max_new_tokens": "it is an argument of model.generate.",
    "n_ctx": _CONTEXT,
    "offload_buffers": _NOT_NEEDED,
    "offload_folder": _NOT_NEEDED,
    "offload_state_dict": _NOT_NEEDED,
    "process_memory": 'give `memory` and `count="process"`.',
    "quantization_config": _BITS,
    "token": _HUB,
    "torch_dtype": "did you mean `dtype`?",
    "trust_remote_code": "leave it out; no code of a checkpoint is run.",
}
"""{argument of another library: a hint what to use in smoe}."""


def unknown_setting(name: str, given: object) -> ConfigError:
    """Return the error for an argument `name` that is not a setting."""
    near = get_close_matches(name, _NAMES, n=1)
    hint = _OTHERS.get(name, f"did you mean `{near[0]}`?" if near else "no setting has a similar name.")
    return ConfigError(
        f"unknown setting {name!r}: {hint} {_WHERE}",
        setting=name,
        given=given,
        allowed=f"settings are {', '.join(_NAMES)}",
    )
