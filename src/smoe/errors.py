"""The exceptions that smoe raises on purpose, in one hierarchy.

    SmoeError
    |-- ConfigError            a setting is out of bounds or unknown
    |   `-- UnpreparedError      a setting needs something that does not exist yet, such as a pack or prices
    |-- BudgetError            the memory budget is too small; the message has the ledger
    |-- ModelError             the model cannot be served
    |   |-- NotMoEError        it has no routed experts
    |   |-- UnsupportedModelError  it has experts in a form that cannot be proven to be computed exactly
    |   `-- CheckpointError    its files are missing, truncated or inconsistent
    |       `-- ChatTemplateError  its chat template cannot format this conversation
    |           `-- ChatTemplateLimitError  its chat template exceeds the limits of time or memory
    |-- ImageError             an image of a prompt cannot be read
    |-- ContextError           the prompt does not fit the reserved context
    |-- TransferError          reading an expert failed during generation
    |-- DiskSpaceError         there is not enough free disk space
    |-- TraceError             a routing trace cannot be read or written
    |-- ClusterError           a cluster is unknown, or no worker has connected
    |   `-- WorkerRefusedError     the coordinator refuses this worker; trying again is useless
    |-- EngineStateError       the engine was closed or forked, or cannot do this in its present state
    |-- EngineBusyError        another request ran for longer than this one was allowed to wait
    `-- GenerationCancelledError  the running request was cancelled, or its engine was closed

Every message says what was given, what is allowed, and what to change. Settings are in backticks, spelled as in Python;
the command line replaces them by its own options (`cli/console.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from string import digits

_NEAR = 0.7
"""How similar a choice must be to a mistyped name to be suggested, from 0 to 1."""


class SmoeError(Exception):
    """The base class of all exceptions that smoe raises on purpose.

    If the error concerns a setting, `setting` is its name, `given` its value and `allowed` a description of its valid
    values, for programs. The name is a field of `EngineConfig`, an argument of the called function, or an option of the
    command.
    """

    model: str | None = None
    """The model that the user gave on the command line."""

    def __init__(
        self, *args: object, setting: str | None = None, given: object = None, allowed: str | None = None
    ) -> None:
        super().__init__(*args)
        self.setting = setting
        self.given = given
        self.allowed = allowed

    def concern(self, model: str | None) -> None:
        """Record the model that the user gave on the command line."""
        self.model = model

    @property
    def facts(self) -> dict[str, object]:
        """The attributes `setting`, `given` and `allowed`, ready for JSON; empty if the error concerns no setting."""
        if self.setting is None:
            return {}
        is_plain = isinstance(self.given, (str, int, type(None))) or (
            isinstance(self.given, float) and math.isfinite(self.given)
        )
        return {"setting": self.setting, "given": self.given if is_plain else repr(self.given), "allowed": self.allowed}


class ConfigError(SmoeError, ValueError):
    """A setting is out of bounds or unknown."""

    @classmethod
    def out_of_bounds(cls, setting: str, given: object, allowed: str) -> ConfigError:
        """Return the error for a setting with a value that is not allowed. `allowed`: a phrase that completes "it must
        be"."""
        return cls(f"`{setting}` is {given!r}; it must be {allowed}", setting=setting, given=given, allowed=allowed)

    @classmethod
    def no_choice(cls, setting: str, given: object, choices: Iterable[str]) -> ConfigError:
        """Return the error for a setting whose value is not one of `choices`. It suggests a choice with a similar
        name."""
        names = list(choices)
        allowed = ", ".join(names)
        message = f"`{setting}` is {given!r}{suggested(str(given), names)}; choose one of: {allowed}"
        return cls(message, setting=setting, given=given, allowed=allowed)

    @classmethod
    def too_few_tokens(cls, setting: str, tokens: int, least: int, purpose: str) -> ConfigError:
        """Return the error for a text or trace that has only `tokens` tokens. `setting`: the name of the argument;
        `least`: the required number; `purpose`: a phrase that completes "are needed"."""
        message = f"`{setting}` has {tokens} tokens, and at least {least} are needed {purpose}: give a longer one"
        return cls(message, setting=setting, given=tokens, allowed=f"at least {least} tokens")

    @classmethod
    def empty_prompt(cls, number: int, given: str) -> ConfigError:
        """Return the error for the prompt with this number, from 1, which has no tokens."""
        message = f"prompt {number} is empty, and this model has no start token; give a text of at least one token"
        return cls(message, setting="prompt", given=given, allowed="text of at least one token")

    @classmethod
    def idle(cls, setting: str, given: object, owner: str) -> ConfigError:
        """Return the error for a setting that has no effect because `owner`, the setting that it belongs to, was not
        given."""
        message = f"`{setting}` has an effect only with {owner}; add that, or leave out `{setting}`"
        return cls(message, setting=setting, given=given, allowed=f"only with {owner}")


