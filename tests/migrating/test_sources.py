"""A source is recognised by its command or its keys or refused, by name where it is known; so is its objective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config.load import from_yaml
from engine.config.rules import check_config
from engine.config.run import RunConfig
from engine.errors import UserError
from rankfold.migrating.command import convert, to_text
from rankfold.migrating.conversion import Conversion
from rankfold.migrating.reading import read_file, read_flags
from rankfold.migrating.recognition import recognise, sources, trainers
from rankfold.migrating.table import trainer
from tests.support.trainer_commands import converted


def _file(folder: Path, name: str, content: object) -> tuple[Conversion, RunConfig]:
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    conversion, _ = convert(read_file(path), values=[], ranks=None)
    config = from_yaml(to_text(conversion.options, title="test"))
    check_config(config)
    return conversion, config


AUTOMODEL = {
    "recipe": "TrainFinetuneRecipeForNextTokenPrediction", "step_scheduler": {"global_batch_size": 8, "num_epochs": 1},
    "model": {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"},
    "peft": {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "dim": 8},
    "optimizer": {"_target_": "torch.optim.Adam", "lr": 1e-5, "weight_decay": 0},
}  # fmt: skip
TORCHTUNE = {
    "output_dir": "/tmp/out", "model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b", "lora_rank": 8},
    "seed": None, "batch_size": 2, "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-4},
}  # fmt: skip
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=8 trainer.total_epochs=1 $@\n"
)
BRIDGE = '#SBATCH --nodes=1\nsrun --mpi=pmix bash -c "uv run python scripts/training/run_recipe.py --recipe a_peft"\n'
UNSLOTH = "from unsloth import FastLanguageModel\nfrom trl import SFTConfig\nargs = SFTConfig(output_dir='o')\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("automodel.yaml", AUTOMODEL, "belongs to NeMo Automodel, whose configurations are not converted"),
        ("torchtune.yaml", TORCHTUNE, "belongs to torchtune"),
        ("verl.yaml", {"actor_rollout_ref": {"model": {"path": "m"}}, "trainer": {"a": 1}}, "belongs to verl,"),
        ("verl.sh", VERL, "verl.trainer.main_ppo in verl.sh belongs to verl"),
        ("overrides.sh", "python3 train.py actor_rollout_ref.actor.optim.lr=1e-6 seed=1\n", "belongs to verl,"),
        ("slurm_peft.sh", BRIDGE, "run_recipe.py in slurm_peft.sh belongs to Megatron-Bridge"),
        ("tune.sh", "tune run lora_finetune --config llama3_1/8B_lora batch_size=8\n", "belongs to torchtune"),
        ("rlhf.sh", "deepspeed --module openrlhf.cli.train_sft --micro_train_batch_size 2\n", "belongs to OpenRLHF"),
        ("notebook.py", UNSLOTH, "belongs to Unsloth,"),
        ("pretrain_a.py", "import argparse\nfrom megatron.bridge.recipes import a\np.add_argument('--lr', default=1)\n",
         "megatron.bridge.recipes in pretrain_a.py belongs to Megatron-Bridge"),
        ("old.sh", "swift sft --sft_type lora --model_id_or_path m\n", "belongs to ms-swift before version 3"),
        ("eval.sh", "python evaluate_cogvlm_demo.py --from_pretrained m --train_iters 8 --lr 1e-5\n", "does not train"),
        ("infer.sh", "swift infer --adapters a --stream true\n", "does not train"),
        ("chat.yaml", {"model_name_or_path": "m", "template": "qwen", "infer_backend": "hf"}, "does not train"),
        ("other.yaml", {"foo": 1, "bar": {"baz": 2}, "lr": 1e-4}, "no key or program by which its source"),
        ("mixed.yaml", {"learning_rate": 1e-4, "a": 1, "b": 2, "c": 3}, "does not have 3 of its 4 keys"),
        ("train.sh", "axolotl train missing.yml\n", "options in missing.yml, which is no file there"),
        ("trl.sh", "trl sft --config missing.yaml\n", "options in missing.yaml, which is no file there"),
        ("nlp.sh", "accelerate launch nlp_example.py --mixed_precision fp16 --output_dir o\n", "recognised"),
    ],
)  # fmt: skip
def test_a_source_that_is_not_read_is_refused(name: str, content: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        _file(tmp_path, name, content)


def test_a_launchers_file_with_a_stray_key_is_still_its(tmp_path: Path) -> None:
    """DeepSpeed reads no offload_optimizer outside zero_optimization; CogVLM2's file has one there."""
    content = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "offload_optimizer": {"device": "cpu"}}
    conversion, config = _file(tmp_path, "ds_config.yaml", content)
    assert (conversion.trainer, config.parallel.shard) == ("the launcher", "gradients")
    assert [row.given.key for row in conversion.rows if row.kind == "unknown"] == ["offload_optimizer.device"]


