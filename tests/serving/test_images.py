"""Images of clients: trained and sampled with as transformers does, with limits on what they may be."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

from engine.errors import UserError
from rankfold.serving.exchange import Task
from rankfold.serving.images import ClientImages
from rankfold.serving.loss_request import read_forward_backward
from rankfold.serving.protobuf import decode
from tests.serving.bodies import forward_backward, read_output, read_samples, sample, tensor
from tests.serving.clients import MODEL, Client
from tests.serving.served_ranks import Layout, Served
from tests.support.qwen_vl import PAD, make_model
from tests.support.spawning import spawn


def picture(width: int, height: int, kind: str = "PNG", seed: int = 0) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


class Sees:
    """A client of a small model that sees images, and transformers' own."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.model = make_model("qwen2_5_vl", folder)
        self.client = Client(folder, state)
        self.client.create(MODEL)
        from transformers import AutoTokenizer

        self.pad = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(PAD)

    def count(self, data: bytes) -> int:
        """How many tokens an image is."""
        return len(self.client.backend._images.placed("a text", [_image(data)])[0])

    def logits(self, ids: list[int], images: list[bytes]) -> torch.Tensor:
        """transformers' logits."""
        from PIL import Image

        family = self.client.backend._images.family
        tiles = [family.tiles(Image.open(io.BytesIO(one)).convert("RGB")) for one in images]
        tokens = torch.tensor(ids)[None]
        more: dict[str, Any] = {}
        if tiles:
            more = {
                "pixel_values": torch.from_numpy(np.concatenate([one.patches_PF for one in tiles])),
                "image_grid_thw": torch.tensor([(1, *grid[:2]) for one in tiles for grid in one.grids]),
                "mm_token_type_ids": (tokens == self.pad).int(),
            }
        with torch.no_grad():
            found: torch.Tensor = self.model(input_ids=tokens, use_cache=False, **more).logits[0]
        return found


def _image(data: bytes, kind: str = "png", expected: int | None = None) -> Any:
    from rankfold.serving.chunks import ChunkImage

    return ChunkImage(data, kind, expected)


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Sees:
    return Sees(tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("state"))


def text(*ids: int) -> dict[str, Any]:
    return {"encoded_text": {"tokens": np.asarray(ids, "<i4").tobytes()}}


def image(data: bytes, kind: str = "png", **more: Any) -> dict[str, Any]:
    return {"image": {"data": data, "format": kind, **more}}


def document(sees: Sees, number: int) -> tuple[dict[str, Any], list[int], list[int], list[bytes]]:
    """A datum with two images, or none; its tokens and targets, and the images."""
    first, second = picture(70, 56, seed=number), picture(100, 42, "JPEG", seed=number + 1)
    chunks, ids, images = [text(7, 8)], [7, 8], list[bytes]()
    if number:
        counts = [sees.count(first), len(sees.client.backend._images.placed("", [_image(second, "jpeg")])[0])]
        chunks += [image(first, expected_tokens=counts[0]), text(9), image(second, "jpeg"), text(10, 11)]
        ids += [sees.pad] * counts[0] + [9] + [sees.pad] * counts[1] + [10, 11]
        images = [first, second]
    else:
        chunks, ids = [text(7, 8, 9, 10)], [7, 8, 9, 10]
    targets = np.random.default_rng(number).integers(3, 50, len(ids)).tolist()
    weights = [0.0] + [1.0] * (len(ids) - 1)
    inputs = {"target_tokens": tensor(targets, whole=True), "weights": tensor(weights)}
    return {"model_input": chunks, "loss_fn_inputs": inputs}, ids, targets, images


def test_they_are_trained_with(sees: Sees) -> None:
    some = [document(sees, number) for number in (1, 0, 2)]
    sees.client.seq[MODEL] = 1
    losses = []
    for _ in range(3):
        body = forward_backward(MODEL, sees.client.seq[MODEL], [one[0] for one in some])
        loss, logps = read_output(sees.client.do(MODEL, "forward_backward", body).body)
        losses.append(loss)
        if len(losses) == 1:  # adapters add nothing yet
            for (_, ids, targets, images), own in zip(some, logps, strict=True):
                expected = sees.logits(ids, images).log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0]
                np.testing.assert_allclose(own, expected, atol=2e-4)
        assert sees.client.step(MODEL, learning_rate=1e-2).good
    assert losses[-1] < losses[0] - 1
    assert not any(name.startswith("vision") for name in sees.client.weights(MODEL))
    assert not [*Path(sees.client.backend._images._folder.name).iterdir()], "images go with their command"


