"""Whole runs whose completions a server samples, on one rank."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import UserError
from engine.rollouts.buffer import FILE
from engine.rollouts.resuming import is_state
from engine.rollouts.served import completion_seed
from engine.rollouts.served_adapter import FILES
from engine.rollouts.source import RolloutSource
from engine.runtime.secrets import take_secret
from engine.training.step import TrainStep
from tests.support.completion_stand_in import StandIn
from tests.support.rollout_runs import final_state, prepared, records, run_here
from tests.support.served_runs import served_settings
from tests.support.sweeps import sampled

SMALL = {"train__seed": 5, "rollout__num_generations": 2, "train__global_batch_size": 8}
BOUND = 5e-6
"""Largest error of a log-probability, as transformers with PEFT and the trainer see it: some units of fp32's last place
at the size of logits."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    served_settings(folder)
    return folder / "model"


@pytest.fixture
def server(model: Path) -> Iterator[StandIn]:
    with StandIn(model) as one:
        yield one


def settings(folder: Path, server: StandIn, **changes: object) -> dict[str, object]:
    given = served_settings(folder, server.url, **{**SMALL, "rollout__server_kind": server.kind, **changes})
    return given | {"model.path": server.model}


def steps_of_adapters(server: StandIn) -> list[int]:
    """The step of the adapter that each completion was asked of."""
    names = [str(server.adapter_of(one.body)).rpartition("step")[2] for one in server.asked]
    return [int(name.partition("-")[0]) for name in names]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_is_served_is_what_is_trained(kind: str, model: Path, tmp_path: Path) -> None:
    """The server's log-probabilities, by transformers and PEFT, are the trainer's after every step. With the scale of
    the adapters doubled where they are written, they differ by up to 3.4."""
    loaded = []
    with StandIn(model, kind) as server:

        def look(path: str, body: dict[str, Any], count: int) -> None:
            if server.adapter_of(body) is not None:
                loaded.append(len(server.adapters))

        server.fault = look
        run_here(
            settings(tmp_path, server, train__steps=3, rollout__temperature=0.8, lora__alpha=16, lora__rslora="true")
        )
        assert steps_of_adapters(server) == [0] * 8 + [1] * 8 + [2] * 8
        assert loaded == [1] * 24, "the adapter before is given up"
        assert server.adapters == {} and not (tmp_path / "run" / "served_adapters").exists()
        seeds = {one.body.get("seed", one.body.get("sampling_params", {}).get("sampling_seed")) for one in server.asked}
        assert seeds == {completion_seed(5, generation, place) for generation in range(3) for place in range(8)}
    found = records(tmp_path / "run")
    assert max(one["sampler_difference_max"] for one in found) < BOUND
    assert [one["off_policy_steps"] for one in found] == [0, 0, 0]
    assert [one["sampler_outside"] for one in found] == [0, 0, 0]
    assert found[1]["loss"] != found[0]["loss"]


