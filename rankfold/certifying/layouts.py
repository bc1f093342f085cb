"""The layouts to compare: turns a run file and `--against` into configurations, numbers of ranks and names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engine.config.load import load_config
from engine.config.parallel import ParallelOptions
from engine.config.rules import check_config, check_world
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.training.start_model import check_model, model_source

_COMMA = re.compile(r",(?![^\[]*\])")
"""A comma, but not inside a list."""
_SIZES = ("tensor", "pipeline", "context", "expert")
_SHOWN_APART = (*(f"parallel.{name}" for name in (*_SIZES, "sequence")), "data")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A run in one layout.

    Args:
        config: of the run.
        data: data-parallel copies of the model.
        label: its name in the report.
        source: the option that asked for it, as the user wrote it.
    """

    config: RunConfig
    data: int
    label: str
    source: str

    @property
    def num_ranks(self) -> int:
        return self.config.parallel.model_parallel_size * self.data

    def sizes(self) -> dict[str, object]:
        """Returns the whole layout, for programs."""
        return {"label": self.label, "ranks": self.num_ranks, "data": self.data, **asdict(self.config.parallel)}

    def trained_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the logical names and global shapes of the trained parameters, in forward order; needs no ranks.

        Raises:
            UserError: the model, the batch or the ranks do not fit the layout.
        """
        try:
            check_config(self.config)
            check_world(self.config, self.num_ranks)
            source = model_source(self.config)
            return check_model(self.config, source.model, self.num_ranks, source.weights).trained
        except UserError as error:
            raise UserError(f"{self.source}: {error}") from None


def own_layout(path: Path, data: int, dtype: str | None = None, *, download: bool = False) -> Layout:
    """Returns the layout of a run file.

    Args:
        path: the run file.
        data: data-parallel copies of the model.
        dtype: replaces model.dtype; None leaves it.
        download: as hub.download, also where the file does not say so.

    Raises:
        UserError: the file is not a valid configuration.
    """
    config = load_config(["--config", str(path), *_given(dtype, download)])
    return Layout(config=config, data=data, label=_label(config, data, {}), source=str(path))


def one_process(layout: Layout) -> Layout:
    """Returns the same run on one process."""
    config = replace(layout.config, parallel=ParallelOptions())
    return Layout(config=config, data=1, label=_label(config, 1, {}), source="one process")


def other_layout(path: Path, data: int, text: str, dtype: str | None = None, *, download: bool = False) -> Layout:
    """Returns the layout of a run file with overrides.

    Args:
        path: the run file.
        data: data-parallel copies, unless the overrides say otherwise.
        text: `key=value,..`, a key being section.option, an option of `parallel`, or `data` for the copies.
        dtype: replaces model.dtype, unless the overrides say otherwise; None leaves it.
        download: as hub.download, also where the file does not say so.

    Raises:
        UserError: an override that is not one, or a value that does not fit.
    """
    source = f"--against {text!r}"
    changes = _changes(text, source)
    copies = changes.get("data", str(data))
    if not copies.isdecimal() or int(copies) < 1:
        raise UserError(f"{source} asks for data={copies}, but a number of copies is expected: use for example data=2.")
    arguments = [f"--{key}={value}" for key, value in changes.items() if key != "data"]
    try:
        config = load_config(["--config", str(path), *_given(dtype, download), *arguments])
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return Layout(config=config, data=int(copies), label=_label(config, int(copies), changes), source=source)


def check_comparable(own: Layout, others: Sequence[Layout]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that all layouts train, by name in forward order.

    Raises:
        UserError: a layout does not fit the run, is the run's own, trains other tensors, or computes in float16.
    """
    for layout in (own, *others):
        if layout.config.model.dtype == "float16":
            raise UserError(
                f"{layout.source}: model.dtype is float16, whose first steps may overflow while the loss scale finds "
                "its size, so that there is nothing to compare: give --dtype float32 or bfloat16."
            )
    expected = own.trained_tensors()
    for other in others:
        if (other.config, other.data) == (own.config, own.data):
            raise UserError(
                f"{other.source} is the layout of {own.source} itself ({own.label}), so there is nothing to compare: "
                "give another one, such as --against tensor=2."
            )
        found = other.trained_tensors()
        if found != expected:
            name = sorted(set(found.items()) ^ set(expected.items()))[0][0]
            raise UserError(
                f"{other.source} does not train the same tensors as {own.source} ({name} differs): change how the "
                "run is divided, not what it trains."
            )
    return expected


def _given(dtype: str | None, download: bool) -> list[str]:
    """Returns what the command line gives beside the run file."""
    words = [] if dtype is None else [f"--model.dtype={dtype}"]
    return [*words, "--hub.download=true"] if download else words


def _changes(text: str, source: str) -> dict[str, str]:
    """Parses overrides: full option name, or "data" -> value."""
    changes: dict[str, str] = {}
    for item in _COMMA.split(text):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise UserError(
                f"{source} has {item.strip()!r}, but key=value is expected: write for example "
                "--against tensor=2,data=2."
            )
        full = key if "." in key or key == "data" else f"parallel.{key}"
        if full in changes:
            raise UserError(f"{source} gives {key} twice: keep one of the two.")
        changes[full] = value
    return changes


def _label(config: RunConfig, data: int, changes: dict[str, str]) -> str:
    """Returns a label such as "tensor 2, pipeline 2", with other changes."""
    parallel = config.parallel
    counts = {name: getattr(parallel, name) for name in _SIZES} | {"data": data}
    parts = [f"{name} {count}" for name, count in counts.items() if count > 1]
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        parts[0] += " without sequence parallelism"
    others = [f"{name} {value}" for name, value in changes.items() if name not in _SHOWN_APART]
    return ", ".join([*(parts or ["one process"]), *others])
