from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import smoe
from smoe.cli import generate as command
from smoe.cli.options import EngineOptions
from smoe.config import SETTINGS
from smoe.generation import generate as generation
from smoe.presets import configure
from tests import zoo
from tests.forked import Forked

FIELDS = {
    "text",
    "token_ids",
    "prompt_tokens",
    "new_tokens",
    "ttft_seconds",
    "tpot_seconds",
    "tokens_per_second",
    "hit_ratio",
    "bytes_read_per_token",
    "peak_memory_bytes",
    "memory_budget_bytes",
    "floor_seconds_per_token",
    "floor_share",
}


def test_json_is_all_there_is_on_stdout(run, checkpoint):
    ran = run("generate", checkpoint, "--memory", "4MiB", "-p", "Hello", "--max-new-tokens", 12, "--json")
    value = ran.json
    assert ran.code == 0 and value.keys() >= FIELDS
    assert value["prompt_tokens"] == 5 and value["new_tokens"] == len(value["token_ids"]) <= 12
    assert value["tpot_seconds"].keys() == {"median", "p95"}
    assert value["memory_budget_bytes"] == 4 << 20 >= value["peak_memory_bytes"]
    assert value["floor_share"] > 0 and value["floor_seconds_per_token"] > 0
    assert abs(sum(value["time_shares"].values()) - 1) < 1e-6


def test_the_forecast_stands_beside_the_run_and_learns_from_it(run, checkpoint):
    """From the machine's rates first, of which no figure is shown, then from what the first run has shown; a short run
    shows nothing."""
    asked = ("generate", checkpoint, "--memory", "4MiB", "-p", "Hello", "--max-new-tokens")
    first, second = (run(*asked, 40, "--json").json for _ in range(2))
    assert first["new_tokens"] > 17, "or there is nothing to learn from"
    assert first["forecast"]["is_calibrated"] is False and first["forecast"]["seconds_per_token"] > 0
    assert second["forecast"]["is_calibrated"] is True and second["text"] == first["text"]
    assert "by the times of earlier runs" in run(*asked, 40).err
    assert run(*asked, 8, "--json").json["forecast"] is None
    assert "\nforecast " in run(*asked, 40, "--set", "direct_io=on").err, "read in another way"
    assert "\nforecast " not in run(*asked, 40, "--kernels", "torch").err, "no run of these kernels has been measured"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), None),
        (("--kernels", "torch"), "torch computed all layers (--kernels torch)"),
        (("--dtype", "float32"), "torch computed the experts (--dtype float32)"),
        (("--kernels", "torch", "--reproducible"), "torch computed all layers (--kernels torch, --reproducible)"),
        (
            ("--kernels", "torch", "--activations", "dtype"),
            "torch computed all layers (--kernels torch, --activations dtype)",
        ),
    ],
)
def test_the_summary_names_an_arithmetic_that_was_chosen(run, checkpoint, options, line):
    """On every machine, as no kernel of smoe runs. The default has no options to name, and torch alone has no kernels
    of smoe."""
    err = run("generate", checkpoint, "--memory", "4MiB", "-p", "Hello", "--max-new-tokens", 4, *options).err
    found = [each.removeprefix("arithmetic").strip() for each in err.splitlines() if each.startswith("arithmetic ")]
    if line is not None:
        assert found == [line]
    assert line is not None or all("--" not in each or "--kernels torch gives" in each for each in found)


