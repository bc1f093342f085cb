"""What a client asks beside training, by the SDK; prints what it saw as JSON.

python sdk_rest.py BASE      TINKER_BASE_URL and TINKER_API_KEY are set
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tinker
from tinker import types

warnings.simplefilter("ignore")


def refusal(call: Callable[[], Any]) -> str:
    """Returns what a call raises."""
    try:
        call()
    except Exception as error:
        return str(error)
    raise AssertionError("it was not refused")


def main() -> None:
    base = sys.argv[1]
    service = tinker.ServiceClient(user_metadata={"of": "session"}, project_id="sums", display_name="Sums of two")
    training = service.create_lora_training_client(base, rank=4, seed=1, train_mlp=False).result()
    rest = tinker.RestClient()
    path = training.save_state("here", user_metadata={"a": "b"}, ttl_seconds=3600).result().path
    run = path.split("/")[2]
    session = run.split(":")[0]
    seen: dict[str, Any] = {"path": path}
    seen["info"] = rest.get_weights_info_by_tinker_path(path).result().model_dump()
    (saved,) = rest.list_checkpoints(run).result().checkpoints
    seen["metadata"], seen["expires"] = saved.user_metadata, saved.expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    (saved,) = rest.list_checkpoints(run).result().checkpoints
    seen["public"], seen["still expires"] = saved.public, saved.expires_at is not None
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    copied = service.copy_weights(path).result()
    seen["copied"] = rest.get_training_run_by_tinker_path(copied).result().last_checkpoint.tinker_path == copied
    seen["runs"] = [one.training_run_id for one in rest.list_training_runs(project_id="sums").result().training_runs]
    seen["run"] = run
    page = rest.search_sessions(types.SessionSearchRequest(display_name="two")).result()
    seen["found"] = [one.session_id for one in page.sessions] == [session]
    seen["session"] = rest.get_session(session).result().user_metadata
    seen["sessions"] = session in rest.list_sessions().result().sessions
    seen["trace"] = refusal(lambda: rest.export_session_trace(session).result())
    seen["dimuon"] = refusal(
        lambda: service.create_lora_training_client(base, rank=4, optimizer=types.DimuonOptimizerConfig()).result()
    )
    seen["dimuon step"] = refusal(lambda: training.optim_step(types.DimuonParams(learning_rate=1e-3)).result())
    seen["other base"] = refusal(lambda: service.create_lora_training_client("Qwen/other", rank=4).result())
    follower = training.save_weights_and_get_sampling_client(kind="inflight").result()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    before = follower.compute_logprobs(prompt).result()
    datum = types.Datum(
        model_input=prompt, loss_fn_inputs={"target_tokens": types.TensorData(data=[6, 7, 8, 9], dtype="int64")}
    )
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    seen["kept"] = follower.compute_logprobs(prompt).result() == before
    training.save_weights_and_get_sampling_client(kind="inflight").result()
    seen["followed"] = follower.compute_logprobs(prompt).result() != before
    program = Path(sys.executable).with_name("tinker")
    done = subprocess.run([program, "checkpoint", "download", path, "--output", "."], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen["files"] = sorted(file.name for file in Path.cwd().glob("*_weights_here/*"))
    for one in (path, copied):
        rest.delete_checkpoint_from_tinker_path(one).result()
    seen["left"] = [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints]
    service.close("errored", detail="enough").result()
    page = rest.search_sessions(types.SessionSearchRequest(session_id=session)).result()
    seen["status"] = page.sessions[0].status.reason.type
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
