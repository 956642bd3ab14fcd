"What SIGTERM, SIGHUP and Ctrl-C mean to `shardnb train` and `shardnb attach`, with real processes and real signals."
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from waiting import within

import shardnb
from shardnb.run.state import ENDED
from shardnb.run.rundir import RunDir

LONG = "--model tiny --dataset demo --strategy ddp --nproc 1 --max-steps 100000 --max-length 64 --micro-batch 1 --grad-accum 1".split()


until = within(90, .1)


def command(*words, home, **kw):
    env = dict(os.environ, SHARDNB_HOME=str(home), PYTHONUNBUFFERED="1")
    # what its parent ignores, as under nohup, a process ignores too
    return subprocess.Popen([sys.executable, "-m", "shardnb.ui.cli", *words], preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **kw)


@pytest.fixture
def home(tmp_path):
    yield tmp_path / "home"
    for rd in RunDir.list(tmp_path / "home"):
        run = shardnb.attach(rd.id, tmp_path / "home")
        if not run.ended: run.kill()


@pytest.fixture
def training(home):
    "`shardnb train`, in the middle of its steps"
    p = command("train", *LONG, home=home)
    rd = until(lambda: RunDir.list(home))[0]
    run = shardnb.attach(rd.id, home)
    until(lambda: len(run.events("step", rank=0)) >= 2 or run.ended)
    assert run.state == "running", p.stdout.read() if p.poll() is not None else run.state
    yield p, run
    if p.poll() is None: p.kill()


def test_sigterm_stops_and_saves(training):
    "A batch system's warning: the run ends at a step and its model is there"
    p, run = training
    p.send_signal(signal.SIGTERM)
    out, _ = p.communicate(timeout=90)
    assert p.returncode == 128 + signal.SIGTERM
    assert run.state == "stopped" and not run.pids
    assert "SIGTERM: the run is asked to stop" in out and "stopped before its end" in out and "saved: " in out
    assert run.checkpoints and run.checkpoints[-1].complete


def test_attach_and_sighup_leave_the_run_going(training, home):
    p, run = training
    looking = command("attach", run.id, home=home)
    until(lambda: "loss" in looking.stdout.readline())
    looking.send_signal(signal.SIGTERM)
    out, _ = looking.communicate(timeout=20)
    assert looking.returncode == 143 and re.search(rf"{re.escape(run.id)} goes on without this command.*shardnb attach {re.escape(run.id)}.*shardnb stop {re.escape(run.id)}", out)
    p.send_signal(signal.SIGHUP)
    out, _ = p.communicate(timeout=20)
    assert p.returncode == 128 + signal.SIGHUP and f"{run.id} goes on without this command" in out
    seen = len(run.events("step", rank=0))
    until(lambda: len(run.events("step", rank=0)) > seen)
    assert run.state == "running"
    run.stop()
    until(lambda: run.state in ENDED)
    assert run.state == "stopped"


def test_a_second_sigterm_leaves_at_once(training):
    p, run = training
    pids = list(run.pids.values())
    for pid in pids: os.kill(pid, signal.SIGSTOP)
    try:
        p.send_signal(signal.SIGTERM)
        until(lambda: run.rundir.stop_requested())
        p.send_signal(signal.SIGTERM)
        out, _ = p.communicate(timeout=10)
    finally:
        for pid in pids: os.kill(pid, signal.SIGCONT)
    assert p.returncode == 143 and f"{run.id} goes on stopping without this command" in out
    until(lambda: run.ended)
    assert run.state == "stopped"


def test_before_the_launch(monkeypatch, capsys):
    "A signal while the run is planned: nothing was started, and it is said"
    from shardnb.run import start
    from shardnb.ui.cli import main
    monkeypatch.setattr(start, "train", lambda *a, **kw: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(5))
    assert main(["train", *LONG]) == 143
    assert "before anything was launched" in capsys.readouterr().err


def test_an_interrupt_in_the_middle_of_a_launch_leaves_no_run(monkeypatch, tmp_path):
    from shardnb.plan.recipe import Recipe
    from shardnb.run import start
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    def interrupted(self, rundir): raise KeyboardInterrupt
    monkeypatch.setattr(start.LocalLauncher, "start", interrupted)
    with pytest.raises(KeyboardInterrupt): start._start(Recipe(model="tiny"), None, {"strategy": "ddp", "nproc": 1}, None)
    assert RunDir.list(tmp_path)[0].stop_requested()["how"] == "kill"


def test_nohup():
    "Where SIGHUP is ignored it stays ignored"
    from shardnb.ui.cli import _leave, _signals
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _signals(_leave): assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and signal.getsignal(signal.SIGTERM) is _leave
        assert signal.getsignal(signal.SIGTERM) is not _leave
    finally: signal.signal(signal.SIGHUP, old)


@pytest.mark.parametrize("name,words", [("train", ("SIGTERM", "SIGHUP", "143", "Slurm")), ("attach", ("SIGTERM", "the run goes on")), ("demo", ("SIGTERM",))])
def test_help_says_it(name, words, capsys):
    from shardnb.ui.cli import command_parser
    text = command_parser(name).format_help()
    assert all(w in text for w in words)
