"""The same completions, rewards and start, trained on by TRL's GRPOTrainer and by the engine.

TRL's trainer computes advantages, log-probabilities, losses, gradients and updates itself; only `_generate`, which
samples, gives back what was drawn beforehand. The engine takes its whole way from options and completions to steps.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from engine.config.load import parse_config
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.data.loader import DataLoader
from engine.data.row_shape import round_up
from engine.distributed.sharding import NamedShard
from engine.experts.router_load import RouterLoad
from engine.rollouts.data.completions import Completion, CompletionColumns, completion_columns
from engine.rollouts.moving_reference import MovingReference
from engine.rollouts.objective.advantages import Advantages, advantages, advantages_of_each
from engine.rollouts.objective.policy import row_weight
from engine.rollouts.token_logps import token_logps
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.build import build_training
from engine.training.prefixes import choose_sharing
from engine.training.row_shape import shape_on_mesh
from engine.training.start_model import check_model, model_source
from tests.support.commands import options
from tests.support.spawning import spawn

VOCABULARY, LONGEST = 97, 9
GROUPS, MEMBERS = 2, 4
COUNT = GROUPS * MEMBERS
STEPS, LR, EPS = 20, 2e-3, 1e-4
"""eps of AdamW: with a smaller one gradients of next to nothing step as far as their rounding says."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One completion that both train on."""

    prompt: list[int]
    tokens: list[int]
    sampled_logps: list[float]
    reward: float

    def written(self) -> list[bool]:
        """Which tokens a tool wrote, where some are: in the middle, so that turns of the model lie around them."""
        first, last = len(self.tokens) // 3, len(self.tokens) // 2
        return [first <= place < last for place in range(len(self.tokens))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is trained.

    Args:
        settings: TRL's names -> values.
        iterations: of each generation batch.
        parts: micro-batches of a step.
        corrects: whether the sampler's log-probabilities count, as TRL has it for vLLM.
        tools: whether a tool wrote some of the tokens.
        whole: all parameters train, and no adapters.
    """

    settings: dict[str, Any]
    iterations: int = 1
    parts: int = 1
    corrects: bool = False
    tools: bool = False
    whole: bool = False


class Found(NamedTuple):
    """What training came to.

    Args:
        losses: of each step.
        figures: what else was reported of each step.
        gradients: of the first step and of the second, by PEFT's names, before clipping.
        adapter: after the last step.
    """

    losses: list[float]
    figures: list[dict[str, float]]
    gradients: list[dict[str, Tensor]]
    adapter: dict[str, Tensor]


def save_start(folder: Path, *, experts: bool = False, prompts: tuple[int, int] = (2, 6)) -> None:
    """`model`: a small Llama; `adapter`: a PEFT folder whose B is drawn; `batches.json`: what was sampled.

    Args:
        experts: the model is a Mixtral, whose routers do not choose evenly; its adapters are on attention.
        prompts: the least tokens of a prompt, and one more than the most.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if experts:
        mixture = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
        model = MixtralForCausalLM(MixtralConfig(**sizes, **mixture))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(folder / "model")
    targets = ATTENTION if experts else TARGETS
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(folder / "adapter")
    drawn = [[asdict(one) for one in _draw(number, prompts)] for number in range(STEPS)]
    (folder / "batches.json").write_text(json.dumps(drawn), encoding="utf-8")


def _draw(number: int, prompts: tuple[int, int]) -> list[Drawn]:
    """A generation batch: groups of members, one of which nobody could judge now and then."""
    random = np.random.default_rng(number)
    found = []
    for group in range(GROUPS):
        prompt = random.integers(3, VOCABULARY, random.integers(*prompts)).tolist()
        for member in range(MEMBERS):
            length = int(random.integers(1, LONGEST + 1))
            if group == 0 and member == number % MEMBERS:
                length = LONGEST  # one is truncated in every batch
            tokens = random.integers(3, VOCABULARY, length).tolist()
            if length < LONGEST:
                tokens[-1] = 2  # the others are truncated
            logps = (-4.5 + 0.8 * random.standard_normal(length)).tolist()
            if random.random() < 0.2:
                logps[0] = float("nan")  # which the sampler did not say
            reward = float("nan") if random.random() < 0.1 else float(random.integers(0, 5)) / 2
            found.append(Drawn(prompt, tokens, logps, reward))
    return found


def batches(folder: Path) -> list[list[Drawn]]:
    """All generation batches."""
    read = json.loads((folder / "batches.json").read_text(encoding="utf-8"))
    return [[Drawn(**one) for one in batch] for batch in read]


def tokenizer() -> Any:
    """What TRL's trainer wants, and in these tests never encodes with."""
    from tokenizers import Tokenizer as Plain
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    plain = Plain(WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def trl_steps(folder: Path, job: Job, steps: int, out: Path) -> Found:
    """Trains by TRL's trainer, alone in this process."""
    from datasets import Dataset
    from peft import LoraConfig
    from peft.utils import set_peft_model_state_dict
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    given = batches(folder)
    found = Found([], [], [], {})

    class Given(GRPOTrainer):
        """Samples what was drawn, and keeps what a step comes to."""

        calls = 0

        def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
            batch, self.calls = given[self.calls], self.calls + 1
            assert len(prompts) == len(batch)
            logps = [one.sampled_logps for one in batch] if job.corrects else None
            ids = [list(one.prompt) for one in batch], [list(one.tokens) for one in batch]
            mask = [[int(not written) for written in one.written()] for one in batch] if job.tools else None
            return (*ids, mask, [""] * len(batch), logps, {}, None, None)

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            loss: Tensor = super()._compute_loss(model, inputs)
            self._part = getattr(self, "_part", []) + [loss.item()]
            return loss

        def training_step(self, *arguments: Any, **named: Any) -> Tensor:
            result: Tensor = super().training_step(*arguments, **named)
            if len(self._part) == job.parts:
                found.losses.append(sum(self._part))
                if len(found.gradients) < 2:
                    found.gradients.append(_peft(self.model, lambda parameter: parameter.grad))
                self._part = []
            return result

        def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
            super().log(logs, *arguments, **named)
            if "loss" in logs:
                found.figures.append(dict(self.state.log_history[-1]))

    def rewards(completion_ids: list[list[int]], **rest: Any) -> list[float | None]:
        batch = given[trainer.calls - 1]
        assert completion_ids == [one.tokens for one in batch]
        return [None if np.isnan(one.reward) else one.reward for one in batch]

    def lengths(completion_ids: list[list[int]], **rest: Any) -> list[float]:
        return [len(ids) / LONGEST for ids in completion_ids]

    functions = [rewards, lengths] if "multi_objective_aggregation" in job.settings else rewards
    arguments = GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=COUNT // job.parts, gradient_accumulation_steps=job.parts,
        num_generations=MEMBERS, max_completion_length=LONGEST, max_steps=steps, num_iterations=job.iterations,
        learning_rate=LR, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, adam_epsilon=EPS,
        logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, bf16=False, save_strategy="no",
        gradient_checkpointing=False, shuffle_dataset=False, dataloader_pin_memory=False, seed=1, **job.settings,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"w{number + 3}"} for number in range(GROUPS * len(given))])
    shuffled = grpo_trainer.shuffle_sequence_dict
    grpo_trainer.shuffle_sequence_dict = lambda batch: batch  # which of them share a micro-batch is the data's order
    try:
        trainer = Given(
            model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32), reward_funcs=functions,
            args=arguments, train_dataset=rows, processing_class=tokenizer(),
            peft_config=None if job.whole else LoraConfig(
                r=4, lora_alpha=8, target_modules=_targets(folder), task_type="CAUSAL_LM"
            ),
        )  # fmt: skip
        if not job.whole:
            set_peft_model_state_dict(trainer.model, load_file(folder / "adapter" / "adapter_model.safetensors"))
        trainer.use_vllm = job.corrects  # its probabilities are looked at, nothing is sampled
        trainer.train()
    finally:
        grpo_trainer.shuffle_sequence_dict = shuffled
    found.adapter.update(_peft(trainer.model, lambda parameter: parameter.detach()))
    return found


