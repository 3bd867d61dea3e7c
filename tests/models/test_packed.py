"""Where a packed file is to lie.

Would catch: a pack of the embedded model in the installed program, of which an uninstall knows nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from smoe.models.files import DEMO_FOLDER, local_place
from smoe.models.packed import Contents
from smoe.user_cache import cache_folder


@pytest.mark.usefixtures("own_cache")
def test_a_pack_of_the_embedded_model_lies_in_the_users_cache(tmp_path: Path) -> None:
    """Though its folder can be written; of any other folder beside the weights."""
    contents, place = Contents("int4", "BF16", [], {}), local_place("demo")
    assert place == DEMO_FOLDER and contents.path(place).is_relative_to(cache_folder())
    assert contents.path(tmp_path) == tmp_path / "experts.int4.smoe"
