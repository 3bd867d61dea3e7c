"""`smoe pack`: writes a model's experts into one file, each expert in one piece, so that one read loads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from smoe.cli.libraries import import_libraries, reading
from smoe.cli.options import Debug, Json, Model
from smoe.errors import CheckpointError, ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from smoe.config import EngineConfig
    from smoe.models.checkpoint import Checkpoint
    from smoe.models.packed import Contents, Packed
    from smoe.models.spec import LibrarySpec
    from smoe.packing.calibration import Calibration

EPILOG = """Examples:

smoe pack ./my-mixtral

smoe pack ./my-mixtral --precision int4        then: smoe generate ./my-mixtral --precision int4

smoe pack ./my-moe-AWQ                         a quantised checkpoint, unchanged: faster where it does not fit in memory

smoe pack ./my-moe --precision int2 --calibration-text book.txt

smoe pack ./model-Q8_0.gguf --precision int2   a lower copy of experts that are quantised already

smoe pack mistralai/Mixtral-8x7B-v0.1 --dtype bfloat16

The packed file is written next to the weights, or into your cache if that
folder cannot be written and for the demo. A file with the same bits is used
automatically; a file in fewer bits is used with --precision or
--low-precision. You can delete a packed file at any time.
"""

CALIBRATION_TOKENS = 16384
_DTYPE_HELP = "auto (the checkpoint's own), bfloat16, float16, float32; not with --precision."
_PRECISION_HELP = "int8, int4, int3 or int2 (lossy), or several separated by commas: one file for each."


class _CalibrationText(NamedTuple):
    """The text on which the inputs of experts are recorded for packing them in fewer bits."""

    path: Path
    tokens: int
    """The maximum number of tokens to read."""


def command(
    model: Model,
    dtype: Annotated[str, typer.Option(help=_DTYPE_HELP)] = "auto",
    precision: Annotated[str | None, typer.Option(help=_PRECISION_HELP)] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    calibration_text: Annotated[
        Path | None,
        typer.Option(
            help="With --precision: reduce the error of the quantisation for texts like this file (.txt, .jsonl)."
        ),
    ] = None,
    calibration_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Maximum number of tokens of the calibration text that are used. \\[default: {CALIBRATION_TOKENS}]",
            min=1,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write the file again even if a valid one exists.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a model's experts into one file, each contiguous and page-aligned, unchanged or in fewer bits.

    Without --precision, experts are stored as they are computed: in the dtype of the computation, or in the codes and
    scales of a quantised checkpoint (GPTQ, AWQ, NVFP4, ...). This helps where a checkpoint scatters its experts
    (Mixtral's w1, w2, w3) or would be converted at every read. Results keep their bits. With --precision, experts have
    fewer bits, and more of them fit in the same memory. int8 takes 8.5 bits a weight, int4 4.5, int3 3.4 to 3.5, int2
    2.6 to 3. The error of every layer is printed; smoe eval measures the quality cost on text. Experts that are
    already quantised can only be packed in fewer bits than they have; those of a GGUF file are contiguous already.

    With --calibration-text the model first reads some thousands of tokens (in the free memory), which reduces the error
    of the outputs by about a third. Use text like yours.

    The disk needs as much free space as the file takes. After an interrupt the same command continues.
    """
    from smoe.cli.console import note, print_json

    if calibration_text is None and calibration_tokens is not None:
        raise ConfigError.idle("calibration_tokens", calibration_tokens, "`calibration_text`")
    text = (
        None
        if calibration_text is None
        else _CalibrationText(calibration_text, calibration_tokens or CALIBRATION_TOKENS)
    )
    found = _pack(model, dtype, _precisions(precision), revision, force, text)
    if json:
        print_json(found)
        return
    for each in found["files"]:
        if each["was_packed_before"]:
            how = ", calibrated with a text" if each["is_calibrated"] else ""
            note(
                f"nothing is written: the model is already packed{how}, and headers and samples show that the packed "
                "file was made from these weights (--force packs again)"
            )
        _show_errors(each)
        print(each["file"])


def _precisions(given: str | None) -> list[str | None]:
    """Return the requested precisions in their order; None: no precision is given, and the bits stay as they are."""
    from smoe.bounds import PRECISION

    if given is None:
        return [None]
    wanted, lossy = [part.strip() for part in given.split(",")], PRECISION[1:]
    if any(part not in lossy for part in wanted) or len(set(wanted)) < len(wanted):
        allowed = f"one or more of {', '.join(lossy)}, each once, separated by commas"
        raise ConfigError.out_of_bounds("precision", given, allowed)
    return list(wanted)


