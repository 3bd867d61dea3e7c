"""Our one-row products against the library's, bit by bit, alone and by several threads.

Would catch another order of summation, a wrong strip or tail, a unit that is computed twice or not at all, a helper
that works on the products before these.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import pytest
import torch

from smoe.cpu_isa import FAMILY, X86
from smoe.kernels import jit, object_cache, row_product, spinning_pool, tasks
from smoe.kernels.proof import agrees, agrees_on_rows, part_that_agrees
from smoe.kernels.row_product import fits
from smoe.kernels.spinning_pool import Ahead, Product, SpinningPool
from tests import promised

SHAPES = [(192, 32), (64, 96), (16, 512), (1536, 544), (64, 768), (512, 2048), (48, 4096), (256, 1408), (80, 96)]
"""[N, K]: below, at and above one chain of 512 k and one unit of 64 outputs, whole ones and remainders."""


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 0.05).bfloat16().t()


def product(rows: int, columns: int, seed: int = 0) -> Product:
    x = torch.randn(1, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return Product(x, matrix(rows, columns, seed), torch.full((1, rows), float("nan")).bfloat16())


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_bits_are_the_librarys(rows: int, columns: int, pool: SpinningPool) -> None:
    promised.needs(agrees(pool, matrix(rows, columns)), f"torch's order for weights [{rows}, {columns}]")


def test_a_bias_is_added_as_the_library_adds_it(pool: SpinningPool) -> None:
    for rows, columns in ((1536, 2048), (64, 768), (192, 192)):
        bias = torch.randn(rows).bfloat16()
        promised.needs(agrees(pool, matrix(rows, columns), bias), f"torch's order for a bias of {rows}")
    assert not agrees(pool, matrix(64, 768), torch.randn(64))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_sums_that_the_library_cuts_into_parts(threads: int, pool: SpinningPool) -> None:
    """A router's: few outputs, of many numbers each. Whatever part is found gives the library's bits."""
    w = matrix(64, 2048)
    x = torch.randn(500, 1, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        part = part_that_agrees(pool, w)
        theirs = [row @ w for row in x]
    finally:
        torch.set_num_threads(before)
    if threads <= 2:
        promised.needs(part == 2048 // threads, f"the parts into which torch cuts sums on {threads} threads")
    if part is not None:
        ours = [torch.empty(1, 64).bfloat16() for _ in x]
        pool.multiply([Product(row, w, out, part=part) for row, out in zip(x, ours, strict=True)])
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_odd_addresses_and_extreme_values(pool: SpinningPool) -> None:
    rows, columns = 64, 544
    promised.needs_products(pool, (rows, columns))
    bank = torch.randn(rows * columns + 5).bfloat16()
    for begin in range(5):  # addresses two bytes apart
        assert agrees(pool, bank[begin : begin + rows * columns].view(rows, columns).t())
    w = matrix(rows, columns)
    w[3, 0], w[5, 1], w[7, 2] = float("inf"), float("nan"), 1e38
    x, out = torch.full((1, columns), 9.0).bfloat16(), torch.empty(1, rows, dtype=torch.bfloat16)
    pool.multiply([Product(x, w, out)])
    assert torch.equal(out.isnan(), (x @ w).isnan())
    assert torch.equal(out.nan_to_num(), (x @ w).nan_to_num())


def test_a_wrong_order_is_noticed(pool: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof itself: a kernel whose chains are twice as long differs in the last bit of few outputs."""
    promised.needs_products(pool, (1536, 2048))
    monkeypatch.setattr(row_product, "CHAIN", 1024)
    monkeypatch.setattr(object_cache, "source_digest", lambda: "another chain")
    monkeypatch.setattr(spinning_pool, "_functions", spinning_pool._functions.__wrapped__)
    with SpinningPool(pool.threads) as wrong:
        assert not agrees(wrong, matrix(1536, 2048))


