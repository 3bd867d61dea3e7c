"""Whole models as quantised releases have them: how fast each decodes, where all of it fits, and where it does not.

    python -m bench.released_models OUT [--layers 6] [--rounds 3] [--budgets 6GiB,1GiB] [--forms gptq,awq] [--json FILE]

The reference model's sizes (bench/peers/README.md) with random weights, in bf16 and in every form that is read, in
folders of OUT; beside them what `smoe pack` makes of the bf16 one in fewer bits, and of the forms as they are. One
process a run, forms in turn within a round; tokens a second of 64 tokens behind a prompt of 16.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.peers.model import write_model
from bench.peers.shape import ModelShape
from bench.random_weights import write_json, write_shards
from smoe.machine.processor import processor_name
from smoe.memory.safetensors_index import read_header
from tests import released_toy

FORMS = ("fp8", "compressed int8", "compressed int4", "compressed mxfp4", "nvfp4", "gptq", "awq")
"""Of `released_toy.SCHEMES`; groups of 128 where those have 32."""
PACKS = ("int8", "int4")
PROMPT = "the quick brown"


def main() -> None:
    """Write what is not there, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", default="6GiB,1GiB")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = ModelShape(layers=options.layers)
    cases = written(options.out, shape, options.forms.split(","))
    runs = [
        {"round": n, "form": form, "budget": budget, **measured(folder, precision, budget)}
        for n in range(options.rounds)
        for budget in options.budgets.split(",")
        for form, (folder, precision) in cases.items()
    ]
    for budget in options.budgets.split(","):
        for form in cases:
            rates = [run["tokens_per_second"] for run in runs if (run["form"], run["budget"]) == (form, budget)]
            print(f"{budget:>6} {form:24} {statistics.median(rates):6.1f} tokens/s ({min(rates):.1f}-{max(rates):.1f})")
    if options.json:
        write_json(options.json, {"bench": "released_models", "processor": processor_name(), "runs": runs})


def written(out: Path, shape: ModelShape, forms: list[str]) -> dict[str, tuple[Path, str]]:
    """(folder, precision) of every case by its name."""
    plain = out / "bf16"
    if not (plain / "model.safetensors.index.json").exists():
        write_model(plain, shape)
    cases = {"bf16": (plain, "auto")}
    for precision in PACKS:
        subprocess.run(smoe("pack", plain, "--precision", precision), check=True)
        cases[f"packed {precision}"] = plain, precision
    for form in forms:
        folder = out / form.replace(" ", "-")
        if not (folder / "model.safetensors.index.json").exists():
            release(plain, folder, said_of(form))
        cases[form] = folder, "auto"
        cases[f"{form}, packed"] = packed_as_it_is(folder), "auto"
    return cases


def packed_as_it_is(folder: Path) -> Path:
    """The same files, and a pack beside them."""
    beside = folder.with_name(f"{folder.name}-packed")
    if not beside.exists():
        shutil.copytree(folder, beside, copy_function=os.link)
    subprocess.run(smoe("pack", beside), check=True)
    return beside


def said_of(form: str) -> dict[str, Any]:
    """A `quantization_config`, with the groups that published releases have."""
    said: dict[str, Any] = json.loads(json.dumps(released_toy.SCHEMES[form]))
    if said.get("group_size") == released_toy.GROUP:
        said["group_size"] = 128
    weights = said.get("config_groups", {}).get("group_0", {}).get("weights", {})
    if weights.get("group_size") == released_toy.GROUP and weights["type"] == "int":
        weights["group_size"] = 128
    return said


def release(plain: Path, folder: Path, said: dict[str, Any]) -> None:
    """Write the model again, its linear layers quantised; all experts of a layer have the codes of the first one's,
    which takes a sixty-fourth of the time and costs a run the same."""
    folder.mkdir(parents=True)
    for file in plain.glob("*.json"):
        if "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    write_json(folder / "config.json", {**config, "quantization_config": said})
    shards = sorted(plain.glob("*.safetensors"))
    write_shards(folder, (_quantised(shard, said) for shard in shards), len(shards))


def _quantised(shard: Path, said: dict[str, Any]) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    with safe_open(shard, framework="pt") as file:
        for key in read_header(shard):
            stem = key.removesuffix(".weight")
            if not stem.endswith("_proj"):
                found[key] = file.get_tensor(key)
            elif ".experts." not in stem or ".experts.0." in stem:
                tensors, _ = released_toy.quantised(file.get_tensor(key), said, stem)
                for alike in _alike(stem, read_header(shard)):
                    found |= {name.replace(stem, alike): each.clone() for name, each in tensors.items()}
    return {name: each.contiguous() for name, each in found.items()}


def _alike(stem: str, keys: Any) -> Iterator[str]:
    """The matrices that get the codes of this one."""
    before, _, matrix = stem.partition(".experts.0.")
    if not matrix:
        yield stem
    for key in keys:
        if matrix and key.startswith(f"{before}.experts.") and key.endswith(f".{matrix}.weight"):
            yield key.removesuffix(".weight")


def measured(folder: Path, precision: str, budget: str) -> dict[str, float]:
    """One run."""
    line = smoe("generate", folder, "--memory", budget, "--context", 256, "--precision", precision, "--json")
    line += ["--max-new-tokens", "64", "--prompt", PROMPT]
    said = json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)
    assert said["new_tokens"] == 64, said["finish_reason"]
    return {key: said[key] for key in ("tokens_per_second", "ttft_seconds", "hit_ratio", "bytes_read_per_token")}


def smoe(*words: object) -> list[str]:
    """A command line."""
    return [sys.executable, "-m", "smoe", *map(str, words)]


if __name__ == "__main__":
    main()
