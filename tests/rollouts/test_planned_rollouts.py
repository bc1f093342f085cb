"""What the planner says of sampling: the cache against that of a real sampler, passes against those that run, and times
by hand."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.data import DataOptions
from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.objective import ObjectiveOptions
from engine.config.parallel import ParallelOptions
from engine.config.rollout import RolloutOptions
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.errors import UserError
from engine.layers.context import TrainingPlan
from engine.layers.merged_codes import kept_bytes, merged_codes, merging_storages
from engine.layers.recompute import MemoryPlan
from engine.models.families import family_of
from engine.planning.launch_times import launch_seconds
from engine.planning.launches import LaunchCounter, TorchAttention
from engine.planning.machine import MACHINES, Machine
from engine.planning.peak import predict_layout, predict_static
from engine.planning.predict import workload_of
from engine.planning.rank_layout import Companion, Layout, Neighbour, Workload
from engine.planning.step_time import predict_range, predict_time
from engine.rollouts import planned_rollouts
from engine.rollouts.cache_size import cache_size
from engine.rollouts.planned_judges import judges_on_device
from engine.rollouts.planned_rollouts import predict_rollout
from engine.rollouts.trained_sampler import TrainedSampler
from engine.training.module_plan import training_plan
from engine.training.prepared_run import PreparedRun
from rankfold.planning.memory_examples import LLAMA_3_8B
from rankfold.planning.memory_measure import LiveStorages
from tests.support.few_bits import draw_in_few_bits
from tests.support.rollout_runs import prepared, rollout_settings

ROOT = Path(__file__).resolve().parents[2]
GPT_OSS = json.loads((ROOT / "examples/memory/models/gpt-oss-120b.json").read_text(encoding="utf-8"))
H100 = MACHINES["h100-80"]
PROMPT = 8
ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu": "attention forward"}
"""torch's name of it on a CPU -> the planner's."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ExitStack() as opened:
        settings = rollout_settings(tmp_path_factory.mktemp("run"), lora__rank=3, model__kernels="reference")
        yield prepared(settings, opened)


def test_a_reference_that_moves_is_one_more_copy_of_the_masters(run: PreparedRun) -> None:
    config, workload = planned(run)
    assert workload.samples is not None
    moving = replace(workload, samples=replace(workload.samples, moves_reference=True))
    layout = Layout(parallel=config.parallel)
    (plain,), (more,) = (predict_static(one, layout) for one in (workload, moving))
    assert sum(more.static.values()) - sum(plain.static.values()) == run.training.optimizer.flat.master.nbytes


def planned(run: PreparedRun, **rollout: Any) -> tuple[RunConfig, Workload]:
    """The run's configuration and workload, with other options of rollouts."""
    config = replace(run.config, rollout=replace(run.config.rollout, **rollout))
    training = run.training
    workload = workload_of(
        config, training.source.model.decoder, training.plan.modules, device_type="cpu", prompt=PROMPT
    )
    return config, workload


@pytest.mark.parametrize("rollout", [{}, {"slots": 3}, {"slots": 16, "max_completion_length": 20}], ids=str)
def test_the_cache_is_that_of_a_run(run: PreparedRun, rollout: dict[str, Any]) -> None:
    """To the byte, whether a group has slots for all of its members or waits for them."""
    config, workload = planned(run, **rollout)
    sampler = TrainedSampler(config, run.training, ends=frozenset((0,)), longest_prompt=PROMPT, say=print)
    cache = sampler._generator().stage.cache
    assert predict_rollout(workload, Layout(), None).cache == cache.num_bytes > 0


@pytest.mark.parametrize("workers", [None, 4, 40])
def test_a_cache_has_room_for_conversations(workers: int | None) -> None:
    """Llama-3-8B, as above: 1,024 tokens for each conversation that may be under way, and a prompt that waits."""
    workload = _workload(LLAMA_3_8B, slots=16, environment="env.py:Door", environment_workers=workers)
    token = 2 * 8 * 128 * 32 * 2
    assert predict_rollout(workload, Layout(), None).cache == 16 * (1 + (max(16, workers or 0) + 1) * 64) * token


