"""From which folders a process of ours imports: never from the one that it was started in.

`python -m` and `python -c` put the current folder first on `sys.path`, so a file `json.py` next to a model's weights
would be run in the place of the library's. Python 3.11 has `-P` and PYTHONSAFEPATH against it; Python 3.10 has only
`-I`, which also drops PYTHONPATH and the user's own packages. So the folder is taken off the path before anything else
is imported (`smoe/__init__.py`), and a child gets this process's path, and a folder of Python's own to work in, from
its first line on:

    python -m smoe     runpy and what it imports | smoe/__init__.py: drop_current_folder() | everything else
    a child            python -c "import sys; sys.path[:] = [...]; ..."

What Python imports before our first line cannot be protected (`runpy`, and `site` where PYTHONPATH has an empty entry);
the command `smoe`, and `python -P -m smoe`, have no such gap. This module imports only what is loaded by then, thus
not even `__future__`.
"""

import os
import sys

WORKING_FOLDER = os.path.dirname(os.__file__)  # noqa: PTH120
"""Where children work: the folder of the standard library, in which the first on the path is what it should be."""
_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
"""The folder that this package was imported from."""
_FOLDERS = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_XET_CACHE", "TMPDIR")
"""Variables that name folders; a relative one is of the parent's current folder."""


def drop_current_folder() -> None:
    """Take the folder that this process was started in off `sys.path`, in which Python and PYTHONPATH's empty entries
    put it; from then on children (`multiprocessing`) get none either, from Python 3.11 on."""
    sys.path[:] = _without_current_folder(sys.path)
    os.environ["PYTHONSAFEPATH"] = "1"


def is_run_by_name() -> bool:
    """Whether this interpreter is about to run `python -m smoe`, or a module of it."""
    if sys.argv[:1] != ["-m"]:
        return False
    name = sys.orig_argv[-len(sys.argv)]  # `smoe`, or `-msmoe` where the two are one word
    name = name.partition("m")[2] if name.startswith("-") else name
    return name.split(".")[0] == "smoe"


def is_program() -> bool:
    """Whether this interpreter is about to be the command `smoe`, by name or as the script that an installer made."""
    script = os.path.basename(sys.argv[0] if sys.argv else "")  # noqa: PTH119
    return is_run_by_name() or script in ("smoe", "smoe.exe", "smoe-script.py")


def module_line(module: str, *arguments: str) -> list[str]:
    """A command line that calls `main` of a module of ours in a process of its own."""
    return code_line(f"from {module} import main; main()", *arguments)


def code_line(code: str, *arguments: str) -> list[str]:
    """A command line that runs this code in a process of its own, which imports from where this one does."""
    path = [os.path.abspath(each) for each in _without_current_folder(sys.path)]  # noqa: PTH100
    path += [_PACKAGES] * (_PACKAGES not in path)
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}", *arguments]


def child_environment() -> dict[str, str]:
    """This process's environment for a child in `WORKING_FOLDER`: what is relative to the current folder is made
    absolute, and the current folder itself is not imported from."""
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
    except OSError:  # one of the two is missing: nothing is imported from it
        return False


def _is_python_s_own(folder: str) -> bool:
    """Who starts us in a folder of packages, or in a checkout's `src`, imports from it anyway."""
    name = os.path.basename(os.path.abspath(folder))  # noqa: PTH100, PTH119
    return name in ("site-packages", "dist-packages") or any(
        os.path.samefile(folder, own)  # noqa: PTH121
        for own in (_PACKAGES, WORKING_FOLDER)
        if os.path.exists(own)  # noqa: PTH110
    )
