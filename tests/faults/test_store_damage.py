"""Damaged token stores and indexed files: what a row would be read from is refused, with the file named, or sound."""

from __future__ import annotations

import hashlib
import json
import random
import re
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c

from engine.data import checked_file
from engine.data.blend import blend
from engine.data.build_store import Request, preprocess
from engine.data.dataset import TokenDataset
from engine.data.store import open_store
from engine.data.store_paths import is_store
from engine.data.stored_rows import stored_dataset
from engine.errors import UserError

BLOCK = 64
Rows = list[list[tuple[list[int], list[bool]]]]
READERS: dict[str, dict[str, Any]] = {
    "documents": {"overlong": "cut"},
    "packed": {"packing": True, "overlong": "truncate"},
    "concatenated": {"packing": "concatenate"},
}
FLIPS = 40


def _json_digest(data: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=16).hexdigest()


def _sign(folder: Path, version: int, **facts: Any) -> None:
    data = {"format": "token-store", "version": version, **facts}
    (folder / "manifest.json").write_text(
        json.dumps({**data, "digest": _json_digest(data)} if version == 2 else data, indent=2) + "\n"
    )


def _write_store(folder: Path, *, version: int, masked: bool) -> Path:
    """The format, spelled out: 60 documents of up to 23 tokens of a vocabulary of 100."""
    chance = np.random.default_rng(0)
    lengths = chance.integers(2, 24, 60)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
    tokens = chance.integers(0, 100, offsets[-1]).astype("<u2")
    learnt = np.ones(len(tokens), dtype=np.uint8)
    learnt[offsets[:-1]] = 0
    if masked:
        learnt &= chance.integers(0, 2, len(tokens)).astype(np.uint8)
        for start, stop in pairwise(offsets):
            learnt[stop - 1] = stop - start > 1
    contents = {"tokens.bin": tokens.tobytes(), **({"targets.bin": learnt.tobytes()} if masked else {})}
    blocks = [part[at : at + BLOCK] for part in contents.values() for at in range(0, len(part), BLOCK)]
    contents["offsets.bin"] = offsets.tobytes()
    if version == 2:
        contents["blocks.bin"] = np.array([crc32c(block) for block in blocks], dtype="<u4").tobytes()
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    _sign(
        folder, version, dtype="uint16", tokens=len(tokens), documents=len(lengths), max_token=int(tokens.max()),
        tokenizer="t", checksums={name: f"{crc32c(content):08x}" for name, content in contents.items()}, sources=["a"],
    )  # fmt: skip
    return folder


def _rows(data: TokenDataset) -> Rows:
    return [
        [(tokens.tolist(), targets.tolist()) for tokens, targets in data.documents(row)] for row in range(len(data))
    ]


