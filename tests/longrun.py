"A run directory of many steps, its events as the observer writes them, made without running anything: what the panel's bounds are measured on."
import json
import math
import os
import random
import socket
import time

from shardnb.plan.memory import MemoryBreakdown
from shardnb.run.event import EventWriter
from shardnb.run.rundir import RunDir, write_json

M = 2**20
RECIPE = "model: tiny\ndataset: demo\nstrategy: zero3\nnproc: {nproc}\nmax_steps: {steps}\nprecision: fp32\n"
HELD = dict(params=260, optimizer=520, comm=24)
MORE = dict(after_forward=dict(activations=610, logits=196), after_backward=dict(grads=260, activations=4), after_step={}, peak=dict(grads=260, activations=580, gathered=140, logits=392, temp=61, context=300))


def measured_steps(steps, world_size, step_s):
    "Which steps of a run are measured, and which of them take a timeline: `Observer._due` and `Observer._look` without a limit on cost"
    from shardnb.run.observer import DEEP_GROWTH, FIRST_STEPS, THINNING  # loads torch
    seen, deep, last, following = [], [], 0., FIRST_STEPS
    for step in range(1, steps + 1):
        age = step * step_s
        if step <= FIRST_STEPS or age - last >= age / THINNING * max(world_size / 8, 1) and age - last >= .5 or step >= following:
            seen.append(step)
            last = age
        if step >= following: deep, following = [*deep, step], round(step * DEEP_GROWTH)
    return seen, deep


def step_event(step, steps, t, step_s, rng):
    return dict(v=1, t=t, rank=0, kind="step", step=step, total_steps=steps, epoch=step / 5000, loss=3.1 * math.exp(-step / steps * 8) + 1.35 + rng.gauss(0, .06), lr=2e-5 * (1 - step / steps),
                grad_norm=abs(rng.gauss(1, .2)), tokens=4096, step_s=step_s * (1 + .04 * rng.random()), data_s=.01 * step_s, forward_s=.29 * step_s, backward_s=.44 * step_s, comm_s=.12 * step_s,
                optimizer_s=.06 * step_s, tokens_per_s=4096 / step_s)


def memory_events(step, rank, t, rng):
    part = lambda moment: {c: int(v * M * (1 + .01 * (rank % 16)) * (1 + .01 * rng.random())) for c, v in {**HELD, **MORE[moment]}.items()}
    for moment in ("after_forward", "after_backward", "after_step"): yield dict(v=1, t=t, rank=rank, kind="memory", step=step, moment=moment, place="device", bytes=part(moment))
    by = part("peak")
    total = sum(v for c, v in by.items() if c != "context")
    yield dict(v=1, t=t, rank=rank, kind="memory", step=step, moment="peak", place="device", bytes=by | {"total": total}, phase="backward", phases=dict(forward=total - 300 * M, backward=total, step=total - 500 * M), length=256)
    yield dict(v=1, t=t, rank=rank, kind="comm", step=step, bytes={k: 260 * M for k in ("all_gather", "reduce_scatter")}, calls=dict(all_gather=48, reduce_scatter=24), sent={k: 240 * M for k in ("all_gather", "reduce_scatter")},
               seconds=dict(all_gather=.02, reduce_scatter=.03))


def timeline_event(step, rank, t, points=400):
    at = [i * .002 for i in range(points)]
    wave = [math.sin(math.pi * i / points) for i in range(points)]
    by = dict(params=[260 * M] * points, optimizer=[520 * M] * points, activations=[int(600 * M * w) for w in wave], gathered=[int(140 * M * (i % 8 < 4)) for i in range(points)], grads=[int(260 * M * max(0, i / points - .5)) for i in range(points)])
    marks = [[0., "forward", "begin"], [.3, "forward", "end"], [.3, "backward", "begin"], [.7, "backward", "end"], [.7, "optimizer", "begin"], [.79, "optimizer", "end"]]
    return dict(v=1, t=t, rank=rank, kind="timeline", step=step, at=at, bytes=by, total=[sum(b[i] for b in by.values()) for i in range(points)], marks=marks)


def alive(rundir, state="running", world_size=1):
    "Say that the run goes on: this very process stands for the supervisor"
    import psutil
    me = dict(pid=os.getpid(), create_time=psutil.Process().create_time())
    write_json(rundir.state_path, dict(v=1, state=state, supervisor=me, host=socket.gethostname(), launched_at=time.time(), heartbeat=time.time() + 3600, world_size=world_size, nproc=world_size, ranks={}))


def ended(rundir, state="done", **more): write_json(rundir.exit_path, dict(v=1, state=state, seconds=3., returncodes={}, error=None) | more)


def undrawn(monkeypatch):
    "For tests of where a panel is and what its buttons do: no tile is drawn, and the static form is a line"
    from shardnb.ui import outlet, panel
    monkeypatch.setattr(panel.Panel, "_draw", lambda self, told, force: None)
    for module in (panel, outlet): monkeypatch.setattr(module, "static_bundle", lambda run, pictures=None: {"text/html": f"<img src='data:image/png'> {run.id} {run.state}", "image/png": "", "text/plain": run.id})


def make(home, steps, ranks=1, step_s=.36, evals=20, params=200, plan=None):
    "The folder of a run that has done `steps` steps and goes on; returns its RunDir"
    rng = random.Random(0)
    predicted = MemoryBreakdown({c: v * M for c, v in dict(params=260, optimizer=520, grads=260, activations=600, gathered=150, comm=24, logits=392, temp=60).items()}, peak_at="backward").to_json()
    rundir = RunDir.create(RECIPE.format(nproc=ranks, steps=2 * steps), plan=dict(strategy="zero3", nproc=ranks, world_size=ranks, model="tiny", predicted=predicted, settings={"zero_optimization": {"stage": 3}}) | (plan or {}), home=home)
    began = time.time() - steps * step_s
    os.utime(rundir.recipe_path, (began - 12, began - 12))
    seen, deep = measured_steps(steps, ranks, step_s)
    seen, deep = set(seen), set(deep)
    for r in range(ranks):
        w = EventWriter(rundir.event_path(r), r)
        w.write("phase", phase="starting", state="begin")
        w.write("phase", phase="training", state="begin")
        w.write("effective", engine="deepspeed", wrapper="DeepSpeedEngine", world_size=ranks, backend="gloo", device="cpu", settings={"zero_optimization": {"stage": 3}})
        rows = [[f"model.layers.{i}.mlp.weight", [1024, 256], 1024 * 256 // ranks, "device", r * (1024 * 256 // ranks)] for i in range(params)]
        w.write("shards", rows=rows, total=len(rows), truncated=False)
        w.close()
        lines = []
        for step in range(1, steps + 1):
            t = began + step * step_s
            if r == 0: lines.append(step_event(step, 2 * steps, t, step_s, rng))
            if r == 0 and evals and step % max(1, steps // evals) == 0: lines.append(dict(v=1, t=t, rank=0, kind="eval", step=step, loss=3.2 * math.exp(-step / steps * 4) + 1.5, seconds=3.))
            if step in seen: lines += memory_events(step, r, t, rng)
            if step in deep: lines.append(timeline_event(step, r, t))
        with rundir.event_path(r).open("a") as f: f.writelines(json.dumps(e) + "\n" for e in lines)
        rundir.log_path(r).write_text("".join(f"rank {r} line {i}\n" for i in range(200)))
    alive(rundir, world_size=ranks)
    return rundir
