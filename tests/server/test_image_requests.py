"""Images in requests, against transformers' own image processor and model.

Would catch: an image that is left out or another one's, tokens that differ from those of transformers' processor, files
that a request may not name, and an image that stops the server.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedModel
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from smoe.models.image_processor import ImageProcessor
from tests import image_toys, oracle
from tests.image_toys import IMAGE, data_url
from tests.server.conftest import Running, served

FIRST, SECOND = image_toys.file(1), image_toys.file(2)
IN_BASE64 = base64.b64encode(FIRST).decode()
STEPS = 3
OLLAMA = {"stream": False, "options": {"num_predict": STEPS, "temperature": 0}}


@pytest.fixture(scope="module", params=["qwen3_vl_moe", "gemma4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = image_toys.save(request.param, tmp_path_factory.mktemp(request.param), torch.float32)
    image_toys.add_reader(request.param, made)
    return made


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    (folder / "pictures").mkdir()
    (folder / "pictures" / "first.png").write_bytes(FIRST)
    model = oracle.open_model(folder, "fifth", images=True, context_tokens=256, max_sequences=2)
    with model.offload:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        with served(model, tokenizer, image_folder=folder / "pictures") as server:
            yield server


def asked(*urls: str, text: str = "?") -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "system", "content": "be"}, {"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@torch.no_grad()
def expected(folder: Path, data: bytes) -> tuple[int, list[float]]:
    """The tokens of the prompt, and the log probabilities of the library's greedy tokens."""
    model: PreTrainedModel = image_toys.reference(folder, torch.float32)
    tokenizer, library = (
        AutoTokenizer.from_pretrained(folder),
        AutoImageProcessor.from_pretrained(folder, backend="pil"),
    )
    found = library.preprocess([Image.open(io.BytesIO(data))], return_tensors="pt")
    if model.config.model_type == "gemma4":
        written = f"<|start|>{'<|image|>' * int(found['num_soft_tokens_per_image'][0])}<|end|>"
    else:
        marks = SimpleNamespace(image_token="<|image|>", image_processor=library)
        written = f"<|start|>{Qwen3VLProcessor.replace_image_token(marks, found, 0)}<|end|>"
    messages = [asked("")[0], {"role": "user", "content": "HERE?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(text.replace("HERE", written) + "<|turn|>assistant: ", return_tensors="pt")["input_ids"]
    inputs = {name: found[name] for name in ("pixel_values", "image_grid_thw", "image_position_ids") if name in found}
    result = model.generate(
        ids,
        **inputs,
        mm_token_type_ids=(ids == IMAGE).to(torch.int),
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return ids.shape[1], [float(logits[0].log_softmax(-1).max()) for logits in result.logits]


def test_answers_are_the_library_s(running: Running, folder: Path) -> None:
    """Of one image, and of another of the same size after it, of which nothing is reused."""
    chances = []
    for data in (FIRST, SECOND):
        answer = running.chat(
            messages=asked(data_url(data)), max_tokens=STEPS, logprobs=True, extra_body={"ignore_eos": True}
        )
        tokens, theirs = expected(folder, data)
        chances.append([each.logprob for each in answer.choices[0].logprobs.content])
        assert answer.usage.prompt_tokens == tokens
        assert chances[-1] == pytest.approx(theirs, abs=1e-4)
        assert answer.usage.prompt_tokens_details.cached_tokens < 20, "up to the image"
    assert chances[0] != pytest.approx(chances[1], abs=1e-3)
    again = running.chat(messages=asked(data_url(SECOND)), max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens == tokens - 1


def test_every_api_takes_images(running: Running) -> None:
    """In its own form; each prompt has the tokens of the image."""
    source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IN_BASE64}}
    as_part = {"type": "input_image", "image_url": data_url(FIRST)}
    by_file = (Path(running.serving.model.name_or_path) / "pictures" / "first.png").as_uri()
    answers = [
        running.http(
            "POST", "/v1/chat/completions", {"model": "demo", "messages": asked(by_file)[1:], "max_tokens": 1}
        ),
        running.http(
            "POST",
            "/v1/responses",
            {
                "input": [{"role": "user", "content": [as_part, {"type": "input_text", "text": "?"}]}],
                "max_output_tokens": 16,
            },
        ),
        running.http(
            "POST",
            "/v1/messages",
            {"messages": [{"role": "user", "content": [source, {"type": "text", "text": "?"}]}], "max_tokens": 1},
        ),
        running.http(
            "POST", "/api/chat", {"messages": [{"role": "user", "content": "?", "images": [IN_BASE64]}], **OLLAMA}
        ),
        running.http("POST", "/api/generate", {"prompt": "?", "images": [IN_BASE64], **OLLAMA}),
    ]
    assert [answer.status for answer in answers] == [200] * 5, [answer.text for answer in answers]
    first = answers[0].text.partition('"prompt_tokens":')[2].partition(",")[0]
    assert all(f'"prompt_eval_count":{first},' in answer.text for answer in answers[3:])
    assert "vision" in running.http("POST", "/api/show", {"model": "demo"}).text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://pictures.example/a.png", "downloads no images"),
        ("data:image/png;base64,aGFsbG8=", "cannot be read as PNG"),
        ("data:image/png;base64,!", "not valid base64"),
        ("data:image/png,abc", "must be in base64"),
        ("file:///etc/hostname", "must be in the server's folder"),
        (data_url(FIRST[: len(FIRST) // 2]), "cannot be read as PNG"),
        ("file://FOLDER/../config.json", "must be in the server's folder"),
    ],
)
def test_other_images_are_refused(running: Running, folder: Path, url: str, words: str) -> None:
    url = url.replace("FOLDER", str(folder / "pictures"))
    answer = running.http("POST", "/v1/chat/completions", {"model": "demo", "messages": asked(url)})
    assert answer.status == 400 and words in answer.error["message"]
    assert str(folder) not in answer.error["message"]


def test_limits(running: Running) -> None:
    many = io.BytesIO()
    Image.new("1", (8000, 8000)).save(many, "PNG")
    for urls, words in (([data_url(many.getvalue())], "8000 x 8000 pixels"), ([data_url(FIRST)] * 17, "at most 16")):
        answer = running.http("POST", "/v1/chat/completions", {"model": "demo", "messages": asked(*urls)})
        assert answer.status == 400 and words in answer.error["message"]
    by_system = [{"role": "system", "content": asked(data_url(FIRST))[1]["content"]}]
    answer = running.http("POST", "/v1/chat/completions", {"model": "demo", "messages": by_system})
    assert answer.status == 400 and "of the user only" in answer.error["message"]
    marked = running.chat(messages=asked(data_url(FIRST), text="<|image|>"), max_tokens=1)
    assert marked.usage.prompt_tokens > 30, "the text of a control token is no image"


def test_a_server_without_images_names_the_option(folder: Path) -> None:
    model = oracle.open_model(folder, "fifth")
    with model.offload, served(model, AutoTokenizer.from_pretrained(folder)) as server:
        answer = server.http("POST", "/v1/chat/completions", {"model": "demo", "messages": asked(data_url(FIRST))})
    assert answer.status == 400 and "reads text only" in answer.error["message"]
    assert "smoe serve --images" in answer.error["message"]


@pytest.mark.parametrize("tiles", [(1, 1), (2, 3)])
def test_llama4_s_tokens_of_tiles(tiles: tuple[int, int]) -> None:
    """Without torchvision there is no image processor of this family; its tokens are compared."""
    names = ["start", "end", "patch", "image"], ["image_start", "image_end", "tile_x_separator", "tile_y_separator"]
    words = [f"<|{name}|>" for name in (*names[1], "image", "patch")]
    tokenizer = SimpleNamespace(convert_tokens_to_ids=words.index, unk_token_id=None)
    config = image_toys.config_of("llama4")
    config.image_token_index = config.image_token_id = words.index("<|patch|>")
    processor = object.__new__(ImageProcessor)
    processor._config, processor._tokenizer, processor.placeholder = config, tokenizer, words.index("<|image|>")
    ours = "".join(words[token] for token in processor._tiles(*tiles))
    assert ours == Llama4Processor._prompt_split_image(None, tiles, 4)


def test_the_number_of_tokens_is_limited(tmp_path: Path) -> None:
    """By the image processor, so that the pixels are those of transformers with the same limit."""
    data = image_toys.file(3, 320, 240)
    for family, most in (("qwen3_vl_moe", 70), ("glm4v_moe", 70), ("gemma4", 140)):
        tokenizer = image_toys.add_reader(family, tmp_path)
        settings = tmp_path / "preprocessor_config.json"
        settings.write_text(settings.read_text().replace("4096", "65536").replace('_tokens": 70', '_tokens": 280'))
        whole, limited = (
            ImageProcessor(tmp_path, image_toys.config_of(family), tokenizer, tokens) for tokens in (4096, most)
        )
        assert limited.read(data).ids.count(IMAGE) <= most < whole.read(data).ids.count(IMAGE)
