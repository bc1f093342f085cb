"""What a client does in a session, with any version of the SDK; prints what it saw as JSON.

python sdk_session.py BASE      TINKER_BASE_URL and TINKER_API_KEY are set
"""

from __future__ import annotations

import json
import sys
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")


def main() -> None:
    service = tinker.ServiceClient(user_metadata={"of": "session"})
    capabilities = service.get_server_capabilities()
    made = service.create_lora_training_client(sys.argv[1], rank=4, seed=1, user_metadata={"of": "run"})
    training = made.result() if hasattr(made, "result") else made
    ids = [(7 * place + 5) % 250 for place in range(33)]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=ids[1:], dtype="int64", shape=[32]),
            "weights": types.TensorData(data=[1.0] * 32, dtype="float32", shape=[32]),
        },
    )
    losses = []
    for _ in range(4):
        # so many that the client sends them in several parts
        done = training.forward_backward([datum] * 2500, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(done.result().metrics["loss:sum"])
        step.result()
    scored = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    path = training.save_state("here").result().path
    sampler = training.save_weights_and_get_sampling_client()
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    settings = types.SamplingParams(max_tokens=6, seed=3, temperature=1.0)
    prompt = types.ModelInput.from_ints(ids[:-1])
    samples = [sampler.sample(prompt, num_samples=2, sampling_params=settings) for _ in range(3)]
    tokens = [[one.tokens for one in sample.result().sequences] for sample in samples]
    prompt_logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
    again = service.create_training_client_from_state_with_optimizer(path)
    again = again.result() if hasattr(again, "result") else again
    loaded = again.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    rest = service.create_rest_client()
    run = rest.get_training_run(path.split("/")[2]).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    print(
        json.dumps(
            {
                "version": tinker.__version__,
                "base": capabilities.supported_models[0].model_name,
                "losses": losses,
                "scored": list(scored),
                "loaded": list(loaded),
                "prompt": list(prompt_logprobs)[1:],
                "tokens": tokens,
                "metadata": run.user_metadata,
                "saved": [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints],
                "path": path,
                "archive": rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
                if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path")
                else None,
            }
        )
    )


if __name__ == "__main__":
    main()
