"""The quality cost of each lossy resolution of a miss, in nats.

A quality cost is the sum of the divergences of this and later next-token distributions, and so the expected rise of a
text's cross-entropy. The costs of different routes and layers add up. They are measured on text, once for a model, and
stored as a table with its other tuned values. `LayerPrices.price` computes the cost of a route from the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from math import isfinite, sqrt
from typing import Any, NamedTuple

from smoe.errors import ConfigError


class Resolution(Enum):
    """A way to compute the routes of a missing expert, or to drop them."""

    HIGH = "high"
    """The full copy is loaded."""
    HOST = "host"
    """The CPU of a machine with a device computes the expert from the host tier."""
    LOW = "low"
    """The low-precision copy is used, loaded or resident (lossy)."""
    SUBSTITUTE = "substitute"
    """A resident expert of similar score replaces the expert for the route (lossy)."""
    SKIP = "skip"
    """The route is dropped (lossy)."""


class LayerPrices(NamedTuple):
    """The coefficients from which quality costs of one layer's routes are computed. A coefficient is the cost in nats
    of a route that has the whole routing weight of its token."""

    low: float
    substitute: float
    """The quality cost of a substitute with score 0."""
    skip: float
    """The quality cost of a dropped route, if the weights of the other routes stay unchanged."""

    def price(self, answer: Resolution, weight: float, gap: float = 0.0) -> float:
        """Return the quality cost in nats of one route. `weight`: the route's fraction of the token's routing weight (0
        to 1). `gap`: how much lower the substitute's score is, as a fraction of the expert's score (0 to 1).

        The rounding of an expert changes the layer's output in proportion to the weight, and the divergence of the next
        token's distribution is proportional to the square of the change. The cost of dropping grows slightly faster,
        because experts of small weight also have small outputs. A substitute, weighted by its own score, is a second,
        independent change: experts of similar score are not more alike than others (docs/log/substitution.md).
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
    """The quality costs of a model, by layer number (`Routing.layer`)."""

    layers: Mapping[int, LayerPrices]

    @property
    def typical(self) -> float:
        """The quality cost in nats of dropping one of eight equal routes, in the median layer."""
        prices = sorted(layer.price(Resolution.SKIP, 1 / 8) for layer in self.layers.values())
        return prices[len(prices) // 2]

    def as_json(self) -> dict[str, Any]:
        return {"nats": {str(layer): prices._asdict() for layer, prices in sorted(self.layers.items())}}

    @classmethod
    def from_json(cls, value: Any) -> PriceTable:
        """Return the table from the JSON value that `as_json` made. Raise `ConfigError` for any other value, and for
        negative costs."""
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
