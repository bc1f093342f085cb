"""Which files of a repository a command needs: those in its root that the engine reads, and never a pickle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from engine.checkpoint.folder import ADAPTER_CONFIG, CONFIG
from engine.checkpoint.hf_tensors import INDEX, SINGLE
from engine.config.hub import Need
from engine.conversion.peft_read import ADAPTER_WEIGHTS
from engine.errors import UserError
from engine.files.documents import read_json
from engine.hub.listing import Listing

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""Files of which a tokenizer has at least one."""
_BESIDE = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".md", ".py")
"""Endings of the small files beside weights. Python files travel with a model and are never executed."""
_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
_MAX_BESIDE = 256 << 20
_INDEX_ENDING = ".index.json"


def small_files(listing: Listing, need: Need) -> list[str]:
    """Returns the files beside the weights, those last by which a snapshot is known to be complete.

    Raises:
        UserError: the repository is not of the kind that is needed.
    """
    main = ADAPTER_CONFIG if need == "adapter" or _is_adapter(listing.files, need) else CONFIG
    if main not in listing.files and (need != "tokenizer" or not any(name in listing.files for name in TOKENIZERS)):
        what = "a PEFT adapter" if main == ADAPTER_CONFIG else "a model that transformers opens"
        raise UserError(f"{listing.repo} has no {main} at {listing.commit[:12]}, so it is not {what}: check the name.")
    if need == "config":
        return [CONFIG]
    beside = [
        path
        for path, file in listing.files.items()
        if "/" not in path and file.size <= _MAX_BESIDE and is_beside(path) and path not in (main, *TOKENIZERS)
    ]
    if SINGLE not in listing.files and INDEX in listing.files and need in ("model", "either"):
        beside.append(INDEX)
    return [*sorted(beside), *(name for name in (*TOKENIZERS, main) if name in listing.files)]


def weight_files(listing: Listing, need: Need, index: Callable[[], Path]) -> list[str]:
    """Returns the files of weights.

    Args:
        index: returns where the index of shards lies.

    Raises:
        UserError: there are none, or the index names files that the repository lacks.
    """
    if need in ("config", "tokenizer"):
        return []
    files = listing.files
    if need == "adapter" or _is_adapter(files, need):
        return [_required(listing, ADAPTER_WEIGHTS, "adapter_model.bin")]
    if SINGLE in files:
        return [SINGLE]
    if INDEX not in files:
        return [_required(listing, SINGLE, "pytorch_model.bin", "pytorch_model.bin.index.json")]
    shards = shard_names(index())
    for name in shards:
        if name not in files or not name.endswith(".safetensors"):
            raise UserError(f"{INDEX} of {listing.repo} names {name!r}, which is no weight file of it: report it.")
    return shards


def lacking(snapshot: Path, need: Need, *, no_tokenizer: bool) -> list[str]:
    """Returns the files that a snapshot in the cache lacks for a need.

    Args:
        no_tokenizer: the repository is known to have no tokenizer.
    """
    if need == "adapter" or _is_adapter([path.name for path in snapshot.iterdir()], need):
        return absent_files(snapshot, (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    has_tokenizer = no_tokenizer or any((snapshot / name).is_file() for name in TOKENIZERS)
    absent = [] if need == "config" or has_tokenizer else [TOKENIZERS[0]]
    if need == "tokenizer":
        return absent
    absent += absent_files(snapshot, (CONFIG,))
    if need == "config" or (snapshot / SINGLE).is_file():
        return absent
    if not (snapshot / INDEX).is_file():
        return [*absent, SINGLE]
    return absent + absent_files(snapshot, shard_names(snapshot / INDEX))


def _required(listing: Listing, name: str, *pickled: str) -> str:
    if name in listing.files:
        return name
    if any(other in listing.files for other in pickled):
        raise UserError(
            f"{listing.repo} has its weights in {pickled[0]} alone, a pickle, which is never opened here: give a "
            "repository or a revision with safetensors."
        )
    raise UserError(f"{listing.repo} has no weights at {listing.commit[:12]}: expected {name}.")


def _is_adapter(names: Iterable[str], need: Need) -> bool:
    return need == "either" and ADAPTER_CONFIG in names


def is_beside(name: str) -> bool:
    """Returns whether a file of this name goes with weights."""
    if name.endswith(_INDEX_ENDING) or name.startswith("."):
        return False
    return name.endswith(_BESIDE) or name.startswith(_NAMES)


def shard_names(index: Path) -> list[str]:
    """Returns the files that an index names.

    Raises:
        UserError: it is no index.
    """
    found = read_json(index, "download it again").get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise UserError(f"{index} has no weight_map of names: it is damaged, remove it and download it again.")
    return sorted(set(found.values()))


def absent_files(folder: Path, names: Iterable[str]) -> list[str]:
    """Returns the names of which a folder has no file."""
    return [name for name in names if not (folder / name).is_file()]
