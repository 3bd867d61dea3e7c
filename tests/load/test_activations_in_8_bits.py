"""Whole models whose activations are rounded to 8 bits: near those whose are not, the same every time, or refused.

Would catch: a layer that gets other activations when its experts arrive late or on another thread, a setting that is
taken and does nothing, a kernel that is used though it was found to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.bounds import BF16, INT8
from smoe.compute import quantised_math
from smoe.errors import ConfigError
from smoe.kernels.isa import widest
from smoe.kernels.threads import threads
from smoe.load.experts_math import activations_of
from smoe.models.quantised_linear import QuantisedLinear
from smoe.presets import configure
from smoe.routing import Routing
from tests import gguf_toy, oracle
from tests.kernels.products import gains_by_interleaving
from tests.load.test_precision import packed_toy
from tests.models.test_gguf_quantised import assert_near, steps

Open = Callable[..., PreTrainedModel]
needs_kernels = pytest.mark.skipif(widest(INT8) is None, reason="this CPU has no instruction set that kernels are for")


TIE = 0.02
"""Of two probabilities: a router that stood between two experts may take the other one after rounding."""


@contextmanager
def watched_routers(model: PreTrainedModel) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Inside, the library's probabilities of all experts are collected by layer: [E] for each position."""
    found: dict[int, list[torch.Tensor]] = {}
    with ExitStack() as hooks:
        for n, layer in enumerate(model.model.layers):

            def collect(_: Any, __: Any, output: tuple[torch.Tensor, ...], of: int = n) -> None:
                found.setdefault(of, []).extend(output[0].float().softmax(-1))

            hooks.callback(layer.mlp.gate.register_forward_hook(collect).remove)
        yield found


def rerouted(ours: Sequence[Routing], theirs: dict[int, list[torch.Tensor]]) -> torch.Tensor:
    """Positions whose experts differ from the library's in some layer: bool [positions].

    Rounding may exchange two experts only where the router stood between them: in the first such layer of a position
    they are as probable as each other, up to `TIE`.
    """
    chosen: dict[int, list[set[int]]] = {}
    for routing in ours:
        chosen.setdefault(routing.layer, []).extend(map(set, routing.top_k_index))
    found = torch.zeros(len(chosen[0]), dtype=torch.bool)
    for layer in sorted(chosen):
        for n, (mine, probable) in enumerate(zip(chosen[layer], theirs[layer], strict=True)):
            best = probable.topk(len(mine) + 1)
            if mine != set(best.indices[:-1].tolist()) and not found[n]:
                assert float(best.values[-2] - best.values[-1]) <= TIE, (layer, n)
                found[n] = True
    return found


@needs_kernels
@pytest.mark.parametrize("mixture", gguf_toy.MIXTURES)
def test_logits_are_near_those_of_the_dequantised_model(mixture: str, tmp_path: Path, open_model: Open) -> None:
    path, theirs = gguf_toy.quantised(tmp_path / "toy.gguf", mixture)
    model = open_model(path, "full", activations=INT8)
    with model.offload.recording() as ours:
        full = steps(model, oracle.PROMPT)
    minimum = steps(open_model(path, "minimum", activations=INT8), oracle.PROMPT)
    assert all(map(torch.equal, full, minimum)), "a result that depends on the budget"
    with watched_routers(theirs) as probabilities:
        wanted = steps(theirs, oracle.PROMPT)
    alike = ~rerouted(ours, probabilities)
    assert alike.sum() >= alike.numel() * 3 / 4
    assert_near([torch.cat(full, 1)[:, alike]], [torch.cat(wanted, 1)[:, alike]], 0.08)
    as_they_are = steps(open_model(path, "full", activations="dtype"), oracle.PROMPT)
    assert not all(map(torch.equal, full, as_they_are)), "nothing was rounded"


