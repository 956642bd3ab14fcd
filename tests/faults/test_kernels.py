"""Kernels come and go while a run goes on: killed in the middle of it, none of its events is lost and another kernel sees everything; two kernels on one run see, and may do, the same.

`make test` has one of each (the kill itself is in tests/test_kernel.py); `make bench` kills twenty: `SHARDNB_KERNELS=5` for fewer."""
import json
import os
import random
import time

import pytest
from unruly import until
from jupyter_client.manager import KernelManager

import shardnb
from shardnb.run.event import EventReader
from shardnb.run.process import alive
from shardnb.run.rundir import read_json


class Kernel:
    "A real kernel, as a notebook has it"
    def __init__(self, cwd):
        self.km = KernelManager(kernel_name="python3")
        self.km.start_kernel(cwd=str(cwd))
        self.kc = self.km.client()
        self.kc.start_channels()
        self.kc.wait_for_ready(60)

    def run(self, code, timeout=120):
        "What the code prints; an error in the cell is an error here"
        said = []
        reply = self.kc.execute_interactive(code, timeout=timeout, allow_stdin=True, output_hook=lambda m: said.append(m["content"].get("text", "")) if m["msg_type"] == "stream" else None)
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(said).strip().splitlines()[-1] if said else ""

    def kill(self):
        "SIGKILL for the kernel and its whole process group"
        self.kc.stop_channels()
        if self.km.is_alive(): self.km.shutdown_kernel(now=True)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    monkeypatch.delenv("SHARDNB_HOME", raising=False)  # a notebook's runs lie beside it
    made = []
    def start():
        made.append(Kernel(tmp_path))
        return made[-1]
    yield start
    for k in made: k.kill()
    for rd in shardnb.run.rundir.RunDir.list(tmp_path / ".shardnb"):
        run = shardnb.attach(rd.id, tmp_path / ".shardnb")
        if not run.ended: run.kill()


LINE = "--model tiny --dataset demo --strategy {} --nproc 2 --micro-batch 1 --grad-accum 1 --max-length 64 --max-steps {}"
START = "%load_ext shardnb\nr = get_ipython().run_line_magic('shardtrain', {!r})\nprint(r.id)"


def test_two_kernels_on_one_run(kernels, tmp_path):
    "Both show its panel; what one stops is stopped in the other, and both have the same history"
    a, b = kernels(), kernels()
    id = a.run(START.format(LINE.format("ddp", 100_000)))
    b.run(f"import shardnb\nr = shardnb.attach({id!r})\np = r.panel()\ndisplay(p)")
    run = shardnb.attach(id, tmp_path / ".shardnb")
    until(lambda: len(run.events("step", rank=0)) > 3 or run.ended, 180)
    assert [k.run("print(r.state)") for k in (a, b)] == ["running"] * 2, run.error
    b.run("r.stop()")
    a.run("r.stop()")  # the second wish changes nothing
    assert [k.run("r.wait(); print(r.state)") for k in (a, b)] == ["stopped"] * 2
    tell = "m = r.metrics; print(len(m), m.step.is_monotonic_increasing, round(float(m.loss.sum()), 6), len(r.memory), len(r.checkpoints), r.error)"
    assert a.run(tell) == b.run(tell)
    assert run.rundir.stop_requested()["how"] == "graceful" and not run.pids
    threads = "import threading, time; t = time.time()\nwhile any('shardnb panel' in x.name for x in threading.enumerate()) and time.time() - t < 15: time.sleep(.1)\nprint([x.name for x in threading.enumerate() if 'shardnb panel' in x.name])"
    assert [k.run(threads) for k in (a, b)] == ["[]"] * 2  # both panels have seen the end and left their picture


def whole(run, steps):
    "Problems with the history of a run that has ended, [] for none"
    out, end = [], read_json(run.rundir.exit_path)
    if (end["state"], end["error"], end["survivors"]) != ("done", None, []): out.append(f"ended {end['state']}, {end['error']}")
    for r in (0, 1):
        reader = EventReader(run.rundir.event_path(r))
        events = reader.read()
        told = [e["step"] for e in events if e["kind"] == "step"]
        if reader.bad: out.append(f"rank {r}: {reader.bad} broken lines")
        if r == 0 and told != list(range(1, steps + 1)): out.append(f"{len(told)} of {steps} steps")
        if [e["state"] for e in events if e["kind"] == "end"] != ["done"]: out.append(f"rank {r} has no end")
    return out


@pytest.mark.slow
def test_twenty_kernels_die(kernels, tmp_path):
    n, pick, steps = int(os.environ.get("SHARDNB_KERNELS") or 20), random.Random(7), 80
    told, began, seen = [], time.monotonic(), []
    other = kernels()
    other.run("import shardnb, json")
    for i in range(n):
        k = kernels()
        id = k.run(START.format(LINE.format(("ddp", "zero3", "fsdp")[i % 3], steps)))
        run = shardnb.attach(id, tmp_path / ".shardnb")
        if i % 2: until(lambda run=run: len(run.events("step", rank=0)) >= 1 or run.ended, 180)  # half of them while it starts
        time.sleep(pick.uniform(0, 1))
        k.kill()
        seen.append(len(run.events("step", rank=0)))
        if seen[-1] >= steps: told.append(f"trial {i}: over before the kernel was killed")
        until(run.rundir.exit_path.exists, 300)
        problems = whole(run, steps)
        again = other.run(f"r = shardnb.attach({id!r}); m = r.metrics; print(json.dumps([r.state, m.step.tolist(), sorted(set(r.memory['rank'])), r.error, len(r.events())]))")
        want = ["done", list(range(1, steps + 1)), [0, 1], None, len(run.events())]
        if again != json.dumps(want): problems.append(f"re-attached: {again[:300]}")
        state = read_json(run.rundir.state_path)
        try: until(lambda state=state: not any(map(alive, [state["supervisor"], *state["ranks"].values()])), 5)
        except AssertionError: problems.append("processes are left")
        told += [f"trial {i}: {p}" for p in problems]
        print(f"  trial {i}: killed at step {seen[-1]}, ended at {len(run.metrics)}{'' if not problems else ', ' + '; '.join(problems)}", flush=True)
    bad = len({t.split(":")[0] for t in told})
    print(f"\n{n - bad} of {n} runs ended normally after their kernel was killed (at step {min(seen)} to {max(seen)} of {steps}), 0 events lost, re-attached right; {time.monotonic() - began:.0f} s in all")
    assert not told, told
