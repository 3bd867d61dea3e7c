"""`smoe record`: records the routers' outputs while a model generates or reads."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from smoe.cli.generate import DEMO_PROMPT, to_sampling
from smoe.cli.libraries import import_libraries
from smoe.cli.options import Debug, EngineOptions, Json, Model
from smoe.cli.request_options import SamplingOptions
from smoe.errors import ConfigError

if TYPE_CHECKING:
    from smoe.generation.library_batch import Batch
    from smoe.generation.sampling_settings import Sampling
    from smoe.runtime.engine import Engine
    from smoe.trace.recorder import Recorder

_TOKENS = 2000
"""The default number of tokens that the model reads of a text."""
EPILOG = """Examples:

smoe record --out demo.trace -p "Once upon a time" --max-new-tokens 200

smoe record ./my-moe --memory 8GiB --out traces --prompt-file questions.jsonl

smoe record ./my-moe --memory 8GiB --out book.trace --text book.txt --tokens 5000

smoe replay demo.trace --resident 40%

docs/traces.md describes the file and how to read it with NumPy. After
Ctrl-C or SIGTERM the file has the steps that were complete.
"""


def command(
    engine: EngineOptions,
    sampling: SamplingOptions,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="File to write; if it is a folder, the file in it is named after the model."),
    ],
    model: Model = "demo",
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="A prompt to continue. Repeatable: prompts run one after the other."),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file whose whole text is one prompt, or a .jsonl file with 'prompt' or 'text' in each line. "
            "Repeatable."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Instead of generating, read this text token by token: .txt, or .jsonl with 'text'."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="With --text: maximum number of tokens that are read. \\[default: 2000]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a routing trace: every router's logits for all experts, its choice and its weights, token by token.

    Recording does not change what the model computes. Prompts run one after the other, or --max-sequences at a time; a
    text is read as generation would write it, one token a step.
    """
    from smoe.cli.console import print_json
    from smoe.cli.interrupts import exit_code
    from smoe.eval.texts import read_documents

    path = _destination(out, model, force)
    if text is not None and (prompt or prompt_file):
        message = "--text is read instead of generating text; leave out --prompt and --prompt-file"
        raise ConfigError(message, setting="text", given=str(text), allowed="only without `prompt` and `prompt_file`")
    if tokens is not None and text is None:
        raise ConfigError.idle("tokens", tokens, "`text`")
    if tokens is not None and tokens < 1:
        raise ConfigError.out_of_bounds("tokens", tokens, "at least 1")
    texts = _prompts(prompt or [], prompt_file or [], model) if text is None else read_documents(text)
    most = None if text is None else _TOKENS if tokens is None else tokens
    found = record(model, engine, to_sampling(sampling), texts, most, path, force)
    if json:
        print_json(found)
    else:
        _print(found, path)
    if found["was_interrupted"]:
        raise typer.Exit(exit_code())


def _print(found: dict[str, Any], path: Path) -> None:
    """Print how much was recorded as a note, and the path of the trace as the result."""
    from smoe.cli.console import note
    from smoe.cli.interrupts import print_interrupted
    from smoe.units import format_bytes, format_count

    if found["was_interrupted"]:
        print_interrupted("the complete steps so far are stored")
    sequences = format_count(found["sequences"], "sequence")
    note(f"the trace has {found['steps']} steps of {sequences} and takes {format_bytes(found['bytes'])}")
    print(path)


def _destination(out: Path, model: str, force: bool) -> Path:
    """Return the path of the file to write. Raises `ConfigError` if it cannot be written; called before the model is
    loaded."""
    from smoe.trace.file import refuse_existing

    path = out / f"{Path(model).name or 'model'}.trace" if out.is_dir() else out
    folder = path.absolute().parent
    if not folder.is_dir():
        raise _no_place(out, f"the folder {folder} does not exist; create it, or give another")
    if not force:
        refuse_existing(path)
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = f"nothing can be written in {folder} ({error.strerror or error}); give another folder"
        raise _no_place(out, why) from error
    return path


def _no_place(out: Path, why: str) -> ConfigError:
    allowed = "a file in a folder that can be written"
    return ConfigError(
        f"the trace cannot be written to {str(out)!r} (`out`): {why}", setting="out", given=str(out), allowed=allowed
    )


def _prompts(given: list[str], files: list[Path], model: str) -> list[str]:
    """Return the prompts of the command line and of files, in this order; the demo has a default prompt."""
    from smoe.cli.console import note
    from smoe.eval.texts import read_documents

    texts = [*given, *(text for path in files for text in read_documents(path, "prompt_file"))]
    if not texts and model != "demo":
        message = 'nothing to record; give -p "...", --prompt-file FILE or --text FILE'
        raise ConfigError(message, setting="prompt", allowed="at least one, or `prompt_file`, or `text`")
    if not texts:
        note(f'no prompt was given; using "{DEMO_PROMPT}" (see --prompt)')
    return texts or [DEMO_PROMPT]


