"""Generated products for aarch64, run by qemu on CPUs that have no more than they ask for, against float64 and torch.

Would catch: an instruction that such a CPU has not, lanes in another order than on x86, a sum in 16 bits, a code whose
sign is lost, an address that a relocation leaves wrong. All formats and CPUs, with figures: `python -m
tests.kernels.test_on_aarch64`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from smoe.bounds import BF16, INT8
from smoe.cpu_isa import AARCH64
from smoe.formats.activations import fits, in_8_bits
from smoe.formats.base import Bytes, Format
from smoe.formats.registry import FORMATS
from smoe.kernels import byte_products, byte_rows, prompt_layout, prompt_tiles, tasks
from smoe.kernels.byte_layout import Layout
from smoe.kernels.isa import NEON, NEON_DOTPROD, Isa
from tests.formats.blocks import random_rows
from tests.kernels import emulated
from tests.kernels.emulated import Program, Results
from tests.kernels.products import exact

pytestmark = pytest.mark.skipif(emulated.why_not() is not None, reason=str(emulated.why_not()))
ROWS = 9
BLOCKS = 3
SOME = {
    (NEON, BF16): ("Q8_0", "Q5_1", "Q6_K", "MXFP4", "INT3", "FP8", "W4_32", "W8_128", "IQ4_XS", "IQ2_XS"),
    (NEON_DOTPROD, INT8): ("Q8_0", "Q5_0", "Q3_K", "MXFP4_PAIRS", "INT4", "INT3", "INT2", "IQ3_XXS"),
    (NEON, INT8): ("Q8_0", "Q5_1", "MXFP4", "IQ4_XS", "IQ2_S", "IQ1_M"),
}
"""Formats that differ in what is asked of an instruction set; the rest takes long to compile."""
CASES = [(isa, activations, name) for (isa, activations), names in SOME.items() for name in names]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bits(numbers: torch.Tensor) -> Any:
    return numbers.contiguous().view(torch.uint16).numpy()


class Products:
    """Products of one module, called in one program: each gives a way to its results once that has run."""

    def __init__(self, source: str, isa: Isa) -> None:
        self.program = Program(emulated.image_of(source, *isa.needs))

    def bf16(self, results: Results, address: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(results.at(address, shape, np.uint16).copy()).view(torch.bfloat16)

    def multiply(
        self,
        name: str,
        data: Any,
        x: torch.Tensor,
        begin: int = 0,
        end: int | None = None,
        bias: torch.Tensor | None = None,
    ) -> Callable[[Results], torch.Tensor]:
        """Outputs begin ... end - 1 of every row of x; NaN elsewhere."""
        program, outputs, rows = self.program, len(data), len(x)
        out = program.place(bits(torch.full((rows, outputs), float("nan"), dtype=torch.bfloat16)))
        at = program.place(bits(x))
        given, to = at, out
        if rows > 1:
            pairs = [each + 2 * n * size for n in range(rows) for each, size in ((at, x.shape[1]), (out, outputs))]
            given, to = program.place(np.array(pairs, np.int64)), 0
        plus = 0 if bias is None else program.place(bits(bias))
        end = outputs if end is None else end
        program.call(f"{name}_{rows}", given, program.place(data), to, plus, begin, end, x.shape[1])
        return lambda results: self.bf16(results, out, rows, outputs)

    def multiply_in_bytes(
        self,
        form: Format,
        data: Any,
        x: torch.Tensor,
        begin: int = 0,
        end: int | None = None,
        bias: torch.Tensor | None = None,
    ) -> Callable[[Results], torch.Tensor]:
        """The same of rows that are rounded to 8 bits."""
        program, outputs, (rows, columns) = self.program, len(data), x.shape
        layout = Layout.of(form)
        out = program.place(bits(torch.full((rows, outputs), float("nan"), dtype=torch.bfloat16)))
        bytes_ = program.place(np.zeros((rows, layout.nbytes(columns)), np.uint8))
        program.call(byte_rows.function_name(layout), program.place(bits(x)), 0, bytes_, 0, 0, rows, columns)
        pairs = [
            each + n * size
            for n in range(rows)
            for each, size in ((bytes_, layout.nbytes(columns)), (out, 2 * outputs))
        ]
        given = program.place(np.array([rows, *pairs], np.int64))
        plus = 0 if bias is None else program.place(bits(bias))
        end = outputs if end is None else end
        program.call(byte_products.function_name(form), given, program.place(data), 0, plus, begin, end, columns)
        return lambda results: self.bf16(results, out, rows, outputs)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).square().mean().sqrt())


def multiplied(form: Format, isa: Isa, activations: str, folder: Path, cpu: str) -> list[tuple[float, float]]:
    """(our error, torch's) for one row of x, two and four; what else is promised is asserted."""
    from smoe.kernels.quantised import byte_module_of, module_of, products_name, unpack_name

    in_bytes, columns = activations == INT8 and fits(form), BLOCKS * form.numbers
    products = Products(byte_module_of(form, isa) if in_bytes else module_of([form], isa), isa)
    name: Any = form if in_bytes else products_name(form, 1)[: -len("_1")]
    multiply: Any = products.multiply_in_bytes if in_bytes else products.multiply
    data, bias = random_rows(form, ROWS, columns, 1), random(ROWS)
    xs = [random(rows, columns, seed=rows) for rows in (1, 2, 4)]
    found = [multiply(name, data, x) for x in xs]
    part = multiply(name, data, xs[0], 3, 8)
    biased = multiply(name, data, xs[0], bias=bias)
    none = xs[0].clone()
    none[0, columns // 2] = float("nan")
    is_none = multiply(name, data, none)
    unpacked = products.program.place(np.zeros((ROWS, columns), np.uint16))
    products.program.call(unpack_name(form), unpacked, products.program.place(data), 0, 0, 2, ROWS, columns)
    results = products.program.run(folder, cpu)

    whole = found[0](results)
    assert torch.equal(part(results)[:, 3:8], whole[:, 3:8]), "whoever computes it"
    assert bool(part(results)[:, :3].isnan().all()) and bool(part(results)[:, 8:].isnan().all())
    assert bool(is_none(results).isnan().all())
    check_numbers(form, data, products.bf16(results, unpacked, ROWS, columns))
    errors = []
    for x, ours in zip(xs, found, strict=True):
        errors.append(errors_of(form, data, x, ours(results), activations))
    seen = xs[0] if activations == BF16 else in_8_bits_of(form, xs[0])
    wanted = exact(form, data, seen) + bias.double()
    assert torch.allclose(biased(results).double(), wanted, rtol=2.0**-8, atol=1e-4)
    return errors


def in_8_bits_of(form: Format, x: torch.Tensor) -> torch.Tensor:
    return x.double() if not fits(form) else torch.from_numpy(in_8_bits(form, x.float().numpy()))


def errors_of(form: Format, data: Bytes, x: torch.Tensor, ours: torch.Tensor, activations: str) -> tuple[float, float]:
    """Against torch's bf16 product on the dequantised weights; with activations in 8 bits, against what is lost by
    rounding the exact product of those to bf16 (`kernels/proof.py`)."""
    numbers = torch.from_numpy(form.decode(data))
    seen = x if activations == BF16 else in_8_bits_of(form, x)
    wanted = exact(form, data, seen)
    theirs = x @ numbers.bfloat16().T if activations == BF16 else wanted.bfloat16()
    magnitude = seen.double().abs() @ numbers.double().abs().T
    assert bool(((ours.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-5 * magnitude).all())
    return error(ours, wanted), error(theirs, wanted)


def check_numbers(form: Format, data: Bytes, found: torch.Tensor) -> None:
    """All rows but the first two, one rounding of scale * code - offset less than the decoder has."""
    wanted = torch.from_numpy(form.decode(data)).bfloat16()
    assert not bool(found[:2].any())
    assert float((found[2:] != wanted[2:]).float().mean()) < 2e-3
    assert torch.allclose(found[2:].float(), wanted[2:].float(), rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize(("isa", "activations", "name"), CASES, ids=lambda each: getattr(each, "name", each))
def test_errors_are_no_larger_than_torchs(isa: Isa, activations: str, name: str, tmp_path: Path) -> None:
    for ours, theirs in multiplied(FORMATS[name], isa, activations, tmp_path, emulated.CPUS[isa]):
        assert ours <= (theirs if activations == BF16 else 1.01 * theirs)


@pytest.mark.parametrize("value", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("isa", [NEON, NEON_DOTPROD], ids=lambda isa: isa.name)
def test_the_largest_codes_and_bytes_are_not_cut_off(isa: Isa, value: int, tmp_path: Path) -> None:
    """Where two products meet in 16 bits, -128 times 127 twice is as much as there is room for."""
    from smoe.kernels.quantised import byte_module_of

    form = FORMATS["Q8_0"]
    data = random_rows(form, ROWS, form.numbers, 6)
    data[:, form.scale.nbytes :] = value
    products, found = Products(byte_module_of(form, isa), isa), []
    xs = [torch.full((1, form.numbers), size).bfloat16() for size in (1.5, -1.5)]
    found = [products.multiply_in_bytes(form, data, x) for x in xs]
    results = products.program.run(tmp_path, emulated.CPUS[isa])
    for x, ours in zip(xs, found, strict=True):
        errors_of(form, data, x, ours(results), INT8)


@pytest.mark.parametrize("columns", [32, 96, 512])
def test_bf16_in_our_own_order(columns: int, tmp_path: Path) -> None:
    from smoe.kernels import own_order

    products, weights, bias = Products(own_order.module_of(NEON), NEON), random(23, columns), random(23, seed=9) * 100
    xs = [random(rows, columns, seed=rows) for rows in (1, 2, 4)]
    found = [products.multiply("products_bf16", bits(weights), x) for x in xs]
    biased = products.multiply("products_bf16", bits(weights), xs[0], bias=bias)
    part = products.multiply("products_bf16", bits(weights), xs[0], 5, 10)
    results = products.program.run(tmp_path, emulated.CPUS[NEON])
    for x, ours in zip(xs, found, strict=True):
        wanted, magnitude = x.double() @ weights.double().T, x.double().abs() @ weights.double().abs().T
        assert bool(((ours(results).double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-5 * magnitude).all())
        assert error(ours(results), wanted) <= 1.1 * error(x @ weights.T, wanted)
    wanted = xs[0].double() @ weights.double().T + bias.double()
    assert torch.allclose(biased(results).double(), wanted, rtol=2.0**-8, atol=1e-4)
    assert torch.equal(part(results)[:, 5:10], found[0](results)[:, 5:10])
    assert bool(part(results)[:, :5].isnan().all()) and bool(part(results)[:, 10:].isnan().all())


@pytest.mark.parametrize(("tokens", "keys", "vectors"), [(5, 5, 1), (30, 140, 3)])
def test_attention_of_a_prompt(tokens: int, keys: int, vectors: int, tmp_path: Path) -> None:
    heads, key_heads, size = 4, 2, 32
    program = Program(emulated.image_of(prompt_tiles.module_of(NEON, size, vectors), *NEON.needs))
    query, cache = random(heads, tokens, size), random(2, key_heads, keys, size, seed=1)
    layout, rows, blocks = prompt_layout.PromptLayout(NEON, size, vectors), tokens * heads // key_heads, 2
    out = program.place(np.zeros((tokens, heads, size), np.uint16))
    fields = {
        "query": program.place(bits(query)), "query_head": 2 * tokens * size, "query_row": 2 * size,
        "keys": program.place(bits(cache[0])), "key_head": 2 * keys * size, "key_row": 2 * size,
        "values": program.place(bits(cache[1])), "value_head": 2 * keys * size, "value_row": 2 * size,
        "out": out, "rows": rows, "shared": heads // key_heads, "key_heads": key_heads, "past": keys - tokens,
        "blocks": blocks, "units": key_heads * -(-rows // (blocks * layout.width)),
        "scale": int(np.float32(0.2 / np.log(2)).view(np.uint32)), "stride": layout.nbytes(blocks),
        "scratch": program.place(np.full(layout.nbytes(blocks), 255, np.uint8)),
        "taken": program.place(np.zeros(1, np.int64)),
    }  # fmt: skip
    ordered = np.array([fields[name] for name in prompt_layout.FIELDS], np.int64)
    program.call(prompt_layout.NAME, program.place(ordered), 0)
    results = program.run(tmp_path, emulated.CPUS[NEON])
    ours = torch.from_numpy(results.at(out, (tokens, heads, size), np.uint16).copy()).view(torch.bfloat16)

    def by_torch(*given: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
        wide = (each.repeat_interleave(heads // key_heads, 0) for each in given[1:])
        return scaled_dot_product_attention(given[0], *wide, attn_mask=mask, scale=0.2).transpose(0, 1)

    wanted = by_torch(*(each.double() for each in (query, *cache)))
    assert error(ours, wanted) <= 1.05 * error(by_torch(query, *cache), wanted)


_THREADS, _ROUNDS, _WRITERS, _READERS = 4, 25, 64, 8
_PATIENCE = tasks.PROGRESS - 1
"""The word of the block in which this test has the helpers' patience."""
_WORKS = f"""
define void @meet(ptr %data, i64 %unit) {{
entry:
  %before = atomicrmw add ptr %data, i64 1 seq_cst
  br label %wait
wait:
  %so.far = load atomic i64, ptr %data acquire, align 8
  %all = icmp sge i64 %so.far, {_THREADS}
  br i1 %all, label %done, label %wait
done:
  ret void
}}
define void @write(ptr %data, i64 %unit) {{
  %round.at = getelementptr i64, ptr %data, i64 1
  %round = load i64, ptr %round.at
  %high = mul i64 %round, 1000
  %value = add i64 %high, %unit
  %to = getelementptr [{_WRITERS} x i64], ptr %data, i64 1, i64 %unit
  store i64 %value, ptr %to
  ret void
}}
define void @read(ptr %data, i64 %unit) {{
entry:
  %round.at = getelementptr i64, ptr %data, i64 1
  %round = load i64, ptr %round.at
  %factor = add i64 %unit, 1
  br label %add
add:
  %n = phi i64 [0, %entry], [%n.next, %add]
  %sum = phi i64 [0, %entry], [%sum.next, %add]
  %from = getelementptr [{_WRITERS} x i64], ptr %data, i64 1, i64 %n
  %value = load i64, ptr %from
  %times = mul i64 %value, %factor
  %sum.next = add i64 %sum, %times
  %n.next = add i64 %n, 1
  %more = icmp slt i64 %n.next, {_WRITERS}
  br i1 %more, label %add, label %done
done:
  %row = mul i64 %round, {_READERS}
  %place = add i64 %row, %unit
  %to = getelementptr [{_WRITERS} x i64], ptr %data, i64 2, i64 %place
  store i64 %sum.next, ptr %to
  ret void
}}
define void @help(ptr %block) {{
  %patience = getelementptr i64, ptr %block, i64 {_PATIENCE}
  call void @serve(ptr %block, ptr %patience)
  ret void
}}
define void @begin(ptr %block, ptr %data, i64 %round) {{
  %count = getelementptr i64, ptr %block, i64 {tasks.PROGRESS}
  store i64 0, ptr %count
  %round.at = getelementptr i64, ptr %data, i64 1
  store i64 %round, ptr %round.at
  ret void
}}
"""
"""Data: who has met, the round, and behind the first 64 words 64 that are written and sums of all of them."""


@pytest.mark.parametrize("atomics", ["", "lse"])
def test_threads_share_work_and_see_what_others_have_written(atomics: str, tmp_path: Path) -> None:
    """What qemu shows of it: a host that keeps more order than aarch64 does lets some mistakes through."""
    needs = [*NEON.needs, atomics] if atomics else NEON.needs
    image = emulated.image_of(tasks.source(False, False, AARCH64) + _WORKS, *needs)
    program = Program(image)
    data = program.place(np.zeros(2 * _WRITERS + (_ROUNDS + 1) * _READERS, np.int64))
    header = np.zeros(tasks.HEADER, np.int64)
    header[_PATIENCE] = 1 << 62
    block = emulated.DATA + program.size
    at_once, nowhere, count = (block + 8 * word for word in (tasks.REACHED, tasks.NOWHERE, tasks.PROGRESS))
    fields, units = list[int](), 0
    for name, many, wait_for in (("meet", _THREADS, 0), ("write", _WRITERS, 0), ("read", _READERS, _WRITERS)):
        counts = count if name == "write" else nowhere
        fields += (units, many, 1, tasks.CALL, count if wait_for else at_once, wait_for, counts)
        fields += (program.address_of(name), data, 0, 0, 0, 0)
        units += many
    assert program.place(np.concatenate([header, np.array(fields, np.int64)])) == block
    header[_PATIENCE] = 1000
    idle, rate = program.place(header), program.place(np.zeros(1, np.int64))
    program.call("help", idle)  # a helper that has nothing to do comes back
    program.call("ticks_a_second", rate)
    for _ in range(_THREADS - 1):
        stack = program.place(np.zeros(1 << 13, np.int64))
        program.call(emulated.SPAWN, program.address_of("help"), block, stack + (1 << 16))
    for n in range(1, _ROUNDS + 1):
        program.call("begin", block, data, n)
        program.call("work", block, units)
    results = program.run(tmp_path, "max" if atomics else emulated.CPUS[NEON])
    sums = results.at(data + 16 * _WRITERS, (_ROUNDS + 1, _READERS), np.int64)
    total = np.arange(_ROUNDS + 1) * 1000 * _WRITERS + sum(range(_WRITERS))
    assert (sums[1:] == (total[:, None] * np.arange(1, _READERS + 1))[1:]).all()
    assert results.at(data, (1,), np.int64) == _THREADS * _ROUNDS
    assert 1e6 <= results.at(rate, (1,), np.int64)[0] <= 1e10


def _main(names: list[str]) -> None:
    """Every format on every instruction set, and on another CPU that has it."""
    worst = 0.0
    for isa, activations in SOME:
        for name in names or FORMATS:
            if activations == INT8 and not fits(FORMATS[name]):
                continue
            for cpu in (emulated.CPUS[isa], "max"):
                with TemporaryDirectory() as folder:
                    errors = multiplied(FORMATS[name], isa, activations, Path(folder), cpu)
                worst = max(worst, *(ours / theirs for ours, theirs in errors))
                said = ", ".join(f"{ours / theirs:.4f}" for ours, theirs in errors)
                print(f"{isa.name}, {activations}, {name}, {cpu}: error in torch's: {said}", flush=True)
    print(f"at most {worst:.4f}")


if __name__ == "__main__":
    _main(sys.argv[1:])
