"""What would wreck a live model is refused, what changes nothing works.

Would catch: a saved model without experts, a copy without an engine, weights that change their type under an engine
that keeps its own, and a harness that fails on `.to("cpu")`.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, pipeline

from smoe import from_pretrained
from smoe.errors import ConfigError, EngineStateError
from smoe.models import guards
from tests import oracle
from tests.toy import ascii_tokenizer, save_toy

Open = Callable[..., PreTrainedModel]
Toy = Callable[..., Path]

WRECKS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to dtype": lambda model: model.to(torch.float16),
    "to keyword": lambda model: model.to(dtype=torch.float64),
    "to device": lambda model: model.to("meta"),
    "to both": lambda model: model.to("cpu", torch.bfloat16),
    "type": lambda model: model.type(torch.float64),
    "a part": lambda model: model.model.layers[0].self_attn.half(),
    "the head": lambda model: model.lm_head.to(torch.bfloat16),
    "a device that torch lacks": lambda model: model.to("xpu"),
    "a device by its method": lambda model: model.xpu(),
    "train": lambda model: model.train(),
    "gradients": lambda model: model.requires_grad_(),
    "gradient checkpointing": lambda model: model.gradient_checkpointing_enable(),
    "gradients of inputs": lambda model: model.enable_input_require_grads(),
    "fewer tokens": lambda model: model.resize_token_embeddings(10),
    "padded tokens": lambda model: model.resize_token_embeddings(pad_to_multiple_of=7),
}


@pytest.mark.parametrize("wreck", WRECKS)
def test_wrecking_is_refused(wreck: str, toy: Toy, open_model: Open) -> None:
    folder = toy("mixtral")
    model = open_model(folder)
    with pytest.raises(EngineStateError) as error:
        WRECKS[wreck](model)
    assert "from_pretrained" in str(error.value) or "inference" in str(error.value)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


def test_a_state_without_experts_says_so_once(toy: Toy, open_model: Open) -> None:
    """It is no error: adapters read it. Would catch a file that someone takes for the model."""
    folder = toy("mixtral")
    model = open_model(folder)
    with pytest.warns(UserWarning, match=f"lacks its routed experts.*{folder}.*copy that checkpoint") as warned:
        state = [model.state_dict(), model.state_dict()][1]
    assert len(warned) == 1 and warned[0].filename == __file__
    assert state.keys() == dict(model.named_parameters()).keys()


def test_a_vocabulary_of_the_same_size_is_no_change(toy: Toy, open_model: Open) -> None:
    model = open_model(toy("mixtral"))
    same = model.get_input_embeddings()
    assert model.resize_token_embeddings(128) is model.resize_token_embeddings(None, 8) is same


def test_a_device_that_torch_lacks_is_no_reason_to_load_again(toy: Toy, open_model: Open) -> None:
    with pytest.raises(EngineStateError, match=r"Leave the call out; the `device` of smoe.from_pretrained"):
        open_model(toy("mixtral")).to("xpu")


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "torch.save": lambda what: torch.save(what, io.BytesIO()),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("what", ["model", "engine"])
def test_copying_is_refused(what: str, way: str, toy: Toy, open_model: Open) -> None:
    """Would catch torch's or pickle's own message about an object deep inside, and a copy without an engine."""
    folder = toy("mixtral")
    model = open_model(folder)
    with pytest.raises(EngineStateError, match=r"cannot be copied or pickled.*Call smoe.from_pretrained again"):
        COPIES[way](model if what == "model" else model.offload)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


class Adapted(nn.Module):
    """A linear layer and a low-rank product beside it, as adapters put one in a layer's place."""

    def __init__(self, base: nn.Module, is_trained: bool = False) -> None:
        super().__init__()
        self.base, rows, columns = base, base.weight.shape[0], base.weight.shape[1]
        generator = torch.Generator().manual_seed(5)
        self.down, self.up = (
            nn.Parameter(torch.randn(shape, generator=generator, dtype=base.weight.dtype), requires_grad=is_trained)
            for shape in ((2, columns), (rows, 2))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return found


def adapt(model: PreTrainedModel, is_trained: bool = False) -> PreTrainedModel:
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name), is_trained))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_are_used(dtype: torch.dtype, toy: Toy, open_model: Open) -> None:
    """Would catch attention that reads a layer's weights past the adapter in its place."""
    folder = toy("qwen3_moe", dtype=dtype)
    theirs = oracle.greedy(adapt(oracle.reference(folder)))
    assert not torch.equal(theirs.prefill, oracle.reference_steps(folder).prefill)
    oracle.assert_same_steps(oracle.greedy(adapt(open_model(folder))), theirs)


