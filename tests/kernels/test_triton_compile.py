"""Every kernel compiles for GPUs without a warning, and takes what the tables of tests/kernels/resources say.

Needs no GPU. After a change of a kernel: `python -m tests.kernels.resource_tables --write --arch 80 90 100 120`, and
the diff of the tables says what the change costs or saves.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernels import resource_tables
from tests.kernels.kernel_resources import MULTIPROCESSORS, accesses, instruction_counts, resident_blocks
from tests.kernels.launches import refuse_none_in_tuples
from tests.kernels.resource_tables import (
    COMMAND,
    KNOWN,
    ROOT,
    TABLES,
    Cold,
    Compiled,
    Row,
    changes,
    compile_rows,
    read_table,
    some_kernels,
)

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels.triton import launch

OTHERS = ["float32", "float16", "ones", "rank 192"]
ARCHS = list(MULTIPROCESSORS)


def _assert_within_the_tables(compiled: Compiled, *, whole: bool) -> None:
    for arch, rows in compiled.rows.items():
        assert resource_tables.unknown_problems(arch, rows) == []
        path = resource_tables.table_path(compiled.triton, arch)
        if not path.exists():
            pytest.skip(f"no table of Triton {compiled.triton}; {COMMAND} {arch} writes one")
        found = changes(read_table(path), rows, whole=whole)
        assert not found, "\n".join([f"after reading what changed, run {COMMAND} {arch}", *found])


@some_kernels
@pytest.mark.timeout(1800)
def test_kernels_take_what_the_table_says(cold: Cold) -> None:
    cases, compiled, _ = cold
    kernels, every = {row["kernel"] for row in compiled.rows[90]}, resource_tables.kernels_defined()
    assert kernels == every if cases == "quick" else kernels < every
    _assert_within_the_tables(compiled, whole=False)


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file, which change where one is written again."""
    stats = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


@some_kernels
@pytest.mark.timeout(1800)
def test_a_second_process_compiles_nothing(cold: Cold) -> None:
    """Every kernel, with every option that its launcher gives it, is found in a warm cache."""
    cases, first, cache = cold
    files = _files(cache)
    kernels = {row["kernel"].rpartition(".")[2] for row in first.rows[90]}
    assert {Path(name).stem for name in files if name.endswith(".cubin")} == kernels
    assert compile_rows(cases, cache=cache) == first
    assert _files(cache) == files, "something was compiled again"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_training_takes_what_the_table_says(arch: int, cache: Path) -> None:
    _assert_within_the_tables(compile_rows("training", archs=[arch], cache=cache), whole=True)


def _assert_launchable(rows: list[Row]) -> None:
    """Fails where a kernel does not fit, spills, or takes 16 bits at a time; two blocks of each are not planned."""
    found = resource_tables.unknown_problems(90, rows)
    assert rows and [one for one in found if "block a multiprocessor" not in one] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OTHERS)
def test_other_dtypes_and_sizes_compile(name: str, cache: Path) -> None:
    _assert_launchable(compile_rows(name, cache=cache).rows[90])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_training_with_the_oldest_triton(arch: int, oldest_triton: Path, cache: Path) -> None:
    compiled = compile_rows("training", archs=[arch], cache=cache, packages=oldest_triton)
    if arch >= 90:  # `E4M3_SINCE` in training_launches: others make no codes, and lack kernels that do nothing else
        assert {row["kernel"] for row in compiled.rows[arch]} == resource_tables.kernels_defined()
    _assert_within_the_tables(compiled, whole=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OTHERS)
def test_the_oldest_triton_compiles_everything(name: str, oldest_triton: Path, cache: Path) -> None:
    _assert_launchable(compile_rows(name, cache=cache, packages=oldest_triton).rows[90])


def test_the_tables_have_no_problem_that_is_not_known() -> None:
    """And nothing is known that is no longer a problem."""
    tables = {path: read_table(path) for path in TABLES.glob("*/sm_*.json")}
    assert tables
    unknown, met = [], set()
    for path, rows in tables.items():
        arch = int(path.stem[3:])
        unknown += resource_tables.unknown_problems(arch, rows)
        for row in rows:
            met |= {resource_tables.known(row, problem) for problem in resource_tables.problems(arch, row)}
    assert unknown == []
    assert [one for one in KNOWN if one not in met] == [], "solved: take it out"


@pytest.mark.parametrize("arguments", [((1, None),), (2, (3, (4, None)))])
def test_none_inside_a_tuple_is_refused_by_every_version(arguments: tuple[object, ...]) -> None:
    """The newest Triton compiles it, so the rule is held where kernels are launched and compiled in tests."""
    with pytest.raises(AssertionError, match="kernel is a tuple with None inside"):
        refuse_none_in_tuples("kernel", arguments)
    refuse_none_in_tuples("kernel", (None, (1, (2, 3)), ()))


