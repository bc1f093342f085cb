"""A small model, tokenizer, data and adapter that work, for tests that spoil one thing and look at what a user is told.

Commands run in this process, through the function that ends every command line, so that what is seen is the exit status
and what was printed. transformers is not imported unless a case needs it: the tokenizer is a sentencepiece model, the
weights are random.
"""

from __future__ import annotations

import functools
import importlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.telemetry.errors import EXIT_USER_ERROR, run_command

SECONDS = 5.0
"""Processor time, at most, until something that can be known at once is refused; imports are not counted."""

VOCABULARY = 48
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
RECORDS = [{"text": "abab baba abba"}, {"text": "cab bac abc"}, {"text": "aa bb cc"}]


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": (VOCABULARY, 16), "model.norm.weight": (16,)}
    tensors |= {"lm_head.weight": (VOCABULARY, 16)}
    for layer in range(2):
        parts = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16)}
        parts |= {"self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16)}
        parts |= {"mlp.down_proj": (16, 24), "input_layernorm": (16,), "post_attention_layernorm": (16,)}
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return {name: torch.randn(shape) * 0.1 for name, shape in tensors.items()}


def _tokenizer(path: Path) -> None:
    import sentencepiece

    sentences = ["abab baba abba", "cab bac abc", "aa bb cc", "Below is an instruction.", "### Response: {}!?,"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 20), model_prefix=str(path.with_suffix("")), vocab_size=VOCABULARY,
        model_type="char", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    path.with_suffix(".vocab").unlink()


def _adapter(folder: Path) -> None:
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors |= {f"{name}.lora_A.weight": torch.ones(2, 16), f"{name}.lora_B.weight": torch.ones(16, 2)}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


@functools.cache
def _original() -> tempfile.TemporaryDirectory[str]:
    """What every workplace is a copy of."""
    kept = tempfile.TemporaryDirectory(prefix="wrong-inputs-")
    folder = Path(kept.name)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    save_file(_tensors(), model / "model.safetensors", {"format": "pt"})
    _tokenizer(model / "tokenizer.model")
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    _adapter(folder / "adapter")
    return kept


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How a command ended.

    Args:
        status: exit status.
        sentence: what it says went wrong, without "error: ".
        printed: all that it printed.
        seconds: of processor time.
    """

    status: int
    sentence: str
    printed: str
    seconds: float


@dataclass
class Workplace:
    """One case's own copy; cases change its files and `options`.

    Args:
        folder: holds model, adapter and train.jsonl.
        options: of the training command line; None leaves one out.
    """

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    @property
    def train(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def weights(self) -> Path:
        return self.model / "model.safetensors"

    def set(self, **options: Any) -> None:
        """Options with __ for the point: data__train."""
        self.options |= {name.replace("__", "."): value for name, value in options.items()}

    def change_config(self, path: Path | None = None, **changes: Any) -> None:
        """Changes keys of the model's config.json, or of another JSON file; None removes a key."""
        path = path or self.model / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    def change_tensors(self, change: Callable[[dict[str, torch.Tensor]], None], path: Path | None = None) -> None:
        path = path or self.weights
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    def records(self, *records: Any) -> None:
        """The training file, one JSON text a line."""
        self.train.write_text("".join(json.dumps(record) + "\n" for record in records))

    def arguments(self) -> list[str]:
        """Returns the arguments for tools/pretrain_lora.py."""
        return [str(item) for name, value in self.options.items() if value is not None for item in (f"--{name}", value)]


def make_place(folder: Path) -> Workplace:
    """A workplace in `folder`, which does not exist yet, whose run would work."""
    shutil.copytree(_original().name, folder)
    workplace = Workplace(folder=folder)
    workplace.options = {
        "model.path": folder / "model", "data.train": folder / "train.jsonl", "data.seq_length": 16,
        "data.num_workers": 0, "lora.rank": 2, "lora.alpha": 4, "lora.targets": "q_proj", "train.steps": 1,
        "train.global_batch_size": 1, "checkpoint.dir": folder.parent / "run", "log.metrics": "metrics.jsonl",
    }  # fmt: skip
    return workplace


@functools.cache
def _main(tool: str) -> Callable[[], None]:
    """`main` of tools/<tool>.py, with everything imported that it imports when it is called."""
    module = importlib.import_module(f"rankfold.{'train' if tool == 'pretrain_lora' else tool}")
    import engine.conversion.commands
    import engine.training.trainer  # noqa: F401

    main: Callable[[], None] = module.main
    return main


def run_here(tool: str, arguments: list[Any], capture: pytest.CaptureFixture[str]) -> Seen:
    """Runs a command line in this process.

    Raises:
        Exception: what would be a traceback for a user.
    """
    main = _main(tool)
    capture.readouterr()
    before, sys.argv = sys.argv, [f"{tool}.py", *map(str, arguments)]
    begin = time.process_time()
    try:
        with pytest.raises(SystemExit) as ended:
            run_command(main)
    finally:
        sys.argv = before
    seconds = time.process_time() - begin
    captured = capture.readouterr()
    last = captured.err.strip().rpartition("\n")[2]
    return Seen(
        status=int(ended.value.code or 0),
        sentence=last.removeprefix("error: ") if last.startswith("error: ") else "",
        printed=captured.out + captured.err,
        seconds=seconds,
    )


def check_refused(seen: Seen, words: str, *, at_once: bool = True) -> None:
    """One sentence with `words` in it, status 2, nothing read or computed that was not needed to know."""
    assert seen.status == EXIT_USER_ERROR, seen.printed
    assert words in seen.sentence, seen.sentence
    assert "Traceback" not in seen.printed
    assert seen.sentence.endswith((".", ".)", "?")) and len(seen.sentence) < 700, seen.sentence
    if at_once:
        assert seen.seconds < SECONDS, seen.seconds
        assert "reading weights" not in seen.printed, seen.printed
