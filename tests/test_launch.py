"Process faults, on small ranks that only reduce a tensor: nothing hangs, nothing is left, and the cause is named."
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from marks import slow
from unruly import ENV, ended, family, gone, stepping, tell
from waiting import within

from shardnb.plan.machine import Machine
from shardnb.plan.recipe import Recipe
from shardnb.run.event import EventReader
from shardnb.run.handle import Run
from shardnb.run.launch import STALLED, LocalLauncher, Supervisor, alive, proc_id, rank_env
from shardnb.run.registry import attach, runs
from shardnb.run.rundir import RunDir, read_json


until = within(60)


DEAF = "time.sleep(600)"   # at the third step, where nobody looks for a stop any more


def training(run, step=1): return stepping(run, step)
def procs(run): return [{"pid": e["pid"], "create_time": e["create_time"]} for e in run.events("start")]
def nothing_left(run): return not any(map(alive, [*procs(run), read_json(run.rundir.state_path)["supervisor"]]))


def test_a_run_ends_well_and_tells_it(start, tmp_path):
    run = start(steps=10, output_dir=str(tmp_path / "out"))
    end = ended(run)
    assert (end["state"], end["returncodes"], end["error"]) == ("done", {"0": 0, "1": 0}, None)
    assert run.state == "done" and run.metrics.step.tolist() == list(range(1, 11))
    assert end["summary"]["step"] == 10 and runs().iloc[0].state == "done"
    until(lambda: nothing_left(run), 5)
    assert not os.listdir(tmp_path / "out")   # nor its claim


@pytest.mark.parametrize("nproc", [slow(2), 3])
def test_a_killed_rank_is_named_within_five_seconds(start, nproc):
    run = training(start(nproc=nproc), 3)
    before = procs(run)
    victim = run.pids[1]
    t = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    end = ended(run)
    assert time.monotonic() - t < 5
    assert end["state"] == "failed" and end["returncodes"]["1"] == -9
    assert (run.error.rank, run.error.cause, run.error.phase) == (1, "SIGKILL", "training") and run.error.step >= 3 and run.error.fix
    assert not any(map(alive, before)) and end["survivors"] == []


def test_the_first_error_is_shown_not_the_one_that_followed(start):
    run = start("raise ValueError('a bad batch')")
    assert ended(run)["state"] == "failed"
    assert (run.error.rank, run.error.cause, run.error.message, run.error.step) == (1, "ValueError", "ValueError: a bad batch", 3)
    assert "a bad batch" in run.error.traceback


def test_a_rank_that_leaves_without_a_word(start):
    run = start("os._exit(7)", rank=0)
    assert ended(run)["state"] == "failed"
    assert run.error.rank == 0 and "exit code 7" in run.error.message


def test_a_deaf_rank_does_not_hold_up_the_end(start):
    "rank 1 ignores SIGTERM and sleeps; rank 0 is killed; torch elastic alone would wait 30 s"
    run = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); events.write('note', message='deaf'); time.sleep(600)")
    until(lambda: run.events("note") and len(run.pids) == 2)
    t = time.monotonic()
    os.kill(run.pids[0], signal.SIGKILL)
    end = ended(run)
    assert time.monotonic() - t < 8 and run.error.rank == 0 and end["returncodes"] == {"0": -9, "1": -9}


def test_children_of_a_killed_rank_are_gone_too(start):
    run = start("import signal\nchild = os.posix_spawn(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)'], os.environ)\n"
                "events.write('note', message='child', **proc_id(child)); until_told(); os.kill(os.getpid(), signal.SIGKILL)")
    child = until(lambda: run.events("note"))[0]
    assert alive(child)
    tell(run)
    assert ended(run)["state"] == "failed"
    assert not alive(child)


def test_a_graceful_stop(start):
    run = training(start())
    assert run.stop().state in ("stopping", "stopped")
    assert ended(run)["state"] == "stopped" and ended(run)["forced"] is None
    ends = run.events("end")
    assert {e["state"] for e in ends} == {"stopped"} and len({e["step"] for e in ends}) == 1  # all ranks at the same step
    run.wait()


