"""Completions that the model in training samples: what their log-probabilities are, and what they depend on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch

from engine.data.dataset import TokenDataset
from engine.inference import decode_graphs
from engine.inference.model_part import InferenceStage
from engine.rollouts import trained_sampler
from engine.rollouts.data.completions import Completion, completion_columns
from engine.rollouts.data.prompts import Prompt, PromptLoader
from engine.rollouts.sampler import Sampled
from engine.rollouts.token_logps import token_logps
from engine.rollouts.trained_sampler import TrainedSampler
from engine.training.prepared_run import PreparedRun
from tests.support.generation import lasting_tensors
from tests.support.graph_stand_in import Again, FunctionCapture
from tests.support.rollout_runs import prepared, rollout_settings

END = frozenset((0,))
BOUND = {8: 2e-6, 1: 4e-6}
"""By slots, of a log-probability, where decoding attends by another kernel than training does: some units of fp32's
last place at the size of logits. Products of one row are summed in yet another order."""


def sampled(run: PreparedRun, prompts: Sequence[Prompt], generation: int = 0, **rollout: Any) -> list[Sampled]:
    config = replace(run.config, rollout=replace(run.config.rollout, **rollout))
    sampler = TrainedSampler(config, run.training, ends=END, longest_prompt=8, say=print)
    return sampler.sample(prompts, generation=generation)


def of_trainer(run: PreparedRun, prompts: Sequence[Prompt], found: Sequence[Sampled], *, packing: bool) -> list[float]:
    """What the trainer says of each sampled token."""
    members = len(found) // len(prompts)
    documents = [
        Completion(
            prompt=prompts[place // members].ids, tokens=one.tokens.tolist(), sampled_logps=one.logps.tolist(),
            advantage=0.0,
        )
        for place, one in enumerate(found)
    ]  # fmt: skip
    dataset = TokenDataset(completion_columns(documents, "tokens"), seq_length=32, packing=packing)
    logps = token_logps(run.config, run.training.mesh, run.training.stages, dataset)
    ends = (dataset.starts + dataset.lengths).tolist()
    return [float(one) for end, own in zip(ends, found, strict=True) for one in logps[end - len(own.tokens) : end]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run whose factors B are drawn; no test takes a step."""
    with ExitStack() as opened:
        settings = rollout_settings(tmp_path_factory.mktemp("run"), lora__rank=3, rollout__temperature=0.7)
        found = prepared(settings, opened)
        generator = torch.Generator().manual_seed(3)
        for shard in found.training.optimizer.flat.master_shards():
            if shard.name.endswith("lora_B"):
                shard.tensor.copy_(torch.randn(shard.tensor.shape, generator=generator) * 0.3)
        found.training.optimizer.flat.publish()
        yield found


def prompts_of(run: PreparedRun, count: int) -> list[Prompt]:
    assert isinstance(run.data.train, PromptLoader)
    return list(run.data.train.prompts.prompts[:count])


@pytest.mark.parametrize("slots", [8, 1])
def test_log_probabilities_are_the_trainers(run: PreparedRun, slots: int) -> None:
    """With the temperature left out where they are recorded, they differ by 0.03 at once. The first token of each
    comes from the pass of the whole prompt, whose kernels are the trainer's."""
    prompts = prompts_of(run, 6)
    found = sampled(run, prompts, slots=slots)
    own = [float(one) for completion in found for one in completion.logps]
    for packing in (True, False):
        trainers = of_trainer(run, prompts, found, packing=packing)
        assert own == pytest.approx(trainers, abs=BOUND[slots])
        starts = np.cumsum([0, *(len(one.logps) for one in found[:-1])]).tolist()
        # the products' shapes differ, and so the order of their sums
        assert [own[start] for start in starts] == pytest.approx([trainers[start] for start in starts], abs=5e-7)


