"""The program that renders chat templates in a separate process, which `template_process.py` starts.

    parent                                      this process
    length, {"template", "variables"} as JSON -->
                                              <-- kind, length, text: a rendered conversation, or an error message

A template is a program that comes with the weights. A single operation of Jinja can take forever inside C code, where
neither a step counter nor a signal handler runs. An example is the text of a list that contains itself twice, sixty
levels deep. No sandbox within the interpreter can limit this. But a process can be ended at any time, and the system
limits its memory. The template works on a copy of the data, so it may change the data (`list.append`).

The program imports nothing of smoe and no library except Jinja: it starts in a tenth of a second and takes 20 MB.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

SECONDS = 10.0
"""The time limit of one conversation in seconds, for all attempts together. Real templates take milliseconds."""
MEMORY_BYTES = 512 << 20
"""The limit of the process's address space, on Linux."""
MOST_CHARACTERS = 64 << 20
"""The largest number of characters of a rendered conversation."""
RENDERED, FAILED = b"R", b"F"
LENGTH_BYTES = 8
_SPARE_SECONDS = 5.0
"""The process ends itself this many seconds after the parent's deadline, because the parent may no longer exist."""
_LONGEST_REASON = 2000


def main() -> None:
    """Respond to requests until the input ends. Arguments of the command line: seconds, bytes of memory, folders of
    libraries."""
    seconds, memory_bytes, *folders = sys.argv[1:]
    sys.path += folders
    compiled = lru_cache(4)(_environment().from_string)
    _limit_memory(int(memory_bytes))
    with Path(os.devnull).open("w") as nowhere:
        while request := _read(sys.stdin.buffer):
            faulthandler.dump_traceback_later(float(seconds) + _SPARE_SECONDS, file=nowhere, exit=True)
            kind, text = _answer(compiled, request)
            faulthandler.cancel_dump_traceback_later()
            _write(sys.stdout.buffer, kind, text)


def _answer(compiled: Callable[[str], Any], request: bytes) -> tuple[bytes, str]:
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        wanted = json.loads(request)
        return RENDERED, _rendered(compiled(wanted["template"]), wanted["variables"])
    except TemplateSyntaxError as error:
        return FAILED, f"line {error.lineno} is not valid Jinja: {error.message}"[:_LONGEST_REASON]
    except TemplateError as error:
        return FAILED, str(error)[:_LONGEST_REASON] or type(error).__name__
    except Exception as error:  # operations of the template may raise anything
        return FAILED, f"{type(error).__name__}: {error}"[:_LONGEST_REASON]


def _rendered(template: Any, variables: dict[str, Any]) -> str:
    pieces, characters = [], 0
    for piece in template.generate(**variables):
        pieces.append(piece)
        characters += len(piece)
        if characters > MOST_CHARACTERS:
            raise OverflowError(f"the template writes more than {MOST_CHARACTERS} characters")
    return "".join(pieces)


def _environment() -> Any:
    """Return a Jinja environment with the extensions that transformers gives to chat templates."""
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = _as_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _now}
    return environment


def _generation_tag() -> Any:
    """Return the Jinja extension for `{% generation %}`. This tag marks an assistant's text for training; here it has
    no effect."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return GenerationTag


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)


def _limit_memory(most_bytes: int) -> None:
    """Limit the address space of this process to `most_bytes`, on Linux only."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(source: BinaryIO) -> bytes:
    """Return the next request from the parent process; empty if the parent has ended."""
    length = source.read(LENGTH_BYTES)
    return source.read(int.from_bytes(length, "big")) if len(length) == LENGTH_BYTES else b""


def _write(target: BinaryIO, kind: bytes, text: str) -> None:
    payload = text.encode("utf8", "surrogatepass")
    target.write(kind + len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
    target.flush()


if __name__ == "__main__":
    main()
