"""Data, schedule, optimizer and resumption of a training run, on texts made up here."""

import json
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tokenizers import Tokenizer

from training import data as training_data
from training.checkpoint import load_checkpoint, save_checkpoint
from training.evaluate import normalise
from training.export import config_from_transformers, export_run
from training.model import ModelConfig
from training.optimizer import orthogonalise
from training.schedule import Schedule, parse_deadline
from training.threads import CpuTimes, read_cpu_times, spare_threads
from training.train import StopRequest, TrainConfig, Trainer, run

QUESTION = "Tom has {} pears. Ann has {} pears.\nQuestion: How many pears do they have in all?\nAnswer: {}"
TINY = ModelConfig(
    vocab_size=300,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=16,
    max_position_embeddings=32,
)
TINY_MIXTRAL = ModelConfig(**(TINY.to_dict() | {"shared_expert_intermediate_size": 0, "attention_bias": False}))
CONFIG = TrainConfig(rows=4, seq_len=32)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A small made-up corpus with every source of the mixture."""
    source = tmp_path_factory.mktemp("shards")
    for name in training_data.MIXTURE:
        with lzma.open(source / f"{name}.jsonl.xz", "wt", encoding="utf8") as file:
            for i in range(60):
                text = (
                    QUESTION.format(i, i + 1, 2 * i + 1) if name == "synthqa" else f"Once upon a time {name} {i}. " * 3
                )
                file.write(json.dumps({"text": text, "src": name}) + "\n")
    return source


@pytest.fixture(scope="module")
def prepared(shards, tmp_path_factory):
    """The packed windows of the corpus."""
    out = tmp_path_factory.mktemp("run")
    training_data.prepare(shards, out, TINY.vocab_size, CONFIG.seq_len)
    return out


def copy_run(prepared, folder):
    """A fresh run folder with the prepared data."""
    folder.mkdir()
    for path in prepared.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_answers_weigh_more_than_facts(prepared):
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    text = QUESTION.format(3, 4, 7)
    encoding = tokenizer.encode(text)
    weights = training_data.loss_weights("synthqa", text, encoding.offsets)
    heavy = [token for token, weight in zip(encoding.ids, weights[:-1], strict=True) if weight == 200]
    assert tokenizer.decode(heavy) == " 7"
    assert weights[-1] == 10
    assert set(training_data.loss_weights("tinystories", text, encoding.offsets)) == {10}


def test_question_windows_begin_with_a_question(prepared):
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    ids = np.load(prepared / "synthqa.ids.npy")
    assert ids.shape[1] == CONFIG.seq_len + 1
    assert all(tokenizer.decode(row.tolist()).startswith("Tom") for row in ids)


def test_a_model_can_take_the_tokenizer_of_another(shards, prepared, tmp_path):
    other = training_data.train_tokenizer(iter(["Tom has pears and plums. "] * 9), TINY.vocab_size)
    path = tmp_path / "tokenizer.json"
    size = other.get_vocab_size()
    other.save(str(path))
    training_data.prepare(shards, tmp_path / "run", size, CONFIG.seq_len, tokenizer_source=path)
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == path.read_bytes()
    ids = np.load(tmp_path / "run" / "synthqa.ids.npy")
    assert other.decode(ids[0].tolist()).startswith("Tom")
    with pytest.raises(ValueError, match=f"has {size} tokens, the model {size + 1}"):
        training_data.prepare(shards, tmp_path / "refused", size + 1, CONFIG.seq_len, tokenizer_source=path)


def test_sampler_resumes_and_visits_every_window(prepared):
    sampler = training_data.Sampler(prepared, 0, {"tinystories": 1.0})
    count = len(sampler.ids["tinystories"])
    seen = {sampler.batch(1)[0].tobytes() for _ in range(count)}
    assert len(seen) == len({row.astype(np.int64).tobytes() for row in sampler.ids["tinystories"]})
    sampler = training_data.Sampler(prepared, 0)
    sampler.batch(5)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = [sampler.batch(3) for _ in range(4)]
    other = training_data.Sampler(prepared, 1)
    other.load_state_dict(state)
    for ids, weights in expected:
        again = other.batch(3)
        assert np.array_equal(ids, again[0])
        assert np.array_equal(weights, again[1])


def test_resumed_run_is_bit_identical(prepared, tmp_path):
    whole = Trainer(copy_run(prepared, tmp_path / "whole"), TINY, CONFIG)
    run(whole, Schedule(warmup_steps=2, total_steps=6))
    parts = copy_run(prepared, tmp_path / "parts")
    first = Trainer(parts, TINY, CONFIG)
    for step in range(3):
        first.step(Schedule(warmup_steps=2, total_steps=6).scale(step, 0.0))
    first.save()
    (parts / "checkpoint.tmp").write_bytes(b"a write cut short")
    second = Trainer(parts, TINY, CONFIG)
    assert second.resume()
    run(second, Schedule(warmup_steps=2, total_steps=6))
    assert second.steps == whole.steps == 6
    assert second.tokens == 6 * CONFIG.rows * CONFIG.seq_len
    for (name, mine), theirs in zip(second.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_stop_request_saves_and_ends(prepared, tmp_path):
    trainer = Trainer(copy_run(prepared, tmp_path / "run"), TINY, CONFIG)
    trainer.step(1.0)
    stop = StopRequest()
    stop(15, None)
    assert not run(trainer, Schedule(total_steps=9), stop)
    assert load_checkpoint(trainer.checkpoint_path)["steps"] == 1


def test_threads_follow_what_others_leave_free(tmp_path):
    start = CpuTimes(foreign=1000, total=10_000)
    assert spare_threads(start, CpuTimes(1010, 10_200), 2) == 2
    assert spare_threads(start, CpuTimes(1090, 10_200), 2) == 1
    assert spare_threads(start, CpuTimes(1200, 10_200), 2) == 1
    assert spare_threads(start, CpuTimes(1050, 10_200), 8) == 6
    assert spare_threads(start, start, 2) == spare_threads(None, start, 2) == 2
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 20 30 400 5 0 0 0 0 0\ncpu0 1 1 1 1\n")
    times = read_cpu_times(stat)
    assert times.total == 465
    assert times.foreign < 60
    assert read_cpu_times(tmp_path / "none") is None


@pytest.mark.parametrize("config", [TINY, TINY_MIXTRAL])
def test_training_lowers_the_loss_and_exports(prepared, tmp_path, config):
    trainer = Trainer(copy_run(prepared, tmp_path / "run"), config, CONFIG)
    run(trainer, Schedule(warmup_steps=2, total_steps=30))
    records = [json.loads(line) for line in (trainer.folder / "log.jsonl").read_text().splitlines()]
    assert records[-1]["loss"] < records[0]["loss"] - 1
    export_run(trainer.folder, tmp_path / "model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    assert model.dtype == torch.bfloat16
    assert config_from_transformers(model.config) == config
    text = "Once upon a time tinystories 3.\n 12"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who?"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "Question: Who?\nAnswer:"
    assert not list(tmp_path.glob(".export-*"))


def test_checkpoint_of_another_model_is_refused(prepared, tmp_path):
    folder = copy_run(prepared, tmp_path / "run")
    Trainer(folder, TINY, CONFIG).save()
    for other in (ModelConfig(**(TINY.to_dict() | {"num_experts": 8})), TINY_MIXTRAL):
        with pytest.raises(ValueError, match="other sizes"):
            Trainer(folder, other, CONFIG).resume()


def test_checkpoint_from_before_a_setting_existed_has_its_default(prepared, tmp_path):
    trainer = Trainer(copy_run(prepared, tmp_path / "run"), TINY, CONFIG)
    trainer.save()
    state = load_checkpoint(trainer.checkpoint_path)
    assert state["model_config"].pop("attention_bias") == TINY.attention_bias
    save_checkpoint(trainer.checkpoint_path, state)
    assert trainer.resume()


def test_checkpoint_survives_a_failed_write(tmp_path):
    path = tmp_path / "checkpoint.pt"
    assert load_checkpoint(path) is None
    save_checkpoint(path, {"steps": 1})
    with pytest.raises(Exception, match=r"pickle|Can't"):
        save_checkpoint(path, {"steps": lambda: 2})
    assert load_checkpoint(path) == {"steps": 1}


def test_schedule_by_the_clock_reaches_zero_at_the_deadline_after_a_pause():
    schedule = Schedule(warmup_steps=10, decay_share=0.25, start_seconds=1000.0, deadline_seconds=2000.0)
    assert schedule.scale(0, 1000.0) == pytest.approx(0.1)
    assert schedule.scale(50, 1700.0) == 1.0
    assert schedule.scale(51, 1875.0) == pytest.approx(0.5)
    assert schedule.scale(51, 2600.0) == 0.0
    assert not schedule.finished(10**6, 1999.0)
    assert schedule.finished(1, 2000.0)
    with pytest.raises(ValueError, match="either"):
        Schedule()


def test_deadline_is_a_clock_time_or_minutes():
    noon = 86_400 * 100 + 43_200.0
    assert parse_deadline("13:30", noon) == noon + 5400
    assert parse_deadline("11:00", noon) == noon + 23 * 3600
    assert parse_deadline("2.5", noon) == noon + 150
    with pytest.raises(ValueError, match="neither"):
        parse_deadline("soon", noon)


@pytest.mark.parametrize("shape", [(3, 8, 24), (3, 24, 8), (16, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape):
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
    assert 0.6 < values.median() < 1.3
    assert values.max() < 1.3


def test_answers_are_compared_without_articles_and_punctuation():
    assert normalise(" The Kitchen.\nmore") == normalise("kitchen") == "kitchen"
