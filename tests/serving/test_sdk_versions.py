"""One session with each version of the SDK that RANKFOLD_TINKER_SDKS names, by paths of Pythons with a colon between.

python -m venv DIR && DIR/bin/pip install tinker==0.25.0 makes one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.serving.cookbook import CLIENT, NAME, script
from tests.serving.running import RunningServer

SDKS = [one for one in [*os.environ.get("RANKFOLD_TINKER_SDKS", "").split(":"), CLIENT] if one]
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SDKS, reason="neither RANKFOLD_TINKER_SDKS nor RANKFOLD_TINKER_CLIENT names a Python"),
]


@pytest.mark.parametrize("python", SDKS)
def test_a_session(server: RunningServer, tmp_path: Path, python: str) -> None:
    found = json.loads(script(server, tmp_path, "sdk_session.py", python).splitlines()[-1])
    assert found["base"] == NAME
    assert found["losses"] == sorted(found["losses"], reverse=True) and found["losses"][-1] < 0.9 * found["losses"][0]
    assert found["loaded"] == found["scored"]
    assert max(abs(one - other) for one, other in zip(found["prompt"], found["scored"], strict=True)) < 5e-6
    assert found["tokens"][0] == found["tokens"][1] == found["tokens"][2], "they have one seed"
    assert found["metadata"] == {"of": "run"} and found["path"] in found["saved"]
    if found["archive"] is not None:
        with urllib.request.urlopen(found["archive"]) as answer:
            assert b"adapter_model.safetensors" in answer.read()


@pytest.mark.skipif(CLIENT is None, reason="RANKFOLD_TINKER_CLIENT names no Python with tinker")
def test_requests_beside_training(server: RunningServer, tmp_path: Path) -> None:
    seen = json.loads(script(server, tmp_path, "sdk_rest.py").splitlines()[-1])
    assert seen["info"]["lora_rank"] == 4 and seen["info"]["train_attn"] and not seen["info"]["train_mlp"]
    assert seen["metadata"] == {"a": "b"} and seen["session"] == {"of": "session"}
    assert seen["expires"] and not seen["still expires"] and seen["public"] and seen["copied"]
    assert seen["run"] in seen["runs"] and seen["found"] and seen["sessions"] and seen["kept"] and seen["followed"]
    assert "records no traces" in seen["trace"] and "this server has" in seen["other base"]
    assert "'dimuon'" in seen["dimuon"] and "'dimuon'" in seen["dimuon step"]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {*seen["files"]}
    assert not any(seen["run"] in one for one in seen["left"]) and seen["status"] == "errored"


@pytest.mark.parametrize("python", SDKS)
def test_whatever_the_sdk_asks_for_is_answered(tmp_path: Path, python: str) -> None:
    """Each address in its sources is known, if only to be refused in a sentence."""
    from tests.serving.stand_in import Served, served

    command = [python, "-c", "import tinker; print(tinker.__path__[0])"]
    sources = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    texts = [file.read_text() for file in sources.rglob("*.py") if not file.name.endswith("_test.py")]
    paths = {re.sub(r"\{[^}]*\}", "x", one) for text in texts for one in re.findall(r'"/api/v1/([^"]+)"', text)}
    assert len(paths) > 30

    async def use(server: Served) -> None:
        unknown = []
        for path in sorted(paths):
            path = path.replace("checkpoints/x", "checkpoints/weights/x")
            answers = [await server.ask(path, body, method=method) for method, body in _REQUESTS]
            if all(one.status == 405 or (one.status == 404 and one.json["detail"] == "Not Found") for one in answers):
                unknown.append(path)
        assert not unknown

    served(tmp_path, use)


_REQUESTS = (("GET", None), ("POST", b"{}"), ("PUT", b"{}"), ("DELETE", None))