def suggested(given: str, names: Iterable[str]) -> str:
    """Return a suggestion of a similar name; empty if there is none. Names that differ in digits only, such as int4 and
    int5, are no misspellings of each other."""
    near = get_close_matches(given.lower(), list(names), n=1, cutoff=_NEAR)
    if not near or (near[0] != given.lower() and near[0].strip(digits) == given.lower().strip(digits)):
        return ""
    return f" (did you mean {near[0]}?)"


class UnpreparedError(ConfigError):
    """A setting needs something that does not exist yet: a pack, prices, a trained predictor, workers or a device.

    For the model in the attribute `model`, the command line prints the commands that create the missing thing
    (`cli/first_use.py`).
    """


class BudgetError(SmoeError):
    """The memory budget is too small for what must fit; the message has the ledger."""


class ModelError(SmoeError):
    """The model cannot be served."""


class NotMoEError(ModelError):
    """The model has no routed experts, so there is nothing to offload."""


class UnsupportedModelError(ModelError):
    """The model has experts in a form for which exact results cannot be proven here."""


class CheckpointError(ModelError):
    """The checkpoint's files are missing, truncated or inconsistent."""


class ChatTemplateError(CheckpointError):
    """The chat template cannot format this conversation; the message quotes the template's reason."""


class ChatTemplateLimitError(ChatTemplateError):
    """Rendering the chat template takes more time or memory than it may."""


class ContextError(SmoeError, ValueError):
    """The prompt and the requested tokens do not fit the context that the budget reserves."""

    is_by_budget = True
    """Whether a larger budget or another `context_tokens` would help; False: the model has no more positions."""

    @classmethod
    def of_prompt(cls, tokens: int, context_tokens: int, limit: int | None, wanted: int = 1) -> ContextError:
        """Return the error for a prompt of `tokens` tokens in a context of `context_tokens`. The message names the
        limit that holds: the model's, or the memory budget's. `limit`: the model's; None: unknown. `wanted`: new
        tokens."""
        if limit is not None and tokens >= limit:
            reserved = f"; memory is reserved for {context_tokens}" if context_tokens < limit else ""
            error = cls(
                f"the prompt has {tokens} tokens, and this model allows {limit} tokens of prompt and answer together "
                f"(config.json){reserved}; shorten the prompt",
                setting="context_tokens",
                given=context_tokens,
                allowed=f"at most {limit} for this model",
            )
            error.is_by_budget = False
            return error
        least, all_of_them = tokens + 1, min(tokens + wanted, limit or tokens + wanted)
        return cls(
            f"the prompt has {tokens} tokens, and memory is reserved for a context of {context_tokens}; shorten the "
            f"prompt, or give `context_tokens={all_of_them}` (more context leaves less memory for experts)",
            setting="context_tokens",
            given=context_tokens,
            allowed=f"at least {least} for this prompt, {all_of_them} with all new tokens",
        )

    @classmethod
    def far_too_long(cls, context_tokens: int, tokens: str) -> ContextError:
        """Return the error for a prompt that is so long that its tokens were not all counted. `tokens`: their number in
        words, such as `about 5000`."""
        return cls(
            f"the prompt has {tokens} tokens, and the context has room for {context_tokens}; shorten it or raise "
            "`context_tokens`",
            setting="context_tokens",
            given=context_tokens,
            allowed="more for this prompt",
        )


class ImageError(SmoeError, ValueError):
    """An image of a prompt cannot be read, or exceeds a limit."""


class TransferError(SmoeError, OSError):
    """Reading an expert failed: the request is lost, but the engine remains usable."""


class DiskSpaceError(SmoeError, OSError):
    """There is not enough free disk space for a download, a pack, a trace or a widened model."""


class TraceError(SmoeError, ValueError):
    """A file is not a complete routing trace of this version, lacks the requested data, or cannot be written."""


class ClusterError(SmoeError, ValueError):
    """A cluster is unknown or damaged, an invitation is invalid, or no worker has connected. No error is raised for a
    worker that fails later."""


class WorkerRefusedError(ClusterError):
    """The coordinator refuses this worker, because of its weights, its numeric results, its version of smoe or its
    invitation."""


class EngineStateError(SmoeError, RuntimeError):
    """The engine was closed or forked, was given another engine's cache, or cannot do this to a loaded model."""


class EngineBusyError(SmoeError, TimeoutError):
    """Another request ran for longer than this one was allowed to wait; nothing was computed."""


class GenerationCancelledError(SmoeError, RuntimeError):
    """This request was cancelled, or its engine was closed. After a cancellation the engine remains usable."""