PTX = """
	ld.param.b64 	%rd1, [_k_param_0];
	ld.param.u64 	%rd2, [_k_param_2];
	ld.param.b64 	%rd9, [_k_param_3];
	mul.wide.s32 	%rd3, %r1, 2;
	add.s64 	%rd4, %rd1, %rd3;
$L__BB0_1:
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd4 + 0 ];
	cp.async.cg.shared.global [ %r19 + 0 ], [ %rd6 + 16 ], 0x8, %r21;
	@%p1 ld.global.L1::evict_last.b16 { %rs1 }, [ %rd2 + 0 ];
	add.s64 	%rd5, %rd6, 64;
	mov.b64 	%rd6, %rd7;
	selp.b64 	%rd7, %rd2, %rd5, %p2;
	ld.global.b64 	%rd10, [%rd1];
	st.global.v2.b32 	[%rd10], {%r1, %r2};
	@%p3 st.global.b8 [ %rd4 + 2 ], { %rs1 };
"""


def test_accesses_are_read_from_ptx() -> None:
    """Addresses are followed through arithmetic and around a loop; parameter 3 is no pointer."""
    assert accesses(PTX, {0: "x", 2: "sums"}) == {
        "": {"store": [8]},
        "sums": {"load": [2, 8]},
        "x": {"load": [8, 16], "store": [1]},
    }


COMPUTING = """
	{
	.reg .pred p; fma.rn.f32 %f1, %f2, %f3, %f4; @!%p1 mul.bf16x2 %r1, %r2, %r3;
	}
	mul.lo.s32 	%r1, %r2, 2;
	mad.lo.s32 	%r1, %r2, 2, %r3;
	add.s64 	%rd1, %rd2, 3;
	@%p1 mul.rn.f32 	%f1, %f2, %f3;
	sub.f32 	%f1, %f2, %f3;
	add.rn.ftz.f32 	%f1, %f2, %f3;
	cvt.rna.tf32.f32 	%r1, %f1;
	wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 	{%f1}, {%r1}, %rd1, 1, 1, 1;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 	{%f1}, {%r1}, {%r2}, {%f1};
	redux.sync.max.s32 	%r1, %r2, -1;
	@%p1 atom.global.gpu.acq_rel.add.f32 	%f1, [ %rd1 + 0 ], %f2;
	red.global.add.f32 	[%rd1], %f1;
	st.local.v4.b32 	[%rd1], {%r1, %r2, %r3, %r4};
	ld.local.b32 	%r1, [%rd1];
"""


def test_instructions_are_counted() -> None:
    """Integers, conversions and reductions within a warp are none of them."""
    assert instruction_counts(COMPUTING) == {"fma": 1, "mul": 2, "add": 2, "tf32": 1, "atomic": 2, "local": 2}


@pytest.mark.parametrize(
    ("kernel", "instructions", "said"),
    [
        ("quantize._quantize_kernel", "fma 16", "fuses products with sums"),
        ("lora._project_kernel", "fma 16", None),
        ("lora._project_kernel", "mul 16 tf32 4", "in tf32"),
        ("delta._solve_kernel", "mul 16 tf32 4", None),
        ("partial_sums._sum_kernel", "add 4 atomic 1", "atomic"),
    ],
)
def test_arithmetic_that_no_kernel_should_do(kernel: str, instructions: str, said: str | None) -> None:
    row = {"kernel": kernel, "case": "8b", "spilled": 0, "shared": 0, "blocks": 2, "narrow": []}
    found = resource_tables.unknown_problems(90, [{**row, "instructions": instructions}])
    assert len(found) == (said is not None) and all(said in one for one in found if said)


@pytest.mark.parametrize(
    ("arch", "warps", "registers", "shared", "expected"),
    [
        (90, 8, 182, 0, 1),  # 184 x 32 = 5888 registers a warp, 11 warps fit, in fours 8: one block of 8
        (90, 8, 128, 0, 2),  # 4096 a warp, 16 warps
        (90, 4, 255, 0, 2),
        (90, 4, 32, 73728, 3),  # (72 + 1) KiB three times is 219 of 228
        (80, 4, 32, 73728, 2),
        (120, 4, 32, 73728, 1),
        (120, 4, 40, 0, 12),  # 48 warps
        (90, 1, 16, 0, 32),
    ],
)
def test_resident_blocks(arch: int, warps: int, registers: int, shared: int, expected: int) -> None:
    """By hand, from the limits of the CUDA programming guide."""
    assert min(resident_blocks(arch, warps=warps, registers=registers, shared=shared).values()) == expected


def test_launches_say_whether_products_and_sums_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own default changes with the version; that every kernel says so the compiler's warnings hold above."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    given: dict[str, object] = {}
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *arguments, **options: given.update(options))
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    kernel = launch.kernel(do_not_specialize=["number"])(_does_nothing)
    kernel[(1,)](3, num_warps=2)
    assert given == {"grid": (1,), "warmup": False, "num_warps": 2, "enable_fp_fusion": True}
    kernel[(1,)](3, enable_fp_fusion=False)
    assert given["enable_fp_fusion"] is False


def test_kernels_are_made_by_the_launcher() -> None:
    """Those that `launch.kernel` has not made would take Triton's default."""
    others = [
        f"{path.name}: {name}"
        for path in (ROOT / "triton_kernels").glob("*.py")
        for made, name in re.findall(r"^@(\S+?)(?:\(.*\))?\ndef (_\w+_kernel)\(", path.read_text("utf-8"), re.MULTILINE)
        if made != "kernel"
    ]
    assert others == []


def _does_nothing(number: int) -> None: ...
