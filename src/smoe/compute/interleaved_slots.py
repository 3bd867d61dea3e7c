"""Interleaves the rows of experts in their slots, after each was read, where products gain from it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from smoe.bounds import INT8
from smoe.compute.expert_math import ExpertMath
from smoe.compute.quantised_math import QuantisedMath
from smoe.expert import ExpertKey
from smoe.kernels.matrix import Matrix, interleave, products_of
from smoe.memory.store import SlotLayout


class InterleavedSlots:
    """Converts the matrices of experts in slots to the layout that the kernels use. Any thread may call this."""

    def __init__(self, maths: Mapping[tuple[int, int], ExpertMath]) -> None:
        """`maths`: the experts' arithmetic, by (layer, format)."""
        self._matrices = {
            key: [each for each in math.stored if each.form.rows > 1]
            for key, math in maths.items()
            if isinstance(math, QuantisedMath)
        }
        self._products = {each.form: products_of(each.form, INT8) for some in self._matrices.values() for each in some}

    def __call__(self, key: ExpertKey, placement: SlotLayout, buffer: memoryview) -> None:
        """Interleave the rows of an expert that was read into the slot `buffer`."""
        layer, _, form = key
        for each in self._matrices.get((layer, form), ()):
            place = ctypes.addressof(ctypes.c_char.from_buffer(buffer, placement.parts[each.name]))
            interleave(each.form, Matrix(place, each.outputs, each.columns, self._products[each.form]))
