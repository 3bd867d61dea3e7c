"""A model that can no longer be used. Would catch a server whose every answer is an error while
it says that it is well."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from smoe import from_pretrained
from smoe.errors import CheckpointError, TransferError
from smoe.generation.request import End, EndReason
from smoe.models.files import DEMO_FOLDER
from smoe.server.model_health import ModelHealth
from tests.server.conftest import Running, eventually, served


@pytest.mark.parametrize("exits", [False, True])
def test_a_model_whose_file_was_written_is_reported(tmp_path: Path, demo_tokenizer: Any, exits: bool) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, folder)
    model = from_pretrained(str(folder), memory="24MiB", context_tokens=256, max_sequences=2)
    with model.offload, served(model, demo_tokenizer, exit_on_failure=exits) as running:
        assert running.chat(max_tokens=4).choices and health(running) == (200, "ok")
        file = folder / "model.safetensors"
        os.utime(file, ns=(0, 0))
        with pytest.raises(openai.InternalServerError) as lost:
            running.chat("A prompt that no expert has seen yet, of a ship and seven dragons", max_tokens=40)
        assert lost.value.code == "model_failed" and str(tmp_path) not in str(lost.value)
        assert isinstance(running.serving.failure, CheckpointError)
        if exits:
            running.thread.join(60)
            assert not running.thread.is_alive()
            return
        assert health(running) == (503, "failed")
        with pytest.raises(openai.InternalServerError) as error:
            running.chat(max_tokens=4)
        assert (error.value.status_code, error.value.code) == (503, "model_failed")


def health(running: Running) -> tuple[int, str]:
    answer = running.http("GET", "/health")
    return answer.status, json.loads(answer.text)["status"]


def test_a_disk_that_fails_again_and_again_is_reported_until_it_recovers() -> None:
    found = ModelHealth()
    for number in range(3):
        assert found.failure is None, number
        found.note(End(EndReason.FAILED, "", TransferError("cannot read")))
        found.note(End(EndReason.CANCELLED, ""))
        found.note(End(EndReason.FAILED, "", ValueError("of another kind")))
    assert isinstance(found.failure, TransferError)
    found.note(End(EndReason.LENGTH, ""))
    assert found.failure is None
    found.note(End(EndReason.FAILED, "", CheckpointError("was written")))
    found.note(End(EndReason.LENGTH, ""))
    assert isinstance(found.failure, CheckpointError), "until it is loaded again"


def test_a_failed_state_is_not_ended_without_being_asked(running: Running) -> None:
    running.serving.health.note(End(EndReason.FAILED, "", TransferError("cannot read")))
    eventually(lambda: running.chat(max_tokens=2).choices is not None)
    assert running.serving.state == "ok"
