"""Everything smoe raises on purpose, in one tree.

    SmoeError
    |-- ConfigError            a setting is out of bounds or unknown
    |   `-- UnpreparedError      it needs what is not there yet: a pack, prices, a trained predictor, workers, a device
    |-- BudgetError            the memory budget cannot work; carries the ledger
    |-- ModelError             the model cannot be served
    |   |-- NotMoEError        it has no routed experts
    |   |-- UnsupportedModelError  it has, but in a form that we cannot prove right
    |   `-- CheckpointError    its files are missing, truncated or inconsistent
    |       `-- ChatTemplateError  its chat template cannot write this conversation
    |           `-- ChatTemplateLimitError  or not within its bounds of time and memory
    |-- ContextError           the prompt does not fit the reserved context
    |-- TransferError          reading an expert failed while generating
    |-- DiskSpaceError         not enough free disk for what was asked
    |-- TraceError             a routing trace cannot be read or written
    |-- ClusterError           a cluster is unknown, or no worker came
    |   `-- WorkerRefusedError     main does not let this worker in: nothing is gained by trying again
    |-- EngineStateError       closed, forked, used with a foreign cache, or asked for what a live model cannot do
    |-- EngineBusyError        another request is running, and waiting for it has a bound
    `-- GenerationCancelledError  the running request was cancelled, or its engine closed

Each message says what was given, what is allowed, and what to change. Settings stand in backticks, as Python spells
them; the command line shows its own options in their place (`cli/console.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class SmoeError(Exception):
    """Base of all errors that smoe raises on purpose.

    Where one is about a setting, `setting`, `given` and `allowed` (in words) say so to programs. `setting` is a field
    of `EngineConfig`, an argument of the function that was called, or an option of the command.
    """

    model: str | None = None
    """The model that was given to the command line, which sets it."""

    def __init__(
        self, *args: object, setting: str | None = None, given: object = None, allowed: str | None = None
    ) -> None:
        super().__init__(*args)
        self.setting = setting
        self.given = given
        self.allowed = allowed

    @property
    def facts(self) -> dict[str, object]:
        """Setting, given and allowed, where the error is about a setting: for JSON."""
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
        """`setting` is `given`; it must be `allowed`."""
        return cls(f"`{setting}` is {given!r}; it must be {allowed}", setting=setting, given=given, allowed=allowed)

    @classmethod
    def no_choice(cls, setting: str, given: object, choices: Iterable[str]) -> ConfigError:
        """`setting` is `given`, which is none of the `choices`."""
        allowed = ", ".join(choices)
        return cls(f"`{setting}` is {given!r}; choose one of: {allowed}", setting=setting, given=given, allowed=allowed)

    @classmethod
    def too_few_tokens(cls, setting: str, tokens: int, least: int, purpose: str) -> ConfigError:
        """What `setting` names, a text or a trace, has `tokens`, of which `purpose` needs at least so many."""
        message = f"`{setting}` has {tokens} tokens, and at least {least} are needed {purpose}: give a longer one"
        return cls(message, setting=setting, given=tokens, allowed=f"at least {least} tokens")

    @classmethod
    def idle(cls, setting: str, given: object, owner: str) -> ConfigError:
        """`setting` would have no effect, as it belongs to `owner`, which was not given."""
        message = f"`{setting}` belongs to {owner}; add that, or leave it out"
        return cls(message, setting=setting, given=given, allowed=f"only with {owner}")


class UnpreparedError(ConfigError):
    """A setting needs what is not there yet: a pack, prices, a trained predictor, workers, a device.

    The command line adds what to type (`cli/first_use.py`), for the `model` that its command was given."""


class BudgetError(SmoeError):
    """The memory budget cannot hold what it must; the message carries the ledger."""


class ModelError(SmoeError):
    """The model cannot be served."""


class NotMoEError(ModelError):
    """The model has no routed experts, so there is nothing to offload."""


class UnsupportedModelError(ModelError):
    """The model has experts in a form whose exactness cannot be proven here."""


class CheckpointError(ModelError):
    """The checkpoint's files are missing, truncated or inconsistent."""


class ChatTemplateError(CheckpointError):
    """The chat template cannot write this conversation; the message says why, in the template's words."""


class ChatTemplateLimitError(ChatTemplateError):
    """The chat template does not end within its bounds of time and memory."""


class ContextError(SmoeError, ValueError):
    """The tokens asked for do not fit the context reserved in the budget."""

    @classmethod
    def far_too_long(cls, context_tokens: int) -> ContextError:
        """A prompt so long that its tokens were not counted to the end."""
        return cls(
            f"the prompt has many more than the {context_tokens} tokens that the context has room for; shorten it or "
            "raise `context_tokens`",
            setting="context_tokens",
            given=context_tokens,
            allowed="more for this prompt",
        )


class TransferError(SmoeError, OSError):
    """Reading an expert failed; the request is lost, the engine stays usable."""


class DiskSpaceError(SmoeError, OSError):
    """Not enough free disk space for a download, a pack, a trace or a widened model."""


class TraceError(SmoeError, ValueError):
    """A routing trace is none, of another version, not whole, or without what is asked of it; or cannot be written."""


class ClusterError(SmoeError, ValueError):
    """A cluster is unknown or damaged, an invitation is none, or no worker came; workers that fail raise nothing."""


class WorkerRefusedError(ClusterError):
    """Main refuses this worker, for its weights, its bits, its smoe or its invitation."""


class EngineStateError(SmoeError, RuntimeError):
    """The engine is closed, was forked, was given a cache that is not its own, or cannot do this to a live model."""


class EngineBusyError(SmoeError, TimeoutError):
    """It was another request's turn for longer than this one was to wait; nothing was computed."""


class GenerationCancelledError(SmoeError, RuntimeError):
    """This request was cancelled, or closed its engine; after a cancellation the engine stays usable."""
