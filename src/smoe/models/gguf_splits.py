"""The regular expressions by which byte-level tokenizers split a text before merging, by the rule's name in GGUF files.

The expressions come from the models' own tokenizer.json files, or match the same pieces. Each expression of a rule
splits the pieces that the one before has left. Text that an expression does not match is a piece too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
"""A pattern for words, which end before a capital letter that follows a small letter. `%s` stands for an optional
suffix."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_OTHERS}|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_OTHERS}|{_SPACES}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = _CASED % ("", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = _CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_KIMI = (
    r"[\p{Han}]+|"
    + _CASED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]") % (f"{_ENDINGS}?", f"{_ENDINGS}?")
    + rf"|\p{{N}}{{1,3}}|{_OTHERS}|{_SPACES}"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_DIGITS = r"\p{N}{1,3}"
_CHINESE_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
)
_DEEPSEEK3 = (_DIGITS, _CHINESE_AND_KANA, rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}")
_CASED_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with case, in the Unicode version with which DeepSeek's first models were trained."""
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_DIGIT_BY_DIGIT = (r"\p{N}", _GPT2)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_THREES_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)


@dataclass(frozen=True)
class Split:
    """The pre-tokenizer of one kind of byte-level vocabulary."""

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    """Whether a piece that is a token is used without merging, because merges do not reach some tokens."""
    adds_start: bool = False
    """Whether a text begins with the start token if the file has no entry for this."""


_RULES: Mapping[str, Split] = {
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4": Split((_GPT2,)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Split(
        (_LLAMA3,), ignores_merges=True, adds_start=True
    ),
    "glm4 glm5": Split((_LLAMA3,), ignores_merges=True),
    "dbrx smaug-bpe chatglm-bpe": Split((_LLAMA3,)),
    "qwen2 stablelm2 hunyuan solar-open grok-2 megrez kormo f2llmv2 deepseek-r1-qwen": Split((_QWEN2,)),
    "qwen35": Split((_QWEN35,)),
    "tekken": Split((_TEKKEN,), ignores_merges=True, adds_start=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Split((_GPT4O,)),
    "tiny_aya cohere2moe": Split((_THREES_FROM_THE_RIGHT, _GPT4O)),
    "deepseek-llm": Split(_DEEPSEEK_LLM),
    "deepseek-coder": Split(_DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Split(_DEEPSEEK3),
    "spark2_5": Split((*_DEEPSEEK3[:2], rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "afmoe": Split((_THREES_FROM_THE_RIGHT, _AFMOE_SCRIPTS, _DEEPSEEK3[-1])),
    "kimi-k2": Split((_KIMI,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Split(_DIGIT_BY_DIGIT),
    "falcon": Split(_FALCON),
    "bailingmoe bailingmoe2 llada-moe": Split((_BAILING,)),
    "exaone-moe": Split((_EXAONE_MOE,)),
    "seed-coder": Split((_SEED,)),
    "laguna": Split((r"[^\n]+|\n+", _QWEN2)),
    "minicpm5": Split((_DIGITS, _LLAMA3), ignores_merges=True),
    "bloom poro-chat gpt3-finnish": Split((_BLOOM,)),
    "viking": Split((_BLOOM, r"\p{N}")),
}
UNSPLIT = ("gemma4", "sarvam-moe")
"""The names of the rule not to split texts. Vocabularies with this rule are not byte-level, and have a character for
spaces."""
SPLITS: Mapping[str, Split] = {name: split for names, split in _RULES.items() for name in names.split()}
"""The pre-tokenizers by their name in the file."""