def test_a_pass_is_that_of_a_run(run: PreparedRun) -> None:
    """Its operations, in their order, and the most memory of a pass of prompts and one that decodes, within a
    hundredth."""
    config, workload = planned(run)
    sampler = TrainedSampler(config, run.training, ends=frozenset((0,)), longest_prompt=PROMPT, say=print)
    samples = workload.samples
    assert samples is not None
    traced = planned_rollouts._trace(replace(workload, global_batch=0), ParallelOptions())
    slots = config.rollout.slots

    def decoded() -> LaunchCounter:
        stage, counter = sampler._generator().stage, LaunchCounter(packed=True)
        planned_rollouts._prefill(stage, samples, traced.prompts)
        place = planned_rollouts._half_way(stage, samples)
        with counter:
            stage.decode([place] * slots, [place] * slots, range(slots))
        return counter

    with LiveStorages() as live, torch.no_grad():
        decoded()  # after which the weights are known
        before = live.live
        live.reset()
        counter = decoded()
    sent = ("_to_copy", "copy_", "lift_fresh")  # from the host, which is the device here
    names, found = (
        [ATTENTION.get(one.name, one.name) for one in launches if one.name not in sent]
        for launches in (counter.launches, traced.decode)
    )
    assert found == names and len([name for name in names if "mm" in name]) > 10
    assert live.peak - before == pytest.approx(traced.beside + sum(traced.cache), rel=0.01)


def test_codes_that_are_merged_once_are_counted(tmp_path: Path) -> None:
    """The base's codes that a run keeps meanwhile, to the byte, and passes that decode and do not merge."""
    settings = rollout_settings(
        tmp_path, model__init="checkpoint", lora__merge_aware="true", model__base_dtype="stored"
    )
    draw_in_few_bits(tmp_path / "model", "int4")
    with ExitStack() as opened:
        merging = prepared({**settings, "model.kernels": "reference"}, opened)
        parts, weights = merging.training.parts, merging.training.weights
        (_, once), (_, each) = (planned(merging, merge_once=choice) for choice in (True, False))
        found = {}
        for name, workload in (("once", once), ("each", each)):
            workload = replace(workload, kernels="native", stored=merging.training.source.formats)
            (found[name],) = predict_layout(workload, Layout(), MemoryPlan())
            traced = planned_rollouts._trace(replace(workload, global_batch=0), ParallelOptions())
            merges = [one.name for one in traced.decode if one.name.startswith("merge")]
            assert bool(merges) == (name == "each")
            assert [one.name for one in traced.merges] == (["merge in place"] * 28 if name == "once" else [])
        kept = sum(one.memory.nbytes for one in merging_storages(parts))
        assert found["once"].kept_codes == kept == kept_bytes(parts, weights) > 10_000
        assert found["each"].kept_codes == 0
        host = replace(once, offload_weights=True, stored=merging.training.source.formats)
        assert predict_layout(host, Layout(), MemoryPlan())[0].kept_codes <= kept
        with LiveStorages() as live:
            with merged_codes(parts, weights):  # after which all others are known
                pass
            before = live.live
            with merged_codes(parts, weights):
                assert live.live - before == kept
            assert live.live == before


