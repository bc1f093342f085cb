"""tools/gpu_first_hour.sh: every part is a command that its tool takes, and one that fails does not end the others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from engine.config.load import load_config
from engine.config.rules import check_config, check_world
from engine.errors import UserError
from engine.training.base_encoding import FP8_CAPABILITY
from engine.training.start_model import check_model, model_source
from rankfold.benchmarking.first_hour import run as first_hour
from rankfold.benchmarking.first_hour.figures import figures_of_training, key_figures
from rankfold.benchmarking.first_hour.parts import PARTS, ROOT, Part
from rankfold.benchmarking.first_hour.run import LEFT_OUT, Gpus, chosen_parts, leave_out, run_part, summarise
from rankfold.benchmarking.first_hour.targets import judge
from rankfold.benchmarking.options import add_options, for_device, read_options
from rankfold.benchmarking.sections import SECTIONS
from rankfold.certifying.layouts import check_comparable, other_layout, own_layout
from rankfold.planning import memory

SECTION_PARTS = [part for part in PARTS if part.tool not in ("tests", "plan", "train")]
TRAIN_PARTS = [part for part in PARTS if part.tool == "train"]
LAYOUT_PARTS = [part for part in PARTS if part.arguments.startswith("certify")]
MEMORY_PARTS = [part for part in PARTS if part.arguments.startswith("memory") and part.tool == "plan"]
TEST_PARTS = [part for part in PARTS if part.tool == "tests"]


@pytest.mark.parametrize("part", SECTION_PARTS, ids=lambda part: part.name)
def test_sections_take_their_arguments(part: Part) -> None:
    kind, parser = SECTIONS[part.tool], ArgumentParser(allow_abbrev=False)
    add_options(parser, kind)
    options = for_device(read_options(parser.parse_args(part.arguments.split()), kind), "cuda")
    assert options.device == "auto" and getattr(options, "dtype", "bfloat16") == "bfloat16"


IN_SMALL = [part for part in PARTS if part.on_cpu]


@pytest.mark.parametrize("part", [part for part in IN_SMALL if part in SECTION_PARTS], ids=lambda part: part.name)
def test_smoke_tests_take_their_arguments(part: Part) -> None:
    kind, parser = SECTIONS[part.tool], ArgumentParser(allow_abbrev=False)
    add_options(parser, kind)
    options = read_options(parser.parse_args(part.in_small().arguments.split()), kind)
    assert options.device == "cpu" and getattr(options, "dtype", None) in (None, "float32")


def test_early_parts_have_a_smoke_test() -> None:
    assert [part.name for part in IN_SMALL] == [part.name for part in PARTS if part.early]
    for part in IN_SMALL:
        small = part.in_small()
        assert first_hour._what_is_missing(small, Gpus(0, 0.0, (0, 0))) == ""
        assert (small.name, small.tool, small.seconds) == (part.name, part.tool, part.seconds)


def test_the_page_has_the_early_parts_and_their_limits() -> None:
    page = (ROOT / "docs" / "gpu-first-hour.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \|[^|]*\| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert [(name, float(most)) for name, _, most in rows] == [
        (part.name, part.seconds) for part in PARTS if part.early
    ]
    assert sum(int(expected) for _, expected, _ in rows) <= first_hour.TEN_MINUTES


FOR_A_GPU = re.compile(r"mark\.gpu\b|^@(long_)?places", re.MULTILINE)


def test_the_gpu_tests_are_those_of_the_parts() -> None:
    """Each file with some is in a part, and is not without any."""
    words = {word for part in TEST_PARTS for word in part.arguments.split() if not word.startswith("--")}
    files = {path.relative_to(ROOT).as_posix(): path for path in ROOT.glob("tests/**/test_*.py")}
    marked = {name for name, path in files.items() if FOR_A_GPU.search(path.read_text(encoding="utf-8"))}
    assert words == marked - {Path(__file__).relative_to(ROOT).as_posix()}


def test_early_parts_are_the_first_ten_minutes() -> None:
    early = [part.early for part in PARTS]
    assert early == sorted(early, reverse=True), "they come first, so that their numbers are the same in both calls"
    assert {"machine-speed", "tests", "graph", "decode", "step", "experts", "train", "tower"} == {
        part.tool for part in PARTS if part.early
    }


@pytest.mark.parametrize("part", LAYOUT_PARTS, ids=lambda part: part.name)
def test_layouts_fit_the_small_run_and_the_gpus(part: Part, tmp_path: Path) -> None:
    part.prepare(tmp_path / "it")
    words = part.command(tmp_path / "it")
    config = Path(words[words.index("--config") + 1])
    own = own_layout(config, 1)
    others = [other_layout(config, 1, text) for word, text in pairwise(words) if word == "--against"]
    check_comparable(own, others)
    assert {other.num_ranks for other in others} == {part.gpus} and own.num_ranks == 1


@pytest.mark.parametrize("part", TRAIN_PARTS, ids=lambda part: part.name)
def test_trainings_are_ones_that_the_engine_takes(part: Part, tmp_path: Path) -> None:
    part.prepare(tmp_path / "it")
    words = part.command(tmp_path / "it")[2:]
    config = load_config(words)
    check_config(config)
    check_world(config, part.gpus)
    check_model(config, model_source(config).model, part.gpus)
    assert config.model.dtype == "bfloat16" and config.checkpoint.dir == str(tmp_path / "it.run" / "out")


@pytest.mark.slow
@pytest.mark.parametrize("part", TRAIN_PARTS, ids=lambda part: part.name)
def test_trainings_run_to_their_end(part: Part, tmp_path: Path) -> None:
    """Shortened for a CPU."""
    shorter = f"{part.arguments} --model.dtype float32 --train.steps 2 --train.global_batch_size 8"
    if "rollout" in shorter:
        shorter += " --rollout.max_completion_length 4 --data.seq_length 64"
    done = run_part(1, replace(part, arguments=shorter), tmp_path)
    assert done.status == "passed", (tmp_path / f"01-{part.name}.log").read_text()


def test_a_part_is_left_out_where_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Gpus(8, 139.1, (9, 0))
    assert {first_hour._what_is_missing(part, here) for part in PARTS} == {""}
    monkeypatch.setattr(first_hour, "find_spec", lambda name: None)
    lacking = {part.tool: first_hour._what_is_missing(part, here) for part in PARTS}
    where = f", not installed for {sys.executable}"
    expected = dict.fromkeys(lacking, f"needs einops{where}")
    expected |= dict.fromkeys(("machine-speed", "kernels", "lora-tax"), "")
    expected |= dict.fromkeys(("plan", "train"), f"needs einops, jsonargparse and docstring_parser{where}")
    assert lacking == expected | {"tests": f"needs pytest and einops{where}"}


def test_sections_without_a_model_import_nothing_more() -> None:
    """Beside torch, triton, transformers and peft."""
    modules = [f"rankfold.benchmarking.{name}" for name in ("machine_speed", "kernels.section", "lora_tax")]
    absent = sorted({name for part in PARTS for name in part.packages})
    code = f"import sys; sys.modules |= dict.fromkeys({absent}); import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("part", MEMORY_PARTS, ids=lambda part: part.name)
def test_what_is_measured_fits_the_gpu(
    part: Part, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    parser = ArgumentParser()
    memory.add_arguments(parser)
    arguments = parser.parse_args(part.arguments.split()[1:])
    assert arguments.measure
    arguments.measure = False
    memory.run(arguments)
    assert "at most: fits" in capsys.readouterr().out
    assert part.memory < arguments.gpu_memory


def test_parts_are_named_by_number_or_name() -> None:
    assert [number for number, _ in chosen_parts([])] == list(range(1, len(PARTS) + 1))
    assert [part.name for _, part in chosen_parts(["step", "1"])] == ["machine-speed", "step"]
    with pytest.raises(UserError, match=r"no part 'nope': name some of 1 machine-speed, 2 test-one-each, .*gpus\."):
        chosen_parts(["nope"])


class _StandIn(Part):
    """A part that runs Python: the code finds the path of its results without their ending in sys.argv[1]."""

    def command(self, stem: Path) -> list[str]:
        return [sys.executable, "-c", self.arguments, str(stem)]


def _stand_in(code: str, name: str = "it") -> Part:
    return _StandIn(name=name, tool="kernels", arguments=code)


WRITES = (
    "import json, sys; json.dump({'section': 'kernels', 'options': {'repeats': 0}, 'tables': [{'rows': [['a', '1']]}]},"
    "open(sys.argv[1] + '.json', 'w')); open(sys.argv[1] + '.md', 'w').write('its own')"
)


def test_every_part_leaves_its_files_and_a_line_of_the_summary(tmp_path: Path) -> None:
    done = run_part(1, _stand_in(WRITES, "right"), tmp_path)
    assert (done.status, done.figures) == ("passed", "1 results right, nothing timed")
    assert (tmp_path / "01-right.md").read_text() == "its own"
    done = run_part(2, _stand_in("import sys; print('some'); sys.exit('error: it is | wrong.')", "wrong"), tmp_path)
    assert (done.status, done.figures) == ("failed", "error: it is | wrong.")
    assert json.loads((tmp_path / "02-wrong.json").read_text())["status"] == "failed"
    assert "failed: error: it is | wrong." in (tmp_path / "02-wrong.md").read_text()
    run_part(3, _stand_in("", "silent"), tmp_path)
    text = summarise(tmp_path)
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [["1", "right"], ["2", "wrong"], ["3", "silent"]]
    assert "it printed nothing" in text
    assert [each["name"] for each in json.loads((tmp_path / "summary.json").read_text())] == [
        "right",
        "wrong",
        "silent",
    ]
    assert "error: it is \\| wrong." in (tmp_path / "summary.md").read_text()


def test_a_part_alone_replaces_its_own_results(tmp_path: Path) -> None:
    for code in (WRITES, "raise SystemExit('error: no.')"):
        run_part(1, _stand_in(code), tmp_path)
    assert json.loads((tmp_path / "01-it.json").read_text())["status"] == "failed", "the first call's is still there"


def test_a_part_that_is_left_out_keeps_nothing_of_an_earlier_call(tmp_path: Path) -> None:
    run_part(1, _stand_in(WRITES), tmp_path)
    leave_out(1, _stand_in(WRITES), tmp_path, "needs 2 GPUs, here is 1")
    assert json.loads((tmp_path / "01-it.json").read_text())["status"] == LEFT_OUT
    assert "left out: needs 2 GPUs" in (tmp_path / "01-it.md").read_text() and not (tmp_path / "01-it.log").exists()


def test_parts_in_fp8_ask_for_what_the_engine_asks_for() -> None:
    for part in PARTS:
        words = part.arguments.split()
        name = words[words.index("--base-dtype") + 1] if "--base-dtype" in words else ""
        assert part.capability == FP8_CAPABILITY.get(name, (0, 0)), part.name


def test_a_part_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    done = run_part(1, _stand_in(code), tmp_path, seconds=1.5)
    assert done.status == "out of time" and done.seconds < 10
    child, *where = (tmp_path / "01-it.log").read_text().splitlines()
    assert done.figures == child, "what its end prints is no figure"
    assert any("Fatal Python error: Aborted" in line for line in where) and any(
        '"<string>", line 1' in line for line in where
    )
    for _ in range(100):
        if not _runs(int(child)):
            return
        time.sleep(0.05)
    raise AssertionError("the part's child is still running")


def test_tests_out_of_time_report_what_failed_before(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pathlib, time\ndef test_a(): assert 0\ndef test_c(): pass\n"
        f"def test_b(): pathlib.Path({str(tmp_path / 'waits')!r}).touch(); time.sleep(600)\n"
    )
    part = _tests(tmp_path)
    command = part.command(tmp_path / "it")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job
    try:
        with (tmp_path / "log").open("wb") as log:
            process = first_hour._start(command, log)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        while not (tmp_path / "waits").exists() and process.poll() is None:
            time.sleep(0.05)
        first_hour._end(process, part)
    record = first_hour._record(tmp_path / "it", part)
    assert record is not None and record["failed"] == ["test_it::test_a"]
    assert record["counts"] == {"passed": 1, "failed": 1, "skipped": 0}, "a test that did not end has not passed"


def test_a_part_that_does_not_end_at_an_interrupt_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_hour, "_GRACE", 0.5)
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    done = run_part(1, replace(_stand_in(code), tool="tests"), tmp_path, seconds=1.5)
    assert done.status == "out of time" and done.seconds < 10


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class _Pytest(Part):
    def command(self, stem: Path) -> list[str]:
        plain = ["-c", os.devnull, "-p", "no:cacheprovider"]
        return [sys.executable, "-m", "pytest", "-q", *plain, self.arguments, f"--junitxml={stem}.xml"]


def _tests(folder: Path) -> Part:
    """The part of the tests in a folder's test_it.py."""
    return _Pytest(name="tests", tool="tests", arguments=str(folder / "test_it.py"))


