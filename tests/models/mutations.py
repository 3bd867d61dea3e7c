"""Ways to damage a checkpoint, drawn by a seeded generator: what downloads, disks, editors and other programs do.

Every mutation is a function of a folder and a generator. It changes the folder's files in place and says which file,
and where it can, which key, an error should name.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
TEMPLATE = "chat_template.jinja"
JSON_FILES = (CONFIG, CONFIG, CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX)


class Mutation(NamedTuple):
    """What was done."""

    kind: str
    file: str
    key: str
    detail: str


Mutate = Callable[[Path, random.Random], Mutation]


def mutate(folder: Path, rng: random.Random) -> Mutation:
    """One mutation of the checkpoint in `folder`, in place."""
    return rng.choices([m for m, _ in _KINDS], [weight for _, weight in _KINDS])[0](folder, rng)


# values that do not belong where they are put


def _strange_values(rng: random.Random) -> list[Any]:
    deep: Any = 1
    for _ in range(rng.choice([10, 400])):
        deep = [deep]
    small = [
        None,
        True,
        False,
        "",
        "x",
        "é" * 50,
        -1,
        0,
        1,
        2,
        3,
        7,
        65,
        1.5,
        1e-30,
        [],
        {},
        [1],
        [None],
        {"a": 1},
        deep,
    ]
    return [*small, 10**6, 10**9, 10**18, 10**40, -(10**9), float("nan"), float("inf"), "bfloat16", "../x", ["a", "b"]]


def _places(value: Any, path: tuple[Any, ...] = (), depth: int = 5) -> list[tuple[Any, ...]]:
    """Paths to every value of a JSON tree; of long lists and dictionaries only the first few."""
    if depth == 0 or not isinstance(value, (dict, list)):
        return []
    items = list(value.items() if isinstance(value, dict) else enumerate(value))[:60]
    return [p for key, inner in items for p in [(*path, key), *_places(inner, (*path, key), depth - 1)]]


def _json_value(folder: Path, rng: random.Random) -> Mutation:
    """One value of a JSON file dropped, replaced or wrapped."""
    file, tree = _some_json(folder, rng)
    place = rng.choice(_places(tree))
    holder = tree
    for step in place[:-1]:
        holder = holder[step]
    key, old = place[-1], holder[place[-1]]
    how = rng.choice(["drop", "replace", "replace", "replace", "replace", "scale", "wrap", "rename"])
    if how == "drop":
        del holder[key]
    elif how == "scale" and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = rng.choice([-old, old + 1, old * 2, old // 2, old * 10**6, float(old), str(old)])
    elif how == "wrap":
        holder[key] = rng.choice([[old], {"value": old}, [old, old], json.dumps(old)])
    elif how == "rename" and isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
    else:
        holder[key] = rng.choice(_strange_values(rng))
    (folder / file).write_text(json.dumps(tree))
    named = next((str(step) for step in reversed(place) if isinstance(step, str)), "")
    shown = "" if isinstance(holder, list) or key not in holder else repr(holder[key])[:60]
    return Mutation("json value", file, named, f"{how} {'/'.join(map(str, place))}: {repr(old)[:40]} -> {shown}")


def _json_text(folder: Path, rng: random.Random) -> Mutation:
    """A JSON file that is none, or is one only just."""
    file, tree = _some_json(folder, rng)
    path = folder / file
    data = path.read_bytes()
    key = rng.choice(list(tree))
    twice = b"{%s: %s, %s" % (json.dumps(key).encode(), rng.choice([b"1", b"{}", b'"x"']), data.lstrip()[1:])
    ways: dict[str, bytes] = {
        "truncated": data[: rng.randrange(len(data))],
        "empty": b"",
        "utf-16": data.decode().encode("utf-16"),
        "byte order mark": b"\xef\xbb\xbf" + data,
        "latin-1": data.replace(b'"', b'"\xe9', 1),
        "nul": data[:20] + b"\0" + data[20:],
        "garbage": rng.randbytes(300),
        "deep lists": b"[" * 200_000,
        "deep objects": b'{"a":' * 200_000,
        "deep inside": data.rstrip()[:-1] + b', "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "a list": b"[1, 2]",
        "a number": b"17",
        "null": b"null",
        "a long number": data.rstrip()[:-1] + b', "number": ' + b"9" * 6000 + b"}",
        "key twice": twice,
        "trailing comma": data.rstrip()[:-1] + b",}",
        "page of html": b"<!DOCTYPE html><html>404 not found</html>",
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n",
    }
    way = rng.choice(sorted(ways))
    path.write_bytes(ways[way])
    return Mutation("json text", file, key if way == "key twice" else "", way)


def _some_json(folder: Path, rng: random.Random) -> tuple[str, Any]:
    file = rng.choice([name for name in JSON_FILES if (folder / name).exists()])
    return file, json.loads((folder / file).read_text())


def _not_a_file(folder: Path, rng: random.Random) -> Mutation:
    """Something else where a file should be."""
    file = rng.choice(sorted(path.name for path in folder.iterdir()))
    way = rng.choice(["gone", "folder", "loop", "dangling", "fifo", "empty"])
    (folder / file).unlink()
    if way == "folder":
        (folder / file).mkdir()
    elif way in ("loop", "dangling"):
        (folder / file).symlink_to(file if way == "loop" else "nowhere")
    elif way == "fifo":
        os.mkfifo(folder / file)
    elif way == "empty":
        (folder / file).touch()
    return Mutation("not a file", file, "", way)


# safetensors: header and data


def _shard(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def _parts(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _write(path: Path, header: bytes | dict[str, Any], data: bytes, length: int | None = None) -> None:
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def _tensor_key(header: dict[str, Any], rng: random.Random) -> str:
    """A tensor's key; experts and all else equally often."""
    keys = [key for key in header if key != "__metadata__"]
    chosen = [key for key in keys if (".experts." in key or "linear.weight" in key) == (rng.random() < 0.5)]
    return rng.choice(chosen or keys)


