"""Text about images: tokens with a cache are those of whole passes without one, and of the originals' logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.config.load import parse_config
from engine.data.tokenizer import load_tokenizer
from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, ModelChoice, Sampling
from engine.inference.prompt_coordinates import PromptCoordinates
from engine.inference.text import TextStream
from engine.models.decoder import Decoder
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import OpenedModel, open_for_generation
from engine.training.trainer import train
from engine.vision.batch_parts import CrossImages, ExpertTokens, Images
from engine.vision.data import row_images as row_images
from engine.vision.data.families import read_vision_family
from engine.vision.data.family import Tiles, VisionFamily
from engine.vision.data.reader import ImageReader
from rankfold.generating.prompts import Prompt, Writer, requests_of
from tests.parity.test_vision_models import make_batch
from tests.support import cogvlm_cases
from tests.support.commands import options, run_tool
from tests.support.generation import Ids
from tests.support.shared_data import shared
from tests.support.spawning import spawn
from tests.support.sweeps import sampled
from tests.support.vision_data import write_tokenizer
from tests.support.vision_fixtures import VisionFixture

CPU = torch.device("cpu")
NAMES = ("minicpm-v-2", "minicpm-v-2_6", "omnilmm", "cogvlm-v1", "cogvlm2", "cogagent")
SEVERAL = ("minicpm-v-2", "minicpm-v-2_6", "omnilmm")
"""Models that take several images."""
NEW = 6
TEXTS = ("What is this?", "Who are they, and where do they go?", "Look!")


def model_folder(name: str, folder: Path) -> Path:
    """The fixture as a released folder, with its tokenizer."""
    write_tokenizer(folder, name)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(shared(f"vision/{name}") / file, folder)
    return folder


def image_files(name: str) -> list[Path]:
    return sorted((shared("vision") / name / "images").glob("*.png"))


def prompts(name: str, folder: Path) -> list[Prompt]:
    """Prompts of several lengths: with an image, with two or another, and of text alone where the model takes such."""
    tokenizer = load_tokenizer(folder)
    family = read_vision_family(folder, tokenizer)
    assert family is not None
    files = [str(path) for path in image_files(name)]
    images = [tuple(files[:1]), tuple(files[:2] if name in SEVERAL else files[-1:]), ()]
    return [
        Writer(tokenizer=tokenizer, chat=True, system=None, reader=ImageReader(family), images=own).text(text, 1)
        for text, own in zip(TEXTS, images, strict=True)
        if own or name != "cogagent"
    ]


def opened(folder: Path, **place: int) -> OpenedModel:
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    launch = Launch(rank=ranks[0], world_size=ranks[1], device=CPU)
    return open_for_generation(ModelChoice(path=folder, dtype="float32", **place), launch, Log(1))


def cached_tokens(name: str, folder: Path, *, slots: int = 2, **place: int) -> list[list[int]]:
    """What the engine continues all prompts with; two rows at a time, so that they come and go."""
    asked = prompts(name, folder)
    model = opened(folder, **place)
    stage = InferenceStage(
        model.decoder, tp=model.mesh.tp, pp=model.mesh.pp, sampling=Sampling(), slots=slots,
        length=max(len(prompt.ids) for prompt in asked) + NEW, device=CPU,
    )  # fmt: skip
    family = read_vision_family(folder, load_tokenizer(folder))
    limits = Limits(max_new_tokens=NEW, slots=slots)
    answers = Generator(stage, limits, Ids(), family=family).run(requests_of(asked))
    return [list(answer.ids) for answer in answers]


def rule_of(name: str, length: int, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Positions and the vision expert's tokens, as the originals' code has them."""
    if not name.startswith("cog") or not spans:
        return list(range(length)), []
    ((start, end),) = spans
    assert start == 1  # begin token, boi, patches at one position, eoi, text
    patches = end - start - 2
    return [0, 1, *[2] * patches, *range(3, length - patches + 1)], list(range(start, end - 1))


