"""The parts of the first hour on a machine with a GPU: their commands and requirements. Does not import torch."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rankfold.benchmarking.small_run import SMALL_HYBRID, SMALL_LLAMA, SMALL_MIXTURE, write_small_run

ROOT = Path(__file__).resolve().parents[3]
PRESET = "--preset llama3-8b"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the first hour: one command.

    Args:
        name: of the part and, with its number, of its files.
        tool: "tests" for pytest, "plan" and "train" for these commands of `rankfold`, or a section of `rankfold
            benchmark`.
        arguments: of the tool, without the destinations of results. RUN is the folder of a small run that is
            written before, EXPERTS and HYBRID the same of a mixture of experts and of a model with states.
        gpus: GPUs that it needs.
        memory: GiB that a GPU needs for it.
        capability: the least compute capability of a GPU that has the products for it.
        early: among the first, which together tell in ten minutes whether the engine runs here, and how fast.
        on_cpu: arguments in a smoke test, of sizes that a CPU finishes in seconds; "" where there is none.
        seconds: that it may take.
        marks: pytest's marker expression, of tests.
    """

    name: str
    tool: str
    arguments: str = ""
    gpus: int = 1
    memory: int = 0
    capability: tuple[int, int] = (0, 0)
    early: bool = False
    on_cpu: str = ""
    seconds: float = 540.0
    marks: str = "gpu"

    def command(self, stem: Path) -> list[str]:
        """Returns the whole command; its results begin with `stem`."""
        if self.tool == "tests":
            # the project's own pytest options need pytest-timeout, which a machine with a GPU may lack
            return [
                sys.executable, "-m", "pytest", "-v", "--tb=short", "--maxfail=20", "-m", self.marks, "-o", "addopts=",
                "-p", "no:cacheprovider", f"--junitxml={stem}.xml", *self.arguments.split(),
            ]  # fmt: skip
        words = shlex.split(self.arguments)
        for name in _FOLDERS:
            words = [word.replace(name, f"{stem}.run") for word in words]
        if self.tool == "train":
            return [sys.executable, "tools/pretrain_lora.py", *words, "--checkpoint.dir", f"{stem}.run/out"]
        if self.tool == "plan":
            return [
                sys.executable,
                "tools/plan.py",
                *words,
                *(["--json", f"{stem}.json"] if "certify" in words else []),
            ]
        return [
            sys.executable, "tools/benchmark.py", self.tool, *words,
            "--json", f"{stem}.json", "--markdown", f"{stem}.md",
        ]  # fmt: skip

    def prepare(self, stem: Path) -> None:
        """Writes the files that the command reads."""
        for name, sizes in _FOLDERS.items():
            if name in self.arguments:
                write_small_run(Path(f"{stem}.run"), sizes)

    def in_small(self) -> Part:
        """Returns the part as a machine without a GPU runs it: the same tool with the sizes of `on_cpu`."""
        return replace(self, arguments=self.on_cpu, gpus=0, memory=0, capability=(0, 0), marks="not gpu")

    @property
    def packages(self) -> tuple[str, ...]:
        """Names of the packages it imports beside torch, triton, transformers and peft."""
        match self.tool:
            case "machine-speed" | "kernels" | "lora-tax":
                return ()
            case "tests":
                return "pytest", "einops"
            case "plan" | "train":  # they read configurations
                return "einops", "jsonargparse", "docstring_parser"
            case _:
                return ("einops",)


_FOLDERS = {"RUN": SMALL_LLAMA, "EXPERTS": SMALL_MIXTURE, "HYBRID": SMALL_HYBRID}


def _layouts(gpus: int, *layouts: str, experts: bool = False) -> Part:
    """Returns the part that compares a small training on these layouts with that on one GPU. A GPU has products of
    experts in bfloat16 alone."""
    config = "EXPERTS/run.yaml --dtype bfloat16" if experts else "RUN/run.yaml"
    return Part(
        name=f"{'experts' if experts else 'layouts'}-{gpus}-gpus",
        tool="plan",
        arguments=f"certify --config {config} " + " ".join(f"--against {one}" for one in layouts),
        gpus=gpus,
    )