def _header_entry(folder: Path, rng: random.Random) -> Mutation:
    """One tensor's entry says something else than its bytes."""
    path = _shard(folder, rng)
    header, data = _parts(path)
    key = _tensor_key(header, rng)
    entry = header[key]
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    field, value = rng.choice(
        [
            ("data_offsets", [begin + 8, end + 8]),
            ("data_offsets", [begin, end + 64]),
            ("data_offsets", [end, begin]),
            ("data_offsets", [begin + 10**12, end + 10**12]),
            ("data_offsets", [-8, end]),
            ("data_offsets", [float(begin), float(end)]),
            ("data_offsets", [0, end - begin]),
            ("data_offsets", rng.choice(_strange_values(rng))),
            (
                "dtype",
                rng.choice(["F32", "F16", "BF16", "F64", "I16", "U16", "I64", "bf16", "BF17", "F8_E4M3", "", "C64"]),
            ),
            ("dtype", rng.choice(_strange_values(rng))),
            ("shape", shape[::-1]),
            ("shape", shape[::-1]),
            ("shape", shape[::-1]),
            ("shape", [1, *shape]),
            ("shape", [*shape, 1]),
            ("shape", [0, *shape[1:]]),
            ("shape", [_product(shape)]),
            ("shape", [2, *shape[:-1], shape[-1] // 2]),
            ("shape", [-n for n in shape]),
            ("shape", [float(n) for n in shape]),
            ("shape", [str(n) for n in shape]),
            ("shape", [10**30, *shape]),
            ("shape", rng.choice(_strange_values(rng))),
        ]
    )
    if rng.random() < 0.1:
        del entry[field]
    else:
        entry[field] = value
    _write(path, header, data)
    return Mutation(
        "header entry", path.name, key, f"{field} {shape if field == 'shape' else ''} -> {repr(value)[:60]}"
    )


def _header_keys(folder: Path, rng: random.Random) -> Mutation:
    """Tensors missing, renamed, exchanged, twice."""
    path = _shard(folder, rng)
    header, data = _parts(path)
    key, other = _tensor_key(header, rng), _tensor_key(header, rng)
    text: bytes | None = None
    way = rng.choice(["missing", "renamed", "next expert", "exchanged", "twice", "no entry", "overlap", "odd key"])
    if way == "missing":
        del header[key]
    elif way == "renamed":
        header[f"{key}_"] = header.pop(key)
    elif way == "next expert":
        header[key.replace("experts.0", "experts.11").replace("layers.0", "layers.9")] = header.pop(key)
    elif way == "exchanged":
        header[key]["shape"], header[other]["shape"] = header[other]["shape"], header[key]["shape"]
    elif way == "twice":
        text = json.dumps(header).encode()[:-1] + b", " + json.dumps({key: header[other]}).encode()[1:]
    elif way == "no entry":
        header[key] = rng.choice(_strange_values(rng))
    elif way == "overlap":
        header[key] = header[other]
    else:
        header[rng.choice(["", "\0", "../x", "model", "é" * 300])] = header.pop(key)
    _write(path, header if text is None else text, data)
    return Mutation("header keys", path.name, key, way)


def _header_text(folder: Path, rng: random.Random) -> Mutation:
    path = _shard(folder, rng)
    header, data = _parts(path)
    text = json.dumps(header).encode()
    lengths = [0, 1, len(text) - 1, len(text) + 1, len(text) + len(data), 2**27, 2**31, 2**63, 2**64 - 1]
    ways: dict[str, tuple[bytes, int | None]] = {
        "length": (text, rng.choice(lengths)),
        "deep": (b'{"a":' * 100_000, None),
        "deep lists": (text[:-1] + b', "x": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", None),
        "not text": (rng.randbytes(len(text)), None),
        "utf-16": (text.decode().encode("utf-16"), None),
        "a list": (b"[" + text + b"]", None),
        "metadata": (json.dumps({**header, "__metadata__": rng.choice(_strange_values(rng))}).encode(), None),
        "cut": (text[: len(text) // 2], None),
        "long number": (text.replace(b"[", b"[" + b"9" * 5000, 1), None),
    }
    way = rng.choice(sorted(ways))
    _write(path, ways[way][0], data, ways[way][1])
    return Mutation("header text", path.name, "", f"{way} {ways[way][1] or ''}")


def _file_length(folder: Path, rng: random.Random) -> Mutation:
    path = _shard(folder, rng)
    data = path.read_bytes()
    way = rng.choice(["cut", "cut", "cut", "longer", "zeros"])
    kept = rng.choice([rng.randrange(len(data)), len(data) - 1, 8, 100])
    path.write_bytes(
        {"cut": data[:kept], "longer": data + bytes(rng.choice([1, 4096])), "zeros": bytes(len(data))}[way]
    )
    return Mutation("file length", path.name, "", f"{way} {kept if way == 'cut' else ''}")


_NOT_FINITE = {
    "F32": (0x7F800000, 0x7FC00000, 0xFF800000),
    "BF16": (0x7F80, 0x7FC0, 0xFF80),
    "F16": (0x7C00, 0x7E00, 0xFC00),
}


def _not_finite(folder: Path, rng: random.Random) -> Mutation:
    """NaN or infinity in one element of one tensor."""
    path = _shard(folder, rng)
    header, data = _parts(path)
    key = _tensor_key(header, rng)
    entry = header[key]
    item = 4 if entry["dtype"] == "F32" else 2
    element = rng.randrange(_product(entry["shape"]))
    value = rng.choice(_NOT_FINITE[entry["dtype"]])
    place = entry["data_offsets"][0] + element * item
    _write(path, header, data[:place] + value.to_bytes(item, "little") + data[place + item :])
    return Mutation("not finite", path.name, key, f"{value:x} in element {element}")


# the index of shards


def _index(folder: Path, rng: random.Random) -> Mutation:
    """A shard's name that leads elsewhere, or no map at all."""
    path = folder / INDEX
    if not path.exists():
        shard = SINGLE
        tree: Any = {
            "metadata": {},
            "weight_map": dict.fromkeys((k for k in _parts(folder / SINGLE)[0] if k[0] != "_"), shard),
        }
    else:
        tree = json.loads(path.read_text())
    key = rng.choice(list(tree["weight_map"]))
    name = tree["weight_map"][key]
    outside = folder.parent / f"outside-{folder.name}.safetensors"
    outside.write_bytes((folder / name).read_bytes())
    values = [
        "nothing.safetensors",
        f"../{outside.name}",
        str(outside),
        ".",
        "",
        "..",
        "/",
        "/dev/zero",
        f"./{name}",
        3,
        None,
    ]
    value = rng.choice(
        [*values, [name], {"a": name}, "x" * 5000, "a\0b", CONFIG, INDEX, "é.safetensors", "sub/../" + name]
    )
    everywhere = rng.random() < 0.3
    for each in tree["weight_map"] if everywhere else [key]:
        tree["weight_map"][each] = value
    path.write_text(json.dumps(tree))
    return Mutation("index", INDEX, "" if everywhere else key, repr(value)[:60])


def _template(folder: Path, rng: random.Random) -> Mutation:
    broken = rng.choice(
        [
            "{% for m in messages %}",
            "{{ messages[0].content.nothing.at.all }}",
            "{{ 1 / 0 }}",
            "{{ raise_exception('no') }}",
            "{% endif %}",
            "{{ messages | nosuchfilter }}",
            "{{ ''.__class__.__mro__ }}",
            "{% for i in range(999999999) %}a{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% include 'x' %}",
            "{{ 'a' * 9 + 1 }}",
            "",
            "\udcff",
        ]
    )
    (folder / TEMPLATE).write_text(broken, errors="surrogateescape")
    return Mutation("template", TEMPLATE, "", broken[:40])


def _product(shape: list[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


_KINDS: list[tuple[Mutate, int]] = [
    (_json_value, 35),
    (_json_text, 12),
    (_not_a_file, 5),
    (_header_entry, 20),
    (_header_keys, 8),
    (_header_text, 6),
    (_file_length, 5),
    (_not_finite, 6),
    (_index, 5),
    (_template, 3),
]