def test_they_are_sampled_with(sees: Sees) -> None:
    data = picture(70, 56, seed=5)
    chunks = [
        {"type": "encoded_text", "tokens": [7, 8]},
        {"type": "image", "data": base64.b64encode(data).decode(), "format": "png", "expected_tokens": None},
        {"type": "encoded_text", "tokens": [9]},
    ]
    body = json.loads(sample("t", 0, [1], 1, max_tokens=5, temperature=0, stop=[]))
    body["prompt"]["chunks"] = chunks
    (outcome,) = sees.client.samples("", json.dumps(body).encode())
    assert outcome.good, outcome.body
    ((tokens, logps, _),), _ = read_samples(outcome.body)
    ids = [7, 8] + [sees.pad] * sees.count(data) + [9]
    for token, logp in zip(tokens, logps, strict=True):
        expected = sees.logits(ids, [data])[-1].log_softmax(-1)
        assert token == int(expected.argmax()) and abs(logp - float(expected[token])) < 2e-4
        ids.append(token)
    body |= {"prompt_logprobs": True, "topk_prompt_logprobs": 2}
    (outcome,) = sees.client.samples("", json.dumps(body).encode())
    prompt = [7, 8] + [sees.pad] * sees.count(data) + [9]
    expected = sees.logits(prompt, [data])[:-1].log_softmax(-1)
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    np.testing.assert_allclose(read_samples(outcome.body)[1][1:], own, atol=2e-4)
    best = decode("SampleResponse", outcome.body)["topk_prompt_logprobs"]
    found = np.frombuffer(best["logprobs"], "<f4").reshape(-1, 2)[1:]
    np.testing.assert_allclose(found, expected.topk(2).values, atol=2e-4)
    body["prompt"]["chunks"] = chunks[:2]
    (outcome,) = sees.client.samples("", json.dumps(body).encode())
    assert b"the prompt ends with an image" in outcome.body


def bomb() -> bytes:
    """A PNG that says it has 30,000 x 30,000 pixels."""
    good = bytearray(picture(8, 8))
    good[16:24] = (30_000).to_bytes(4, "big") * 2
    return bytes(good)


def test_what_is_no_image_is_refused(sees: Sees) -> None:
    good = picture(70, 56)
    for chunk, sentence in (
        (image(b"GIF89a"), "png and jpeg are read"),
        (image(good, "webp"), "png and jpeg are read"),
        (image(good, "jpeg"), "begin like a file of its format"),
        (image(good[:30]), "image 0 of datum 0"),
        (image(good[:-900]), "image 0 of datum 0"),
        (image(picture(2000, 3)), "aspect ratio"),
        (image(bomb()), "image 0 of datum 0"),
        (image(good, expected_tokens=3), "expected_tokens 3"),
        (image(good, override_dimensions={}), "override_dimensions"),
        ({"dmel": {}}, "chunk of dmel"),
    ):
        datum = {"model_input": [text(7), chunk], "loss_fn_inputs": {"target_tokens": tensor([1], whole=True)}}
        outcome = sees.client.do(MODEL, "forward_backward", forward_backward(MODEL, 1, [datum]))
        found = json.loads(outcome.body).get("error", "")
        assert not outcome.good and sentence in found and "/tmp" not in found, found
    datum = {"model_input": [image(good)], "loss_fn_inputs": {"target_tokens": tensor([1], whole=True)}}
    for images, sentence in (
        (None, "only text is read here"),
        (ClientImages(lambda: None), "of this server sees none"),
    ):
        with pytest.raises(UserError, match=sentence):
            read_forward_backward(forward_backward(MODEL, 1, [datum]), vocab_size=9, limit=9, images=images)


def over_ranks(folder: Path, state: Path, layout: Layout, data: list[dict[str, Any]], asked: bytes) -> Any:
    """Losses of two steps, their log-probabilities, and a completion."""
    served = Served(folder, state, layout)
    served.create([MODEL])
    found = []
    for _ in range(2):
        (outcome,) = served.do("forward_backward", {MODEL: forward_backward(MODEL, served.seq[MODEL], data)})
        served.do("optim_step", {MODEL: b'{"adam_params": {"learning_rate": 0.01}}'})
        found.append(outcome.body)
    task = Task(request="t:0", kind="asample", target="", seq=0, body=asked)
    (outcome,) = served.backend.execute([task])
    assert outcome.good, outcome
    return [*found, outcome.body]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}, {"context": 2}, {}], ids=str)
def test_ranks_see_what_one_does(sees: Sees, parallel: dict[str, int], tmp_path: Path) -> None:
    data = [document(sees, number)[0] for number in (1, 0, 2)]
    asked = json.loads(sample("t", 0, [1], 2, max_tokens=4, temperature=0, stop=[]))
    picture_chunk = {"type": "image", "data": base64.b64encode(picture(70, 56)).decode(), "format": "png"}
    word = {"type": "encoded_text", "tokens": [7]}
    asked["prompt"]["chunks"] = [word, picture_chunk, word]
    asked["prompt_logprobs"] = True
    args = sees.client.backend._options.path, tmp_path / "one", Layout(1, {}), data, json.dumps(asked).encode()
    expected = over_ranks(*args)
    args = args[0], tmp_path / "two", Layout(2, parallel), *args[3:]
    (found, *_) = spawn(over_ranks, world=2, args=args, timeout=200)
    for one, other in zip(found[:2], expected[:2], strict=True):
        (loss, logps), (own, theirs) = read_output(one), read_output(other)
        assert loss == pytest.approx(own, rel=1e-5)
        for mine, his in zip(logps, theirs, strict=True):
            np.testing.assert_allclose(mine, his, atol=1e-4)
    ((mine, logps, _), *_), scores = read_samples(found[2])
    ((own, theirs, _), *_), known = read_samples(expected[2])
    np.testing.assert_allclose(scores[1:], known[1:], atol=1e-4)
    assert mine == own and np.allclose(logps, theirs, atol=1e-4)
