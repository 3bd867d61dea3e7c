"""Worker: the transformers library, all experts in memory or (with accelerate) layers offloaded to disk."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from bench.peers.worker import Stopwatch, measure, report, workload_from, workload_parser


class TransformersSession:
    """One sequence on a transformers model with its own KV cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: object | None = None

    def prefill(self, tokens: Sequence[int], every_position: bool = False) -> np.ndarray:
        """See `Session`."""
        self._cache = self.new_cache()
        logits = self._forward(list(tokens), keep=0 if every_position else 1)
        return logits if every_position else np.asarray(logits[-1])

    def decode(self, token: int) -> np.ndarray:
        """See `Session`."""
        return np.asarray(self._forward([token], keep=1)[-1])

    def resident_expert_bytes(self) -> int | None:
        """See `Session`."""
        return None

    def notes(self) -> dict[str, object]:
        """See `Session`."""
        return {name: version(name) for name in ("torch", "transformers", "accelerate") if find_spec(name)}

    def new_cache(self) -> object | None:
        """An empty KV cache; None lets the model make its own."""
        return None

    def _forward(self, tokens: list[int], keep: int) -> np.ndarray:
        """Logits [kept positions, V] of `tokens` appended to the sequence; `keep` 0 = all positions."""
        output = self._model(
            input_ids=torch.tensor([tokens]), past_key_values=self._cache, use_cache=True, logits_to_keep=keep
        )
        self._cache = output.past_key_values
        return np.asarray(output.logits[0].float())


def disk_map(model: Path) -> dict[str, str]:
    """Device map that leaves the outer tensors in memory and every layer on disk."""
    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    outer = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    return outer | {f"model.layers.{layer}": "disk" for layer in range(layers)}


def load(model: Path, experts: str, offload: Path | None) -> Any:
    """The model in bf16 with the given experts implementation; `offload` names accelerate's folder."""
    placement = {}
    if offload is not None:
        placement = {"device_map": disk_map(model), "offload_folder": str(offload), "offload_buffers": False}
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, experts_implementation=experts, **placement
    ).eval()


def parse() -> argparse.Namespace:
    """Command line of this worker."""
    parser = workload_parser("Measure transformers.")
    parser.add_argument("--experts", default="grouped_mm", help="experts implementation of transformers")
    parser.add_argument("--offload", type=Path, help="offload all layers to disk with accelerate, into this folder")
    return parser.parse_args()


def main() -> None:
    """Load, measure, report."""
    options = parse()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    watch = Stopwatch()
    session = TransformersSession(load(options.model, options.experts, options.offload))
    report(measure(workload_from(options), session, watch))


if __name__ == "__main__":
    main()