def _peft(model: Any, read: Any) -> dict[str, Tensor]:
    """What `read` makes of each adapter's factors, by the engine's names."""
    return {_name(key): read(value).clone() for key, value in model.named_parameters() if "lora_" in key}


def start_adapter(folder: Path) -> dict[str, Tensor]:
    """The factors that both start from, by the engine's names."""
    return {_name(key): value for key, value in load_file(folder / "adapter" / "adapter_model.safetensors").items()}


def _name(peft: str) -> str:
    within = peft.partition(".model.layers.")[2].replace("self_attn", "attention").removesuffix(".weight")
    return f"layers.{within.removesuffix('.default')}"


def engine_settings(folder: Path, job: Job) -> dict[str, object]:
    """The engine's options for a job."""
    names = {
        "epsilon": "objective.epsilon", "epsilon_high": "objective.epsilon_high", "delta": "objective.delta",
        "beta": "objective.beta", "use_bias_correction_kl": "objective.kl_bias_correction",
        "scale_rewards": "objective.scale_rewards", "temperature": "rollout.temperature",
        "top_entropy_quantile": "objective.top_entropy_quantile", "loss_type": "objective.loss_type",
        "vllm_importance_sampling_mode": "objective.importance_correction",
        "vllm_importance_sampling_clip_max": "objective.importance_max",
        "vllm_importance_sampling_clip_min": "objective.importance_min",
        "sapo_temperature_pos": "objective.sapo_temperature_pos",
        "sapo_temperature_neg": "objective.sapo_temperature_neg",
        **{f"vespo_{name}": f"objective.vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
        "mask_truncated_completions": "objective.mask_truncated",
        "off_policy_mask_threshold": "objective.off_policy_threshold",
        "multi_objective_aggregation": "objective.reward_aggregation",
        "ref_model_mixup_alpha": "objective.reference_mixup_alpha",
        "ref_model_sync_steps": "objective.reference_sync_steps",
        "router_aux_loss_coef": "train.router_aux_loss_coef", "entropy_coef": "objective.entropy_coefficient",
    }  # fmt: skip
    given = dict(job.settings)
    given.pop("reward_weights", None)
    given.pop("sync_ref_model", None)
    levels = {}
    if given.pop("importance_sampling_level", "token") == "sequence":
        if given["loss_type"] == "grpo":
            given["loss_type"] = "gspo"
        elif given["loss_type"] != "luspo":
            levels = {"objective.ratio_level": "sequence"}
    if not given.pop("vllm_importance_sampling_correction", job.corrects):
        assert not any(name.startswith("vllm") for name in given)
    return levels | ({"rollout.server": "http://nobody"} if job.corrects else {}) | {
        "model.path": str(folder / "model"), "model.dtype": "float32", "lora.init_from": str(folder / "adapter"),
        "lora.rank": 4, "lora.alpha": 8, "lora.targets": json.dumps(_targets(folder)),
        "data.train": "none", "data.seq_length": 16,
        "train.steps": STEPS, "train.global_batch_size": COUNT, "train.micro_batch_size": COUNT // job.parts,
        "optim.lr": LR, "optim.eps": EPS, "optim.schedule": "constant", "optim.weight_decay": 0,
        "optim.warmup_steps": 0, "objective.name": "grpo", "objective.num_iterations": job.iterations,
        "rollout.num_generations": MEMBERS, "rollout.max_completion_length": LONGEST,
        **{names[name]: json.dumps(value) if isinstance(value, bool) else value for name, value in given.items()},
        **({"lora.init_from": "null", "lora.rank": 0, "lora.targets": "[]", "trainable": "*"} if job.whole else {}),
    }  # fmt: skip


def _targets(folder: Path) -> list[str]:
    """The modules that have adapters."""
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    return sorted(settings["target_modules"])


def engine_steps(folder: Path | str, settings: dict[str, object], steps: int, tools: bool = False) -> tuple[Any, ...]:
    """Trains on the ranks that call it; losses, figures, and this rank's parts of gradients and adapter.

    Args:
        tools: see `Job`.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # not check_config: it refuses an adapter to start from beside a divergence, because the reference is the model
    # without it, as it is here
    config = parse_config(options(settings))
    launch = Launch(rank=rank, world_size=world, device=torch.device("cpu"))
    source = model_source(config)
    plan = check_model(config, source.model, world)
    training = build_training(config, launch, source, plan, Log(rank=1))
    stages, decoder = training.stages, training.source.model.decoder
    load = None
    if decoder.num_experts:
        load = RouterLoad(decoder, stages.models(), training.mesh, launch.device, stages.balance)
    gradients: list[list[NamedShard]] = []
    update = training.optimizer.step

    def recorded(*arguments: Any) -> Any:
        if len(gradients) < 2:
            gradients.append(_copied(training.optimizer.flat.gradient_shards()))
        return update(*arguments)

    training.optimizer.step = recorded  # type: ignore[method-assign]
    reference = None
    if config.objective.reference_sync_steps is not None:
        reference = MovingReference(config, training)
        reference.begin()
    losses, figures = [], []
    objective, given = config.objective, batches(Path(folder))
    for number in range(steps // objective.num_iterations):
        drawn = given[number]
        completions = [
            Completion(
                prompt=one.prompt,
                tokens=one.tokens,
                sampled_logps=one.sampled_logps,
                advantage=float(advantage),
                written=one.written() if tools else None,
                trained=one.tokens[-1] == 2 or not objective.mask_truncated,
            )
            for one, advantage in zip(drawn, _advantages(drawn, config).of_completions, strict=True)
        ]
        dataset = TokenDataset(
            completion_columns(completions, row_weight(objective.loss_type)),
            seq_length=config.data.seq_length,
            packing=config.data.fills_rows,
        )
        dataset = choose_sharing(config, decoder).rows(dataset, ranks=training.mesh.dp.size)
        if objective.num_iterations > 1:
            columns = dataset.extra(CompletionColumns)
            assert columns is not None
            old, base = (
                token_logps(config, training.mesh, training.stages, dataset, adapters=adapters)
                for adapters in (True, False)
            )
            dataset.put(replace(columns, old_logps=old, reference_logps=base))
        if reference is not None:
            reference.follow(len(losses))
            columns = dataset.extra(CompletionColumns)
            assert columns is not None
            dataset.put(replace(columns, reference_logps=reference.logps(dataset)))
        for _ in range(objective.num_iterations):
            loader = DataLoader(
                dataset,
                shape_on_mesh(config, launch.device, training.mesh),
                global_batch_size=round_up(len(dataset), config.train.micro_batch_size * training.mesh.dp.size),
                seed=0,
                shuffle=False,
                num_workers=0,
            )
            if load is not None:
                load.before(1)
            result = training.step(loader.batches(0), loader.target_count(0), config.optim.lr)
            losses.append(result.loss.item())
            routers = {} if load is None else load.named(load.measured().tolist())
            figures.append({**training.objective.named(result.metrics.tolist()), **routers})
    return losses, figures, gradients, _copied(training.optimizer.flat.master_shards())


def engine_ranks(folder: Path, settings: dict[str, object], steps: int, world: int) -> list[tuple[Any, ...]]:
    """The results of `engine_steps` on each of `world` ranks."""
    if world == 1:
        return [engine_steps(folder, settings, steps)]
    return spawn(engine_steps, world=world, args=(str(folder), settings, steps), timeout=300)


def _advantages(drawn: list[Drawn], config: RunConfig) -> Advantages:
    rewards, group = [one.reward for one in drawn], config.rollout.num_generations
    if config.objective.reward_aggregation == "sum_then_normalize":
        return advantages(rewards, group=group, scale=config.objective.scale_rewards)
    both = np.array([rewards, [len(one.tokens) / LONGEST for one in drawn]]).T
    return advantages_of_each(both, [1.0, -0.4], judged=[True] * len(drawn), group=group)


def _copied(shards: list[NamedShard]) -> list[NamedShard]:
    return [shard._replace(tensor=shard.tensor.clone()) for shard in shards]
