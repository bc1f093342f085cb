"""Losses and log-probabilities by the SDK as it is; prints what it was told, as JSON. Runs by the client's Python."""

import json
import sys

import numpy as np
import tinker
import torch
from tinker import types

PROMPT = [5, 6, 7, 30, 31, 9, 9, 40]


def preferred(logprobs, wanted, scale):
    ratio = (logprobs.exp() - wanted).square()
    loss = ratio.sum() * scale - torch.nn.functional.logsigmoid(logprobs.sum(-1) + 8).sum()
    return loss, {"custom/distance:mean": ratio.sum().detach(), "custom/tokens:sum": torch.ones_like(logprobs).sum()}


def documents(seed):
    draw = np.random.default_rng(seed)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(draw.integers(1, 200, length).tolist()),
            loss_fn_inputs={
                "target_tokens": torch.from_numpy(draw.integers(1, 200, (length, 2))),
                "wanted": torch.from_numpy(draw.random((length, 2)).astype(np.float32)),
                "scale": types.TensorData(data=[0.5], dtype="float32", shape=[]),
            },
        )
        for length in (9, 14, 30)
    ]


def both(data, logprobs):
    """The loss, for the client to differentiate."""
    found = [
        preferred(own, datum.loss_fn_inputs["wanted"].to_torch(), torch.tensor(0.5))[0]
        for datum, own in zip(data, logprobs, strict=True)
    ]
    return torch.stack(found).sum(), {}


service = tinker.ServiceClient()
curves = []
handle = service.create_custom_loss(preferred, input_ranks={"logprobs": 2, "wanted": 2, "scale": 0}).result()
for loss in (handle, both):
    client = service.create_lora_training_client(sys.argv[1], rank=4, seed=3)
    curve = []
    for step in range(4):
        data = documents(step)
        if loss is both:
            for one in data:  # of these the client sends targets alone
                del one.loss_fn_inputs["scale"]
        result = client.forward_backward_custom(data, loss).result()
        curve.append(result.metrics)
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    curves.append(curve)
sampler = client.save_weights_and_get_sampling_client()
ids = torch.full((len(PROMPT) - 1, 2), -1, dtype=torch.int64)
ids[-1, 0] = 17
answer = sampler.sample(
    prompt=types.ModelInput.from_ints(PROMPT),
    num_samples=1,
    sampling_params=types.SamplingParams(max_tokens=4, seed=1),
    include_prompt_logprobs=True,
    topk_prompt_logprobs=3,
    topk_sample_logprobs=2,
    target_prompt_logprobs=types.TensorData.from_torch_sparse(ids, pad_value=-1),
    prompt_alt_tokens_k=5,
    prompt_logprobs_last_n=2,
).result()
sparse = types.Datum(
    model_input=types.ModelInput.from_ints(PROMPT[:-1]),
    loss_fn_inputs={"target_tokens": ids.clamp(min=0), "weights": (ids >= 0).float()},
)
scored = client.forward([sparse], "cross_entropy").result()
print(
    json.dumps(
        {
            "loss_id": handle.loss_id,
            "curves": curves,
            "named": float(answer.target_prompt_logprobs.to_torch()[-1, 0]),
            "trained": float(scored.loss_fn_outputs[0]["logprobs"].to_torch()[-1, 0]),
            "best": answer.topk_prompt_logprobs,
            "prompt": answer.prompt_logprobs,
            "samples": [[one.tokens, one.logprobs, one.topk_logprobs] for one in answer.sequences],
            "drawn": list(answer.prompt_alt_tokens.tokens.to_torch().shape),
        }
    )
)
