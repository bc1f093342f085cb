"""The ranks of a machine share what one of them has tokenised: the same arrays, one reading, one sentence."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.data import mapped_dataset
from engine.data.columns import contiguous
from engine.data.dataset import TokenDataset, dataset_of
from engine.errors import UserError
from engine.preferences.data.answer_columns import AnswerColumns
from engine.runtime.launch import Launch
from engine.training.node_data import NodeData

RANKS = 3
DOCUMENTS = [(list(range(place, place + 2 + place % 5)), [False] + [True] * (1 + place % 5)) for place in range(40)]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def plain() -> TokenDataset:
    return dataset_of(DOCUMENTS, seq_length=8)


def packed() -> TokenDataset:
    return dataset_of(DOCUMENTS, seq_length=16, packing=True)


def _answers(shift: int, **companions: TokenDataset) -> TokenDataset:
    tokens = np.arange(60, dtype=np.int32) + 70000 * shift
    targets = np.arange(60) % 3 > 0
    signs = np.array([1, -1] * 10, dtype=np.float32)
    columns = contiguous(tokens, targets, np.arange(0, 61, 3), group=2, extras=[AnswerColumns(signs=signs)])
    return TokenDataset(columns, seq_length=16, packing=True, companions=companions)


def pairs() -> TokenDataset:
    return _answers(1, other=_answers(0))


def on_ranks(build: Callable[[], TokenDataset], said: list[str] | None = None) -> list[TokenDataset | Exception]:
    """What each rank gets, the first of which comes last."""
    found: dict[int, TokenDataset | Exception] = {}

    def work(rank: int) -> None:
        node = NodeData((said if said is not None else []).append, "key", rank=rank, size=RANKS)
        try:
            found[rank] = node.get(build)
        except UserError as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in reversed(range(RANKS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(RANKS)]


@pytest.mark.parametrize("build", [plain, packed, pairs])
def test_all_ranks_have_what_one_has_built(build: Callable[[], TokenDataset], temporary: Path) -> None:
    built: list[TokenDataset] = []

    def once() -> TokenDataset:
        built.append(build())
        return built[-1]

    found = on_ranks(once)
    assert len(built) == 1 and not any(temporary.iterdir()), "read once, and nothing is left"
    for dataset in found:
        assert isinstance(dataset, TokenDataset) and dataset is not built[0]
        assert dataset.fingerprint() == built[0].fingerprint() and dataset.report == built[0].report
        for name in ("tokens", "targets", "target_counts", "row_lengths", "starts"):
            ours, theirs = getattr(dataset, name), getattr(built[0], name)
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), name
        assert isinstance(dataset.tokens.base, np.memmap), "the pages are the machine's, not the process's"
        assert [[a.tolist() for a in pair] for pair in dataset.documents(1)] == [
            [a.tolist() for a in pair] for pair in built[0].documents(1)
        ]
        assert np.array_equal(dataset.columns.target_counts, built[0].columns.target_counts)
        assert list(dataset.companions) == list(built[0].companions)
        for ours, theirs in zip(dataset.extras, built[0].extras, strict=True):
            assert type(ours) is type(theirs) and ours.arrays().keys() == theirs.arrays().keys()
            assert all(np.array_equal(ours.arrays()[name], array) for name, array in theirs.arrays().items())


def test_a_refusal_is_one_sentence_on_all_ranks(temporary: Path) -> None:
    def refuse() -> TokenDataset:
        raise UserError("records.jsonl, line 3: é is no record; correct it.")

    found = on_ranks(refuse)
    assert [str(error) for error in found] == ["records.jsonl, line 3: é is no record; correct it."] * RANKS
    assert not any(temporary.iterdir())


def test_a_refusal_is_not_hidden_by_a_full_disk(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> TokenDataset:
        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        raise UserError("records.jsonl, line 3: no record; correct it.")

    with pytest.raises(UserError, match="line 3"):
        NodeData(print, "key", rank=0, size=RANKS).get(refuse)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "(No space left on device)"),
        (OSError("1000 requested and 109 written"), "(1000 requested and 109 written)"),  # as numpy says it
    ],
)
def test_without_room_each_rank_reads_by_itself(
    error: OSError, words: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(dataset: TokenDataset, folder: Path) -> None:
        (folder / "tokens.npy").write_bytes(b"half")
        raise error

    monkeypatch.setattr(mapped_dataset, "save_dataset", full)
    said: list[str] = []
    found = on_ranks(packed, said)
    assert {one.fingerprint() for one in found if isinstance(one, TokenDataset)} == {packed().fingerprint()}
    assert len(found) == RANKS and len(said) == 1 and words in said[0] and "TMPDIR" in said[0]
    assert not any(temporary.iterdir())


def test_the_first_rank_of_every_machine_speaks(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log is rank 0's alone, which is on another machine."""
    for name, value in {
        "TORCHELASTIC_RUN_ID": "run", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "2",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def full(dataset: TokenDataset, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapped_dataset, "save_dataset", full)
    launch = Launch(rank=2, world_size=4, device=torch.device("cpu"), meeting="here")
    dataset = NodeData.of_this_process(launch).get(plain)
    assert dataset.fingerprint() == plain().fingerprint()
    assert capsys.readouterr().err.count("warning: ") == 1


def test_another_users_folder_is_refused(temporary: Path) -> None:
    """Its name can be guessed."""
    folder = temporary / f"rankfold-data-{os.getuid()}-key-1"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "ready").touch()
    for rank, words in ((0, "cannot be made"), (1, "is not this run's own")):
        with pytest.raises(UserError, match=words):
            NodeData(print, "key", rank=rank, size=2).get(packed)


def _start_tokenising() -> int:
    """Starts a first rank that does not come to an end; returns its process."""
    reader, writer = os.pipe()

    def build() -> TokenDataset:
        os.write(writer, b"it tokenises")
        signal.pause()
        raise AssertionError

    process = os.fork()
    if process == 0:
        try:
            NodeData(print, "first", rank=0, size=2).get(build)
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 100)
    os.close(reader)
    return process


def test_what_a_killed_run_leaves_is_deleted_at_the_next_start(temporary: Path) -> None:
    others = temporary / f"rankfold-data-{os.getuid()}-others"
    others.mkdir(mode=0o755)
    process = _start_tokenising()
    try:
        (folder,) = set(temporary.iterdir()) - {others}
        assert NodeData(print, "second", rank=0, size=1).get(plain).report == plain().report
        on_ranks(plain)
        assert folder.is_dir(), "its run is alive"
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert folder.is_dir()
    on_ranks(plain)
    assert list(temporary.iterdir()) == [others]


@pytest.mark.parametrize(("key", "size"), [(None, 2), ("key", 1)])
def test_who_has_nobody_to_share_with_builds(key: str | None, size: int, temporary: Path) -> None:
    dataset = packed()
    assert NodeData(print, key, rank=0, size=size).get(lambda: dataset) is dataset and not any(temporary.iterdir())
