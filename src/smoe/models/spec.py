"""The sizes of a model, from its configuration and outline: memory demand, slot sizes, and bytes read for each token.

This is sufficient for a plan. A model that is loaded has a `LibrarySpec`, which adds transformers' model without
weights.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from smoe.bounds import MOST_CORRECTED_LAYERS
from smoe.config import EngineConfig
from smoe.errors import CheckpointError
from smoe.expert import EXACT, LOW
from smoe.kernels.isa import widest
from smoe.kernels.many_rows import MOST_MANY_ROWS, instruction_set
from smoe.kernels.spinning_pool import is_supported
from smoe.memory.dtypes import BF16, BY_NAME, Dtype
from smoe.memory.quantised_store import blocks_bytes
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import PAGE, page_ceil
from smoe.models.file_bytes import FileBytes
from smoe.models.outline import Anatomy, ExpertsSite, Outline
from smoe.models.workspace import PIECE_ELEMENTS, ImageWorkspace, image_workspace_of, workspace_of
from smoe.policy.budget import MIN_STAGING_SLOTS, Demand, SlotClass, slot_classes
from smoe.policy.registry import predictor_kind

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class ModelConfig(Protocol):
    """The interface of a configuration, which transformers' classes and `PlainConfig` have."""

    model_type: str

    def get_text_config(self) -> Any:
        """Return the configuration of the language model within a multimodal one, or the configuration itself."""


def own_dtype(model_config: ModelConfig) -> Dtype:
    """Return the dtype in a configuration, or bf16 if it has none in which smoe computes. Raise `CheckpointError` if
    the field is not a dtype.

    It must be called before the model is built, which changes the configuration.
    """
    own: Any = getattr(model_config.get_text_config(), "dtype", None) or getattr(model_config, "dtype", None)
    if own is not None and not isinstance(own, str) and type(own).__name__ != "dtype":  # torch.dtype
        raise CheckpointError(
            f"config.json: 'dtype' is {own!r:.80}; it must be the name of a data type, such as \"bfloat16\""
        )
    return BY_NAME.get(str(own).removeprefix("torch."), BF16)


