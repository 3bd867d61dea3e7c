"""The images in messages: parts of messages in the forms of several APIs, and the bytes that their URLs name.

chat completions  {"type": "image_url", "image_url": {"url": URL}}
responses         {"type": "input_image", "image_url": URL}
Anthropic         {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from smoe.server.api_errors import refused

IMAGE_PARTS = ("image_url", "input_image", "image")
"""The types of parts that are images."""
_BASE64 = ";base64"


def has_images(content: Any) -> bool:
    """Return whether the content of a message has a part that is an image."""
    return isinstance(content, list) and any(part.get("type") in IMAGE_PARTS for part in content)


def with_images(content: str, images: Any) -> str | list[dict[str, Any]]:
    """Return the content of a message in the form of chat completions. `images`: image files in base64. Raises an
    `ApiError` if they are anything else."""
    if not images:
        return content
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise refused("'images' must be a list of image files in base64", "messages", "invalid_type")
    return [{"type": "text", "text": content}, *(_part(f"data:{_BASE64},{data}") for data in images)]


def url_of(part: dict[str, Any], param: str) -> str:
    """Return the URL of a part that is an image. Raises an `ApiError` if it has none."""
    given: Any = part.get("image_url")
    if isinstance(given, dict):
        given = given.get("url")
    source = part.get("source")
    if isinstance(source, dict):
        data = source.get("data") if source.get("type") == "base64" else None
        given = source.get("url") if data is None else f"data:{_BASE64},{data}"
    if not isinstance(given, str):
        raise refused("an image in a message must be a data URL or base64, or name a file of this server", param)
    return given


def bytes_of(url: str, folder: Path | None, most_bytes: int, param: str) -> bytes:
    """Return the image file that a URL contains or names. `folder`: the folder whose files may be named; None: none.

    Raises an `ApiError` for an address on the web, for a file elsewhere, and for data that is not base64.
    """
    if url.startswith("data:"):
        head, _, data = url.partition(",")
        if not head.endswith(_BASE64):
            raise refused("a data URL of an image must be in base64: data:image/png;base64,...", param)
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise refused("the data of an image is not valid base64", param) from error
    if url.startswith("file:"):
        return _bytes_of_file(url, folder, most_bytes, param)
    raise refused(
        f"this server downloads no images ({url[:40]!r}); send the image as a data URL: data:image/png;base64,...",
        param,
    )


def _bytes_of_file(url: str, folder: Path | None, most_bytes: int, param: str) -> bytes:
    if folder is None:
        raise refused(
            "this server reads no files; send the image as a data URL, or start the server with smoe serve "
            "--image-folder FOLDER",
            param,
        )
    try:
        path = Path(unquote(urlsplit(url).path)).resolve()
        is_allowed = path.is_relative_to(folder.resolve()) and path.is_file()
        data = path.read_bytes() if is_allowed and path.stat().st_size <= most_bytes else None
    except (OSError, ValueError) as error:
        raise refused("the file of an image cannot be read", param) from error
    if data is None:
        raise refused(
            f"the file of an image must be in the server's folder of images, and have at most {most_bytes} bytes", param
        )
    return data


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}
