"""Mistakes that a GPU would punish and the usual tests on a CPU pass, each with the one test that has to fail.

A mistake is a few replacements in the product's files. Each has been made once somewhere, or is easily made: it leaves
the numbers that a CPU computes as they are, or changes them only at sizes that no test has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Edit(NamedTuple):
    """A replacement; `find` is in the file once."""

    file: str
    find: str
    replace: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A mistake.

    Args:
        edits: make it.
        lane: the kind of test that finds it.
        test: pytest's arguments; it fails with the mistake, and passes without.
        said: a regular expression that is found in what the failing test says.
    """

    edits: tuple[Edit, ...]
    lane: str
    test: tuple[str, ...]
    said: str


TABLES = "tests/kernels/test_triton_compile.py::test_kernels_take_what_the_table_says"
GRIDS = "tests/kernels/test_triton_launch.py::test_a_driver_takes_the_grids_of_tall_inputs"
SOURCES = "tests/kernels/test_triton_sources.py::"


def _layout(name: str) -> tuple[str, ...]:
    return "-m", "slow or not slow", f"tests/fake_cuda/test_layouts.py::test_layout[{name}]"


GRAPH = _layout("graph of a step, tensor 2, recomputed")
OFFLOAD = _layout("offloaded activations")
ON_PTX = ("-p", "tests.ptx.plugin", "--ptx", "80", "-m", "slow or not slow")

