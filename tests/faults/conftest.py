"Runs of tests/faults/unruly_worker.py in a home of their own, and what must be true when they are over."
import os
import shutil
import subprocess
import time

import psutil
import pytest

from shardnb.run.handle import Run
from shardnb.run.launch import LocalLauncher
from shardnb.run.process import alive
from shardnb.run.rundir import RunDir, read_json

ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def until(condition, timeout=60):
    "Wait for a condition and give back what it gave"
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if found := condition(): return found
        time.sleep(.02)
    raise AssertionError(f"not within {timeout} s")


def ended(run, timeout=60):
    "exit.json, once it is there"
    until(run.rundir.exit_path.exists, timeout)
    return read_json(run.rundir.exit_path)


def stepping(run, step=2):
    "The run, once every rank has done so many steps"
    until(lambda: run.rundir.exit_path.exists() or (len(run.pids) == run.plan["nproc"] and all(len(run.events("step", rank=r)) >= step for r in run.rundir.ranks())))
    assert not run.rundir.exit_path.exists(), run.error
    return run


def family(run):
    "Every process of a run that lives now: the supervisor, the ranks, and all below them"
    state = read_json(run.rundir.state_path) or {}
    found = {p["pid"]: p for p in [state.get("supervisor"), *state.get("ranks", {}).values()] if p}
    for top in list(found):
        try: found |= {c.pid: {"pid": c.pid, "create_time": c.create_time()} for c in psutil.Process(top).children(recursive=True)}
        except psutil.NoSuchProcess: continue
    return list(found.values())


def gone(procs, timeout=5):
    "No process of these is left, nor will be in a moment: a supervisor writes exit.json and ends after it"
    until(lambda: not any(map(alive, procs)), timeout)
    return True


@pytest.fixture
def start(tmp_path, monkeypatch):
    "Starts runs, and leaves no process behind"
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path / "home"))
    started = []

    def go(do="", rank=1, steps=10_000, nproc=2, home=None, env=ENV, **test):
        rundir = RunDir.create("model: tiny\n", plan={"strategy": "ddp", "nproc": nproc, "world_size": nproc, "env": env, "test": {"do": do, "rank": rank, "steps": steps, **test}}, home=home)
        started.append(Run(rundir))
        LocalLauncher("unruly_worker").start(rundir)
        return started[-1]
    yield go
    for run in started: run.kill()


@pytest.fixture
def small_disk(tmp_path):
    "Mounts small file systems; skips where this user may not"
    made = []

    def mount(name="disk", size="4m", options="size={}"):
        path = tmp_path / name
        path.mkdir()
        if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "-o", options.format(size), "tmpfs", path], capture_output=True).returncode:
            pytest.skip("a file system can't be mounted here (needs root)")
        made.append(path)
        return path
    yield mount
    for path in made: subprocess.run(["umount", "-l", path], check=True)


def fill(folder, name="ballast"):
    "Take every last byte of a disk"
    fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for size in (1 << 16, 1 << 12, 1):
            while True:
                try: os.write(fd, bytes(size))
                except OSError: break
    finally: os.close(fd)
    return folder / name