_SEVENTY = "--config examples/llama2_70b_one_gpu/run.yaml --model examples/memory/models/llama-2-70b.json"
_MIXTURE = (
    "--dtype bfloat16 --hidden 2048 --layers 4 --heads 32 --kv-heads 4 --intermediate 768 --experts 64 --per-token 8 "
    "--rank 16 --rows 2 --length 2048 --repeats 5"
)
"""Layers of Qwen3-30B-A3B with half of its experts."""
_ROLLOUTS = (
    "--config RUN/run.yaml --model.dtype bfloat16 --data.train RUN/prompts.jsonl --data.format auto "
    "--objective.name grpo --objective.num_iterations 2 --objective.beta 0.05 --rollout.rewards '[\"regex:77\"]' "
    "--rollout.num_generations 8 --rollout.max_completion_length 32 --rollout.slots 16 "
    "--rollout.steps_per_generation 2 --train.global_batch_size 32 --log.every 1"
)
"""Sampling, scoring and steps on completions, of a model that makes random words."""
_EIGHT = "--config examples/llama3_8b_one_gpu/lora.yaml --model examples/memory/models/llama-3-8b.json"


def _tests(name: str, files: str) -> Part:
    """Returns the part that runs the GPU tests of some files, whose kernels are compiled as they run."""
    return Part(f"test-{name}", "tests", files, seconds=300.0)


_KERNELS = (
    "lora", "rmsnorm", "swiglu", "rope", "head_norm", "dropout", "cross_entropy", "output_gradients", "quantize",
    "formats", "coded_rows", "inputs", "rows", "grouped", "paged_attention", "hybrids",
)  # fmt: skip
_ONE_EACH = " ".join(("--one-each", *(f"tests/kernels/test_triton_{name}.py" for name in _KERNELS)))

_SMALL = "--hidden 64 --heads 4 --kv-heads 2 --layers 2 --intermediate 128 --vocab 256 --device cpu --repeats 2"
_SMALL_STEP = f"{_SMALL} --length 64 --peers none"
_SMALL_ROLLOUTS = (
    "--model.dtype float32 --train.steps 2 --train.global_batch_size 8 --rollout.max_completion_length 4 "
    "--data.seq_length 64"
)
"""Options of smoke tests."""

