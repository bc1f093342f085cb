"""The report's page: its figures by hand, one file that needs nothing else, and runs that recorded little."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from engine.errors import UserError
from rankfold.reporting.chart import Series, line_chart, smoothed, thinned, ticks
from rankfold.reporting.page import page
from rankfold.reporting.reading import read_runs
from rankfold.reporting.timeline import simulated
from tests.support.commands import run_tool
from tests.support.sweeps import sampled


def _record(step: int, **more: object) -> dict[str, object]:
    return {
        "step": step, "loss": 3.0 - 0.1 * step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 1000, "seconds": 0.5,
        "tokens_per_second": 2000.0, "memory": 2**30, "mfu": 0.25, "data_stall": 0.05, **more,
    }  # fmt: skip


def _write(folder: Path, *, ranks: int, steps: int, seconds: float = 0.5, pipeline: int = 1) -> Path:
    """A run of 10 wanted steps: each takes `seconds`, of which 60 % are forward and backward."""
    (folder / "telemetry").mkdir(parents=True)
    records = [_record(step, seconds=seconds) for step in range(1, steps + 1)]
    lines = [{"step": 0, "eval_loss": 3.2}, *records]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for rank in range(ranks):
        own = [
            {
                "step": step, "memory": (rank + 1) * 2**30,
                "phases": {"forward_backward": 0.6 * seconds, "reduce": 0.02},
                "communication": {"tp all_reduce": {"calls": 4, "sent": 4e6, "timed": 2e6, "seconds": 0.001}},
            }
            for step in range(1, steps + 1)
        ]  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in own)
        (folder / "telemetry" / f"rank_{rank:05d}.jsonl").write_text(text, encoding="utf-8")
    config = {
        "model": {"path": "<model> & co"}, "trainable": [], "log": {"metrics": "metrics.jsonl"},
        "train": {"steps": 10, "global_batch_size": 8, "micro_batch_size": 1},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    environment = {
        "device": "NVIDIA H200", "backend": "cuda", "world_size": ranks,
        "layout": {"tensor": 1, "context": 1, "data": ranks // pipeline, "pipeline": pipeline},
        "schedule": {"name": "1f1b", "virtual": 1, "first_trainable_stage": 0, "layers": [2] * pipeline},
    }  # fmt: skip
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    return folder


class _Text(HTMLParser):
    """What a reader sees, and every address."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.seen.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.seen))


def test_figures_of_one_run(tmp_path: Path) -> None:
    html = page(read_runs([_write(tmp_path / "run", ranks=2, steps=10)]))
    seen = _Text(html)
    assert "complete, 10 steps" in seen.text
    assert "2.7000 → 2.2000 (means of 5 steps)" in seen.text and "2.00k tokens/s" in seen.text
    assert (
        "2.0 GiB (rank 1)" in seen.text and "25.0%" in seen.text and "0.50 s (10.0% of the time in steps)" in seen.text
    )
    assert "forward and backward 300 ms 60.0%" in seen.text  # 0.6 of 0.5 s
    assert "rest 130 ms 26.0%" in seen.text  # 0.5 - 0.3 - 0.02 - 0.05
    assert "1.9 GiB/s" in seen.text and "50%" in seen.text  # 2 MB in 1 ms, half of what was sent
    assert "<model> & co" in seen.text  # as text, not as a tag
    assert "script" not in seen.tags and not seen.addresses and "http" not in html and "url(" not in html
    assert "Not recorded" not in seen.text and "Pipeline" not in seen.text  # no card without content


def test_experts_of_two_layers(tmp_path: Path) -> None:
    """Rows of two saves are added up; a run without experts has no such card."""
    folder = _write(tmp_path / "run", ranks=1, steps=4)
    assert "Experts" not in _Text(page(read_runs([folder]))).text
    saves = [
        {"step": 2, "expert_rows": {"1": [10, 0, 30, 0], "3": [1, 1, 1, 1]}},
        {"step": 4, "expert_rows": {"1": [20, 0, 20, 0], "3": [0, 0, 0, 4], "x": [1], "7": ["a"]}},
    ]
    steps = [_record(step, expert_entropy=0.5, expert_imbalance=2.0) for step in range(1, 5)]
    lines = "".join(json.dumps(line) + "\n" for line in [*steps, *saves])
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    seen = _Text(page(read_runs([folder]))).text
    # 30 and 50 of 80 rows: (0.375 ln 0.375 + 0.625 ln 0.625) / ln 4, and 0.625 x 4
    assert "layer 1 80 0.477 2.50 expert 2 0.00 2" in seen
    assert "layer 3 8 0.774 2.50 expert 3 0.50 0" in seen
    assert seen.count("entropy of shares") >= 2, "a chart and a column"