def _trained(settings: dict[str, object], steps: int) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What each step comes to, with its completions, and all that was trained."""
    found = []
    with ExitStack() as opened:
        run = prepared(settings, opened)
        assert isinstance(run.source, RolloutSource)
        for number, rows in enumerate(run.source.stream(0, 0, steps)):
            result = run.training.step(rows.batches, rows.targets, run.step_plan.rate(number))
            assert run.source.buffer is not None
            named = run.training.objective.named(result.metrics.tolist())
            completions = [one.tokens.tolist() for one in run.source.buffer.completions]
            found.append({"completions": completions, "loss": float(result.loss), **rows.figures, **named})
        masters = {one.name: one.tensor.clone() for one in run.training.optimizer.flat.master_shards()}
    return found, masters


def test_training_is_that_of_own_rollouts(server: StandIn, tmp_path: Path) -> None:
    """Where the completions are the same, so are losses, figures and masters, to rounding."""
    own = served_settings(tmp_path / "own", None, **SMALL, train__steps=3) | {"model.path": server.model}
    expected, masters = _trained(own, 3)
    server.script = {
        completion_seed(5, generation, place): tokens
        for generation, step in enumerate(expected)
        for place, tokens in enumerate(step["completions"])
    }
    found, own_masters = _trained(settings(tmp_path / "served", server, train__steps=3), 3)
    for one, known in zip(found, expected, strict=True):
        assert one["completions"] == known["completions"]
        for name in ("loss", "reward", "entropy", "clip_region"):
            assert one[name] == pytest.approx(known[name], abs=1e-6), name
    assert own_masters.keys() == masters.keys()
    for name, value in masters.items():
        torch.testing.assert_close(own_masters[name], value, rtol=1e-4, atol=1e-6, msg=name)


KEY = "sk-nobody-may-read-this"


def test_two_servers_with_a_key_sample_what_one_does(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_secrets: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each has every adapter, and whole groups of every second prompt. The key stands nowhere in the run's folder or
    log. Without the header the run is refused; dealt out one by one, completions of a prompt go to both."""
    with StandIn(model) as alone:
        run_here(settings(tmp_path / "one", alone, train__steps=2))
    with StandIn(model, key=KEY) as first, StandIn(model, key=KEY) as second:
        both = settings(tmp_path / "two", first, train__steps=2) | {"rollout.server": f"{first.url},{second.url}/"}
        with pytest.raises(UserError, match=r"refuses the run \(401\): RANKFOLD_SERVER_KEY is not set, and it asks"):
            run_here(both)
        monkeypatch.setenv("RANKFOLD_SERVER_KEY", KEY[:-1])
        take_secret("RANKFOLD_SERVER_KEY")
        with pytest.raises(UserError, match="RANKFOLD_SERVER_KEY is not the one that it asks for: export it") as error:
            run_here(both)
        assert KEY[:-1] not in str(error.value)
        monkeypatch.setenv("RANKFOLD_SERVER_KEY", KEY)
        take_secret("RANKFOLD_SERVER_KEY")
        run_here(both)
        for number, server in enumerate((first, second)):
            seeds = {one.body["seed"] for one in server.asked}
            places = {2 * pair + member for pair in (number, number + 2) for member in range(2)}
            assert seeds == {completion_seed(5, generation, place) for generation in range(2) for place in places}
            assert server.adapters == {}
    known = ("loss", "reward", "completions/mean_length", "sampler_difference_max")
    found, expected = (records(tmp_path / name / "run") for name in ("two", "one"))
    assert [[one[name] for name in known] for one in found] == [[one[name] for name in known] for one in expected]
    files = [path.read_bytes() for path in (tmp_path / "two" / "run").rglob("*") if path.is_file()]
    assert len(files) > 3 and not any(KEY.encode() in data for data in files)
    assert KEY not in "".join(capfd.readouterr())