def test_tests_report_what_failed(tmp_path: Path) -> None:
    """pytest's own report of a passing, a failing and a skipped test."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    done = run_part(1, _tests(tmp_path), tmp_path)
    assert (done.status, done.figures) == ("failed", "1 passed, 1 failed, 1 skipped")
    assert json.loads((tmp_path / "01-tests.json").read_text())["failed"] == ["test_it::test_b"]
    assert "failed: test_it::test_b" in (tmp_path / "01-tests.md").read_text()


def test_figures_of_a_step() -> None:
    record = {
        "section": "step", "seconds": {"engine": [0.4, 0.5, 0.6]}, "step_operations": 2.5e14,
        "speedup": {"PEFT": {"median": 1.5}},
    }  # fmt: skip
    assert key_figures(record) == "500.0 ms, 500 TFLOP/s; 1.50 times PEFT"
    assert key_figures({**record, "section": "experts"}) == "500.0 ms, 500 TFLOP/s; 1.50 times PEFT"


def test_figures_of_a_training() -> None:
    log = "done\n  training loss   2.1 → 1.9\n  speed           71.4 tokens/s, 3s in all\n  run folder  /x\n"
    assert figures_of_training(log) == "training loss 2.1 → 1.9; speed 71.4 tokens/s, 3s in all"
    assert figures_of_training("run: 2 steps, folder /x\n") == ""


def test_figures_of_a_section_with_one_table() -> None:
    record = {"section": "tower", "columns": ["", "ms", "over"], "rows": [["forward", "3", "1"], ["both", "9", "1"]]}
    assert key_figures({**record, "options": {"repeats": 9}}) == "forward 3 ms; both 9 ms"


def test_figures_of_a_section_with_contestants() -> None:
    columns = ["op", "size", "contestant", "median ms", "min ms"]
    table = {"columns": columns, "rows": [["qkv, forward", "8192x4096x6144", "fold", "0.52", "0.51"]]}
    assert key_figures({"section": "kernels", "tables": [table]}) == "qkv, forward fold 0.52 ms"
    speeds = {"columns": ["", "measured", "unit", "the planner assumes"], "rows": [["copy", "4210", "GB/s", "4300"]]}
    assert key_figures({"section": "machine-speed", **speeds}) == "copy 4210 GB/s"


def test_figures_are_held_against_their_targets() -> None:
    step = {
        "section": "step", "seconds": {"engine": [0.5], "square product": [0.1]}, "step_operations": 3.0,
        "ceiling_operations": 1.0, "speedup": {"PEFT": {"median": 1.5}, "Liger": {"median": 0.9}},
    }  # fmt: skip
    assert [str(one) for one in judge(step, "")] == [
        "share of the square product's speed 0.60 (target 0.75, missed)",
        "speed over PEFT 1.50 (target 1.00)",
        "speed over Liger 0.90 (target 1.00, missed)",
    ]
    graph = {
        "section": "graph",
        "rows": [
            ("512 tokens, no graph", "1", "1", "1", "1.00", ""),
            ("512 tokens, graphs of layers", "1", "1", "1", "1.60", "0.1"),
            ("1024 tokens, graphs of layers", "1", "1", "1", "1.10", "0.1"),
        ],
    }
    assert [(one.value, one.is_met) for one in judge(graph, "")] == [(1.6, True)]
    case = {"seconds": {"torch": [1.0], "triton": [2.0]}, "limit_seconds": [1.7]}
    kernels = {
        "section": "kernels",
        "tables": [{"group": "norm", "cases": {"forward": case}}, {"group": "dropout", "cases": {"mask": case}}],
    }
    assert [str(one) for one in judge(kernels, "")] == ["forward: share of the limit 0.85 (target 0.90, missed)"]
    tax = {
        "linear": "column",
        "dropout": 0.1,
        "over_frozen": {"engine (triton)": 0.93 / 0.9, "engine (triton), not folded": 3.0},
    }
    (found,) = judge({"section": "lora-tax", "tables": [{"cases": [tax]}]}, "")
    assert found.value == pytest.approx(0.93 / 0.9) and found.is_met
    log = "on cuda      predicted  measured  factor\nGiB in a step   10.0  11.5  1.150\ntokens/s  5  6  1.2\n"
    assert [(one.value, one.is_met) for one in judge(None, log)] == [(1.15, False)]


def test_a_second_call_goes_on_where_the_first_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts that passed are left alone, unless named; those that need more than is here are left out, and do not
    count as failures."""
    log = tmp_path / "ran"
    note = f"open({str(log)!r}, 'a').write(NAME)"
    parts = (
        _stand_in(note.replace("NAME", "'right '"), "right"),
        _stand_in(note.replace("NAME", "'wrong '") + "; raise SystemExit(1)", "wrong"),
        replace(_stand_in("", "many"), gpus=2), replace(_stand_in("", "large"), memory=136),
        replace(_stand_in("", "new"), capability=(8, 9)),
    )  # fmt: skip
    monkeypatch.setattr(first_hour, "chosen_parts", lambda names: chosen_parts(names, parts))
    monkeypatch.setattr(first_hour, "_require_gpu", lambda: Gpus(1, 79.1, (8, 0)))

    def call(*words: str) -> object:
        monkeypatch.setattr(sys, "argv", ["gpu_first_hour.sh", str(tmp_path / "out"), *words])
        with pytest.raises(SystemExit) as ended:
            first_hour.main()
        return ended.value.code

    assert call() == 1 and log.read_text() == "right wrong "
    outcomes = {one["name"]: one for one in json.loads((tmp_path / "out" / "summary.json").read_text())}
    assert (outcomes["many"]["status"], outcomes["many"]["figures"]) == (LEFT_OUT, "needs 2 GPUs, here is 1")
    assert outcomes["large"]["figures"] == "needs a GPU of 136 GiB, here it has 79"
    assert outcomes["new"]["figures"] == "needs a GPU of compute capability 8.9, here it has 8.0"
    assert call() == 1 and log.read_text() == "right wrong wrong "
    assert "1 right: passed before" in capsys.readouterr().err
    assert call("right") == 1 and log.read_text() == "right wrong wrong right "


