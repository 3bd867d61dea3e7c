"""Questions: scored by hand, and likelihoods against plain transformers.

Would catch: a choice scored by the tokens of the one before it, a continuation that is scored from the wrong token on,
a cache that keeps a choice, a format that is asked but not known, a question that breaks the run after hours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError, ContextError
from smoe.eval.questions import Question, Questions, Reader, answer, ask, fitting, is_right, read_questions
from smoe.models.files import DEMO_FOLDER
from tests import oracle


class Letters:
    """A tokenizer whose tokens are characters."""

    eos_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1 + ord(c) % 60 for c in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def ids_of(text: str) -> list[int]:
    return Letters()(text)["input_ids"]


def by_transformers(plain: PreTrainedModel, context: str, continuation: str) -> float:
    before, after = ids_of(context), ids_of(continuation)
    with torch.no_grad():
        log_p = plain(torch.tensor([before + after])).logits[0].float().log_softmax(-1)
    return sum(float(log_p[len(before) - 1 + n, token]) for n, token in enumerate(after))


def quiet(_: int) -> None:
    pass


@pytest.fixture
def folder(toy: Callable[..., Path]) -> Path:
    return toy("qwen3_moe")


def test_likelihoods_are_those_of_transformers_whatever_was_read_before(
    folder: Path, open_model: Callable[..., PreTrainedModel]
) -> None:
    model, plain = open_model(folder, "half"), oracle.reference(folder)
    reader = Reader(model, Letters(), quiet)
    pairs = [
        ("once upon", " a time"),
        ("once upon", " a cat"),
        ("once upon", "?"),
        ("once", " upon a"),
        ("twice", " on"),
    ]
    for context, continuation in [*pairs, *reversed(pairs)]:
        nats, _ = reader.likelihood(context, continuation)
        assert nats == pytest.approx(by_transformers(plain, context, continuation), rel=1e-3)


def test_it_says_whether_a_continuation_is_the_greedy_one(
    folder: Path, open_model: Callable[..., PreTrainedModel]
) -> None:
    model = open_model(folder, "half")
    prompt = [5, 17, 40, 3]
    tokens = oracle.greedy(model, torch.tensor([prompt]), 4).tokens[0, len(prompt) :].tolist()
    reader = Reader(model, Letters(), quiet)
    assert reader.likelihood_of(prompt, tokens)[1]
    assert not reader.likelihood_of(prompt, [*tokens[:-1], (tokens[-1] + 1) % 50])[1]


def test_the_likeliest_choice_is_taken(folder: Path, open_model: Callable[..., PreTrainedModel]) -> None:
    """By its sum, by character, or by what follows it."""
    model, plain = open_model(folder, "half"), oracle.reference(folder)
    prompt, choices, suffix = "who sat on the mat?", ("the very big and lazy cat", "a dog", "nobody"), " said so."
    sums = [by_transformers(plain, prompt, f" {choice}") for choice in choices]
    scores = {
        "choice": sums,
        "cloze": [nats / len(choice) for nats, choice in zip(sums, choices, strict=True)],
        "suffix": [by_transformers(plain, f"{prompt} {choice}", suffix) for choice in choices],
    }
    assert len({scores[kind].index(max(scores[kind])) for kind in ("choice", "cloze")}) == 2, "this tests nothing"
    for kind, found in scores.items():
        best = "ABC"[found.index(max(found))]
        given = ("cloze", suffix) if kind == "suffix" else (kind, "")
        right = [ask(model, Letters(), Question(prompt, (x,), given[0], choices, given[1]), quiet) for x in "ABC"]
        assert right == [x == best for x in "ABC"], kind


def test_an_exam_counts_its_tokens(folder: Path, open_model: Callable[..., PreTrainedModel]) -> None:
    counted: list[int] = []
    exam = Questions([Question("one", ("A",), "choice", ("x", "y")), Question("two", ("t",))])
    right = exam(open_model(folder, "half"), Letters(), counted.append)
    assert len(right) == 2 and sum(counted) >= len("one") + len(" x") - 1 + len("two")


@pytest.mark.parametrize(
    ("said", "question", "right"),
    [
        (" The OFFICE.\nand more", Question("?", ("office",)), True),
        ("an office block", Question("?", ("office",)), False),
        ("two", Question("?", ("2", "two")), True),
        ("She has 1,200 in all, so 18.", Question("?", ("18",), "number"), True),
        ("18 at first, then 20", Question("?", ("18",), "number"), False),
        ("-3.50", Question("?", ("-3.5",), "number"), True),
        ("no idea", Question("?", ("18",), "number"), False),
        ("The answer is (B), not A", Question("?", ("B",), "letter"), True),
        ("Because A", Question("?", ("B",), "letter"), False),
        ("选D。", Question("?", ("D",), "letter"), True),
    ],
)
def test_answers_are_scored_as_their_format_says(said: str, question: Question, right: bool) -> None:
    assert is_right(said, question) is right


def lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_questions_without_answers_are_left_out(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "q.jsonl", {"prompt": "a", "answer": None}, {"prompt": "b", "answer": 2, "aliases": ["two"]}
    )
    assert read_questions(path) == [Question("b", ("2", "two"))]
    with pytest.raises(ConfigError, match="no question"):
        read_questions(lines(path, {"prompt": "a", "answer": None}))


def test_choices_without_a_format_are_choices(tmp_path: Path) -> None:
    path = lines(tmp_path / "q.jsonl", {"prompt": "a", "choices": ["x", "y"], "answer": "B"})
    assert read_questions(path) == [Question("a", ("B",), "choice", ("x", "y"))]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"answer": "A"}, "no 'prompt'"),
        ({"prompt": "a", "answer": "1", "format": "code"}, "'code'; those that can be scored: short"),
        ({"prompt": "a", "answer": "C", "choices": ["x", "y"]}, "2 choices and the answer 'C'"),
        ({"prompt": "a", "answer": "x", "format": "choice"}, "0 choices"),
    ],
)
def test_what_cannot_be_scored_is_refused(record: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read_questions(lines(tmp_path / "q.jsonl", record))


def test_what_leaves_no_room_for_an_answer_is_not_asked() -> None:
    short, long = Question("x" * 20, ("a",)), Question("x" * 21, ("a",))
    choice = Question("x" * 20, ("A",), "choice", ("y" * 11, "z"))
    assert fitting([short, long, choice], Letters(), 32) == [short, choice]
    assert fitting([choice], Letters(), 31) == []


def test_a_prompt_is_never_cut_in_silence(folder: Path, open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model(folder, "half")
    room = model.offload.context_tokens
    assert answer(model, Letters(), "x" * (room - 1), 8, ["!"], quiet)
    with pytest.raises(ContextError, match=f"{room} tokens leaves no room for an answer in a context of {room}"):
        answer(model, Letters(), "x" * room, 8, ["!"], quiet)


def test_tasks_of_the_harness(tmp_path: Path, open_model: Callable[..., PreTrainedModel]) -> None:
    """The embedded model answers its own questions, as a task of the harness and as questions of ours."""
    pytest.importorskip("lm_eval")
    from transformers import AutoTokenizer

    from smoe.eval.harness import Harness

    questions = read_questions(None)[:6]
    rows = [
        {"prompt": q.prompt, "choices": [q.answers[0], "xyz"], "target": 0, "said": q.answers[0]} for q in questions
    ]
    lines(tmp_path / "data.jsonl", *rows)
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\ntest_split: test\n"
    common += 'doc_to_text: "{{prompt}}"\n'
    (tmp_path / "a.yaml").write_text(
        f'task: toy_a\n{common}output_type: multiple_choice\ndoc_to_choice: "{{{{choices}}}}"\n'
        'doc_to_target: "{{target}}"\nmetric_list: [{metric: acc}]\n'
    )
    (tmp_path / "b.yaml").write_text(
        f'task: toy_b\n{common}output_type: generate_until\ndoc_to_target: " {{{{said}}}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 12}\n'
        "metric_list: [{metric: exact_match, ignore_punctuation: true}]\n"
    )
    model = open_model(DEMO_FOLDER, 28 * 2**20, context_tokens=256)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    right = Harness(["toy_b", "toy_a"], tmp_path, 5)(model, tokenizer, quiet)
    assert len(right) == 10 and all(right[:5])
    ours = Questions(questions[:5])(model, tokenizer, quiet)
    assert sum(ours) == pytest.approx(sum(right[5:]), abs=1)
    with pytest.raises(ConfigError, match="no task 'nowhere'"):
        Harness(["nowhere"], tmp_path, 5)


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The embedded model with other files about where a text ends; the rest is linked."""
    for path in DEMO_FOLDER.iterdir():
        if path.name not in ("tokenizer_config.json", "generation_config.json", "config.json"):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.fixture(scope="module")