@pytest.mark.parametrize("options", [("--reproducible",), ("--kernels", "native"), ("--activations", "dtype")])
def test_the_summary_names_the_kernels_that_ran(run, checkpoint, options):
    asked = ("generate", checkpoint, "--memory", "4MiB", "-p", "Hello", "--max-new-tokens", 4, *options)
    err, ran = run(*asked).err, run(*asked, "--json").json["arithmetic"]
    (line,) = [each for each in err.splitlines() if each.startswith("arithmetic ")]
    assert ("torch computed the experts" in line) is (ran == "torch") and f"({' '.join(options)})" in line
    assert ("smoe's kernels" in line) is (ran != "torch")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--alpha", 0.3), "--alpha makes"),
        (("--alpha", 0.3, "--skip-threshold", 0.9), "--alpha and --skip-threshold make"),
        ((), None),
        (("--alpha", 0), None),
    ],
)
def test_lossy_options_beside_the_preset_exact_are_warned_of(run, checkpoint, options, named):
    """The preset is as typed, and not the one that the option implies: would catch the cache of --preset smoe."""
    asked = ("generate", checkpoint, "--memory", "4MiB", "-p", "x", "--max-new-tokens", 2, *options)
    typed, implied = run(*asked, "--preset", "exact"), run(*asked)
    assert typed.code == implied.code == 0 and "no longer exact" not in implied.err
    words = " ".join(typed.err.split())
    assert ("no longer exact, although --preset exact is given" in words) is (named is not None)
    assert named is None or f"warning: {named} this run lossy" in words


@pytest.mark.parametrize(
    ("given", "eviction", "implied"),
    [
        ({"alpha": 0.3}, "score", "smoe"),
        ({"low_precision": "int4"}, "multidimensional", "hobbit"),
        ({"alpha": 0.3, "low_precision": "int4"}, "multidimensional", "hobbit"),
        ({"low_precision": "int4", "max_perplexity_increase": "1%"}, "auto", "balanced"),
        ({"alpha": 0.0}, "auto", "exact"),
    ],
)
def test_an_option_implies_the_preset_that_its_setting_declares(given, eviction, implied):
    values = {name: SETTINGS[name].allowed.parse(name, value) for name, value in given.items()}
    config = EngineOptions(**given).config()
    assert config.eviction == eviction and config == configure(implied, **values, max_sequences=1)
    assert all(f"it implies the preset {each.implies}." in each.help for each in SETTINGS.values() if each.implies)


def test_an_interrupted_run_ends_without_a_comparison(run, checkpoint, monkeypatch):
    """Would catch a second of simulation after Ctrl-C."""
    generate = generation.generate
    monkeypatch.setattr(generation, "generate", lambda *asked: replace(generate(*asked), was_interrupted=True))
    monkeypatch.setattr("smoe.report.hindsight.look_back", lambda *asked: pytest.fail("the run was compared"))
    ran = run("generate", checkpoint, "--memory", "4MiB", "-p", "Hello", "--max-new-tokens", 40)
    assert ran.code == 130 and "per token" in ran.err and "forecast" not in ran.err


@pytest.mark.parametrize(("waited", "is_mentioned"), [(1e9, True), (0.0, False), (None, False)])
def test_a_busy_machine_is_mentioned(run, checkpoint, monkeypatch, waited, is_mentioned):
    seconds = iter((0.0, waited))
    monkeypatch.setattr("smoe.generation.generate.waited_seconds", lambda: next(seconds))
    ran = run("generate", checkpoint, "--memory", "4MiB", "-p", "Hello", "--max-new-tokens", 4)
    assert ("this run waited 100% of its time for a core" in ran.err) is is_mentioned


def test_an_emulated_device_is_labelled(run, checkpoint):
    asked = ("generate", checkpoint, "--memory", "3600KiB", "-p", "Hello", "--max-new-tokens", 8)
    bench = ("--device", "emulated", "--profile", "rtx-4060-ti", "--balance", "optimal", "--prefetch", "look-ahead")
    ran = run(*asked, *bench, "--json")
    assert ran.json["emulated"]["profile"] == "rtx-4060-ti" and ran.json["emulated"]["dilation"] >= 1
    plain = run(*asked, "--json").json
    assert plain["emulated"] is None and ran.json["text"] == plain["text"]
    assert "no claim about that device" in run(*asked, *bench).err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "emulated", "--profile", "rtx-9090"), "rtx-a6000"),
        (("--device", "cpu", "--balance", "optimal"), "in addition to the CPU"),
        (("--balance", "fair"), "choose one of"),
        (("--profile", "rtx-a6000"), "--device emulated"),
        (("--preset", "static"), "part of a preset"),
    ],
)
def test_a_device_that_cannot_be_is_refused(run, checkpoint, options, words):
    ran = run("generate", checkpoint, "-p", "Hello", *options)
    assert ran.code == 2 and words in " ".join(ran.err.split())


