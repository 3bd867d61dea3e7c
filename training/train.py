"""Make the demonstration model or the witness from its data, each with one command.

    python -m training.train --data PATH_TO_TRAIN_DATA --out runs/demo --deadline-minutes 90
    python -m training.train --shape witness --data PATH_TO_TRAIN_DATA --out runs/witness --deadline-minutes 90

Stages: `prepare` (tokenizer, packed windows), `train`, `export`. Each stage keeps what is already done, so the same
command continues an interrupted run, today or another day, from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.checkpoint import load_checkpoint, save_checkpoint
from training.data import Sampler, prepare
from training.losses import balance_losses, token_loss
from training.model import SHAPES, ModelConfig, MoeModel, document_lengths, initialise
from training.optimizer import MuonAdamW
from training.schedule import Schedule, parse_deadline, utc_text
from training.threads import core_count, read_cpu_times, spare_threads


@dataclass(frozen=True)
class TrainConfig:
    """Everything about a run that is not the model or the data."""

    rows: int = 8
    """Windows in a batch."""
    seq_len: int = 512
    """Predicted tokens in a window."""
    muon_lr: float = 0.012
    adam_lr: float = 3e-3
    balance_coefficient: float = 0.003
    """Weight of the load-balancing loss of one layer."""
    z_coefficient: float = 1e-4
    """Weight of the router z-loss of one layer."""
    checkpoint_seconds: float = 180.0
    """Time between checkpoints."""
    seed: int = 0
    backend: str = "routed"


class Trainer:
    """Model, optimizer and data position of one run; the unit that is checkpointed."""

    def __init__(self, folder: Path, model_config: ModelConfig, config: TrainConfig) -> None:
        self.folder, self.config, self.model_config = folder, config, model_config
        self.model = MoeModel(model_config, config.backend)
        initialise(self.model, torch.Generator().manual_seed(config.seed))
        self.optimizer = MuonAdamW(self.model, config.muon_lr, config.adam_lr)
        self.sampler = Sampler(folder, config.seed)
        self.steps = self.tokens = 0
        self.seconds = 0.0

    @property
    def checkpoint_path(self) -> Path:
        """The one checkpoint file of the run."""
        return self.folder / "checkpoint.pt"

    def step(self, scale: float) -> dict[str, float]:
        """One optimizer step at `scale` times the learning rates; returns the losses in nats."""
        ids, weights = (torch.from_numpy(array) for array in self.sampler.batch(self.config.rows))
        lengths = document_lengths(ids[:, :-1], self.sampler.end_id)
        hidden_states, routing = self.model(ids[:, :-1], lengths)
        loss, plain = token_loss(self.model, hidden_states, ids[:, 1:], weights[:, 1:])
        balance, z_loss = balance_losses(routing)
        (loss + self.config.balance_coefficient * balance + self.config.z_coefficient * z_loss).backward()
        self.optimizer.step(scale)
        self.steps += 1
        self.tokens += plain.numel()
        layers = self.model_config.num_hidden_layers
        answer = weights[:, 1:].reshape(-1) > 1
        return {
            "loss": plain[~answer].mean().item(),
            "answer_loss": plain[answer].mean().item() if answer.any() else float("nan"),
            "balance": balance.item() / layers,
        }

    def save(self) -> None:
        """Write the checkpoint."""
        save_checkpoint(
            self.checkpoint_path,
            {
                "model_config": self.model_config.to_dict(),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "sampler": self.sampler.state_dict(),
                "torch_rng": torch.get_rng_state(),
                "steps": self.steps,
                "tokens": self.tokens,
                "seconds": self.seconds,
            },
        )

    def resume(self) -> bool:
        """Continue from the checkpoint, if there is one."""
        state = load_checkpoint(self.checkpoint_path)
        if state is None:
            return False
        if ModelConfig(**state["model_config"]) != self.model_config:
            raise ValueError(f"{self.checkpoint_path} holds a model of other sizes: {state['model_config']}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])
        torch.set_rng_state(state["torch_rng"])
        self.steps, self.tokens, self.seconds = state["steps"], state["tokens"], state["seconds"]
        return True


def log_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line to the log and show it."""
    text = json.dumps(record)
    print(text, flush=True)
    with path.open("a") as log:
        log.write(text + "\n")


