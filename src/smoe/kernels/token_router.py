"""A softmax router for one token, or several, in machine code (`top_experts.py`): the memory that it uses, and its
results as tensors."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from smoe.kernels.isa import widest
from smoe.kernels.jit import Source, address_of, compile_functions
from smoe.kernels.spinning_pool import SpinningPool

_PADDING = 16
"""The number of experts is rounded up to a multiple of this, because whole registers are computed."""
_NO_EXPERT = 0xFF80
"""The bits of -inf in bf16, for entries after the last expert."""
_STEP = 8
"""The number of rows that a thread takes at a time: some 5 us."""
_WAKING_ROWS = 128
"""The number of rows below which one thread is faster than waking others that sleep."""
_PLACES = 10
"""The index in `top_experts.WORDS` of the first word that concerns the completion of tasks."""


class Routed(NamedTuple):
    """The result of a router for T tokens: their logits, routing weights and chosen experts."""

    logits: torch.Tensor
    """The logits of all experts: bf16 [T, E]."""
    weights: torch.Tensor
    """The routing weights of the chosen experts: bf16 [T, K]."""
    chosen: torch.Tensor
    """The chosen experts in descending order of their logits: int64 [T, K]."""


class TokenRouter:
    """The routing of one token: the K largest of the softmax of E logits.

    Machine code writes the logits to the address `logits_at`, and calls `function` with the address `arguments`; that
    function writes the results.
    """

    def __init__(self, experts: int, top_k: int, is_normalised: bool) -> None:
        """`is_normalised`: whether the K routing weights are divided by their sum."""
        self.experts, self.top_k = experts, top_k
        padded = -(-experts // _PADDING) * _PADDING
        self._logits = np.full(padded, _NO_EXPERT, np.uint16)
        self._numbers = np.zeros((2, padded), np.float32)
        self._index, self.ascending = np.zeros(top_k, np.int64), np.zeros(top_k, np.int64)
        self._weights = np.zeros(top_k, np.uint16)
        self._gains = np.zeros(top_k, np.float32)
        self._words = (ctypes.c_int64 * 14)(
            self._logits.ctypes.data, padded, top_k, is_normalised, *(each.ctypes.data for each in self._numbers),
            self._index.ctypes.data, self._weights.ctypes.data, self.ascending.ctypes.data, self._gains.ctypes.data,
        )  # fmt: skip
        self._completed: object = None
        """The objects that the machine code reads and writes when it completes tasks."""
        self._function, _ = _functions()
        self.function = address_of(self._function)
        self.arguments = ctypes.addressof(self._words)
        self.logits_at = self._logits.ctypes.data
        self.row_at = 0
        """The address of the row to which the last result belongs, while this row is in use; else 0."""
        logits, weights = (
            torch.from_numpy(each.view(np.int16)).view(torch.bfloat16).unsqueeze(0)
            for each in (self._logits, self._weights)
        )
        self.logits = logits[:, :experts]
        """The logits of all experts: bf16 [1, E]."""
        self._results = Routed(self.logits, weights, torch.from_numpy(self._index).unsqueeze(0))

    def use_for(self, row_at: int) -> None:
        """Let the router's forward function use the last result for the row at this address; 0: for no row."""
        self.row_at = row_at

    @property
    def gains_at(self) -> int:
        """The address of the routing weights of the chosen experts, ordered by expert number: float32 [K]."""
        return self._gains.ctypes.data

    def complete(self, matrices: np.ndarray, places: np.ndarray, tasks: object) -> None:
        """Make every routing write the addresses of the chosen experts' matrices into fields of tasks, so that the
        tasks can run.

        `matrices`: int64 [E, M], the addresses of each expert's M matrices. `places`: int64 [n, 3]; each entry is
        (address of a field, index of the chosen expert in ascending order, index of the matrix). `tasks`: the object
        that owns the memory of the fields. The router keeps a reference to it, because machine code writes there even
        after an interrupt has ended the caller.
        """
        self._words[_PLACES:] = [0] * 4
        self._completed = matrices, places, tasks
        self._words[_PLACES:] = [matrices.ctypes.data, matrices.shape[1], places.ctypes.data, len(places)]

    def choose(self) -> None:
        """Choose experts by the logits at `logits_at`, outside of a job of the pool."""
        self._function(self.arguments, 0)

    @property
    def takes_rows(self) -> bool:
        """Whether `choose_each` can be called: rows of logits consist of whole registers."""
        return self.experts % _PADDING == 0

    def choose_each(self, pool: SpinningPool, logits: torch.Tensor) -> Routed:
        """Choose the experts of every row of `logits`, bf16 [T, E] in contiguous rows, on all threads of a pool. Only
        if `takes_rows`."""
        logits = logits.contiguous()
        rows = logits.shape[0]
        weights = logits.new_empty(rows, self.top_k)
        chosen = torch.empty(rows, self.top_k, dtype=torch.int64)
        arguments = (logits.data_ptr(), self.experts, self.top_k, self._words[3], chosen.data_ptr(),
                     weights.data_ptr(), rows, _STEP)  # fmt: skip
        pool.share(address_of(_functions()[1]), arguments, -(-rows // _STEP), rows >= _WAKING_ROWS)
        return Routed(logits, weights, chosen)

    def routed(self) -> Routed:
        """Return a copy of the last routing result."""
        return Routed(*[each.clone() for each in self._results])


@functools.cache
def _functions() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the machine code that chooses the experts of one row, and that for several rows. Both are compiled once
    per process."""
    isa = widest()
    assert isa is not None, "there is a pool"
    from smoe.kernels import top_experts  # requires llvmlite, which is optional

    signature = (ctypes.c_void_p, ctypes.c_longlong)
    names = dict.fromkeys((top_experts.NAME, top_experts.EACH), signature)
    one, each = compile_functions(Source(top_experts.module_of, (isa,)), names)
    return one, each
