"""Turn a training checkpoint into a native transformers checkpoint, and back.

The published layouts have one set of three matrices per expert (`experts.E.gate_proj.weight` and so on, in Mixtral
`experts.E.w1.weight`); transformers holds them fused while it runs, exactly as `training.model` does, and splits them
again when it saves.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
)

from training.checkpoint import load_checkpoint
from training.data import END_OF_TEXT
from training.model import ModelConfig, MoeModel

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ 'Answer:' + ('' if message['content'].startswith(' ') else ' ') + message['content'] + eos_token }}"
    "{% elif message['role'] == 'user' %}"
    "{{ message['content'] if 'Question:' in message['content'] else 'Question: ' + message['content'] }}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)
"""A question is put as in the training text; facts may stand before the word `Question:` inside a user message."""


SAME_NAMES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts_per_tok",
    "max_position_embeddings",
    "rms_norm_eps",
)
"""Fields of `ModelConfig` that both configs of transformers call the same."""


def transformers_config(config: ModelConfig, end_id: int = 0) -> PretrainedConfig:
    """The `MixtralConfig` or `Qwen2MoeConfig` with the sizes of `config`."""
    common = {name: getattr(config, name) for name in SAME_NAMES} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
    }
    if config.is_mixtral:
        return MixtralConfig(
            **common, num_local_experts=config.num_experts, intermediate_size=config.moe_intermediate_size
        )
    return Qwen2MoeConfig(
        **common,
        num_experts=config.num_experts,
        moe_intermediate_size=config.moe_intermediate_size,
        intermediate_size=config.shared_expert_intermediate_size,
        shared_expert_intermediate_size=config.shared_expert_intermediate_size,
        norm_topk_prob=config.norm_topk_prob,
        qkv_bias=config.attention_bias,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
    )


def config_from_transformers(theirs: PretrainedConfig) -> ModelConfig:
    """The opposite of `transformers_config`."""
    common = {name: getattr(theirs, name) for name in SAME_NAMES}
    common["rope_theta"] = float(theirs.rope_parameters["rope_theta"])
    if theirs.model_type == "mixtral":
        return ModelConfig(
            **common,
            num_experts=theirs.num_local_experts,
            moe_intermediate_size=theirs.intermediate_size,
            shared_expert_intermediate_size=0,
            attention_bias=False,
        )
    return ModelConfig(
        **common,
        num_experts=theirs.num_experts,
        moe_intermediate_size=theirs.moe_intermediate_size,
        shared_expert_intermediate_size=theirs.shared_expert_intermediate_size,
        norm_topk_prob=theirs.norm_topk_prob,
        attention_bias=theirs.qkv_bias,
    )


def to_transformers_name(name: str) -> str:
    """The name a parameter of `MoeModel` has in transformers while it runs."""
    name = name.replace("mlp.gate_up_proj", "mlp.experts.gate_up_proj")
    if name.endswith("mlp.down_proj"):
        name = name.replace("mlp.down_proj", "mlp.experts.down_proj")
    return f"model.{name}"


def to_transformers(model: MoeModel, end_id: int = 0) -> PreTrainedModel:
    """A transformers model with a copy of the same weights, in their dtype."""
    twin = AutoModelForCausalLM.from_config(transformers_config(model.config, end_id))
    state = {to_transformers_name(name): tensor for name, tensor in model.state_dict().items()}
    missing, unexpected = twin.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"the layouts differ: missing {missing}, unexpected {unexpected}")
    twin.tie_weights()
    return twin.eval()


def from_transformers(folder: Path, backend: str = "routed") -> MoeModel:
    """The exported model as a float32 `MoeModel`, for fast evaluation on a CPU."""
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = MoeModel(config_from_transformers(twin.config), backend)
    state = twin.state_dict()
    model.load_state_dict({name: state[to_transformers_name(name)] for name in model.state_dict()})
    return model.eval()


def make_tokenizer(path: Path, max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer of the run with its special tokens and chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(path)),
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def name_tokenizer_class(path: Path) -> None:
    """Write the tokenizer's class under the name that transformers 4 and 5 both know."""
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")


def publish(staged: Path, folder: Path) -> None:
    """Move complete files into `folder`, readable by all, each by an atomic rename, the weights last."""
    for path in sorted(staged.iterdir(), key=lambda path: path.suffix == ".safetensors"):
        path.chmod(0o644)
        path.replace(folder / path.name)


def export_run(run: Path, folder: Path) -> None:
    """Write the newest checkpoint of `run` as a bf16 transformers checkpoint with its tokenizer into `folder`."""
    state = load_checkpoint(run / "checkpoint.pt")
    if state is None:
        raise FileNotFoundError(f"{run} holds no checkpoint yet: train first")
    model = MoeModel(ModelConfig(**state["model_config"]))
    model.load_state_dict(state["model"])
    tokenizer = make_tokenizer(run / "tokenizer.json", model.config.max_position_embeddings)
    twin = to_transformers(model, tokenizer.eos_token_id).bfloat16()
    twin.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
    )
    folder.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".export-"))
    try:
        twin.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        name_tokenizer_class(staged / "tokenizer_config.json")
        publish(staged, folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def main() -> None:
    """Export a run from the command line."""
    parser = argparse.ArgumentParser(description="Export the newest checkpoint of a run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    export_run(arguments.run, arguments.folder)


if __name__ == "__main__":
    main()
