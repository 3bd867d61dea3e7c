"""Who may import whom. Would catch torch in a policy, a command line that takes seconds to answer, a circle
outwards.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "smoe"
HEAVY = ("torch", "transformers", "safetensors", "fastapi", "ray", "huggingface_hub")
VALUES = {"smoe.expert", "smoe.routing", "smoe.errors", "smoe.units", "smoe.plug_ins", "smoe.setting_declaration"}
"""Modules of plain values, of finding classes by name, and of declaring settings, that every package may use."""

ORDER = (
    "policy",
    "simulator",
    "formats",
    "memory",
    "kernels",
    "gpu_kernels",
    "machine",
    "models",
    "packing",
    "compute",
    "cluster",
    "fastpath",
    "prediction",
    "runtime",
    "trace",
    "conversation",
    "generation",
    "load",
    "report",
    "benchmark",
    "eval",
    "server",
    "cli",
)
"""Every package imports from those before it only (docs/architecture.md)."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("smoe", *path.relative_to(SOURCE).with_suffix("").parts)
        yield ".".join(parts).removesuffix(".__init__"), path


def imports(path: Path) -> set[str]:
    """Everything a file imports, at the top or inside a function; type-checking only imports too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names}
    return found


def is_module(name: str) -> bool:
    path = SOURCE.parent.joinpath(*name.split("."))
    return name.startswith("smoe") and (path.with_suffix(".py").exists() or (path / "__init__.py").exists())


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def smoe_imports(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] == "smoe"}


ALL = dict(modules())


@pytest.mark.parametrize("module", [m for m in ALL if package_of(m) == "policy"])
def test_policies_import_values_only(module: str) -> None:
    for name in imports(ALL[module]):
        top = name.split(".")[0]
        if top == "smoe":
            assert name in VALUES or name.startswith("smoe.policy"), name
        else:
            assert top in sys.stdlib_module_names | {"numpy"}, name
            assert top not in ("threading", "time", "pathlib", "os", "io"), f"{name}: no clock, files or threads here"


@pytest.mark.parametrize("module", [m for m in ALL if package_of(m) == "simulator"])
def test_the_simulator_imports_policies_only(module: str) -> None:
    for name in smoe_imports(ALL[module]):
        assert name in VALUES or name.startswith(("smoe.policy", "smoe.simulator")), name


@pytest.mark.parametrize("module", [m for m in ALL if package_of(m) == "memory"])
def test_memory_imports_inwards(module: str) -> None:
    """Bytes and slots know nothing of models, engines or people."""
    for name in smoe_imports(ALL[module]):
        assert name in VALUES or name.startswith(("smoe.memory", "smoe.policy", "smoe.formats")), name


def test_every_package_has_its_place() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert packages == set(ORDER)


def test_the_picture_of_the_packages_shows_the_imports() -> None:
    """docs/packages.svg: every package once, above all packages that it imports. Would catch a box left behind."""
    picture = (SOURCE.parents[1] / "docs" / "packages.svg").read_text(encoding="utf8")
    boxes = re.findall(r'<g class="package" id="(\w+)"><rect class="\w+" x="[\d.]+" y="(\d+)"', picture)
    height = {name: int(y) for name, y in boxes}
    assert sorted(name for name, _ in boxes) == sorted(ORDER)
    for module, path in ALL.items():
        above = package_of(module)
        for below in {package_of(name) for name in smoe_imports(path)} & set(ORDER) - {above}:
            if above in ORDER:
                assert height[above] < height[below], f"draw {above} above {below}, which {module} imports"


@pytest.mark.parametrize("page", ["architecture.md", "way-of-a-token.md"])
def test_pages_about_the_source_name_files_that_exist(page: str) -> None:
    text = (SOURCE.parents[1] / "docs" / page).read_text(encoding="utf8")
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text)
    everywhere = {path.name for path in SOURCE.rglob("*.py")}
    missing = [name for name in named if "/" in name and not (SOURCE / name).exists() and not name.startswith("tests/")]
    assert named and not missing
    assert {name for name in named if "/" not in name} <= everywhere


def test_the_architecture_page_lists_every_package() -> None:
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf8")
    listed = [name for row in text.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)/`", row)]
    assert sorted(listed) == sorted(ORDER)


@pytest.mark.parametrize("module", [m for m in ALL if package_of(m) in ORDER])
def test_packages_import_downwards(module: str) -> None:
    """Would catch a model that knows its engine, a measurement that knows the command line."""
    place = ORDER.index(package_of(module))
    for name in smoe_imports(ALL[module]):
        if package_of(name) in ORDER:
            assert ORDER.index(package_of(name)) <= place, name


SPEAKING = {"smoe.config", "smoe.policy.eviction.policies", "smoe.machine.findings"}
"""Modules outside `cli/` with texts of the command line: settings declare the help of their options."""


@pytest.mark.parametrize("module", [m for m in ALL if package_of(m) not in ("cli", "kernels") and m not in SPEAKING])
def test_only_the_command_line_speaks_of_options(module: str) -> None:
    """Messages name settings; `cli/console.py` shows options. Whole commands (`smoe tune --tpot`) may be named."""
    tree = ast.parse(ALL[module].read_text(encoding="utf8"))
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]  # docstrings
    told = {id(part) for node in statements for part in ast.walk(node) if isinstance(part, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            pattern = r"(?<!smoe [a-z]{4} )(?<!smoe [a-z]{5} )(?<!smoe [a-z]{6} )--[a-z]{2}"
            assert not re.search(pattern, node.value), node.value


def test_the_package_imports_nothing_of_the_repository_s_other_folders() -> None:
    """A wheel contains `src/smoe` only; commands reach `bench` by `cli/checkout.py`."""
    for module, path in ALL.items():
        assert {name.split(".")[0] for name in imports(path)}.isdisjoint({"bench", "tests", "training"}), module


def test_values_import_nothing_heavy() -> None:
    for module in VALUES:
        assert smoe_imports(ALL[module]) <= VALUES, module


LIGHT = ["smoe", "smoe.config", "smoe.errors", "smoe.units", "smoe.metrics"]
LIGHT += [m for m in ALL if package_of(m) in ("policy", "simulator")]
LIGHT += ["smoe.trace", "smoe.trace.record", "smoe.trace.file"]
LIGHT += ["smoe.server.listening_socket", "smoe.server.installed", "smoe.server.settings"]


def loaded_by(module: str) -> set[str]:
    code = f"import {module}, sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(SOURCE.parent)}, capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_light_modules_load_nothing_heavy() -> None:
    """In a fresh interpreter; all at once, and if that fails one by one to say which."""
    if loaded_by(", ".join(LIGHT)):
        assert {module: loaded_by(module) for module in LIGHT if loaded_by(module)} == {}


@pytest.mark.skipif("smoe.cli" not in ALL, reason="no command line in this tree")
def test_the_command_line_answers_at_once() -> None:
    assert loaded_by("smoe.cli") == set()


def test_what_is_exported_exists() -> None:
    import smoe

    assert all(getattr(smoe, name) is not None for name in smoe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = smoe.nothing
    assert importlib.util.find_spec("smoe") is not None


def reached(*starts: str) -> set[str]:
    """Our modules that importing these imports, by imports at the top of files."""
    found, left = set[str](), list(starts)
    while left:
        module = left.pop()
        if module in found or module not in ALL:
            continue
        found.add(module)
        body = ast.parse(ALL[module].read_text(encoding="utf8")).body
        for node in (each for each in body if isinstance(each, (ast.Import, ast.ImportFrom))):
            base = getattr(node, "module", None)
            left += [alias.name if base is None else f"{base}.{alias.name}" for alias in node.names]
            left += [] if base is None else [base]
    return found


def test_a_server_starts_without_the_simulator() -> None:
    modules = reached("smoe.cli.session", "smoe.server.app", "smoe.server.first_pass", "smoe.server.totals")
    assert "smoe.load.pretrained" in modules and not [name for name in modules if name.startswith("smoe.simulator")]


def test_a_model_is_read_without_the_readers_of_other_formats() -> None:
    modules = reached("smoe.models.checkpoint", "smoe.models.described")
    assert modules.isdisjoint({"smoe.models.gguf_sizes", "smoe.models.safetensors_sizes"})
    assert "smoe.models.safetensors_sizes" not in reached("smoe.models.gguf_file")
    assert "smoe.models.gguf_sizes" not in reached("smoe.models.safetensors_folder")
