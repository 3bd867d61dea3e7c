"""Prevents imports from the current folder, in this process and in the processes that it starts.

`python -m` and `python -c` put the current folder first on `sys.path`, so a file `json.py` next to a model's weights
would be run in place of the standard library's. Python 3.11 prevents this by `-P` and PYTHONSAFEPATH; Python 3.10 has
only `-I`, which also ignores PYTHONPATH and the user's own packages. So smoe removes the folder from `sys.path` before
other imports (`smoe/__init__.py`). A child process gets this process's `sys.path` in its first line, and runs in the
folder of the standard library.

    python -m smoe     runpy and its imports | smoe/__init__.py: drop_current_folder() | all other imports
    a child            python -c "import sys; sys.path[:] = [...]; ..."

Modules that Python imports before smoe's first line are not protected: `runpy`, and `site` if PYTHONPATH has an empty
entry. The command `smoe`, and `python -P -m smoe`, are protected completely. This module imports only modules that
Python has already loaded, so not even `__future__`.
"""

import os
import sys

WORKING_FOLDER = os.path.dirname(os.__file__)  # noqa: PTH120
"""The current folder of child processes: the standard library's, from which imports are harmless."""
_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
"""The absolute path of the folder that contains the package `smoe`."""
_FOLDERS = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_XET_CACHE", "TMPDIR")
"""The environment variables that name folders. A relative value refers to the parent's current folder."""


def drop_current_folder() -> None:
    """Remove the current folder from `sys.path`, where Python and empty entries of PYTHONPATH put it. From Python 3.11
    on, child processes (`multiprocessing`) do not add it either."""
    sys.path[:] = _without_current_folder(sys.path)
    os.environ["PYTHONSAFEPATH"] = "1"


def is_run_by_name() -> bool:
    """Return whether this interpreter is about to run `python -m smoe`, or a module of smoe."""
    if sys.argv[:1] != ["-m"]:
        return False
    name = sys.orig_argv[-len(sys.argv)]  # `smoe`, or `-msmoe` if given as one word
    name = name.partition("m")[2] if name.startswith("-") else name
    return name.split(".")[0] == "smoe"


def is_program() -> bool:
    """Return whether this interpreter is about to run the command `smoe`, by `python -m` or by an installed script."""
    script = os.path.basename(sys.argv[0] if sys.argv else "")  # noqa: PTH119
    return is_run_by_name() or script in ("smoe", "smoe.exe", "smoe-script.py")


def module_line(module: str, *arguments: str) -> list[str]:
    """Return a command line that calls `main` of one of smoe's modules in a new process."""
    return code_line(f"from {module} import main; main()", *arguments)


def code_line(code: str, *arguments: str) -> list[str]:
    """Return a command line that runs Python code in a new process with this process's import path."""
    path = [os.path.abspath(each) for each in _without_current_folder(sys.path)]  # noqa: PTH100
    path += [_PACKAGES] * (_PACKAGES not in path)
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}", *arguments]


def child_environment() -> dict[str, str]:
    """Return this process's environment for a child process in `WORKING_FOLDER`. Relative paths are made absolute, and
    the current folder is removed from PYTHONPATH."""
    found = {**os.environ, "PYTHONSAFEPATH": "1"}
    paths = found.pop("PYTHONPATH", "").split(os.pathsep)
    paths = [os.path.abspath(each) for each in _without_current_folder(paths)]  # noqa: PTH100
    if paths:
        found["PYTHONPATH"] = os.pathsep.join(paths)
    for name in _FOLDERS:
        if found.get(name):
            found[name] = os.path.abspath(found[name])  # noqa: PTH100
    return found


def _without_current_folder(path: list[str]) -> list[str]:
    return [each for each in path if each and (not _is_current(each) or _is_python_s_own(each))]


def _is_current(folder: str) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)  # noqa: PTH121
    except OSError:  # one of the two folders does not exist, so nothing can be imported from it
        return False


def _is_python_s_own(folder: str) -> bool:
    """Return whether a folder contains installed packages, smoe itself or the standard library. Python imports modules
    from such folders in any case."""
    name = os.path.basename(os.path.abspath(folder))  # noqa: PTH100, PTH119
    return name in ("site-packages", "dist-packages") or any(
        os.path.samefile(folder, own)  # noqa: PTH121
        for own in (_PACKAGES, WORKING_FOLDER)
        if os.path.exists(own)  # noqa: PTH110
    )
