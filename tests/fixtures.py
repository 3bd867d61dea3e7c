"""One thread, a cache folder of the run's own, and toy checkpoints that are written once for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # read when Triton is imported, as the library does: its kernels run on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings
from transformers import PreTrainedModel
from transformers.utils import logging as library_logging

from smoe.kernels import proof
from smoe.kernels.spinning_pool import SpinningPool
from smoe.load import stored_proofs
from smoe.machine import measure, quick_look
from smoe.machine.best_time import ranked_time
from smoe.models import read_spec
from smoe.models.examine import examine
from smoe.models.outline import Anatomy, ExpertsSite
from smoe.report import on_clock
from smoe.user_cache import PLACE
from tests import oracle, promised, zoo

torch.set_num_threads(1)
library_logging.disable_progress_bar()
settings.register_profile("untimed", deadline=None)  # a busy machine is no error
settings.load_profile("untimed")

Toy = Callable[..., Path]


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported: some hold the proofs by name."""
    promised.disagreeing.update(config.getoption("--disagree"))
    promised.disagree(pytest.MonkeyPatch(), *promised.disagreeing)


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_garbage() -> None:
    """Loading a model looks for garbage; what was imported never is any, nor is what earlier modules have left for the
    session, and takes 0.3 s a time to look through."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before any fixture: what fails once fails again, whichever tests came before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def examined_once() -> Iterator[None]:
    """A model's empty shell is run whenever it is loaded, which takes half of a toy's load, and of one configuration
    it says the same. What `examine` itself does, tests of it ask it for."""
    known: dict[tuple[object, ...], Anatomy] = {}

    def remembered(model: PreTrainedModel, sites: list[ExpertsSite], dtype: torch.dtype) -> Anatomy:
        key = type(model), _computing(model), str(sites), dtype, len([*model.parameters()])
        if key not in known:
            known[key] = examine(model, sites, dtype)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_spec, "examine", remembered)
        yield


def _computing(model: PreTrainedModel) -> str:
    """A configuration without its file's path, which differs from test to test, and what else changes no shape."""
    lines = model.config.to_json_string(use_diff=False).splitlines()
    return "".join(line for line in lines if not any(f'"{key}":' in line for key in _NOT_COMPUTING))


_NOT_COMPUTING = ("_name_or_path", "dtype", "bos_token_id", "eos_token_id", "pad_token_id")


@pytest.fixture(scope="session", autouse=True)
def measured_briefly() -> Iterator[None]:
    """Rates are measured by one run, and forecasts simulate few steps: a plan takes 0.2 s in the place of 3, and what
    most tests ask of it are its ledger and its words. Tests of figures take `measured_in_full`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "ranked_time", lambda action, seconds, rank: ranked_time(action, 0.0, rank))
        patch.setattr(quick_look, "_looked_apart", lambda expert_bytes: (LOOKED, False))
        patch.setattr(measure, "_MEMORY_BYTES", 1 << 20)
        patch.setattr(quick_look, "memory_rate", lambda: LOOKED.memory)
        patch.setattr(on_clock, "_WARM_UP", 2)
        patch.setattr(on_clock, "_STEPS", 4)
        yield


LOOKED = quick_look.QuickLook(memory=20e9, experts=4e9, products=1e11, disk=1e8)
"""What tests find at a first look at the machine."""


@pytest.fixture(scope="session", autouse=True)
def written_without_waiting() -> Iterator[None]:
    """No file of a test must outlive a power failure: to wait for the disk takes 5 to 25 ms each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture
def measured_in_full(measured_briefly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts simulate as many steps as a user's."""
    monkeypatch.setattr(on_clock, "_WARM_UP", 16)
    monkeypatch.setattr(on_clock, "_STEPS", 32)


@pytest.fixture(scope="session")
def object_code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Object code, for every process of the run: each kernel is compiled once. Where the run was given a folder, for
    the runs after it, too."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"
    given: Path | None = request.config.getoption("object_code")
    shared = shared if given is None else given.resolve()
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    return shared


def cache_with(object_code: Path, place: Path) -> str:
    """The user's caches at a place: nothing is known there but object code."""
    (place / "smoe").mkdir(parents=True)
    (place / "smoe" / "kernels").symlink_to(object_code)
    return str(place)


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, object_code: Path) -> Iterator[None]:
    """What tests have measured is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLACE, cache_with(object_code, tmp_path_factory.mktemp("caches") / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def proven_at_every_load() -> Iterator[None]:
    """Tests replace kernels and proofs, so a load must not take the results of another test's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_proofs, "_may_be_stored", lambda _: False)
        yield


_MAY_BE_STORED = stored_proofs._may_be_stored


@pytest.fixture
def proven_once(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of proofs are stored for later loads of the same test."""
    monkeypatch.setattr(stored_proofs, "_may_be_stored", _MAY_BE_STORED)


@pytest.fixture
def own_cache(tmp_path: Path, object_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have measured, fitted or learned is not known."""
    monkeypatch.setenv(PLACE, cache_with(object_code, tmp_path / "cache"))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """`toy(family, dtype=..., **what zoo.save takes)`: the folder of a toy checkpoint. Nobody may change its files."""
    folders: dict[str, Path] = {}

    def folder(family: str, **options: Any) -> Path:
        name = repr((family, sorted(options.items(), key=str)))
        if name not in folders:
            folders[name] = zoo.save(family, tmp_path_factory.mktemp(family), **options)
        return folders[name]

    return folder


@pytest.fixture(params=[pytest.param(n, marks=promised.machine_code) for n in (1, 3)], ids=["alone", "pool"])
def pool(request: pytest.FixtureRequest) -> Iterator[SpinningPool]:
    """Our kernel, where this machine can run it and torch sums in the order that it knows."""
    promised.needs_machine_code()
    with SpinningPool(request.param, several=True) as pool:
        promised.needs(proof.agrees(pool, torch.randn(512, 2048).bfloat16().t()), "the order of torch's bf16 products")
        yield pool


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Whoever leaves the library more threads than it found gives the tests that follow other bits."""
    yield
    left = torch.get_num_threads()
    torch.set_num_threads(1)
    assert left == 1, f"this test leaves the library {left} threads"


@pytest.fixture
def open_model() -> Iterator[Callable[..., PreTrainedModel]]:
    """`oracle.open_model`, with everything it opened closed at the end of the test."""
    opened: list[PreTrainedModel] = []

    def load(*args: Any, **switches: Any) -> PreTrainedModel:
        opened.append(oracle.open_model(*args, **switches))
        return opened[-1]

    yield load
    for model in opened:
        model.offload.close()