def test_adapters_are_not_trained(toy: Toy, open_model: Open) -> None:
    """Refused before anything is computed; without gradients the same adapters work."""
    model = adapt(open_model(toy("mixtral")), is_trained=True)
    with pytest.raises(EngineStateError, match=r"inference only.*Adapters .* can be used with it, not trained"):
        model(oracle.PROMPT, labels=oracle.PROMPT)
    with torch.no_grad():
        model(oracle.PROMPT)
    with pytest.raises(EngineStateError, match="inference only"):
        model(inputs_embeds=torch.zeros(1, 3, 64, requires_grad=True))


def test_a_loss_says_that_it_has_no_gradients(toy: Toy, open_model: Open) -> None:
    """And is the library's own; would catch torch's message about elements that do not require grad."""
    folder = toy("mixtral")
    model = open_model(folder)
    loss = model(oracle.PROMPT, labels=oracle.PROMPT).loss
    assert torch.equal(loss.detach(), oracle.reference(folder)(oracle.PROMPT, labels=oracle.PROMPT).loss.detach())
    with pytest.raises(EngineStateError, match="inference only"):
        loss.backward()
    with torch.no_grad():
        assert not model(oracle.PROMPT, labels=oracle.PROMPT).loss.requires_grad


HARMLESS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "float": lambda model: model.float(),
    "cpu": lambda model: model.cpu(),
    "to device": lambda model: model.to("cpu"),
    "to a device object": lambda model: model.to(device=torch.device("cpu")),
    "to dtype": lambda model: model.to(torch.float32),
    "to both": lambda model: model.to("cpu", torch.float32),
    "eval": lambda model: model.eval(),
    "train(False)": lambda model: model.train(False),
    "no gradients": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("ask", HARMLESS)
def test_what_changes_nothing_works(ask: str, toy: Toy, open_model: Open) -> None:
    folder = toy("mixtral")
    model = open_model(folder)
    assert HARMLESS[ask](model) is model
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


def test_buffers_of_another_type_are_left_alone(toy: Toy, open_model: Open) -> None:
    """The library's own `.to(bfloat16)` would round the positions' frequencies of a bfloat16 model."""
    model = open_model(toy("mixtral", dtype=torch.bfloat16))
    model.to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32


@pytest.mark.parametrize("name", ["save_pretrained", "push_to_hub"])
def test_saving_is_refused_before_anything_is_written(name: str, toy: Toy, open_model: Open, tmp_path: Path) -> None:
    folder = toy("mixtral")
    model = open_model(folder)
    with pytest.raises(EngineStateError, match=f"{name}.*without its experts.*{folder}.*copy"):
        getattr(model, name)(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_a_pipeline_takes_the_model(tmp_path: Path, open_model: Open) -> None:
    folder = save_toy(tmp_path / "toy")
    model = open_model(folder)
    generate = pipeline("text-generation", model=model, tokenizer=ascii_tokenizer(), device="cpu")
    (answer,) = generate("hello", max_new_tokens=4, do_sample=False)
    assert answer["generated_text"].startswith("hello")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "float32"])
def test_a_dtype_may_be_torch_s_own(dtype: torch.dtype | str, toy: Toy) -> None:
    with from_pretrained(
        toy("mixtral"), memory="64MiB", context_tokens=64, dtype=dtype, device=torch.device("cpu")
    ).offload as engine:
        assert f"torch.{engine.config.dtype}" == str(dtype) or engine.config.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype, toy: Toy) -> None:
    with pytest.raises(ConfigError, match=f"{str(dtype).removeprefix('torch.')}.*bfloat16"):
        from_pretrained(toy("mixtral"), memory="64MiB", context_tokens=64, dtype=dtype)


def test_an_engine_says_what_it_is(toy: Toy, open_model: Open) -> None:
    model = open_model(toy("mixtral"), "half")
    model(oracle.PROMPT)
    said = str(model.offload)
    assert len(said.splitlines()) <= 3
    for part in ("ready", "as requested", "16 of 32", "50%", "eviction", "exact", "24 tokens"):
        assert part in said, said
    model.offload.close()
    assert "closed" in str(model.offload)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch.compile", "model.compile"])
def test_a_compiled_model_runs_as_it_is(way: str, toy: Toy, open_model: Open, caplog: pytest.LogCaptureFixture) -> None:
    """At once, with one word about it; without this, tracing through reading threads ends in an error."""
    guards._warn_once.cache_clear()
    model = open_model(toy("mixtral"))
    expected, tokens = model(oracle.PROMPT).logits, model.generate(oracle.PROMPT, max_new_tokens=3, do_sample=False)
    compiled: Any = model
    if way == "torch.compile":
        compiled = torch.compile(model)
    else:
        model.compile()
    torch._dynamo.utils.counters.clear()
    with caplog.at_level(logging.WARNING, logger="smoe"):
        for _ in range(2):
            assert torch.equal(compiled(oracle.PROMPT).logits, expected)
        assert torch.equal(compiled.generate(oracle.PROMPT, max_new_tokens=3, do_sample=False), tokens)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("smoe")]
    assert len(lines) == 1 and "uncompiled" in lines[0]
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"], "something was compiled after all"
