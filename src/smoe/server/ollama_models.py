"""Ollama's API about the model: `/api/tags`, `/api/show`, `/api/ps` and `/api/version`."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from smoe import __version__
from smoe.server.events import Json
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
        engine, entries = serving.engine, serving.engine.ledger.entries()
        experts = sum(held.experts for held in engine.store.layers.values())
        expert_bytes = entries["expert slots"] / engine.ledger.cache_slots
        self._nbytes = round(entries["non-expert weights"] + experts * expert_bytes)
        """The size of all weights."""
        family = str(serving.model.config.model_type)
        self._details: dict[str, Any] = {
            "parent_model": "",
            "format": "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        }

    def tags(self) -> dict[str, Any]:
        """Return the list of models: the served one."""
        return {"models": [self._entry() | {"modified_at": self._began}]}

    def running(self) -> dict[str, Any]:
        """Return the list of loaded models."""
        engine = self._serving.engine
        held = {"expires_at": _NEVER, "size_vram": engine.ledger.budget_bytes, "context_length": engine.context_tokens}
        return {"models": [self._entry() | held]}

    async def show(self, request: Request) -> Response:
        """Return the response to `/api/show`: the model's details."""
        return Json(await self._serving.read(OllamaShowAsked, request, lambda asked: self._shown()))

    def _shown(self) -> dict[str, Any]:
        serving, config = self._serving, self._serving.model.config.get_text_config()
        family = self._details["family"]
        capabilities = {
            "completion": True,
            "tools": serving.prompts.takes_tools and serving.prompts.format.has_calls,
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
        return {"name": name, "model": name, "size": self._nbytes, "digest": digest, "details": self._details}

    @property
    def _began(self) -> str:
        began = datetime.fromtimestamp(self._serving.began, timezone.utc)
        return began.isoformat().replace("+00:00", "Z")
