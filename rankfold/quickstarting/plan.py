"""The steps of the quickstart, as commands of this installation."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from rankfold.quickstarting.steps import Step

HERE = Path(__file__).resolve().parent
ENGINE = HERE.parents[1] / "engine"
RANKS = 2
LONGEST_ROW = 512
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
ONE_THREAD = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or RANKS) // RANKS))}


class Plan:
    """The steps, as commands.

    Args:
        options: the command line.
        out: where everything goes.
    """

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self._options, self.out = options, out
        self.is_own = options.model is not None
        self.base = options.model.resolve() if self.is_own else out / "base"
        self.pretrain_run, self.lora_run = out / "pretrain", out / "lora"
        self.partitioned, self.adapter, self.merged = out / "partitioned", out / "adapter", out / "merged"
        self.data, self.comparison = out / "data", out / "comparison.json"

    def steps(self) -> list[Step]:
        first = [self._split()] if self.is_own else [self._text(), self._pretrain(), self._export_base(), self._ask()]
        return [*first, self._import(), self._lora(), self._export_adapter(), self._compare()]

    def _module(self, name: str, *arguments: object) -> tuple[str, ...]:
        return (sys.executable, "-m", f"{__package__}.{name}", *map(str, arguments))

    def _convert(self, *arguments: object) -> tuple[str, ...]:
        return (sys.executable, "-m", "rankfold", "convert", *map(str, arguments))

    def _train(self, *arguments: object) -> tuple[str, ...]:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
        return (sys.executable, *launcher, "-m", "rankfold", "train", *map(str, arguments))

    def _split(self) -> Step:
        return Step(
            name="split",
            title=f"hold out a part of {self._options.data.name}",
            commands=(self._module("split_data", "--data", self._options.data.resolve(), "--out", self.data),),
            inputs=(HERE / "split_data.py", self._options.data, self.base),
            outputs=(self.data,),
        )

    def _text(self) -> Step:
        return Step(
            name="text",
            title="text of the Python reference, and a tokenizer trained on it",
            commands=(self._module("make_text", "--out", self.out / "text"),),
            inputs=(HERE / "make_text.py", HERE / "reference_text.py"),
            outputs=(self.out / "text",),
            environment=QUIET,
        )

    def _pretrain(self) -> Step:
        paths = ("--model.path", self.out / "text" / "model", "--data.train", self.out / "text" / "text.txt")
        steps = self._options.pretrain_steps
        more = () if steps is None else ("--train.steps", steps, "--optim.warmup_steps", min(30, steps))
        config = HERE / "pretrain.yaml"
        return Step(
            name="pretrain",
            title=f"pretrain a small Llama, every parameter, {RANKS} data-parallel ranks",
            commands=(self._train("--config", config, *paths, "--checkpoint.dir", self.pretrain_run, *more),),
            inputs=(config,),
            outputs=(self.pretrain_run,),
            environment=QUIET | ONE_THREAD,
        )

    def _export_base(self) -> Step:
        return Step(
            name="export_base",
            title="write it as a Hugging Face checkpoint",
            commands=(
                self._convert(
                    "export", "--source", self.pretrain_run, "--out", self.base, "--format", "hf", "--overwrite"
                ),
            ),
            outputs=(self.base,),
            environment=QUIET,
        )

    def _ask(self) -> Step:
        return Step(
            name="questions",
            title="questions and answers made from the text",
            commands=(self._module("make_questions", "--out", self.data),),
            inputs=(HERE / "make_questions.py",),
            outputs=(self.data,),
        )

    def _import(self) -> Step:
        return Step(
            name="import",
            title=f"partition the checkpoint for {RANKS} tensor-parallel ranks",
            commands=(
                self._convert(
                    "import", "--source", self.base, "--out", self.partitioned, "--tensor", RANKS, "--overwrite"
                ),
                self._convert("inspect", self.partitioned),
            ),
            outputs=(self.partitioned,),
            environment=QUIET,
        )

    def row_length(self) -> int:
        """Tokens in a row of the LoRA training: what is usual, but no more than the model can take."""
        if not self.is_own:
            return 128
        config = json.loads((self.base / "config.json").read_text(encoding="utf-8"))
        return min(LONGEST_ROW, int(config.get("max_position_embeddings", LONGEST_ROW)))

    def _lora(self) -> Step:
        paths = ("--model.path", self.partitioned, "--checkpoint.dir", self.lora_run)
        files = ("--data.train", self.data / "train.jsonl", "--data.validation", self.data / "validation.jsonl")
        layout = ("--data.seq_length", self.row_length(), "--parallel.tensor", RANKS)
        config = HERE / "lora.yaml"
        return Step(
            name="lora",
            title=f"train a LoRA adapter, {RANKS} tensor-parallel ranks with sequence parallelism",
            commands=(self._train("--config", config, *paths, *files, *layout, *self._options.lora_options),),
            inputs=(config,),
            outputs=(self.lora_run,),
            environment=QUIET | ONE_THREAD,
        )

    def _export_adapter(self) -> Step:
        run = ("export", "--source", self.lora_run, "--overwrite", "--out")
        return Step(
            name="export_adapter",
            title="export the adapter and the merged model",
            commands=(
                self._convert(*run, self.adapter, "--format", "peft"),
                self._convert(*run, self.merged, "--format", "hf", "--merge"),
            ),
            outputs=(self.adapter, self.merged),
            environment=QUIET,
        )

    def _compare(self) -> Step:
        models = ("--base", self.base, "--adapter", self.adapter, "--merged", self.merged, "--run", self.lora_run)
        return Step(
            name="compare",
            title="open both with transformers and PEFT, compare logits, answer questions",
            commands=(self._module("compare", *models, "--out", self.comparison),),
            inputs=(HERE / "compare.py", HERE / "answers.py"),
            outputs=(self.comparison,),
            # threads that wait for each other at every small product would slow the small model down
            environment=QUIET if self.is_own else QUIET | ONE_THREAD,
        )