def test_every_trainer_has_a_name_and_none_knows_the_others_commands() -> None:
    names = {trainer(table).name for tables in sources().values() for table in tables}
    assert names == {one.name for one in trainers()}
    given = read_flags("--foo 1 --bar 2 --learning_rate 1e-4 --max_length 64", "flags", Path())
    conversion, _ = convert(given, values=[], ranks=None, source="trl")
    assert (conversion.trainer, conversion.options["optim.lr"]) == ("TRL", 1e-4)
    assert recognise(read_flags("--reward_funcs a.b", "flags", Path()), "trl").name == "TRL's GRPO"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("trl sft --model_name_or_path m --loss_type dft", "another loss"),
        ("trl dpo --model_name_or_path m --loss_type sigmoid bco_pair", "another loss"),
        ("trl dpo --model_name_or_path m --rpo_alpha 1.0", "a further term of the loss"),
        ("trl cpo --model_name_or_path m", "a loss of CPO"),
        ("trl cpo --model_name_or_path m --loss_type simpo", "cpo_alpha 0 is SimPO without it"),
        ("accelerate launch bco.py --model_name_or_path m --beta 0.1", "starts bco.py, which trains BCO"),
        ("trl rloo --model_name_or_path m", "starts trl rloo, which trains RLOO"),
        ("train.py --model_name_or_path m --reward_model_path r", "a key that names the objective"),
        ("trl reward --model_name_or_path m", "a reward model"),
        ("trl grpo --model_name_or_path m --reward_funcs a.b --loss_type two_sided", "another loss than grpo"),
        ("llamafactory-cli train --model_name_or_path m --stage rm", "a reward model"),
        ("llamafactory-cli train --model_name_or_path m --stage dpo --pref_loss kto_pair", "another loss"),
        ("llamafactory-cli train --model_name_or_path m --stage sft --use_dft_loss true", "another loss than"),
        ("axolotl train --base_model m --rl gdpo", "another objective"),
        ("axolotl train --base_model m --rl simpo", "further term of the chosen answer"),
        ("axolotl train --base_model m --plugins axolotl.integrations.kd.KDPlugin", "a student of another model"),
        ("train.py --model_name_or_path m --task_type SEQ_CLS", "another task than the next token"),
        ("train.py --model_name_or_path m --algorithm reinforce", "a key that names the objective and is not known"),
        ("train.py --model_name_or_path m --learning_rate 1e-4 --max_steps 4 --rl ppo", "names the objective"),
        ("pretrain_gpt.py --lr 1e-4 --train-iters 10 --grpo-group-size 8", "belongs to another program of Megatron"),
        ("pretrain_bert.py --lr 1e-4 --train-iters 10", "trains another kind of model"),
        ("swift rlhf --rlhf_type grpo --model m", "whose reward plugins and normalisation are ms-swift's"),
        ("swift rlhf --rlhf_type gkd --model m", "a student of another model"),
        ("swift rlhf --rlhf_type cpo --model m", "another loss of cpo"),
        ("swift rlhf --rlhf_type simpo --model m", "--cpo_alpha 0 is SimPO without it"),
        ("swift sft --model m --task_type embedding", "another task than the next token"),
        ("swift sft --model m --tuner_type adalora", "adapters here are LoRA's"),
        ("swift rlhf --rlhf_type $TYPE --model m", "only known when the script runs, but decides what is trained"),
        ("megatron rlhf --rlhf_type grpo --model m --lr 1e-5", "GRPO"),
        ("train_grpo.py --save_weight grpo", "of its scripts, train_pretrain.py"),
        ("train_ppo.py --from_weight full_sft", "of its scripts, train_pretrain.py"),
    ],
)  # fmt: skip
def test_an_objective_that_is_not_there_is_refused(command: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        converted(command)


def test_a_value_that_the_script_leaves_open_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "swift rlhf --rlhf_type $TYPE --model m --dataset a.jsonl --beta $1\n", encoding="utf-8"
    )
    given = read_file(tmp_path / "run.sh") + read_flags("--rlhf_type dpo", "flags", tmp_path)
    conversion, _ = convert(given, values=[], ranks=None)
    assert (conversion.options["objective.name"], conversion.trainer) == ("dpo", "ms-swift")
    assert any(line.startswith("objective.beta: beta is $1") for line in conversion.to_fill)