PARTS = (
    Part("machine-speed", "machine-speed", early=True, seconds=60.0,
         on_cpu="--device cpu --copy-mib 16 --size 256 --repeats 3"),
    Part("test-one-each", "tests", _ONE_EACH, early=True, seconds=240.0,
         on_cpu="--one-each tests/kernels/test_triton_rows.py tests/kernels/test_triton_rope.py"),
    Part("graph", "graph", "--dtype bfloat16", early=True, seconds=150.0,
         on_cpu=f"{_SMALL} --dtype float32 --lengths 64 --documents 2"),
    Part("step", "step", f"{PRESET} --peers none --repeats 10", early=True, seconds=150.0, on_cpu=_SMALL_STEP),
    Part("step-packed", "step", f"{PRESET} --peers none --repeats 10 --documents 8", early=True, seconds=120.0,
         on_cpu=f"{_SMALL_STEP} --documents 2"),
    Part("experts", "experts", f"{_MIXTURE} --peers none", early=True, seconds=120.0,
         on_cpu=f"{_SMALL_STEP} --experts 4 --per-token 2"),
    Part("rollouts", "train", _ROLLOUTS, early=True, seconds=150.0, on_cpu=f"{_ROLLOUTS} {_SMALL_ROLLOUTS}"),
    Part("decode", "decode", f"{PRESET} --repeats 3", early=True, seconds=120.0,
         on_cpu=f"{_SMALL} --prompt 8 --new 4 --batches 2"),
    Part("tower", "tower", "--dtype bfloat16 --images 8 --layers 27", early=True, seconds=150.0,
         on_cpu="--device cpu --images 2 --side 56 --layers 2 --width 64 --heads 4 --mlp 128 --repeats 2"),
    _tests("lora", "tests/kernels/test_triton_lora.py"),
    _tests("norms", "tests/kernels/test_triton_rmsnorm.py tests/kernels/test_triton_head_norm.py"),
    _tests("swiglu", "tests/kernels/test_triton_swiglu.py tests/kernels/test_triton_output_gradients.py"),
    _tests("encoded", "tests/kernels/test_triton_quantize.py tests/kernels/test_triton_encoded_base.py"),
    _tests("formats", "tests/kernels/test_triton_formats.py tests/kernels/test_triton_coded_rows.py "
           "tests/kernels/test_triton_inputs.py"),
    _tests("elementwise", "tests/kernels/test_triton_rope.py tests/kernels/test_triton_dropout.py "
           "tests/kernels/test_triton_rows.py tests/kernels/test_triton_partial_sums.py "
           "tests/kernels/test_triton_aligned.py"),
    _tests("loss", "tests/kernels/test_triton_cross_entropy.py tests/kernels/test_linear_cross_entropy.py "
           "tests/kernels/test_extreme_scores.py"),
    _tests("generation", "tests/kernels/test_triton_paged_attention.py tests/kernels/test_triton_sampling.py "
           "tests/kernels/test_triton_backend.py"),
    _tests("hybrids", "tests/kernels/test_triton_hybrids.py tests/kernels/test_triton_branches.py"),
    _tests("grouped", "tests/kernels/test_triton_grouped.py"),
    _tests("training", "tests/kernels/test_triton_training.py"),
    _tests("graphs", "tests/unit/test_cuda_graph.py tests/unit/test_decode_graphs.py "
           "tests/unit/test_varlen_attention.py tests/unit/test_varlen_branches.py"),
    _tests("memory", "tests/unit/test_saved_offload.py tests/unit/test_offload_memory.py "
           "tests/unit/test_gradient_sink.py tests/unit/test_optim_backends.py"),
    _tests("attention", "tests/unit/test_ops_attention.py tests/unit/test_ops_attention_blocks.py "
           "tests/unit/test_ops_bidirectional.py "
           "tests/unit/test_ops_apex.py"),
    Part("check-kernels", "kernels", "--repeats 0 --only norm,swiglu,low-rank,dropout,head,attention"),
    Part("states", "kernels", "--only states"),
    Part("check-encoded", "kernels", "--repeats 0 --only quantize"),
    Part("check-lora-tax", "lora-tax", "--repeats 0"),
    Part("product", "kernels", "--only product"),
    Part("elementwise", "kernels", "--only norm,swiglu,rope"),
    Part("attention", "kernels", "--only attention"),
    Part("head", "kernels", "--only loss,head"),
    Part("encoded", "kernels", "--only quantize"),
    Part("step-fp8", "step", f"{PRESET} --peers none --repeats 10 --base-dtype fp8", capability=(8, 9)),
    Part("step-nf4", "step", f"{PRESET} --peers none --repeats 10 --base-dtype nf4"),
    Part("step-peft", "step", f"{PRESET} --rows 1 --peers peft --repeats 10"),
    Part("step-liger", "step", f"{PRESET} --rows 1 --peers liger --repeats 10"),
    Part("experts-peft", "experts", f"{_MIXTURE} --peers peft-experts"),
    Part("experts-nf4", "experts", f"{_MIXTURE} --peers none --base-dtype nf4"),
    Part("train-experts", "train", "--config EXPERTS/run.yaml --model.dtype bfloat16"),
    Part("train-hybrid", "train", "--config HYBRID/run.yaml --model.dtype bfloat16"),
    Part("rollouts-launched", "train", f"{_ROLLOUTS} --rollout.cuda_graph none"),
    Part("rollouts-hybrid", "train", _ROLLOUTS.replace("RUN", "HYBRID")),
    Part("lora-tax", "lora-tax"),
    Part("memory", "memory", f"{PRESET} --peers peft"),
    Part("memory-8b", "plan", f"memory {_EIGHT} --gpu-memory 80 --measure", memory=76),
    Part("memory-70b", "plan", f"memory {_SEVENTY} --gpu-memory 139 --measure", memory=136),
    _layouts(2, "tensor=2,sequence=true", "tensor=2,sequence=false", "pipeline=2", "context=2", "data=2",
             "data=2,parallel.shard=parameters"),
    _layouts(8, "tensor=8", "tensor=2,pipeline=2,data=2", "tensor=2,context=2,data=2,parallel.shard=optimizer",
             "pipeline=4,virtual=1,data=2", "data=8,parallel.shard=parameters"),
    _layouts(2, "tensor=2", "data=2,parallel.expert=2", "tensor=2,parallel.expert=2", experts=True),
    _layouts(8, "data=8,parallel.expert=8", "tensor=2,pipeline=2,data=2,parallel.expert=2", experts=True),
)  # fmt: skip
"""In order: the first ten minutes; then correctness, the measurements that decide how kernels run, whole steps, and
several GPUs."""