def test_a_stop_file_made_by_hand(start):
    run = training(start())
    run.rundir.stop_path.write_text("{}")
    assert ended(run)["state"] == "stopped" and ended(run)["error"] is None


def test_a_state_that_cannot_be_written_does_not_deafen_the_supervisor(start, monkeypatch):
    monkeypatch.setenv("SHARDNB_STOP_GRACE", "0.5")
    run = training(start(DEAF, others=DEAF), 3)
    while not run.rundir.state_path.is_dir():   # from here on replacing the file fails, as on a full disk
        run.rundir.state_path.unlink(missing_ok=True)
        with suppress(FileExistsError): run.rundir.state_path.mkdir()   # the supervisor was quicker
    log = until(lambda: "Error" in (text := run.rundir.log_path("supervisor").read_text()) and text)
    assert "write_state" in log
    run.rundir.request_stop()
    assert (ended(run)["state"], ended(run)["forced"], ended(run)["survivors"]) == ("stopped", "SIGTERM", [])
    assert not list(run.dir.glob(".state.json.*"))


def test_an_error_outside_the_worker_is_filed_under_the_last_phase(start, monkeypatch, tmp_path):
    (tmp_path / "escaping_worker.py").write_text("import os, sys\nfrom shardnb.run.event import EventWriter\nfrom shardnb.run.rundir import RunDir\n"
        "events = EventWriter(RunDir(sys.argv[1]).event_path(rank := int(os.environ['RANK'])), rank)\n"
        "events.write('phase', phase='training', state='begin'), events.write('step', step=3)\n[][1]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rundir = RunDir.create("model: tiny\n", plan={"strategy": "ddp", "nproc": 1, "env": ENV})
    LocalLauncher("escaping_worker").start(rundir)
    run = Run(rundir)
    assert ended(run)["state"] == "failed"
    assert (run.error.rank, run.error.cause, run.error.phase, run.error.step) == (0, "IndexError", "training", 3)
    assert run.error.message == "IndexError: list index out of range"


def test_a_rank_that_stands_still_is_named(tmp_path):
    rundir = RunDir.create("model: tiny\n", plan={"nproc": 2}, home=tmp_path)
    sup = Supervisor(rundir, "unruly_worker")
    sup.procs = {0: proc_id(), 1: proc_id()}
    assert sup.stalled() == []
    for r in (0, 1): rundir.beat(r, "training", 4)
    old = time.time() - STALLED - 1
    os.utime(rundir.heartbeat_path(1), (old, old))
    assert sup.stalled() == [1]
    os.utime(rundir.heartbeat_path(0), (old, old))
    assert sup.stalled() == []  # nobody moves: the machine slept, or all wait for one thing


@pytest.mark.parametrize("visible, want", [(None, "1,3"), ("4, 5,6,7", "5,7"), ("GPU-aa,GPU-bb,GPU-cc,GPU-dd", "GPU-bb,GPU-dd")])
def test_gpus_count_among_the_visible_ones(monkeypatch, visible, want):
    if visible is None: monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = Machine.preset("4xA100")
    env = rank_env(Recipe(model="tiny", dataset="demo", gpus=[1, 3]), machine, 2)
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == (want, "PCI_BUS_ID")
    assert "CUDA_VISIBLE_DEVICES" not in rank_env(Recipe(model="tiny", dataset="demo"), machine, 4)  # all that are visible


def test_a_stop_that_ranks_do_not_heed_is_forced(start, monkeypatch):
    monkeypatch.setenv("SHARDNB_STOP_GRACE", "0.5")
    run = training(start(DEAF, others=DEAF), 3)
    run.stop()
    end = ended(run)
    assert (end["state"], end["forced"], end["error"]) == ("stopped", "SIGTERM", None)
    until(lambda: nothing_left(run), 5)


def test_kill(start):
    run = training(start())
    mine = procs(run)
    assert run.kill().state == "stopped" and not any(map(alive, mine))
    assert ended(run)["forced"] == "SIGKILL"


def test_ranks_die_with_their_supervisor(start, monkeypatch):
    run = training(start())
    mine, state = procs(run), read_json(run.rundir.state_path)
    os.kill(state["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: not any(map(alive, mine)), 5)
    monkeypatch.setattr("shardnb.run.state.STALE", .1)
    until(lambda: run.state == "lost", 5)
    assert "supervisor" in run.error.message


def test_a_terminated_supervisor_says_so(start):
    run = training(start())
    os.kill(read_json(run.rundir.state_path)["supervisor"]["pid"], signal.SIGTERM)
    assert ended(run)["state"] == "failed" and run.error.cause == "SIGTERM" and run.error.rank is None
    until(lambda: nothing_left(run), 5)


def test_the_death_of_the_notebook_changes_nothing(tmp_path, monkeypatch):
    "A process starts a run, shares a process group with nobody, and is killed; the run goes on and its events are complete"
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    code = ("import sys, time; sys.path.insert(0, sys.argv[1])\n"
            "from unruly import Started\n"
            "print(Started().start('until_told()', steps=60).id, flush=True); time.sleep(600)")
    p = subprocess.Popen([sys.executable, "-c", code, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    run = attach(p.stdout.readline().strip())
    try:
        training(run, 3)
        os.killpg(p.pid, signal.SIGKILL)
        p.wait(), p.stdout.close()
        assert not run.ended
        tell(run)
        assert ended(run)["state"] == "done"
    finally: run.kill()
    reader = EventReader(run.rundir.event_path(0))
    assert [e["step"] for e in reader.read() if e["kind"] == "step"] == list(range(1, 61)) and reader.bad == 0
    assert attach(run.id).metrics.equals(run.metrics)  # read anew and read bit by bit: the same


def test_two_runs_at_once(start):
    a, b = start(steps=40), start(steps=40)
    assert ended(a)["state"] == ended(b)["state"] == "done"
    ports = [{e["port"] for e in r.events("start")} for r in (a, b)]
    assert len(ports[0]) == len(ports[1]) == 1 and ports[0] != ports[1]


def test_a_run_whose_folder_is_deleted_ends(start):
    "Nobody could follow or stop it any more, and its ranks would make the folder again"
    run = stepping(start())
    procs = family(run)
    shutil.rmtree(run.rundir.path, ignore_errors=True)
    assert gone(procs, 30) and not run.rundir.path.exists()


def test_a_broken_import_is_on_record(start, monkeypatch, tmp_path):
    (tmp_path / "broken_worker.py").write_text("import no_such_package_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rundir = RunDir.create("model: tiny\n", plan={"strategy": "ddp", "nproc": 2, "env": ENV})
    LocalLauncher("broken_worker").start(rundir)
    run = Run(rundir)
    assert ended(run)["state"] == "failed"
    assert run.error.cause == "ModuleNotFoundError" and "no_such_package_here" in run.error.message and run.error.phase == "importing"


HEARD_LATE = """
import sys
from shardnb.run.launch import Supervisor
from shardnb.run.rundir import RunDir
rundir = RunDir(sys.argv[1])
s = Supervisor(rundir, "unruly_worker")
s._run_ranks = rundir.request_stop
over = s._over.set
def at_last(): s._obey(rundir.stop_requested()), over()
s._over.set = at_last
print(s.run())
"""


def test_a_stop_that_is_heard_at_the_very_end_does_not_change_how_it_ended(tmp_path):
    "The thread that obeys a stop may be at it in the moment in which the run is judged"
    rundir = RunDir.create("model: tiny\n", plan={"strategy": "ddp", "nproc": 1, "world_size": 1, "env": ENV}, home=tmp_path)
    done = subprocess.run([sys.executable, "-c", HEARD_LATE, rundir.path], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["stopped"], done.stderr
    assert read_json(rundir.exit_path)["state"] == read_json(rundir.state_path)["state"] == "stopped"