def test_the_header_says_what_was_trained(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", ranks=4, steps=2, pipeline=2)
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    config["lora"] = {"rank": 16, "targets": ["q_proj", "v_proj"]}
    config["data"] = {"seq_length": 4096}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    environment |= {"model": {"parameters": 8.03e9, "trained": 41_943_040}, "started": "2026-01-02 03:04 UTC"}
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    told = (
        "<model> & co, 8.03B parameters · LoRA of rank 16 on q_proj, v_proj (41.9M trained) · 8 × 4096 tokens a step · "
        "pipeline 2, data 2 · 4 × NVIDIA H200 · 2026-01-02 03:04 UTC"
    )
    assert told in _Text(page(read_runs([folder]))).text


def test_a_run_shows_what_is_not_a_default_and_folds_the_rest(tmp_path: Path) -> None:
    """Batches of 8 rows in micro-batches of 1 are defaults; the model and the number of steps are not."""
    html = page(read_runs([_write(tmp_path / "run", ranks=1, steps=2)]))
    first, _, folded = html[html.index("Other than the defaults") :].partition("<details>")
    named = re.findall(r'<th scope="row">(.*?)</th>', first.replace("<wbr>", ""))
    assert named == ["model.path", "train.steps"]
    assert "train.micro_batch_size" in folded.replace("<wbr>", "") and "<details open" not in html
    assert "train.<wbr>micro_<wbr>batch_<wbr>size" in folded, "a narrow page breaks a name between its words"


def test_drawings_are_well_formed(tmp_path: Path) -> None:
    html = page(
        read_runs([_write(tmp_path / "a", ranks=2, steps=10, pipeline=2), _write(tmp_path / "b", ranks=4, steps=4)])
    )
    drawings = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(drawings) > 5
    for drawing in drawings:
        for element in ElementTree.fromstring(drawing).iter():
            for name in ("width", "height", "x", "y"):
                assert float(element.attrib.get(name, 0)) >= 0, ElementTree.tostring(element)
    shares = [float(share) for share in re.findall(r"(?:width|left|bottom):([-\d.]+)%", html)]
    assert len(shares) > 50 and all(0 <= share <= 100 for share in shares)


def test_two_runs_beside_each_other(tmp_path: Path) -> None:
    """Two devices at 0.5 s a step and four at 0.25: twice the speed, all of what is in proportion."""
    runs = [
        _write(tmp_path / "two" / "run", ranks=2, steps=10),
        _write(tmp_path / "four" / "run", ranks=4, steps=4, seconds=0.25),
    ]
    seen = _Text(page(read_runs(runs)))
    assert "two/run" in seen.text and "four/run" in seen.text
    assert "ended at step 4 of 10" in seen.text
    assert "two/run 2 2.00k 100% four/run 4 4.00k 100%" in seen.text
    assert "All options are equal" in seen.text


@pytest.mark.parametrize(
    ("section", "option", "value"),
    [("train", "global_batch_size", 16), ("model", "base_products", "codes"), ("lora", "merge_aware", True)],
)
def test_runs_of_other_work_are_not_compared_in_speed(section: str, option: str, value: object, tmp_path: Path) -> None:
    runs = [_write(tmp_path / "a", ranks=2, steps=4), _write(tmp_path / "b", ranks=4, steps=4)]
    config = yaml.safe_load((runs[1] / "config.yaml").read_text(encoding="utf-8"))
    config.setdefault(section, {})[option] = value
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    text = _Text(page(read_runs(runs))).text
    assert f"the runs differ in {section}.{option}" in text and "in proportion" not in text


def test_a_long_loss_is_smoothed(tmp_path: Path) -> None:
    """With 40 reports the line is a mean of 4: at step 4 that of 2.9, 2.8, 2.7 and 2.6."""
    html = page(read_runs([_write(tmp_path / "run", ranks=1, steps=40)]))
    assert "training, mean of 4 reports: 2.75 at 4" in html and 'class="line s0 faint"' in html
    assert smoothed([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(2, 2.0), (3, 4.0)]


def test_a_pipeline_is_drawn(tmp_path: Path) -> None:
    """1F1B on 2 ranks with 8 micro-batches: idle 1 / 9 of the time where forward and backward are equally long."""
    run = read_runs([_write(tmp_path / "run", ranks=2, steps=2, pipeline=2)])[0]
    found = simulated(run)
    assert found is not None and found[1:] == (8, 8)
    assert found[0].bubble == pytest.approx(1 / 9)
    assert "idle 11.1%" in page([run])


def test_runs_that_recorded_little(tmp_path: Path) -> None:
    evaluated = tmp_path / "evaluated"
    evaluated.mkdir()
    (evaluated / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 2.5}\n', encoding="utf-8")
    cut = tmp_path / "cut"
    cut.mkdir()
    cut.joinpath("metrics.jsonl").write_text(json.dumps(_record(1, loss="NaN")) + '\n{"step": 2, "lo', encoding="utf-8")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text("train: {steps: 3}\n", encoding="utf-8")
    text = _Text(page(read_runs([evaluated]))).text
    assert "evaluated only" in text and "2.5000" in text and "Not recorded: throughput" in text
    text = _Text(page(read_runs([cut]))).text
    assert "1 line of metrics.jsonl cannot be read" in text
    assert "no steps recorded" in _Text(page(read_runs([empty]))).text
    assert "no steps recorded" in _Text(page(read_runs([evaluated, cut, empty]))).text


def test_a_step_written_twice_counts_once(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", ranks=1, steps=3)
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(_record(3, loss=1.5)) + "\n")
    assert read_runs([folder])[0].series("loss")[-1] == (3, 1.5)
    assert len(read_runs([folder])[0].steps) == 3


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        read_runs([tmp_path / "nothing"])
    with pytest.raises(UserError, match="give the folder of a run"):
        read_runs([tmp_path])


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 1),
        (0.93, 0.95),
        (-3, 12),
        (5, 5),
        (0, 0),
        (1e-9, 2e-9),
        (0, 3e14),
        (1e-90, 2e-90),
        (1e17, 1e17 + 16),
        (-1e100, 1e100),
    ],
)
def test_ticks_enclose_the_values(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high * (1 - 1e-12)
    assert 2 <= len(found) <= 9 and found == sorted(set(found))


def test_long_lines_become_means() -> None:
    points = [(float(step), 2.0 * step) for step in range(10000)]
    thin = thinned(points)
    assert len(thin) <= 400 and thin[0] == (24.0, 24.0)  # the mean of 0, 2, .. 48
    assert line_chart([Series(name="a", points=[], colour=0)], title="t", unit="u") == ""


_HOSTILE = (
    '"><script>alert(1)</script><img src=x onerror=alert(2)>',
    "' onmouseover='alert(1)",
    "\ud800",
    "",
    None,
    True,
    -1,
    1e308,
    10**400,
    float("nan"),
    [],
    ["<script>", [[[[]]]]],
    {},
    {"<script>": {"<script>": ["<script>"]}},
)


def _leaves(tree: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Places of all values in JSON, those that hold others too."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for name, value in inner for place in _leaves(value, (*path, name)))]


def _replaced(tree: Any, path: tuple[str | int, ...], value: object) -> Any:
    if not path:
        return value
    copied = tree.copy()
    copied[path[0]] = _replaced(tree[path[0]], path[1:], value)
    return copied


@pytest.mark.parametrize(
    "place", sampled(range(len(_HOSTILE)), (0, 2, 4, 8, 11)), ids=lambda place: repr(_HOSTILE[place])[:20]
)
def test_no_value_of_any_file_becomes_markup_or_a_traceback(tmp_path: Path, place: int) -> None:
    """Each value of each file in turn is replaced; the page has the elements that it knows and no event handlers."""
    value = _HOSTILE[place]
    folder = _write(tmp_path / "run", ranks=2, steps=2, pipeline=2)
    known = set(_Text(page(read_runs([folder]))).tags)
    first = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[1]
    rank = (folder / "telemetry" / "rank_00000.jsonl").read_text(encoding="utf-8").splitlines()[0]
    files = {
        "metrics.jsonl": json.loads(first),
        "telemetry/rank_00000.jsonl": json.loads(rank),
        "environment.json": json.loads((folder / "environment.json").read_text(encoding="utf-8")),
        "config.yaml": yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")),
    }
    for name, tree in files.items():
        sound = (folder / name).read_text(encoding="utf-8")
        for place in _leaves(tree):
            # JSON is YAML too; written by hand, because YAML's own writer makes an integer of 400 digits readable
            (folder / name).write_text(json.dumps(_replaced(tree, place, value)) + "\n", encoding="utf-8")
            html = page(read_runs([folder]))
            html.encode("utf-8", errors="replace")
            seen = _Text(html)
            assert set(seen.tags) <= known | {"p"}, (name, place)
            assert not seen.handlers and not seen.addresses, (name, place)
        (folder / name).write_text(sound, encoding="utf-8")


@pytest.mark.parametrize("name", ["metrics.jsonl", "environment.json", "config.yaml", "telemetry/rank_00000.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b"null",
        b'"x"',
        b"\0",
        b"a: &a [*a, *a]",
        b"a: 0x" + b"f" * 20_000,
    ],
    ids=[
        "empty",
        "bytes",
        "deep list",
        "deep mapping",
        "long number",
        "null",
        "text",
        "zero byte",
        "itself",
        "long hexadecimal",
    ],
)
def test_a_damaged_file_is_a_note(tmp_path: Path, name: str, content: bytes) -> None:
    folder = _write(tmp_path / "run", ranks=2, steps=2)
    (folder / name).write_bytes(content)
    (folder / "telemetry" / "rank_².jsonl").write_text("{}\n", encoding="utf-8")
    page(read_runs([folder]))


def test_a_configuration_that_repeats_itself_without_end_is_cut(tmp_path: Path) -> None:
    """Nine lists of nine references each would be 10^9 values when written out."""
    folder = _write(tmp_path / "run", ranks=1, steps=1)
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))]
    (folder / "config.yaml").write_text("\n".join(lines), encoding="utf-8")
    assert len(page(read_runs([folder]))) < 10**6