def test_text_on_stdout_and_the_summary_on_stderr(run, checkpoint):
    asked = ("generate", checkpoint, "--memory", "3600KiB", "-p", "Hello", "--max-new-tokens", 12)
    text = run(*asked, "--json").json["text"]
    ran = run(*asked)
    assert (ran.code, ran.out) == (0, text + "\n")
    for word in ("first token", "per token", "were in memory", "of the budget of", "hardware limit", "time went to"):
        assert word in ran.err


def test_same_words_at_every_budget(run, checkpoint):
    """What the product is about: the budget changes the speed only."""
    texts = {
        run("generate", checkpoint, "--memory", size, "-p", "One", "--max-new-tokens", 16, "--json").json["text"]
        for size in ("3600KiB", "4MiB", "64MiB")
    }
    assert len(texts) == 1


def test_prompts_together_equal_prompts_alone(run, checkpoint):
    asked = ("--memory", "64MiB", "--max-new-tokens", 10)
    both = run("generate", checkpoint, *asked, "-p", "Hi", "-p", "A longer one", "--json").json["sequences"]
    alone = [run("generate", checkpoint, *asked, "-p", prompt, "--json").json for prompt in ("Hi", "A longer one")]
    assert [s["prompt_tokens"] for s in both] == [2, 12]
    assert [s["token_ids"] for s in both] == [a["token_ids"] for a in alone]
    shown = run("generate", checkpoint, *asked, "-p", "Hi", "-p", "A longer one")
    assert shown.out.startswith("[1] ") and "\n[2] " in shown.out


def test_prompt_from_files_and_stdin(run, checkpoint, tmp_path, monkeypatch):
    asked = ("generate", checkpoint, "--memory", "64MiB", "--max-new-tokens", 8, "--json")
    expected = run(*asked, "-p", "From a file").json["token_ids"]
    (tmp_path / "prompt.txt").write_text("From a file")
    assert run(*asked, "--prompt-file", tmp_path / "prompt.txt").json["token_ids"] == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("From a file"))
    assert run(*asked, "--prompt-file", "-").json["token_ids"] == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("From a file"))
    assert run(*asked).json["token_ids"] == expected


def test_stop_ends_the_text_before_the_string(run, checkpoint):
    asked = ("generate", checkpoint, "--memory", "64MiB", "-p", "Hello", "--max-new-tokens", 24)
    text = run(*asked, "--json").json["text"]
    stop = text[6:8]
    ran = run(*asked, "--stop", stop, "--json").json
    assert ran["text"] == text[: text.index(stop)] and ran["finish_reason"] == "stop"
    assert run(*asked, "--stop", stop).out == ran["text"] + "\n"


def test_sampling_repeats_with_its_seed(run, checkpoint):
    def sample(seed: int) -> str:
        asked = (
            "generate",
            checkpoint,
            "--memory",
            "64MiB",
            "-p",
            "Hi",
            "--temperature",
            1.5,
            "--seed",
            seed,
            "--json",
        )
        return run(*asked, "--max-new-tokens", 16).json["text"]

    assert sample(1) == sample(1) != sample(2)