def _read(path: Path, settings: dict[str, Any]) -> Rows:
    return _rows(stored_dataset(path, tokenizer=None, seq_length=16, **settings))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_file, "BLOCK_BYTES", BLOCK)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_flipped_bits(tmp_path: Path, version: int, masked: bool) -> None:
    """In any file: refused, or the rows are those of the sound store (the manifest's spaces mean nothing)."""
    store = _write_store(tmp_path / "store", version=version, masked=masked)
    sound = {name: _read(store, settings) for name, settings in READERS.items()}
    chance, refused = random.Random(version), 0
    files = sorted(store.iterdir())
    for path in files * (FLIPS // len(files)):
        whole = path.read_bytes()
        data = bytearray(whole)
        place = chance.randrange(len(data))
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        for name, settings in READERS.items():
            try:
                rows = _read(store, settings)
            except UserError as error:
                refused += 1
                assert str(store) in str(error), str(error)
                assert path.name in str(error) or path.name == "manifest.json", (path.name, place, str(error))
            else:
                # names of sources are for people, and the first version has no digest
                unused = path.name == "manifest.json" and rows == sound[name]
                cut_off = path.suffix == ".bin" and settings.get("overlong") == "truncate" and rows == sound[name]
                assert unused or cut_off, f"{name}: {path.name} byte {place} was read without a word"
        path.write_bytes(whole)
    assert refused > FLIPS


def test_a_store_opens_without_being_read(tmp_path: Path) -> None:
    """Damage is found by the row that lies in it, and only there; a blend of sets finds it too."""
    store = _write_store(tmp_path / "store", version=2, masked=False)
    data = bytearray((store / "tokens.bin").read_bytes())
    data[-1] ^= 1
    (store / "tokens.bin").write_bytes(data)
    dataset = stored_dataset(store, tokenizer=None, seq_length=32)
    list(dataset.documents(0))
    start = (len(data) - 1) // BLOCK * BLOCK
    sentence = (
        rf"tokens\.bin is damaged: bytes {start} to {len(data)} have checksum [0-9a-f]{{8}}, but [0-9a-f]{{8}} was"
    )
    with pytest.raises(UserError, match=sentence):
        list(dataset.documents(len(dataset) - 1))
    with pytest.raises(UserError, match=sentence):
        _rows(blend([dataset, dataset], [1.0, 1.0]))


def _facts(store: Path) -> dict[str, Any]:
    data = json.loads((store / "manifest.json").read_text())
    return {key: value for key, value in data.items() if key not in ("format", "version", "digest")}


LIES: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("largest id", lambda facts: facts.update(max_token=50), r"tokens\.bin has \d+ at place \d+, but 0 to 50 are"),
    ("no targets", lambda facts: facts["checksums"].pop("targets.bin"), r"json has no checksum of targets\.bin"),
    ("no tokens", lambda facts: facts["checksums"].pop("tokens.bin"), r"json has no checksum of tokens\.bin"),
    ("no blocks", lambda facts: facts["checksums"].pop("blocks.bin"), r"json has no checksum of blocks\.bin"),
    ("another file", lambda facts: facts["checksums"].update({"../x": "0" * 8}), "no file of a store"),
    ("a checksum", lambda facts: facts["checksums"].update({"tokens.bin": 7}), "expected eight digits for each file"),
    ("checksums", lambda facts: facts.update(checksums=[]), "expected eight digits for each file"),
    ("tokens", lambda facts: facts.update(tokens=1e999), "has tokens inf, expected a number from 1"),
    ("more tokens", lambda facts: facts.update(tokens=1 << 40), r"offsets\.bin does not divide"),
    ("documents", lambda facts: facts.update(documents=-1), "has documents -1, expected a number from 1"),
    ("no documents", lambda facts: facts.update(documents=0), "has documents 0, expected a number from 1"),
    ("dtype", lambda facts: facts.update(dtype=[]), r"has dtype \[\], expected one of uint16, int32"),
    ("a large id", lambda facts: facts.update(max_token=1 << 16), "has max_token 65536, expected a number from 0"),
    ("a missing key", lambda facts: facts.pop("tokenizer"), "lacks 'tokenizer'"),
    ("a new key", lambda facts: facts.update(more=1), "has the unknown key 'more'"),
]  # fmt: skip


SAID = [(version, lie) for version in (1, 2) for lie in LIES if version == 2 or "blocks" not in lie[2]]


@pytest.mark.parametrize(("version", "lie"), SAID, ids=[f"{lie[0]} {version}" for version, lie in SAID])
def test_manifests_that_lie(
    tmp_path: Path, version: int, lie: tuple[str, Callable[[dict[str, Any]], object], str]
) -> None:
    """With a digest that is right, so that only what it says can give it away."""
    store = _write_store(tmp_path / "store", version=version, masked=True)
    facts, (_, change, words) = _facts(store), lie
    change(facts)
    _sign(store, version, **facts)
    with pytest.raises(UserError, match=words):
        _read(store, READERS["documents"])


def test_targets_that_are_no_flags(tmp_path: Path) -> None:
    """Checksums are right; each such token would count seven times."""
    store = _write_store(tmp_path / "store", version=1, masked=True)
    facts, flags = _facts(store), bytes(7 if flag else 0 for flag in (store / "targets.bin").read_bytes())
    (store / "targets.bin").write_bytes(flags)
    facts["checksums"]["targets.bin"] = f"{crc32c(flags):08x}"
    _sign(store, 1, **facts)
    with pytest.raises(UserError, match=r"targets\.bin has 7 at place \d+, but 0 to 1 are possible"):
        _read(store, READERS["documents"])


@pytest.mark.parametrize("text", ["[" * 100_000, "", "{", "\xff", '{"format": "token-store", "version": true}'])
def test_manifests_that_are_none(tmp_path: Path, text: str) -> None:
    store = _write_store(tmp_path / "store", version=2, masked=False)
    (store / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"manifest\.json is not"):
        open_store(store)


def test_checksums_of_nothing(tmp_path: Path) -> None:
    store = _write_store(tmp_path / "store", version=1, masked=False)
    facts = _facts(store)
    _sign(store, 1, **{**facts, "checksums": dict.fromkeys(facts["checksums"], "00000000")})
    with pytest.raises(UserError, match="has no checksums, so nothing can be checked"):
        open_store(store)


