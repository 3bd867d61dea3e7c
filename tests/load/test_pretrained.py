"""Putting an engine together: order, defaults, what is left behind when it fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe import from_pretrained, load_tokenizer
from smoe.compute.expert_math import ExpertMath
from smoe.errors import BudgetError, ConfigError, UnsupportedModelError
from smoe.kernels.spinning_pool import is_supported
from smoe.load.device import choose_device
from smoe.memory.arena import Arena
from smoe.memory.expert_files import DiskReader
from smoe.models.experts import is_experts
from smoe.models.read_spec import read_spec
from smoe.policy.budget import full_bytes
from smoe.presets import configure
from tests import oracle, zoo
from tests.threads import engine_threads

Open = Callable[..., PreTrainedModel]


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(configure(device="cuda:1")) == torch.device("cuda:1")
    with pytest.raises(
        ConfigError, match="`device` is 'cuda:2'; choose one of: cpu, cuda:0, cuda:1, emulated"
    ) as error:
        choose_device(configure(device="cuda:2"))
    assert error.value.facts["setting"] == "device"


TWICE: dict[str, dict[str, Any]] = {
    "memory": {"memory": "20MiB", "memory_bytes": 2**20},
    "resident": {"resident": 0.5, "resident_share": 0.4},
    "host_memory": {"host_memory": "1GiB", "host_memory_bytes": 5, "device": "emulated"},
}


@pytest.mark.parametrize("name", TWICE)
def test_one_setting_by_two_names_is_refused(name: str) -> None:
    """Would catch one of the two that is dropped."""
    with pytest.raises(ConfigError, match=f"`{name}=.*` and `{name}_.*=.*` give the same setting twice; leave out one"):
        from_pretrained("demo", **TWICE[name])


@pytest.mark.parametrize(("name", "given"), [("memory", "20MB!"), ("resident", "x"), ("host_memory", "1 box")])
def test_an_error_names_the_argument_that_was_given(name: str, given: str) -> None:
    """Would catch the name of the field of `EngineConfig` in its place."""
    with pytest.raises(ConfigError, match=f"^`{name}` is '{given}', which is not a s"):
        from_pretrained("demo", **{name: given})


def test_the_error_of_a_process_that_is_too_small_names_what_to_change() -> None:
    with pytest.raises(BudgetError, match=r"give the process \S+iB or more, with `count=process` \(for a context of"):
        from_pretrained("demo", memory="100MiB", count="process")


IDLE: dict[str, dict[str, Any]] = {
    "`host_memory` is 1.00 GiB, and it has an effect only with a GPU": {"host_memory": "1GiB"},
    "`profile` has an effect only with `device=emulated`": {"profile": "rtx-4060-ti"},
    "`profile` is 'rtx-406'.*no such profile or file": {"profile": "rtx-406", "device": "emulated"},
    "`profile` is 5; it must be a text": {"profile": 5},
    "`device` is 5; it must be a text": {"device": 5},
}


@pytest.mark.parametrize("why", IDLE)
def test_settings_without_effect_on_a_cpu_are_refused(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=why):
        from_pretrained("demo", memory="20MiB", **IDLE[why])


@pytest.mark.parametrize("model", [None, 5, b"demo", [], True], ids=repr)
@pytest.mark.parametrize("load", [from_pretrained, load_tokenizer])
def test_a_model_that_is_no_name_is_refused(model: Any, load: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"`model` is .*; it must be a text or a path: give a model folder, a GGUF"):
        load(model)


def test_a_process_that_is_too_small_has_no_negative_budget() -> None:
    with pytest.raises(BudgetError) as refused:
        from_pretrained("demo", memory="20MiB", count="process")
    message = str(refused.value)
    assert "leaves 0 B for the memory budget; the least it needs is" in message and " -" not in message


def test_by_default_the_whole_model_fits(toy: Callable[..., Path]) -> None:
    """A toy beside gigabytes of free memory: everything resident, never more than that."""
    folder = toy("mixtral")
    model = from_pretrained(folder, context_tokens=oracle.CONTEXT)
    with model.offload as engine:
        assert engine.ledger.budget_bytes == full_bytes(oracle.demand(folder))
        assert engine.ledger.resident_share == 1
        assert engine.budget_reason == "the whole model fits"


@pytest.mark.parametrize("free", [0, 2**20, 300 * 2**20])
def test_no_free_memory_is_a_budget_error(free: int, toy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoe.load.ledger.free_device_bytes", lambda _: (free, "a test"))
    context = pytest.raises(BudgetError) if free < 2**28 else None
    if context is not None:
        with context:
            from_pretrained(toy("mixtral"), context_tokens=oracle.CONTEXT)
        return
    from_pretrained(toy("mixtral"), context_tokens=oracle.CONTEXT).offload.close()


def test_the_experts_weights_are_never_loaded_by_the_library(toy: Callable[..., Path], open_model: Open) -> None:
    """Would catch a loader that first builds the whole model and then throws the experts away."""
    model = open_model(toy("mixtral"), "minimum")
    modules = [module for module in model.modules() if is_experts(module)]
    assert len(modules) == 4
    assert not any(list(module.parameters()) for module in modules)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    assert total <= model.offload.ledger.entries()["non-expert weights"]


def test_loading_ours_leaves_the_library_as_it_was(toy: Callable[..., Path], open_model: Open) -> None:
    """The experts' classes are patched while loading; a model loaded afterwards must have its experts."""
    folder = toy("mixtral")
    before = oracle.greedy(oracle.reference(folder), new_tokens=4)
    open_model(folder, "minimum")
    again = oracle.reference(folder)
    assert sum("experts" in name for name, _ in again.named_parameters()) == 8
    oracle.assert_same_steps(oracle.greedy(again, new_tokens=4), before)