def test_what_is_left_out_of_sampling_is_in_its_log_probabilities(run: PreparedRun) -> None:
    """They are the trainer's, of the whole distribution, without min_p and the penalty. Recorded from the scores that
    tokens are drawn from, they differ by 0.1 and more."""
    prompts, repeats = prompts_of(run, 6), {}
    for name, changes in {"plain": {}, "min_p": {"min_p": 0.9}, "penalty": {"repetition_penalty": 1e6}}.items():
        found = sampled(run, prompts, **changes)
        own = [float(one) for completion in found for one in completion.logps]
        assert own == pytest.approx(of_trainer(run, prompts, found, packing=True), abs=BOUND[8])
        repeats[name] = sum(len(one.tokens) - len({*one.tokens.tolist()}) for one in found)
        # the likeliest of 16 tokens has at least a 16th
        assert (min(own) > np.log(0.9 / 16)) == (name == "min_p")
    assert repeats["penalty"] < repeats["plain"] / 2


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_numbers_do_not_depend_on_slots_or_neighbours(run: PreparedRun, temperature: float) -> None:
    """A prompt alone and among others: the same tokens and the same bits. With fewer slots, to rounding. They differ
    where shorter rows see what their slots had before, or where a row that takes a free slot leaves its keys behind."""
    prompts = prompts_of(run, 5)
    together = sampled(run, prompts, slots=8, temperature=temperature)
    fewer = sampled(run, prompts[:1], slots=8, temperature=temperature)
    for one, other in zip(fewer, together, strict=False):
        assert one.tokens.tolist() == other.tokens.tolist() and np.array_equal(one.logps, other.logps)
    for slots in (1, 3):
        for one, other in zip(sampled(run, prompts, slots=slots, temperature=temperature), together, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.logps == pytest.approx(other.logps, abs=max(BOUND.values()))


@pytest.mark.parametrize("slots", [8, 3])
def test_reading_tokens_late_changes_no_token(run: PreparedRun, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are launched before the tokens of the last one, or of the last three, are read, as on a GPU. Rows end by
    their token and by their length; a row that has ended is in further passes until that is read, and no more than
    those. Its page is given to other rows meanwhile; in the end all are free. Other prompts then start together, and a
    library's products of another number of rows may round otherwise."""
    prompts, made = prompts_of(run, 5), list[Any]()
    at_once = sampled(run, prompts, slots=slots)
    assert {one.truncated for one in at_once} == {True, False}
    make = TrainedSampler._generator

    def late(sampler: TrainedSampler, ahead: int) -> Any:
        made.append(make(sampler))
        made[-1]._ahead = ahead
        return made[-1]

    for ahead in (1, 3):
        monkeypatch.setattr(TrainedSampler, "_generator", partialmethod(late, ahead))
        found = sampled(run, prompts, slots=slots)
        for one, other in zip(found, at_once, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.logps == pytest.approx(other.logps, abs=max(BOUND.values()))
        generator = made[-1]
        assert not any(layer.table.used for layer in generator.stage.cache.layers.values())
        # a completion's first token comes from its prompt's pass
        assert generator.speed.decode_tokens == sum(len(one.tokens) - 1 for one in found)


def test_graphs_change_no_number_and_outlive_an_update(run: PreparedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a stage that is kept sample with the weights of now: an update leaves these where they are, which a
    graph of a GPU relies on."""
    monkeypatch.setattr(decode_graphs, "SHORTEST", 16)
    stages, captures = list[InferenceStage](), list[FunctionCapture]()

    def kept(*arguments: Any, **more: Any) -> InferenceStage:
        captures.append(FunctionCapture(lambda: lasting_tensors(stages[-1])))
        stages.append(InferenceStage(*arguments, **{**more, "capture": captures[-1]}))
        return stages[-1]

    prompts, flat = prompts_of(run, 6), run.training.optimizer.flat
    masters = [shard.tensor for shard in flat.master_shards()]
    before = [master.clone() for master in masters]
    parameters = [parameter for part in run.training.parts for parameter in part.parameters()]
    places = [parameter.data_ptr() for parameter in parameters]
    plain = sampled(run, prompts)
    with monkeypatch.context() as patched:
        patched.setattr(trained_sampler, "InferenceStage", kept)
        assert_equal(sampled(run, prompts), plain)
    replays = sum(one.replays for one in captures[0].captured)
    assert replays > 10
    try:
        for master in masters:
            master.mul_(1.5)
        flat.publish()
        assert [parameter.data_ptr() for parameter in parameters] == places
        changed = sampled(run, prompts)
        assert any(one.tokens.tolist() != other.tokens.tolist() for one, other in zip(changed, plain, strict=True))
        monkeypatch.setattr(trained_sampler, "InferenceStage", lambda *_, **__: stages[-1])
        assert_equal(sampled(run, prompts), changed)
        assert sum(one.replays for one in captures[0].captured) > 2 * replays and len(captures) == 1
    finally:
        for master, value in zip(masters, before, strict=True):
            master.copy_(value)
        flat.publish()


def test_a_cache_with_graphs_is_freed_with_its_last_use(run: PreparedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when Python next looks for cycles: training needs the memory at once."""
    alive, captures = list[Any](), list[Again]()

    def noted(*arguments: Any, **more: Any) -> InferenceStage:
        captures.append(Again())
        stage = InferenceStage(*arguments, **{**more, "capture": captures[-1]})
        alive.append(weakref.ref(stage))
        alive.extend(weakref.ref(layer.keys) for layer in stage.cache.layers.values())
        return stage

    monkeypatch.setattr(trained_sampler, "InferenceStage", noted)
    gc.disable()
    try:
        sampled(run, prompts_of(run, 6))
        assert captures[0].replays > 10
        assert len(alive) > 1 and not any(one() is not None for one in alive)
    finally:
        gc.enable()


def assert_equal(found: Sequence[Sampled], expected: Sequence[Sampled]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logps.tolist() == other.logps.tolist()


def test_what_sampling_depends_on(run: PreparedRun) -> None:
    """Members of a group differ, generation batches differ, and the same one is the same again. With the batch's
    number left out of the coordinates, the next one repeats the first."""
    prompts = prompts_of(run, 2)
    first, again, next_batch = sampled(run, prompts), sampled(run, prompts), sampled(run, prompts, generation=1)
    assert [one.tokens.tolist() for one in first] == [one.tokens.tolist() for one in again]
    assert [one.tokens.tolist() for one in first] != [one.tokens.tolist() for one in next_batch]
    assert len({tuple(one.tokens.tolist()) for one in first[:4]}) > 1


def test_endings(run: PreparedRun) -> None:
    found = sampled(run, prompts_of(run, 8))
    for one in found:
        ended = int(one.tokens[-1]) in END
        assert one.truncated != ended and len(one.tokens) <= 6 and (ended or len(one.tokens) == 6)
        assert not any(int(token) in END for token in one.tokens[:-1])
    assert {one.truncated for one in found} == {True, False}


@pytest.mark.parametrize("slots", [8, 3])
def test_a_prompt_is_run_once_for_its_group(run: PreparedRun, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its four members start together or not; and no page stays taken."""
    config = replace(run.config, rollout=replace(run.config.rollout, slots=slots))
    sampler, made = TrainedSampler(config, run.training, ends=END, longest_prompt=8, say=print), list[Any]()
    make = sampler._generator
    monkeypatch.setattr(sampler, "_generator", lambda: made.append(make()) or made[0])
    prompts = prompts_of(run, 5)
    sampler.sample(prompts, generation=0)
    (generator,) = made
    assert generator.speed.prefill_tokens == sum(len(prompt.ids) for prompt in prompts)
    assert generator.stage.cache.num_bytes > 0
    assert not any(layer.table.used for layer in generator.stage.cache.layers.values())