def as_usual() -> tuple[list[Question], list[bool], int]:
    """Some questions, which of them the embedded model answers, and in how many steps."""
    from transformers import AutoTokenizer

    asked, counted = read_questions(None)[:5], list[int]()
    model = oracle.open_model(DEMO_FOLDER, "full", context_tokens=512)
    with model.offload:
        right = Questions(asked)(model, AutoTokenizer.from_pretrained(DEMO_FOLDER), counted.append)
    return asked, right, len(counted)


@pytest.mark.parametrize("ends", [0, [0], [5, 0]], ids=str)
def test_the_generation_config_says_where_an_answer_ends(
    demo: Path,
    open_model: Callable[..., PreTrainedModel],
    as_usual: tuple[list[Question], list[bool], int],
    ends: Any,
) -> None:
    """A tokenizer that names no end token, and a list of them."""
    from transformers import AutoTokenizer

    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        content = json.loads((DEMO_FOLDER / name).read_text())
        content.pop("eos_token", None)
        content.pop("eos_token_id", None)
        (demo / name).write_text(json.dumps(content | ({"eos_token_id": ends} if "generation" in name else {})))
    tokenizer = AutoTokenizer.from_pretrained(demo)
    assert tokenizer.eos_token_id is None
    model = open_model(demo, "full", context_tokens=512)
    count: list[int] = []
    asked, usually_right, steps = as_usual
    right = Questions(asked)(model, tokenizer, count.append)
    assert right == usually_right and any(right)
    assert len(count) == steps, "an answer goes on after its end"
