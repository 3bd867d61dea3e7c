"""Tokenizers of GGUF files: ids as published, texts whole again, every split as the file says.

Would catch a lost space before a text, a word that no merge reaches and that is split all the same, a control token in
letters beyond the byte alphabet that is not found, an unknown split that is replaced by another.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.generation.detokenizer import TextStream
from smoe.memory.gguf_header import read_gguf_header
from smoe.models import gguf_tokenizer
from smoe.models.gguf_splits import SPLITS
from smoe.models.gguf_tokenizer import read_gguf_tokenizer
from smoe.models.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED

EXTRACT = json.loads((Path(__file__).parent / "gguf_expectations.json").read_text(encoding="utf8"))
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
"""What byte-level vocabularies write bytes with."""
PLAIN, MERGES = [*LETTERS, "~~"], ["~ ~"]
"""A vocabulary that merges as good as nothing; files without merges are refused."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SOURCE = os.environ.get("SMOE_LLAMA_CPP")
"""A folder with llama.cpp's sources, whose vocabularies are tried in full."""
SEPARATOR = "\n__ggml_vocab_test__\n"


def write(
    path: Path,
    model: str,
    tokens: Mapping[str, int] | Sequence[str],
    *,
    merges: Sequence[str] | None = None,
    pre: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> PreTrainedTokenizerFast:
    """The tokenizer of a file with these tokens (by their kinds, if not all are normal), scored in their order."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()) if isinstance(tokens, Mapping) else [NORMAL] * len(tokens))
    if model == "llama":
        writer.add_token_scores([-float(number) for number in range(len(tokens))])
    if merges is not None:
        writer.add_token_merges(list(merges))
    for key, value in (more or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key if key.startswith("general") else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_gguf_tokenizer(read_gguf_header(path))


def of_scores(path: Path, *tokens: str, own: Sequence[str] = (), more: Mapping[str, Any] | None = None) -> Any:
    """A vocabulary with scores: control tokens, bytes, and these, the first to be put together first."""
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | dict.fromkeys(BYTES, BYTE)
    return write(
        path, "llama", {**kinds, **dict.fromkeys(tokens, NORMAL), **dict.fromkeys(own, USER_DEFINED)}, more=more
    )


def pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    """The tokens of a text, with none put around it."""
    return list(tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"]))


def extracted(name: str, path: Path) -> PreTrainedTokenizerFast:
    """A vocabulary with what the extract has of a published one."""
    found = EXTRACT["vocabularies"][name]
    own = found.get("user_defined", [])
    if found["model"] == "llama":
        return of_scores(path, *found["tokens"].split(" "), own=own)
    merges = found["merges"]
    letters = LETTERS if found["model"] == "gpt2" else found["letters"]
    kinds = dict.fromkeys([*letters, *("".join(merge.split(" ")) for merge in merges)], NORMAL)
    kinds |= dict.fromkeys((token for tokens in found["expected"].values() for token in tokens), NORMAL)
    kinds |= dict.fromkeys(BYTES, BYTE) if found["model"] != "gpt2" else {}
    return write(path, found["model"], kinds | dict.fromkeys(own, USER_DEFINED), merges=merges, pre=found.get("pre"))


def streamed(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """The text that a reader sees of tokens that come one by one after a first one."""
    stream = TextStream(tokenizer, ids[:1], ())
    return "".join([*map(stream.push, ids[1:]), stream.flush()])


@pytest.mark.parametrize("name", EXTRACT["vocabularies"])
def test_tokens_are_the_published_ones(name: str, tmp_path: Path) -> None:
    tokenizer = extracted(name, tmp_path / "vocabulary.gguf")
    for number, expected in EXTRACT["vocabularies"][name]["expected"].items():
        text = EXTRACT["texts"][int(number)]
        assert pieces(tokenizer, text) == expected, text


@pytest.mark.parametrize("name", EXTRACT["vocabularies"])
def test_tokens_are_the_text_again(name: str, tmp_path: Path) -> None:
    tokenizer = extracted(name, tmp_path / "vocabulary.gguf")
    for number in EXTRACT["vocabularies"][name]["expected"]:
        text = EXTRACT["texts"][int(number)]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        start = tokenizer("x:", add_special_tokens=False)["input_ids"][-1:]
        known = tokenizer.decode(start)
        assert streamed(tokenizer, [*start, *ids]) == tokenizer.decode([*start, *ids])[len(known) :]


def published() -> Iterator[Any]:
    """Every vocabulary of llama.cpp's sources that has expectations; BERT's is of a kind that no such model has."""
    for path in sorted(Path(SOURCE or "no such folder").glob("models/ggml-vocab-*.gguf.out")):
        if "bert" not in path.name:
            yield pytest.param(path.with_suffix(""), id=path.name.removesuffix(".gguf.out"))


@pytest.mark.skipif(SOURCE is None, reason="SMOE_LLAMA_CPP names no folder with llama.cpp's sources")
@pytest.mark.parametrize("path", published())
def test_all_published_expectations(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tokenizer, "architecture_of", lambda header: "llama")
    tokenizer = read_gguf_tokenizer(read_gguf_header(path))
    texts = Path(f"{path}.inp").read_bytes().decode("utf8").removesuffix(SEPARATOR).split(SEPARATOR)
    lines = Path(f"{path}.out").read_text().splitlines()
    for text, line in zip(texts, lines, strict=True):
        ids = [int(number) for number in line.split()]
        assert tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids, text
        assert tokenizer.decode(ids) == text


WORDS = ("\u0120ab", "abc")
"""Tokens of the vocabulary below that no merge makes."""


@pytest.mark.parametrize(
    ("pre", "is_whole"),
    [
        *((name, True) for name in ("llama3", "llama-v3", "llama-bpe", "glm4", "glm5", "tekken", "falcon3", "lfm2")),
        *((name, False) for name in ("qwen2", "chatglm-bpe", "gpt-4o", "deepseek-v3", "minimax-m2", "gpt-2", "refact")),
    ],
)
def test_words_are_looked_up_before_any_merge(pre: str, is_whole: bool, tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "v.gguf", "gpt2", [*LETTERS, *WORDS, "bc"], merges=["b c"], pre=pre)
    assert pieces(tokenizer, "abc ab") == (["abc", "\u0120ab"] if is_whole else ["a", "bc", "\u0120", "a", "b"])
    assert pieces(tokenizer, "abcb") == ["a", "bc", "b"]


SPLIT_TEXT = "He's fooBar \u4f60\u597da 1234567 x=y\n\n  z"
SPLIT_INTO = {
    "gpt-2": "He|'s| fooBar| \u4f60\u597da| 1234567| x|=|y|\n\n | z",
    "llama-bpe": "He|'s| fooBar| \u4f60\u597da| |123|456|7| x|=y|\n\n| | z",
    "qwen2": "He|'s| fooBar| \u4f60\u597da| |1|2|3|4|5|6|7| x|=y|\n\n| | z",
    "tekken": "He|'s| foo|Bar| \u4f60\u597da| |1|2|3|4|5|6|7| x|=y|\n\n| | z",
    "gpt-4o": "He's| foo|Bar| \u4f60\u597da| |123|456|7| x|=y|\n\n| | z",
    "refact": "He|'s| fooBar| \u4f60\u597da| |1|2|3|4|5|6|7| x|=|y|\n\n | z",
    "deepseek-v3": "He|'s| fooBar| |\u4f60\u597d|a| |123|456|7| x|=y|\n\n| | z",
    "deepseek-llm": "He|'|s| fooBar| |\u4f60\u597d|a| |1|2|3|4|5|6|7| x|=|y|\n|\n| | z",
    "kimi-k2": "He's| foo|Bar| |\u4f60\u597d|a| |123|456|7| x|=y|\n\n| | z",
    "afmoe": "He|'s| fooBar| |\u4f60\u597d|a| |1|234|567| x|=y|\n\n| | z",
    "cohere2moe": "He's| foo|Bar| \u4f60\u597da| |1|234|567| x|=y|\n\n| | z",
    "bailingmoe": "He|'s| fooBar| \u4f60\u597da| |1|2|3|4|5|6|7| x|=y|\n\n| | z",
    "falcon": "He|'|s| fooBar| \u4f60\u597da| |123|456|7| x|=|y|\n\n | z",
}
SAME_AS = {
    "glm4": "llama-bpe",
    "minimax-m2": "gpt-4o",
    "llama4": "gpt-4o",
    "olmo": "gpt-2",
    "mpt": "gpt-2",
    "command-r": "refact",
    "starcoder": "refact",
    "hunyuan": "qwen2",
    "grok-2": "qwen2",
    "bailingmoe2": "bailingmoe",
    "hy_v4": "deepseek-v3",
    "hunyuan-dense": "deepseek-v3",
    "laguna": "qwen2",
    "mellum2": "refact",
}


@pytest.mark.parametrize("pre", [*SPLIT_INTO, *SAME_AS])
def test_a_text_is_split_as_the_file_says(pre: str, tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "v.gguf", "gpt2", PLAIN, merges=MERGES, pre=pre)
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    found = [SPLIT_TEXT[begin:end] for _, (begin, end) in splitter.pre_tokenize_str(SPLIT_TEXT)]
    assert found == SPLIT_INTO[SAME_AS.get(pre, pre)].split("|")


@pytest.mark.parametrize("pre", ["sarvam-moe", "gemma4"])
def test_texts_that_are_not_split(pre: str, tmp_path: Path) -> None:
    """As Gemma 4's, by the name of the rule: such a file states the kind of byte-level vocabularies."""
    name, found = "gemma-4", EXTRACT["vocabularies"]["gemma-4"]
    theirs = extracted(name, tmp_path / "gemma4.gguf")
    merges = list(found["merges"])
    kinds = dict(zip(theirs.convert_ids_to_tokens(range(len(theirs))), repeat(NORMAL), strict=False))
    kinds |= dict.fromkeys(BYTES, BYTE)
    tokenizer = write(tmp_path / "v.gguf", "gpt2", kinds, merges=merges, pre=pre)
    for number, expected in found["expected"].items():
        text = EXTRACT["texts"][int(number)]
        assert pieces(tokenizer, text) == expected, text
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_laguna_splits_lines_first(tmp_path: Path) -> None:
    """Unlike Qwen, in which the ends of lines belong to the signs before them."""
    text, found = "a=\n\n=b", {}
    for pre in ("laguna", "qwen2"):
        splitter = write(tmp_path / f"{pre}.gguf", "gpt2", PLAIN, merges=MERGES, pre=pre).backend_tokenizer
        found[pre] = [text[begin:end] for _, (begin, end) in splitter.pre_tokenizer.pre_tokenize_str(text)]
    assert found == {"laguna": ["a", "=", "\n\n", "=b"], "qwen2": ["a", "=\n\n", "=b"]}


@pytest.mark.parametrize("pre", SPLITS)
def test_every_split_loses_nothing(pre: str, tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "v.gguf", "gpt2", PLAIN, merges=MERGES, pre=pre)
    for text in (SPLIT_TEXT, "", " ", "\t\r\n \u3000", "\U0001f999\u200d \u0e40\u0301"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("pre", ["unheard-of", "default", "QWEN2"])
def test_an_unknown_split_is_refused(pre: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"splits texts by '{pre}'.*known split.*llama-bpe"):
        write(tmp_path / "v.gguf", "gpt2", PLAIN, merges=MERGES, pre=pre)


def test_a_file_without_a_split_is_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "smoe"):
        write(tmp_path / "v.gguf", "gpt2", PLAIN, merges=MERGES)
    assert "does not state how it splits texts" in caplog.text and "'llama-bpe' is assumed" in caplog.text


@pytest.mark.parametrize("kind", ["t5", "bert", "rwkv"])
def test_other_kinds_of_vocabulary_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"of the kind '{kind}'.*gpt2, llama, gemma4"):
        write(tmp_path / "v.gguf", kind, LETTERS)