def _pack(
    model: str,
    dtype: str,
    precisions: list[str | None],
    revision: str | None,
    force: bool,
    text: _CalibrationText | None,
) -> dict[str, Any]:
    """Write each requested pack that does not exist or is invalid. Return the descriptions of all requested packs,
    ready for JSON."""
    from smoe.presets import configure

    config = configure(dtype=dtype)
    if precisions != [None] and dtype != "auto":
        raise _same_for_every(dtype, "a file in fewer bits")
    if text is not None and precisions == [None]:
        raise ConfigError.idle("calibration_text", str(text.path), "`precision`")
    import_libraries(model, None)
    from smoe.packing.writer import check_places

    checkpoint, spec, asked = _examined(model, config, precisions, revision)
    ids = _ids(checkpoint, text)
    asked = [replace(contents, calibration=_mark(ids)) for contents in asked]
    good = [None if force else _good(checkpoint, contents) for contents in asked]
    missing = [contents for contents, packed in zip(asked, good, strict=True) if packed is None]
    check_places(checkpoint.place, missing)
    files = []
    pack_folder = asked[0].path(checkpoint.place).parent
    with _calibration(model, revision, pack_folder, spec, ids if missing else []) as calibration:
        for contents, packed in zip(asked, good, strict=True):
            records = packed.records if packed else _write(checkpoint, spec, contents, calibration)
            is_calibrated = (packed or contents).calibration is not None
            entry = _entry(contents, contents.path(checkpoint.place), packed is not None, records)
            files.append(entry | {"is_calibrated": is_calibrated})
    return {"model": model, "dtype": str(spec.dtype), "files": files}


def _examined(
    model: str, config: EngineConfig, precisions: list[str | None], revision: str | None
) -> tuple[Checkpoint, LibrarySpec, list[Contents]]:
    """Return the checkpoint, its structure, and what each requested pack will contain. Raise an error if one of them
    cannot be written."""
    from smoe.models.checkpoint import local_checkpoint, whole_checkpoint
    from smoe.models.packed import check_takes_less, contents_in_precision
    from smoe.models.read_spec import read_spec

    with reading("headers", model):
        known = local_checkpoint(model)
        if known is not None and None in precisions:
            known.check_gatherable()
        spec = read_spec(model, config, revision)
        asked = []
        for precision in filter(None, precisions):
            asked.append(contents_in_precision(spec.sites, precision, spec.config.model_type, spec.own_dtype))
            check_takes_less(asked[-1], spec)
        checkpoint = whole_checkpoint(model, revision)
        if None in precisions:
            asked.append(_as_they_are(checkpoint, spec, config.dtype))
    return checkpoint, spec, asked


def _as_they_are(checkpoint: Checkpoint, spec: LibrarySpec, dtype: str) -> Contents:
    """Return the description, ready for JSON, of a pack with unchanged numbers."""
    from smoe.models.packed import contents_as_they_are

    checkpoint.check_gatherable()
    contents = contents_as_they_are(spec, checkpoint.experts(spec))
    if contents is None:
        raise UnsupportedModelError(
            f"the experts in {checkpoint.place} are quantised and stored in a form that cannot be packed unchanged; "
            "use the model without packing, or pack it with `precision=int4`"
        )
    if contents.is_as_stored and dtype != "auto":
        raise _same_for_every(dtype, "a file of experts that are quantised")
    return contents


def _same_for_every(dtype: str, file: str) -> ConfigError:
    return ConfigError(
        f"`dtype={dtype}` has no effect here, because {file} does not depend on the data type of the computation; "
        "leave out `dtype`, and give it to the command that runs the model",
        setting="dtype",
        given=dtype,
        allowed="auto for quantised experts, and with `precision`",
    )


