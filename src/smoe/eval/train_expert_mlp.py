"""Trains DuoServe's ExpertMLP on recorded paths (sections 4.2 and 6.4). The training is seeded, and continues after an
interrupt.

A sample is one layer of one token: the network's inputs for this layer, and the experts that the layer chose. The last
tenth of the tokens is not used for training. The loss on it determines when training ends, and which epoch's weights
are used. The paper gives neither optimiser nor batch size: here it is Adam at 0.001 with 256 samples.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from smoe.kernels.threads import threads
from smoe.policy.registry import EXPERT_MLP
from smoe.prediction.activation_path import Paths, multi_hot
from smoe.prediction.affinity import affinity_of
from smoe.prediction.expert_mlp import folded, network, state_width, states
from smoe.prediction.fitted import Fitted
from smoe.prediction.kinds import ExpertMLPKind
from smoe.prediction.popularity import popularity_of
from smoe.whole_file import whole_file

LEAST_EPOCHS, MOST_EPOCHS = ExpertMLPKind.epochs
_PATIENCE = 3
"""Training ends after this many epochs without a lower loss on the held-out tenth."""
HELD_BACK = 0.1
_BATCH = 256
_RATE = 1e-3


@dataclass(frozen=True)
class Training:
    """A trained network, and the losses during its training."""

    fitted: Fitted
    losses: list[tuple[float, float]]
    """(loss on the training part, loss on the held-out tenth) of every epoch."""
    core_seconds: float
    """The processor time of all epochs, in seconds."""

    @property
    def best_epoch(self) -> int:
        """The number, from 1, of the epoch whose weights are used: the one with the lowest loss on the held-out
        tenth."""
        return 1 + min(range(len(self.losses)), key=lambda epoch: self.losses[epoch][1])


@dataclass
class _TrainingState:
    """The state with which an interrupted training continues: network, optimizer, best weights and losses."""

    network: dict[str, Any]
    optimizer: dict[str, Any]
    best: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[tuple[float, float]] = field(default_factory=list)
    core_seconds: float = 0.0


def train_expert_mlp(
    paths: Paths,
    seed: int = 0,
    checkpoint: Path | None = None,
    tick: Callable[[int], None] = lambda epochs: None,
    most_epochs: int | None = None,
) -> Training:
    """Return the network trained on `paths`, which must have at least ten tokens and two layers. Equal paths and seeds
    give equal weights, bit by bit, with or without an interrupt.

    `checkpoint`: the file in which the state is stored after every epoch, until training ends. A file of other paths or
    of another seed is ignored. `tick` is called with the number of epochs done. `most_epochs`: the maximum number of
    epochs; None: `MOST_EPOCHS`. Raise `OSError` if `checkpoint` cannot be written.
    """
    with threads(1), torch.random.fork_rng(devices=[]):
        return _Trainer(paths, seed).run(checkpoint, tick, most_epochs or MOST_EPOCHS)


class _Trainer:
    def __init__(self, paths: Paths, seed: int) -> None:
        self._seed = seed
        self._all = paths
        self._trained, self._held_back = paths.split(HELD_BACK)
        self._popularity, self._affinity = popularity_of(self._trained), affinity_of(self._trained)
        self._widest = self._popularity.shape[1]
        torch.manual_seed(seed)
        self._network = network(state_width(paths.layers), self._widest)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=_RATE)
        self._progress = _TrainingState(self._network.state_dict(), self._optimizer.state_dict())

    def run(self, checkpoint: Path | None, tick: Callable[[int], None], most_epochs: int) -> Training:
        mark = self._mark()
        if checkpoint is not None and checkpoint.exists():
            self._resume(checkpoint, mark)
        progress = self._progress
        tick(len(progress.losses))
        while not _is_over([held_back for _, held_back in progress.losses], most_epochs):
            began = time.process_time()
            self._epoch()
            progress.core_seconds += time.process_time() - began
            if checkpoint is not None:
                self._keep(checkpoint, mark)
            tick(len(progress.losses))
        if checkpoint is not None:
            checkpoint.unlink(missing_ok=True)
        counts = {"popularity": self._popularity, "affinity": self._affinity}
        tensors = progress.best | {name: torch.from_numpy(array) for name, array in counts.items()}
        fitted = Fitted(EXPERT_MLP, self._all.layers, tensors, len(self._all.chosen))
        return Training(fitted, progress.losses, progress.core_seconds)

    def _epoch(self) -> None:
        progress, losses = self._progress, []
        number = len(progress.losses)
        torch.manual_seed(self._seed * (MOST_EPOCHS + 1) + number + 1)  # the same after an interrupt
        self._network.train()
        places = len(self._all.layers) - 1
        order = torch.randperm(len(self._trained.chosen) * places).numpy()
        for batch in np.array_split(order, max(1, round(len(order) / _BATCH))):
            loss = self._loss(self._trained, batch // places, 1 + batch % places)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            losses.append(loss.item())
        progress.losses.append((sum(losses) / len(losses), self._held_back_loss()))
        if min(held_back for _, held_back in progress.losses) == progress.losses[-1][1]:
            progress.best = folded(self._network)

    def _held_back_loss(self) -> float:
        self._network.eval()
        tokens = np.arange(len(self._held_back.chosen))
        with torch.no_grad():
            found = [
                self._loss(self._held_back, tokens, np.full_like(tokens, place)).item()
                for place in range(1, len(self._all.layers))
            ]
        return sum(found) / len(found)

    def _loss(self, paths: Paths, tokens: np.ndarray, places: np.ndarray) -> torch.Tensor:
        """Return the loss of equation 6 as a mean over samples. Sample b is the layer at index `places[b]` of token
        `tokens[b]`."""
        given = np.empty((len(tokens), state_width(paths.layers)), dtype=np.float32)
        wanted = np.empty((len(tokens), self._widest), dtype=np.float32)
        counts = np.zeros_like(wanted)  # the outputs beyond a layer's own experts are ignored
        for place in np.unique(places):
            here = places == place
            path = paths.chosen[tokens[here]]
            given[here] = states(int(place), path, paths.layers, self._popularity, self._affinity)
            wanted[here] = multi_hot(path[:, place], self._widest)
            counts[here, : paths.layers[place].experts] = 1.0
        logits = self._network(torch.from_numpy(given))
        loss = binary_cross_entropy_with_logits(
            logits, torch.from_numpy(wanted), torch.from_numpy(counts), reduction="sum"
        )
        return loss / float(counts.sum())

    def _mark(self) -> str:
        """Return a hash of the data, seed and parameters of this training, by which its checkpoint is recognised."""
        digest = hashlib.sha256(repr((self._seed, self._all.layers, _BATCH, _RATE, torch.__version__)).encode())
        digest.update(self._all.chosen.tobytes())
        return digest.hexdigest()

    def _keep(self, checkpoint: Path, mark: str) -> None:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        progress = self._progress
        progress.network, progress.optimizer = self._network.state_dict(), self._optimizer.state_dict()
        with whole_file(checkpoint) as file:
            torch.save({"mark": mark} | vars(progress), file)

    def _resume(self, checkpoint: Path, mark: str) -> None:
        try:
            stored = torch.load(checkpoint, weights_only=True)
        except Exception:  # the file is damaged: training starts again
            return
        if stored.pop("mark", None) == mark:
            self._progress = _TrainingState(**stored)
            self._network.load_state_dict(self._progress.network)
            self._optimizer.load_state_dict(self._progress.optimizer)


def _is_over(losses: list[float], most_epochs: int) -> bool:
    """Return whether training should end, from the losses on the held-out tenth after each epoch."""
    if len(losses) < min(LEAST_EPOCHS, most_epochs):
        return False
    since_best = len(losses) - 1 - losses.index(min(losses))
    return since_best >= _PATIENCE or len(losses) >= most_epochs