SPACE = "\u2581"
SPM = (f"{SPACE}{SPACE}", f"{SPACE}a", SPACE, *"ab")
"""Two spaces are put together before a space and a letter."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [f"{SPACE}a"]),
        (" a", [SPACE * 2, "a"]),
        ("  a", [SPACE * 2, f"{SPACE}a"]),
        (" ", [SPACE * 2]),
        ("", []),
        ("b</s>a", [SPACE, "b", "</s>", f"{SPACE}a"]),
        ("b</s> a", [SPACE, "b", "</s>", SPACE * 2, "a"]),
        ("<s>a", ["<s>", f"{SPACE}a"]),
        ("\u00e9", [SPACE, "<0xC3>", "<0xA9>"]),
        ("a\nb", [f"{SPACE}a", "<0x0A>", "b"]),
        ("[x]a", ["[x]", f"{SPACE}a"]),
    ],
)
def test_a_space_before_every_stretch_of_text(text: str, expected: list[str], tmp_path: Path) -> None:
    tokenizer = of_scores(tmp_path / "v.gguf", *SPM, own=["[x]"])
    assert pieces(tokenizer, text) == expected


def test_no_space_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = of_scores(tmp_path / "v.gguf", *SPM, more={"add_space_prefix": False})
    assert pieces(tokenizer, "a") == ["a"] and pieces(tokenizer, " a</s>a") == [f"{SPACE}a", "</s>", "a"]
    for text in ("a", " a", "  a"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_entries_with_scores_are_put_together_the_best_first(tmp_path: Path) -> None:
    """Not as merges of a file would be, by their parts; and no control token is put together of letters."""
    tokenizer = of_scores(tmp_path / "v.gguf", "bc", "ab", "abc", SPACE, *"abc<s>", "<s", own=[])
    assert pieces(tokenizer, "abab") == [SPACE, "ab", "ab"] and pieces(tokenizer, "abc") == [SPACE, "abc"]
    assert pieces(tokenizer, "abcab") == [SPACE, "abc", "ab"]
    ids = tokenizer("<s>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [SPACE, "<s", ">"]


@pytest.mark.parametrize(("name", "expected"), [("Phi-3 mini", ["</s>", f"{SPACE}a"]), ("Mixtral", None)])
def test_control_tokens_of_phi_3_swallow_spaces(name: str, expected: list[str] | None, tmp_path: Path) -> None:
    tokenizer = of_scores(tmp_path / "v.gguf", *SPM, more={"general.name": name})
    assert pieces(tokenizer, "</s> a") == (expected or ["</s>", SPACE * 2, "a"])


@pytest.mark.parametrize(("pre", "starts"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("glm4", False)])
def test_the_start_token_that_a_file_does_not_name(pre: str, starts: bool, tmp_path: Path) -> None:
    kinds = {**dict.fromkeys(PLAIN, NORMAL), "<begin>": CONTROL, "<end>": CONTROL}
    more: dict[str, Any] = {"bos_token_id": 257, "eos_token_id": 258}
    for added in (None, True, False):
        given = more if added is None else {**more, "add_bos_token": added}
        tokenizer = write(tmp_path / f"{added}.gguf", "gpt2", kinds, merges=MERGES, pre=pre, more=given)
        assert (tokenizer("a")["input_ids"][0] == 257) == (starts if added is None else added)
    tokenizer = write(
        tmp_path / "end.gguf", "gpt2", kinds, merges=MERGES, pre=pre, more={**more, "add_eos_token": True}
    )
    assert tokenizer("a")["input_ids"][-1] == 258


def test_tokens_in_other_letters_are_found_and_written(tmp_path: Path) -> None:
    """DeepSeek's: control tokens beyond the byte alphabet, and a user's in letters that stand for other bytes."""
    begin, hole, letter = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5chole\uff5c>", "\u00fc"
    kinds = dict.fromkeys((each for each in PLAIN if each != letter), NORMAL)
    kinds |= {begin: CONTROL, hole: USER_DEFINED, letter: USER_DEFINED, "   ": USER_DEFINED}
    tokenizer = write(tmp_path / "v.gguf", "gpt2", kinds, merges=MERGES, pre="deepseek-llm")
    text = f"{begin}f{letter}r{hole}a   b"
    assert pieces(tokenizer, text) == [begin, "f", letter, "r", hole, "a", "   ", "b"]
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and tokenizer.decode(ids, skip_special_tokens=True) == text[len(begin) :]


def test_a_word_that_fills_places_stays_a_word(tmp_path: Path) -> None:
    more = {"padding_token_id": LETTERS.index("!"), "eos_token_id": 257}
    kinds = {**dict.fromkeys(PLAIN, NORMAL), "<end>": CONTROL}
    tokenizer = write(tmp_path / "v.gguf", "gpt2", kinds, merges=MERGES, pre="qwen2", more=more)
    assert tokenizer.decode(tokenizer("a!")["input_ids"], skip_special_tokens=True) == "a!"
    assert tokenizer.pad_token_id is None and tokenizer.eos_token_id == 257


def test_merges_may_begin_with_a_space(tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "v.gguf", "gpt2", [*LETTERS, " ", " a"], merges=["  a"], pre="qwen2")
    assert pieces(tokenizer, "a") == ["a"]


@pytest.mark.parametrize(
    ("tokens", "merges", "message"),
    [
        (["a", "b", "a"], [], "the token 'a' twice, as 0 and as 2"),
        (["a", "b", "ab"], ["ab"], "the merge 'ab', which does not consist of two texts"),
        (["a", "b"], None, "has no merges"),
        (["a", "b"], ["a b"], "no usable tokenizer"),
    ],
)
def test_a_vocabulary_that_is_inconsistent(
    tokens: list[str], merges: list[str] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path / "v.gguf", "gpt2", tokens, merges=merges, pre="qwen2")


def test_entries_without_text_are_no_tokens_of_texts(tmp_path: Path) -> None:
    tokenizer = write(
        tmp_path / "v.gguf", "gpt2", {**dict.fromkeys(PLAIN, NORMAL), "": NORMAL}, merges=MERGES, pre="qwen2"
    )
    assert pieces(tokenizer, "ab") == ["a", "b"] and len(tokenizer) == 258
