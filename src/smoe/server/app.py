"""The application: paths, errors in the API's shape, and what every request passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from smoe import __version__
from smoe.report.watched import Watched
from smoe.server.chat import chat_completions
from smoe.server.completion import completions
from smoe.server.events import ClientGoneError, Json
from smoe.server.fields import ChatAsked, CompletionAsked, ResponseAsked
from smoe.server.guard import Guard
from smoe.server.problem import ApiError, problem_of
from smoe.server.request_lines import RequestLines
from smoe.server.responses import Responses
from smoe.server.serving import Serving
from smoe.server.watching import Watching, add_page

_CLIENT_LEFT = 499
_UNKNOWN = "(other)"


def make_app(serving: Serving, warn: Callable[[str], None]) -> ASGIApp:
    """The application that serves one model. `warn`: tells whoever started it."""
    app = FastAPI(title="smoe", version=__version__, docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_models(app, serving)
    _add_api(app, serving)
    _add_state(app, serving)
    open_paths = frozenset({"/health"} | add_page(app, _watching(serving)))
    known = {getattr(route, "path", "") for route in app.routes}

    def counted(path: str, status: int) -> None:
        serving.meters.answers.labels(path if path in known else _UNKNOWN, status).inc()

    guarded: ASGIApp = Guard(app, serving.config, open_paths, counted, warn)
    if serving.config.allow_origin:
        origins = list(serving.config.allow_origin)
        guarded = CORSMiddleware(guarded, origins, allow_methods=["*"], allow_headers=["*"])
    return RequestLines(guarded)


def _add_models(app: FastAPI, serving: Serving) -> None:
    model = {"id": serving.name, "object": "model", "created": serving.began, "owned_by": "smoe"}
    model |= {"max_model_len": serving.engine.context_tokens}

    @app.get("/v1/models")
    async def models() -> Response:
        return Json({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        serving.check_name(name)
        return Json(model)


def _add_api(app: FastAPI, serving: Serving) -> None:
    kept = Responses(serving)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatAsked, request: Request) -> Response:
        return await chat_completions(serving, asked, request)

    @app.post("/v1/completions")
    async def complete(asked: CompletionAsked, request: Request) -> Response:
        return await completions(serving, asked, request)

    @app.post("/v1/responses")
    async def respond(asked: ResponseAsked, request: Request) -> Response:
        return await kept.make(asked, request)

    @app.get("/v1/responses/{name}")
    async def one_response(name: str) -> Response:
        return Json(kept.get(name))

    @app.delete("/v1/responses/{name}")
    async def forget_response(name: str) -> Response:
        return Json(kept.delete(name))


def _add_state(app: FastAPI, serving: Serving) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Json({"status": serving.state}, 200 if serving.state == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(serving.meters.shown(), media_type="text/plain; version=0.0.4")


def _watching(serving: Serving) -> Watching:
    """What the page shows of it."""
    talks = "chat" if serving.prompts.has_template else "text"
    about = {"name": serving.name, "talks": talks, "context": serving.engine.context_tokens}

    def state() -> dict[str, int]:
        return {"running": serving.running, "waiting": serving.waiting}

    return Watching(Watched(serving.engine), about, state, lambda: serving.state != "ok")


def _add_errors(app: FastAPI) -> None:
    def shown(problem: ApiError) -> Response:
        return Json(problem.body, problem.status, problem.headers)

    @app.exception_handler(ApiError)
    async def told(request: Request, problem: ApiError) -> Response:
        return shown(problem)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return shown(_of_fields(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = {404: f"there is no {request.url.path}", 405: f"{request.url.path} takes no {request.method}"}
        answer = shown(ApiError(error.status_code, message.get(error.status_code, str(error.detail))))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return shown(problem_of(error, {}))


def _of_fields(error: RequestValidationError) -> ApiError:
    """What is wrong with the first field that is."""
    first: dict[str, Any] = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(place) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', 'it cannot be read')}")
    if param is None:
        return ApiError(400, "the body must be a JSON object, sent with 'Content-Type: application/json'")
    if first["type"] == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {param}"
        return ApiError(400, message, param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"you must provide '{param}'", param=param, code="missing_required_parameter")
    return ApiError(400, f"'{param}' is wrong: {first['msg']}", param=param, code="invalid_type")
