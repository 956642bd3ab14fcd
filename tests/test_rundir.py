"Files that passed through more hands than a notebook shows: ids, whole lines under a busy writer, offsets, NaN."
import json
import math
import os
import subprocess
import sys

import pytest

from shardnb.run.event import EventReader, EventWriter
from shardnb.run.handle import Run
from shardnb.run.rundir import RunDir, RunNotFound, write_json

OUTSIDE = ["../runs", "..", ".", "", "/etc", "a/../../b", "a/b", "a\\b", "~", ".hidden", "x" * 200, "a\x00b", "a\nb", "%2e%2e", "a b", "$HOME", None, 3]


@pytest.mark.parametrize("id", OUTSIDE)
def test_an_id_never_leads_out_of_the_folder(id, tmp_path):
    RunDir.create("model: tiny\n", plan={}, home=tmp_path)
    with pytest.raises(RunNotFound): RunDir.find(id, tmp_path)


def test_a_strategy_name_never_leads_out_of_the_folder(tmp_path):
    rundir = RunDir.create("model: tiny\n", plan={"strategy": "../../evil/../x"}, home=tmp_path)
    assert rundir.path.parent == tmp_path / "runs" and RunDir.find(rundir.id, tmp_path) == rundir


def test_a_home_of_links_and_strangers_is_only_read_for_runs(tmp_path):
    rundir = RunDir.create("model: tiny\n", plan={}, home=tmp_path)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "file").write_text("x")
    assert RunDir.list(tmp_path) == [rundir]


def test_folders_are_for_the_owner_alone(tmp_path):
    old = os.umask(0)
    try: rundir = RunDir.create("model: tiny\n", cell="x = 1", inputs=b"x", plan={}, home=tmp_path / "home")
    finally: os.umask(old)
    for p in [tmp_path / "home", rundir.path, *(p for p in rundir.path.iterdir() if p.is_dir())]: assert p.stat().st_mode & 0o077 == 0, p


def test_lines_are_whole_under_a_busy_writer(tmp_path):
    "A writer in another process, a reader that polls: every event once, in order, none broken"
    path = tmp_path / "rank0.jsonl"
    code = ("import sys; from shardnb.run.event import EventWriter\nw = EventWriter(sys.argv[1], 0)\n"
            "for i in range(3000): w.write('note', message='x' * (i % 997), i=i)")
    p = subprocess.Popen([sys.executable, "-c", code, str(path)])
    reader, got = EventReader(path), []
    while p.poll() is None: got += reader.read()
    got += reader.read()
    assert [e["i"] for e in got] == list(range(3000)) and reader.bad == 0 and reader.offset == path.stat().st_size


def test_two_writers_never_mix_lines(tmp_path):
    path = tmp_path / "rank0.jsonl"
    code = ("import sys; from shardnb.run.event import EventWriter\nw = EventWriter(sys.argv[1], int(sys.argv[2]))\n"
            "for i in range(1000): w.write('note', message=sys.argv[2] * 500)")
    for p in [subprocess.Popen([sys.executable, "-c", code, str(path), r]) for r in "12"]: assert p.wait() == 0
    events = (reader := EventReader(path)).read()
    assert reader.bad == 0 and len(events) == 2000 and all(set(e["message"]) == {str(e["rank"])} for e in events)


def test_an_offset_can_be_kept_and_used_again(tmp_path):
    w = EventWriter(tmp_path / "e", 0)
    w.write("step", step=1, loss=2.)
    first = EventReader(tmp_path / "e")
    first.read()
    w.write("step", step=2, loss=1.)
    assert [e["step"] for e in EventReader(tmp_path / "e", first.offset).read()] == [2]


def test_a_line_cut_in_the_middle_of_a_letter_waits(tmp_path):
    line = json.dumps(dict(v=1, t=0., rank=0, kind="note", message="Ä→"), ensure_ascii=False).encode() + b"\n"
    reader, path, got = EventReader(tmp_path / "e"), tmp_path / "e", []
    for i in range(len(line)):
        with open(path, "ab") as f: f.write(line[i:i + 1])
        got += reader.read()
        assert bool(got) == (i == len(line) - 1)
    assert got[0]["message"] == "Ä→" and reader.bad == 0


@pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks(tmp_path, x):
    rundir = RunDir.create("model: tiny\n", plan={}, home=tmp_path)
    w = EventWriter(rundir.event_path(0), 0)
    w.write("step", step=1, loss=x, grad_norm=x)
    w.write("step", step=2, loss=1.)
    for line in rundir.event_path(0).read_text().splitlines(): json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    loss = Run(rundir).metrics.loss
    assert repr(float(loss[0])) == repr(x) and loss[1] == 1.


def test_a_file_in_bad_order_is_still_a_run(tmp_path):
    "Garbage in one rank's events costs that line only"
    rundir = RunDir.create("model: tiny\n", plan={}, home=tmp_path)
    rundir.event_path(0).write_bytes(b"\xff\xfe garbage\n[]\n3\nnull\n")
    EventWriter(rundir.event_path(0), 0).write("step", step=1, loss=1.)
    run = Run(rundir)
    assert run.metrics.step.tolist() == [1] and run._readers[0].bad == 4


def test_half_files_of_a_power_cut_are_no_files(tmp_path, monkeypatch):
    "What was renamed into its place and didn't reach the disk is empty"
    from shardnb.run import pool
    from shardnb.run.explain import first_cause
    from shardnb.run.failure import RunError
    from shardnb.run.remedy import advised
    rundir = RunDir.create("model: tiny\n", plan={}, home=tmp_path / "home")
    for p in (rundir.error_path(0), rundir.errors_path / "advice.json"): p.touch()
    write_json(rundir.error_path(1), {"rank": 1, "type": "ValueError", "message": "a bad batch", "time": 1., "secondary": False})
    assert first_cause(rundir, {0: 1, 1: 1})["message"] == "ValueError: a bad batch"
    assert advised(rundir, RunError(topic="memory")).suggestions == []
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (pool._top() / "a").mkdir()
    (pool._top() / "a" / "pool.json").touch()
    assert pool.pools() == []