def test_truncated_completions_that_are_masked_are_compared(
    server: StandIn, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the trainer says of them was 0, and every run with a server was warned, or ended, where it masks."""
    run_here(settings(tmp_path, server, train__steps=1, objective__mask_truncated="true", rollout__mismatch="stop"))
    (found,) = records(tmp_path / "run")
    assert found["completions/clipped_ratio"] > 0 and found["sampler_outside"] == 0
    assert "lie" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("trainable", "lm_head", r"trains modules in full \(modules_to_save\)"),
        ("lora.rank_pattern", "{q_proj: 2}", r"trains adapters of several ranks \(rank_pattern\)"),
        ("lora.alpha_pattern", "{q_proj: 2}", r"trains adapters of several scales \(alpha_pattern\)"),
    ],
)
def test_what_a_server_would_not_compute_with(
    option: str, value: str, words: str, server: StandIn, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"{words}, which a server of completions does not load"):
        run_here(settings(tmp_path, server) | {option: value})
    assert server.of("/v1/load_lora_adapter") == []


@pytest.mark.slow
def test_inside_a_buffer_the_server_is_not_asked_again(server: StandIn, tmp_path: Path) -> None:
    """Two steps a buffer, twice each. Saved after three, the fourth takes completions and both log-probabilities from
    the checkpoint."""
    given = settings(
        tmp_path, server, train__steps=4, rollout__steps_per_generation=2, objective__num_iterations=2,
        checkpoint__every=1, checkpoint__keep=0,
    )  # fmt: skip
    run_here(given)
    whole, asked = final_state(tmp_path / "run", 4), len(server.asked)
    assert asked == 16
    assert [one["off_policy_steps"] for one in records(tmp_path / "run")] == [0, 1, 2, 3]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    run_here(given)
    found = final_state(tmp_path / "run", 4)
    assert all(torch.equal(found[name], whole[name]) for name in whole) and len(server.asked) == asked


def test_seeds() -> None:
    """Each completion of a run has its own seed, and another run has others."""
    seeds = [completion_seed(1, generation, place) for generation in range(40) for place in range(64)]
    assert len({*seeds}) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**31
    assert completion_seed(2, 0, 0) not in seeds and completion_seed(2**40, 2**31, 2**20) < 2**31


# mismatch


def _off_by(server: StandIn, amount: float) -> None:
    def mangle(answer: dict[str, Any]) -> None:
        logprobs = answer["choices"][0]["logprobs"]
        logprobs["token_logprobs"] = [one - amount for one in logprobs["token_logprobs"]]

    server.mangle = mangle


def test_a_mismatch_is_reported(server: StandIn, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _off_by(server, 0.3)
    run_here(settings(tmp_path, server, train__steps=1))
    (found,) = records(tmp_path / "run")
    assert found["sampler_difference"] == pytest.approx(0.3, abs=1e-5)
    assert found["sampler_ratio"] == pytest.approx(1.34986, abs=1e-4) and found["sampler_outside"] == 1
    assert "importance_weight" not in found
    assert (
        "warning: step 1: the server's log-probabilities lie 0.3 from the trainer's on average, 0.3 at most (mean "
        "ratio 1.35; 100.0% of the tokens above 0.1)\n" in capfd.readouterr().err
    )


@pytest.mark.slow
def test_a_mismatch_is_corrected(server: StandIn, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All weights are e^0.3, and so is the loss multiplied; above objective.importance_max they are cut off."""
    losses = []
    for name, amount, changes in (
        ("plain", 0.3, {}),
        ("correct", 0.3, {"rollout__mismatch": "correct"}),
        ("cut", 0.3, {"rollout__mismatch": "correct", "objective__importance_max": 1.1}),
    ):
        _off_by(server, amount)
        run_here(settings(tmp_path / name, server, train__steps=1, **changes))
        losses.append(records(tmp_path / name / "run")[0]["loss"])
    assert losses[1] == pytest.approx(1.34986 * losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(1.1 * losses[0], rel=1e-5)
    assert "for which losses are corrected" in capfd.readouterr().err


def test_a_mismatch_stops_the_run(server: StandIn, tmp_path: Path) -> None:
    """Before anything is trained on it; 0.3 is within a bound of 0.4."""
    _off_by(server, 0.3)
    given = settings(tmp_path, server, train__steps=1, rollout__mismatch="stop")
    with pytest.raises(
        UserError, match="step 1: the server's log-probabilities lie 0.3 .* or raise rollout.mismatch_b"
    ):
        run_here(given)
    assert records(tmp_path / "run") == []
    run_here(given | {"rollout.mismatch_bound": 0.4})
    assert len(records(tmp_path / "run")) == 1


def test_another_model_is_seen_in_its_log_probabilities(model: Path, tmp_path: Path) -> None:
    """The same names and tokenizer, other weights."""
    from transformers import LlamaForCausalLM

    shutil.copytree(model, tmp_path / "other")
    torch.manual_seed(8)
    other = LlamaForCausalLM.from_pretrained(tmp_path / "other")
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    other.save_pretrained(tmp_path / "other")
    with StandIn(tmp_path / "other") as server:
        given = settings(tmp_path, server, train__steps=1, rollout__mismatch="stop") | {"model.path": model}
        with pytest.raises(UserError, match="serve the model of model.path"):
            run_here(given)


# one buffer ahead


def test_the_next_batch_is_sampled_beside_training(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its adapter is one buffer old, and its log-probabilities are recorded: the ratio to the trainer's is the weight.
    Where the batch were begun after training, its adapter would be new; where training waited for it, it would never
    come."""
    trained, step = threading.Event(), TrainStep.__call__

    def hold(path: str, body: dict[str, Any], count: int) -> None:
        if server.adapter_of(body) is not None and len(server.asked) > 8:
            assert trained.wait(20)

    def take(*arguments: Any) -> Any:
        result = step(*arguments)
        trained.set()
        return result

    server.fault = hold
    monkeypatch.setattr(TrainStep, "__call__", take)
    run_here(settings(tmp_path, server, train__steps=4, rollout__overlap="true"))
    assert steps_of_adapters(server) == [0] * 16 + [1] * 8 + [2] * 8
    found = records(tmp_path / "run")
    assert [one["off_policy_steps"] for one in found] == [0, 1, 1, 1]
    assert found[0]["sampler_difference_max"] < BOUND and found[0]["importance_weight"] == pytest.approx(1, abs=1e-5)
    assert all(one["sampler_difference"] > 1e-3 for one in found[1:])
    assert server.adapters == {}


KEPT = {"between two buffers": 2, "inside the first buffer": 1, "inside the second buffer": 3}


@pytest.mark.parametrize("name", sampled(KEPT, ("between two buffers",)))
def test_what_was_under_way_is_sampled_again(
    name: str, server: StandIn, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the adapter that the checkpoint keeps, so that the run ends with the same bits. By the newest weights, masters
    would be others."""
    kept, steps = KEPT[name], 6 if KEPT[name] == 3 else 4
    given = settings(
        tmp_path, server, train__steps=steps, rollout__steps_per_generation=2, rollout__overlap="true",
        checkpoint__every=1, checkpoint__keep=0,
    )  # fmt: skip
    run_here(given)
    whole, rewards = final_state(tmp_path / "run", steps), [one["reward"] for one in records(tmp_path / "run")]
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in range(kept + 1, steps + 1):
        shutil.rmtree(checkpoints / f"step_{step:08d}")
    folder = checkpoints / f"step_{kept:08d}"
    assert (folder / FILE).exists() == (kept != 2) and (folder / FILES["adapter_config.json"]).exists()
    before = len(server.asked)
    run_here(given)
    begun = 0 if kept < 3 else 2
    assert steps_of_adapters(server)[before : before + 16] == [begun] * 16
    assert (
        f"generation batch {2 if kept < 3 else 3} was being sampled by the adapter of step {begun} when {folder} was "
        "saved: it is sampled again, by the same adapter" in capfd.readouterr().err
    )
    found = final_state(tmp_path / "run", steps)
    assert [name for name in whole if not torch.equal(found[name], whole[name])] == []
    assert [one["reward"] for one in records(tmp_path / "run")] == rewards
    assert [one["off_policy_steps"] for one in records(tmp_path / "run")] == [0, 1, 2, 3, 2, 3][:steps]


@pytest.mark.slow
def test_a_run_goes_on_without_overlap(server: StandIn, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = settings(tmp_path, server, train__steps=2, rollout__overlap="true", checkpoint__every=1, checkpoint__keep=0)
    run_here(given)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000002")
    run_here(given | {"rollout.overlap": "false"})
    said = capfd.readouterr().err
    assert "was saved: it is sampled by the newest weights instead" in said and "rollout.overlap true -> false" in said
    assert steps_of_adapters(server)[-8:] == [1] * 8


def test_a_server_that_goes_ends_the_run(server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last checkpoint is whole, and the run resumes from it when the server is there again."""
    monkeypatch.setattr("engine.rollouts.servers.http._FIRST_PAUSE", 0.01)
    given = settings(tmp_path, server, train__steps=3, rollout__overlap="true", checkpoint__every=1, checkpoint__keep=0)
    server.fault = lambda path, body, count: (502, "") if len(server.asked) > 20 and server.adapter_of(body) else None
    with pytest.raises(UserError, match="status 502"):
        run_here(given)
    assert [one["step"] for one in records(tmp_path / "run")] == [1, 2]
    server.fault = None
    run_here(given)
    assert [one["step"] for one in records(tmp_path / "run")] == [1, 2, 3]
    assert server.adapters == {}, "what the failed run has left is given up"


def test_states_with_a_batch_under_way() -> None:
    inside = {"generation": 1, "prompts": 8, "taken": 1, "num_steps": 2, "iterations": 1, "options": {}, "lag": 2}
    inside["weights"] = {"3": "ab"}
    between = {"generation": 1, "prompts": 8, "begun_at": 4, "weights": {}}
    assert is_state(inside | {"begun_at": 0}) and is_state(between)
    assert not any(is_state(between | {"weights": one}) for one in (None, {"3": 4}, {"three": "ab"}))
    assert not is_state(inside | {"begun_at": "4"}) and not is_state(inside | {"lag": -1})