def test_answer_is_clipped_to_the_context_and_says_so(run, checkpoint):
    ran = run("generate", checkpoint, "--memory", "64MiB", "--context", 32, "-p", "x" * 20, "--json")
    assert ran.json["new_tokens"] <= 12
    assert "at most 12 new tokens are generated instead of 128" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "64MiB", "--context", "32", "-p", "x" * 40], "the prompt has 40 tokens"),
        (["--memory", "1MiB", "-p", "x"], "non-expert weights"),
        (["--memory", "plenty", "-p", "x"], "is not a size"),
        (["--memory", "64MiB", "--context", "999999", "-p", "x"], "positions that config.json allows"),
        (["--memory", "64MiB", "--temperature", "-1", "-p", "x"], "--temperature"),
        (["--memory", "64MiB", "--top-p", "0", "-p", "x"], "--top-p"),
        (["--memory", "64MiB", "--max-sequences", "1", "-p", "x", "-p", "y"], "--max-sequences 2"),
        (["--preset", "fastest", "-p", "x"], "--preset is 'fastest'; choose one of: exact"),
        (["--eviction", "belady", "-p", "x"], "eviction"),
        (["--device", "quantum", "-p", "x"], "device"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_refusals_are_one_message_and_exit_code_2(run, checkpoint, arguments, message):
    ran = run("generate", checkpoint, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("error:") == 1 and message in ran.err and "Traceback" not in ran.err


def test_a_budget_that_cannot_work_shows_the_ledger_and_a_hint(run, checkpoint):
    ran = run("generate", checkpoint, "--memory", "1MiB", "-p", "x")
    for entry in ("non-expert weights", "workspace", "KV cache", "staging", "expert slots", "together", "hint:"):
        assert entry in ran.err


def test_no_prompt(run, checkpoint, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    ran = run("generate", checkpoint)
    assert ran.code == 2 and "there is no prompt" in ran.err


@pytest.mark.parametrize(
    ("prompts", "number"), [(("-p", ""), 1), (("-p", "x", "-p", ""), 2), (("--prompt-file", "FILE"), 1)]
)
def test_an_empty_prompt_is_refused_before_the_weights_are_read(
    run, checkpoint, tmp_path, monkeypatch, prompts, number
):
    """Where the model has no token to begin a text with; files that are empty are prompts, too."""

    def load_dense(*_: object) -> None:
        raise AssertionError("reads the weights first")

    monkeypatch.setattr("smoe.models.safetensors_folder.SafetensorsFolder.load_dense", load_dense)
    (tmp_path / "empty.txt").touch()
    prompts = [part.replace("FILE", str(tmp_path / "empty.txt")) for part in prompts]
    ran = run("generate", checkpoint, "--memory", "64MiB", *prompts)
    assert (ran.code, ran.out) == (2, "") and ran.err.count("error:") == 1
    assert f"prompt {number} is empty" in ran.err and "give a text of" in ran.err and "Traceback" not in ran.err
    facts = {"type": "ConfigError", "setting": "prompt", "given": "", "allowed": "text of at least one token"}
    assert run("generate", checkpoint, "--memory", "64MiB", *prompts, "--json").json["error"].items() >= facts.items()


def test_an_empty_prompt_begins_with_the_models_own_token(run, checkpoint, tmp_path):
    """Where it has one."""
    folder = tmp_path / "begins"
    shutil.copytree(checkpoint, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "A"}))
    asked = ("generate", folder, "--memory", "64MiB", "--max-new-tokens", 4, "--json")
    found = run(*asked, "-p", "").json
    assert found["prompt_tokens"] == 1 and found["token_ids"] == run(*asked, "-p", "A").json["token_ids"]


def test_unknown_model(run):
    ran = run("generate", "./no/such/folder", "-p", "x")
    assert ran.code == 2 and "there is no folder" in ran.err


def test_dense_model_is_refused(run, tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64).save_pretrained(tmp_path)
    ran = run("generate", tmp_path, "-p", "x")
    assert ran.code == 2 and "no routed experts" in ran.err and "hint:" in ran.err


def test_debug_keeps_the_traceback(run, checkpoint, monkeypatch):
    from smoe.errors import ConfigError

    with pytest.raises(ConfigError):
        run("generate", checkpoint, "--memory", "plenty", "-p", "x", "--debug")
    del os.environ["SMOE_DEBUG"]  # set by --debug; monkeypatch would bring it back


def test_ctrl_c_keeps_text_and_summary(run, checkpoint, monkeypatch):
    shown: list[str] = []

    def writer(prompts: int):
        def write(row: int, text: str) -> None:
            shown.append(text)
            sys.stdout.write(text)
            if len("".join(shown)) >= 5:
                raise KeyboardInterrupt

        return write

    monkeypatch.setattr(command, "_writer", writer)
    ran = run("generate", checkpoint, "--memory", "64MiB", "-p", "Hello", "--max-new-tokens", 100)
    assert ran.code == 130
    assert ran.out == "".join(shown) + "\n" and len(ran.out) >= 5
    assert "per token" in ran.err and "Traceback" not in ran.err


@pytest.mark.slow
def test_ctrl_c_from_outside(checkpoint: Path):
    """The whole way: a real signal to a real process."""
    source = Path(__file__).parents[2] / "src"
    asked = ["generate", checkpoint, "--memory", "64MiB", "-p", "Hi", "--threads", "1", "--max-new-tokens", "254"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    line = [sys.executable, "-m", "smoe", *asked]
    process = Forked(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode in (130, 0) and time.monotonic() - started < 30
    assert first + out and b"Traceback" not in err and b"first token" in err


def test_nothing_heavy_is_imported_for_help():
    code = (
        "import sys, smoe.cli;"
        "heavy = {'torch', 'transformers', 'numpy', 'psutil', 'huggingface_hub'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    source = Path(zoo.__file__).parents[1] / "src"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(source)}, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["generate", "chat", "plan", "doctor", "bench", "pack", "verify"])
def test_every_command_teaches_by_example(run, name):
    ran = run(name, "--help")
    assert ran.code == 0 and f"smoe {name}" in ran.out and "Examples:" in ran.out


def test_a_budget_that_cannot_work_is_refused_before_any_download(run, checkpoint, monkeypatch):
    def download(model: str, revision: str | None) -> Path:
        raise AssertionError("downloads first")

    monkeypatch.setattr("smoe.models.checkpoint.fetch", download)
    ran = run("generate", checkpoint, "--memory", "1MiB", "-p", "x")
    assert ran.code == 2 and "together" in ran.err


@pytest.mark.parametrize("failure", [OSError("no route"), RuntimeError("a kind that only the network stack knows")])
def test_a_network_that_fails_is_a_model_error(monkeypatch, failure):
    from huggingface_hub import HfApi

    from smoe.errors import ModelError
    from smoe.models import hub
    from smoe.models.files import fetch

    def fail(*args: object, **named: object) -> None:
        raise failure

    monkeypatch.setattr(hub, "unreachable", lambda: None)
    monkeypatch.setattr(HfApi, "model_info", fail)
    with pytest.raises(ModelError, match="check the name, the network"):
        fetch("no-such-owner/no-such-model", None)


def test_the_version_is_told(run):
    ran = run("--version")
    assert (ran.code, ran.out) == (0, f"smoe {smoe.__version__}\n")


def test_an_exact_preset_with_an_alpha_is_refused(run, checkpoint):
    ran = run("generate", checkpoint, "-p", "x", "--preset", "smoe-exact", "--alpha", 0.3)
    assert ran.code == 2 and "smoe-exact is lossless" in ran.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line(checkpoint):
    line = [sys.executable, "-m", "smoe", "plan", str(checkpoint), "--profile", "rtx-4060-ti"]  # measures nothing
    with Path("/dev/full").open("w") as full, Forked(line, stdout=full, stderr=subprocess.PIPE, text=True) as done:
        _, err = done.communicate(timeout=60)
    assert done.returncode == 2 and err.splitlines()[-1] == "error: No space left on device"


def test_waiting_for_a_core_is_no_part_of_an_emulated_clock(run, checkpoint):
    """Would catch `this run waited 100% of its time for a core`: real seconds of emulated ones."""
    device = ("--device", "emulated", "--profile", "rtx-4060-ti", "--memory", "4MiB")
    ran = run("generate", checkpoint, *device, "-p", "Hello", "--max-new-tokens", 2, "--json")
    assert ran.json["waited_for_cores_share"] is None
