"""The ASGI application: routes, errors in the API's form, and the middleware around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Scope

from smoe import __version__
from smoe.models.files import DEMO_FOLDER, DEMO_REMARK
from smoe.report.watched import Watched
from smoe.server.api_errors import ApiError, problem_of
from smoe.server.chat import chat_completions
from smoe.server.completion import completions
from smoe.server.events import CLIENT_GONE, ClientGoneError, Json
from smoe.server.field_errors import shortened
from smoe.server.guard import PROBES, BodyBudget, Guard
from smoe.server.local_routes import add_local_paths
from smoe.server.messages import count_tokens, messages
from smoe.server.openapi import METRICS_TYPE, document
from smoe.server.request_lines import RequestLines
from smoe.server.responses import Responses
from smoe.server.serving import IGNORED_FIELDS, Serving, add_post
from smoe.server.watching import Watching, add_page

_UNKNOWN = "(other)"
_READ = ["GET", "HEAD"]


def make_app(serving: Serving, warn: Callable[[str], None], bodies: BodyBudget | None = None) -> ASGIApp:
    """Return the ASGI application that serves one model. `warn` prints a message for the user who started the server;
    `bodies`: the account that limits the memory for request bodies."""
    app = FastAPI(title="smoe", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app)
    _add_models(app, serving)
    _add_api(app, serving)
    add_local_paths(app, serving)
    _add_state(app, serving)
    open_paths = PROBES | add_page(app, _watching(serving))

    def counted(path: str, status: int) -> None:
        serving.meters.answers.labels(_template_of(app.routes, path), status).inc()

    guarded: ASGIApp = Guard(app, serving.config, open_paths, counted, warn, bodies)
    if serving.config.allow_origin:
        origins = list(serving.config.allow_origin)
        exposed = [IGNORED_FIELDS]
        guarded = CORSMiddleware(guarded, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)
    return RequestLines(guarded)


def _add_models(app: FastAPI, serving: Serving) -> None:
    model = {"id": serving.name, "object": "model", "created": serving.began, "owned_by": "smoe"}
    model |= {"max_model_len": serving.engine.context_tokens}

    @app.api_route("/v1/models", methods=_READ)
    async def models() -> Response:
        return Json({"object": "list", "data": [model]})

    @app.api_route("/v1/models/{name:path}", methods=_READ)
    async def one_model(name: str) -> Response:
        serving.check_name(name)
        return Json(model)


def _add_api(app: FastAPI, serving: Serving) -> None:
    stored_responses = Responses(serving)
    add_post(app, "/v1/chat/completions", partial(chat_completions, serving))
    add_post(app, "/v1/completions", partial(completions, serving))
    add_post(app, "/v1/messages", partial(messages, serving))
    add_post(app, "/v1/messages/count_tokens", partial(count_tokens, serving))
    add_post(app, "/v1/responses", stored_responses.make)

    @app.api_route("/v1/responses/{name}", methods=_READ)
    async def one_response(name: str) -> Response:
        return Response(stored_responses.get(name), media_type=Json.media_type)

    @app.delete("/v1/responses/{name}")
    async def forget_response(name: str) -> Response:
        return Json(stored_responses.delete(name))


def _add_state(app: FastAPI, serving: Serving) -> None:
    @app.api_route("/health", methods=_READ)
    async def health() -> Response:
        has_failed = serving.prompts.template_state == "failed"
        state = {"status": serving.state, **({"chat_template": "failed"} if has_failed else {})}
        return Json(state, 200 if serving.state == "ok" else 503)

    @app.api_route("/healthz", methods=_READ)
    async def live() -> Response:
        """Report whether the process works, for supervisors that restart it. It works also while it shuts down."""
        return Json({"status": serving.state}, 503 if serving.state == "failed" else 200)

    @app.api_route("/ready", methods=_READ)
    async def ready() -> Response:
        """Report whether the server accepts requests, for load balancers."""
        return Json({"status": serving.state}, 200 if serving.state == "ok" else 503)

    @app.api_route("/metrics", methods=_READ)
    async def metrics() -> Response:
        return Response(serving.meters.shown(), media_type=METRICS_TYPE)

    @app.api_route("/openapi.json", methods=_READ)
    def description() -> Response:  # not `async`: on a thread, because the first one takes half a second
        return Json(document(serving.name, serving.config.api_key is not None))


def _watching(serving: Serving) -> Watching:
    """Return the object that provides the events of the page at `/`."""
    talks = "chat" if serving.prompts.has_template else "text"
    remark = DEMO_REMARK if serving.model.name_or_path == str(DEMO_FOLDER) else None
    about = {"name": serving.name, "talks": talks, "context": serving.engine.context_tokens, "remark": remark}

    def state() -> dict[str, int]:
        return {"running": serving.running, "waiting": serving.waiting}

    return Watching(Watched(serving.engine), about, state, lambda: serving.state != "ok")


def _add_errors(app: FastAPI) -> None:
    def shown(problem: ApiError, request: Request) -> Response:
        return Json(problem.body_at(request.scope["path"]), problem.status, problem.headers)

    @app.exception_handler(ApiError)
    async def answer_problem(request: Request, problem: ApiError) -> Response:
        return shown(problem, request)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        answer = shown(ApiError(error.status_code, _of_path(app, request.scope, error)), request)
        answer.headers.update(error.headers or {})
        if error.status_code == 405:
            answer.headers["Allow"] = ", ".join(_methods_of(app.routes, request.scope))
        return answer

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return shown(problem_of(error, {}), request)


def _of_path(app: FastAPI, scope: Scope, error: HTTPException) -> str:
    path = shortened(scope["path"])
    if error.status_code == 405:
        return f"{path} does not support {scope['method'][:20]}; use {', '.join(_methods_of(app.routes, scope))}"
    if error.status_code != 404:
        return str(error.detail)
    meant = f"/v1{path}".rstrip("/")
    if _methods_of(app.routes, {**scope, "path": meant}):
        return f"there is no {path} here; did you mean {meant}?"
    return f"there is no {path} here; /openapi.json lists all paths, those of the API begin with /v1"


def _template_of(routes: list[BaseRoute], path: str) -> str:
    """Return the path pattern of a route, such as `/v1/models/{name}`, in the form of `/openapi.json`."""
    scope = {"type": "http", "path": path, "method": ""}
    found = next((route for route in routes if route.matches(scope)[0] is not Match.NONE), None)
    return _UNKNOWN if found is None else str(getattr(found, "path", _UNKNOWN)).replace(":path", "")


def _methods_of(routes: list[BaseRoute], scope: Scope) -> list[str]:
    """Return the methods that a path supports; empty for an unknown path."""
    found = (getattr(route, "methods", ()) for route in routes if route.matches(scope)[0] is not Match.NONE)
    return sorted({method for methods in found for method in methods})
