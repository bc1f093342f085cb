"""The safetensors files of a Hugging Face folder as one set of tensors, by the names stored in them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.leftover import refuse_leftover
from engine.checkpoint.safetensors_file import SafetensorsReader
from engine.errors import UserError
from engine.files.documents import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class HfTensors:
    """All tensors of a folder with model.safetensors, or with an index and shards; files are opened when needed.

    Raises:
        UserError: there are no safetensors files, or one is missing or truncated.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, SafetensorsReader] = {}
        if (folder / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE).names(), SINGLE)
        elif (folder / INDEX).is_file():
            self._file_of = self._read_index(folder / INDEX)
        elif any((folder / name).is_file() for name in _PICKLED):
            raise UserError(
                f"{folder} holds {_PICKLED[0]} only, a pickle, which is never opened here: "
                "convert it to safetensors first (transformers: save_pretrained)."
            )
        else:
            raise UserError(f"{folder} has no weights: expected {SINGLE}, or {INDEX} with its shards; copy them there.")

    def names(self) -> list[str]:
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return self._open(self._file_of[name]).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._open(self._file_of[name]).dtype(name)

    def view(self, name: str) -> Tensor:
        """Returns a view of the mapped file."""
        return self._open(self._file_of[name]).view(name)

    def stored_at(self, name: str) -> tuple[Path, int]:
        """Returns the file that holds the tensor, and where in it the tensor's bytes begin."""
        file = self._file_of[name]
        return self.folder / file, self._open(file).offset(name)

    def _open(self, file: str) -> SafetensorsReader:
        if file not in self._files:
            self._files[file] = SafetensorsReader(self.folder / file)
        return self._files[file]

    def _read_index(self, path: Path) -> dict[str, str]:
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{path} has no weight_map from tensor names to files: copy it again.")
        for file in sorted(set(weight_map.values())):
            # A name, not a path: an index must not make us open files elsewhere.
            if Path(file).name != file:
                raise UserError(f"{path} names the file {file!r}, which is not in its own folder: use another copy.")
            listed = {name for name, home in weight_map.items() if home == file}
            if missing := sorted(listed - set(self._open(file).names())):
                raise UserError(f"{self.folder / file} lacks {missing[0]}, which {INDEX} places there: copy it again.")
            refuse_leftover(
                str(self.folder / file),
                self._open(file).names(),
                listed,
                because=f"{INDEX} does not place there: copy the index again, or remove the tensor.",
            )
        return weight_map
