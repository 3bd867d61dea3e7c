"""Steps over a configuration: would catch a setting of what the user prefetches by that is refused in a step which
prefetches by something else."""

from __future__ import annotations

import pytest

from bench.mechanisms.ablation import ABLATIONS, DEVICE_ABLATIONS, Step, ablate
from smoe.config import EngineConfig
from smoe.presets import configure

STEPS = [step for steps in (*ABLATIONS.values(), *DEVICE_ABLATIONS.values()) for step in steps]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name.strip())
def test_a_step_says_itself_what_is_prefetched(step: Step) -> None:
    asked: list[EngineConfig] = []

    def interrupted(config: EngineConfig) -> None:
        asked.append(config)
        raise KeyboardInterrupt

    config = configure(prefetch="stacked-gates", prefetch_depth=3, device="emulated")
    assert ablate([step], 1, config, [], interrupted, lambda _: None) == []  # type: ignore[arg-type]
    assert [each.prefetch for each in asked] == [step.switches["prefetch"]]
