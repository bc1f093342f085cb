"""A program of `engine.api` as two ranks: what it does and returns is that of one process, and every rank has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import REPOSITORY
from tests.support.warm_python import warm_python
from tests.wrong_inputs.workplace import make_place

PROGRAM = """
import json, os
from pathlib import Path
from engine.api import Session, load_config, load_model, train
from tests.wrong_inputs.workplace import RECORDS

ranks, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
found = {}


def config(name):
    return load_config(
        model={"path": "model"}, lora={"rank": 2, "targets": ["q_proj", "v_proj"]}, data={"seq_length": 20},
        optim={"lr": 0.1}, checkpoint={"dir": f"{name}{ranks}"}, parallel={"tensor": int(ranks)},
        train={"steps": 4, "global_batch_size": 2, "eval_every": 2},
    )


found["losses"] = train(config("train"), data=iter(RECORDS), validation=RECORDS[:2]).losses
with Session(config("session"), data=RECORDS, validation=RECORDS[:2]) as run:
    run.step(3)
    run.save()
    found["evaluation"], found["texts"] = run.evaluate().loss, run.generate(["abab cab"], max_new_tokens=6)
    run.export(f"adapter{ranks}")
    found["last"] = run.step().loss
with load_model("model", adapter=f"adapter{ranks}") as model:
    found["answers"] = model.generate(["abab cab", "bac"], max_new_tokens=8, temperature=0.8)
    found["stream"] = list(model.stream("abab cab", max_new_tokens=4))
    found["scores"] = [one.logps for one in model.score([("abab", " cab"), ("a", "bc")])]
    model.use_adapter(None)
    found["plain"] = model.generate(["abab cab"], max_new_tokens=8)
Path(f"found{ranks}-{rank}.json").write_text(json.dumps(found))
"""


def _flat(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value
    return [item for one in values for item in (_flat(one) if isinstance(one, (list, dict)) else [one])]


@pytest.mark.distributed
def test_two_ranks_do_what_one_process_does(tmp_path: Path) -> None:
    folder = make_place(tmp_path / "place").folder
    shutil.rmtree(folder / "adapter")
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        ended = subprocess.run(
            [str(warm_python()), *launcher, "program.py"],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=110,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
    one, *both = (json.loads((folder / f"found{name}.json").read_text()) for name in ("1-0", "2-0", "2-1"))
    for found in both:
        assert found.keys() == one.keys()
        for own, expected in zip(_flat(found), _flat(one), strict=True):
            # sums in another order, in float32
            assert own == (pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected)
    assert both[0] == both[1]
