"""Names of data sets on the hub: hub:OWNER/NAME[@REVISION][?KEY=VALUE&...]."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.config.hub import DATA_PREFIX, HubName, parse_name
from engine.config.suggestions import closest
from engine.errors import UserError

_KEYS = ("subset", "split", "columns", "limit", "stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataName:
    """The name of a split of a data set.

    Args:
        repo: with its revision.
        subset: the configuration, as data sets' cards call it; None for the default one.
        split: such as train.
        columns: name in the data set -> field of a record; a record has these fields alone. Empty for all as they are.
        limit: the number of records that are read, from the first on; None for all.
        stream: read while they are downloaded, and keep nothing.
    """

    repo: HubName
    subset: str | None = None
    split: str = "train"
    columns: tuple[tuple[str, str], ...] = ()
    limit: int | None = None
    stream: bool = False

    def __str__(self) -> str:
        given = {
            "subset": self.subset,
            "split": None if self.split == "train" else self.split,
            "columns": ",".join(f"{old}:{new}" for old, new in self.columns) or None,
            "limit": self.limit,
            "stream": "true" if self.stream else None,
        }
        query = "&".join(f"{key}={value}" for key, value in given.items() if value is not None)
        return f"{DATA_PREFIX}{self.repo}{'?' if query else ''}{query}"

    @property
    def label(self) -> str:
        """The name in messages."""
        subset = "" if self.subset is None else f"{self.subset}, "
        return f"{self.repo.repo} ({subset}split {self.split})"

    def at(self, commit: str) -> DataName:
        """Returns the same with a commit as its revision."""
        return replace(self, repo=HubName(self.repo.repo, commit))


def parse_data_name(text: str) -> DataName:
    """Parses a name that begins with hub:.

    Raises:
        UserError: it is none.
    """
    name, _, query = text.removeprefix(DATA_PREFIX).partition("?")
    repo = parse_name(name)
    if repo is None:
        raise UserError(
            f"{text} is no name of a data set: write {DATA_PREFIX}OWNER/NAME, and after it, for example, "
            "@REVISION?subset=main&split=train."
        )
    given: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        key, sign, value = part.partition("=")
        if key not in _KEYS:
            close = closest(key, _KEYS)
            advice = f"did you mean {close}?" if close else f"it may have {', '.join(_KEYS)}."
            raise UserError(f"{text} has the unknown key {key!r}: {advice}")
        if not sign or not value or key in given:
            raise UserError(f"{text} has {part!r}, but one {key}=VALUE is expected: correct it.")
        given[key] = value
    return DataName(
        repo=repo,
        subset=given.get("subset"),
        split=_split(text, given.get("split", "train")),
        columns=_columns(text, given.get("columns", "")),
        limit=_limit(text, given.get("limit")),
        stream=_stream(text, given.get("stream", "false")),
    )


def _split(text: str, split: str) -> str:
    if "[" in split:
        raise UserError(f"{text} has a slice of a split, which is not read: give the split, with limit=1000.")
    return split


def _columns(text: str, given: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for part in filter(None, given.split(",")):
        old, sign, new = part.partition(":")
        if not old or (sign and not new):
            raise UserError(f"{text} has {part!r} in columns, but COLUMN:FIELD is expected: correct it.")
        pairs.append((old, new or old))
    if len({new for _, new in pairs}) < len(pairs):
        raise UserError(f"{text} gives several columns to one field: give each its own.")
    return tuple(pairs)


def _limit(text: str, given: str | None) -> int | None:
    if given is None:
        return None
    if not given.isdecimal() or not 0 < int(given) < 1 << 40:
        raise UserError(f"{text} has limit={given}, but a number of records is expected: write for example limit=1000.")
    return int(given)


def _stream(text: str, given: str) -> bool:
    if given not in ("true", "false"):
        raise UserError(f"{text} has stream={given}, but true or false is expected: correct it.")
    return given == "true"
