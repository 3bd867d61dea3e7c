"""`POST /tokenize` and `/detokenize`, and `GET /props`: llama.cpp's API about tokens and the server."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from smoe import __version__
from smoe.server.events import Json
from smoe.server.serving import Serving
from smoe.server.token_fields import DetokenizeAsked, TokenizeAsked


async def tokenize(serving: Serving, request: Request) -> Response:
    """Return the tokens of a text."""

    def work(asked: TokenizeAsked) -> list[Any]:
        tokens = serving.prompts.tokens_of(asked.content, bool(asked.add_special), asked.parse_special is not False)
        return [_piece(serving, token) for token in tokens] if asked.with_pieces else tokens

    return Json({"tokens": await serving.read(TokenizeAsked, request, work)})


async def detokenize(serving: Serving, request: Request) -> Response:
    """Return the text of tokens."""

    def work(asked: DetokenizeAsked) -> str:
        tokens = serving.prompts.of_tokens(asked.tokens, "tokens")
        text: str = serving.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return Json({"content": await serving.read(DetokenizeAsked, request, work)})


def properties(serving: Serving) -> dict[str, Any]:
    """Return the server's properties, as llama.cpp's clients read them."""
    return {
        "default_generation_settings": {"n_ctx": serving.engine.context_tokens},
        "total_slots": serving.engine.config.max_sequences,
        "model_alias": serving.name,
        "model_path": serving.name,
        "modalities": {"vision": serving.prompts.takes_images, "audio": False},
        "chat_template": serving.prompts.template,
        "build_info": f"smoe {__version__}",
    }


def _piece(serving: Serving, token: int) -> dict[str, Any]:
    """Return a token's id with its text. If the token is only a part of a character, its bytes take the place of the
    text."""
    text, data = serving.tokens.of(token)
    return {"id": token, "piece": text if text.encode("utf8") == bytes(data) else data}
