"""Runs of TRL's and Axolotl's GRPO as ours."""

from __future__ import annotations

from pathlib import Path

import yaml

from engine.config.load import from_yaml
from engine.config.rules import check_config
from rankfold.migrating.command import convert, to_text
from rankfold.migrating.reading import read_file, read_flags
from tests.support.trainer_commands import AXOLOTL, LEAST, converted

_GRPO = "TRL's GRPO"
GRPO = """
from trl import GRPOConfig, GRPOTrainer

def short(completions, **columns):
    return [-len(one) for one in completions]

peft_config = LoraConfig(r=32, lora_alpha=64, lora_dropout=0.1, target_modules="all-linear")
arguments = GRPOConfig(
    output_dir="out", learning_rate=2e-5, per_device_train_batch_size=4, gradient_accumulation_steps=4,
    steps_per_generation=8, num_generations=8, max_prompt_length=256, max_completion_length=768, num_iterations=2,
    beta=0.04, use_bias_correction_kl=False, epsilon=0.1, epsilon_high=0.28, delta=4.0, loss_type="dr_grpo",
    importance_sampling_level="sequence", scale_rewards=False, reward_weights=[1.0, 0.5], top_k=0, top_p=0.9,
    temperature=0.8, mask_truncated_completions=True, disable_dropout=True, use_vllm=True, vllm_mode="colocate",
    vllm_importance_sampling_correction=True, log_completions=True, eval_strategy="steps", eval_steps=10,
    num_generations_eval=4, metric_for_best_model="eval_reward", load_best_model_at_end=True,
    sync_ref_model=True, ref_model_sync_steps=64, min_p=0.1, repetition_penalty=1.2, vespo_k_pos=1.5, bf16=True,
)
trainer = GRPOTrainer(
    model="m", reward_funcs=[short, right], args=arguments, train_dataset=data, peft_config=peft_config
)
"""


def test_trls_grpo(tmp_path: Path) -> None:
    script = tmp_path / "any_name.py"
    script.write_text(GRPO, encoding="utf-8")
    conversion, _ = convert(read_file(script), values=[], ranks=2)
    config = from_yaml(to_text(conversion.options, title="test"))
    check_config(config)
    assert not [row.given.key for row in conversion.rows if row.kind == "unknown"]
    objective, rollout = config.objective, config.rollout
    assert (objective.name, objective.loss_type, objective.ratio_level) == ("grpo", "dr_grpo", "sequence")
    assert (objective.beta, objective.kl_bias_correction, objective.scale_rewards) == (0.04, False, "none")
    assert (objective.epsilon, objective.epsilon_high, objective.delta) == (0.1, 0.28, 4.0)
    assert (objective.num_iterations, objective.mask_truncated) == (2, True)
    assert (rollout.rewards, rollout.reward_weights) == (("rewards.py:short", "rewards.py:right"), (1.0, 0.5))
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (0.8, 0.9, None)
    assert (rollout.num_generations, rollout.max_completion_length, config.data.seq_length) == (8, 768, 1024)
    # eight passes of four completions on two processes, of which four are an optimizer step
    assert (rollout.steps_per_generation, config.train.global_batch_size) == (2, 32)
    assert (config.lora.rank, config.lora.dropout, config.optim.lr) == (32, 0.0, 2e-5)
    assert config.train.eval_every == 10 and rollout.eval_generations == 4 and config.checkpoint.keep_best
    assert config.data.validation == "path/to/validation.jsonl", "a place to fill"
    lacking = [note.partition(" ")[0] for note in conversion.notes if "has no counterpart" in note]
    assert lacking == [] and (objective.reference_sync_steps, objective.reference_mixup_alpha) == (64, 0.6)
    assert (rollout.min_p, rollout.repetition_penalty, objective.vespo_k_pos) == (0.1, 1.2, 2.0)
    assert any(line.startswith("rollout.rewards: put short, right into rewards.py") for line in conversion.to_fill)


def test_tools_and_environments_are_trls(tmp_path: Path) -> None:
    """TRL calls them as here; only where they stand has to be said."""
    script = tmp_path / "any_name.py"
    changed = GRPO.replace("reward_funcs=[short, right],", "reward_funcs=[short, right], tools=[add, look_up],")
    script.write_text(changed, encoding="utf-8")
    conversion, _ = convert(read_file(script), values=[], ranks=2)
    config = from_yaml(to_text(conversion.options, title="test"))
    check_config(config)
    assert config.rollout.tools == ("tools.py:add", "tools.py:look_up")
    assert any(line.startswith("rollout.tools: put add, look_up into tools.py") for line in conversion.to_fill)
    script.write_text(changed.replace("tools=[add, look_up]", "environment_factory=Door"), encoding="utf-8")
    conversion, _ = convert(read_file(script), values=[], ranks=2)
    config = from_yaml(to_text(conversion.options, title="test"))
    check_config(config)
    assert config.rollout.environment == "tools.py:Door" and config.rollout.tools == ()


def test_cispos_limit_is_trls(tmp_path: Path) -> None:
    """Where none is given it is epsilon; there is no lower one."""
    _, config = converted(f"{LEAST[_GRPO]} --loss_type cispo --epsilon 0.3")
    assert (config.objective.epsilon, config.objective.epsilon_high) == (0.2, 0.3)


def test_what_vespo_leaves_aside_is_left_out() -> None:
    """The converted run was refused."""
    _, config = converted(f"{LEAST[_GRPO]} --loss_type vespo --epsilon 0.3 --delta 4 --vespo_lambda_neg 1.5")
    assert (config.objective.epsilon, config.objective.delta, config.objective.vespo_lambda_neg) == (0.2, None, 1.5)


def test_the_entropy_is_a_mean_over_tokens() -> None:
    """Which it is here with a loss that is one too."""
    _, config = converted(f"{LEAST[_GRPO]} --entropy_coef 0.01")
    assert config.objective.entropy_coefficient == 0.01
    conversion, config = converted(f"{LEAST[_GRPO]} --loss_type grpo --entropy_coef 0.01")
    assert config.objective.entropy_coefficient == 0
    assert any("entropy_coef has no counterpart" in note for note in conversion.notes)


def test_groups_that_a_batch_does_not_hold_are_said() -> None:
    conversion, _ = convert(read_flags(f"{LEAST[_GRPO]} --num_generations 16", "flags", Path()), values=[], ranks=1)
    assert any("8 completions are no whole groups of rollout.num_generations 16" in line for line in conversion.to_fill)


def test_axolotls_grpo(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    block = {"beta": 0.001, "num_generations": 4, "max_completion_length": 256, "reward_funcs": ["rewards.f"],
             "reward_weights": [2.0], "use_vllm": True, "log_completions": True, "scale_rewards": False}  # fmt: skip
    path.write_text(yaml.safe_dump(AXOLOTL | {"rl": "grpo", "trl": block, "sample_packing": False}), encoding="utf-8")
    conversion, _ = convert(read_file(path), values=[], ranks=2)
    config = from_yaml(to_text(conversion.options, title="test"))
    assert not [row.given.key for row in conversion.rows if row.kind == "unknown"]
    assert (config.objective.name, config.objective.beta, config.objective.scale_rewards) == ("grpo", 0.001, "none")
    assert (config.rollout.rewards, config.rollout.reward_weights) == (("rewards.py:f",), (2.0,))
    assert (config.rollout.num_generations, config.rollout.max_completion_length) == (4, 256)
    assert config.data.seq_length == 4096
