"""From a model's configuration alone: what it needs, what a budget buys, and the floor of the time per token.

Nothing is downloaded but the config, nothing is loaded: the model's outline tells its sizes. Of a model that is to be
loaded there is the library's empty one, too (`LibrarySpec`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from smoe.bounds import CORRECTED_GATES, DEFAULT_PREFETCH_DEPTH, MOST_CORRECTED_LAYERS, STACKED_GATES
from smoe.config import EngineConfig
from smoe.errors import CheckpointError
from smoe.expert import EXACT, LOW
from smoe.memory.dtypes import BF16, BY_NAME, Dtype
from smoe.memory.quantised_store import blocks_bytes
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import PAGE, page_ceil
from smoe.models.file_bytes import FileBytes
from smoe.models.outline import Anatomy, ExpertsSite, Outline
from smoe.models.workspace import PIECE_ELEMENTS, workspace_of
from smoe.policy.budget import MIN_STAGING_SLOTS, Demand, SlotClass, slot_classes
from smoe.policy.registry import WHOLE_LAYER

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class ModelConfig(Protocol):
    """What is asked of a configuration: the library's, or one without it (`plain_config.py`)."""

    model_type: str

    def get_text_config(self) -> Any:
        """That of the language model, where the checkpoint has other models too."""


def own_dtype(model_config: ModelConfig) -> Dtype:
    """The element type that a model is in by its configuration as it was read (building a model sets another); bf16
    where that is of no use. Raises `CheckpointError` for what is no type."""
    own: Any = getattr(model_config.get_text_config(), "dtype", None) or getattr(model_config, "dtype", None)
    if own is not None and not isinstance(own, str) and type(own).__name__ != "dtype":  # torch's
        raise CheckpointError(f"config.json: 'dtype' is {own!r:.80}, it must be the name of a type, as \"bfloat16\"")
    return BY_NAME.get(str(own).removeprefix("torch."), BF16)


