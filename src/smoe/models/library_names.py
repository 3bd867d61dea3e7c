"""Finds out whether transformers has a model family, from the names in transformers' own files, without importing it.

The import takes seconds. A name that these files do not contain is certainly unknown to transformers.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smoe.errors import UnsupportedModelError
from smoe.models.registration import LOCAL_FAMILIES, OPENED_FAMILIES

_FILES = ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py")
"""The files of transformers with the names of all families and of their classes. Older versions lack the first one."""


def unknown_family(config_place: Path, fields: Mapping[str, Any]) -> UnsupportedModelError:
    """Return the error for a family that transformers lacks. `fields`: the fields of the config.json at
    `config_place`."""
    own_code = ", and the repository's own code ('auto_map') is not executed" if fields.get("auto_map") else ""
    return UnsupportedModelError(
        f"{config_place}: transformers has neither the family {fields.get('model_type')!r:.80} nor a "
        f"class {fields.get('architectures')!r:.80}{own_code}; docs/families.md lists what works"
    )


def refuse_unknown_family(config_place: Path, fields: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModelError` for a family that transformers certainly lacks. The arguments are those of
    `unknown_family`.

    If transformers is already imported, its own tables are faster and exact, and nothing is raised here.
    """
    if "transformers" in sys.modules:
        return
    known = _known_names()
    named = fields.get("architectures")
    names = [fields.get("model_type"), *(named if isinstance(named, list) else [])]
    is_own = names[0] in LOCAL_FAMILIES or names[0] in OPENED_FAMILIES
    if known and not is_own and not any(f'"{name}"' in known for name in names):
        raise unknown_family(config_place, fields)


def _known_names() -> str:
    """Return the contents of transformers' files with names of families and classes; empty if there are none."""
    found = importlib.util.find_spec("transformers")
    folder = None if found is None or found.origin is None else Path(found.origin).parent / "models" / "auto"
    paths = [] if folder is None else [folder / name for name in _FILES]
    return "\n".join(path.read_text(encoding="utf8") for path in paths if path.is_file())
