"""`smoe verify` finds whatever is not the library's bits, and says where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeRMSNorm

from smoe import from_pretrained
from smoe.cli import session
from smoe.expert import EXACT
from smoe.fastpath import attention
from smoe.memory.movers import Filler
from smoe.models import kv_cache
from smoe.presets import configure
from smoe.report.verify import Report, reference_of, verify
from tests import zoo
from tests.cli.conftest import Run
from tests.toy import save_toy


def test_every_layer_is_equal(run, checkpoint):
    ran = run("verify", checkpoint, "--memory", "64MiB")
    assert ran.code == 0 and "exact:" in ran.out
    passes = [" ".join(line.split()) for line in ran.out.splitlines() if " from position " in line]
    assert passes[0].startswith("decode 1 token from position 0 equal (4 layers, 33 parts, ") and len(passes) == 4
    assert "differs" not in ran.out
    assert ran.out.rstrip().endswith("not compared: several sequences at once, prompts read in chunks")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            ("--tokens", 99),
            "a prompt of 99 tokens and 2 decoded tokens do not fit in the context of 64; give fewer --tokens",
        ),
        (("--tokens", 63), "a prompt of 63 tokens"),
        (("--alpha", 0.3), "--alpha 0.3 replaces experts"),
        (("--preset", "smoe"), "instead of --preset smoe, give --preset smoe-exact"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_is(run, checkpoint, asked, says):
    """Would catch a lossy model that is called damaged."""
    ran = run("verify", checkpoint, "--context", 64, *asked)
    assert ran.code == 2 and ran.out == "" and "resident" not in ran.err and says in " ".join(ran.err.split())


def test_the_longest_prompt_of_a_context_is_checked(run, checkpoint):
    assert run("verify", checkpoint, "--context", 64, "--tokens", 62).code == 0


def test_json(run, checkpoint):
    value = run("verify", checkpoint, "--memory", "64MiB", "--json").json
    assert value["is_exact"] and value["not_compared"] == [] and value["self_test"] == "now"
    seen = {(entry["phase"], entry["tokens"], entry["position"]) for entry in value["layers"]}
    assert seen == {("decode", 1, 0), ("prefill", 32, 0), ("decode", 1, 32), ("decode", 1, 33)}
    parts = {entry["part"] for entry in value["layers"] if entry["layer"] == 3}
    around = {"mlp", "mlp.gate", "mlp.shared_expert", "mlp.shared_expert_gate"}
    assert parts == {"experts", "input_layernorm", "self_attn", "post_attention_layernorm"} | around
    shared = {entry["part"] for entry in value["layers"] if entry["layer"] is None}
    assert shared == {"KV cache", "model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"}
    assert len(value["layers"]) == 4 * (4 * len(parts) + len(shared))


@pytest.mark.parametrize("memory", ["3600KiB", "64MiB"])
def test_one_wrong_bit_on_the_way_to_a_slot_is_found(run, checkpoint, monkeypatch, memory):
    """Experts 0 and 1 of layer 0 are what the load-time proof looks at, so the wrong one is elsewhere."""
    fill = Filler.fill

    def flip_one_bit(self, key, buffer, *more):
        came = fill(self, key, buffer, *more)
        if key == (2, 5, EXACT):
            place = self._stores[EXACT].placement(2, 5).parts["down_proj"] + 3
            buffer[place] ^= 0x20
        return came

    monkeypatch.setattr(Filler, "fill", flip_one_bit)
    ran = run("verify", checkpoint, "--memory", memory, "--json")
    assert ran.code == 1 and not ran.json["is_exact"]
    assert wrong(ran.json) == {(2, "experts"), (2, "mlp")}
    shown = run("verify", checkpoint, "--memory", memory)
    assert shown.code == 1 and "experts differs by" in shown.out
    assert "not exact: experts of layer 2, mlp of layer 2" in shown.out


def test_nan_in_an_expert_is_named(run, tmp_path):
    folder = save_toy(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.experts.4.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    ran = run("verify", folder, "--memory", "64MiB")
    assert ran.code == 2 and "NaN" in ran.err and "model.layers.1.mlp.experts.4.down_proj.weight" in ran.err
    assert str(folder / "model.safetensors") in ran.err.replace("\n", "")


def test_a_layer_that_does_not_fit_is_refused_with_sizes(run, checkpoint, monkeypatch):
    monkeypatch.setattr("smoe.report.verify.free_device_bytes", lambda device: (100_000, "available RAM"))
    ran = run("verify", checkpoint, "--memory", "64MiB")
    assert ran.code == 2 and "one layer's experts" in ran.err and "97.7 KiB are free" in ran.err


def wrong(report: dict[str, Any]) -> set[tuple[int | None, str]]:
    return {(entry["layer"], entry["part"]) for entry in report["layers"] if not entry["is_equal"]}


def off_by_one_ulp(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As a kernel that sums in another order: one number is the next one, where a single token is computed."""

    def broken(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = forward(x, *args, **kwargs)
        y = answer[0] if isinstance(answer, tuple) else answer
        if x.numel() == x.shape[-1]:
            y.view(torch.int16).flatten()[3] += 1
        return answer

    return broken


class WrongQuery:
    """In the place of our attention."""

    def serves(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        return query.shape[2] == 1

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        out = scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True).transpose(1, 2)
        out.contiguous().view(torch.int16).flatten()[5] += 1
        return out


def wrong_attention(model: PreTrainedModel) -> None:
    attention._behind_the_name()
    model.model.layers[1].self_attn.one_query = WrongQuery()


def wrong_module(path: str) -> Callable[[PreTrainedModel], None]:
    def put(model: PreTrainedModel) -> None:
        module = model.get_submodule(path)
        module.forward = off_by_one_ulp(module.forward)

    return put


def wrong_cache(model: PreTrainedModel) -> None:
    update = kv_cache.Positioned.update

    def late(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **more: Any) -> Any:
        known, weighed = update(self, keys, values, *args, **more)
        return known, weighed.roll(1, 2)

    kv_cache.Positioned.update = late


BLOCK = (0, "mlp")
BROKEN: list[tuple[Callable[[PreTrainedModel], None], set[tuple[int | None, str]]]] = [
    (wrong_module("model.layers.2.input_layernorm"), {(2, "input_layernorm")}),
    (wrong_module("model.layers.1.self_attn.o_proj"), {(1, "self_attn")}),
    (wrong_attention, {(1, "self_attn")}),
    (wrong_module("model.layers.0.mlp.gate"), {(0, "mlp.gate")}),  # its logits, which nobody uses: not the weights
    (wrong_module("model.layers.0.mlp.shared_expert.up_proj"), {(0, "mlp.shared_expert"), BLOCK}),
    (wrong_module("model.norm"), {(None, "model.norm")}),
    (wrong_module("lm_head"), {(None, "lm_head")}),
    (wrong_cache, {(layer, "self_attn") for layer in range(4)}),
]


@pytest.mark.parametrize(("broken", "places"), BROKEN)
def test_a_wrong_kernel_is_named(
    broken: Callable[[PreTrainedModel], None],
    places: set[tuple[int | None, str]],
    run: Run,
    toy: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever stands in the place of a module of the library's: its layer and part, and nothing else."""

    def load_broken(*args: Any) -> PreTrainedModel:
        model = session_load(*args)
        broken(model)
        return model

    session_load = session.load
    monkeypatch.setattr(session, "load", load_broken)
    monkeypatch.setattr(kv_cache.Positioned, "update", kv_cache.Positioned.update)  # put back at the end
    ran = run("verify", toy("qwen2_moe", dtype=torch.bfloat16), "--memory", "64MiB", "--context", 64, "--json")
    assert ran.code == 1
    assert wrong(ran.json) == places


def test_a_part_that_depends_on_the_engines_threads_is_named(
    toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours runs with the engine's setting, the library's with all threads."""
    monkeypatch.setattr(Qwen2MoeRMSNorm, "forward", lambda self, x: x * torch.get_num_threads())
    folder, before = toy("qwen2_moe"), torch.get_num_threads()
    try:
        model = open_model(folder, "full", threads=2)
        assert not checked(model, folder).bad
        model.offload.passes._leaves_little = True
        bad = checked(model, folder).bad
    finally:
        torch.set_num_threads(before)
    assert {one.phase for one in bad} == {"decode"}
    norms = {"input_layernorm", "post_attention_layernorm"}
    expected = {(layer, name) for layer in range(4) for name in norms} | {(None, "model.norm")}
    assert {(one.layer, one.part) for one in bad} == expected


def checked(model: PreTrainedModel, folder: Path) -> Report:
    return verify(model, reference_of(str(folder), configure(), None, 3), torch.tensor([[1, 2, 3]]), lambda _: None)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_part_of_every_family_is_compared(
    family: str, toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    """By our kernels where they agree; would catch a part that is never asked, and a cache that differs in shape."""
    folder = toy(family, dtype=torch.bfloat16)
    model = open_model(folder, "minimum", kernels="native")
    report = checked(model, folder)
    assert not report.bad
    assert report.not_compared == []
    layers = {comparison.layer for comparison in report.comparisons if comparison.part == "experts"}
    assert sorted(layers) == sorted(zoo.sparse_layers(model))


def test_the_engine_is_left_as_it_was(checkpoint):
    model = from_pretrained(checkpoint, memory="64MiB")
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    checked(model, checkpoint)
    assert "run_experts" not in vars(model.offload)
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    model.offload.close()
