"Runs of tests/faults/unruly_worker.py in a home of their own, and small disks to write them to."
import shutil
import subprocess

import pytest
from unruly import ENV

from shardnb.run.handle import Run
from shardnb.run.launch import LocalLauncher
from shardnb.run.rundir import RunDir


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
