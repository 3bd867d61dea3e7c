"""The parts of `python -m bench.gpu`, each a function from a bench to figures."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.gpu.link import link_rates
from bench.gpu.slots import slot_figures
from bench.mechanisms.ablation import DEVICE_ABLATIONS, PROMPT_TOKENS, TIMED_TOKENS, WARM_TOKENS, ablate
from bench.widen import widen
from smoe.config import EngineConfig
from smoe.load.device import choose_device
from smoe.load.ledger import demand_of, open_store
from smoe.load.pretrained import load
from smoe.models.checkpoint import whole_checkpoint
from smoe.models.files import fetch
from smoe.models.read_spec import read_spec
from smoe.policy.budget import full_bytes, minimum_bytes
from smoe.presets import configure

TEXT = Path(__file__).parent.parent / "text.txt"
PRESETS = ("exact", "smoe-exact", "smoe", "static", "hybrimoe")
SHARES = (1.0, 0.5, 0.25)
"""Of the experts, how many have a slot on the device."""
WIDE_HIDDEN, WIDE_EXPERT = 3072, 512
CONTEXT = 512


@dataclass(frozen=True)
class Bench:
    """Where and how large."""

    out: Path
    is_dry: bool

    @property
    def device(self) -> str:
        return "emulated" if self.is_dry else "cuda"

    def config(self, **switches: Any) -> EngineConfig:
        dilation = {"dilation": 1.0} if self.is_dry else {}
        return configure(**{"device": self.device, "context_tokens": CONTEXT, **dilation, **switches})

    def at_share(self, model: Path, share: float, **switches: Any) -> EngineConfig:
        """A configuration whose budget has slots for such a share of the experts."""
        config = self.config(**switches)
        plan, device = read_spec(model, config), choose_device(config)
        checkpoint = whole_checkpoint(model, None)
        store = open_store(checkpoint, plan, checkpoint.experts(plan), device)
        needs = demand_of(plan, config, device, store)
        slots = max(needs.top_k, round(share * needs.total_experts))
        whole = minimum_bytes(needs) + (slots - needs.top_k) * needs.slot_bytes
        return self.config(memory_bytes=min(whole, full_bytes(needs)), **switches)

    @contextmanager
    def opened(self, model: Path, config: EngineConfig) -> Iterator[PreTrainedModel]:
        ready = load(str(model), config)
        try:
            yield ready
        finally:
            ready.offload.close()  # type: ignore[operator]
            del ready
            free()

    def wide(self) -> Path:
        """The wide demo, written where it is not there yet; in a dry run the embedded model itself."""
        folder, small = self.out / "wide", fetch("demo", None)
        if self.is_dry:
            return small
        if not (folder / "config.json").exists():
            widen(small, folder, WIDE_HIDDEN, WIDE_EXPERT)
        return folder

    def tokens(self, model: Path, count: int) -> list[int]:
        """The beginning of a text."""
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        ids: list[int] = tokenizer(TEXT.read_text("utf8"))["input_ids"]
        return (ids * -(-count // len(ids)))[:count]


class Part(NamedTuple):
    """A part and the most seconds that it may take."""

    seconds: int
    run: Callable[[Bench], dict[str, Any]]


def free() -> None:
    """Give memory back between two models."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def environment(bench: Bench) -> dict[str, Any]:
    """What ran."""
    packages = ("torch", "transformers", "triton", "numpy", "safetensors", "accelerate", "llvmlite", "pytest")
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    figures: dict[str, Any] = {"python": platform.python_version(), "packages": found, "cores": os.cpu_count()}
    figures["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        figures["gpu"] = {"name": properties.name, "bytes": properties.total_memory, "cuda": torch.version.cuda}
        figures["gpu"]["capability"] = list(torch.cuda.get_device_capability(0))
    return figures


def tests(bench: Bench) -> dict[str, Any]:
    """The tests that need a GPU; a dry run only collects them."""
    if find_spec("pytest") is None:
        return {"skipped": "pytest is not installed"}
    report = bench.out / "tests.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    only = ["--collect-only"] if bench.is_dry else []
    command = [sys.executable, "-m", "pytest", "tests/runtime/test_cuda.py", "-m", "gpu", f"--junitxml={report}", *only]
    code = subprocess.run(command, check=False, cwd=Path(__file__).parent.parent.parent).returncode
    figures: dict[str, Any] = {"exit_code": code}
    if report.exists():
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
        figures |= {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
        figures["failed"] = [case.attrib["name"] for case in suite.iter("testcase") if len(case.findall("failure"))]
    return figures


def link(bench: Bench) -> dict[str, Any]:
    """Host memory, locked memory and the link, piece by piece."""
    return link_rates(choose_device(bench.config()), 1 << (20 if bench.is_dry else 30))


def slot_kernels(bench: Bench) -> dict[str, Any]:
    """Our kernels for experts: errors of every format, and their rate beside the memory's and torch's."""
    return slot_figures(choose_device(bench.config()), bench.is_dry)


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Sequence[int], prompt: int) -> torch.Tensor:
    """[tokens, V] on the CPU: a prompt, then token by token along the text."""
    device = model.device
    given = torch.tensor([list(ids)], device=device)
    out = model(input_ids=given[:, :prompt], use_cache=True)
    found, cache = [out.logits[0].float().cpu()], out.past_key_values
    for position in range(prompt, len(ids)):
        out = model(input_ids=given[:, position : position + 1], past_key_values=cache, use_cache=True)
        found.append(out.logits[0].float().cpu())
        cache = out.past_key_values
    return torch.cat(found)


def _reference(model: Path, dtype: torch.dtype, device: torch.device) -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, experts_implementation="eager")
    return loaded.to(device).eval()