class StopRequest:
    """Remembers that the process was asked to end (SIGTERM, Ctrl-C), so that the step can be finished and saved."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, signal_number: int, frame: object) -> None:
        self.asked = True

    def listen(self) -> None:
        """Take over the two signals."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self)


def run(trainer: Trainer, schedule: Schedule, stop: StopRequest | None = None, adapt_threads: bool = False) -> bool:
    """Train until the schedule ends, with checkpoints, the last one at the end; False when stopped before.

    With `adapt_threads`, the threads follow what other processes leave free; results then depend on the load.
    """
    log, last_save, times = trainer.folder / "log.jsonl", time.time(), read_cpu_times()
    while not schedule.finished(trainer.steps, now := time.time()):
        if stop is not None and stop.asked:
            trainer.save()
            return False
        if adapt_threads:
            before, times = times, read_cpu_times()
            torch.set_num_threads(spare_threads(before, times, core_count()))
        scale = schedule.scale(trainer.steps, now)
        losses = trainer.step(scale)
        took = time.time() - now
        trainer.seconds += took
        log_line(
            log,
            {
                "step": trainer.steps,
                "tokens": trainer.tokens,
                "clock": utc_text(now),
                "scale": round(scale, 4),
                "tokens_per_second": round(trainer.config.rows * trainer.config.seq_len / took),
                "threads": torch.get_num_threads(),
                **{name: round(value, 4) for name, value in losses.items()},
            },
        )
        if time.time() - last_save >= trainer.config.checkpoint_seconds:
            trainer.save()
            last_save = time.time()
    trainer.save()
    return True


def make_schedule(arguments: argparse.Namespace, out: Path) -> Schedule:
    """The schedule asked for; the start of a run with a deadline is remembered in `start.json`."""
    if arguments.steps is not None:
        return Schedule(total_steps=arguments.steps)
    now = time.time()
    start_path = out / "start.json"
    if not start_path.exists():
        start_path.write_text(json.dumps({"start_seconds": now}))
    start = json.loads(start_path.read_text())["start_seconds"]
    deadline = parse_deadline(arguments.deadline or str(arguments.deadline_minutes), now)
    return Schedule(start_seconds=start, deadline_seconds=deadline)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the *.jsonl.xz shards")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; continued when it exists")
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="which of the two models to make")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of another model (default: train one)")
    parser.add_argument("--deadline", help="end of training as HH:MM UTC, or minutes from now")
    parser.add_argument("--deadline-minutes", type=float, default=90.0, help="the same in minutes")
    parser.add_argument("--steps", type=int, help="train this many steps instead of until a deadline")
    parser.add_argument("--rows", type=int, default=TrainConfig.rows, help="windows in a batch")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as other processes leave free")
    parser.add_argument("--stages", default="prepare,train,export", help="comma-separated stages to run")
    parser.add_argument("--export", type=Path, help="folder of the exported model (default: OUT/model)")
    return parser.parse_args()


def main() -> None:
    """Run the stages."""
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    stages = arguments.stages.split(",")
    if unknown := set(stages) - {"prepare", "train", "export"}:
        raise SystemExit(f"unknown stages: {', '.join(sorted(unknown))}; allowed: prepare, train, export")
    model_config, config = SHAPES[arguments.shape], TrainConfig(rows=arguments.rows)
    if "prepare" in stages:
        prepare(
            arguments.data,
            arguments.out,
            model_config.vocab_size,
            config.seq_len,
            tokenizer_source=arguments.tokenizer,
        )
    if "train" in stages:
        trainer = Trainer(arguments.out, model_config, config)
        trainer.resume()
        stop = StopRequest()
        stop.listen()
        if not run(trainer, make_schedule(arguments, arguments.out), stop, adapt_threads=not arguments.threads):
            raise SystemExit(f"stopped at step {trainer.steps}; the same command continues")
    if "export" in stages:
        from training.export import export_run

        export_run(arguments.out, arguments.export or arguments.out / "model")


if __name__ == "__main__":
    main()
