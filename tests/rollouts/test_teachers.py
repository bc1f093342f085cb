"""On-policy distillation: teachers' log-probabilities are those of transformers and PEFT, and the gradient is TRL's."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import Batch
from engine.config.distillation import DistillationOptions
from engine.config.objective import ObjectiveOptions
from engine.config.rollout import RolloutOptions
from engine.distillation.teacher_model import build_teacher, companions, open_teacher
from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.planning.ledger import WEIGHTS
from engine.planning.predict import predict_peak
from engine.rollouts.batch_parts import Completions
from engine.rollouts.objective.policy import PolicyGradient
from engine.rollouts.source import RolloutSource
from engine.rollouts.teachers.differences import divergences, token_advantages
from engine.telemetry.log import Log
from engine.training.generation import storage_bytes
from tests.support.rollout_runs import final_state, prepared, records, run_here
from tests.support.teachers import distilled_settings, stock_logps

TEACHERS = ("other", "adapter", "base")


def test_advantages_discount_what_follows() -> None:
    teachers = np.array([[-1.0, -2.0, -0.5], [-1.5, -1.0, -1.0]], dtype=np.float32)
    own = np.array([-1.25, float("nan"), -2.0], dtype=np.float32)
    at_once = token_advantages(teachers, own, (1.0, 0.5), 0.0)
    np.testing.assert_allclose(at_once, [0.25 - 0.125, 0.0, 1.5 + 0.5])
    discounted = token_advantages(teachers, own, (1.0, 0.5), 0.5)
    np.testing.assert_allclose(discounted, [0.125 + 0.25 * 2.0, 0.5 * 2.0, 2.0])
    np.testing.assert_allclose(divergences([teachers], [own]), [(-0.25 - 1.5) / 3, (0.25 - 1.0) / 3])


def _cookbook_advantages(
    teacher: np.ndarray, sampled: np.ndarray, mask: np.ndarray, coefficient: float, discount: float
) -> np.ndarray:
    """What tinker-cookbook adds to advantages (`incorporate_kl_penalty` of distillation/train_on_policy.py), as its
    docstrings say: minus the coefficient times the reverse divergence at unmasked tokens, with a discounted sum of
    what follows."""
    found = -coefficient * mask * (sampled - teacher)
    if discount > 0:
        powers = discount ** np.arange(len(found))
        found = np.array([(found[place:] * powers[: len(found) - place]).sum() for place in range(len(found))])
    return found


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_advantages_are_those_of_the_cookbook(discount: float) -> None:
    random = np.random.default_rng(2)
    teacher, sampled = -random.exponential(2.0, (2, 12)).astype(np.float32)
    expected = _cookbook_advantages(teacher, sampled, np.ones(12), 0.7, discount)
    np.testing.assert_allclose(
        token_advantages(teacher[None], sampled, (0.7,), discount), expected, rtol=1e-5, atol=1e-6
    )


def test_the_gradient_of_the_first_step_is_that_of_the_cookbook() -> None:
    """Its importance_sampling sums -exp(p - p_sampled) A over tokens; ours is the mean, at the ratio 1."""
    generator = torch.Generator().manual_seed(4)
    logps = (-torch.rand(9, generator=generator) - 0.1).requires_grad_()
    sampled, teacher = logps.detach().numpy(), -np.random.default_rng(1).exponential(1.0, 9).astype(np.float32)
    added = token_advantages(teacher[None], sampled, (0.7,), 0.5)
    advantages = torch.from_numpy(_cookbook_advantages(teacher, sampled, np.ones(9), 0.7, 0.5)).float()
    theirs = -((logps - logps.detach()).exp() * advantages).sum()
    (wanted,) = torch.autograd.grad(theirs, logps)
    objective = PolicyGradient(
        ObjectiveOptions(name="grpo", report_entropy=False), RolloutOptions(), cp=Axis("cp"), dp=Axis("dp")
    )
    zeros = torch.zeros(1, 9, dtype=torch.long)
    batch = Batch(
        tokens_BS=zeros, labels_BS=zeros, positions_BS=zeros, token_index_BS=zeros, loss_weights_BS=torch.ones(1, 9),
        document_offsets=torch.tensor([0, 9]), document_lengths=(9,),
    )  # fmt: skip
    part = Completions(
        ids_BS=zeros, advantages=torch.zeros(1), lengths=torch.full((1,), 9.0), documents=(0,),
        sampled_logps_BS=torch.from_numpy(sampled)[None], token_advantages_BS=torch.from_numpy(added)[None],
    )  # fmt: skip
    ours = objective.sums(-logps, batch.with_parts(part), None).loss
    (found,) = torch.autograd.grad(ours, logps)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_expected_gradient_is_that_of_trls_reverse_divergence(temperature: float) -> None:
    """Every token of a vocabulary as a completion of one token, weighed by its probability: the sum that sampling
    estimates. TRL computes the divergence from whole distributions."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    vocabulary = 23
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, vocabulary, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    expected = gkd.GKDTrainer.generalized_jsd_loss(
        student[None, None], teacher[None, None], beta=1.0, temperature=temperature, reduction="sum"
    )
    wanted = torch.autograd.grad(expected, student)[0]

    logps = (student / temperature).log_softmax(0)
    own = logps.detach().numpy().astype(np.float32)
    of_teacher = (teacher / temperature).log_softmax(0).numpy().astype(np.float32)
    added = token_advantages(of_teacher[None], own, (1.0,), 0.0) * np.exp(own)
    objective = PolicyGradient(
        ObjectiveOptions(name="grpo", report_entropy=False), RolloutOptions(), cp=Axis("cp"), dp=Axis("dp")
    )
    zeros = torch.zeros(1, vocabulary, dtype=torch.long)
    batch = Batch(
        tokens_BS=zeros, labels_BS=torch.arange(vocabulary)[None], positions_BS=zeros, token_index_BS=zeros,
        loss_weights_BS=torch.ones(1, vocabulary), document_offsets=torch.tensor([0, vocabulary]),
        document_lengths=(vocabulary,),
    )  # fmt: skip
    part = Completions(
        ids_BS=torch.arange(vocabulary)[None], advantages=torch.zeros(vocabulary), lengths=torch.ones(vocabulary),
        documents=tuple(range(vocabulary)), sampled_logps_BS=torch.from_numpy(own)[None],
        token_advantages_BS=torch.from_numpy(added)[None],
    )  # fmt: skip
    sums = objective.sums(-logps, batch.with_parts(part), None)
    found = torch.autograd.grad(sums.loss, student)[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with three teachers whose factors B are drawn, and its first buffer."""
    folder = tmp_path_factory.mktemp("teachers")
    with ExitStack() as opened:
        run = prepared(distilled_settings(folder, TEACHERS, rollout__temperature=0.7, lora__rank=3), opened)
        generator = torch.Generator().manual_seed(3)
        for shard in run.training.optimizer.flat.master_shards():
            if shard.name.endswith("lora_B"):
                shard.tensor.copy_(torch.randn(shard.tensor.shape, generator=generator) * 0.3)
        run.training.optimizer.flat.publish()
        (rows,) = run.source.stream(0, 0, 1)
        yield folder, run, rows


def test_teachers_are_as_transformers_and_peft_compute_them(filled: Any) -> None:
    """Fails where an adapter is left out, a temperature is, or the trained model's factors reach a teacher."""
    folder, run, rows = filled
    assert isinstance(run.source, RolloutSource) and run.source.buffer is not None
    buffer = run.source.buffer
    prompts = [run.data.train.prompts.prompts[number].ids for number in buffer.prompts.tolist()]
    documents = [
        ([*ids, *one.tokens.tolist()], len(one.tokens)) for ids, one in zip(prompts, buffer.completions, strict=True)
    ]
    gaps = []
    for number, teacher in enumerate(TEACHERS):
        expected = stock_logps(folder, teacher, documents, 0.7)
        for found, wanted in zip(buffer.teacher_logps, expected, strict=True):
            np.testing.assert_allclose(found[number], wanted.numpy(), atol=3e-6)
        own = np.concatenate([one.logps for one in buffer.completions])
        gaps.append(float((own - torch.cat(expected).numpy()).mean()))
        assert rows.figures[f"teachers/{teacher}/kl"] == pytest.approx(gaps[-1], abs=1e-5)
    assert min(abs(one - other) for one, other in pairwise(sorted(gaps))) > 0.01  # three different teachers
    assert rows.has_signal and "reward" not in rows.figures


def test_the_model_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    run_here(distilled_settings(tmp_path, ("adapter",), train__steps=25, lora__rank=8, optim__lr=0.02))
    found = [record["teachers/adapter/kl"] for record in records(tmp_path / "run")]
    assert np.mean(found[-3:]) < 0.35 * np.mean(found[:3]) and found[0] > 0.05


def test_rewards_and_teachers_add_up(tmp_path: Path) -> None:
    settings = distilled_settings(tmp_path, ("adapter",), train__steps=1, rollout__rewards="regex:1")
    settings |= {"rollout.num_generations": 4, "distillation.weights": "[0.5]"}
    with ExitStack() as opened:
        run = prepared(settings, opened)
        (rows,) = run.source.stream(0, 0, 1)
        assert isinstance(run.source, RolloutSource) and run.source.buffer is not None
        buffer = run.source.buffer
        for batch in rows.batches:
            part = batch.part(Completions)
            for number, document in enumerate(part.documents):
                gap = 0.5 * (buffer.teacher_logps[document][0] - buffer.own_logps[document])
                here = (part.ids_BS == number) & (batch.loss_weights_BS > 0)
                np.testing.assert_allclose(part.token_advantages_BS[here].numpy(), gap, atol=1e-6)
                assert part.advantages[number] == buffer.advantages[document]


def test_a_run_continues_inside_a_buffer(tmp_path: Path) -> None:
    """Bit for bit, and not with other teachers."""
    changes = {"train__steps": 3, "rollout__steps_per_generation": 3, "checkpoint__every": 1}
    settings = distilled_settings(tmp_path, ("adapter", "base"), **changes)
    run_here(settings)
    whole = final_state(tmp_path / "run", 3)
    for step in (2, 3):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    with pytest.raises(UserError, match="made with distillation.teachers .*adapter.*base.* is .*base.* now"):
        run_here(settings | {"distillation.teachers": "[base]"})
    run_here(settings)
    again = final_state(tmp_path / "run", 3)
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items()) and whole.keys() == again.keys()


