from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from smoe.memory.movers import Filler
from tests.toy import save_toy


def test_every_layer_is_equal(run, checkpoint):
    ran = run("verify", checkpoint, "--memory", "64MiB")
    assert ran.code == 0 and ran.out.count("equal") >= 12 and "exact:" in ran.out
    assert "differs" not in ran.out


def test_json(run, checkpoint):
    value = run("verify", checkpoint, "--memory", "64MiB", "--json").json
    assert value["is_exact"] and len(value["layers"]) == 4 * 3
    assert {layer["phase"] for layer in value["layers"]} == {"prefill", "decode"}


@pytest.mark.parametrize("memory", ["3600KiB", "64MiB"])
def test_one_wrong_bit_on_the_way_to_a_slot_is_found(run, checkpoint, monkeypatch, memory):
    """Experts 0 and 1 of layer 0 are what the load-time proof looks at, so the wrong one is elsewhere."""
    fill = Filler.fill

    def flip_one_bit(self, layer, expert, buffer, between):
        came = fill(self, layer, expert, buffer, between)
        if (layer, expert) == (2, 5):
            place = self._store.placement(layer, expert).parts["down_proj"] + 3
            buffer[place] ^= 0x20
        return came

    monkeypatch.setattr(Filler, "fill", flip_one_bit)
    ran = run("verify", checkpoint, "--memory", memory, "--json")
    assert ran.code == 1 and not ran.json["is_exact"]
    assert {layer["layer"] for layer in ran.json["layers"] if not layer["is_equal"]} == {2}
    shown = run("verify", checkpoint, "--memory", memory)
    assert shown.code == 1 and "differs by" in shown.out and "not exact" in shown.out


def test_nan_in_an_expert_is_named(run, tmp_path):
    folder = save_toy(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.experts.4.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    ran = run("verify", folder, "--memory", "64MiB")
    assert ran.code == 2 and "layer   0  prefill    32 tokens     8 of 8 experts  equal" in ran.out
    assert "NaN" in ran.err and "model.layers.1.mlp.experts.4.down_proj.weight" in ran.err
    assert str(folder / "model.safetensors") in ran.err.replace("\n", "")


def test_a_layer_that_does_not_fit_is_refused_with_sizes(run, checkpoint, monkeypatch):
    monkeypatch.setattr("smoe.verify.free_device_bytes", lambda device: (100_000, "available RAM"))
    ran = run("verify", checkpoint, "--memory", "64MiB")
    assert ran.code == 2 and "one layer's experts" in ran.err and "97.7 KiB are free" in ran.err


def test_the_engine_is_left_as_it_was(checkpoint):
    from smoe import from_pretrained
    from smoe.config import configure
    from smoe.verify import reference_of, verify

    model = from_pretrained(checkpoint, memory="64MiB")
    verify(model, reference_of(str(checkpoint), configure(), None), torch.tensor([[1, 2, 3]]), lambda _: None)
    assert "run_experts" not in vars(model.offload)
    model.offload.close()
