"""The paths of Ollama's and llama.cpp's APIs, and of embeddings, which no served model has."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from smoe.server.api_errors import ApiError
from smoe.server.events import Json
from smoe.server.ollama import ollama_chat, ollama_generate
from smoe.server.ollama_models import OllamaModel, ollama_version
from smoe.server.serving import Serving, add_post
from smoe.server.token_endpoints import detokenize, properties, tokenize

_READ = ["GET", "HEAD"]


def add_local_paths(app: FastAPI, serving: Serving) -> None:
    """Add the paths of Ollama's and llama.cpp's APIs to the application."""
    model = OllamaModel(serving)
    for path, respond in (
        ("/api/chat", partial(ollama_chat, serving)),
        ("/api/generate", partial(ollama_generate, serving)),
        ("/api/show", model.show),
        ("/tokenize", partial(tokenize, serving)),
        ("/detokenize", partial(detokenize, serving)),
    ):
        add_post(app, path, respond)

    @app.api_route("/api/tags", methods=_READ)
    async def tags() -> Response:
        return Json(model.tags())

    @app.api_route("/api/ps", methods=_READ)
    async def running() -> Response:
        return Json(model.running())

    @app.api_route("/api/version", methods=_READ)
    async def version() -> Response:
        return Json(ollama_version())

    @app.api_route("/props", methods=_READ)
    async def props() -> Response:
        return Json(properties(serving))

    @app.post("/api/pull")
    @app.post("/api/push")
    @app.post("/api/create")
    @app.post("/api/copy")
    @app.delete("/api/delete")
    async def management(request: Request) -> Response:
        raise ApiError(
            501,
            f"{request.url.path} is not supported: this server serves {serving.name!r} and no other model; "
            "to serve another one, start another server with smoe serve MODEL",
            code="one_model",
        )

    @app.post("/v1/embeddings")
    @app.post("/api/embed")
    @app.post("/api/embeddings")
    async def embeddings(request: Request) -> Response:
        message = (
            f"{serving.name!r} is a model that generates text; it has no embeddings. Use a server of an embedding model"
        )
        raise ApiError(501, message, code="no_embeddings")