@dataclass(frozen=True)
class ModelSpec:
    """The sizes and formats of a model, known from its configuration and file headers."""

    config: ModelConfig
    outline: Outline
    dtype: Dtype
    own_dtype: Dtype
    """The dtype of the checkpoint, which may differ from the dtype of computation."""
    context_tokens: int
    """The number of positions reserved for each sequence."""
    precision: str = "auto"
    """The precision of the routed experts (`EngineConfig.precision`)."""
    stored_bytes: Mapping[int, int] | None = None
    """{layer: bytes of a quantized expert}; None if the experts have the model's dtype."""
    low: ModelSpec | None = None
    """The spec of the experts' low-precision copies; None without such copies."""
    form: int = EXACT
    """Whether the experts are the full-precision copies (EXACT) or the low-precision copies (LOW)."""
    dense: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Non-expert weights that stay quantized, by their transformers names."""
    embedding_on_disk: bool = False
    """Whether rows of `embedding` are read from disk on demand, so that it takes no memory."""
    files: FileBytes | None = None
    """The size of the model's files; None if it was not computed."""
    doubts: tuple[str, ...] = ()
    """Remarks about what the configuration leaves open, and about how an ambiguous one was read."""

    @property
    def sites(self) -> list[ExpertsSite]:
        """The experts modules, in layer order."""
        return self.outline.sites

    @property
    def anatomy(self) -> Anatomy:
        return self.outline.anatomy

    @property
    def weights_bytes(self) -> int:
        """The size in bytes of all weights except the routed experts', as stored in memory; tied weights count once."""
        plain = sum(self.outline.weights[name].numbers for name in self.dense) * self.dtype.itemsize
        return self.outline.dense_bytes(self.dtype) - plain + sum(map(blocks_bytes, self.dense.values()))

    @property
    def image_encoder_bytes(self) -> int:
        """The size in bytes of the weights and buffers of the image encoder, which are part of `weights_bytes`; 0 if
        images were not requested."""
        total = 0
        for name in self.outline.of_images:
            if name in self.dense:
                total += blocks_bytes(self.dense[name])
            else:
                total += self.outline.bytes_of(name, self.dtype)
        return total

    @property
    def dense_bytes_read(self) -> int:
        """The size in bytes of the non-expert weights that a decode step reads. These are all such weights, except that
        only one row of an untied input embedding is read, which is not counted, and that the image encoder is not
        read."""
        name, of_text = self.outline.embedding, self.weights_bytes - self.image_encoder_bytes
        if name is None:
            return of_text
        stored = self.dense.get(name)
        whole = self.outline.weights[name].numbers * self.dtype.itemsize
        return of_text - (whole if stored is None else stored.nbytes)

    @property
    def embedding(self) -> str | None:
        """The name of the input embedding if it can stay on disk, otherwise None.

        To stay on disk, the embedding must be quantized, untied, and stored row by row in the form in which it is used.
        """
        name = self.outline.embedding
        stored = None if name is None else self.dense.get(name)
        is_shared = name in self.outline.tied.values()
        return name if stored is not None and not stored.made_of and not is_shared else None

    @property
    def expert_bytes(self) -> int:
        """The size in bytes of the largest routed expert."""
        return max(map(self._expert_bytes, self.sites))

    @property
    def experts_bytes(self) -> int:
        """The size in bytes of all routed experts."""
        return sum(site.experts * self._expert_bytes(site) for site in self.sites)

    @property
    def expert_bytes_per_token(self) -> int:
        """The size in bytes of the routed experts that one token uses."""
        return sum(self.anatomy.top_k[site.layer] * self._expert_bytes(site) for site in self.sites)

    @property
    def unpacked_bytes(self) -> int:
        """The size in bytes of the quantized weights that are dequantized at a time, after dequantizing them to the
        model's dtype."""
        largest = max(math.prod(part.shape) for site in self.sites for part in site.parts)
        is_unpacked = self.stored_bytes is not None or self.low is not None
        elements = (largest if is_unpacked else 0) + (PIECE_ELEMENTS if self.dense else 0)
        return elements * self.dtype.itemsize

    @property
    def router_bytes(self) -> int:
        """The bytes of a copy of the routers of all layers but the first, with biases
        (`prediction/stacked_gates.py`)."""
        experts = sum(site.experts for site in self.sites[1:])
        return experts * (int(self.config.get_text_config().hidden_size) + 1) * self.dtype.itemsize

    def correction_bytes(self, depth: int, sequences: int) -> int:
        """Return the bytes of router corrections for up to `depth` layers ahead (`prediction/correction.py`).

        There are two matrices and two biases for every pair of layers, and the router inputs of each sequence's last
        token.
        """
        hidden = int(self.config.get_text_config().hidden_size)
        depth = min(depth, MOST_CORRECTED_LAYERS)
        experts = sum(site.experts * min(depth, place) for place, site in enumerate(self.sites))
        numbers = experts * (2 * hidden + 2) + (len(self.sites) - 1) * sequences * hidden
        return numbers * self.dtype.itemsize

    def _expert_bytes(self, site: ExpertsSite) -> int:
        if self.stored_bytes is not None:
            return self.stored_bytes[site.layer]
        return sum(math.prod(part.shape) for part in site.parts) * self.dtype.itemsize

    def least_slot_bytes(self) -> dict[int, int]:
        """Return {layer: bytes of a slot}, without padding for the alignment of reads."""
        return {site.layer: page_ceil(self._expert_bytes(site)) for site in self.sites}

    def _slot_classes(self, slot_bytes: Mapping[int, int] | None) -> tuple[SlotClass, ...]:
        if slot_bytes is None:
            shift = PAGE if self.precision == "auto" else 0  # in a pack every expert begins at a page
            slot_bytes = {layer: nbytes + shift for layer, nbytes in self.least_slot_bytes().items()}
        top_k = self.anatomy.top_k
        alone = {site.layer: SlotClass(slot_bytes[site.layer], top_k[site.layer], site.experts) for site in self.sites}
        return slot_classes({site.layer: self._expert_bytes(site) for site in self.sites}, alone)

    def _cached(self, slots: SlotClass, config: EngineConfig) -> SlotClass:
        """Return the slot class with the number of staging slots that the configuration needs.

        Without an expert cache, there must be slots for the predicted experts and one for an expert that was not
        predicted.
        """
        if config.expert_cache == "budget":
            return slots
        if config.prefetch == "none":
            return slots._replace(passing=MIN_STAGING_SLOTS)
        widest = max(site.experts for site in self.sites if not slots.layers or site.layer in slots.layers)
        names_all = predictor_kind(config.prefetch).names_whole_layers
        return slots._replace(passing=1 + (widest if names_all else slots.top_k))

    def demand(
        self, config: EngineConfig, slot_bytes: Mapping[int, int] | None = None, read_buffer_bytes: int = 0
    ) -> Demand:
        """Return the memory that the model needs from the budget.

        `slot_bytes`: the bytes of a slot, by layer; None: slots include the largest possible padding. Low-precision
        copies are in packed files and need no padding.
        """
        text = self.config.get_text_config()
        item = self.dtype.itemsize
        widest = max(max(weight.shape, default=0) for weight in self.outline.weights.values())
        workspace = workspace_of(
            text, self.sites, self.anatomy.top_k, config.max_sequences, item, self.experts_bytes, widest
        )
        images = self._images_workspace(config)
        return Demand(
            weights_bytes=self.weights_bytes - self.image_encoder_bytes,
            image_encoder_bytes=self.image_encoder_bytes,
            latent_bytes=self.latent_bytes(config),
            image_step_bytes=images.encoder,
            embedding_bytes=0 if self.embedding is None else blocks_bytes(self.dense[self.embedding]),
            workspace_bytes=workspace.fixed
            + self.unpacked_bytes
            + config.image_tokens * images.token
            + workspace.packed * self._packed_rows(config),
            position_bytes=workspace.position + images.token,
            square_bytes=workspace.square,
            step_tokens=min(config.prefill_tokens, self.context_tokens * config.max_sequences),
            context_tokens=self.context_tokens,
            kv_position_bytes=self.anatomy.kv_bytes_per_token,
            kv_positions=self.context_tokens * config.max_sequences,
            kv_cache_bytes=self.anatomy.kv_bytes_per_token * self.context_tokens * config.max_sequences
            + self.anatomy.state_bytes_per_sequence * config.max_sequences,
            classes=tuple(self._cached(each, config) for each in self._slot_classes(slot_bytes)),
            read_buffer_bytes=read_buffer_bytes,
            predictor_bytes=predictor_kind(config.prefetch).own_bytes(self, config),
            low=() if self.low is None else tuple(each._replace(form=LOW) for each in self.low._slot_classes(None)),
            low_share=config.low_share if self.low is not None else 0.0,
        )

    def latent_bytes(self, config: EngineConfig) -> int:
        """Return the bytes of the bf16 copies of the matrices that expand latent vectors, with which single tokens
        attend to a latent KV cache (`fastpath/latent_attention.py`); 0 if transformers' method is used."""
        may_round = config.kernels == "own-order" or (config.kernels == "auto" and not config.reproducible)
        has_torchs_bits = self.stored_bytes is None and config.kernels == "auto" and is_supported()
        is_eager = getattr(self.config.get_text_config(), "_attn_implementation", "sdpa") == "eager"
        has_kernels = self.dtype is BF16 and widest() is not None and _is_on_cpu(config)
        if not may_round or has_torchs_bits or is_eager or not has_kernels:
            return 0
        expanding = (each for name, each in self.outline.weights.items() if name.endswith("kv_b_proj.weight"))
        return self.dtype.itemsize * sum(each.numbers for each in expanding)

    def _packed_rows(self, config: EngineConfig) -> int:
        """Return the largest number of rows that our kernel for many rows packs at once (`kernels/many_rows.py`); 0 if
        this CPU or the model does not use the kernel."""
        may_round = config.kernels == "own-order" or (config.kernels == "auto" and not config.reproducible)
        is_used = may_round and self.dtype is BF16 and self.stored_bytes is None and _is_on_cpu(config)
        return MOST_MANY_ROWS if is_used and instruction_set() is not None else 0

    def _images_workspace(self, config: EngineConfig) -> ImageWorkspace:
        """Return the memory for one image's activations and for the features of images."""
        if not self.outline.of_images:
            return ImageWorkspace(0, 0)
        return image_workspace_of(self.config, config.image_tokens, self.dtype.itemsize)


def _is_on_cpu(config: EngineConfig) -> bool:
    """Return whether the CPU computes the model. Where torch is not imported, nothing has asked for a GPU."""
    torch = sys.modules.get("torch")
    if config.device != "auto" or torch is None:
        return config.device == "auto" or config.device.startswith("cpu")
    return not torch.cuda.is_available()


@dataclass(frozen=True, kw_only=True)
class LibrarySpec(ModelSpec):
    """The spec of a model that can be loaded: its sizes, and transformers' model without weights."""

    config: PretrainedConfig
    shell: PreTrainedModel
    """The transformers model on the meta device, experts included."""
    with_images: bool = False
    """Whether the image encoder is loaded for images in prompts."""
