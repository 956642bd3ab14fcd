"""Kernels come and go while a run goes on: killed in the middle of it, none of its events is lost and another kernel sees everything; two kernels on one run see, and may do, the same.

`make test` has one of each (the kill itself is in tests/test_kernel.py); `make bench` kills twenty: `SHARDNB_KERNELS=5` for fewer, `SHARDNB_SEED` for other moments."""
import json
import os
import random
import time

import pytest
from unruly import until

import shardnb
from shardnb.run.event import EventReader
from shardnb.run.process import alive
from shardnb.run.rundir import read_json


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
    n, pick, steps = int(os.environ.get("SHARDNB_KERNELS") or 20), random.Random(int(os.environ.get("SHARDNB_SEED") or 7)), 80
    told, began, seen, late = [], time.monotonic(), [], 0
    other = kernels()
    other.run("import shardnb, json")
    while (i := len(seen)) < n:
        k = kernels()
        id = k.run(START.format(LINE.format(("ddp", "zero3", "fsdp")[i % 3], steps)))
        run = shardnb.attach(id, tmp_path / ".shardnb")
        if i % 2: until(lambda run=run: len(run.events("step", rank=0)) >= 1 or run.ended, 180)  # half of them while it starts
        time.sleep(pick.uniform(0, 1))
        k.kill()
        at = len(run.events("step", rank=0))
        if at >= steps:  # a quick run was over before; that kill proves nothing, and is done again
            late += 1
            assert late <= n, "runs are over before their kernels can be killed"
            continue
        seen.append(at)
        until(run.rundir.exit_path.exists, 300)
        problems = whole(run, steps)
        again = other.run(f"r = shardnb.attach({id!r}); m = r.metrics; print(json.dumps([r.state, m.step.tolist(), sorted(set(r.memory['rank'])), r.error, len(r.events())]))")
        want = ["done", list(range(1, steps + 1)), [0, 1], None, len(run.events())]
        if again != json.dumps(want): problems.append(f"re-attached: … {again[-60:]}, not … {json.dumps(want)[-60:]}")
        state = read_json(run.rundir.state_path)
        try: until(lambda state=state: not any(map(alive, [state["supervisor"], *state["ranks"].values()])), 5)
        except AssertionError: problems.append("processes are left")
        told += [f"trial {i}: {p}" for p in problems]
        print(f"  trial {i}: killed at step {seen[-1]}, ended at {len(run.metrics)}{'' if not problems else ', ' + '; '.join(problems)}", flush=True)
    bad = len({t.split(":")[0] for t in told})
    print(f"\n{n - bad} of {n} runs ended normally after their kernel was killed (at step {min(seen)} to {max(seen)} of {steps}), 0 events lost, re-attached right ({late} more kills came too late); {time.monotonic() - began:.0f} s in all")
    assert not told, told