def images_of(kind: type[Images], tiles: list[Tiles], spans: Sequence[tuple[int, int]], features: int) -> Images:
    return kind(
        patches_PF=torch.cat([torch.empty(0, features), *(torch.from_numpy(one.patches_PF) for one in tiles)]),
        grids=tuple(grid for one in tiles for grid in one.grids),
        documents=tuple(0 for one in tiles for _ in one.grids),
        places_K=torch.tensor([at for span in spans for at in range(*span)], dtype=torch.int64),
    )


def whole_batch(name: str, family: VisionFamily, prompt: Prompt, ids: list[int]) -> Batch:
    """All tokens so far as one row."""
    spans = [span for image in prompt.images for span in image.spans]
    opened = [Image.open(image.file).convert("RGB") for image in prompt.images]
    positions, vision = rule_of(name, len(ids), spans)
    cross_images = None
    if family.cross_patch_features is not None:
        cross = [tiles for one in opened if (tiles := family.cross_tiles(one)) is not None]
        cross_images = images_of(CrossImages, cross, (), family.cross_patch_features)
    language = sorted(set(range(len(ids))) - set(vision))
    tokens = torch.tensor([ids])
    return Batch(
        tokens_BS=tokens,
        labels_BS=torch.full_like(tokens, IGNORE_LABEL),
        positions_BS=torch.tensor([positions]),
        token_index_BS=torch.arange(len(ids))[None],
        loss_weights_BS=torch.zeros(tokens.shape),
        document_offsets=torch.tensor([0, len(ids)], dtype=torch.int32),
        document_lengths=(len(ids),),
    ).with_parts(
        images_of(Images, [family.tiles(one) for one in opened], spans, family.patch_features),
        cross_images,
        ExpertTokens(
            vision_V=torch.tensor(vision, dtype=torch.int64), language_L=torch.tensor(language, dtype=torch.int64)
        ),
    )


def last_logits(model: Decoder, batch: Batch) -> Tensor:
    with torch.no_grad():
        context = model.context(batch, torch.tensor(0), training=False)
        logits = model.logits(model.run_layers(model.embed(batch), context), context)
    return logits[-1, : model.config.vocab_size]


def uncached_tokens(name: str, folder: Path) -> list[list[int]]:
    family = read_vision_family(folder, load_tokenizer(folder))
    assert family is not None
    model = opened(folder).decoder
    answers = []
    for prompt in prompts(name, folder):
        ids = list(prompt.ids)
        for _ in range(NEW):
            ids.append(int(last_logits(model, whole_batch(name, family, prompt, ids)).argmax()))
        answers.append(ids[len(prompt.ids) :])
    return answers


@pytest.mark.parametrize("name", sampled(NAMES, ["minicpm-v-2", "cogvlm2", "cogagent"]))
def test_tokens_are_those_of_whole_passes(name: str, tmp_path: Path) -> None:
    folder = model_folder(name, tmp_path)
    expected = uncached_tokens(name, folder)
    assert cached_tokens(name, folder) == expected
    assert cached_tokens(name, folder, slots=1) == expected


@pytest.mark.parametrize("name", NAMES)
def test_choices_are_those_of_the_originals_logits(name: str, tmp_path: Path) -> None:
    """A prompt that ends behind the image, and then the fixture's own tokens one by one."""
    data = VisionFixture(name)
    batch = cogvlm_cases.batch_of(data, "one_image") if name.startswith("cog") else make_batch(data, "one_image")
    images, experts = batch.part(Images), batch.part(ExpertTokens)
    assert images is not None
    ids, positions = batch.tokens_BS[0].tolist(), batch.positions_BS[0]
    start = int(images.places_K[-1]) + 2
    if experts is not None:
        batch = batch.with_parts(replace(experts, language_L=experts.language_L[experts.language_L < start]))
    coordinates = PromptCoordinates(
        positions_T=positions[:start], next_positions=(int(positions[start]),), parts=batch.parts,
    )  # fmt: skip
    model = opened(model_folder(name, tmp_path))
    stage = InferenceStage(
        model.decoder, tp=model.mesh.tp, pp=model.mesh.pp, sampling=Sampling(), slots=1, length=len(ids), device=CPU
    )
    stage.cache.begin([0], start, len(ids) - start, waits=False)
    chosen = stage.prefill([ids[:start]], coordinates, 0, [[0]]).read()[0]
    for at in range(start, len(ids)):
        stage._last[0] = ids[at]  # the text's, not the one that was chosen
        chosen += stage.decode([at], [int(positions[at])], [0]).read()[0]
    assert chosen == data.expected["one_image.logits"][0, start - 1 :].argmax(-1).tolist()


