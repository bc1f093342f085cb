"""Damages a training checkpoint in a way that a seed chooses: what disks, copies and hostile people do to files."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.checkpoint.manifest import MANIFEST, sign

Kind = Callable[[Path, Path, random.Random], str]


def damage(folder: Path, other: Path, seed: int) -> str:
    """Changes `folder`; says how.

    Args:
        other: a sound checkpoint of the same run and layout with other values.
    """
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    return f"{kind.__name__}: {kind(folder, other, chance)}"


def _file(folder: Path, chance: random.Random, suffix: str = "") -> Path:
    return chance.choice(sorted(path for path in folder.iterdir() if path.name.endswith(suffix)))


def flip_a_bit(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance)
    data = bytearray(path.read_bytes())
    place, bit = chance.randrange(len(data)), chance.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"{path.name} byte {place} bit {bit}"


def flip_a_bit_of_a_header(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance, ".safetensors")
    data = bytearray(path.read_bytes())
    place, bit = chance.randrange(8 + struct.unpack("<Q", data[:8])[0]), chance.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"{path.name} byte {place} bit {bit}"


def cut_off(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance)
    size = path.stat().st_size
    keep = chance.choice([0, 1, 7, 8, size - 1, chance.randrange(size)])
    os.truncate(path, keep)
    return f"{path.name} to {keep} of {size}"


def append(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance)
    with open(path, "ab") as file:
        file.write(chance.choice([b"\0", b"\n", b" ", b"}", chance.randbytes(9)]))
    return path.name


def lose(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance)
    path.unlink()
    return path.name


def zero_a_block(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance)
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data) - 16)
    length = chance.choice([16, len(data) - start])
    replacement = chance.choice([bytes(length), chance.randbytes(length)])
    if data[start : start + length] == replacement:
        replacement = b"\xff" * length
    data[start : start + length] = replacement
    path.write_bytes(data)
    return f"{path.name} [{start}, {start + length})"


def swap_files(folder: Path, other: Path, chance: random.Random) -> str:
    one, two = (folder / f"rank_0000{rank}.safetensors" for rank in (0, 1))
    os.rename(one, folder / "x")
    os.rename(two, one)
    os.rename(folder / "x", two)
    return "of two ranks"


def mix_checkpoints(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance)
    while path.read_bytes() == (other / path.name).read_bytes():
        path = _file(folder, chance)
    shutil.copyfile(other / path.name, path)
    return f"{path.name} of another checkpoint"


def _split(path: Path) -> tuple[dict[str, Any], bytearray]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])


def _join(path: Path, header: str, body: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + body)


def swap_pieces(folder: Path, other: Path, chance: random.Random) -> str:
    """The bytes of two tensors of one size change places; the header stays."""
    path = _file(folder, chance, ".safetensors")
    header, body = _split(path)
    places = [entry["data_offsets"] for entry in header.values()]
    pairs = [(a, b) for a in places for b in places if a < b and a[1] - a[0] == b[1] - b[0]]
    a, b = chance.choice(pairs)
    body[slice(*a)], body[slice(*b)] = body[slice(*b)], body[slice(*a)]
    _join(path, json.dumps(header, separators=(",", ":")), bytes(body))
    return f"{path.name} {a} {b}"


def edit_the_manifest(folder: Path, other: Path, chance: random.Random) -> str:
    """By hand, in an editor: the numbers of the run, in a way that makes sense."""
    path = folder / MANIFEST
    text = path.read_text()
    old, new = chance.choice(
        [
            ('"step": 50', '"step": 51'),
            ('"consumed": 200', '"consumed": 0'),
            ('"path": "base"', '"path": "/etc"'),
            ('"tensor": 1', '"tensor": 2'),
            ('"alpha": 6.0', '"alpha": 12.0'),
            (' "version"', '  "version"'),
            ("\n}\n", "\n}"),
        ]
    )
    assert old in text, old
    path.write_text(text.replace(old, new, 1))
    return f"{old} -> {new}"


def hostile_manifest(folder: Path, other: Path, chance: random.Random) -> str:
    """With a digest that is right, so that only what it says can give it away."""
    path = folder / MANIFEST
    data = json.loads(path.read_text())
    del data["digest"]
    name = chance.choice(sorted(data["tensors"]))
    record = data["tensors"][name]
    piece = chance.choice(record["pieces"])
    file = piece["file"]
    choice = chance.choice(HOSTILE)
    text = choice(data, name, record, piece, file)
    path.write_bytes(sign(text or json.dumps(data)))
    return choice.__name__


def hostile_header(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance, ".safetensors")
    header, body = _split(path)
    name = chance.choice(sorted(header))
    entry = header[name]
    begin, end = entry["data_offsets"]
    text = None
    what = chance.randrange(16)
    if what == 0:
        entry["data_offsets"] = [begin, end + (1 << 40)]
    elif what == 1:
        entry["data_offsets"] = [-8, end]
    elif what == 2:
        entry["shape"] = [1 << 40, 1 << 40]
    elif what == 3:
        entry["shape"] = [2] * 100_000
    elif what == 4:
        entry["dtype"] = "F99"
    elif what == 5:
        entry["dtype"] = "F16"
    elif what == 6:
        entry["shape"] = [True, *entry["shape"][1:]]
    elif what == 7:
        text = json.dumps(header)[:-1] + f', "{name}": {json.dumps(entry)}}}'
    elif what == 8:
        text = "[" * 200_000
    elif what == 9:
        text = "{" + '"a":{' * 100_000 + "}" * 100_001
    elif what == 10:
        header["more"] = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    elif what == 11:
        del header[name]
    elif what == 12:
        entry["shape"] = [float(size) for size in entry["shape"]]
    elif what == 13:
        text = '{"__metadata__": {"a": 1}, ' + json.dumps(header)[1:]
    elif what == 14:
        text = json.dumps(header).replace(str(end), "9" * 6000, 1)
    else:
        path.write_bytes(struct.pack("<Q", chance.choice([1 << 63, (1 << 64) - 1, 1 << 40, 0])) + path.read_bytes()[8:])
        return f"{path.name} length"
    _join(path, text or json.dumps(header), bytes(body))
    if path.stat().st_size != (manifest := json.loads((folder / MANIFEST).read_text()))["files"][path.name]:
        manifest["files"][path.name] = path.stat().st_size  # so that the size does not give it away
        del manifest["digest"]
        (folder / MANIFEST).write_bytes(sign(json.dumps(manifest)))
    return f"{path.name} {what}"


def strange_file(folder: Path, other: Path, chance: random.Random) -> str:
    """What has the name of a file is none, or lies elsewhere."""
    path = _file(folder, chance, chance.choice([".safetensors", MANIFEST, "run.yaml"]))
    what = chance.choice(["link", "dangling", "loop", "folder", "fifo"])
    if path.suffix != ".safetensors" and what == "link":
        what = "folder"
    outside = folder.parent / f"outside-{path.name}"
    os.replace(path, outside)
    if what == "link":
        path.symlink_to(outside)
    elif what == "dangling":
        path.symlink_to(folder.parent / "nowhere")
    elif what == "loop":
        path.symlink_to(path)
    elif what == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    return f"{path.name} {what}"


def _set(place: str, value: Any) -> Callable[..., None]:
    def change(data: Any, name: str, record: Any, piece: Any, file: str) -> None:
        target = {"data": data, "record": record, "piece": piece, "files": data["files"]}[place.partition(".")[0]]
        target[place.partition(".")[2]] = value

    change.__name__ = f"{place}={str(value)[:30]}"
    return change


def _rename_file(new: str) -> Callable[..., None]:
    def change(data: Any, name: str, record: Any, piece: Any, file: str) -> None:
        data["files"][new] = data["files"][file]
        piece["file"] = new

    change.__name__ = f"file {new[:30]!r}"
    return change


def _rename_tensor(new: str) -> Callable[..., None]:
    def change(data: Any, name: str, record: Any, piece: Any, file: str) -> None:
        data["tensors"][new] = data["tensors"].pop(name)

    change.__name__ = f"tensor {new[:30]!r}"
    return change


def many_pieces(data: Any, name: str, record: Any, piece: Any, file: str) -> None:
    record["shape"] = [1 << 20, 1]
    record["pieces"] = [
        {**piece, "dim": 0, "offset": row, "length": 1, "key": f"k{row}", "others": []} for row in range(20_000)
    ]


def half_a_piece(data: Any, name: str, record: Any, piece: Any, file: str) -> None:
    record["pieces"].remove(piece)


def the_same_twice(data: Any, name: str, record: Any, piece: Any, file: str) -> None:
    record["pieces"].append(dict(piece))


def claims_more(data: Any, name: str, record: Any, piece: Any, file: str) -> None:
    record["shape"] = [1 << 44]
    record["pieces"] = [{**piece, "dim": None}]


def another_dtype(data: Any, name: str, record: Any, piece: Any, file: str) -> None:
    record["dtype"] = "I32"


def twice_the_tensor(data: Any, name: str, record: Any, piece: Any, file: str) -> str:
    return json.dumps(data).replace('"tensors": {', f'"tensors": {{"{name}": {json.dumps(record)}, ', 1)


def deep(data: Any, name: str, record: Any, piece: Any, file: str) -> str:
    return json.dumps(data).replace('"model": {}', '"model": ' + "[" * 150_000 + "]" * 150_000, 1)


def long_number(data: Any, name: str, record: Any, piece: Any, file: str) -> str:
    return json.dumps(data).replace('"model": {}', '"model": {"a": ' + "7" * 10_000 + "}", 1)


HOSTILE: tuple[Callable[..., Any], ...] = (
    _rename_file("../rank_00000.safetensors"),
    _rename_file("/etc/passwd"),
    _rename_file(".."),
    _rename_file("a/b"),
    _rename_file("nul\0l"),
    _rename_file("\ud800"),
    _rename_file("x" * 5000),
    _rename_file("-rf"),
    _rename_file("none.safetensors"),
    _rename_tensor("x" * 100_000),
    _rename_tensor("two\nlines"),
    _rename_tensor("\udfff"),
    _rename_tensor(""),
    _set("record.shape", [1 << 47, 2]),
    _set("record.shape", [-1]),
    _set("record.shape", [2] * 5000),
    _set("record.shape", "wide"),
    _set("record.shape", [float("nan")]),
    _set("files.rank_00000.safetensors", float("inf")),
    _set("record.shape", [10**400]),
    _set("record.dtype", "F128"),
    _set("record.dtype", 7),
    _set("record.encoding", "pickle"),
    _set("record.pieces", []),
    _set("record.pieces", [7]),
    _set("record.pieces", None),
    _set("piece.dim", 1 << 70),
    _set("piece.dim", "0"),
    _set("piece.offset", -1),
    _set("piece.others", [[0, 0]]),
    _set("piece.others", [["a", "b", "c"]]),
    _set("piece.file", 7),
    _set("piece.key", "another"),
    _set("piece.key", None),
    _set("piece.checksum", "00000000"),
    _set("piece.checksum", "zzzzzzzz"),
    _set("piece.checksum", 0),
    _set("data.tensors", []),
    _set("data.files", {}),
    _set("data.files", "x"),
    _set("data.layout", {"tensor": -1}),
    _set("data.model", 7),
    _set("data.training", {}),
    _set("data.training", {"state": [], "base": {}, "lora": {}}),
    _set("data.kind", "base"),
    _set("data.kind", ["training"]),
    _set("data.format", "another"),
    _set("data.version", 3),
    _set("data.version", True),
    _set("data.checksum_algorithm", "none"),
    _set("data.engine_version", 1),
    _set("data.fingerprint", 1),
    _set("files.rank_00000.safetensors", 8),
    _set("files.more.safetensors", 8),
    many_pieces,
    half_a_piece,
    the_same_twice,
    claims_more,
    another_dtype,
    twice_the_tensor,
    deep,
    long_number,
)

KINDS: tuple[Kind, ...] = (
    flip_a_bit,
    flip_a_bit_of_a_header,
    cut_off,
    append,
    lose,
    zero_a_block,
    swap_files,
    mix_checkpoints,
    swap_pieces,
    edit_the_manifest,
    hostile_manifest,
    hostile_manifest,
    hostile_header,
    strange_file,
)