@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize("shape", [(1536, 2048), (2048, 768), (256, 1024), (512, 1536), (192, 32)])
def test_several_rows_have_the_librarys_bits(rows: int, shape: tuple[int, int], pool: SpinningPool) -> None:
    promised.needs(agrees_on_rows(pool, matrix(*shape), rows), f"torch's order for {rows} rows and weights {shape}")


def test_a_wrong_order_of_several_rows_is_noticed(pool: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed as one row is."""
    promised.needs_products(pool, (1536, 2048), (1536, 1024), rows=[2])
    monkeypatch.setattr(spinning_pool, "chain_of", lambda columns, rows: row_product.CHAIN)
    assert not agrees_on_rows(pool, matrix(1536, 2048), 2)
    assert agrees_on_rows(pool, matrix(1536, 1024), 2)


def test_many_products_of_different_shapes(pool: SpinningPool) -> None:
    """One after the other without a pause, and with pauses in which the helpers go to sleep."""
    promised.needs_products(pool, *SHAPES)
    batches = [[product(*SHAPES[(n + k) % len(SHAPES)], seed=n) for k in range(n % 7 + 1)] for n in range(40)]
    for n, batch in enumerate(batches):
        pool.multiply(batch)
        if n % 5 == 0:
            time.sleep(0.001)
    for batch in batches:
        for x, w, out, *_ in batch:
            assert torch.equal(out, x @ w)
    pool.multiply([])


def test_more_products_than_the_block_holds(pool: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    promised.needs_products(pool, (80, 96))
    monkeypatch.setattr(spinning_pool.tasks, "MOST_TASKS", 3)
    batch = [product(80, 96, seed=n) for n in range(8)]
    pool.multiply(batch)
    assert all(torch.equal(out, x @ w) for x, w, out, *_ in batch)


def test_what_is_fetched_ahead_changes_nothing(pool: SpinningPool) -> None:
    """More ranges than there is room for, memory that is nobody's, and none; works go on meanwhile."""
    w, x = torch.randn(2, 512, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix, row = w.t(), x[:1]
    pool.adapt(False)
    outs = []
    for ranges in ([], [(w.data_ptr(), w.nbytes)], [(w.data_ptr(), 5000)] * 20, [(1 << 46, 1 << 20)], []):
        pool.fetch_ahead(Ahead.of(ranges))
        out = torch.empty(1, 512, dtype=torch.bfloat16)
        for _ in range(20):
            pool.multiply([Product(row, matrix, out)])
        outs.append(out)
    pool.adapt(True)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("ranges", [0, 1, tasks.MOST_RANGES, tasks.MOST_RANGES + 3])
def test_a_search_for_a_piece_ends_in_every_table(ranges: int) -> None:
    """Also in one of which a part has been written over: tables are of one size, and end with what no piece reaches."""
    ahead = Ahead.of([(4096 * (n + 1), 3 * tasks.PIECE) for n in range(ranges)])
    words = struct.unpack(f"{2 * tasks.MOST_RANGES + 1}q", ahead.packed)
    used = min(ranges, tasks.MOST_RANGES)
    assert words[: 2 * used] == tuple(word for n in range(used) for word in (3 * n, 4096 * (n + 1)))
    assert ahead.pieces == 3 * used
    assert set(words[2 * used :: 2]) == {tasks.NEVER}


def test_closing_ends_the_helpers() -> None:
    promised.needs_machine_code()
    before = threading.active_count()
    with SpinningPool(4) as pool:
        assert threading.active_count() == before + 3
        time.sleep(0.01)  # asleep
    assert threading.active_count() == before
    assert pool.threads == 4


SPINS_AT_THE_END = """
import time
from smoe.kernels.spinning_pool import SpinningPool

pool = SpinningPool(2, has_bf16=False)
while not pool._is_asleep[0]:
    time.sleep(0.001)
pool._patience[0] = 1 << 40
pool._wake()
while not pool._alarms[0].locked():  # the helper takes it when it wakes up
    time.sleep(0.001)
raise SystemExit(3)
"""


def test_a_program_ends_while_a_helper_runs_machine_code() -> None:
    """Would catch code that Python frees at its end: the helper then ends the process by a segmentation fault."""
    promised.needs_machine_code()
    assert subprocess.run([sys.executable, "-c", SPINS_AT_THE_END], check=False, timeout=60).returncode == 3


def wait_until_asleep(pool: SpinningPool) -> None:
    for _ in range(10_000):  # a busy machine takes its time; who never sleeps is not waited for
        if all(pool._is_asleep):
            return
        time.sleep(0.001)
    raise AssertionError("a helper does not sleep")


def test_the_last_helper_sleeps_while_another_program_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a helper that takes units of a token, and one that is missing for prompts or after that program."""
    promised.needs_machine_code()
    is_busy = [True]
    monkeypatch.setattr(spinning_pool.Competition, "is_there", lambda self, is_prompt: is_busy[0])
    with SpinningPool(3, has_bf16=False) as pool:
        alarms, rung = pool._alarms, set[int]()

        class Alarm(NamedTuple):
            helper: int

            def acquire(self) -> bool:
                return alarms[self.helper].acquire()

            def release(self) -> None:
                rung.add(self.helper)
                alarms[self.helper].release()

        pool._alarms = [Alarm(n) for n in range(2)]  # type: ignore[misc]

        def woken() -> set[int]:
            wait_until_asleep(pool)
            rung.clear()
            pool._wake()
            return set(rung)

        pool.adapt(has_readers=False)
        assert woken() == {0}
        pool.adapt(has_readers=True)
        assert woken() == {0, 1}, "reading threads take cores, too"
        pool.adapt(has_readers=False, is_prompt=True)
        assert woken() == {0, 1}
        pool.adapt(has_readers=False)
        assert woken() == {0}
        is_busy[0] = False
        pool.adapt(has_readers=False)
        assert woken() == {0, 1}
        pool.adapt(has_readers=True)


@pytest.mark.parametrize("is_prompt", [False, True])
def test_a_thread_that_waits_for_a_late_one_takes_naps(is_prompt: bool) -> None:
    """Would catch a core that a spinning thread occupies while the thread with the last unit waits for one."""
    promised.needs(jit.is_available(), "a compiler")
    caller, both, naps = threading.get_ident(), threading.Barrier(2), set[tuple[bool, int]]()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    def unit(arguments: int, number: int) -> None:
        both.wait(10)
        if threading.get_ident() != caller:
            time.sleep(0.05)

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
    def nap(microseconds: int) -> int:
        naps.add((threading.get_ident() == caller, microseconds))
        time.sleep(0.001)
        return 0

    with SpinningPool(2, has_bf16=False) as pool:
        wait_until_asleep(pool)  # a helper that is just falling asleep misses the job
        pool._block[tasks.NAP] = jit.address_of(nap)
        pool.adapt(has_readers=False, is_prompt=is_prompt)
        pool.share(jit.address_of(unit), [], 2, is_long=True)
        wait_until_asleep(pool)
    assert naps - {(False, 50)} == (set() if is_prompt else {(True, 50)})
    assert (False, 50) in naps, "a helper without work"


def test_helpers_look_out_longer_where_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acted to the extreme: not at all beside readers, for ever without. Would catch a patience that nothing sets, or
    the wrong way round, and a helper that keeps the one it began with."""
    promised.needs(jit.is_available(), "a compiler")
    assert 0 < spinning_pool._SPIN_CYCLES < spinning_pool._SPIN_CYCLES_ALONE
    monkeypatch.setattr(spinning_pool, "_SPIN_CYCLES", 0)
    monkeypatch.setattr(spinning_pool, "_SPIN_CYCLES_ALONE", 1 << 62)
    meeting = threading.Barrier(2)
    met: list[bool] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    def meet(arguments: int, unit: int) -> None:
        try:
            meeting.wait(10)
            met.append(True)
        except threading.BrokenBarrierError:
            met.append(False)

    def both_come(is_long: bool) -> bool:
        """Whether a unit each was taken by the helper and by this thread."""
        met.clear()
        pool.share(jit.address_of(meet), [], 2, is_long)
        return met == [True, True]

    with SpinningPool(2, has_bf16=False) as pool:
        try:
            wait_until_asleep(pool)
            pool.adapt(False)
            assert both_come(is_long=True), "woken"
            for _ in range(20):
                time.sleep(0.001)
                assert both_come(is_long=False), "still awake, as nobody wakes it for this"
            pool.adapt(True)
            wait_until_asleep(pool)  # in the middle of looking out
        finally:
            pool._patience[0] = 0  # or a helper that never tires could not be ended


@pytest.mark.parametrize(
    "w",
    [
        torch.zeros(64, 128, dtype=torch.bfloat16),  # columns lie one after the other
        torch.zeros(160, 40, dtype=torch.bfloat16).t(),  # not a whole tile
        torch.zeros(328, 32, dtype=torch.bfloat16).t(),  # not a whole strip
        torch.zeros(160, 64).t(),
        torch.zeros(160, 64, dtype=torch.bfloat16, device="meta").t(),
        torch.zeros(64, 64, dtype=torch.bfloat16).t(),  # so small that torch takes another way itself
    ],
)
def test_other_matrices_are_left_to_the_library(w: torch.Tensor) -> None:
    assert not fits(w)


@pytest.mark.skipif(FAMILY != X86, reason="extensions of x86")
@pytest.mark.parametrize(
    ("isa", "kept"), [("none", 0), ("avx2", 1), ("avx_vnni", 2), ("AVX512", 3), ("avx512_bf16", 4), ("all", 4)]
)
def test_the_kernels_can_be_kept_from_vector_extensions(isa: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU does not have, no setting gives it."""
    wanted = ("avx2", "avxvnni", "avx512f", "avx512bf16")
    monkeypatch.delenv("SMOE_MAX_CPU_ISA", raising=False)
    has = [jit.cpu_has(feature) for feature in wanted]
    monkeypatch.setenv("SMOE_MAX_CPU_ISA", isa)
    assert [jit.cpu_has(feature) for feature in wanted] == [n < kept and there for n, there in enumerate(has)]
    assert spinning_pool.is_supported() is (kept == 4 and all(has[2:]))


@pytest.mark.skipif(FAMILY != X86, reason="extensions of x86")
def test_code_is_made_for_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    promised.needs(jit.is_available(), "a compiler")
    monkeypatch.setenv("SMOE_MAX_CPU_ISA", "avx2")
    features = jit._flattened(jit._features()).split(",")
    assert not any(feature.startswith(("+avx512", "+avx10", "+amx", "+avxvnni")) for feature in features)


def test_without_the_compiler_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "llvm", lambda: None)
    monkeypatch.setattr(jit, "llvmlite_version", lambda: "")
    monkeypatch.setattr(jit, "_host_features", jit._host_features.__wrapped__)
    assert not spinning_pool.is_supported()


def test_every_job_begins_with_counters_of_zero() -> None:
    """Would catch an expert's second product that does not wait, because a counter stands where the last job left
    it."""
    with SpinningPool(2, in_own_order=True) as pool:
        counters = (ctypes.c_int64 * 4).from_address(pool.word(tasks.PROGRESS))
        for has_readers in (False, True):  # helpers are patient, and not
            pool.adapt(has_readers)
            counters[:] = [7] * 4
            pool.run_all([tasks.PoolJob(0, 0, 0, 1), tasks.PoolJob(0, 0, 0, 3)], is_long=False)
            assert list(counters) == [0, 0, 0, 7]
