"""Make the wide demo: the function of a small Qwen2-MoE checkpoint with experts of real size.

    python bench/widen.py src/smoe/demo OUT [--hidden 3072] [--expert 512]

The hidden state gets H' - H further coordinates that are always exactly zero, each expert I' - I further inner units
whose outputs nobody reads. The result routes, predicts and answers as the small model does, up to the rounding of sums
taken in another order, while an expert costs real bytes: 3 * H' * I' * 2 (9.4 MB at 3072 x 512).

How each tensor grows:

    embedding, router, shared-expert gate, q, k, v, shared gate/up   columns H..H' zero
    attention output, shared down                                    rows    H..H' zero
    expert gate and up                                               all new entries noise of the same spread
    expert down                                                      rows H..H' and columns I..I' zero
    RMSNorm weight w                                                 w * sqrt(H / H'), and eps * H / H' in the config

Norms first: with zeros appended the mean square shrinks by H / H', so x / sqrt(mean + eps) grows by sqrt(H' / H); the
weight takes that back. For H' = 16 H (or any power of four) the factor is a power of two, exact in bf16.

Files are written tensor by tensor, so the memory needed is that of one expert: one shard a layer, under a temporary
name, renamed when complete. A second call keeps the complete shards of the same source. `config.json` comes last: with
it, all is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

BYTES_PER_VALUE = 2
SAVED_DTYPE = "BF16"
INDEX_NAME = "model.safetensors.index.json"
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "smoe-alpha.json",
)
"""Files copied unchanged where the source has them; what a threshold costs is a matter of the function."""


class NotEnoughDiskError(RuntimeError):
    """The destination has less free space than the wide model needs."""


@dataclass(frozen=True)
class Widening:
    """Old and new sizes."""

    hidden: int
    wide_hidden: int
    expert: int
    wide_expert: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.wide_hidden < self.hidden or self.wide_expert < self.expert:
            raise ValueError(
                f"cannot shrink: hidden {self.hidden} -> {self.wide_hidden}, expert {self.expert} -> {self.wide_expert}"
            )

    @property
    def norm_factor(self) -> float:
        """What a norm weight is multiplied by."""
        return math.sqrt(self.hidden / self.wide_hidden)


@dataclass(frozen=True)
class Piece:
    """One tensor of the source, its place in the result, and how to make it."""

    name: str
    shape: tuple[int, ...]
    file: Path

    @property
    def n_bytes(self) -> int:
        """Bytes in the result."""
        return math.prod(self.shape) * BYTES_PER_VALUE


def weight_map(source: Path) -> dict[str, Path]:
    """The file of every tensor, for a single-file or a sharded checkpoint."""
    index = source / INDEX_NAME
    if index.exists():
        return {name: source / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = source / "model.safetensors"
    if not single.exists():
        raise FileNotFoundError(f"{source} has neither model.safetensors nor {INDEX_NAME}")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def wide_shape(name: str, shape: tuple[int, ...], sizes: Widening) -> tuple[int, ...]:
    """The shape a tensor has in the wide model."""
    if is_norm(name):
        return (sizes.wide_hidden,)
    if len(shape) == 1:
        return shape
    rows, columns = shape
    if is_expert(name):
        wide = (sizes.wide_expert, sizes.wide_hidden)
        return wide[::-1] if "down_proj" in name else wide
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return sizes.wide_hidden, columns
    return rows, sizes.wide_hidden


def is_norm(name: str) -> bool:
    """Whether a tensor is an RMSNorm weight."""
    return name.endswith("norm.weight")


def is_expert(name: str) -> bool:
    """Whether a tensor belongs to a routed expert."""
    return ".mlp.experts." in name


def widen_tensor(name: str, tensor: Tensor, sizes: Widening) -> Tensor:
    """The wide version of one tensor, bf16."""
    if is_norm(name):
        wide = torch.zeros(sizes.wide_hidden)
        wide[: sizes.hidden] = tensor.float() * sizes.norm_factor
        return wide.bfloat16()
    shape = wide_shape(name, tuple(tensor.shape), sizes)
    if shape == tuple(tensor.shape):
        return tensor.bfloat16()
    if is_expert(name) and "down_proj" not in name:
        wide = noise(name, shape, tensor.float().std().item(), sizes.seed)
    else:
        wide = torch.zeros(shape, dtype=torch.bfloat16)
    rows, columns = tensor.shape
    wide[:rows, :columns] = tensor.bfloat16()
    return wide


def noise(name: str, shape: tuple[int, ...], spread: float, seed: int) -> Tensor:
    """Normal noise of the given standard deviation, bf16; the same for the same name and seed."""
    generator = np.random.default_rng([seed, *name.encode()])
    values = generator.standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values).mul_(spread).bfloat16()


def plan_shards(source: Path, sizes: Widening) -> list[list[Piece]]:
    """The tensors of each shard, in the order they are written: first what has no layer, then one shard a layer."""
    groups: dict[int, list[Piece]] = {}
    files = weight_map(source)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name in sorted(files):
        parts = name.split(".")
        layer = int(parts[2]) if parts[1] == "layers" else -1
        groups.setdefault(layer, []).append(Piece(name, wide_shape(name, shapes[name], sizes), files[name]))
    return [groups[layer] for layer in sorted(groups)]


def fingerprint(source: Path, seed: int) -> str:
    """A digest of the source's weights and the seed: shards of another source are never taken for ours."""
    digest = hashlib.sha256(str(seed).encode())
    for path in sorted(set(weight_map(source).values())):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def shard_header(pieces: list[Piece], origin: str) -> bytes:
    """Length and JSON header of a safetensors file with the pieces one after the other, made from `origin`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "origin": origin}}
    offset = 0
    for piece in pieces:
        header[piece.name] = {
            "dtype": SAVED_DTYPE,
            "shape": list(piece.shape),
            "data_offsets": [offset, offset + piece.n_bytes],
        }
        offset += piece.n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins on a multiple of eight
    return len(text).to_bytes(8, "little") + text


def shard_bytes(pieces: list[Piece], origin: str) -> int:
    """Size of a shard's file."""
    return len(shard_header(pieces, origin)) + sum(piece.n_bytes for piece in pieces)