WRONG: list[tuple[dict[str, object], str]] = [
    ({"distillation.teachers": "[nowhere]"}, "distillation.teachers is nowhere, which is not a folder"),
    ({"distillation.teachers": "[base,base]"}, "distillation.teachers has base twice"),
    ({"distillation.teachers": "[]"}, "rollout.rewards is [], so that no completion is better than another"),
    ({"distillation.weights": "[1,2]"}, "distillation.weights has 2 numbers and distillation.teachers 1 models"),
    ({"distillation.weights": "[-1]"}, "distillation.weights has -1.0, but numbers above 0 are expected"),
    ({"distillation.discount": 1.5}, "distillation.discount is 1.5, but a share from 0 to 1"),
    ({"distillation.teachers": "[]", "distillation.discount": 0.5}, "so that there is nothing to discount"),
    ({"distillation.server_kind": "sglang"}, "distillation.server_kind is set and distillation.teachers has no"),
    ({"distillation.server_timeout": 5}, "distillation.server_timeout is set and distillation.teachers has no"),
    ({"rollout.drop_uniform_groups": "true"}, "rollout.drop_uniform_groups is true, but completions with the same"),
    ({"objective.loss_type": "vespo"}, "objective.loss_type is vespo, which weighs whole completions"),
    ({"rollout.rewards": "regex:1"}, "rollout.num_generations is 1, but rewards are compared"),
    ({"rollout.overlong_buffer": 2}, "but the penalty is added to rewards"),
    ({"lora.rank": 0, "trainable": "[lm_head]"}, "distillation.teachers has base, the model without its adapters"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_wrong_options_are_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    settings = distilled_settings(tmp_path, ("base",)) | changes
    with pytest.raises(UserError, match=re.escape(words)), ExitStack() as opened:
        prepared(settings, opened)


def test_a_run_that_samples_nothing_has_no_teachers(tmp_path: Path) -> None:
    settings = distilled_settings(tmp_path, ("base",)) | {"objective.name": "language_modeling"}
    kept = {name: value for name, value in settings.items() if not name.startswith("rollout.")}
    with pytest.raises(UserError, match="distillation.teachers is set and objective.name is"), ExitStack() as opened:
        prepared(kept, opened)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    settings = distilled_settings(tmp_path, ("other",), vocab_size=15)
    with pytest.raises(UserError, match="other, whose vocabulary has 15 entries, and"), ExitStack() as opened:
        prepared(settings, opened)


@pytest.mark.parametrize("kind", ["model", "run"])
def test_a_teacher_with_another_tokenizer_is_refused(kind: str, tmp_path: Path) -> None:
    """One of as many tokens, two of which have changed places; a run has that of its base."""
    settings = distilled_settings(tmp_path, ("other",))
    for path in (tmp_path / "other" / "tokenizer_config.json", tmp_path / "other" / "tokenizer.json"):
        assert path.is_file()
    teacher = tmp_path / "other"
    if kind == "run":
        teacher = tmp_path / "earlier"
        changes = {"model.path": tmp_path / "other", "distillation.teachers": "[base]", "checkpoint.dir": teacher}
        run_here(settings | changes | {"train.steps": 1})
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    ids = tokenizer["model"]["vocab"]
    ids["1"], ids["2"] = ids["2"], ids["1"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(UserError, match="whose tokenizer makes other tokens of the texts"), ExitStack() as opened:
        prepared(settings | {"distillation.teachers": f"[{teacher}]"}, opened)


def test_the_planner_counts_the_weights_of_teachers(filled: Any) -> None:
    """To the byte, what is allocated; and nothing for the base."""
    _, run, _ = filled
    launch, decoder, plan = run.launch, run.training.source.model.decoder, run.training.plan.modules
    with_teachers = predict_peak(run.config, decoder, plan, device_type="cpu").static[WEIGHTS]
    alone = replace(run.config, distillation=DistillationOptions(teachers=("base",)))
    without = predict_peak(alone, decoder, plan, device_type="cpu").static[WEIGHTS]
    held = 0
    for teacher in run.config.distillation.teachers[:2]:
        opened = open_teacher(run.config, Path(teacher), 1, Log(1))
        stages = build_teacher(opened, launch, run.training, Log(1))
        held += sum(map(storage_bytes, stages.models()))
    assert with_teachers - without == held > 0


def test_the_planner_reads_the_config_of_a_teacher_alone(filled: Any, tmp_path: Path) -> None:
    """As for a model that is not downloaded yet."""
    folder, run, _ = filled
    shutil.copy(folder / "other" / "config.json", tmp_path)
    of_whole, of_config = (
        list(companions(replace(run.config, distillation=DistillationOptions(teachers=(str(place),)))))
        for place in (folder / "other", tmp_path)
    )
    assert of_whole == of_config and len(of_config) == 1
    absent = replace(run.config, distillation=DistillationOptions(teachers=("nowhere",)))
    with pytest.raises(UserError, match="distillation.teachers has nowhere, which is not a folder: give the folder of"):
        list(companions(absent))


def test_a_buffer_is_not_resumed_with_other_weights_or_teachers(tmp_path: Path) -> None:
    """Without the refusals one buffer is trained on with two sums of teachers. The other model has the same name."""
    settings = distilled_settings(tmp_path, ("other", "base"), train__steps=1, rollout__steps_per_generation=2)
    settings |= {"distillation.weights": "[1,0.5]", "rollout.num_generations": 1}
    run_here(settings)
    settings["train.steps"] = 2
    changed: list[tuple[dict[str, object], str]] = [
        (
            {"distillation.weights": "[1,1]"},
            r"distillation.weights \[1.0, 0.5\], and distillation.weights is \[1.0, 1.0\] now",
        ),
        ({"distillation.discount": 0.5}, r"distillation.discount 0.0"),
    ]
    for options, words in changed:
        with pytest.raises(UserError, match=f"lies inside a buffer .* made with {words}"):
            run_here(settings | options)
    path = tmp_path / "other" / "model.safetensors"
    whole = path.read_bytes()
    tensors = load_file(path)
    tensors["model.layers.5.mlp.down_proj.weight"][-1] += 0.5
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match="made with the content of distillation.teachers .*: give the old value"):
        run_here(settings)
    path.write_bytes(whole)
    run_here(settings)


def test_a_run_on_whole_distributions_continues_inside_a_buffer(tmp_path: Path) -> None:
    settings = distilled_settings(tmp_path, ("other",), train__steps=2, rollout__steps_per_generation=2)
    settings |= {"distillation.whole": "true", "distillation.beta": 0.5, "rollout.num_generations": 1}
    run_here(settings | {"checkpoint.every": 1})
    divergences_of = [record["divergence"] for record in records(tmp_path / "run")]
    assert divergences_of[1] < divergences_of[0]
    whole = final_state(tmp_path / "run", 2)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000002")
    run_here(settings | {"checkpoint.every": 1})
    again = final_state(tmp_path / "run", 2)
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distillation.beta": 0.5}, "distillation.beta is set and distillation.whole is false"),
        ({"distillation.whole": "true", "distillation.teachers": "[base]"}, "distillation.teachers has base"),
        ({"distillation.whole": "true", "distillation.discount": 0.5}, "belong to policy gradients"),
        ({"distillation.whole": "true", "objective.loss_type": "grpo"}, "objective.loss_type is set"),
        ({"distillation.whole": "true", "objective.entropy_coefficient": 0.1}, "objective.entropy_coefficient is set"),
        ({"distillation.whole": "true", "distillation.remainder": "bucket"}, "remove distillation.remainder"),
    ],
)
def test_options_that_whole_distributions_do_not_take(options: dict[str, object], words: str, tmp_path: Path) -> None:
    settings = distilled_settings(tmp_path, ("other",))
    with pytest.raises(UserError) as refused, ExitStack() as opened:
        prepared(settings | options, opened)
    assert words in str(refused.value)
