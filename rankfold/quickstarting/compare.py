"""The proof: transformers and PEFT open what was exported, and their logits are those of the engine.

    python -m rankfold.quickstarting.compare --base HF_DIR --adapter ADAPTER_DIR --merged HF_DIR --run RUN_DIR \
        --out comparison.json

Three times the same numbers, on rows of the validation data: the engine's model as it was trained, the base with the
adapter in PEFT, and the merged model in transformers; all in float32 in this one process. Ends with an error where they
differ, or where the adapter changes nothing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.checkpoint.run.step_folders import latest_checkpoint
from engine.config.command_line import CommandLine
from engine.config.load import from_yaml
from engine.config.run import RunConfig
from engine.data.collate import build_batch
from engine.data.dataset import TokenDataset
from engine.data.text_reader import build_texts
from engine.data.tokenizer import load_tokenizer
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.build import build_training
from engine.training.start_model import check_model, model_source
from engine.training.state import load_state
from rankfold.quickstarting.answers import answer, most_different, prompts

ROWS, QUESTIONS = 4, 3
CANDIDATES = 24
"""Questions that a small model is asked, to show the few whose answers have the least in common."""
SMALL = 50_000_000
"""Parameters of a model that answers so many in seconds."""
TOLERANCE = 1e-3
"""Largest difference between two float32 logits that rounding may explain."""
ROUNDED_TOLERANCE = 0.05
"""The same for a model whose file holds 16-bit weights, where merging rounds: a share of the largest logit."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Logits [tokens, vocabulary] of the same rows."""

    engine: Tensor
    peft: Tensor
    merged: Tensor
    base: Tensor


def run_config(run: Path) -> RunConfig:
    """The configuration of a run, changed to one process and float32."""
    config = from_yaml((run / "config.yaml").read_text(encoding="utf-8"))
    return replace(
        config,
        model=replace(config.model, dtype="float32"),
        parallel=replace(config.parallel, tensor=1),
        train=replace(config.train, micro_batch_size=1, global_batch_size=1),
    )


@torch.no_grad()
def engine_logits(config: RunConfig, run: Path, dataset: TokenDataset) -> Tensor:
    """Returns the logits of the model as it was trained, from the run's last checkpoint."""
    log = Log(rank=1)  # what it says was said by the training
    launch = Launch(rank=0, world_size=1, device=torch.device("cpu"))
    source = model_source(config)
    training = build_training(config, launch, source, check_model(config, source.model, weights=source.weights), log)
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None, f"{run} has no checkpoint"
    load_state(checkpoint, config, training)
    model, logits = training.parts[0], []
    for row in range(min(ROWS, len(dataset))):
        batch = build_batch(dataset, [row], range(1), length=int(dataset.row_lengths[row]))
        context = model.context(batch, training.stages.step, training=False)
        logits.append(model.logits(model.run_layers(model.embed(batch), context), context))
    return torch.cat(logits)[:, : model.config.vocab_size]


@torch.no_grad()
def transformers_logits(model: nn.Module, dataset: TokenDataset) -> Tensor:
    """Returns the logits of the same rows through a model of transformers or PEFT."""
    rows = [torch.from_numpy(tokens.astype("int64")) for row in range(ROWS) for tokens in _row(dataset, row)]
    return torch.cat([model(input_ids=row[None]).logits[0] for row in rows])


def _row(dataset: TokenDataset, row: int) -> list:
    return [tokens for tokens, _ in dataset.documents(row)] if row < len(dataset) else []


def differences(sides: Sides, is_rounded: bool) -> dict[str, float]:
    """Largest differences between the sides; ends the process where one is too large.

    Args:
        is_rounded: the merged model was written in 16 bits.
    """
    found = {
        "engine_and_peft": float((sides.engine - sides.peft).abs().max()),
        "engine_and_merged": float((sides.engine - sides.merged).abs().max()),
        "peft_and_merged": float((sides.peft - sides.merged).abs().max()),
    }
    largest = float(sides.peft.abs().max())
    change = float((sides.peft - sides.base).abs().max())
    for name, value in found.items():
        allowed = ROUNDED_TOLERANCE * largest if is_rounded and "merged" in name else TOLERANCE
        print(
            f"largest difference of logits, {name.replace('_', ' ')}: {value:.2e} (allowed {allowed:.0e})", flush=True
        )
        if not value <= allowed:
            sys.exit(
                f"error: the logits of {name.replace('_', ' ')} differ by {value:.2e}, which is more than rounding."
            )
    print(f"the adapter changes logits by up to {change:.2f}; the largest logit is {largest:.1f}")
    if change <= 10 * TOLERANCE:
        sys.exit(
            f"error: the adapter changes no logit by more than {change:.1e}, so there is nothing that was compared."
        )
    return {**found, "adapter_and_base": change, "largest_logit": largest}


def main() -> None:
    parser = CommandLine(description="Compare the exported models with the trained one, and ask them.")
    for name in ("base", "adapter", "merged", "run", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    paths = parser.parse_args()
    from peft import PeftModel  # of an extra: the other modules of this package do without

    config = run_config(paths.run)
    tokenizer = load_tokenizer(paths.base)
    assert config.data.validation is not None
    dataset = build_texts(
        config.data.validation,
        tokenizer=tokenizer,
        data_format=config.data.format,
        seq_length=config.data.seq_length,
        mask_prompt=config.data.mask_prompt,
    )
    torch.set_grad_enabled(False)
    base = AutoModelForCausalLM.from_pretrained(paths.base, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(paths.merged, dtype=torch.float32)
    from_base = transformers_logits(base, dataset)
    questions = prompts(dataset, CANDIDATES if merged.num_parameters() < SMALL else QUESTIONS)
    adapted = [answer(merged, question, tokenizer) for question in questions]
    answers = [
        {
            "question": tokenizer.decode(questions[place]),
            "base": answer(base, questions[place], tokenizer),
            "adapted": adapted[place],
        }
        for place in most_different(adapted, QUESTIONS)
    ]
    sides = Sides(
        engine=engine_logits(config, paths.run, dataset),
        peft=transformers_logits(PeftModel.from_pretrained(base, paths.adapter), dataset),
        merged=transformers_logits(merged, dataset),
        base=from_base,
    )
    stored = json.loads((paths.merged / "config.json").read_text(encoding="utf-8"))
    is_rounded = (stored.get("dtype") or stored.get("torch_dtype") or "float32") != "float32"
    found = differences(sides, is_rounded)
    result = {"logits": found, "tokens_compared": len(sides.engine), "answers": answers}
    paths.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