def test_two_models_at_once(toy: Callable[..., Path], open_model: Open) -> None:
    first, second = open_model(toy("mixtral"), "fifth"), open_model(toy("gpt_oss"), "fifth")
    for _ in range(2):
        oracle.assert_same_steps(oracle.greedy(first), oracle.reference_steps(toy("mixtral")))
        oracle.assert_same_steps(oracle.greedy(second), oracle.reference_steps(toy("gpt_oss")))


def swapped(bind: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: ExpertMath, *args: Any) -> Any:
        weights = bind(self, *args)
        return weights._replace(up=weights.up.roll(weights.up.shape[1] // 2, 1))

    return wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_family_loads_in_every_dtype(
    family: str, dtype: torch.dtype, toy: Callable[..., Path], open_model: Open
) -> None:
    """Some keep routers or norms in float32, which the budget must know before they are loaded."""
    open_model(toy(family, dtype=dtype), "minimum")


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_proof_at_load_refuses_wrong_arithmetic(
    family: str, toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up swapped, in every family: the self-test must see it, and leave no thread behind."""
    before = engine_threads()
    monkeypatch.setattr(ExpertMath, "bind", swapped(ExpertMath.bind))
    with pytest.raises(UnsupportedModelError, match="self-test failed"):
        open_model(toy(family), "half")
    assert engine_threads() <= before


class LateError(Exception):
    pass


@pytest.mark.parametrize(
    ("step", "switches"),
    [
        ("smoe.models.safetensors_folder.SafetensorsFolder.load_dense", {}),
        ("smoe.load.selftest.check_experts", {}),
        ("smoe.compute.expert_math.agrees", {"kernels": "auto"}),  # own order, too
        ("smoe.load.choose_kernel._seconds", {}),
        pytest.param(
            "smoe.load.choose_kernel.linear.speed_up",
            {"kernels": "native"},
            marks=pytest.mark.skipif(not is_supported(), reason="no kernel"),
        ),
        ("smoe.load.build._dense_bytes", {}),
        ("smoe.load.build.attach", {}),
        ("smoe.load.build.Trial", {}),
        ("smoe.load.build.calibrate", {"device": "emulated"}),
        ("smoe.load.build.Balancer", {"device": "emulated", "dilation": 1.0, "balance": "optimal"}),
    ],
)
def test_a_late_failure_leaves_no_thread_behind(
    step: str, switches: dict[str, Any], toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever step of loading it is; would catch readers, compute helpers or a kernel's pool that outlive it."""

    def fail(*args: Any, **more: Any) -> Any:
        raise LateError

    before, threads = engine_threads(), torch.get_num_threads()
    monkeypatch.setattr(step, fail)
    monkeypatch.setattr("smoe.load.choose_kernel.MIN_EXPERT_BYTES", 0)
    if switches.get("kernels") == "native":  # toys are too small for the kernel; nothing is computed before the failure
        monkeypatch.setattr("smoe.load.choose_kernel.agreeing_kernels", lambda *_: {})
    try:
        with pytest.raises(LateError):
            open_model(toy("mixtral", dtype=torch.bfloat16), "half", threads=2, **switches)
    finally:
        torch.set_num_threads(threads)
    assert engine_threads() <= before


def test_threads_are_set(toy: Callable[..., Path], open_model: Open) -> None:
    before = torch.get_num_threads()
    try:
        open_model(toy("mixtral"), threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("spare_share", "reads"), [(1.2, "off"), (0.9, "on")])
def test_whether_reads_pass_the_page_cache_is_decided_once(
    spare_share: float, reads: str, toy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any memory is taken, which would count twice: slots, files and the next forecast go by the same answer."""
    folder = toy("mixtral")
    asked: list[bool] = []
    made: list[bool] = []
    spec = read_spec(str(folder), configure())
    with from_pretrained(folder, memory="4MiB", context_tokens=64).offload as engine:
        free = engine.ledger.total_bytes + int(spare_share * spec.experts_bytes)
    monkeypatch.setattr("smoe.load.divide.free_device_bytes", lambda device: (free, "test"))
    monkeypatch.setattr("smoe.load.engine_parts.free_device_bytes", lambda device: (0, "test"))

    class Asked(DiskReader):
        def __init__(self, direct: bool, cached_first: bool) -> None:
            asked.append(direct)
            super().__init__(direct, cached_first=cached_first)

    class Made(Arena):
        def __init__(self, sizes: Any, device: Any, huge_pages: bool = False) -> None:
            made.append(huge_pages)
            super().__init__(sizes, device, huge_pages)

    monkeypatch.setattr("smoe.load.engine_parts.DiskReader", Asked)
    monkeypatch.setattr("smoe.load.pretrained.Arena", Made)
    model = from_pretrained(folder, memory="4MiB", context_tokens=64)
    try:
        assert model.offload.config.direct_io == reads
        assert asked == made == [reads == "on"]
    finally:
        model.offload.close()