def test_a_pass_between_turns_is_that_of_a_run(run: PreparedRun) -> None:
    """Its operations, in their order: the tokens of results alone, behind those in the cache."""
    config, workload = planned(run, tools=("tools.py:f",), slots=4)
    traced = planned_rollouts._trace(replace(workload, global_batch=0), ParallelOptions())
    sampler = TrainedSampler(config, run.training, ends=frozenset((0,)), longest_prompt=PROMPT, say=print)
    samples = workload.samples
    assert samples is not None
    cache = cache_size(config.rollout, prompt=PROMPT, row=workload.seq_length)
    stage, counter = sampler._generator().stage, LaunchCounter(packed=True)
    assert stage.cache.num_bytes == sum(traced.cache) and cache.conversations
    planned_rollouts._prefill(stage, samples, 1)
    length, new = planned_rollouts._prompt_length(samples), planned_rollouts._result_tokens(samples)
    with torch.no_grad(), counter, TorchAttention(counter):
        stage.continue_row(0, range(length), length - new, range(length - new, length), 0)
    sent = ("_to_copy", "copy_", "lift_fresh")  # from the host, which is the device here
    names, found = (
        [ATTENTION.get(one.name, one.name) for one in launches if one.name not in sent]
        for launches in (counter.launches, traced.turn)
    )
    assert found == names and len([name for name in names if "mm" in name]) > 10


def test_turns_take_passes() -> None:
    """With 64 completions of 3 turns, 128 passes of results; each costs what the host takes to launch it at least."""
    one = predict_rollout(_workload(LLAMA_3_8B), Layout(), H100)
    three, usual = (
        predict_rollout(_workload(LLAMA_3_8B, tools=("t.py:f",), max_turns=turns), Layout(), H100)
        for turns in (3, None)
    )
    assert (one.turns, one.between, three.turns, usual.turns) == (1, 0.0, 3, 2)
    assert three.between == pytest.approx(2 * usual.between) and three.result_tokens == 64
    workload = _workload(LLAMA_3_8B, tools=("t.py:f",), max_turns=3)
    turn = planned_rollouts._trace(replace(workload, global_batch=0), ParallelOptions()).turn
    launches = sum(each.count for each in turn)
    device = sum(launch_seconds(each, H100) for each in turn)
    assert three.between == pytest.approx(128 * max(device, launches * H100.host_launch))
    assert three.seconds == three.prefill + three.decode + three.between


def test_prompts_of_tools_begin_together() -> None:
    """Those of environments and agents one by one, as they come when these answer."""
    found = {}
    for name in ("tools", "environment", "agent"):
        samples = _workload(LLAMA_3_8B, **{name: ("t.py:f",) if name == "tools" else "t.py:f"}).samples
        assert samples is not None
        found[name] = planned_rollouts._prompts_at_once(samples)
        length = planned_rollouts._prompt_length(samples)
        together = samples.options.slots // samples.options.num_generations * samples.prompt
    assert found["environment"] == found["agent"] == 1
    assert together <= 4096 and 0 <= found["tools"] * length - together < length


def _taught(teachers: tuple[str, ...], **rollout: Any) -> Workload:
    found = _workload(LLAMA_3_8B, **rollout)
    same = Companion(found.decoder, TrainingPlan())
    return replace(
        found, base_teachers=teachers.count("base"), companions=(same,) * (len(teachers) - teachers.count("base"))
    )


def test_teachers_take_passes() -> None:
    """A pass of a teacher of the same size is a forward of the step's rows: that of the model without its adapters
    takes no longer than with them. Where the rows are trained on twice, half a pass belongs to each step."""
    without, base, model = (
        predict_time(_taught(names), Layout(), MemoryPlan(), H100) for names in ((), ("base",), ("my-8b",))
    )
    compared = predict_time(_taught((), steps_per_generation=2), Layout(), MemoryPlan(), H100)
    forward = (compared.step - compared.sampling) - (without.step - without.sampling)
    assert without.teachers == 0 and base.teachers == pytest.approx(forward, rel=1e-6)
    assert 0.8 * forward < model.teachers < forward
    for one in (base, model):
        assert one.step == pytest.approx(without.step + one.teachers)
    samples = _taught(()).samples
    assert samples is not None
    both = predict_time(_taught(("base", "my-8b")), Layout(), MemoryPlan(), H100)
    assert both.teachers == pytest.approx(base.teachers + model.teachers)
    again = replace(_taught(("my-8b",)), samples=replace(samples, steps=2))
    assert again.iterations == 2
    half, whole = (
        predict_time(replace(again, teaches_each_step=each), Layout(), MemoryPlan(), H100) for each in (False, True)
    )
    assert half.teachers == pytest.approx(model.teachers / 2) and whole.teachers == pytest.approx(model.teachers)
    halves = predict_time(_taught(("my-8b",)), Layout(data=2), MemoryPlan(), H100)
    assert halves.teachers == pytest.approx(model.teachers / 2, rel=0.01)


