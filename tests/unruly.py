"Runs of tests/unruly_worker.py, and what is asked of a run that goes wrong: that it has ended, and that nothing of it is left."
import os

import psutil
from waiting import within, word

from shardnb.run.handle import Run
from shardnb.run.launch import LocalLauncher
from shardnb.run.output import claim
from shardnb.run.process import alive
from shardnb.run.rundir import RunDir, read_json

ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


until = within(150, .02)  # s; a machine that is busy with other tests takes long to import torch


class Started:
    "Runs of a test"
    def __init__(self): self.runs = []

    def start(self, do="", rank=1, steps=10_000, nproc=2, home=None, env=ENV, output_dir=None, **test):
        "Start a run whose rank `rank` does `do` at its third step"
        rundir = RunDir.create("model: tiny\n", plan={"strategy": "ddp", "nproc": nproc, "world_size": nproc, "env": env, "output_dir": output_dir, "test": {"do": do, "rank": rank, "steps": steps, **test}}, home=home)
        self.runs.append(Run(rundir))
        if output_dir: claim(output_dir, rundir)
        LocalLauncher("unruly_worker").start(rundir)
        return self.runs[-1]

    def end(self):
        for run in self.runs:
            if run.rundir.path.exists(): run.kill()


def tell(run):
    "Give ranks that wait in `until_told` the word"
    word(run.rundir).touch()


def ended(run, timeout=150):
    "exit.json, once it is there"
    until(run.rundir.exit_path.exists, timeout)
    return read_json(run.rundir.exit_path)


def stepping(run, step=2):
    "The run, once every rank has done so many steps"
    until(lambda: run.rundir.exit_path.exists() or (run.state == "running" and len(run.pids) == run.plan["nproc"] and all(len(run.events("step", rank=r)) >= step for r in run.rundir.ranks())))
    assert not run.rundir.exit_path.exists(), run.error
    return run


def warned(run, topic):
    "The warnings about it, as the ranks wrote them"
    return [e for e in run.events("warning") if e.get("topic") == topic]


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
