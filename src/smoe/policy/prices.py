"""What each lossy answer to a miss costs in quality: nats by which the distributions of this and later next tokens
diverge, all together, and by which the cross-entropy of a text is expected to rise.

Prices of different routes and layers add up. They are measured on text, once for a model, and stored with it as a
table; how they follow from a route is written in one place, `LayerPrices.price`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from math import isfinite, sqrt
from typing import Any, NamedTuple

from smoe.errors import ConfigError


class Resolution(Enum):
    """What becomes of the routes of a missing expert."""

    HIGH = "high"
    """Its own copy is loaded."""
    HOST = "host"
    """The CPU of a machine with a device computes it where it lies."""
    LOW = "low"
    """Its lower copy serves, loaded or resident (lossy)."""
    SUBSTITUTE = "substitute"
    """A resident expert of like score takes the route (lossy)."""
    SKIP = "skip"
    """The route is left out (lossy)."""


EXACT_ANSWERS = frozenset({Resolution.HIGH, Resolution.HOST})
"""Those that have no price."""


class LayerPrices(NamedTuple):
    """Coefficients of one layer, in nats for a route that has the whole routing weight of its token."""

    low: float
    substitute: float
    """The quality cost of a substitute of no weight of its own."""
    skip: float
    """The quality cost of a dropped route, the weights of the others as they were."""

    def price(self, answer: Resolution, weight: float, gap: float = 0.0) -> float:
        """Nats, of one route with so much of its token's routing weight (0 to 1).

        What rounding an expert changes in the layer's output is proportional to its weight, and the divergence of the
        next token's distribution to the change's square. What is left out grows a little faster, as experts of small
        weight also give small outputs. A substitute, which weighs what its own score gives it, is a second change,
        unlike the first: experts of like score are no more alike than others (docs/log/substitution.md). `gap` is the
        part of the expert's choice score that the substitute's falls short of it (0 to 1).
        """
        squared = weight * weight
        if answer is _SUBSTITUTE:
            similarity = 1.0 - gap
            return self.substitute * (1.0 + similarity * similarity) * squared
        if answer is _SKIP:
            return self.skip * squared * sqrt(weight)
        return self.low * squared if answer is _LOW else 0.0


_LOW, _SUBSTITUTE, _SKIP = Resolution.LOW, Resolution.SUBSTITUTE, Resolution.SKIP


class PriceTable(NamedTuple):
    """The prices of a model, by the numbers that its layers have in `Routing.layer`."""

    layers: Mapping[int, LayerPrices]

    @property
    def typical(self) -> float:
        """Nats of one of eight equal routes that is left out, in the layer in the middle."""
        prices = sorted(layer.price(Resolution.SKIP, 1 / 8) for layer in self.layers.values())
        return prices[len(prices) // 2]

    def as_json(self) -> dict[str, Any]:
        return {"nats": {str(layer): prices._asdict() for layer, prices in sorted(self.layers.items())}}

    @classmethod
    def from_json(cls, value: Any) -> PriceTable:
        """What `as_json` wrote; raises `ConfigError` for anything else, and for prices below zero."""
        try:
            layers = {int(layer): LayerPrices(**prices) for layer, prices in value["nats"].items()}
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ConfigError.out_of_bounds("prices", value, "a table as `PriceTable.as_json` writes it") from error
        for layer, prices in layers.items():
            for name, nats in prices._asdict().items():
                is_number = isinstance(nats, (int, float)) and not isinstance(nats, bool)
                if not is_number or not isfinite(nats) or nats < 0:
                    raise ConfigError.out_of_bounds(f"prices of layer {layer}: {name}", nats, "0 or more nats")
        return cls(layers)
