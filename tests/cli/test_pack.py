from __future__ import annotations

import pytest
import torch

from smoe.bounds import INT8
from smoe.kernels.isa import widest
from smoe.packing import writer
from tests.toy import save_toy


@pytest.fixture
def mixtral(tmp_path):
    """A family whose experts are scattered: gate and up are not neighbours."""
    return save_toy(tmp_path / "model", "mixtral")


def _packed(folder):
    return [path for path in folder.iterdir() if path.name.startswith("experts.")]


def test_packed_model_says_the_same(run, mixtral):
    asked = ("generate", mixtral, "--memory", "64MiB", "-p", "Hello", "--max-new-tokens", 12, "--json")
    before = run(*asked).json["token_ids"]
    ran = run("pack", mixtral)
    assert ran.code == 0 and ran.out.strip() == str(_packed(mixtral)[0])
    assert run(*asked).json["token_ids"] == before
    assert run("verify", mixtral, "--memory", "64MiB").code == 0


def test_a_good_pack_is_left_alone(run, mixtral):
    run("pack", mixtral)
    written = _packed(mixtral)[0].stat().st_mtime_ns
    assert "already packed" in run("pack", mixtral).err
    assert _packed(mixtral)[0].stat().st_mtime_ns == written
    run("pack", mixtral, "--force")
    assert _packed(mixtral)[0].stat().st_mtime_ns != written


def test_for_programs_one_object_says_what_was_packed(run, mixtral):
    """All there is on stdout; a pack that is there already is said in a key."""
    asked = ("pack", mixtral, "--dtype", "bfloat16", "--json")
    found = run(*asked).json
    (path,) = _packed(mixtral)
    (file,) = found.pop("files")
    assert found == {"model": str(mixtral), "dtype": "bfloat16"}
    assert [layer["layer"] for layer in file.pop("layers")] == [0, 1, 2, 3]
    assert file == {
        "file": str(path),
        "contents": "BF16",
        "experts": 4 * 8,
        "bytes": path.stat().st_size,
        "was_packed_before": False,
        "is_calibrated": False,
    }
    again = run(*asked)
    assert again.json["files"][0]["was_packed_before"] and "already packed" not in again.out
    assert not run(*asked, "--force").json["files"][0]["was_packed_before"]