MISTAKES = {
    # in kernels
    "index of 32 bits": Mistake(
        edits=(
            Edit(
                "triton_kernels/lora.py",
                ".to(tl.int64) * TOKENS + tl.arange(0, TOKENS)\n    ranks_R = tl.program_id(2)",
                " * TOKENS + tl.arange(0, TOKENS)\n    ranks_R = tl.program_id(2)",
            ),
        ),
        lane="source",
        test=(f"{SOURCES}test_what_is_multiplied_by_a_stride_has_64_bits",),
        said=r"lora\._project_kernel: tokens_T",
    ),
    "rows along a grid's second side": Mistake(
        edits=(
            Edit(
                "triton_kernels/swiglu.py",
                "_forward_kernel[(ceil_div(num_tokens, tokens), ceil_div(num_features, features))](",
                "_forward_kernel[(ceil_div(num_features, features), ceil_div(num_tokens, tokens))](",
            ),
            Edit(
                "triton_kernels/swiglu.py",
                "TOKENS: tl.constexpr, FEATURES: tl.constexpr\n):\n"
                "    tokens_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)\n"
                "    features_F = tl.program_id(1) * FEATURES",
                "TOKENS: tl.constexpr, FEATURES: tl.constexpr\n):\n"
                "    tokens_T = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)\n"
                "    features_F = tl.program_id(0) * FEATURES",
            ),
        ),
        lane="stand-in driver",
        test=(GRIDS,),
        said=r"swiglu\._forward_kernel \| 8b .*: \(14, 65537, 1\)",
    ),
    "products fused with sums": Mistake(
        edits=(
            Edit(
                "triton_kernels/quantize.py",
                "        PAIRS=pairs,\n        num_warps=4,\n        enable_fp_fusion=False,\n",
                "        PAIRS=pairs,\n        num_warps=4,\n",
            ),
        ),
        lane="compile tables",
        test=(TABLES,),
        said=r"quantize\._nf4_decode_kernel \| 8b nf4 on sm_90: fuses products with sums",
    ),
    "products of float32 in tf32": Mistake(
        edits=(
            Edit(
                "triton_kernels/launch.py",
                '"PRECISION": "ieee" if dtype == tl.float32 else "tf32"',
                '"PRECISION": "tf32"',
            ),
        ),
        lane="compile tables",
        test=(TABLES,),
        said=r"lora\._project_kernel \| 8b float32 o .* multiplies numbers of fp32 in tf32",
    ),
    "a maximum that drops NaN": Mistake(
        edits=(
            Edit(
                "triton_kernels/quantize.py",
                "    largest = tl.maximum(largest, smallest).to(tl.float32, bitcast=True)\n    inverse",
                "    largest = tl.maximum(largest.to(tl.float32, bitcast=True), 1e-12)\n    inverse",
            ),
        ),
        lane="interpreter",
        test=("-k", "not_finite and cpu", "tests/kernels/test_triton_quantize.py"),
        said=r"test_what_is_not_finite_is_in_the_scale",
    ),
    "stored and loaded without a barrier": Mistake(
        edits=(
            Edit(
                "triton_kernels/swiglu.py",
                "    h_TR = tl.zeros([TOKENS, RANKS], tl.float32)\n    first = tl.program_id(1) * split_length\n",
                "    h_TR = tl.zeros([TOKENS, RANKS], tl.float32)\n    first = tl.program_id(1) * split_length\n"
                "    back_T = tl.program_id(0).to(tl.int64) * TOKENS + TOKENS - 1 - tl.arange(0, TOKENS)\n",
            ),
            Edit(
                "triton_kernels/swiglu.py",
                "features_F[None, :], y_TF, mask=ok_TF)\n        y_TF = y_TF.to(DOT)\n",
                "features_F[None, :], y_TF, mask=ok_TF)\n"
                "        back = y_ptr + back_T[:, None] * y_stride + features_F[None, :]\n"
                "        ok_TF = (back_T < num_tokens)[:, None] & ok_F[None, :]\n"
                "        y_TF = tl.load(back, mask=ok_TF, other=0.0).to(DOT)\n",
            ),
            Edit(
                "triton_kernels/swiglu.py",
                "tokens_T, ok_T, start // 8, (num_features + 7) // 8, FEATURES // 8\n            )\n            y_TF",
                "back_T, back_T < num_tokens, start // 8, (num_features + 7) // 8, FEATURES // 8\n            )\n"
                "            y_TF",
            ),
            Edit(
                "triton_kernels/swiglu.py",
                "split_stride + tokens_T[:, None] * h_stride + ranks_R[None, :]\n"
                "    tl.store(h, h_TR * keep_scale, mask=ok_T[:, None]",
                "split_stride + back_T[:, None] * h_stride + ranks_R[None, :]\n"
                "    tl.store(h, h_TR * keep_scale, mask=(back_T < num_tokens)[:, None]",
            ),
        ),
        lane="PTX",
        test=(*ON_PTX, "-k", "cpu-bfloat16 and project", "tests/kernels/test_triton_swiglu.py"),
        said=r"another warp, with no barrier",
    ),
    "sums by atomic instructions": Mistake(
        edits=(
            Edit(
                "triton_kernels/output_gradients.py",
                "tl.store(db, db_OR, mask=ok_O[:, None] & ok_R[None, :])",
                "tl.atomic_add(db, db_OR, mask=ok_O[:, None] & ok_R[None, :])",
            ),
        ),
        lane="compile tables",
        test=(TABLES,),
        said=r"output_gradients\._output_gradients_kernel .* adds up by atomic instructions",
    ),
    "a masked load of whatever was there": Mistake(
        edits=(
            Edit(
                "triton_kernels/lora.py",
                "            a_ptr + ranks_R[:, None].to(tl.int64) * a_stride + inputs_I[None, :],\n"
                "            mask=ok_R[:, None] & ok_I[None, :],\n            other=0.0,\n",
                "            a_ptr + ranks_R[:, None].to(tl.int64) * a_stride + inputs_I[None, :],\n"
                "            mask=ok_R[:, None] & ok_I[None, :],\n",
            ),
        ),
        lane="source",
        test=(f"{SOURCES}test_masked_loads_say_what_is_masked",),
        said=r"lora\._project_kernel",
    ),
    # in what calls torch's operations
    "document offsets of 64 bits": Mistake(
        edits=(
            Edit(
                "engine/data/collate.py",
                "np.cumsum([0, *trees.lengths], dtype=np.int32)",
                "np.cumsum([0, *trees.lengths], dtype=np.int64)",
            ),
        ),
        lane="fake CUDA",
        test=_layout("packed rows"),
        said=r"_flash_attention_forward at engine/ops/attention/flash_calls.py:\d+ refuses cum_seq_q in torch.int64",
    ),
    "a document's length that is not rounded": Mistake(
        edits=(Edit("engine/ops/attention/flash_calls.py", "return -(-longest // _BLOCK) * _BLOCK", "return longest"),),
        lane="unit",
        test=("-k", "whole_blocks", "tests/unit/test_varlen_attention.py"),
        said=r"test_the_bound_of_the_lengths_is_whole_blocks",
    ),
    "one communicator for two orders": Mistake(
        edits=(
            Edit(
                "engine/distributed/mesh.py",
                'return name if name in self._alone else "", tuple(ranks)',
                'return "", tuple(ranks)',
            ),
        ),
        lane="unit",
        test=("tests/unit/test_mesh.py",),
        said=r"test_the_ends_of_a_pipeline_have_a_group_of_their_own",
    ),
    # in streams, events and graphs
    "a host copy behind another stream": Mistake(
        edits=(
            Edit(
                "engine/layers/host_copies.py",
                "self._passed.record(torch.cuda.current_stream(tensor.device))",
                "self._passed.record(torch.cuda.Stream(tensor.device))",
            ),
        ),
        lane="fake CUDA",
        test=GRAPH,
        said=r"the host reads at .* without having waited for it",
    ),
    "a capture that other threads disturb": Mistake(
        edits=(
            Edit(
                "engine/layers/graph_capture.py",
                'capture_error_mode="thread_local"',
                'capture_error_mode="global"',
            ),
        ),
        lane="fake CUDA",
        test=GRAPH,
        said=r"a capture in the mode global at engine/layers/graph_capture.py",
    ),
    "a capture beside the run's stream": Mistake(
        edits=(Edit("engine/layers/graph_capture.py", "pool=pool, stream=self._stream,", "pool=pool,"),),
        lane="fake CUDA",
        test=GRAPH,
        said=r"a capture's stream",
    ),
    "a graph's input replaced, not copied": Mistake(
        edits=(
            Edit(
                "engine/training/cuda_graph/static_batch.py",
                "            getattr(self.batch, name).copy_(getattr(batch, name), non_blocking=True)\n",
                "            given = getattr(batch, name).to(self.batch.document_offsets.device)\n"
                "            object.__setattr__(self.batch, name, given)\n",
            ),
        ),
        lane="unit",
        test=("tests/unit/test_cuda_graph_inputs.py",),
        said=r"FAILED tests/unit/test_cuda_graph_inputs.py",
    ),
    "fetched before it was sent": Mistake(
        edits=(Edit("engine/layers/host_copies.py", "        self._back.wait_event(sent.event)\n", ""),),
        lane="fake CUDA",
        test=OFFLOAD,
        said=r"without having waited for it",
    ),
    "an event on the wrong stream": Mistake(
        edits=(
            Edit(
                "engine/layers/host_copies.py",
                "return _Copy(host, self._away.record_event())",
                "return _Copy(host, torch.cuda.current_stream(self._device).record_event())",
            ),
        ),
        lane="fake CUDA",
        test=OFFLOAD,
        said=r"without having waited for it",
    ),
    "memory given back while it is copied": Mistake(
        edits=(Edit("engine/layers/host_copies.py", "        tensor.record_stream(self._away)", "        pass"),),
        lane="fake CUDA",
        test=OFFLOAD,
        said=r"record_stream was not called",
    ),
    "a slot filled before its numbers have left": Mistake(
        edits=(
            Edit(
                "engine/optim/host_state.py", "after=(before, piece.sent, *self._last_sent(place)))", "after=(before,))"
            ),
        ),
        lane="fake CUDA",
        test=_layout("offloaded optimizer, sharded parameters"),
        said=r"without having waited for it",
    ),
    # at the edges
    "a view whose numbers lie apart, to NCCL": Mistake(
        edits=(
            Edit(
                "engine/pipeline/runner.py",
                "tensor = self._outputs.pop(transfer.message).contiguous()",
                "tensor = self._outputs.pop(transfer.message).transpose(0, -1)",
            ),
        ),
        lane="fake CUDA",
        test=_layout("1f1b, inner rank"),
        said=r"NCCL takes contiguous tensors",
    ),
    "a grid of no blocks for no rows": Mistake(
        edits=(
            Edit(
                "triton_kernels/swiglu.py",
                "    if y_TF.numel() > 0:\n        features = power_of_2(num_features, 1, 1024)",
                "    if True:\n        features = power_of_2(num_features, 1, 1024)",
            ),
        ),
        lane="fake CUDA",
        test=_layout("experts on 2 ranks, of which one gets no rows"),
        said=r"_forward_kernel is launched at triton_kernels/swiglu.py:\d+ with the grid \(0, ",
    ),
    "a buffer on the host": Mistake(
        edits=(
            Edit(
                "triton_kernels/rmsnorm.py",
                "    rstd_T = torch.empty(num_tokens, dtype=torch.float32, device=x_TF.device)",
                "    rstd_T = torch.empty(num_tokens, dtype=torch.float32)",
            ),
        ),
        lane="fake CUDA",
        test=OFFLOAD,
        said=r"on cpu",
    ),
}
