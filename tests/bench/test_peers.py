"""The comparison harness: same work for everyone, limits that hold, statistics that say what they claim."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.peers import cgroup, conditions, rounds, summary, worker
from bench.peers.compare import logits_difference
from bench.peers.conditions import Ceilings, CpuUse
from bench.peers.engines import ENGINES, Engine, Setup
from bench.peers.process import Chunk, Command, Finished
from bench.peers.rounds import Arena, Case, Round
from bench.peers.shape import ModelShape, read_shape
from bench.peers.streams import forced_tokens
from bench.peers.worker import Measurement, Workload

TINY = ModelShape(
    layers=2, experts=4, experts_per_token=2, hidden=32, expert_inner=16, vocabulary=300, heads=2, key_value_heads=1,
    head_dim=16,
)  # fmt: skip

ZIPF_SEED_1 = [3448, 2849, 2454, 2313, 2260, 1456]
UNIFORM_SEED_1 = [1643, 982, 1116, 242, 2531, 1324]


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zipf", "uniform"])
def test_stream_repeats_for_equal_seeds_only(kind: str) -> None:
    stream = forced_tokens(kind, 200, seed=1, vocabulary=4096)
    assert stream == forced_tokens(kind, 200, seed=1, vocabulary=4096)
    assert stream != forced_tokens(kind, 200, seed=2, vocabulary=4096)
    assert min(stream) >= 2 and max(stream) < 4096


def test_streams_are_frozen() -> None:
    """Published numbers name a seed; a changed generator would silently change what they mean."""
    assert forced_tokens("zipf", 6, seed=1, vocabulary=4096) == ZIPF_SEED_1
    assert forced_tokens("uniform", 6, seed=1, vocabulary=4096) == UNIFORM_SEED_1


def test_longer_stream_begins_with_the_shorter_one() -> None:
    assert forced_tokens("zipf", 300, seed=3, vocabulary=100)[:50] == forced_tokens("zipf", 50, seed=3, vocabulary=100)


def test_zipf_repeats_tokens_more_than_uniform() -> None:
    zipf = forced_tokens("zipf", 2000, seed=0, vocabulary=4096)
    uniform = forced_tokens("uniform", 2000, seed=0, vocabulary=4096)
    assert len(set(zipf)) < 0.7 * len(set(uniform))


def test_unknown_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="zipf"):
        forced_tokens("zip", 1, seed=0, vocabulary=10)


# --- the work every engine does ---------------------------------------------------------------------------------------


class ScriptedSession:
    """Writes down what it was asked."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.decoded: list[int] = []

    def prefill(self, tokens: list[int], every_position: bool = False) -> np.ndarray:
        self.prompts.append(list(tokens))
        return np.zeros((len(tokens), 8)) if every_position else np.zeros(8)

    def decode(self, token: int) -> np.ndarray:
        self.decoded.append(token)
        return np.zeros(8)

    def resident_expert_bytes(self) -> int | None:
        return 77

    def notes(self) -> dict[str, object]:
        return {"engine": "scripted"}


def test_decode_continues_the_longest_prompt(tmp_path: Path) -> None:
    workload = Workload(tmp_path, vocabulary=50, prompts=(8, 4), new_tokens=5, logits=tmp_path / "logits.npy")
    session = ScriptedSession()
    found = worker.measure(workload, session, worker.Stopwatch())
    stream = forced_tokens("zipf", 8 + 5 + workload.warm_up, seed=1, vocabulary=50)
    warmup, short, long, checked = session.prompts
    assert (short, long, session.decoded) == (stream[:4], stream[:8], stream[8:13])
    assert warmup == stream[13:]
    assert checked == stream[: worker.LOGITS_POSITIONS]
    assert found.resident_expert_bytes == 77
    assert len(found.decode_seconds) == 5 and set(found.ttft_seconds) == {"4", "8"}
    assert np.load(tmp_path / "logits.npy").shape == (16, 8)


def test_there_may_be_no_warm_up_prompt(tmp_path: Path) -> None:
    session = ScriptedSession()
    workload = Workload(tmp_path, vocabulary=50, prompts=(4,), new_tokens=2, warm_up=0)
    worker.measure(workload, session, worker.Stopwatch())
    assert session.prompts == [forced_tokens("zipf", 6, seed=1, vocabulary=50)[:4]]


def test_a_warm_up_of_fewer_than_no_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        worker.workload_parser("").parse_args(["--model", "m", "--vocabulary", "9", "--warm-up", "-1"])
    assert "at least 0" in capsys.readouterr().err


