"""Predicts the experts of several later layers by their routers, with a learned correction, if a load is worth it.

    | this layer's router input                  |--- one matrix product ---> l+1: the experts that are probably needed
    | router input of l+1 for the token before   |

The router of a later layer, applied to this layer's input, ignores the effect of the layers in between. The correction
learns the average of this effect (`correction.py`). An expert is predicted only if it is needed with a probability of
at least `WORTH`: with fewer right predictions than that, prefetching is turned off (`policy/trial.py`). Predictions for
layers after l+1 are computed only when the caller reads them. The matrices, and the router inputs of the last token,
are an entry of the ledger (`ModelSpec.correction_bytes`). No module of the model is called, so no hook observes a
prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from smoe.models.outline import ExpertsSite
from smoe.policy.prediction import Prediction, Predictor, Sight
from smoe.policy.trial import WORTH
from smoe.prediction.correction import Correction
from smoe.prediction.ranking import Ranking
from smoe.routing import Routing


class CorrectedGates(Predictor):
    """Predicts the experts of the next `depth` MoE layers by corrected routers."""

    def __init__(
        self,
        sites: Sequence[ExpertsSite],
        corrections: Mapping[tuple[int, int], Correction],
        ranking: Ranking,
        depth: int,
    ) -> None:
        """`corrections`: {(current layer, predicted layer): correction}. A pair of layers without a correction is not
        predicted. `depth`: the largest distance, in layers, between the two."""
        layers = [site.layer for site in sites]
        self._following = {
            layer: [after for after in layers[n : n + depth] if (layer, after) in corrections]
            for n, layer in enumerate(layers, start=1)
        }
        self._guessed = {after for following in self._following.values() for after in following}
        self._corrections = corrections
        self._ranking = ranking
        self._before: dict[int, torch.Tensor] = {}
        """The router inputs [sequences, H] of each sequence's last token, by layer."""

    def observe_input(self, routing: Routing, hidden: torch.Tensor) -> None:
        if routing.layer not in self._guessed:
            return
        last = hidden.detach().reshape(routing.sequences, -1, hidden.shape[-1])[:, -1]  # padding is on the left
        previous = self._before.get(routing.layer)
        if previous is None or previous.shape != last.shape:
            previous = self._before[routing.layer] = torch.empty_like(last)
        previous.copy_(last)

    def predict(self, sight: Sight) -> Iterable[Prediction]:
        hidden = sight.hidden.detach()
        return (self._named(sight.layer, after, hidden, sight.rows) for after in self._following[sight.layer])

    def logits(self, layer: int, after: int, hidden: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Return [T, E]: the predicted router logits of layer `after`, computed from the router input `hidden` [T, H]
        of `layer`. `rows`: the rows to predict; None: all."""
        before = self._before.get(after)
        if before is not None and before.shape != hidden.shape:  # a new batch has begun
            before = None
        if rows is not None:
            hidden = hidden[list(rows)]
            before = None if before is None else before[list(rows)]
        return self._corrections[layer, after].logits(hidden, before)

    def _named(self, layer: int, after: int, hidden: torch.Tensor, rows: Sequence[int] | None) -> Prediction:
        """Return the experts of layer `after` that are needed with a probability of at least `WORTH`, best first."""
        logits = self.logits(layer, after, hidden, rows)
        named = self._ranking.named(after, logits, self.grading)
        wanted = self._corrections[layer, after].probabilities(self._ranking.margins(after, logits))
        by_any = (wanted[0] if len(wanted) == 1 else 1 - (1 - wanted).prod(dim=0)).tolist()  # needed by any row
        return named._replace(experts=[expert for expert in named.experts if by_any[expert] >= WORTH])