def test_judges_lie_beside_ranks(tmp_path: Path) -> None:
    """Their weights, in each process that calls rewards, on the GPU that they are given; to the byte of what a judge
    holds, but for its buffers."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForSequenceClassification(LlamaConfig(**sizes, vocab_size=64, num_labels=1))  # type: ignore[arg-type]
    model.save_pretrained(tmp_path)
    held = sum(one.numel() * one.element_size() for one in model.parameters())
    options = {"rewards": (f"model:{tmp_path}",), "reward_workers": 3}
    found = judges_on_device(RolloutOptions(**options))  # type: ignore[arg-type]
    assert found is not None and (found.gpu, found.copies) == (0, 3)
    assert found.nbytes == pytest.approx(3 * held, abs=3 * 4096)
    cpu, seventh = (
        judges_on_device(RolloutOptions(**options, judge_device=device))  # type: ignore[arg-type]
        for device in ("cpu", "cuda:7")
    )
    assert cpu is not None and cpu.gpu is None and seventh is not None and seventh.gpu == 7
    assert judges_on_device(RolloutOptions(rewards=("exact_match",))) is None
    with pytest.raises(UserError, match="has no weights in files"):
        judges_on_device(RolloutOptions(rewards=("model:nowhere",)))
    workload = _workload(LLAMA_3_8B)
    assert workload.samples is not None
    large = Neighbour(0, 10 << 30, 1)

    def peaks(neighbour: Neighbour | None, layout: Layout) -> list[int]:
        assert workload.samples is not None
        own = replace(workload, samples=replace(workload.samples, neighbour=neighbour))
        return [one.peak for one in predict_layout(own, layout, MemoryPlan())]

    alone, two = Layout(), Layout(parallel=ParallelOptions(pipeline=2))
    assert peaks(large, alone)[0] == peaks(None, alone)[0] + large.nbytes
    for gpu, ranks in ((0, (1, 0)), (1, (1, 1)), (7, (0, 0)), (None, (0, 0))):
        own = [one - none for one, none in zip(peaks(large._replace(gpu=gpu), two), peaks(None, two), strict=True)]
        assert own == [rank * large.nbytes for rank in ranks]


def _workload(
    hf: dict[str, Any], *, slots: int = 64, batch: int = 64, packing: bool = False, **rollout: Any
) -> Workload:
    options = RolloutOptions(rewards=("exact_match",), slots=slots, max_completion_length=512, **rollout)
    config = RunConfig(
        model=ModelOptions(path="m", dtype="bfloat16"), objective=ObjectiveOptions(name="grpo"), rollout=options,
        data=DataOptions(seq_length=1024, packing=packing), lora=LoraOptions(rank=16),
        train=TrainOptions(global_batch_size=64, micro_batch_size=4),
    )  # fmt: skip
    family, text = family_of(hf)
    decoder = family.config_from_hf(text)
    return workload_of(config, decoder, training_plan(config, decoder, family.names), device_type="cuda")


def test_a_cache_of_pages_by_hand() -> None:
    """Llama-3-8B: 2 x 8 heads of 128 features in 32 layers, two bytes each; 64 rows of 33 pages of their own, 17
    prompts of 32 pages, and one that no row has."""
    cost = predict_rollout(_workload(LLAMA_3_8B), Layout(), None)
    token = 2 * 8 * 128 * 32 * 2
    assert cost.cache == 16 * (1 + 64 * 33 + 17 * 32) * token
    assert cost.cache < cost.peak < 1.2 * cost.cache


def test_a_pass_reads_weights_and_pages_once() -> None:
    """A pass of 64 rows reads layers and head, 15 GB without the embedding, and half a completion's keys and values."""
    workload = _workload(LLAMA_3_8B)
    traced = planned_rollouts._trace(replace(workload, global_batch=0), ParallelOptions())
    moved = sum(one.nbytes for one in traced.decode)
    weights, pages = 2 * (8_030_261_248 - 128_256 * 4096), 64 * (512 + 256) * 2 * 8 * 128 * 32 * 2
    assert weights + pages < moved < 1.12 * (weights + pages)
    assert 600 < sum(one.count for one in traced.decode) < 1000