@dataclass(frozen=True)
class ModelSpec:
    """A model known by its configuration."""

    config: ModelConfig
    outline: Outline
    dtype: Dtype
    own_dtype: Dtype
    """That of the checkpoint, whatever is computed in."""
    context_tokens: int
    """Positions reserved for every sequence."""
    precision: str = "auto"
    """The precision of the routed experts (`EngineConfig.precision`)."""
    stored_bytes: Mapping[int, int] | None = None
    """An expert of every layer, where they are quantised and stay so; None: they are of the model's dtype."""
    low: ModelSpec | None = None
    """The same model with its experts' low copies, where it is served with such."""
    form: int = EXACT
    """The form of its experts: their own copies, or low ones."""
    dense: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Weights beside the experts that are quantised and stay so, by the library's names."""
    embedding_on_disk: bool = False
    """Whether rows of `embedding` are read when a token asks for them, and so are not in memory."""
    files: FileBytes | None = None
    """What the model's files take; None where that was not asked for."""
    doubts: tuple[str, ...] = ()
    """What the configuration alone could not say, where the weights are not here, and how it was read where it could be
    read in more than one way."""

    @property
    def sites(self) -> list[ExpertsSite]:
        """Where the routed experts are, in layer order."""
        return self.outline.sites

    @property
    def anatomy(self) -> Anatomy:
        return self.outline.anatomy

    @property
    def weights_bytes(self) -> int:
        """Everything except the routed experts, as it is stored; tied weights once."""
        plain = sum(self.outline.weights[name].numbers for name in self.dense) * self.dtype.itemsize
        return self.outline.dense_bytes(self.dtype) - plain + sum(map(blocks_bytes, self.dense.values()))

    @property
    def dense_bytes_read(self) -> int:
        """The part of it that a decode step reads: all of it, of an untied input embedding just a row."""
        name = self.outline.embedding
        if name is None:
            return self.weights_bytes
        stored = self.dense.get(name)
        whole = self.outline.weights[name].numbers * self.dtype.itemsize
        return self.weights_bytes - (whole if stored is None else stored.nbytes)

    @property
    def embedding(self) -> str | None:
        """The library's name of an input embedding that can stay on disk: no other layer has its weights, and every row
        lies there as it is used."""
        name = self.outline.embedding
        stored = None if name is None else self.dense.get(name)
        is_shared = name in self.outline.tied.values()
        return name if stored is not None and not stored.made_of and not is_shared else None

    @property
    def expert_bytes(self) -> int:
        """The largest routed expert."""
        return max(map(self._expert_bytes, self.sites))

    @property
    def experts_bytes(self) -> int:
        """All routed experts together."""
        return sum(site.experts * self._expert_bytes(site) for site in self.sites)

    @property
    def expert_bytes_per_token(self) -> int:
        """Routed experts that one token uses."""
        return sum(self.anatomy.top_k[site.layer] * self._expert_bytes(site) for site in self.sites)

    @property
    def unpacked_bytes(self) -> int:
        """Room for what is unpacked at a time of quantised weights, in the model's dtype."""
        largest = max(math.prod(part.shape) for site in self.sites for part in site.parts)
        is_unpacked = self.stored_bytes is not None or self.low is not None
        elements = (largest if is_unpacked else 0) + (PIECE_ELEMENTS if self.dense else 0)
        return elements * self.dtype.itemsize

    @property
    def router_bytes(self) -> int:
        """The routers of all layers but the first, biases included, in the model's dtype: what it takes to stack them
        (`prediction/stacked_gates.py`)."""
        experts = sum(site.experts for site in self.sites[1:])
        return experts * (int(self.config.get_text_config().hidden_size) + 1) * self.dtype.itemsize

    def correction_bytes(self, depth: int, sequences: int) -> int:
        """What corrections for so many layers ahead take in the model's dtype (`prediction/correction.py`): for every
        pair of layers two matrices and two biases, and the router inputs of each sequence's last token."""
        hidden = int(self.config.get_text_config().hidden_size)
        depth = min(depth, MOST_CORRECTED_LAYERS)
        experts = sum(site.experts * min(depth, place) for place, site in enumerate(self.sites))
        numbers = experts * (2 * hidden + 2) + (len(self.sites) - 1) * sequences * hidden
        return numbers * self.dtype.itemsize

    def _predictor_bytes(self, config: EngineConfig) -> int:
        """What the predictor of `config` keeps for itself."""
        if config.prefetch == CORRECTED_GATES:
            return self.correction_bytes(config.prefetch_depth or DEFAULT_PREFETCH_DEPTH, config.max_sequences)
        return self.router_bytes if config.prefetch == STACKED_GATES else 0

    def _expert_bytes(self, site: ExpertsSite) -> int:
        if self.stored_bytes is not None:
            return self.stored_bytes[site.layer]
        return sum(math.prod(part.shape) for part in site.parts) * self.dtype.itemsize

    def least_slot_bytes(self) -> dict[int, int]:
        """A slot of each layer, without what alignment adds."""
        return {site.layer: page_ceil(self._expert_bytes(site)) for site in self.sites}

    def _slot_classes(self, slot_bytes: Mapping[int, int] | None) -> tuple[SlotClass, ...]:
        if slot_bytes is None:
            shift = PAGE if self.precision == "auto" else 0  # in a pack every expert begins at a page
            slot_bytes = {layer: nbytes + shift for layer, nbytes in self.least_slot_bytes().items()}
        top_k = self.anatomy.top_k
        alone = {site.layer: SlotClass(slot_bytes[site.layer], top_k[site.layer], site.experts) for site in self.sites}
        return slot_classes({site.layer: self._expert_bytes(site) for site in self.sites}, alone)

    def _cached(self, slots: SlotClass, config: EngineConfig) -> SlotClass:
        """The class with as many slots as the configuration's expert cache has.

        Without one, those who guess need slots for what they guess, and one for what they did not.
        """
        if config.expert_cache == "budget":
            return slots
        if config.prefetch == "none":
            return slots._replace(passing=MIN_STAGING_SLOTS)
        widest = max(site.experts for site in self.sites if not slots.layers or site.layer in slots.layers)
        return slots._replace(passing=1 + (widest if config.prefetch == WHOLE_LAYER else slots.top_k))

    def demand(
        self, config: EngineConfig, slot_bytes: Mapping[int, int] | None = None, read_buffer_bytes: int = 0
    ) -> Demand:
        """What the model asks of the budget; without `slot_bytes` of each layer, with the largest alignment that a slot
        may need. Low copies are in packs, where there is none."""
        text = self.config.get_text_config()
        item = self.dtype.itemsize
        widest = max(max(weight.shape, default=0) for weight in self.outline.weights.values())
        workspace = workspace_of(
            text, self.sites, self.anatomy.top_k, config.max_sequences, item, self.experts_bytes, widest
        )
        return Demand(
            weights_bytes=self.weights_bytes,
            embedding_bytes=0 if self.embedding is None else blocks_bytes(self.dense[self.embedding]),
            workspace_bytes=workspace.fixed + self.unpacked_bytes,
            position_bytes=workspace.position,
            square_bytes=workspace.square,
            step_tokens=min(config.prefill_tokens, self.context_tokens * config.max_sequences),
            kv_cache_bytes=self.anatomy.kv_bytes_per_token * self.context_tokens * config.max_sequences
            + self.anatomy.state_bytes_per_sequence * config.max_sequences,
            classes=tuple(self._cached(each, config) for each in self._slot_classes(slot_bytes)),
            read_buffer_bytes=read_buffer_bytes,
            predictor_bytes=self._predictor_bytes(config),
            low=() if self.low is None else tuple(each._replace(form=LOW) for each in self.low._slot_classes(None)),
            low_share=config.low_share if self.low is not None else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class LibrarySpec(ModelSpec):
    """The same of a model that can be loaded."""

    config: PretrainedConfig
    shell: PreTrainedModel
    """The library's model on the meta device, experts included."""
