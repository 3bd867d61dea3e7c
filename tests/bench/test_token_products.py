"""The time of each product of a token: jobs in parts give the same bits, and the rival's lines are read.

Would catch a part that runs before the products that it reads, tasks that are left out, an operation of the rival's
counted under another product, and rounding that is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from bench import token_products
from bench.token_products import DividedJobs
from smoe.kernels.spinning_pool import SpinningPool
from tests import gguf_toy, oracle, promised
from tests.runtime.test_preload import wait_for_all

TOKENS = 4
LINES = """
a word of the textGET_ROWS(inp_embd): 17 us
FUSED_RMS_NORM(attn_norm-0): 6 us
quantize(Qcur-0): 3 us
MUL_MAT(Qcur-0): 100 us
MUL_MAT(Kcur-0): 40 us
MUL_MAT(Vcur-0): 39 us
FLASH_ATTN_EXT(fa-0): 159 us
MUL_MAT(attn_out-0): 145 us
MUL_MAT(ffn_moe_logits-0): 15 us
MOE_FUSED_UP_GATE(ffn_moe_gate_par-0): 540 us
MUL_MAT_ID(ffn_moe_up-0): 3 us
MUL_MAT_ID(ffn_moe_down-0): 354 us
MUL_MULTI_ADD(routed_out-0): 6 us
MUL_MAT(result_output): 7920 us
ggml_barrier(...): 1944 us
main: prompt eval time =     296.86 ms /     4 tokens (   74.22 ms per token,    13.47 tokens per second)
main:        eval time =     330.07 ms /     4 tokens (   82.52 ms per token,    12.12 tokens per second)
""".splitlines()


def test_jobs_in_parts_have_the_same_bits(
    tmp_path: Path, open_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    promised.needs_machine_code()
    path = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M", num_experts=32, head_dim=64)[0]
    model = open_model(path, "full", kernels="auto", preload=None, context_tokens=256)
    wait_for_all(model)
    monkeypatch.setattr(SpinningPool, "run_packed", SpinningPool.run_packed)  # put back after the test
    wanted = tokens(model)
    divided = DividedJobs(model)
    divided.stand_in()
    assert all(map(torch.equal, tokens(model), wanted)) and not divided.seconds and divided.jobs > 0
    assert all(map(torch.equal, tokens(model, divided), wanted))
    assert divided.seconds.keys() == set(token_products.GROUPS) - {token_products.WAITING}
    config = model.config
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    of_layer = {
        token_products.QKV: heads,
        token_products.OUTPUT: config.hidden_size,
        token_products.ROUTER: config.num_experts,
        token_products.UP: config.num_experts_per_tok * 2 * config.moe_intermediate_size,
        token_products.DOWN: config.num_experts_per_tok * config.hidden_size,
    }
    wanted_outputs = {name: TOKENS * config.num_hidden_layers * outputs for name, outputs in of_layer.items()}
    wanted_outputs[token_products.HEAD] = TOKENS * config.vocab_size
    assert {name: divided.outputs[name] for name in wanted_outputs} == wanted_outputs


def tokens(model: PreTrainedModel, divided: DividedJobs | None = None) -> list[torch.Tensor]:
    """Logits after each of some tokens, whose jobs are divided, after a prompt, whose jobs are not."""
    cache = model.offload.new_cache()
    model(oracle.PROMPT[:, :8], past_key_values=cache, use_cache=True)
    if divided is not None:
        divided.is_on = True
    return [
        model(one, past_key_values=cache, use_cache=True).logits for one in oracle.PROMPT[:, 8 : 8 + TOKENS].split(1, 1)
    ]


def test_lines_of_the_rival() -> None:
    (found,) = token_products.passes_of(LINES)
    milliseconds = [0.179, 0.159, 0.145, 0.015, 0.543, 0.354, 7.92, 0.017 + 0.006 + 0.006, 1.944]
    assert found == pytest.approx(dict(zip(token_products.GROUPS, milliseconds, strict=True)))
    assert token_products.whole_token(LINES) == pytest.approx(330.07 / 3), "one of the tokens is the prompt's"