def exactness(bench: Bench) -> dict[str, Any]:
    """Grade E2: logits of the demo beside transformers on the CPU and on the same device, at every budget."""
    demo, rows = fetch("demo", None), []
    count, prompt = (24, 16) if bench.is_dry else (192, 128)
    ids = bench.tokens(demo, count)
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in ("float32", "bfloat16"):
        kind = getattr(torch, dtype)
        references = {"cpu": _logits(_reference(demo, kind, torch.device("cpu")), ids, prompt)}
        if not bench.is_dry:
            references["cuda"] = _logits(_reference(demo, kind, torch.device("cuda")), ids, prompt)
        free()
        for share in SHARES[1:2] if bench.is_dry else SHARES:
            with bench.opened(demo, bench.at_share(demo, share, dtype=dtype)) as model:
                ours = _logits(model, ids, prompt)
            errors = {name: float((ours - his).abs().max() / his.abs().max()) for name, his in references.items()}
            same = {name: float((ours.argmax(-1) == his.argmax(-1)).float().mean()) for name, his in references.items()}
            rows.append({"dtype": dtype, "share": share, "relative_error": errors, "same_first_token": same})
    return {"grade": "E2: float32 at most 1e-5", "tokens": count, "rows": rows}


@torch.no_grad()
def _timed(model: Any, ids: Sequence[int], prompt: int, cache: Any, now: Callable[[], float]) -> dict[str, Any]:
    """Seconds until the first token and of each further one; each ends when the host knows the next token."""
    given, seconds = torch.tensor([list(ids)], device=model.device), []
    for begin, end in [(0, prompt), *((n, n + 1) for n in range(prompt, len(ids)))]:
        started = now()
        out = model(input_ids=given[:, begin:end], past_key_values=cache, use_cache=True, logits_to_keep=1)
        int(out.logits[0, -1].argmax())
        cache = out.past_key_values
        seconds.append(now() - started)
    timed = sorted(seconds[1 + (len(seconds) - 1) // 2 :])  # the second half: the cache is warm
    return {
        "ttft_seconds": seconds[0],
        "tpot_seconds": median(timed),
        "tpot_p90_seconds": timed[int(0.9 * (len(timed) - 1))],
        "tokens_timed": len(timed),
    }


def _decode(bench: Bench, model: Path) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    prompt, new = (16, 8) if bench.is_dry else (128, 128)
    ids = bench.tokens(model, prompt + new)
    for share in SHARES[-1:] if bench.is_dry else SHARES:
        for preset in PRESETS[2:3] if bench.is_dry else PRESETS:
            with bench.opened(model, bench.at_share(model, share, preset=preset)) as ready:
                engine: Any = ready.offload
                _timed(ready, ids[: prompt + 2], prompt, engine.new_cache(), engine.now)  # kernels are chosen
                before = engine.stats()
                row = _timed(ready, ids, prompt, engine.new_cache(), engine.now)
                counts = engine.stats() - before
                row |= {"hit_ratio": counts.hit_ratio, "peak_bytes": engine.peak_memory_bytes()}
                row |= {name: getattr(counts, name) for name in _COUNTS}
            rows.append({"share": share, "preset": preset, **row})
    return {"model": model.name, "prompt_tokens": prompt, "new_tokens": new, "rows": rows}


_COUNTS = (
    "forward_seconds",
    "device_wait_seconds",
    "wait_seconds",
    "host_wait_seconds",
    "look_ahead_seconds",
    "compute_seconds",
    "plan_seconds",
    "loads",
    "prefetches",
    "prefetches_used",
    "look_aheads",
    "host_computed",
    "host_seconds",
    "read_busy_seconds",
    "bytes_read",
)


def decode_demo(bench: Bench) -> dict[str, Any]:
    """The embedded model: all launches and Python, next to no bytes."""
    return _decode(bench, fetch("demo", None))


def wide_model(bench: Bench) -> dict[str, Any]:
    """Write the wide demo."""
    began = time.monotonic()
    folder = bench.wide()
    return {"model": folder.name, "seconds": time.monotonic() - began}


def decode_wide(bench: Bench) -> dict[str, Any]:
    """Experts of real size."""
    return _decode(bench, bench.wide())


def ablation(bench: Bench) -> dict[str, Any]:
    """What each mechanism of SMoE brings, at a quarter of the experts."""
    model = bench.wide()
    steps = DEVICE_ABLATIONS["smoe"][: 1 if bench.is_dry else None]
    config = bench.at_share(model, 0.25)
    ids = bench.tokens(model, PROMPT_TOKENS + WARM_TOKENS + TIMED_TOKENS)
    lines = ablate(
        steps,
        1,
        config,
        [ids],
        lambda config: load(str(model), config),
        lambda step: print(step.name, flush=True),
    )
    return {"model": model.name, "steps": [line.as_json() for line in lines]}


def peers(bench: Bench) -> dict[str, Any]:
    """What runs there without installing: transformers with everything on the GPU, and accelerate's offloading."""
    device, model = choose_device(bench.config()), bench.wide()
    prompt, new = (16, 4) if bench.is_dry else (128, 64)
    ids, rows = bench.tokens(model, prompt + new), []
    for experts in ("eager", "grouped_mm"):
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, experts_implementation=experts)
        loaded = loaded.to(device).eval()
        _timed(loaded, ids[: prompt + 2], prompt, None, time.perf_counter)
        rows.append({"peer": f"transformers, {experts}", **_timed(loaded, ids, prompt, None, time.perf_counter)})
        del loaded
        free()
    if find_spec("accelerate") is None or device.type == "cpu":
        return {"model": model.name, "rows": rows, "skipped": ["accelerate"]}
    limit = {0: 2 * 2**30, "cpu": 64 * 2**30}
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, device_map="auto", max_memory=limit)
    figures = _timed(loaded.eval(), ids[: prompt + 8], prompt, None, time.perf_counter)
    rows.append({"peer": "accelerate, 2 GiB", **figures})
    return {"model": model.name, "rows": rows}


PARTS: dict[str, Part] = {
    "environment": Part(60, environment),
    "tests": Part(400, tests),
    "link": Part(120, link),
    "slot_kernels": Part(420, slot_kernels),
    "exactness": Part(160, exactness),
    "decode_demo": Part(180, decode_demo),
    "wide_model": Part(180, wide_model),
    "decode_wide": Part(280, decode_wide),
    "ablation": Part(180, ablation),
    "peers": Part(120, peers),
}
"""In this order; 35 minutes in all, and no part more than nine."""
