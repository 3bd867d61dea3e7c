"""Turn a training checkpoint into a native transformers checkpoint, and back.

The published layout has one set of three matrices per expert (`experts.E.gate_proj.weight` and so on); transformers
holds them fused while it runs, exactly as `training.model` does, and splits them again when it saves.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2MoeConfig, Qwen2MoeForCausalLM

from training.checkpoint import load_checkpoint
from training.data import END_OF_TEXT
from training.model import DemoModel, ModelConfig

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'Answer: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'user' %}"
    "{{ message['content'] if 'Question:' in message['content'] else 'Question: ' + message['content'] }}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)
"""A question is put as in the training text; facts may stand before the word `Question:` inside a user message."""


def transformers_config(config: ModelConfig, end_id: int = 0) -> Qwen2MoeConfig:
    """The `Qwen2MoeConfig` with the sizes of `config`."""
    return Qwen2MoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.shared_expert_intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_expert_intermediate_size=config.shared_expert_intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        norm_topk_prob=config.norm_topk_prob,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=end_id,
    )


def to_transformers_name(name: str) -> str:
    """The name a parameter of `DemoModel` has in `Qwen2MoeForCausalLM`."""
    name = name.replace("mlp.gate_up_proj", "mlp.experts.gate_up_proj")
    if name.endswith("mlp.down_proj"):
        name = name.replace("mlp.down_proj", "mlp.experts.down_proj")
    return f"model.{name}"


def to_transformers(model: DemoModel, end_id: int = 0) -> Qwen2MoeForCausalLM:
    """A transformers model with a copy of the same weights, in their dtype."""
    twin = Qwen2MoeForCausalLM(transformers_config(model.config, end_id))
    state = {to_transformers_name(name): tensor for name, tensor in model.state_dict().items()}
    missing, unexpected = twin.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"the layouts differ: missing {missing}, unexpected {unexpected}")
    twin.tie_weights()
    return twin.eval()


def from_transformers(folder: Path, backend: str = "routed") -> DemoModel:
    """The exported model as a float32 `DemoModel`, for fast evaluation on a CPU."""
    twin = Qwen2MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = twin.config
    rope = dict(theirs.rope_parameters or {})
    config = ModelConfig(
        **{name: getattr(theirs, name) for name in ModelConfig.__dataclass_fields__ if name != "rope_theta"},
        rope_theta=float(rope["rope_theta"]),
    )
    model = DemoModel(config, backend)
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
    model = DemoModel(ModelConfig(**state["model_config"]))
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
