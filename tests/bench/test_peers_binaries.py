"""Programs that are measured beside ours: their command lines, and what is read in their output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.peers import binaries
from bench.peers.binaries import BinaryError
from bench.peers.engines import BIGMOE_VARIABLE, ENGINES, IK_VARIABLE, Setup
from bench.peers.process import Chunk, Finished
from bench.peers.shape import GgufShape
from bench.peers.worker import Workload

MIB = 1 << 20
GGUF = Path("model.gguf")
WORK = Workload(GGUF, vocabulary=4096, prompts=(128, 16), new_tokens=3, seed=5, threads=2)
TEXTS = {16: " sixteen words", 128: " more words"}
SHAPE = GgufShape(
    vocabulary=4096, experts=768, experts_per_token=96, all_expert_bytes=2000 * MIB, embedding_bytes=100 * MIB,
    dense_bytes=300 * MIB, key_value_bytes=24576,
)  # fmt: skip

TIMES = """\
llama_print_timings:        load time =    1250.50 ms
llama_print_timings:      sample time =      99.00 ms /     4 runs   (   24.75 ms per token,    40.40 tokens per second)
llama_print_timings: prompt eval time =     {prompt:.2f} ms /   {length} tokens (    1.00 ms per token,  1000.00 tokens per second)
llama_print_timings:        eval time =     120.00 ms /     3 runs   (   40.00 ms per token,    25.00 tokens per second)
llama_print_timings:       total time =    1500.00 ms /   131 tokens
"""  # noqa: E501


# --- which program ----------------------------------------------------------------------------------------------------


def test_program_is_named_by_a_variable_for_each_instruction_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    native, avx2 = tmp_path / "native", tmp_path / "avx2"
    for file in (native, avx2):
        file.touch(0o755)
    monkeypatch.setenv("SMOE_BENCH_X", str(native))
    monkeypatch.setenv("SMOE_BENCH_X_AVX2", str(avx2))
    assert binaries.binary("SMOE_BENCH_X", "native") == str(native)
    assert binaries.binary("SMOE_BENCH_X", "avx2") == str(avx2)


def test_missing_program_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SMOE_BENCH_X_AVX2", raising=False)
    with pytest.raises(BinaryError, match="SMOE_BENCH_X_AVX2 is not set"):
        binaries.binary("SMOE_BENCH_X", "avx2")
    (tmp_path / "text").touch(0o644)
    monkeypatch.setenv("SMOE_BENCH_X", str(tmp_path / "absent"))
    with pytest.raises(BinaryError, match="no program"):
        binaries.binary("SMOE_BENCH_X", "native")


# --- command lines ----------------------------------------------------------------------------------------------------


def test_cli_has_a_process_for_each_prompt_and_decodes_after_the_longest() -> None:
    short, long = binaries.cli_commands("llama-cli", GGUF, WORK, TEXTS, ["-rtr"])
    assert short.words[-4:] == ["-n", "1", "-p", TEXTS[16]]
    assert long.words[-4:] == ["-n", "4", "-p", TEXTS[128]]  # the prompt's own token and three more
    assert short.words[:-4] == long.words[:-4]
    joined = " ".join(long.words)
    assert "-t 2 -c 195 --seed 5" in joined and "-rtr" in long.words
    assert "--temp 1 --top-k 40 --top-p 1" in joined and "--ignore-eos" in long.words


def test_a_prompt_that_is_too_long_for_an_argument_is_read_as_a_file() -> None:
    """Linux refuses to start a program with an argument of more than 128 KiB."""
    text = "word " * 30_000
    short, long = binaries.cli_commands("llama-cli", GGUF, WORK, TEXTS | {128: text}, [])
    assert long.words[-2:] == ["-f", "/dev/stdin"] and long.standard_input == text
    assert short.words[-2] == "-p" and not short.standard_input


def test_bigmoe_is_asked_for_a_warm_up_every_prompt_and_the_tokens_after_the_longest() -> None:
    command = binaries.bigmoe_command("bmoe-cli", GGUF, SHAPE, WORK, TEXTS, " warm", 2048 * MIB)
    *asked, last = [json.loads(line) for line in command.standard_input.splitlines()]
    assert [(each["prompt"], each["n_predict"]) for each in asked] == [(" warm", 1), (TEXTS[16], 1), (TEXTS[128], 3)]
    assert all(each["clear_kv"] for each in asked) and last == {"cmd": "close"}
    joined = " ".join(command.words)
    assert "--moe-stream" in joined and "--overlap" in joined and "--temp 1 --top-k 40 --top-p 1" in joined
    assert "-c 195 " in joined and "--ubatch 195 " in joined


def test_bigmoe_has_the_room_that_nothing_else_takes() -> None:
    room = 2048 * MIB - 400 * MIB - 224 * 24576 - 330 * MIB
    assert binaries.bigmoe_cache_mib(SHAPE, 224, 2048 * MIB) == room // MIB
    assert binaries.bigmoe_cache_mib(SHAPE, 224, None) == 2000  # all experts
    assert binaries.bigmoe_cache_mib(SHAPE, 224, 512 * MIB) > 0


def test_programs_warm_up_only_if_there_is_a_warm_up_prompt() -> None:
    for tokens, has_own in ((16, True), (0, False)):
        commands = binaries.cli_commands("llama-cli", GGUF, replace(WORK, warm_up=tokens), TEXTS, [])
        assert all(("--no-warmup" not in command.words) == has_own for command in commands)


def test_engines_read_experts_ahead_below_memory_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.touch(0o755)
    monkeypatch.setenv(IK_VARIABLE, str(program))
    monkeypatch.setenv(BIGMOE_VARIABLE, str(program))
    monkeypatch.setattr("bench.peers.engines.prompt_texts", lambda gguf, workload: TEXTS)
    monkeypatch.setattr("bench.peers.engines.warmup_text", lambda gguf, workload: " warm")
    monkeypatch.setattr("bench.peers.engines.read_gguf_shape", lambda gguf: SHAPE)
    setup = Setup(GGUF, GGUF, "python", tmp_path)
    assert "--prefetch-experts" in ENGINES["ik-llama.cpp"].commands(setup, WORK, 1 << 31)[0].words
    assert "--prefetch-experts" not in ENGINES["ik-llama.cpp"].commands(setup, WORK, None)[0].words
    assert "--no-mmap" in ENGINES["ik-llama.cpp"].commands(setup, WORK, None)[0].words
    assert "--no-mmap" not in ENGINES["ik-llama.cpp"].commands(setup, WORK, 1 << 31)[0].words
    assert "-rtr" in ENGINES["ik-llama.cpp-repacked"].commands(setup, WORK, None)[0].words
    (command,) = ENGINES["bigmoe"].commands(setup, WORK, None)
    assert command.words[command.words.index("--cache-mb") + 1] == "2000"


# --- what llama-cli prints --------------------------------------------------------------------------------------------


def cli_process(length: int, prompt_ms: float) -> Finished:
    """What a run prints: text on one stream, times on the other."""
    chunks = (
        Chunk("\n", 400, {"VmHWM": 1}),
        Chunk(" first", 1000, {"VmHWM": 2}),
        Chunk(" more", 1500, {"VmHWM": 3, "RssAnon": 1}),
        Chunk("", 1900),
    )
    return Finished(0, chunks, "loading ...\n" + TIMES.format(prompt=prompt_ms, length=length))


def test_times_of_the_cli_are_read() -> None:
    found = binaries.read_cli([cli_process(16, 50), cli_process(128, 400)], WORK)
    assert found.ttft_seconds == {"16": 0.05, "128": 0.4}
    assert found.decode_seconds == pytest.approx([0.04] * 3)


IK_TIMES = """\
main: prompt eval time =     323.94 ms /   {length} tokens (   23.14 ms per token,    43.22 tokens per second)
main:        eval time =      90.00 ms /     4 tokens (   22.50 ms per token,    44.44 tokens per second)
main:       total time =     413.94 ms /    18 tokens
"""


def test_token_of_the_prompt_is_no_decoded_one() -> None:
    """ik_llama.cpp divides the time of three runs by four tokens."""
    processes = [Finished(0, (Chunk("", 0),), IK_TIMES.format(length=length)) for length in (16, 128)]
    found = binaries.read_cli(processes, WORK)
    assert found.ttft_seconds == {"16": 0.32394, "128": 0.32394}
    assert found.decode_seconds == pytest.approx([0.03] * 3)


def test_bytes_from_the_first_token_on_are_the_decoding_ones() -> None:
    found = binaries.read_cli([cli_process(16, 50), cli_process(128, 400)], WORK)
    assert found.disk_bytes == {"load and prompt": 1000, "decode": 900}
    assert found.memory_bytes == {"VmHWM": 3, "RssAnon": 1}
    assert found.resident_expert_bytes is None


def test_prompt_of_another_length_is_refused() -> None:
    with pytest.raises(BinaryError, match="a prompt of 128 took 131 tokens"):
        binaries.read_cli([cli_process(16, 50), cli_process(131, 400)], WORK)


def test_output_without_times_is_refused() -> None:
    silent = Finished(0, (Chunk("", 0),), "loading ...\n")
    with pytest.raises(BinaryError, match="no line"):
        binaries.read_cli([silent, silent], WORK)


# --- what bmoe-cli prints ---------------------------------------------------------------------------------------------


def answer(number: int, length: int, tokens: int, first_ms: float = 70.0) -> str:
    lines = [f'BMOE_BEGIN {{"id":{number}}}']
    for step in range(tokens):
        lines.append('BMOE_LOAD {"mb":1.00,"ms":2.0}')
        progress = {"step": step + 1, "steps": tokens, "wall_ms": first_ms + 10 * step, "read_mb": 2.5, "majflt": 0}
        lines.append(f"BMOE_PROGRESS {json.dumps(progress)}")
    done = {"id": number, "tokens": tokens, "prefill_s": length / 100, "n_prompt": length, "cache_resident_mib": 900}
    lines.append(f"BMOE_DONE {json.dumps({**done, 'text': 'BMOE_DONE of a text'})}")
    return "\n".join(lines) + "\n"


def session(*answers: str) -> Finished:
    output = 'BMOE_READY {"load_s":4.5,"arch":"qwen3moe"}\n' + "".join(answers)
    return Finished(0, (Chunk(output, 5, {"VmHWM": 9}), Chunk("", 5)), "")


def test_session_is_read() -> None:
    process = session(answer(0, 16, 1), answer(1, 16, 1), answer(2, 128, 3))
    found = binaries.read_bigmoe([process], WORK)
    assert found.ttft_seconds == {"16": 0.16, "128": 1.28}
    assert found.decode_seconds == pytest.approx([0.07, 0.08, 0.09])
    assert (found.load_seconds, found.warmup_seconds) == (4.5, 0.16)
    assert found.disk_bytes == {"decode": int(7.5 * MIB)}
    assert found.resident_expert_bytes == 900 * MIB
    assert found.memory_bytes == {"VmHWM": 9}


def test_session_without_a_warm_up_prompt_is_read() -> None:
    process = session(answer(0, 16, 1), answer(1, 128, 3))
    found = binaries.read_bigmoe([process], replace(WORK, warm_up=0))
    assert found.ttft_seconds == {"16": 0.16, "128": 1.28}
    assert found.warmup_seconds == 0


def test_session_that_ended_early_is_refused() -> None:
    with pytest.raises(BinaryError, match="2 of 3"):
        binaries.read_bigmoe([session(answer(0, 16, 1), answer(1, 16, 1))], WORK)


def test_session_that_stopped_at_an_end_token_is_refused() -> None:
    with pytest.raises(BinaryError, match="decoding took 2 tokens, not 3"):
        binaries.read_bigmoe([session(answer(0, 16, 1), answer(1, 16, 1), answer(2, 128, 2))], WORK)