def test_what_preprocessing_writes_has_these_checksums(tmp_path: Path, data_dir: Path) -> None:
    records = tmp_path / "a.jsonl"
    lines = [{"prompt": f"What is {n}?", "completion": "It is " + "so " * (n % 9)} for n in range(90)]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    store = tmp_path / "store"
    preprocess(Request(files=(records,), tokenizer=data_dir / "tokenizers" / "minimind"), store)
    parts = [(store / name).read_bytes() for name in ("tokens.bin", "targets.bin")]
    expected = [crc32c(part[at : at + BLOCK]) for part in parts for at in range(0, len(part), BLOCK)]
    assert np.fromfile(store / "blocks.bin", "<u4").tolist() == expected and len(expected) > 20
    found = _facts(store)["checksums"]
    assert found == {name: f"{crc32c((store / name).read_bytes()):08x}" for name in found} and len(found) == 4


def _write_indexed(
    prefix: Path, ids: Any, lengths: list[int], *, pointers: list[int] | None = None, ends: list[int] | None = None,
    counts: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Megatron's format, version 1, ids of int32."""
    ends = list(range(len(lengths) + 1)) if ends is None else ends
    pointers = [4 * sum(lengths[:place]) for place in range(len(lengths))] if pointers is None else pointers
    Path(f"{prefix}.bin").write_bytes(np.array(ids, dtype="<i4").tobytes())
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, *(counts or (len(lengths), len(ends))))
        + np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes() + np.array(ends, "<i8").tobytes()
    )  # fmt: skip


IDS = list(range(10, 20))
INDEXED: dict[str, tuple[dict[str, Any], str]] = {
    "an id of -1": ({"ids": [*IDS[:7], -1, 5, 6]}, r"a_document\.bin has token id -1 at place 7"),
    "an id of -2^31": ({"ids": [-(2**31), *IDS[1:]]}, r"a_document\.bin has token id -2147483648 at place 0"),
    "a negative length": ({"lengths": [8, -2, 4]}, r"a_document\.idx says that sequence 1 has -2 tokens"),
    "lengths of nothing": ({"lengths": [0, 0, 0]}, r"a_document\.idx has no sequence with a token"),
    "no sequence": ({"lengths": []}, r"a_document\.idx has no sequence with a token"),
    "an empty file": ({"ids": []}, r"a_document\.bin is empty"),
    "both empty": ({"ids": [], "lengths": [0]}, r"a_document\.bin is empty"),
    "backwards": ({"pointers": [0, 16, 8]}, r"sequence 1 begins at byte 16, but those before it end at 12"),
    "below zero": ({"pointers": [-12, 0, 28]}, "sequence 0 begins at byte -12"),
    "documents backwards": ({"ends": [0, 2, 1, 3]}, "document end 2 is 1"),
    "documents beyond": ({"ends": [0, 2, 4]}, "document end 2 is 4"),
    "documents late": ({"ends": [1, 3]}, "document end 0 is 1"),
    "2^63 sequences": ({"counts": (2**63, 4)}, r"a_document\.idx is shorter than it says: 9223372036854775808 seq"),
    "2^64 - 1 documents": ({"counts": (3, 2**64 - 1)}, r"18446744073709551615 document ends take"),
    "fewer documents": ({"counts": (3, 2)}, r"a_document\.idx is longer than it says"),
    "a file cut short": ({"ids": IDS[:-1]}, r"a_document\.bin has 36 bytes, expected 40 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXED)
def test_indexed_files(tmp_path: Path, case: str) -> None:
    given, words = INDEXED[case]
    _write_indexed(tmp_path / "a_document", **{"ids": IDS, "lengths": [3, 4, 3], **given})
    with pytest.raises(UserError, match=words) as caught:
        _read(tmp_path / "a_document", READERS["documents"])
    assert str(tmp_path) in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize("name", ["wiki_text_document", "wiki.v2_text_document"])
def test_the_prefix_of_indexed_files(tmp_path: Path, name: str) -> None:
    """What Megatron's --data-path takes."""
    prefix = tmp_path / name
    assert not is_store(prefix)
    _write_indexed(prefix, IDS, [3, 4, 3])
    found = [_read(Path(f"{prefix}{ending}"), READERS["documents"]) for ending in ("", ".bin", ".idx")]
    assert found[0] == found[1] == found[2] and len(found[0]) == 3
    assert all(is_store(f"{prefix}{ending}") for ending in ("", ".bin", ".idx"))
    Path(f"{prefix}.idx").unlink()
    assert not is_store(prefix)
    with pytest.raises(UserError, match=rf"{re.escape(str(prefix))}\.idx is missing"):
        open_store(f"{prefix}.bin")
