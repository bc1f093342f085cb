"""Rules for scripts of SwissArmyTransformer, with DeepSpeed's file beside them."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, Rule, dropped, fact, number, option, text, whole
from rankfold.migrating.trainer import Default, Ours, Trainer
from rankfold.migrating.trainers import hugging_face as hf
from rankfold.migrating.trainers import shared
from rankfold.migrating.trainers.megatron import RULES as MEGATRON_RULES

RULES: dict[str, Rule] = hf.RULES | MEGATRON_RULES | {
    "from_pretrained": option("model.path", text),
    "local_tokenizer": option("data.tokenizer", text),
    "train_data": shared.dataset, "valid_data": shared.dataset, "data_path": shared.dataset,
    "lr_decay_ratio": Rule(shared.share_of_lr, ("optim.min_lr",)),
    "warmup": option("optim.warmup_ratio", number),
    "batch_size": option("train.micro_batch_size", whole),
    "epochs": option("train.epochs", number),
    "eval_batch_size": fact("eval_batch", whole, "train.eval_samples"),
    "use_qlora": shared.quantize("nf4"),
    "layer_range": option("lora.layers", lambda g: g.value if isinstance(g.value, list) else [whole(g)]),
    "load": dropped("checkpoint.resume takes this engine's checkpoints"),
    "split": dropped("data.train and data.validation are files of their own"),
    "gradient_accumulation_steps": fact("accumulation", whole, "train.global_batch_size"),
    "lr_decay_iters": dropped("the schedule ends with the run"),
    "checkpoint_num_layers": dropped("each layer is recomputed separately"),
    "strict_eval": dropped("evaluations go through all of data.validation, or train.eval_samples of it"),
    "ignore_pad_token_for_loss": dropped(shared.ALWAYS),
}  # fmt: skip
RULES |= shared.every(
    """
    experiment_name mode resume_dataloader skip_init SAT_HOME
    """,
    why="a run resumes at its next sample; checkpoint.dir names it",
)
RULES |= shared.every("version", why="the model's own chat template is used")
_TOWER = ("vit_checkpoint_activations", "vit_no_grad", "image_length", "eva_args")
RULES |= {key: dropped(why) for key, why in zip(_TOWER, (
    "memory.recompute is of the tower's blocks too", "a tower without anything that trains has no backward",
    "the size of the images says it", "the model's config.json describes the tower",
), strict=True)}  # fmt: skip


def _adapters(conversion: Conversion) -> bool:
    return bool(conversion.facts.get("lora", conversion.given("lora_rank", "use_qlora")))


def _finish(conversion: Conversion) -> None:
    if conversion.given(*_TOWER):
        conversion.to_fill.append(
            "trainable, optim.lr_pattern: the script's disable_untrainable_params says what trains beside adapters, "
            "and at which rate, such as {model.vision: 1e-6} for a tenth of 1e-5"
        )


def _min_lr(conversion: Conversion) -> float:
    """Returns AnnealingLR's lowest rate: a cosine ends at lr_decay_ratio of the highest, a line at 0."""
    cosine = conversion.options.get("optim.schedule") == "cosine"
    return float(conversion.options["optim.lr"]) / 10 if cosine else 0.0


DEFAULTS: dict[str, Default | Ours] = hf.DEFAULTS | {
    "model.init": Default("checkpoint", "the scripts name weights"),
    "data.mix": Ours("the data has to be named"),
    "data.packing": Default(False, "one sample a row"),
    "optim.lr": Default(1e-4, "arguments.py: --lr"),
    "optim.schedule": Default("linear", "arguments.py: --lr-decay-style"),
    "optim.min_lr": Default(_min_lr, "arguments.py: --lr-decay-ratio = 0.1, AnnealingLR"),
    "optim.warmup_ratio": Default(
        lambda conversion: None if conversion.options.get("optim.warmup_steps") else 0.01, "arguments.py: --warmup"
    ),
    "optim.weight_decay": Default(0.01, "arguments.py: --weight-decay"),
    "optim.loss_scale": Ours("finds its own size"),
    "optim.loss_scale_window": Ours("finds its own size"),
    "train.micro_batch_size": Default(4, "arguments.py: --batch-size"),
    "train.steps": Ours("the scripts name it"),
    "train.epochs": Ours("the scripts name steps"),
    "train.seed": Default(1234, "arguments.py: --seed"),
    "train.eval_every": Default(0, "arguments.py: --eval-interval = None"),
    "train.eval_samples": Default(None, "arguments.py: --eval-iters, where there is an interval"),
    "train.collective_timeout": Ours("how long ranks wait changes nothing that is computed"),
    "memory.recompute_layers": Default(None, "arguments.py: --checkpoint-activations is of all layers"),
    "memory.offload_activations": Default(False, "no such option"),
    "parallel.virtual": Default(None, "no such option"),
    "checkpoint.every": Default(5000, "arguments.py: --save-interval"),
    "parallel.context_method": Default("ring", "no such option"),
    "parallel.expert": Default(1, "no such option"),
    "parallel.expert_tensor": Default(None, "no such option"),
    "lora.rank": Default(10, "finetune scripts: --lora_rank"),
    "lora.alpha": Ours("each script has a scale of its own"),
    "lora.targets": Ours("each script has targets of its own"),
}

SAT = Trainer(name="SwissArmyTransformer", rules=RULES, defaults=DEFAULTS, adapters=_adapters, finish=_finish)
