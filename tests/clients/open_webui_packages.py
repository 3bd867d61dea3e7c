"""Installs Open WebUI without the packages that run models: `python -m tests.clients.open_webui_packages PYTHON`, where
PYTHON is that of an environment of its own. All requirements together are 7 GB, those without these packages 1 GB."""

from __future__ import annotations

import argparse
import json
import re
import subprocess

PACKAGE = "open-webui==0.12.4"
LEFT_OUT = {
    "accelerate",
    "einops",
    "faster-whisper",
    "opencv-python-headless",
    "rapidocr",
    "sentence-transformers",
    "transformers",
}
"""Requirements that Open WebUI imports only when it computes embeddings, speech or text in pictures itself."""
_REQUIREMENTS = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('open-webui')))"


def wanted(requirements: list[str]) -> list[str]:
    """The requirements that are installed: those of no extra, without those that are left out."""
    names = {each: re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in requirements}
    return [each for each, name in names.items() if "extra ==" not in each and name not in LEFT_OUT]


def install(python: str) -> None:
    """Install it into the environment of `python`."""
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "--no-deps", PACKAGE], check=True)
    found = subprocess.run([python, "-c", _REQUIREMENTS], check=True, capture_output=True, text=True)
    subprocess.run([*pip, *wanted(json.loads(found.stdout))], check=True)


def main() -> None:
    """Install it into the environment that is given."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("python", help="the Python of an environment of its own")
    install(parser.parse_args().python)


if __name__ == "__main__":
    main()