def test_for_programs_an_interrupt_is_an_object(run, mixtral, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_expert", interrupted)
    ran = run("pack", mixtral, "--json")
    assert ran.code == 130 and ran.json["error"]["type"] == "Interrupted"


def test_a_truncated_pack_is_refused_and_packed_again(run, mixtral):
    run("pack", mixtral)
    path = _packed(mixtral)[0]
    path.write_bytes(path.read_bytes()[:-4096])
    ran = run("generate", mixtral, "--memory", "64MiB", "-p", "x")
    assert ran.code == 2 and "truncated" in ran.err
    assert run("pack", mixtral).code == 0
    assert run("generate", mixtral, "--memory", "64MiB", "-p", "x", "--max-new-tokens", 1).code == 0


def test_an_interrupt_can_be_gone_on_from(run, mixtral, monkeypatch):
    whole, calls = writer._expert, []

    def third_is_interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(writer, "_expert", third_is_interrupted)
    ran = run("pack", mixtral)
    assert ran.code == 130 and all("partial" in path.name for path in _packed(mixtral))
    assert run("pack", mixtral).code == 0 and [path.suffix for path in _packed(mixtral)] == [".smoe"]


def test_fewer_bits_from_pack_to_eval(run, mixtral, tmp_path):
    """What a user does: pack, see what it costs, serve it, check it; and is told what is missing."""
    asked = ("generate", mixtral, "--memory", "64MiB", "-p", "Hello", "--max-new-tokens", 4, "--precision", "int4")
    missing = run(*asked)
    assert missing.code == 2 and "with --precision int4 first" in " ".join(missing.err.split())
    ran = run("pack", mixtral, "--precision", "int4, int3, int2")
    assert ran.code == 0 and [line.split(".")[-2] for line in ran.out.split()] == ["int4", "int3", "int2"]
    assert "error of the weights in int4" in ran.err and "layer  3" in ran.err
    assert run(*asked).code == 0
    for precision in ("int4", "int3"):
        assert run("verify", mixtral, "--memory", "64MiB", "--precision", precision).code == 0
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a cat. " * 20)
    priced = run(
        "eval",
        mixtral,
        "--precision",
        "int2",
        "--alphas",
        "0",
        "--memory",
        "64MiB",
        "--text",
        text,
        "--tokens",
        60,
        "--json",
    ).json
    assert [(price["precision"], price["alpha"]) for price in priced["prices"]] == [("auto", 0.0), ("int2", 0.0)]
    assert priced["prices"][1]["kl_nats"] > 0 and priced["precision"] == "int2"


def test_json_has_every_file_and_layer(run, mixtral):
    found = run("pack", mixtral, "--precision", "int8,int4", "--json").json
    assert [each["contents"] for each in found["files"]] == ["int8", "int4"]
    assert all(0 < layer["relative_error"] < 0.1 for each in found["files"] for layer in each["layers"])
    assert not found["files"][0]["was_packed_before"]
    assert run("pack", mixtral, "--precision", "int8", "--json").json["files"][0]["was_packed_before"]


def test_damage_is_seen_and_mended(run, mixtral):
    run("pack", mixtral, "--precision", "int4")
    (path,) = _packed(mixtral)
    whole = path.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    ran = run("verify", mixtral, "--memory", "64MiB", "--precision", "int4")
    assert ran.code == 2 and "no longer has the bytes that smoe pack wrote" in ran.err
    ran = run("pack", mixtral, "--precision", "int4")
    assert ran.code == 0 and "is damaged in layer" in ran.err and path.read_bytes() == whole


@pytest.mark.parametrize("given", ["int8,int5", "int4,", "", ",", "int4,int8, int4", "int4 int2", "auto"])
def test_a_list_of_precisions_that_is_none(run, mixtral, given):
    """A name that there is not, a comma too many, nothing at all, the same twice: said as it was given."""
    ran = run("pack", mixtral, "--precision", given)
    said = f"--precision is {given!r}; it must be one or more of int8, int4, int3, int2, each once, separated by commas"
    assert ran.code == 2 and said in " ".join(ran.err.split()) and _packed(mixtral) == []


@pytest.mark.skipif(widest(INT8) is None, reason="this CPU has no instruction set that kernels are for")
def test_what_activations_in_8_bits_add(run, tmp_path):
    """The model itself, its experts in fewer bits, then the activations too: each choice has a price of its own."""
    folder = save_toy(tmp_path / "model", "mixtral", dtype=torch.bfloat16)
    run("pack", folder, "--precision", "int4")
    asked = (folder, "--memory", "64MiB", "--precision", "int4", "--activations", "int8")
    ran = run("generate", *asked, "-p", "Hello", "--max-new-tokens", 4)
    assert ran.code == 0 and "experts in int4, activations in int8 (smoe eval measures" in " ".join(ran.err.split())
    refused = run("verify", *asked)
    assert refused.code == 2 and "--activations int8 rounds numbers that the library does not" in " ".join(
        refused.err.split()
    )
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("Once upon a time there was a cat. " * 20)
    without_memory = (folder, *asked[3:])  # all of them then take what the model itself took
    priced = run("eval", *without_memory, "--alphas", "0", "--text", text, "--tokens", 60, "--out", out, "--json")
    prices = priced.json["prices"]
    settings = [(price["precision"], price["activations"]) for price in prices]
    assert settings == [("auto", "bf16"), ("int4", "bf16"), ("int4", "int8")]
    assert 0 == prices[0]["kl_nats"] < prices[1]["kl_nats"] != prices[2]["kl_nats"] > 0
    assert "int4 x int8 0" in priced.err


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "read.txt"
    path.write_text("It is a truth universally acknowledged, that a cat in possession of a mouse... " * 30)
    return path


def test_calibration_from_text_to_verify(run, mixtral, text):
    """A file says what it was made for, and is made again for another text only."""
    run("pack", mixtral, "--precision", "int4")
    plain = _packed(mixtral)[0].read_bytes()
    asked = ("pack", mixtral, "--precision", "int4", "--calibration-text", text, "--calibration-tokens")
    ran = run(*asked, 1500)
    assert ran.code == 0 and "already packed" not in ran.err
    calibrated = _packed(mixtral)[0].read_bytes()
    assert calibrated != plain and run("verify", mixtral, "--memory", "64MiB", "--precision", "int4").code == 0
    assert "already packed" in run(*asked, 1500).err
    assert "already packed" in run("pack", mixtral, "--precision", "int4").err, "nothing was said of a text"
    assert "already packed" not in run(*asked, 1200).err
    assert not [path for path in mixtral.iterdir() if "calibration" in path.name]


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe", "deepseek_v3"])
def test_calibration_of_other_families(run, tmp_path, family, text):
    folder = save_toy(tmp_path / "model", family)
    ran = run("pack", folder, "--precision", "int2", "--calibration-text", text)
    assert ran.code == 0, ran.err
    assert run("verify", folder, "--memory", "64MiB", "--precision", "int2").code == 0


def test_calibration_that_cannot_be(run, mixtral, text, tmp_path):
    ran = run("pack", mixtral, "--calibration-text", text)
    assert ran.code == 2 and "--precision" in ran.err
    ran = run("pack", mixtral, "--precision", "int4", "--calibration-text", text, "--calibration-tokens", 999)
    assert ran.code == 2 and "999 tokens" in ran.err
    ran = run("pack", mixtral, "--precision", "int4", "--calibration-text", tmp_path / "none.txt")
    assert ran.code == 2 and "none.txt" in ran.err and _packed(mixtral) == []


def test_an_interrupted_pack_goes_on_for_the_same_text_only(run, mixtral, text, monkeypatch):
    whole, calls = writer._expert, []

    def twentieth_is_interrupted(*args):
        calls.append(args)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return whole(*args)

    asked = ("pack", mixtral, "--precision", "int4", "--calibration-text", text, "--calibration-tokens")
    for again, tokens in ((32 - 16, 1500), (32, 1200)):
        calls.clear()
        monkeypatch.setattr(writer, "_expert", twentieth_is_interrupted)
        assert run(*asked, 1500, "--force").code == 130
        calls.clear()
        monkeypatch.setattr(writer, "_expert", lambda *args: calls.append(args) or whole(*args))
        assert run(*asked, tokens, "--force").code == 0 and len(calls) == again


def test_room_for_all_is_looked_for_before_the_first(run, mixtral, monkeypatch):
    """Two files are asked for, and one would fit."""
    spare = 2**30
    one = 4 * 8 * 4096 * 2 + 4096
    free = spare + int(1.5 * one)
    monkeypatch.setattr("shutil.disk_usage", lambda where: type("Usage", (), {"free": free})())
    ran = run("pack", mixtral, "--precision", "int8,int4")
    assert ran.code == 2 and "needs" in ran.err and _packed(mixtral) == []
    assert run("pack", mixtral, "--precision", "int8").code == 0


def test_what_is_no_pack_is_never_overwritten(run, mixtral):
    path = mixtral / "experts.int4.smoe"
    path.write_text("my notes on experts")
    for more in ((), ("--force",)):
        ran = run("pack", mixtral, "--precision", "int8,int4", *more)
        assert ran.code == 2 and "move it away" in ran.err and _packed(mixtral) == [path]
    assert path.read_text() == "my notes on experts"


def test_a_pack_of_other_weights_is_written_again_and_said(run, mixtral):
    run("pack", mixtral, "--precision", "int4")
    weights = mixtral / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    ran = run("pack", mixtral, "--precision", "int4")
    assert ran.code == 0 and "was packed from other weights" in " ".join(ran.err.split())
    assert "already packed" in run("pack", mixtral, "--precision", "int4").err


def test_a_type_has_no_say_in_fewer_bits(run, mixtral):
    ran = run("pack", mixtral, "--precision", "int4", "--dtype", "float32")
    assert ran.code == 2 and "--dtype" in ran.err and "leave out --dtype" in " ".join(ran.err.split())


def test_biases_and_transposed_matrices(run, tmp_path):
    folder = save_toy(tmp_path / "model", "gpt_oss")
    assert run("pack", folder, "--precision", "int4").code == 0
    ran = run("verify", folder, "--memory", "64MiB", "--precision", "int4")
    assert ran.code == 0 and "equal up to rounding:" in ran.out, ran.out


def test_too_little_disk_is_refused_before_writing(run, mixtral, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda where: type("Usage", (), {"free": 1000})())
    ran = run("pack", mixtral)
    assert ran.code == 2 and "needs" in ran.err and "free" in ran.err and _packed(mixtral) == []


def test_where_the_models_folder_cannot_be_written(run, mixtral, monkeypatch, tmp_path):
    """As that of an installed program; root may write anywhere, so the system's answer is made up."""
    monkeypatch.setattr("smoe.models.packed.os.access", lambda path, mode: path != mixtral)
    ran = run("pack", mixtral, "--precision", "int4")
    cache = tmp_path / "cache" / "smoe" / "packs"
    assert ran.code == 0 and not _packed(mixtral) and ran.out.strip().startswith(str(cache))
    asked = ("generate", mixtral, "--memory", "64MiB", "-p", "Hello", "--precision", "int4", "--json")
    assert run(*asked).json["lossy"] == ["experts in int4"]
    assert "already packed" in run("pack", mixtral, "--precision", "int4").err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "model" / "config.json"))
    ran = run("pack", mixtral, "--precision", "int2")
    assert ran.code == 2 and "set XDG_CACHE_HOME to a writable folder" in " ".join(ran.err.split())
