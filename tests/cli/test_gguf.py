"""Commands on a GGUF file: as on a folder, tokenizer and chat template included."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from tests import gguf_toy, zoo

SMALL = ("--memory", "8MiB", "--context", "96")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = zoo.make("qwen2_moe", dtype=torch.bfloat16)
    return gguf_toy.write(tmp_path_factory.mktemp("gguf") / "toy.gguf", model)


def test_plan_reads_the_file(run, path):
    found = run("plan", path, "--json", *SMALL).json
    assert found["model"] == str(path)
    ran = run("plan", path, *SMALL)
    assert ran.code == 0 and "4 layers of 8 experts" in ran.out and "bfloat16" in ran.out


def test_generate_writes_text(run, path):
    ran = run("generate", path, *SMALL, "-p", "Hello", "--max-new-tokens", "8")
    assert ran.code == 0 and ran.out.strip()


def test_chat_uses_the_files_template(run, path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    ran = run("chat", path, *SMALL, "--max-new-tokens", "4")
    assert ran.code == 0, ran.err


def test_verify_compares_every_part(run, path):
    ran = run("verify", path, *SMALL)
    assert ran.code == 0 and "every bit equal" in ran.out + ran.err


def test_record_names_the_trace_after_the_file(run, path, tmp_path):
    ran = run("record", path, *SMALL, "-p", "Hello", "-o", tmp_path)
    assert ran.code == 0 and Path(ran.out.strip()).parent == tmp_path


def test_eval_measures_perplexity(run, path, tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time there was a model. " * 20)
    ran = run("eval", path, *SMALL, "--text", tmp_path / "text.txt", "--alphas", "0")
    assert ran.code == 0, ran.err


def test_pack_says_that_nothing_is_to_be_gathered(run, path):
    ran = run("pack", path)
    assert ran.code == 2 and "nothing to pack" in " ".join(ran.err.split()) and "--precision" in ran.err


def test_a_lower_copy_beside_each_of_two_files(run, tmp_path):
    """Whose packs are told apart by the files' names."""
    for name in ("one", "two"):
        gguf_toy.quantised(tmp_path / f"{name}.gguf", "Q8_0")
        ran = run("pack", tmp_path / f"{name}.gguf", "--precision", "int2")
        assert ran.code == 0 and ran.out.strip() == str(tmp_path / f"{name}.gguf.experts.int2.smoe")
    ran = run("verify", tmp_path / "two.gguf", "--memory", "64MiB", "--context", "96", "--precision", "int2")
    assert ran.code == 0 and "equal up to rounding:" in ran.out, ran.out


def test_a_copy_that_would_save_nothing_is_refused(run, tmp_path):
    gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_0")
    ran = run("pack", tmp_path / "toy.gguf", "--precision", "int4")
    assert (
        ran.code == 2
        and "quantised form in which they are stored" in " ".join(ran.err.split())
        and not list(tmp_path.glob("*.smoe*"))
    )


def test_a_missing_file_is_named_at_once(run, path):
    ran = run("generate", path.with_name("to.gguf"), "-p", "x")
    assert ran.code == 2 and f"did you mean {path}?" in ran.err.replace("\n", "")
