"""Trains LoRA on text for two steps, and writes as JSON which modules that loaded: python text_run.py TREE OUT

A program of its own, so that it counts from an empty interpreter and can run another checkout than its own. It takes
nothing from `tests`: the model is a random Llama of two layers, the tokenizer one word per letter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

OURS = ("engine", "rankfold", "triton_kernels")
WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
LAYER = {
    "self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
    "input_layernorm": (16,), "post_attention_layernorm": (16,),
}  # fmt: skip


def counted_run(tree: Path) -> dict[str, Any]:
    """Runs this program on a checkout.

    Returns:
        "trainer" and "run": the paths of the files that importing `engine.training.trainer` alone, and the whole run,
        have loaded, by module name and relative to `tree`; "decoders": how many decoders the run built; "compiler":
        whether it imported torch's, which takes seconds; "rows": the functions that the run executed from the call of
        `build_data` until it had rows, as "path:name", in the order of their first calls.

    Raises:
        CalledProcessError: the run failed.
    """
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        out = Path(folder) / "modules.json"
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-P", __file__, str(tree), str(out)]
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=sys.stderr)
        counted: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return counted


def loaded(tree: Path) -> dict[str, str]:
    """Returns the files of the modules of `tree` that are loaded now, by name."""
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    ours = {name: Path(file) for name, file in files.items() if file and name.partition(".")[0] in OURS}
    return {name: file.relative_to(tree).as_posix() for name, file in sorted(ours.items())}


class RowsTrace:
    """Notes the functions of the engine that run from the call of `build_data` until `TokenDataset.__init__` returns.

    A profiling function of `sys.setprofile`, so that it sees one branch, the one that was taken. Functions without a
    name of their own, and those that run while a module is imported, are left out.
    """

    def __init__(self, tree: Path) -> None:
        self._root, self._engine = f"{tree}/", f"{tree}/engine/"
        self._codes: set[CodeType] = set()
        self.functions: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "return" and self._codes and code.co_qualname == "TokenDataset.__init__":
            sys.setprofile(None)
        if event != "call" or code in self._codes or not (self._codes or code.co_qualname == "build_data"):
            return
        self._codes.add(code)
        is_function = code.co_flags & CO_OPTIMIZED and not code.co_name.startswith("<")
        if is_function and code.co_filename.startswith(self._engine) and not self._imports(frame):
            self.functions.append(f"{code.co_filename.removeprefix(self._root)}:{code.co_qualname}")

    def _imports(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(self._engine):
                return True
            frame = frame.f_back
        return False


def write_model(folder: Path) -> None:
    """Writes a checkpoint and its tokenizer as transformers has them."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (32, 16), "lm_head": (32, 16), "model.norm": (16,)}
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()}
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.add_special_tokens(WORDS[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")


def main() -> None:
    tree, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    import engine.training.trainer  # noqa: F401

    after_import = loaded(tree)
    from engine.models.decoder import Decoder

    built, construct = [0], Decoder.__init__

    def counting(self: Decoder, *args: Any, **kwargs: Any) -> None:
        built[0] += 1
        construct(self, *args, **kwargs)

    Decoder.__init__ = counting  # type: ignore[method-assign]
    folder = out.parent
    write_model(folder / "model")
    records = [{"text": "abcdefgh" * (1 + index % 3)} for index in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    options = {
        "model.path": folder / "model", "data.train": folder / "train.jsonl", "data.seq_length": 32,
        "data.num_workers": 0, "lora.rank": 2, "train.steps": 2, "train.global_batch_size": 2,
        "checkpoint.dir": folder / "run",
    }  # fmt: skip
    sys.argv = ["rankfold train", *(f"--{name}={value}" for name, value in options.items())]
    from rankfold.train import main as train

    trace = RowsTrace(tree)
    sys.setprofile(trace)
    train()
    counted = {
        "trainer": after_import,
        "run": loaded(tree),
        "decoders": built[0],
        "compiler": "torch._dynamo" in sys.modules,
        "rows": trace.functions,
    }
    out.write_text(json.dumps(counted), encoding="utf-8")


if __name__ == "__main__":
    main()