def _tokens_in_layouts(name: str, places: list[tuple[int, int]], folder: str) -> list[list[list[int]]]:
    return [cached_tokens(name, Path(folder), tensor=tensor, pipeline=pipeline) for tensor, pipeline in places]


@pytest.mark.distributed
@pytest.mark.parametrize("name", sampled(("minicpm-v-2", "cogvlm2", "cogagent"), ("cogagent",)))
def test_layouts_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    expected = uncached_tokens(name, model_folder(name, tmp_path))
    for world, places in ((2, [(2, 1), (1, 2)]), (4, [(2, 2)])):
        for found in spawn(_tokens_in_layouts, world=world, args=(name, places, str(tmp_path)), timeout=240):
            assert found == [expected] * len(places)


class TestCommand:
    @pytest.fixture(scope="class")
    def minicpm(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return model_folder("minicpm-v-2", tmp_path_factory.mktemp("minicpm"))

    def test_images_on_the_command_line_and_in_records(self, minicpm: Path, tmp_path: Path) -> None:
        """The same question in every way that it can be asked, and one that names the images' places."""
        first, second = image_files("minicpm-v-2")[:2]
        shutil.copy(first, tmp_path / "a.png")
        shutil.copy(second, tmp_path / "b.png")
        parts = [{"type": "image"}, {"type": "image", "path": "b.png"}, {"type": "text", "text": TEXTS[1]}]
        marked = f"<image>\n<image>\n{TEXTS[1]}"
        records: list[dict[str, Any]] = [
            {"prompt": TEXTS[1], "images": ["a.png", "b.png"]},
            {"messages": [{"role": "user", "content": parts}], "image": "a.png"},
            {"conversations": [{"from": "human", "value": marked}], "image": ["a.png", "b.png"]},
            {"prompt": TEXTS[0], "image": "a.png"},
            {"messages": [{"role": "user", "content": TEXTS[2]}]},
        ]  # fmt: skip
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        result = run_tool(
            "generate", "--model", minicpm, "--prompts", tmp_path / "in.jsonl", "--ids", "--ignore-eos",
            "--max-new-tokens", NEW,
        )  # fmt: skip
        answers = [json.loads(line) for line in result.stdout.splitlines()]
        one, two, text = uncached_tokens("minicpm-v-2", minicpm)
        assert [answer["completion_ids"] for answer in answers] == [two, two, two, one, text]
        shown = run_tool(
            "generate", "--model", minicpm, "--image", "a.png", "--image", "b.png", "--image-folder", tmp_path,
            "--prompt", TEXTS[1], "--ignore-eos", "--max-new-tokens", NEW,
        )  # fmt: skip
        assert shown.stdout == answers[0]["completion"] + "\n"

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--image", "{tmp}/none.png", "--prompt", "a"], "--image names {tmp}/none.png, which does not exist"),
            (["--image", "{tmp}/text.png", "--prompt", "a"], "text.png, which is no image that Pillow can read"),
            (["--image", "{tmp}/cut.png", "--prompt", "a"], "--image names {tmp}/cut.png, which cannot be read"),
            (["--image", "{tmp}/a.png", "--prompt", "<image> or <image>"], "names 1 image, but <image> stands 2"),
            (["--image", "{tmp}/a.png", "--prompts", "{tmp}/in.jsonl"], "--image and --prompts were both given"),
            (["--prompts", "{tmp}/in.jsonl"], "in.jsonl line 2: field 'image' names {tmp}/none.png"),
        ],
    )
    def test_refusals(self, options: list[str], words: str, minicpm: Path, tmp_path: Path) -> None:
        image = image_files("minicpm-v-2")[0]
        shutil.copy(image, tmp_path / "a.png")
        (tmp_path / "cut.png").write_bytes(image.read_bytes()[:-60])
        (tmp_path / "text.png").write_text("a")
        records = [{"prompt": "a", "image": "a.png"}, {"prompt": "a", "image": "none.png"}]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        self.check_refused(minicpm, options, words, tmp_path)

    def test_models_that_take_none_or_one(self, stories_dir: Path, tmp_path: Path) -> None:
        for file in image_files("minicpm-v-2")[:2]:
            shutil.copy(file, tmp_path)
        first, second = [path.name for path in image_files("minicpm-v-2")[:2]]
        (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a", "image": first}) + "\n")
        one, two = ["--image", "{tmp}/" + first], ["--image", "{tmp}/" + second]
        agent = model_folder("cogagent", tmp_path / "agent")
        self.check_refused(
            stories_dir, [*one, "--prompt", "a"], "--image names an image, but the model reads text alone", tmp_path
        )
        self.check_refused(
            stories_dir,
            ["--prompts", "{tmp}/in.jsonl"],
            "in.jsonl line 1: field 'image' names an image, but",
            tmp_path,
        )
        self.check_refused(agent, [*one, *two, "--prompt", "a"], "2 images, but the model takes one", tmp_path)
        self.check_refused(agent, ["--prompt", "a"], "no image, but the model's layers attend to one", tmp_path)

    @staticmethod
    def check_refused(model: Path, options: list[str], words: str, tmp_path: Path) -> None:
        result = run_tool("generate", "--model", model, *(option.format(tmp=tmp_path) for option in options), status=2)
        last = result.stderr.splitlines()[-1]
        assert last.startswith("error: ") and words.format(tmp=tmp_path) in last, last
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", sampled(("minicpm-v-2_6", "cogvlm-v1"), ("cogvlm-v1",)))
def test_samples_while_training_are_what_is_generated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, of prompts with an image and without, in the family's layout. Read as plain text, prompts
    would be continued otherwise. An image is decoded once for all tokens, and again for each evaluation."""
    opened: list[Path] = []
    read = row_images.read_image
    monkeypatch.setattr(
        row_images, "read_image", lambda path, *rest, **more: (opened.append(path), read(path, *rest, **more))[1]
    )
    (tmp_path / "model").mkdir()
    folder = model_folder(name, tmp_path / "model")
    files = [str(path) for path in image_files(name)]
    turns = [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": "A day."}]
    records = [{"id": str(number), "image": files[0], "conversations": turns} for number in range(2)]
    (tmp_path / "train.json").write_text(json.dumps(records), encoding="utf-8")
    texts, images = [TEXTS[0], TEXTS[2]], [files[0], ""]
    train(parse_config(options({
        "model.path": folder, "model.dtype": "float32", "data.train": tmp_path / "train.json",
        "data.seq_length": 256, "data.num_workers": 0, "train.steps": 1, "train.global_batch_size": 2,
        "lora.rank": 2, "lora.targets": "q_proj", "checkpoint.dir": tmp_path / "run", "train.sample_every": 1,
        "train.sample_prompts": json.dumps(texts), "train.sample_images": json.dumps(images),
        "train.sample_tokens": NEW, "train.sample_chat": "true",
    })))  # fmt: skip
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(opened) == 2 + sum("sample/1" in line for line in lines)  # of both rows of the step
    first = {key: text for record in map(json.loads, lines) if record["step"] == 0 for key, text in record.items()}
    asked = prompts(name, folder)
    expected = cached_tokens(name, folder)
    tokenizer = load_tokenizer(folder)
    for number, at in ((1, 0), (2, 2)):
        stream = TextStream(tokenizer, (), asked[at].ids)
        for token in expected[at]:
            stream.push(token)
        stream.finish()
        assert stream.text and first[f"sample/{number}"] == stream.text
