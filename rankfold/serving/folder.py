"""The server's folder: which file holds what. Needs no torch.

    journal.sqlite                              what was promised and done
    base.json                                   config.json of the model that the adapters are of
    attempts.json                               what was being executed, as processes ended
    models/MODEL.safetensors                    each live model as of its last optimizer step
    weights/MODEL/NAME.safetensors              what save_weights saved
    sampler_weights/MODEL/NAME.safetensors      what save_weights_for_sampler saved
    external_weights/MODEL/NAME/                what save_weights_external saved: a PEFT adapter
    archives/MODEL/KIND-NAME-TIME.tar           saved weights as a PEFT adapter, once they were asked for
    losses/LOSS.json                            what create_custom_loss sent

A colon in a model's name is an underscore in that of a file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from engine.errors import UserError
from engine.files.documents import read_json
from engine.files.durable import write_durably
from rankfold.serving.commands import Saved

_UNNAMED = "_unnamed-"  # no client can give such a name
_INFLIGHT = "_inflight"
_NO_MATTER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Fields of a model's config.json that may change."""
_SPARE_BYTES = 1 << 20
_KEPT = 16
"""Unnamed weights of a sampler that each model keeps."""


class ServerFolder:
    """The folder of one server.

    Args:
        root: its path; made where it is not there.
        makes: false on a machine that has no files of the server.
    """

    def __init__(self, root: Path, *, makes: bool = True) -> None:
        self.root = root
        for name in ("models", "weights", "sampler_weights") if makes else ():
            (root / name).mkdir(parents=True, exist_ok=True)

    def take_base(self, model: Path) -> None:
        """Notes which model the adapters here are of, the first time.

        Args:
            model: folder of the checkpoint.

        Raises:
            UserError: they are of another one.
        """
        path, config = self.root / "base.json", model / "config.json"
        if not config.is_file():
            return  # the process that has the model says what is missing
        said = {name: value for name, value in read_json(config).items() if name not in _NO_MATTER}
        if not path.is_file():
            write_durably(path, json.dumps(said))
        elif read_json(path) != said:
            raise UserError(
                f"{self.root} has adapters of another model than {model}, whose config.json differs: give the --model "
                "that it was started with, or another --state."
            )

    @property
    def journal(self) -> Path:
        return self.root / "journal.sqlite"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts.json"

    def shortage(self, model: str) -> str | None:
        """Returns a sentence where the disk has no room for another file of a model, None where it has."""
        path = self.model(model)
        try:
            needed = 2 * path.stat().st_size + _SPARE_BYTES
        except OSError:
            needed = _SPARE_BYTES
        found = shutil.disk_usage(self.root).free
        if found >= needed:
            return None
        return f"the disk of {self.root} has {found} bytes left, and {needed} are needed: free some space."

    def model(self, model: str) -> Path:
        """Returns the file of a live model."""
        return self.root / "models" / f"{_file_name(model)}.safetensors"

    def saved(self, path: Saved) -> Path:
        """Returns the file of saved weights, or the folder of an adapter to download."""
        if path.kind == "external_weights":
            return self.root / path.kind / _file_name(path.model) / path.name
        return self.root / path.kind / _file_name(path.model) / f"{path.name}.safetensors"

    def model_bytes(self, model: str) -> int:
        """Returns the bytes of a live model's file; 0 where it has none."""
        return _bytes(self.model(model))

    def loss(self, loss: str) -> Path:
        """Returns the file of a loss that a client has traced."""
        return self.root / "losses" / f"{_file_name(loss)}.json"

    def unnamed(self, model: str, seq: int) -> Saved:
        """Returns the path of weights that a client saves for a sampler without a name."""
        return Saved(model=model, kind="sampler_weights", name=f"{_UNNAMED}{seq}")

    def archive(self, path: Saved, made: float) -> Path:
        """Returns the archive of saved weights as a PEFT adapter.

        Args:
            made: when they were saved, as they may be saved anew.
        """
        return self.archives(path) / f"{path.kind}-{path.name}-{made:.6f}.tar"

    def archive_bytes(self, models: Iterable[str]) -> int:
        """Returns the bytes of the archives of some models' weights."""
        names = {_file_name(model) for model in models}
        found = (path for path in (self.root / "archives").glob("*/*.tar") if path.parent.name in names)
        return sum(_bytes(path) for path in found)

    def losses(self) -> dict[Path, str]:
        """Returns the files of clients' losses, with the sessions that they were created in."""
        return {path: path.stem.partition("_loss_")[0] for path in (self.root / "losses").glob("*.json")}

    def archives(self, path: Saved) -> Path:
        """Returns the folder of the archives of a model's weights."""
        return self.root / "archives" / _file_name(path.model)

    def inflight(self, model: str) -> Saved:
        """Returns the path of the weights that all of a model's samplers follow that are of the kind inflight."""
        return Saved(model=model, kind="sampler_weights", name=_INFLIGHT)

    def old_unnamed(self, model: str) -> Iterable[Path]:
        """Returns the files of unnamed weights of a model beside its newest."""
        found = (self.root / "sampler_weights" / _file_name(model)).glob(f"{_UNNAMED}*.safetensors")
        numbered = sorted((int(path.stem.removeprefix(_UNNAMED)), path) for path in found)
        return [path for _, path in numbered[:-_KEPT]]


def sampler_of(model: str, number: int) -> str:
    """Returns the name of the sampler that a client makes as it saves a model's weights without a name.

    Args:
        number: sampling_session_seq_id of the request.
    """
    return f"{model.partition(':train:')[0]}:sample:{number}"


def _file_name(model: str) -> str:
    return model.replace(":", "_")


def _bytes(path: Path) -> int:
    """Returns the size of a file; 0 where it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
