"""What clients download is what PEFT opens, and computes with as the server does."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rankfold.serving.commands import Saved
from rankfold.serving.exchange import Task
from tests.serving.bodies import random_datum
from tests.serving.clients import LORA, MODEL, OTHER, VOCAB, Client, write_base

pytestmark = pytest.mark.timeout(300)


def scores_by_peft(base: Path, adapter: Path, tokens: list[int], targets: list[int]) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)[range(len(targets)), targets].numpy()


@pytest.mark.parametrize("model", [MODEL, pytest.param(OTHER, marks=pytest.mark.slow)])
def test_peft_opens_what_clients_download(tmp_path: Path, model: str) -> None:
    base = write_base(tmp_path / "base")
    client = Client(base, tmp_path / "state")
    client.create(model)
    for step in range(2):
        client.train(model, [random_datum(20, step, VOCAB)])
        client.step(model, learning_rate=3e-2)
    some = random_datum(30, 7, VOCAB)
    tokens = np.frombuffer(some["model_input"][0]["encoded_text"]["tokens"], "<i4").tolist()
    targets = np.frombuffer(some["loss_fn_inputs"]["target_tokens"]["dense"], "<i8").tolist()
    _, (expected,) = client.score(model, [some])

    saved = json.loads(client.do(model, "save_weights", path="a").body)["path"]
    outcome = client.do(model, "save_weights_external", path="b", user_metadata={"c": "d"})
    folder = client.folder.root / "external_weights" / model.replace(":", "_") / "b"
    assert outcome.saved is not None and outcome.saved.num_bytes == sum(one.stat().st_size for one in folder.iterdir())
    assert json.loads(outcome.saved.metadata) == {"c": "d"}
    assert not client.do(model, "save_weights_external", path="b").good, "another request has saved that name"

    task = Task(
        request="r", kind="archive", target=saved, seq=0, body=json.dumps({"path": saved, "made": 1.5}).encode()
    )
    for _ in range(2):  # as after a restart
        assert client.backend.execute([task])[0].good
    archive = client.folder.archive(Saved(model=model, kind="weights", name="a"), 1.5)
    assert [one.name for one in archive.parent.iterdir()] == [archive.name]
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "out", filter="data")
    files = {"adapter_model.safetensors", "adapter_config.json", "checkpoint_complete"}
    for adapter in (folder, tmp_path / "out"):
        assert files <= {one.name for one in adapter.iterdir()}
        assert json.loads((adapter / "adapter_config.json").read_text())["r"] == LORA[model]["rank"]
        found = scores_by_peft(base, adapter, tokens, targets)
        assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max()
    without = scores_by_peft(base, adapter, targets, targets)
    assert np.abs(without - expected).max() > 1e-3, "the scores tell models apart"