def test_workload_survives_the_command_line() -> None:
    workload = Workload(Path("m"), 4096, prompts=(3, 5), new_tokens=7, stream="uniform", seed=9, threads=1)
    options = worker.workload_parser("").parse_args(worker.workload_arguments(workload))
    assert worker.workload_from(options) == workload


def test_every_engine_gets_the_same_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.engines.smoe_baseline_bytes", lambda threads: 400)
    setup = Setup(tmp_path / "m", tmp_path / "m.gguf", "python-of-llama", tmp_path / "m.offload")
    workload = Workload(setup.model, 4096, seed=5)
    for name, engine in ENGINES.items():
        if engine.variable:
            continue  # a program: test_peers_binaries.py
        (command,) = engine.commands(setup, workload, 1000)
        options, _ = worker.workload_parser("").parse_known_args(command.words[3:])
        sent = worker.workload_from(options)
        assert replace(sent, model=workload.model) == workload, name
        reads_gguf = name.startswith("llama") or "gguf" in name
        assert sent.model == (setup.gguf if reads_gguf else setup.model)
    (command,) = ENGINES["smoe"].commands(setup, workload, 1000)
    assert command.words[-2:] == ["--memory", "600"]
    assert command.words[-4:-2] == ["--set", "context_tokens=224"]  # as much room as any other engine has


