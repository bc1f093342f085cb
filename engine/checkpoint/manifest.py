"""The manifest: the tensors of a checkpoint directory, and where each piece of each tensor is.

One JSON file, written last, so that its presence means that the directory is complete. Its last line is a digest of all
before it, so that no byte of it can change unnoticed. It knows nothing of models; `model` and `training` are passed
through.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from pathlib import Path

import engine
from engine.checkpoint.manifest_fields import check_file, manifest_from_json, require_readable
from engine.checkpoint.manifest_records import Kind, Manifest, PieceRecord, TensorRecord
from engine.errors import UserError
from engine.files.durable import sync_folder, write_durably
from engine.files.strict_json import JsonFlaw, parse_json

__all__ = [
    "ENGINE_VERSION",
    "MANIFEST",
    "Kind",
    "Manifest",
    "PieceRecord",
    "TensorRecord",
    "check_file",
    "manifest_from_json",
    "manifest_text",
    "read_manifest",
    "sign",
    "write_manifest",
]

MANIFEST = "manifest.json"
ENGINE_VERSION = engine.__version__
_MAX_BYTES = 256 << 20
_SIGNATURE = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n}\n')
_SIGNATURE_BYTES = len(',\n "digest": ""\n}\n') + 32


def manifest_text(manifest: Manifest) -> str:
    """Returns the manifest as JSON for people and programs, a line for each tensor; not yet signed."""
    data = manifest.to_json()
    tensors = data.pop("tensors")
    head = json.dumps(data, indent=1).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(record)}" for name, record in tensors.items())
    return f'{head},\n "tensors": {{\n{rows}\n }}\n}}\n'


def sign(text: str) -> bytes:
    """Returns the bytes of a manifest file: the JSON mapping `text` with a digest of itself as its last entry."""
    body = text.rstrip().removesuffix("}").rstrip().encode()
    return body + f',\n "digest": "{_digest(body)}"\n}}\n'.encode()


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `folder`/manifest.json so that it is either absent or whole, and durable on return.

    Raises:
        UserError: the disk does not take it, or it could not be read again.
    """
    data = sign(manifest_text(manifest))
    if len(data) > _MAX_BYTES:
        raise UserError(
            f"{folder / MANIFEST} would have {len(data)} bytes, and no more than {_MAX_BYTES} can be read: write fewer "
            "and larger pieces."
        )
    write_durably(folder / MANIFEST, data)
    sync_folder(folder)


def read_manifest(folder: Path, *, looks_at_files: bool = True) -> Manifest:
    """Reads and validates `folder`/manifest.json, and checks that its files exist in full size.

    Args:
        looks_at_files: False where another rank checks all files: there are as many as ranks that wrote, and a reader
            checks each one that it opens in any case.

    Raises:
        UserError: it is missing, not a manifest, of another version, damaged or inconsistent; the sentence names the
            file.
    """
    path = folder / MANIFEST
    try:
        text = _read_text(path)
        data = parse_json(text)
    except FileNotFoundError as error:
        raise UserError(f"{folder} has no {MANIFEST}: it is not a complete checkpoint, use another one.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): use another checkpoint.") from error
    except JsonFlaw as flaw:
        raise UserError(f"{path} cannot be read ({flaw}): expected a manifest, use another checkpoint.") from None
    require_readable(data, path)
    body, signature = text[:-_SIGNATURE_BYTES], _SIGNATURE.fullmatch(text[-_SIGNATURE_BYTES:])
    if signature is None or signature[1].decode() != _digest(body):
        raise UserError(
            f"{path} is damaged: its text is not the one that its digest was made of; use another copy of the "
            "checkpoint."
        )
    manifest = manifest_from_json(data, path)
    if looks_at_files:
        for name, size in manifest.files.items():
            check_file(path, name, size)
    return manifest


def _read_text(path: Path) -> bytes:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise JsonFlaw("it is not a regular file")
    if found.st_size > _MAX_BYTES:
        raise JsonFlaw(f"it has {found.st_size} bytes, more than {_MAX_BYTES}")
    return path.read_bytes()