def _entry(contents: Contents, path: Path, was_there: bool, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the description of one pack, ready for JSON."""
    return {
        "file": str(path),
        "contents": contents.name,
        "experts": contents.experts,
        "bytes": path.stat().st_size,
        "was_packed_before": was_there,
        "layers": records,
    }


def _ids(checkpoint: Checkpoint, text: _CalibrationText | None) -> list[int]:
    """Return the token ids of the calibration text; empty if no text is given."""
    from smoe.cli.console import doing
    from smoe.eval.calibrate import calibration_ids
    from smoe.eval.texts import read_documents

    if text is None:
        return []
    documents = read_documents(text.path, "calibration_text")
    with doing("reading the text"):
        return calibration_ids(checkpoint.tokenizer(), documents, text.tokens)


def _mark(ids: Sequence[int]) -> str | None:
    """Return the checksum of the calibration text's tokens, which a packed file contains."""
    from hashlib import sha256

    return sha256(repr(list(ids)).encode()).hexdigest() if ids else None


@contextmanager
def _calibration(
    model: str, revision: str | None, pack_folder: Path, spec: LibrarySpec, ids: Sequence[int]
) -> Iterator[Calibration | None]:
    """Yield the experts' inputs while the model reads `ids`, stored in the folder of the packs for the duration of the
    `with` block."""
    from tempfile import TemporaryDirectory

    from smoe.cli.console import progress
    from smoe.cli.session import loaded
    from smoe.eval.calibrate import listen
    from smoe.models.files import check_disk
    from smoe.packing.calibration import Calibration
    from smoe.presets import configure

    if not ids:
        yield None
        return
    hidden = int(spec.config.get_text_config().hidden_size)
    row_bytes = sum(hidden * spec.dtype.itemsize + 4 * spec.anatomy.top_k[site.layer] for site in spec.sites)
    check_disk(pack_folder, len(ids) * row_bytes, "calibrating")
    with TemporaryDirectory(prefix=".smoe-calibration-", dir=pack_folder) as folder:
        modules = {site.layer: spec.shell.get_submodule(site.name) for site in spec.sites}
        calibration = Calibration(Path(folder), modules)
        with loaded(model, configure(), revision) as ready, progress("pack", "tokens") as bars:
            task = bars.add_task("reading the text", total=len(ids), amount="")
            listen(ready, ids, calibration, lambda count: bars.update(task, advance=count))
        yield calibration


def _good(checkpoint: Checkpoint, contents: Contents) -> Packed | None:
    """Return the path of the existing pack if it belongs to the checkpoint and all its checksums are correct; else
    None."""
    from smoe.cli.console import note, warn
    from smoe.cli.pack_check import find_damage
    from smoe.models.packed import may_be_packed

    try:
        packed = checkpoint.packed(contents)
    except CheckpointError:
        path = contents.path(checkpoint.place)
        if may_be_packed(path):  # otherwise `check_places` raises an error
            note(
                f"{path} is truncated, or was packed from other weights or by another version of smoe; smoe pack "
                "writes it again"
            )
        return None
    if packed is None or contents.calibration not in (None, packed.calibration):
        return None
    damaged = find_damage(packed, contents, "pack")
    if damaged:
        layers = f"layer{'s' if len(damaged) > 1 else ''} {', '.join(map(str, damaged))}"
        warn(f"{packed.path} is damaged in {layers}; smoe pack writes the whole file again")
    return None if damaged else packed


def _write(
    checkpoint: Checkpoint, spec: LibrarySpec, contents: Contents, calibration: Calibration | None
) -> list[dict[str, Any]]:
    from smoe.cli.console import note, progress
    from smoe.packing.writer import pack
    from smoe.units import format_bytes

    experts = checkpoint.experts(spec)
    size = format_bytes(contents.experts * contents.stride)
    form = "as they are stored" if contents.is_as_stored else f"in {contents.name}"
    note(f"writing {contents.experts} experts {form}, {size}, to {contents.path(checkpoint.place)}")
    with progress("pack") as bars:
        task = bars.add_task("packing", total=contents.experts, amount="")
        first: list[int] = []

        def show(done: int, total: int) -> None:
            if not first:
                first.append(done)
            amount = f"{format_bytes(done * contents.stride)} of {format_bytes(total * contents.stride)}"
            bars.update(task, completed=done, amount=amount, skipped=first[0] - 1)  # from an interrupted run

        try:
            return pack(checkpoint.place, contents, experts, show, calibration)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command continues after the last complete layer") from None


def _show_errors(found: dict[str, Any]) -> None:
    """Print, by layer, the errors of the packed weights relative to the size of the weights."""
    from smoe.cli.console import note

    errors = [(each["layer"], each["relative_error"]) for each in found["layers"] if "relative_error" in each]
    if not errors:
        return
    note(
        f"error of the weights in {found['contents']}, relative to the weights' size (root mean squares of both), by "
        "layer:"
    )
    for begin in range(0, len(errors), 6):
        note("  " + "   ".join(f"layer {layer:>2} {error:6.2%}" for layer, error in errors[begin : begin + 6]))
    if found["is_calibrated"]:
        note(
            "calibration makes the errors of the weights larger, and the errors of the experts' outputs smaller; "
            "smoe eval measures the quality"
        )
