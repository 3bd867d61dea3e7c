"""Ollama's API about the model: `/api/tags`, `/api/show`, `/api/ps` and `/api/version`."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from smoe import __version__
from smoe.server.events import Json
from smoe.server.model_files import files_of
from smoe.server.ollama_fields import OllamaShowAsked
from smoe.server.serving import Serving

_FOLLOWED = "0.13.0"
"""The version of Ollama's API that is followed: clients decide by it what they send."""
_NEVER = "9999-12-31T23:59:59Z"
"""The time at which the model is unloaded, in a form that clients take for "never"."""


def ollama_version() -> dict[str, str]:
    """Return the version of the API, and of smoe."""
    return {"version": _FOLLOWED, "smoe": __version__}


class OllamaModel:
    """The served model in the form of Ollama's API."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._files = files = files_of(serving.model)
        self._details: dict[str, Any] = {
            "parent_model": "",
            "format": files.format,
            "family": files.architecture,
            "families": [files.architecture],
            "parameter_size": _in_short(files.parameters),
            "quantization_level": files.quantisation,
        }

    def tags(self) -> dict[str, Any]:
        """Return the list of models: the served one."""
        return {"models": [self._entry() | {"modified_at": self._began}]}

    def running(self) -> dict[str, Any]:
        """Return the list of loaded models."""
        engine = self._serving.engine
        vram = 0 if self._serving.model.device.type == "cpu" else engine.ledger.budget_bytes
        held = {"expires_at": _NEVER, "size_vram": vram, "context_length": engine.context_tokens}
        return {"models": [self._entry() | held]}

    async def show(self, request: Request) -> Response:
        """Return the response to `/api/show`: the model's details."""
        return Json(await self._serving.read(OllamaShowAsked, request, lambda asked: self._shown()))

    def _shown(self) -> dict[str, Any]:
        serving, config = self._serving, self._serving.model.config.get_text_config()
        family = self._files.architecture
        capabilities = {
            "completion": True,
            "tools": serving.prompts.takes_tools and serving.prompts.format.has_calls,
            "vision": serving.prompts.takes_images,
            "thinking": serving.prompts.has_template and serving.prompts.format.reasons,
        }
        return {
            "modelfile": f"FROM {serving.name}\n",
            "parameters": f"num_ctx {serving.engine.context_tokens}",
            "template": serving.prompts.template,
            "details": self._details,
            "model_info": {
                "general.architecture": family,
                "general.basename": serving.name,
                "general.parameter_count": self._files.parameters,
                f"{family}.context_length": serving.engine.context_tokens,
                f"{family}.block_count": config.num_hidden_layers,
                f"{family}.embedding_length": config.hidden_size,
            },
            "capabilities": [name for name, has in capabilities.items() if has],
            "modified_at": self._began,
        }

    def _entry(self) -> dict[str, Any]:
        name = self._serving.name
        digest = hashlib.sha256(self._serving.fingerprint.encode()).hexdigest()
        return {"name": name, "model": name, "size": self._files.nbytes, "digest": digest, "details": self._details}

    @property
    def _began(self) -> str:
        began = datetime.fromtimestamp(self._serving.began, timezone.utc)
        return began.isoformat().replace("+00:00", "Z")


def _in_short(number: int) -> str:
    """Return a number of parameters in Ollama's form: `30.5B`, `136.73M`."""
    for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if number >= size:
            return f"{number / size:.{0 if number % size == 0 else digits}f}{unit}"
    return str(number)