SWIFT = (
    "NPROC_PER_NODE=2 swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset a.jsonl#500 b.jsonl "
    "--torch_dtype bfloat16 --max_length 2048 --model_author swift --model_name swift-robot --learning_rate 1e-4 "
    "--warmup_ratio 0.05 --split_dataset_ratio 0.01 --deepspeed zero3_offload --output_dir out"
)


def test_ms_swift() -> None:
    """Its defaults are those of version 4.6.0: swift/arguments and swift/trainers/arguments.py."""
    conversion, config = converted(SWIFT)
    assert (config.model.path, config.model.dtype) == ("Qwen/Qwen2.5-7B-Instruct", "bfloat16")
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout) == (8, 32.0, 0.05)
    assert (config.lora.targets, config.data.overlong) == (("all-linear",), "drop")
    assert (config.optim.schedule, config.optim.weight_decay, config.optim.betas) == ("cosine", 0.1, (0.9, 0.95))
    assert (config.train.micro_batch_size, config.train.global_batch_size) == (1, 16)  # 16 rows over all ranks
    assert (config.data.train, config.data.mix, config.data.validation_split) == ("a.jsonl", ("b.jsonl=1",), 0.01)
    assert (config.train.eval_every, config.memory.recompute) == (500, "full")  # as often as it is saved
    assert (config.parallel.shard, config.memory.offload_weights) == ("gradients", True)
    assert any("draws 500 samples of a.jsonl" in note for note in conversion.notes)
    _, full = converted("swift sft --model m --tuner_type full --dataset a.jsonl")
    assert (full.optim.lr, full.lora.rank, full.trainable) == (1e-5, 0, ("embed_tokens", "layers", "norm", "lm_head"))
    _, old = converted("swift sft --model m --train_type full --dataset a.jsonl --torch_dtype float32")
    assert (old.lora.rank, old.model.dtype) == (0, "float16")
    for flags, base in (
        ("--quant_method bnb --quant_bits 4", "nf4"), ("--quant_bits 4", None), ("--quant_method fp8", "fp8_block"),
    ):  # fmt: skip
        _, quantized = converted(f"swift sft --model m --dataset a.jsonl --max_length 64 {flags}")
        assert quantized.model.base_dtype == base, flags
    _, text = converted("swift pt --model m --dataset a.jsonl --max_length 64")
    assert (text.data.format, text.data.mask_prompt, text.train.global_batch_size) == ("text", False, 16)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--rlhf_type dpo", ("dpo", 0.1, 0.0, "base", 1e-4)),
        ("--rlhf_type dpo --loss_type ipo --tuner_type full", ("ipo", 0.1, 0.0, "initial", 1e-5)),
        ("--rlhf_type dpo --adapters sft --ref_adapters sft", ("dpo", 0.1, 0.0, "initial", 1e-4)),
        ("--rlhf_type kto --beta 0.3", ("kto", 0.3, 0.0, "base", 1e-4)),
        ("--rlhf_type orpo", ("orpo", 0.1, 0.0, "base", 1e-4)),
        ("--rlhf_type simpo --cpo_alpha 0", ("simpo", 2.0, 1.0, "base", 1e-4)),
    ],
)
def test_ms_swift_rlhf(flags: str, expected: tuple[Any, ...]) -> None:
    _, config = converted(f"swift rlhf --model m --dataset a.jsonl --max_length 64 {flags}")
    objective = config.objective
    found = (objective.name, objective.beta, objective.margin, objective.reference, config.optim.lr)
    assert found == expected