def is_complete(path: Path, pieces: list[Piece], origin: str) -> bool:
    """Whether `path` is already the whole shard, made from the same source."""
    if not path.exists() or path.stat().st_size != shard_bytes(pieces, origin):
        return False
    header = shard_header(pieces, origin)
    with path.open("rb") as file:
        return file.read(len(header)) == header


def tensor_bytes(tensor: Tensor) -> bytes:
    """The raw bytes of a bf16 tensor."""
    return tensor.contiguous().view(torch.int16).numpy().tobytes()


def write_shard(path: Path, pieces: list[Piece], sizes: Widening, origin: str, advance: Callable[[int], None]) -> None:
    """Write one shard tensor by tensor under a temporary name, then rename it; report bytes to `advance`."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as out:
        out.write(shard_header(pieces, origin))
        for piece, tensor in read_pieces(pieces):
            out.write(tensor_bytes(widen_tensor(piece.name, tensor, sizes)))
            advance(piece.n_bytes)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path)


def read_pieces(pieces: list[Piece]) -> Iterator[tuple[Piece, Tensor]]:
    """The source tensors one by one; each file is opened once a shard."""
    handles = {path: safe_open(path, framework="pt") for path in {piece.file for piece in pieces}}
    for piece in pieces:
        yield piece, handles[piece.file].get_tensor(piece.name)


def wide_config(config: dict[str, Any], sizes: Widening) -> dict[str, Any]:
    """The configuration of the wide model; the head size is kept, so it is now said explicitly."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "hidden_size": sizes.wide_hidden,
        "moe_intermediate_size": sizes.wide_expert,
        "head_dim": head_dim,
        "rms_norm_eps": config["rms_norm_eps"] * sizes.hidden / sizes.wide_hidden,
        "dtype": "bfloat16",
    }


def check_disk(out: Path, needed_bytes: int) -> None:
    """Refuse before writing anything when the destination is too small."""
    free_bytes = shutil.disk_usage(out).free
    if needed_bytes > free_bytes:
        raise NotEnoughDiskError(
            f"the wide model needs {needed_bytes / 1e9:.2f} GB more under {out}, but only {free_bytes / 1e9:.2f} GB "
            "are free; choose another folder, or a smaller --hidden or --expert"
        )


def write_text(path: Path, text: str) -> None:
    """Write a small file under a temporary name, then rename it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def widen(
    source: Path,
    out: Path,
    wide_hidden: int,
    wide_expert: int,
    seed: int = 0,
    advance: Callable[[int], None] = lambda n_bytes: None,
) -> int:
    """Write the wide model of `source` into `out`; returns its size in bytes."""
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] != "qwen2_moe":
        raise ValueError(f"{source} is a {config['model_type']}; only qwen2_moe can be widened")
    sizes = Widening(config["hidden_size"], wide_hidden, config["moe_intermediate_size"], wide_expert, seed)
    shards, origin = plan_shards(source, sizes), fingerprint(source, seed)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    out.mkdir(parents=True, exist_ok=True)
    missing = [
        (out / name, pieces)
        for name, pieces in zip(names, shards, strict=True)
        if not is_complete(out / name, pieces, origin)
    ]
    check_disk(out, sum(shard_bytes(pieces, origin) for _, pieces in missing))
    advance(
        sum(p.n_bytes for pieces in shards for p in pieces) - sum(p.n_bytes for _, pieces in missing for p in pieces)
    )
    if missing:
        (out / "config.json").unlink(missing_ok=True)
    for path, pieces in missing:
        write_shard(path, pieces, sizes, origin, advance)
    total = sum(piece.n_bytes for pieces in shards for piece in pieces)
    placed = {piece.name: name for name, pieces in zip(names, shards, strict=True) for piece in pieces}
    write_text(out / INDEX_NAME, json.dumps({"metadata": {"total_size": total}, "weight_map": placed}, indent=1))
    for name in COMPANIONS:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)
    write_text(out / "config.json", json.dumps(wide_config(config, sizes), indent=2) + "\n")
    return total


def main() -> None:
    """Widen from the command line, with a progress bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of the small checkpoint")
    parser.add_argument("out", type=Path, help="folder of the wide checkpoint")
    parser.add_argument("--hidden", type=int, default=3072, help="hidden size of the wide model")
    parser.add_argument("--expert", type=int, default=512, help="inner size of an expert of the wide model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")
    arguments = parser.parse_args()
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    config = json.loads((arguments.source / "config.json").read_text())
    sizes = Widening(config["hidden_size"], arguments.hidden, config["moe_intermediate_size"], arguments.expert)
    total = sum(piece.n_bytes for pieces in plan_shards(arguments.source, sizes) for piece in pieces)
    columns = (TextColumn("widening"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns) as progress:
            task = progress.add_task("widening", total=total)
            widen(
                arguments.source,
                arguments.out,
                arguments.hidden,
                arguments.expert,
                arguments.seed,
                advance=lambda n_bytes: progress.advance(task, n_bytes),
            )
    except (NotEnoughDiskError, ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from None
    print(
        f"{arguments.out}: {total / 1e9:.2f} GB, one expert {3 * arguments.hidden * arguments.expert * 2 / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    main()
