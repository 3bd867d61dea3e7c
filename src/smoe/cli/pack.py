"""`smoe pack`: put every expert in one piece, once, so that each is a single read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe.cli.options import Debug, Json, Model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from smoe.memory.store import ExpertStore
    from smoe.models.experts import ExpertsSite

EPILOG = """Examples:

smoe pack ./my-mixtral

smoe pack mistralai/Mixtral-8x7B-v0.1 --dtype bfloat16

The packed file lies beside the checkpoint and is found by itself. Delete it at any time; nothing else depends on it.
"""

_DTYPE_HELP = "auto (the checkpoint's own), bfloat16, float16, float32."


def command(
    model: Model,
    dtype: Annotated[str, typer.Option(help=_DTYPE_HELP)] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Pack again even where a good file is there.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a model's experts into one file, each contiguous and page-aligned.

    Worth it where a checkpoint scatters its experts (Mixtral's w1, w2, w3) or is read in another dtype than it
    is stored in. Needs as much free disk as the experts take; interrupted, it leaves nothing behind.
    """
    from smoe.cli.console import note, print_json

    found = _pack(model, dtype, revision, force)
    if json:
        print_json(found)
        return
    if found["was_packed_before"]:
        note("packed already, from these very weights (--force packs again)")
    print(found["file"])


def _pack(model: str, dtype: str, revision: str | None, force: bool) -> dict[str, Any]:
    """Pack where there is no good file yet, and say what is there then."""
    from smoe.config import configure
    from smoe.errors import CheckpointError
    from smoe.memory.dtypes import SAFETENSORS
    from smoe.memory.store import ExpertStore
    from smoe.models.checkpoint import local_checkpoint, whole_checkpoint
    from smoe.models.read_spec import read_spec

    known = local_checkpoint(model)
    if known is not None:
        known.check_packable()
    spec = read_spec(model, configure(dtype=dtype), revision)
    checkpoint = whole_checkpoint(model, revision)
    try:
        packed = None if force else checkpoint.packed(spec, None)
    except CheckpointError:
        packed = None  # of other weights, or cut short: packing again is what is asked for
    store = packed or ExpertStore(checkpoint.experts(spec), SAFETENSORS[spec.dtype])
    path = packed.paths()[0] if packed else _write(checkpoint.place, spec.sites, store)
    return {
        "file": str(path),
        "model": model,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "experts": len(store.keys()),
        "bytes": path.stat().st_size,
        "was_packed_before": packed is not None,
    }


def _write(folder: Path, sites: Sequence[ExpertsSite], store: ExpertStore) -> Path:
    from smoe.cli.console import note, progress
    from smoe.models.packed import pack
    from smoe.units import format_bytes

    note(f"{len(store.keys())} experts, {format_bytes(store.total_bytes)}, to {folder}")
    with progress("pack") as bars:
        task = bars.add_task("packing", total=len(store.keys()), amount="")

        def show(done: int, total: int) -> None:
            amount = f"{format_bytes(done * store.expert_bytes)} of {format_bytes(total * store.expert_bytes)}"
            bars.update(task, completed=done, amount=amount)

        return pack(folder, sites, store, show)