def test_few_rows_read_the_codes_of_a_base_in_few_bits() -> None:
    """NVFP4's 4.5 bits of each number of the layers, up to 16 rows; with more the numbers are written and read too."""
    numbers, others = 32 * 218_103_808, 2 * (128_256 * 4096 + 65 * 4096)
    for slots, low, high in ((16, 0.5625, 0.70), (17, 4.5625, 4.7)):
        workload = replace(_workload(LLAMA_3_8B, slots=slots), base_dtype="nvfp4", global_batch=0)
        decode = planned_rollouts._trace(workload, ParallelOptions()).decode
        pages = slots * (512 + 256) * 2 * 8 * 128 * 32 * 2
        assert low * numbers < sum(one.nbytes for one in decode) - others - pages < high * numbers
        names = [one.name for one in decode]
        assert names.count("decode") == (0 if slots == 16 else 32 * 4), set(names)
        few = [one for one in decode if one.name == "product of few rows"]
        assert len(few) == (32 * 4 if slots == 16 else 0) and all(one.flops > 0 for one in few)


def test_few_rows_read_the_codes_of_the_experts_that_have_some() -> None:
    """One row has four of gpt-oss's 128 experts, by chance 3.95 different ones, in 4.25 bits."""
    workload = replace(_workload(GPT_OSS, slots=1), base_dtype="mxfp4", global_batch=0)
    decode = planned_rollouts._trace(workload, ParallelOptions()).decode
    experts = [one for one in decode if one.name == "experts' few rows"]
    assert len(experts) == 2 * 36
    one_expert = 3 * 2880 * 2880 * 4.25 / 8 + 2 * 16 * (2 * 2880 + 2880)  # with B of gate and up, and of down
    assert sum(one.nbytes for one in experts) == pytest.approx(36 * 3.95 * one_expert, rel=0.05)


def test_the_choice_of_tokens_is_counted() -> None:
    """With 64 rows of 128,256 scores in bfloat16: they are widened to fp32, read once to draw, with 32 random bits for
    each in registers, and once as they are for the log-probabilities. With top_p the scores are sorted too."""
    cost = predict_rollout(_workload(LLAMA_3_8B), Layout(), None)
    scores = 64 * 128_256
    assert cost.choice_bytes == pytest.approx(scores * (2 + 4 + 4 + 2), rel=0.01)
    assert 15 < cost.choice_launches < 30 and cost.choice_bytes < 0.01 * cost.nbytes
    sorted_ = predict_rollout(_workload(LLAMA_3_8B, top_p=0.9), Layout(), None)
    assert sorted_.choice_bytes > 10 * cost.choice_bytes and sorted_.launches - cost.launches < 25
    rest = [one.launches - one.choice_launches for one in (cost, sorted_)]
    assert rest[0] == rest[1] and cost.nbytes - cost.choice_bytes == sorted_.nbytes - sorted_.choice_bytes