def test_ten_minutes_go_on_in_a_second_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Early parts alone, as long as there is time; what a part lacks is said before anything runs."""
    parts = (
        replace(_stand_in("import time; time.sleep(1)", "first"), early=True),
        replace(_stand_in("", "second"), early=True), replace(_stand_in("", "many"), early=True, gpus=2),
        _stand_in("", "late"),
    )  # fmt: skip
    monkeypatch.setattr(first_hour, "chosen_parts", lambda names: chosen_parts(names, parts))
    monkeypatch.setattr(first_hour, "_require_gpu", lambda: Gpus(1, 79.1, (8, 0)))
    monkeypatch.setattr(first_hour, "TEN_MINUTES", first_hour._LEAST + 0.5)

    def names(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["gpu_first_hour.sh", str(tmp_path / "out"), *words])
        with pytest.raises(SystemExit) as ended:
            first_hour.main()
        assert ended.value.code == 0
        return [one["name"] for one in json.loads((tmp_path / "out" / "summary.json").read_text())]

    assert names("--ten-minutes") == ["first", "many"]
    said = capsys.readouterr()
    assert said.err.index("will be left out: many (needs 2 GPUs, here is 1)") < said.err.index("1 first")
    assert "second did not begin; the same command runs them next" in said.out
    assert names("--ten-minutes") == ["first", "second", "many"]
    assert "did not begin" not in capsys.readouterr().out
    assert names() == ["first", "second", "many", "late"]


def _script(*arguments: str, torch: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The script with a stand-in for torch."""
    (folder / "torch.py").write_text(torch)
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "tools" / "gpu_first_hour.sh"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_without_a_gpu_it_is_one_sentence(tmp_path: Path) -> None:
    torch = "class cuda:\n    is_available = staticmethod(lambda: False)\n"
    done = _script("out", torch=torch, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: torch sees no GPU here")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
    done = _script("out", torch="raise ImportError", folder=tmp_path)
    assert done.returncode == 2 and "has no torch" in done.stderr and done.stderr.count("\n") == 1


def test_a_dry_run_needs_neither_gpu_nor_torch(tmp_path: Path) -> None:
    done = _script("out", "--dry-run", torch="raise AssertionError", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        f"{number} {part.name}" for number, part in enumerate(PARTS, 1)
    ]
    assert replace(PARTS[7]).arguments in done.stdout and not (tmp_path / "out").exists()
