"""Constrained output, such as JSON: a grammar masks the tokens that may not come next.

llguidance compiles the grammars. Each is compiled before its request is queued, so that an unsupported schema is
refused at once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from smoe.server.api_errors import ApiError, refused
from smoe.server.fields import GivenGrammar

_LONGEST_SCHEMA = 200_000
"""The maximum number of characters of a schema."""
_STACK_BYTES = 256 << 20
"""The stack of the thread that compiles a grammar: llguidance recurses at each reference. The deepest accepted schema,
a chain of 4,300 references, takes 150 MiB of it. A usual stack of 8 MiB would overflow after some hundreds and end the
process. The system allocates only what is touched."""
_T = TypeVar("_T")
COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options for JSON without optional spaces: small models, if they may write spaces, write nothing else."""


class Grammars:
    """Compiles grammars for the tokens of one model. The first use prepares the vocabulary, which takes a second for a
    large vocabulary."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, sorted(ends)
        self._making = threading.Lock()
        self._tokens: Any = None

    def of_schema(self, schema: dict[str, Any], param: str) -> Grammar:
        """Return the grammar of JSON that follows a schema. Raises an `ApiError` that names `param` for an unsupported
        schema."""
        import llguidance

        try:
            text = schema_text(schema, param)
            return self.of_rules(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=COMPACT), param)
        except (ValueError, RecursionError) as error:
            raise _unsupported(error, param) from error

    def of_lark(self, rules: str, param: str) -> Grammar:
        """Return a grammar from rules in llguidance's Lark format."""
        import llguidance

        return self.of_rules(llguidance.LLMatcher.grammar_from_lark(rules), param)

    def of_given(self, given: str | GivenGrammar, param: str = "grammar") -> Grammar:
        """Return the grammar that a request contains: in GBNF or Lark, a regular expression, or a JSON schema. Raises
        an `ApiError` for an invalid grammar."""
        import llguidance
        from llguidance.gbnf_to_lark import any_to_lark, gbnf_to_lark

        kind, value = (None, given) if isinstance(given, str) else (given.type, given.value)
        if (kind == "json") != isinstance(value, dict):
            raise refused(
                f"'{param}.value' must be a JSON schema with the type json, else a string", param, "invalid_type"
            )
        if isinstance(value, dict):
            return self.of_schema(value, param)
        if len(value) > _LONGEST_SCHEMA:
            raise refused(f"the grammar is longer than {_LONGEST_SCHEMA} characters", param, "invalid_grammar")
        try:
            match kind:
                case "regex":
                    rules = llguidance.LLMatcher.grammar_from_regex(value)
                case "lark":
                    rules = llguidance.LLMatcher.grammar_from_lark(value)
                case _:
                    lark = gbnf_to_lark(value) if kind == "gbnf" else any_to_lark(value)
                    rules = llguidance.LLMatcher.grammar_from_lark(lark)
        except Exception as error:  # the converter raises errors of many classes for invalid grammars
            raise _unsupported(error, param) from error
        return self.of_rules(rules, param)

    def of_rules(self, rules: str, param: str) -> Grammar:
        """Return a grammar from rules in llguidance's internal format."""
        import llguidance

        tokens = self._known_tokens(param)
        matcher = self._on_a_deep_stack(lambda: llguidance.LLMatcher(tokens, rules))
        if matcher.is_error():
            raise _unsupported(matcher.get_error(), param)
        grammar = Grammar(matcher, self._vocabulary, param)
        grammar.check_first()
        return grammar

    def _on_a_deep_stack(self, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, computed on a thread with a large stack."""
        with ThreadPoolExecutor(1, "smoe-grammar") as thread:
            with self._making:  # the size holds for all threads that begin meanwhile
                before = threading.stack_size(_STACK_BYTES)
                try:
                    made = thread.submit(work)
                finally:
                    threading.stack_size(before)
            return made.result()

    def _known_tokens(self, param: str) -> Any:
        from smoe.server.grammar_tokens import grammar_tokens

        with self._making:
            if self._tokens is None:
                if not self._ends:
                    message = "this model has no end-of-text token, so its output cannot be constrained"
                    raise refused(message, param, "unsupported_parameter")
                self._tokens = grammar_tokens(self._tokenizer, self._vocabulary, self._ends)
            return self._tokens


class Grammar:
    """The state of a grammar within one text. The decode loop uses it as a `Constraint` on the next token."""

    def __init__(self, matcher: Any, vocabulary: int, param: str) -> None:
        """`param`: the request's field that contains the rules."""
        self._matcher, self._param = matcher, param
        self._vocabulary = vocabulary
        self._mask = np.zeros((vocabulary + 31) // 32, np.int32)

    def another(self) -> Grammar:
        """Return a copy of this state, for another text that must match the same grammar."""
        return Grammar(self._matcher.deep_copy(), self._vocabulary, self._param)

    def check_first(self) -> None:
        """Raise an `ApiError` for a grammar that fails at the first token, for example by endless recursion, or that no
        text matches."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        if not self._mask.any():
            raise _unsupported("no text can match it", self._param)

    def narrow(self, logits: torch.Tensor) -> None:
        """Set the logits of tokens that the grammar forbids to minus infinity. `logits`: [V]."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: self._vocabulary]
        forbidden = torch.from_numpy(allowed == 0).to(logits.device)
        logits[: self._vocabulary].masked_fill_(forbidden, -torch.inf)
        logits[self._vocabulary :] = -torch.inf

    def take(self, token: int) -> None:
        """Advance the grammar's state by the chosen token."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        """Raise an `ApiError` if the grammar's state has become too complex within a text. The cause is the request's
        schema."""
        if self._matcher.is_error():
            raise _unsupported(self._matcher.get_error(), self._param)


_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "if", "$ref"}
"""Keywords of JSON schemas that determine which properties an object may have in addition to the listed ones."""
_VALUES = {"enum", "const", "default", "examples"}
"""Keywords of JSON schemas whose values contain no schemas."""


def closed(schema: Any) -> Any:
    """Return a JSON schema whose objects allow only the properties that they list. Objects for which the schema says
    otherwise are unchanged.

    pydantic, zod and other libraries leave `additionalProperties` out; a model could then add keys until the text
    reaches its limit.
    """
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: each if key in _VALUES or key == "allOf" else closed(each) for key, each in schema.items()}
    lists_properties = isinstance(schema.get("properties"), dict) and not schema.keys() & _OPEN
    return {**parts, "additionalProperties": False} if lists_properties else parts


def schema_text(schema: dict[str, Any], param: str) -> str:
    """Return a JSON schema as text, after `closed` has changed it. Raises an `ApiError` that names the request's field
    `param` if the text is too long."""
    if len(json.dumps(schema)) > _LONGEST_SCHEMA:
        raise refused(f"the schema is longer than {_LONGEST_SCHEMA} characters", param, "invalid_json_schema")
    return json.dumps(closed(schema))


def _unsupported(why: object, param: str) -> ApiError:
    code = "invalid_grammar" if param == "grammar" else "invalid_json_schema"
    return refused(f"'{param}' cannot be enforced: {_first_line(str(why))}", param, code)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