def test_commands_are_made_before_processes_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them takes seconds, and brings parts of the file into the page cache: they read a vocabulary."""
    steps: list[str] = []

    class Watch:
        use = QUIET

        def __enter__(self) -> Watch:
            steps.append("measured from here on")
            return self

        def __exit__(self, *failure: object) -> None:
            pass

    def commands(setup: Setup, workload: Workload, limit_bytes: int | None) -> list[Command]:
        steps.append("commands")
        return [Command(["engine"])]

    def run(command: Command, *others: object) -> Finished:
        steps.append(command.words[0])
        return Finished(1, (Chunk("", 0),), "stopped")

    engine = Engine(commands, lambda setup: [])
    for name, value in {"CpuWatch": Watch, "run_process": run, "ENGINES": {"engine": engine}}.items():
        monkeypatch.setattr(rounds, name, value)
    monkeypatch.setattr(rounds, "read_into_page_cache", lambda files: steps.append("page cache"))
    monkeypatch.setattr(rounds, "ceilings", lambda *given: SOME_CEILINGS)
    setup = Setup(tmp_path / "m", tmp_path / "m.gguf", "python", tmp_path)
    arena = Arena(setup, Workload(tmp_path, 50), TINY, None, 1, 0)
    rounds.run_round(arena, "engine", Case(), 0)
    assert steps == ["commands", "page cache", "measured from here on", "engine"]


# --- statistics -------------------------------------------------------------------------------------------------------

QUIET = CpuUse(seconds=1.0, ours=1.0, others=0.01, steal=0.0)
SOME_CEILINGS = Ceilings(10e9, 1e9, 1e9)


def make_round(engine: str, pair: int, tokens_per_second: float | None, disk_bytes: int = 0) -> Round:
    """A round of four tokens at a given rate; None = it failed."""
    measurement = None
    if tokens_per_second is not None:
        seconds = [1 / tokens_per_second] * 4
        measurement = Measurement(ttft_seconds={"16": 1.0}, decode_seconds=seconds, disk_bytes={"decode": disk_bytes})
    error = None if measurement else "killed"
    return Round(engine, Case(), pair, measurement, error, None, SOME_CEILINGS, QUIET)


def test_pairs_cancel_a_machine_that_changes_speed() -> None:
    """Rates vary tenfold between pairs, the ratio inside each does not: medians of each would say 2.0 only by luck."""
    ours = [make_round("a", pair, rate) for pair, rate in enumerate((20.0, 2.0, 8.0))]
    theirs = [make_round("b", pair, rate) for pair, rate in enumerate((10.0, 1.0, 4.0))]
    ratios = summary.paired_ratios(ours, theirs, lambda round_: round_.decode_rate)
    assert ratios == pytest.approx([2.0, 2.0, 2.0])


def test_seconds_before_decoding_are_those_of_the_processes_less_decoding() -> None:
    assert make_round("a", 0, 8.0).seconds_before_decoding == pytest.approx(QUIET.seconds - 4 / 8.0)


def test_failed_rounds_leave_their_pair_out() -> None:
    ours = [make_round("a", 0, 3.0), make_round("a", 1, None), make_round("a", 2, 8.0)]
    theirs = [make_round("b", 0, None), make_round("b", 1, 1.0), make_round("b", 2, 2.0)]
    assert summary.paired_ratios(ours, theirs, lambda round_: round_.decode_rate) == pytest.approx([4.0])


def test_numbers_are_written_for_people() -> None:
    assert str(summary.Spread(2345.6, 0.12345, 9999.4)) == "2346 (0.123-9999)"
    assert str(summary.Spread(1.0, 1.0, 1.0)) == "1"


def test_spread_ignores_what_is_unknown() -> None:
    assert summary.spread([3.0, None, 1.0, 2.0]) == summary.Spread(2.0, 1.0, 3.0)
    assert summary.spread([None]) is None


def test_possible_rate_counts_disk_and_memory_one_after_the_other() -> None:
    shape = ModelShape()
    disk_bytes = 500_000_000
    seconds = shape.touched_bytes / 10e9 + disk_bytes / 1e9
    round_ = make_round("a", 0, 1 / seconds, disk_bytes=4 * disk_bytes)
    assert round_.disk_bytes_per_token == disk_bytes
    assert round_.of_possible(shape) == pytest.approx(1.0)


def test_table_names_failures_and_ratios() -> None:
    case = [make_round("a", 0, 4.0), make_round("b", 0, 2.0), make_round("a", 1, 4.0), make_round("b", 1, None)]
    text = summary.table(case, ["a", "b"], [16], ModelShape())
    assert "b, pair 1: killed" in text
    assert "a / b, median of pairs (range): decode rate 2, 2nd half 2," in text
    assert "1 of 2" in text


def test_logits_difference() -> None:
    expected = np.array([[0.0, 1.0], [2.0, 0.0]])
    difference = logits_difference(expected + np.array([[0.0, 0.25], [-2.5, 0.0]]), expected)
    assert difference == {"max_abs_difference": 2.5, "largest_logit": 2.0, "top1_agreement": 0.5}


# --- conditions -------------------------------------------------------------------------------------------------------


def test_cpu_line_counts_interrupts_as_busy_and_waiting_not() -> None:
    line = "cpu  100 10 50 9000 700 5 15 30 0 0\n"
    assert conditions.cpu_seconds(line, ticks_per_second=100) == (1.8, 0.3)


def test_rates_are_of_the_right_size(tmp_path: Path) -> None:
    assert 1e8 < conditions.memory_read_rate(threads=1, seconds=0.01, buffer_bytes=1 << 22) < 1e13
    assert conditions.disk_read_rate([tmp_path / "missing"], 4096, readers=1, seconds=0.01) is None


def test_machine_names_no_host() -> None:
    described = conditions.machine()
    assert os.uname().nodename not in str(described)
    assert described["cores"] >= 1


# --- memory limits ----------------------------------------------------------------------------------------------------

V1_MOUNT = "30 25 0:26 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "42 25 0:30 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


class FakeTree:
    """A /proc/self and a file system root under a temporary directory."""

    def __init__(self, base: Path, mounts: str, groups: str) -> None:
        self.proc, self.root = base / "proc", base / "root"
        self.proc.mkdir()
        (self.proc / "mountinfo").write_text("20 1 8:1 / / rw - ext4 disk rw\n" + mounts)
        (self.proc / "cgroup").write_text(groups)

    def group(self, path: str, **files: str) -> Path:
        """Make a group with the given control files (`cgroup_procs="1"` = `cgroup.procs`)."""
        group = self.root / path
        group.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (group / name.replace("_", ".", 1)).write_text(text)
        return group

    def parent(self) -> cgroup.MemoryParent:
        return cgroup.find_parent(self.proc, self.root)


def test_v1_group_goes_below_our_own(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path, V1_MOUNT.format(root="/"), "7:blkio:/\n4:memory:/job/3\n0::/\n")
    own = tree.group("sys/fs/cgroup/memory/job/3")
    assert tree.parent() == cgroup.MemoryParent(1, own)


def test_v1_mount_of_a_container_shows_a_part_of_the_tree(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path, V1_MOUNT.format(root="/docker/ab"), "4:memory:/docker/ab/x\n")
    own = tree.group("sys/fs/cgroup/memory/x")
    assert tree.parent().path == own


def test_v2_uses_the_nearest_group_that_delegates_memory(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path, V2_MOUNT.format(root="/"), "0::/user/shell\n")
    tree.group("sys/fs/cgroup", cgroup_controllers="cpu memory", cgroup_subtree_control="memory")
    user = tree.group("sys/fs/cgroup/user", cgroup_controllers="memory", cgroup_subtree_control="memory")
    tree.group("sys/fs/cgroup/user/shell", cgroup_controllers="", cgroup_procs="1\n2\n")
    assert tree.parent() == cgroup.MemoryParent(2, user)


def test_v2_moves_itself_out_of_the_way_when_alone(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path, V2_MOUNT.format(root="/"), "0::/scope\n")
    tree.group("sys/fs/cgroup", cgroup_controllers="", cgroup_subtree_control="")
    scope = tree.group("sys/fs/cgroup/scope", cgroup_controllers="memory", cgroup_procs=f"{os.getpid()}\n")
    with pytest.raises(cgroup.CgroupError):  # plain files do not act on "+memory" ...
        tree.parent()
    assert (scope / "cgroup.subtree_control").read_text() == "+memory"  # ... but it was asked for
    assert (scope / "smoe-bench-harness" / "cgroup.procs").read_text() == str(os.getpid())


def test_v2_stays_put_when_others_share_its_group(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path, V2_MOUNT.format(root="/"), "0::/scope\n")
    scope = tree.group("sys/fs/cgroup/scope", cgroup_controllers="memory", cgroup_procs=f"{os.getpid()}\n1\n")
    with pytest.raises(cgroup.CgroupError):
        tree.parent()
    assert not (scope / "smoe-bench-harness").exists()


def test_no_cgroup_says_what_would_help(tmp_path: Path) -> None:
    with pytest.raises(cgroup.CgroupError, match="systemd-run"):
        FakeTree(tmp_path, "", "0::/\n").parent()


@pytest.mark.parametrize(
    ("version", "limit_file", "swap_file", "peak_file"),
    [
        (1, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes"),
        (2, "memory.max", "memory.swap.max", "memory.peak"),
    ],
)
def test_group_writes_the_limit_of_its_version(
    tmp_path: Path, version: int, limit_file: str, swap_file: str, peak_file: str
) -> None:
    group = cgroup.MemoryCgroup(cgroup.MemoryParent(version, tmp_path), 2 << 30)
    assert (group.path / limit_file).read_text() == str(2 << 30)
    assert not (group.path / swap_file).exists()  # no swap accounting here, so nothing to forbid
    assert group.peak_bytes() is None
    (group.path / peak_file).write_text("123\n")
    assert group.peak_bytes() == 123
    for file in group.path.iterdir():
        file.unlink()
    group.close()
    assert not group.path.exists()


def result_of(status: int, output: str = "", errors: str = "") -> tuple[Measurement | None, str | None]:
    finished = Finished(status, (Chunk(output, None),), errors)
    return rounds.read_result(ENGINES["smoe"], [finished], Workload(Path("m"), 10))


def test_worker_reports_in_its_last_line() -> None:
    measurement, error = result_of(0, 'a warning\n{"load_seconds": 2.5}\n')
    assert error is None and measurement == Measurement(load_seconds=2.5)


def test_killed_process_is_explained() -> None:
    measurement, error = result_of(137)
    assert measurement is None and error is not None and "limit" in error


def test_errors_carry_no_directories() -> None:
    _, error = result_of(1, errors="Traceback\nOSError: no such file: /home/someone/models/ref.gguf\n")
    assert error == "exit status 1: OSError: no such file: ref.gguf"


# --- model ------------------------------------------------------------------------------------------------------------


def test_random_model_loads_in_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from bench.peers.model import write_model

    total_bytes = write_model(tmp_path, TINY)
    assert read_shape(tmp_path) == TINY
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert sum(parameter.nbytes for parameter in model.parameters()) == total_bytes
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path)) == TINY.vocabulary
    logits = model(torch.tensor([[5, 7, 9]])).logits
    assert logits.shape == (1, 3, TINY.vocabulary) and logits.isfinite().all()


def test_matrices_of_an_expert_are_neighbours_in_the_file(tmp_path: Path) -> None:
    """One read fetches an expert only if down, gate and up follow each other without a gap."""
    pytest.importorskip("torch")
    import json

    from bench.peers.model import write_model

    write_model(tmp_path, TINY)
    data = next(tmp_path.glob("model-00001*.safetensors")).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for expert in range(TINY.experts):
        names = [f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight" for part in ("down", "gate", "up")]
        (_, down_end), (gate_start, gate_end), (up_start, up_end) = (header[name]["data_offsets"] for name in names)
        assert (down_end, gate_end) == (gate_start, up_start)
        assert up_end - header[names[0]]["data_offsets"][0] == TINY.expert_bytes


def test_touched_bytes_of_the_reference_model() -> None:
    """96 experts of 9.44 MB and the dense weights, as in the README."""
    assert ModelShape().expert_bytes == 9_437_184
    assert ModelShape().touched_bytes == pytest.approx(1.17e9, rel=0.01)