@needs_kernels
@pytest.mark.parametrize(("budget", "switches"), [("minimum", {}), ("full", {}), ("half", {"kernels": "torch"})])
def test_interleaved_rows_change_no_bit(
    budget: str, switches: dict[str, str], tmp_path: Path, open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While experts come and go, where all stay, and where no kernel of ours is used."""
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M")
    found = []
    for can_gain in (False, True):
        with monkeypatch.context() as patch:
            gains_by_interleaving(patch, can_gain)
            model = open_model(path, budget, **switches)
            found.append(steps(model, oracle.PROMPT))
        layers = [each for each in model.modules() if isinstance(each, QuantisedLinear)]
        assert any(each.form.rows > 1 for each in layers) == (can_gain and not switches)
        maths = model.offload.executor.arrivals._math.values()
        assert any(math.is_interleaved for math in maths) == (can_gain and budget == "full"), "experts that are evicted"
    assert all(map(torch.equal, *found))


@needs_kernels
def test_it_is_the_default_for_quantised_weights(tmp_path: Path, open_model: Open) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M")
    asked, default, same = (
        steps(open_model(path, "half", **switches), oracle.PROMPT)
        for switches in ({"activations": INT8}, {}, {"activations": "dtype"})
    )
    assert all(map(torch.equal, asked, default))
    assert not all(map(torch.equal, asked, same))


@pytest.mark.parametrize(
    ("switches", "wanted"),
    [({}, INT8), ({"device": "emulated"}, BF16), ({"kernels": "torch"}, BF16), ({"activations": "dtype"}, BF16)],
)
@needs_kernels
def test_what_is_chosen_where_nothing_is_asked_for(switches: dict[str, str], wanted: str) -> None:
    assert activations_of(configure(**switches), torch.bfloat16, torch.device("cpu")) == wanted


def test_the_former_name_of_the_model_s_own_type_works() -> None:
    assert configure(activations="bf16").activations == configure(activations="dtype").activations == "dtype"


@needs_kernels
def test_layers_beside_the_experts_round_theirs_too(tmp_path: Path, open_model: Open) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q8_0")
    layers = [each for each in open_model(path, activations=INT8).modules() if isinstance(each, QuantisedLinear)]
    assert layers and all(each.activations == INT8 for each in layers)


@needs_kernels
def test_the_number_of_threads_changes_nothing(tmp_path: Path, open_model: Open) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M", "qwen2_moe")
    with threads(1):  # puts back what the setting `threads` does to the library
        one, three = (
            steps(open_model(path, "half", activations=INT8, threads=count), oracle.PROMPT) for count in (1, 3)
        )
    assert all(map(torch.equal, one, three))


@needs_kernels
def test_several_sequences_and_packed_experts(toy: Callable[..., Path], tmp_path: Path, open_model: Open) -> None:
    folder = packed_toy(toy, "qwen3_moe", "int4", tmp_path / "model", torch.bfloat16)
    ids = torch.cat([oracle.PROMPT, oracle.PROMPT.flip(1)])
    rounded, as_they_are = (
        steps(open_model(folder, "half", precision="int4", max_sequences=2, **switches), ids)
        for switches in ({"activations": INT8}, {"activations": "dtype"})
    )
    assert_near(rounded, as_they_are, 0.08, others=4)
    assert not all(map(torch.equal, rounded, as_they_are))


@pytest.mark.parametrize(
    ("other", "value"),
    [("device", "cuda"), ("device", "emulated"), ("kernels", "torch"), ("dtype", "float32"), ("dtype", "float16")],
)
def test_settings_that_do_not_go_with_it(other: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be combined with `{other}={value}`") as caught:
        configure(activations=INT8, **{other: value})
    assert (caught.value.setting, caught.value.given) == ("activations", INT8)


def test_it_is_named_as_lossy() -> None:
    assert configure(precision="int4", activations=INT8).lossy == ["experts in int4", "activations in int8"]
    assert configure().lossy == []


@needs_kernels
def test_where_nothing_is_quantised(toy: Callable[..., Path], open_model: Open) -> None:
    with pytest.raises(ConfigError, match="has an effect only with quantised weights"):
        open_model(toy("qwen3_moe", dtype=torch.bfloat16), "half", activations=INT8)


@pytest.mark.parametrize("reason", ["a wrong kernel", "no instruction set"])
def test_where_no_kernel_can_be_used(
    reason: str, tmp_path: Path, open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q8_0")
    if reason == "a wrong kernel":
        wrong: Callable[..., Any] = lambda *_: False  # noqa: E731
        monkeypatch.setattr(quantised_math, "is_as_near", wrong)
    else:
        monkeypatch.setenv("SMOE_MAX_CPU_ISA", "none")
    with pytest.raises(ConfigError, match="a passed self-test"):
        open_model(path, "half", activations=INT8)
    assert open_model(path, "half").offload is not None, "without it the model is served"
