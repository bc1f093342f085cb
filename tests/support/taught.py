"""Texts with a teacher's most likely tokens, a model and a teacher to learn them from, and one step by both ways."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.distributed.sharding import NamedShard
from examples.grpo_arithmetic.make_small import write_model
from tests.parity.grpo_training import _name as engine_name
from tests.support.rollout_runs import prepared

VOCABULARY, MOST, TEXTS = 29, 5, 8
"""Of the model, odd so that tensor ranks hold padding; tokens of the teacher at a target; records."""
HEAD = "lm_head"


def write_place(
    folder: Path, *, vocabulary: int = VOCABULARY, teacher_vocabulary: int | None = None, targets: tuple[str, ...] = ()
) -> None:
    """`model`; `teacher`, wider and with more layers; `adapter`, with B drawn; `taught.jsonl`, with the teacher's
    tokens.

    Args:
        targets: modules with adapters beside those of layers.
    """
    write_model(folder / "model")
    names = (folder / "model").glob("*token*")
    tokenizer = {path.name: path.read_bytes() for path in names}
    sizes: dict[str, Any] = {
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "initializer_range": 0.25, "bos_token_id": None, "eos_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(3)
    student = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, hidden_size=32, num_hidden_layers=4, **sizes))
    wide = LlamaConfig(vocab_size=teacher_vocabulary or vocabulary, hidden_size=48, num_hidden_layers=6, **sizes)
    for name, model in (("model", student), ("teacher", LlamaForCausalLM(wide))):
        model.save_pretrained(folder / name)
        for file, content in tokenizer.items():
            (folder / name / file).write_bytes(content)
    modules = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", *targets]
    adapted = get_peft_model(student, LoraConfig(r=3, lora_alpha=6, target_modules=modules, task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder / "adapter")
    write_taught(folder, vocabulary)


def write_taught(folder: Path, vocabulary: int) -> None:
    """Writes the records."""
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    generator = torch.Generator().manual_seed(1)
    lines = []
    for number in range(TEXTS):
        ids = torch.randint(0, vocabulary, (6 + number,), generator=generator)
        prompt = 2 + number % 3
        with torch.no_grad():
            logps = teacher(ids[None]).logits[0, :-1, :vocabulary].log_softmax(-1)
        best = logps.topk(MOST - number % 2)
        record = {
            "input_ids": ids.tolist(), "labels": [-100] * prompt + ids[prompt:].tolist(),
            "target_token_ids": best.indices[prompt - 1 :].tolist(),
            "target_logprobs": best.values[prompt - 1 :].tolist(),
        }  # fmt: skip
        lines.append(json.dumps(record) + "\n")
    (folder / "taught.jsonl").write_text("".join(lines), encoding="utf-8")


def taught_settings(folder: Path, **changes: object) -> dict[str, object]:
    """Options of a run on the records; those of `changes` with __ for the point."""
    modules = json.loads((folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))["target_modules"]
    settings: dict[str, object] = {
        "model.path": folder / "model", "model.dtype": "float32", "lora.init_from": folder / "adapter",
        "lora.rank": 3, "lora.alpha": 6, "lora.targets": json.dumps(sorted(modules)), "objective.name": "distillation",
        "data.train": folder / "taught.jsonl", "data.seq_length": 16, "train.steps": 1,
        "train.global_batch_size": TEXTS, "train.micro_batch_size": 2, "optim.schedule": "constant",
        "log.peak_tflops": 0, "checkpoint.dir": folder / "run",
    }  # fmt: skip
    return settings | {name.replace("__", "."): value for name, value in changes.items()}


def engine_step(
    settings: dict[str, object], kept: list[Any] | None = None
) -> tuple[float, dict[str, float], list[NamedShard]]:
    """The loss of the first step, the objective's figures, and this rank's parts of the gradients before clipping.

    Args:
        kept: gets the run.
    """
    gradients: list[NamedShard] = []
    with ExitStack() as opened:
        run = prepared(settings, opened)
        update = run.training.optimizer.step

        def recorded(*arguments: Any) -> Any:
            shards = run.training.optimizer.flat.gradient_shards()
            gradients.extend(shard._replace(tensor=shard.tensor.clone()) for shard in shards)
            return update(*arguments)

        run.training.optimizer.step = recorded  # type: ignore[method-assign]
        if kept is not None:
            kept.append(run)
        (rows,) = run.source.stream(0, 0, 1)
        result = run.training.step(rows.batches, rows.targets, run.step_plan.rate(0))
        return float(result.loss), run.training.objective.named(result.metrics.tolist()), gradients


def stock_step(folder: Path, loss: Any, *, teacher: bool = False) -> tuple[float, dict[str, Tensor]]:
    """The mean of `loss` over all targets of the records, and the gradients of the adapters by the engine's names, by
    transformers and PEFT in fp64.

    Args:
        loss: (logits at targets [n, V], the teacher's or None, the record, its targets) -> a sum.
        teacher: whether the teacher's logits are computed.
    """
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "model"), folder / "adapter", is_trainable=True
    ).double()
    judge = AutoModelForCausalLM.from_pretrained(folder / "teacher").double() if teacher else None
    records = [json.loads(line) for line in (folder / "taught.jsonl").read_text(encoding="utf-8").splitlines()]
    total, count = torch.zeros((), dtype=torch.float64), 0
    for record in records:
        ids, labels = torch.tensor([record["input_ids"]]), torch.tensor(record["labels"])[1:]
        held = labels != -100
        logits = model(ids).logits[0, :-1][held]
        with torch.no_grad():
            given = None if judge is None else judge(ids).logits[0, :-1, : logits.shape[1]][held]
        total = total + loss(logits, given, record, labels[held])
        count += int(held.sum())
    mean = total / count
    mean.backward()
    trained = [(name, value) for name, value in model.named_parameters() if "lora_" in name]
    return float(mean.detach()), {_engine_name(name): value.grad.float() for name, value in trained}


def _engine_name(name: str) -> str:
    return engine_name(name) if "layers" in name else f"{HEAD}.{name.split(f'{HEAD}.')[1].split('.')[0]}"


def top_loss(temperature: float, share: float, bucket: bool) -> Any:
    """The loss of `engine.distillation.losses` over a teacher's tokens, written with torch alone."""

    def loss(logits: Tensor, given: None, record: dict[str, Any], labels: Tensor) -> Tensor:
        ids, logps = (
            torch.tensor(record["target_token_ids"]),
            torch.tensor(record["target_logprobs"], dtype=logits.dtype),
        )
        own = (logits / temperature).log_softmax(-1).gather(1, ids)
        if bucket:
            own = torch.cat((own, torch.log1p(-own.exp().sum(1, keepdim=True))), 1)
            logps = torch.cat((logps, torch.log1p(-logps.exp().sum(1, keepdim=True))), 1)
        else:
            logps = (logps / temperature).log_softmax(1)
        divergence = (logps.exp() * (logps - own)).sum()
        return (1 - share) * divergence + share * cross_entropy(logits, labels, reduction="sum")

    return loss


def layout_step(folder: str, changes: dict[str, object]) -> tuple[float, dict[str, float], list[NamedShard]]:
    """`engine_step` of a run on the records in a folder, for ranks."""
    return engine_step(taught_settings(Path(folder)) | changes)
