"""The quickstart: a Hugging Face checkpoint in, a LoRA adapter and a merged model out, and the proof that they agree.

Started by run.sh with whatever Python there is, so it needs the standard library alone; what it starts runs in .venv.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from steps import Runner, Step, StepFailed, fingerprint
from summary import print_summary

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
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


def parse_arguments() -> argparse.Namespace:
    """The command line, checked before anything is installed or run."""
    parser = argparse.ArgumentParser(
        prog="run.sh",
        description="Trains a LoRA adapter on two ranks, exports it, and compares it with transformers and PEFT. "
        "Without options it makes a small model of its own from the Python reference. Run again, it continues where it "
        "stopped and leaves out what is done.",
        epilog="Options behind -- go to the LoRA training: run.sh --model M --data D -- --optim.lr 1e-4",
    )
    parser.add_argument("--model", type=Path, metavar="HF_DIR", help="your own Hugging Face model (with --data)")
    parser.add_argument("--data", type=Path, metavar="FILE.jsonl", help="your own records (with --model)")
    parser.add_argument("--out", type=Path, help="folder for everything that is made (default: out beside run.sh)")
    parser.add_argument("--fresh", action="store_true", help="remove that folder and start over")
    parser.add_argument("--pretrain-steps", type=int, metavar="N", help="steps of the small model's pretraining")
    parser.add_argument("--python", metavar="PATH", help="use this interpreter, install nothing")
    parser.error = lambda message: refuse(f"{message}; run.sh --help lists the options.")  # type: ignore[method-assign]
    arguments, more = sys.argv[1:], []
    if "--" in arguments:
        more = arguments[arguments.index("--") + 1 :]
        arguments = arguments[: arguments.index("--")]
    options = parser.parse_args(arguments)
    options.lora_options = tuple(more)
    check_arguments(options)
    return options


def check_arguments(options: argparse.Namespace) -> None:
    """One sentence for what cannot work."""
    if (options.model is None) != (options.data is None):
        given, missing = ("--model", "--data") if options.data is None else ("--data", "--model")
        refuse(f"{given} was given without {missing}, but your own run needs both: add {missing}.")
    if options.model is not None:
        if not (options.model / "config.json").is_file():
            refuse(f"--model {options.model} has no config.json: give the folder of a Hugging Face model.")
        if not options.data.is_file() or options.data.suffix != ".jsonl":
            refuse(f"--data {options.data} is not a .jsonl file: give a file with one JSON record a line.")
        if options.pretrain_steps is not None:
            refuse("--pretrain-steps is for the small model of the quickstart, and --model replaces it: leave one out.")
    if options.pretrain_steps is not None and options.pretrain_steps < 1:
        refuse(f"--pretrain-steps is {options.pretrain_steps}, but 1 or more is expected: use for example 600.")


def refuse(sentence: str) -> NoReturn:
    """Ends with one sentence."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


class Plan:
    """The steps, as commands.

    Args:
        options: the command line.
        out: where everything goes.
    """

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self._options, self.out = options, out
        self.is_own = options.model is not None
        self.python = options.python or str(ROOT / ".venv" / "bin" / "python")
        self.base = options.model.resolve() if self.is_own else out / "base"
        self.pretrain_run, self.lora_run = out / "pretrain", out / "lora"
        self.partitioned, self.adapter, self.merged = out / "partitioned", out / "adapter", out / "merged"
        self.data, self.comparison = out / "data", out / "comparison.json"

    def steps(self) -> list[Step]:
        first = [self._split()] if self.is_own else [self._text(), self._pretrain(), self._export_base(), self._ask()]
        rest = [self._import(), self._lora(), self._export_adapter(), self._compare()]
        return ([] if self._options.python else [self._install()]) + first + rest

    def _script(self, name: str, *arguments: object) -> tuple[str, ...]:
        return (self.python, str(HERE / name), *map(str, arguments))

    def _convert(self, *arguments: object) -> tuple[str, ...]:
        return (self.python, str(ROOT / "tools" / "convert.py"), *map(str, arguments))

    def _train(self, *arguments: object) -> tuple[str, ...]:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
        return (self.python, *launcher, str(ROOT / "tools" / "pretrain_lora.py"), *map(str, arguments))

    def _install(self) -> Step:
        command = ("bash", str(ROOT / "tools" / "setup_venv.sh"), "peft")
        return Step(name="install", title="install into .venv", commands=(command,), always=True)

    def _split(self) -> Step:
        return Step(
            name="split",
            title=f"hold out a part of {self._options.data.name}",
            commands=(self._script("split_data.py", "--data", self._options.data.resolve(), "--out", self.data),),
            inputs=(HERE / "split_data.py", self._options.data, self.base),
            outputs=(self.data,),
        )

    def _text(self) -> Step:
        return Step(
            name="text",
            title="text of the Python reference, and a tokenizer trained on it",
            commands=(self._script("make_text.py", "--out", self.out / "text"),),
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
            commands=(self._script("make_questions.py", "--out", self.data),),
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
            commands=(self._script("compare.py", *models, "--out", self.comparison),),
            inputs=(HERE / "compare.py", HERE / "answers.py"),
            outputs=(self.comparison,),
            # threads that wait for each other at every small product would slow the small model down
            environment=QUIET if self.is_own else QUIET | ONE_THREAD,
        )


def main() -> int:
    options = parse_arguments()
    is_own = options.model is not None
    out = (options.out or HERE / "out" / ("own" if is_own else "reference")).resolve()
    if options.fresh and out.exists():
        if not (out / "stamps").is_dir():
            refuse(
                f"--fresh would remove {out}, which no quickstart has made: give another --out, or remove it yourself."
            )
        shutil.rmtree(out)
    plan = Plan(options, out)
    steps = plan.steps()
    # A newer engine or another Python may give other results, so then everything runs again.
    engine = fingerprint(sorted((ROOT / "engine").rglob("*.py")) + [ROOT / "constraints.txt"])
    started = time.monotonic()
    runner = Runner(out, len(steps), f"{engine} {sys.version_info[:2]}")
    # A plain kill ends the step's processes as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for step in steps:
            runner.run(step)
    except StepFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: the same command continues from here", file=sys.stderr)
        return 130
    print_summary(plan, runner.done, time.monotonic() - started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