def record(
    model: str,
    options: EngineOptions,
    sampling: Sampling,
    texts: list[str],
    tokens: int | None,
    path: Path,
    force: bool,
) -> dict[str, Any]:
    """Record the routing while the model continues `texts`, or reads at most `tokens` of their tokens. Return the
    counts for JSON."""
    from smoe.cli.console import Patience

    config, checked = options.config(), texts if tokens is None else ()
    import_libraries(model, config)
    from smoe.cli.session import loaded_with_tokenizer
    from smoe.trace.recorder import recording

    loading = loaded_with_tokenizer(model, config, options.revision, None, checked, sampling.max_new_tokens)
    with loading as (ready, tokenizer):
        offload = cast("Engine", ready.offload)
        documents = _cut(tokenizer, texts, tokens, offload.context_tokens) if tokens is not None else []
        batches = _batches(tokenizer, texts, offload) if tokens is None else []
        rows = sum(map(len, documents)) + sum(_most_tokens(batch, sampling, offload) for batch in batches)
        with recording(ready, path, name=model, replace=force) as recorder:
            writer = recorder.writer
            most_bytes = rows * len(writer.header.layers) * writer.header.row.itemsize
            bar = Patience("recording", lambda: (min(writer.nbytes, most_bytes), most_bytes))
            bar.start()
            try:
                whole = _read(ready, documents, recorder) and _generate(ready, tokenizer, batches, sampling, recorder)
            finally:
                bar.stop()
    return {
        "file": str(path),
        "model": model,
        "alpha": writer.header.alpha,
        "layers": len(writer.header.layers),
        "steps": recorder.steps,
        "sequences": recorder.sequences,
        "rows": writer.count,
        "bytes": writer.nbytes,
        "was_interrupted": not whole,
    }


def _batches(tokenizer: Any, prompts: list[str], engine: Engine) -> list[Batch]:
    """Return the prompts in batches of token ids. Raises `ContextError` for a prompt that is too long, before the first
    prompt runs."""
    from smoe.errors import ContextError
    from smoe.generation.generate import encode
    from smoe.generation.library_batch import pad
    from smoe.generation.library_settings import pad_token

    rows, filler = engine.config.max_sequences, pad_token(tokenizer)
    encoded = encode(tokenizer, prompts)
    batches = [pad(encoded[begin : begin + rows], filler) for begin in range(0, len(prompts), rows)]
    longest = max(batch.input_ids.shape[1] for batch in batches)
    if longest >= engine.context_tokens:
        raise ContextError.of_prompt(longest, engine.context_tokens, engine.position_limit)
    return batches


def _most_tokens(batch: Batch, sampling: Sampling, engine: Engine) -> int:
    """Return the largest number of rows that a batch of prompts adds to each layer of the trace. Padding counts. The
    last new token does not, because the model does not process it."""
    rows, width = batch.input_ids.shape
    return int(rows * (min(width + sampling.max_new_tokens, engine.context_tokens) - 1))


def _cut(tokenizer: Any, texts: list[str], tokens: int, context: int) -> list[list[int]]:
    """Return the documents' token ids, each document cut at the context length (with a warning), at most `tokens` in
    total."""
    from smoe.cli.console import warn

    documents: list[list[int]] = []
    for number, text in enumerate(texts, start=1):
        ids = tokenizer(text)["input_ids"]
        if min(len(ids), tokens) > context:
            warn(
                f"document {number} has {len(ids)} tokens; only its first {context} tokens, which fill the context, "
                "are used (see --context)"
            )
        documents.append(ids[: min(context, tokens)])
        tokens -= len(documents[-1])
        if tokens < 1:
            break
    return documents


def _read(model: Any, documents: list[list[int]], recorder: Recorder) -> bool:
    """Let the model read documents token by token, while its routing is recorded. Return False after an interrupt."""
    from smoe.generation.teacher_forcing import forced

    try:
        for number, ids in enumerate(documents):
            recorder.number_from(number)
            for _ in forced(model, ids, model.offload.new_cache()):
                pass
    except KeyboardInterrupt:
        return False
    return True


def _generate(model: Any, tokenizer: Any, batches: list[Batch], sampling: Sampling, recorder: Recorder) -> bool:
    """Let the model continue every batch of prompts, while its routing is recorded. Return False after an interrupt."""
    from smoe.cli.console import warn
    from smoe.generation.library_batch import continue_batch

    context = model.offload.context_tokens
    for batch in batches:
        recorder.number_from(recorder.sequences)
        room = context - batch.input_ids.shape[1]
        if room < sampling.max_new_tokens:
            warn(
                f"at most {room} new tokens are generated instead of {sampling.max_new_tokens}: the context has no "
                "room for more tokens (see --context)"
            )
        try:
            continue_batch(model, tokenizer, batch, sampling)
        except KeyboardInterrupt:
            return False
    return True
