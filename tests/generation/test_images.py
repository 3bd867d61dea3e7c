"""Prompts with images against transformers' own model of images and text.

Would catch: features at other tokens, positions of an image counted as those of text, features of later layers left
out, an image that is divided where its tokens depend on each other, and keys and values of another image reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.generation.prompt_images import PlacedImage, PromptImages
from smoe.generation.rows import Rows
from smoe.models.image_encoder import ImageEncoder
from tests import image_toys, oracle
from tests.image_toys import END, IMAGE, START, ToyImage

STEPS = 3
BEGIN, BETWEEN, AFTER = [1, 5, 6, START], [END, 9, START], [END, 10, 11, 12]


@pytest.fixture(scope="module", params=image_toys.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """A family with images: each of them."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_toys.save(family, tmp_path_factory.mktemp(family), torch.float32)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedModel:
    """The library's own model."""
    return image_toys.reference(folder, torch.float32)


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[PreTrainedModel]:
    """Our model with few experts in memory, which reads prompts in short pieces and decodes two texts together."""
    model = oracle.open_model(folder, "fifth", images=True, prefill_tokens=7, max_sequences=2)
    yield model
    model.offload.close()


def prompt(images: Sequence[ToyImage]) -> tuple[list[int], list[PlacedImage]]:
    """A text around two images, or one."""
    ids, placed = list(BEGIN), []
    for number, image in enumerate(images):
        ids += BETWEEN if number else []
        places = range(len(ids), len(ids) + image.tokens)
        digest = bytes([int(image.inputs["pixel_values"].flatten()[0].abs() * 1000) % 256] * 16)
        placed.append(PlacedImage(image.inputs, digest, places))
        ids += [IMAGE] * image.tokens
    return ids + AFTER, placed


@torch.no_grad()
def expected(
    model: PreTrainedModel, ids: list[int], images: Sequence[ToyImage]
) -> tuple[list[int], list[torch.Tensor]]:
    """The library's greedy tokens after a prompt, and the logits of each."""
    given = torch.tensor([ids])
    inputs = {name: torch.cat([image.inputs[name] for image in images]) for name in images[0].inputs}
    if model.config.model_type != "llama4":
        inputs["mm_token_type_ids"] = (given == IMAGE).to(torch.int)
    result = model.generate(
        given,
        **inputs,
        max_new_tokens=STEPS + 1,
        min_new_tokens=STEPS + 1,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return result.sequences[0, len(ids) :].tolist(), [logits[0] for logits in result.logits]


def computed(
    rows: Rows, ids: list[int], placed: list[PlacedImage], model: PreTrainedModel, tokens: list[int]
) -> tuple[list[torch.Tensor], int]:
    """Our logits after the prompt and after each of `tokens`, and how many tokens of the prompt were reused."""
    images = PromptImages(ids, placed, ImageEncoder(model)) if placed else None
    engine = model.offload
    with engine.passes.turn():
        row, reused = rows.take(ids, images)
        at = reused
        while at < len(ids):
            end = min(len(ids), at + engine.config.prefill_tokens)
            end = end if images is None else images.piece_end(at, end)
            logits = rows.read(row, ids[at:end])
            at = end
        found = [logits]
        rows.exchange(row, 0)
        found += [rows.decode([token])[0] for token in tokens]
        rows.free(0, is_whole=True)
    return found, reused


def assert_near(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert oracle.relative_error(a, b) < 1e-5


def test_logits_are_the_library_s(
    family: str,
    folder: Path,
    theirs: PreTrainedModel,
    ours: PreTrainedModel,
    open_model: Callable[..., PreTrainedModel],
) -> None:
    """With all experts in memory and a prompt in one piece; then with few, and pieces that begin and end within images,
    or around them where the tokens of an image depend on later ones."""
    images = [image_toys.image(family, seed) for seed in (1, 2)]
    ids, placed = prompt(images)
    tokens, logits = expected(theirs, ids, images)
    for model in (open_model(folder, "full", images=True), ours):
        found, reused = computed(Rows(model, model.offload), ids, placed, model, tokens[:STEPS])
        assert_near(found, logits)
        assert reused == 0
    assert model.offload.ledger.entries()["image encoder"] > 0


def test_another_image_is_never_taken_for_the_same(family: str, theirs: PreTrainedModel, ours: PreTrainedModel) -> None:
    first, second, other = (image_toys.image(family, seed) for seed in (1, 2, 3))
    ids, placed = prompt([first, second])
    _, exchanged = prompt([first, other])
    rows = Rows(ours, ours.offload)
    found, _ = computed(rows, ids, placed, ours, [])
    again, reused = computed(rows, ids, exchanged, ours, [])
    _, logits = expected(theirs, ids, [first, other])
    assert reused in (0, placed[1].places[0]), "up to the second image, or nothing of a recurrent state"
    assert_near(again, logits[:1])
    assert oracle.relative_error(found[0], again[0]) > 1e-3
    plain, reused = computed(rows, ids, [], ours, [])
    assert reused in (0, placed[0].places[0]), "of the same tokens without images"
    assert oracle.relative_error(plain[0], again[0]) > 1e-3


def test_a_conversation_goes_on_without_a_second_look(
    family: str, theirs: PreTrainedModel, ours: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = image_toys.image(family, 1)
    ids, placed = prompt([image])
    rows = Rows(ours, ours.offload)
    computed(rows, ids, placed, ours, [20, 21])
    longer = [*ids, 20, 21, 22, 23, 24]
    tokens, logits = expected(theirs, longer, [image])
    monkeypatch.setattr(ImageEncoder, "encode", lambda self, inputs: pytest.fail("the image is computed again"))
    found, reused = computed(rows, longer, placed, ours, tokens[:STEPS])
    assert reused == len(ids) + 2
    assert_near(found, logits)


def test_texts_with_and_without_images_are_decoded_together(
    family: str, theirs: PreTrainedModel, ours: PreTrainedModel
) -> None:
    """Positions after an image are not those of a text of the same length."""
    image = image_toys.image(family, 1, 8, 8)
    ids, placed = prompt([image])
    tokens, logits = expected(theirs, ids, [image])
    rows, images = Rows(ours, ours.offload), PromptImages(ids, placed, ImageEncoder(ours))
    with ours.offload.passes.turn():
        for prompt_ids, of_prompt in ((ids, images), (list(range(3, 20)), None)):
            row, _ = rows.take(prompt_ids, of_prompt)
            rows.read(row, prompt_ids)
        found = [rows.decode([token, 30])[0] for token in tokens[:STEPS]]
    assert rows.share_passes is (family not in ("qwen3_5_moe", "llama4")), "as for texts alone"
    assert_near(found, logits[1:])