def test_times_of_a_rollout() -> None:
    """511 passes follow the prompts; as graphs they take the device's time, and without them the host's."""
    eager, graphed = (
        predict_rollout(_workload(LLAMA_3_8B, cuda_graph=graph), Layout(), H100) for graph in ("none", "auto")
    )
    assert graphed.passes == eager.passes == 511
    for cost in (eager, graphed):
        assert cost.decode == pytest.approx(511 * cost.pass_seconds)
        assert cost.seconds == cost.prefill + cost.decode
    assert graphed.graphed and not eager.graphed and eager.host_limits and not graphed.host_limits
    assert eager.pass_seconds == pytest.approx(eager.launches * H100.host_launch)
    # weights and pages at the speed of memory are the least
    assert 21.4e9 / (H100.copies * 1e9) < graphed.pass_seconds < 1.4 * 21.4e9 / (H100.copies * 1e9)
    halves = predict_rollout(_workload(LLAMA_3_8B), Layout(data=2), H100)
    assert halves.passes == -(-32 * 511 // 64)
    cut = predict_rollout(_workload(LLAMA_3_8B), Layout(parallel=ParallelOptions(tensor=2)), H100)
    assert cut.cache < 0.51 * graphed.cache and graphed.pass_seconds / 2 < cut.pass_seconds < graphed.pass_seconds


def test_a_step_has_its_share_of_the_rollout() -> None:
    workload = _workload(LLAMA_3_8B)
    found = predict_time(workload, Layout(), MemoryPlan(), H100)
    assert found.samples is not None and found.sampling == found.samples.seconds
    assert found.tokens_per_second == pytest.approx(64 * 1024 / found.step)
    several = predict_time(_workload(LLAMA_3_8B, steps_per_generation=4), Layout(), MemoryPlan(), H100)
    assert several.samples is not None and several.sampling == several.samples.seconds / 4
    # which are compared with what sampled them: a forward more
    assert several.step - several.sampling > 1.2 * (found.step - found.sampling)
    range_ = predict_range(workload, Layout(), MemoryPlan(), H100)
    assert range_.fast.sampling < range_.likely.sampling < range_.slow.sampling


def test_the_peak_is_that_of_sampling_where_that_is_larger() -> None:
    few, many = (predict_layout(_workload(LLAMA_3_8B, slots=slots), Layout(), MemoryPlan())[0] for slots in (8, 512))
    static = sum(few.static.values())
    assert few.peak == few.step > few.sampling > static
    assert many.peak == many.sampling > many.step and many.fullest()[0] == "sampling"
    assert many.sampling - static > predict_rollout(_workload(LLAMA_3_8B, slots=512), Layout(), None).cache


def test_completions_that_are_packed_are_fewer_rows() -> None:
    alone, packed = (_workload(LLAMA_3_8B, packing=packing) for packing in (False, True))
    assert (alone.global_batch, alone.seq_length) == (64, 1024) and alone.step_tokens == 64 * 1024
    assert packed.packs_documents and packed.global_batch == 64
    family, text = family_of(LLAMA_3_8B)
    decoder = family.config_from_hf(text)
    config = RunConfig(
        model=ModelOptions(path="m"), objective=ObjectiveOptions(name="grpo"), data=DataOptions(seq_length=4096),
        rollout=RolloutOptions(rewards=("exact_match",)), train=TrainOptions(global_batch_size=64),
    )  # fmt: skip
    plan = training_plan(config, decoder, family.names)
    short = workload_of(replace(config, data=DataOptions(seq_length=4096, packing=True)), decoder, plan,
                        device_type="cuda", prompt=200, completion=300)  # fmt: skip
    assert (short.global_batch, short.seq_length, short.document_length) == (8, 4096, 500)
    assert short.step_tokens == 64 * 500
    with pytest.raises(UserError, match="prompts of 4000 and completions of 300 tokens were given, but"):
        workload_of(config, decoder, plan, device_type="cuda", prompt=4000, completion=300)


def test_a_server_samples_elsewhere() -> None:
    cost = predict_rollout(_workload(LLAMA_3_8B, server="http://10.0.0.7:8000"), Layout(), H100)
    assert (cost.cache, cost.peak, cost.seconds, cost.passes) == (0, 0, 0.0, 0)


def test_nothing_is_assumed_of_other_machines() -> None:
    free = Machine(name="free", memory=80, products=1.0, copies=1e15, link=1e15)
    assert predict_rollout(_workload(LLAMA_3_8B), Layout(), free).pass_seconds > 0
