"""The models of the papers' evaluations, by the sizes of their parts, and what these take on a device."""

from __future__ import annotations

from dataclasses import dataclass

from smoe.memory.emulation import DeviceProfile
from smoe.simulator.virtual_clock import StepTimes


@dataclass(frozen=True)
class Geometry:
    """A model whose MoE layers are alike."""

    name: str
    layers: int
    """MoE layers."""
    experts: int
    """Routed ones of a layer."""
    top_k: int
    hidden: int
    expert_width: int
    dense_parameters: float
    """Everything except the routed experts."""

    def expert_bytes(self, bits: float) -> int:
        """Of an expert in so many bits a weight, scales included."""
        return int(3 * self.hidden * self.expert_width * bits / 8)

    def dense_bytes(self, bits: float) -> float:
        return self.dense_parameters * bits / 8


MIXTRAL = Geometry("Mixtral 8x7B", 32, 8, 2, 4096, 14336, 1.6e9)
MIXTRAL_22B = Geometry("Mixtral 8x22B", 56, 8, 2, 6144, 16384, 5.0e9)
PHI_MOE = Geometry("Phi-MoE", 32, 16, 2, 4096, 6400, 1.5e9)
DEEPSEEK_16B = Geometry("DeepSeek-MoE-16B", 27, 64, 6, 2048, 1408, 1.5e9)
XVERSE = Geometry("XVERSE-MoE-A4.2B", 28, 64, 6, 2560, 1728, 2.0e9)
QWEN2_57B = Geometry("Qwen2-57B-A14B", 28, 64, 8, 3584, 2560, 8.1e9)


def step_times(
    model: Geometry, profile: DeviceProfile, bits: float, dense_bytes: float, low_bits: float | None = None
) -> StepTimes:
    """The profile's times for the model's experts in so many bits, and for the rest of `dense_bytes`."""
    own, layer_bytes = model.expert_bytes(bits), dense_bytes / model.layers
    return StepTimes(
        load=profile.link_seconds(own),
        expert=lambda rows: profile.expert_seconds(own, rows),
        layer=lambda tokens: profile.layer_seconds(layer_bytes, tokens),
        host=lambda rows: profile.host_seconds(own, rows),
        low_load=0.0 if low_bits is None else profile.link_seconds(model.expert_bytes(low_bits)),
    )