def test_ms_swift_in_files(tmp_path: Path) -> None:
    """A YAML file of Megatron-SWIFT, and args.json of a run, which has every key, most of them empty."""
    megatron = {
        "model": "Qwen/Qwen3-30B-A3B", "tuner_type": "lora", "dataset": ["AI-ModelScope/alpaca-gpt4-data-zh#500"],
        "packing": True, "micro_batch_size": 1, "global_batch_size": 4, "num_train_epochs": 1, "lr": 1e-4,
        "lr_warmup_fraction": 0.05, "min_lr": 1e-5, "expert_model_parallel_size": 4, "save_steps": 200,
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1, "max_length": 2048,
    }  # fmt: skip
    conversion, config = _file(tmp_path, "sft.yaml", megatron)
    assert (conversion.trainer, config.lora.rank, config.lora.targets) == ("Megatron-SWIFT", 8, ("all-linear",))
    assert (config.model.path, config.data.train) == ("Qwen/Qwen3-30B-A3B", "path/to/train.jsonl")
    assert (config.train.global_batch_size, config.parallel.shard, config.parallel.expert) == (4, "optimizer", 4)
    assert (config.optim.lr, config.optim.min_lr, config.optim.warmup_ratio) == (1e-4, 1e-5, 0.05)
    assert (config.memory.recompute, config.checkpoint.every, config.data.packing) == ("full", 200, True)
    _, plain = converted("megatron sft --model m --dataset a.jsonl --num_train_epochs 1 --max_length 64")
    assert (plain.lora.rank, plain.optim.lr, plain.memory.recompute) == (0, 1e-5, "attention")
    assert (plain.train.micro_batch_size, plain.train.global_batch_size) == (1, 16)
    saved = {
        "model": "m", "tuner_type": "lora", "rlhf_type": None, "loss_type": None, "torch_dtype": "bfloat16",
        "bf16": True, "fp16": False, "max_length": 512, "lora_rank": 4, "reward_funcs": [], "task_type": "causal_lm",
        "num_labels": None,
        "dataset": ["a.jsonl"], "swift_version": "4.6.0", "warmup_ratio": 0.0, "early_stop_interval": None, "fsdp": [],
        "deepspeed": {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto", "train_batch_size": "auto"},
    }  # fmt: skip
    (tmp_path / "args.json").write_text(json.dumps(saved), encoding="utf-8")
    _, config = _file(tmp_path, "run.sh", "NPROC_PER_NODE=4 swift sft args.json\n")
    assert (config.lora.rank, config.data.seq_length, config.parallel.shard) == (4, 512, "gradients")
    assert config.train.global_batch_size == 16


LOOP = """
import argparse, torch
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-7)
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--train_dataset_rate", type=float, default=0.8)
    parser.add_argument("--lora_rank", type=int, default=8)
    parser.add_argument("--lora_target", type=str, default=["vision_expert_query_key_value"])
    parser.add_argument("--model_path", type=str, default="THUDM/cogvlm2-llama3-chat-19B")
    parser.add_argument("--ds_config", type=str, default="ds_config.yaml")
    args = parser.parse_args()
    config = LoraConfig(r=args.lora_rank, target_modules=args.lora_target, lora_alpha=32)
"""
MINIMIND = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--save_dir", type=str, default="../out")
parser.add_argument("--epochs", type=int, default=7)
parser.add_argument("--learning_rate", type=float, default=4e-8)
parser.add_argument("--use_wandb", action="store_true")
parser.add_argument("--from_weight", default="full_sft", type=str)
parser.add_argument("--data_path", type=str, default="../dataset/dpo.jsonl")
args = parser.parse_args()
"""
PARSED = """
from dataclasses import dataclass, field
from trl import SFTConfig, SFTTrainer, TrlParser
@dataclass
class Arguments:
    lora_r: int = field(default=12, metadata={"help": "rank"})
    use_peft: bool = True
arguments, training_args = TrlParser((Arguments, SFTConfig)).parse_args_and_config()
training_args.max_length = None
trainer = SFTTrainer(args=training_args)
"""
OWN_LOSS = PARSED + "class Mine(SFTTrainer):\n    def compute_loss(self, model, inputs):\n        return 0\n"
CLASSIFIER = "from transformers import *\nargs = TrainingArguments('o')\nm = AutoModelForSequenceClassification('m')\n"


def test_defaults_of_a_script_are_its_own_arguments(tmp_path: Path) -> None:
    (tmp_path / "ds_config.yaml").write_text("zero_optimization: {stage: 2}\n", encoding="utf-8")
    conversion, config = _file(tmp_path, "peft_lora.py", LOOP)
    assert (conversion.trainer, config.optim.lr, config.train.epochs) == ("CogVLM2's script", 1e-7, 5.0)
    assert (config.train.global_batch_size, config.lora.rank, config.parallel.shard) == (2, 8, "gradients")
    assert (config.lora.targets, config.data.validation_split) == (("vision_expert_query_key_value",), 0.2)
    _, config = _file(tmp_path, "run.sh", "torchrun --nproc_per_node 2 peft_lora.py --lr 2e-6\n")
    assert (config.optim.lr, config.train.epochs, config.train.global_batch_size) == (2e-6, 5.0, 4)
    conversion, config = _file(tmp_path, "train_dpo.py", MINIMIND)
    assert (conversion.trainer, config.objective.name, config.train.epochs) == ("MiniMind", "dpo", 7.0)
    assert (config.optim.lr, config.data.train, config.lora.rank) == (4e-8, "../dataset/dpo.jsonl", 0)
    conversion, config = _file(tmp_path, "sft_vlm.py", PARSED)
    assert (conversion.trainer, config.optim.lr, config.model.dtype) == ("TRL", 2e-5, "bfloat16")
    assert (config.lora.rank, config.lora.dropout) == (12, 0.05)
    assert any("max_length none cuts no sample" in line for line in conversion.to_fill)


def test_a_script_that_a_command_starts_says_what_it_trains(tmp_path: Path) -> None:
    """Its file is looked for around the command; a name such as train.py says nothing."""
    (tmp_path / "train.py").write_text(PARSED, encoding="utf-8")
    conversion, config = _file(tmp_path, "run.sh", "python train.py --lora_alpha 8 --no_gradient_checkpointing\n")
    assert (conversion.trainer, config.lora.rank, config.lora.alpha) == ("TRL", 12, 8.0)
    assert (config.optim.lr, config.memory.recompute) == (2e-5, "selective")
    adapted = (
        PARSED.replace("    use_peft: bool = True\n", "") + "config = LoraConfig(r=24, layers_to_transform=None)\n"
    )
    (tmp_path / "train.py").write_text(adapted, encoding="utf-8")
    _, config = _file(tmp_path, "run.sh", "python train.py --model_name_or_path m\n")
    assert config.lora.rank == 24  # there is no argument that leaves the adapters out
    switched = PARSED.replace("True", "False") + "config = LoraConfig(r=24)\n"
    (tmp_path / "train.py").write_text(switched, encoding="utf-8")
    _, config = _file(tmp_path, "run.sh", "python train.py --model_name_or_path m\n")
    assert (config.lora.rank, config.trainable) == (0, ("*",))
    (tmp_path / "train.py").write_text(OWN_LOSS, encoding="utf-8")
    with pytest.raises(UserError, match="Mine with compute_loss"):
        _file(tmp_path, "run.sh", "python train.py --lora_alpha 8\n")


@pytest.mark.parametrize(
    ("name", "script", "words"),
    [
        ("mine.py", OWN_LOSS, "gives trainer as Mine with compute_loss"),
        ("online.py", PARSED.replace("SFTConfig", "RLOOConfig"), "gives trainer as RLOOConfig"),
        ("glue.py", CLASSIFIER, "gives task_type as AutoModelForSequenceClassification"),
        ("loop.py", LOOP.replace("train_dataset_rate", "seed").replace("lora_target", "target"), "loop of its own"),
        ("train_grpo.py", MINIMIND, "of its scripts, train_pretrain.py"),
    ],
)
def test_scripts_with_an_objective_or_a_loop_of_their_own(name: str, script: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        _file(tmp_path, name, script)


def test_fsdp_in_host_memory_is_not_lost(tmp_path: Path) -> None:
    """Axolotl's key, below fsdp_config and at the top; the optimizer's state goes with the weights."""
    for place, leaf in (
        ("fsdp_config", "offload_params"),
        ("fsdp_config", "fsdp_offload_params"),
        ("", "offload_params"),
    ):
        entry = {place: {leaf: True}} if place else {f"fsdp_{leaf}": True}
        content = {"base_model": "m", "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "learning_rate": 1e-4, **entry}
        conversion, _ = _file(tmp_path, "axolotl.yml", content)
        assert conversion.options["memory.offload_weights"] is True, entry
        assert conversion.options["memory.offload_optimizer"] is True, entry


def test_llama_factory_finds_its_datasets(tmp_path: Path) -> None:
    """dataset_dir is data by default, in the checkout that the file is somewhere below."""
    (tmp_path / "data").mkdir()
    (tmp_path / "examples" / "lora").mkdir(parents=True)
    known = {"a": {"file_name": "a.json"}, "b": {"file_name": "b.jsonl", "columns": {"prompt": "question"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(known), encoding="utf-8")
    (tmp_path / "data" / "a.json").write_text(json.dumps([{"instruction": "x", "output": "y"}] * 2), encoding="utf-8")
    (tmp_path / "data" / "b.jsonl").write_text('{"question": "x"}\n' * 6, encoding="utf-8")
    content = {
        "model_name_or_path": "m",
        "stage": "sft",
        "finetuning_type": "lora",
        "dataset": "a, b",
        "max_samples": 5,
    }
    conversion, config = _file(tmp_path / "examples" / "lora", "sft.yaml", content)
    assert config.data.train == str(tmp_path / "data" / "a.json")
    assert config.data.mix == (f"{tmp_path / 'data' / 'b.jsonl'}=2.5",)
    assert any("b.jsonl has other fields (prompt question)" in note for note in conversion.notes)