def test_the_tool_writes_the_page(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", ranks=1, steps=2)
    result = run_tool("report", folder)
    assert f"wrote {folder / 'report.html'}" in result.stdout
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "is not a folder" in run_tool("report", tmp_path / "none", status=2).stderr


def test_a_run_that_samples_its_completions(tmp_path: Path) -> None:
    """A step of 0.5 s: 0.1 of sampling, 0.05 of rewards, 0.3 of forward and backward; texts of beginning and end."""
    folder = _write(tmp_path / "run", ranks=1, steps=12)
    lines: list[dict[str, object]] = []
    for step in range(1, 13):
        lines.append(
            _record(
                step, reward=0.1 * step, rollout_seconds=0.1, reward_seconds=0.05, uniform_groups=0.5,
                groups_dropped=0.0, unscored=0.0, entropy=1.5,
                **{"rewards/f/mean": 0.1 * step, "rewards/g/mean": 0.0, "rewards/f/std": 0.2, "rewards/g/std": 0.3},
                **{f"completions/{name}_length": size for name, size in (("mean", 7.0), ("min", 2.0), ("max", 9.0))},
                **{"completions/clipped_ratio": 0.25, "completions/min_terminated_length": 3.0},
            )
        )  # fmt: skip
        lines.append({"step": step, "completion/1": f"f 1: <b>prompt</b> {step} -> answer"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    text = _Text(page(read_runs([folder]))).text
    for title in ("Reward", "Completions", "Policy", "Samples with their rewards"):
        assert title in text, title
    assert "sampling completions 100 ms 20.0%" in text and "rewards 50 ms 10.0%" in text
    assert "forward and backward 300 ms 60.0%" in text
    assert [f"<b>prompt</b> {step} ->" in text for step in range(1, 13)] == [True, True, *[False] * 2, *[True] * 8]
    assert "groups of prompts" not in text and "prompts left out" not in text, "nothing was left out"
    plain = _Text(page(read_runs([_write(tmp_path / "other", ranks=1, steps=2)]))).text
    assert "Samples" not in plain and "Reward" not in plain
