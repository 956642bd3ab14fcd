"""What measuring a step costs: every step measured (walks at three marks, peaks, collectives, events), against the same run with the probe off.

One run per strategy. The probe is toggled every BLOCK steps, so both sides see the same process, the same model and the same noise. A normal run measures one step in many
(`shardnb/run/observer`); here each step of a block is. Printed: the ratio of wall and of CPU time (mean of the ranks), with a bootstrap 95 % interval over blocks, and the cost in ms.
The limit is 5 % for steps of 100 ms and more, and 2 ms for shorter ones.

    python bench/probe_cost.py [STRATEGY ...]
"""
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import step_time
from step_time import SHAPE, STRATEGIES, interval, pairs

BLOCK, SECONDS, LIMIT, SHORT, SHORT_LIMIT = 20, 100, 1.05, .1, .002
step_time.BLOCK = BLOCK


def in_rank(path):
    "Train in one rank, toggling the probe, and write every step's times."
    import torch
    import torch.distributed as dist
    from transformers import TrainerCallback

    from shardnb.run import observer
    from shardnb.run.rundir import RunDir
    from shardnb.run.worker import Worker
    observer.SHARE = -1 # no step is measured but by us
    w = Worker(RunDir(path))
    w.announce()
    w.prepare()
    trainer, o, rows = w.build_trainer(w.run_cell()), w.observer, []

    def switch(on):
        (o.comm.install if on else o.comm.remove)()
        o.always = o.measuring = on
        o._next_deep, o.deep = math.inf, False
        o._look()

    class Toggle(TrainerCallback):
        "The last callback: from the start of a step to the start of the next, logging included."
        last, blocks = None, None
        def on_step_begin(self, args, state, control, **kw):
            now, step = (time.perf_counter(), time.process_time()), state.global_step
            if self.last: rows.append([step - 1, self.last[2], now[0] - self.last[0], now[1] - self.last[1]])
            if step == 2 * BLOCK:
                mean = torch.tensor(sum(r[2] for r in rows[BLOCK:]) / BLOCK)
                dist.broadcast(mean, 0)
                self.blocks = 2 * int(SECONDS / mean / BLOCK / 2) + 1
            on = (step // BLOCK) % 2 == 1
            if step % BLOCK == 0: switch(on)
            self.last = time.perf_counter(), time.process_time(), on

        def on_step_end(self, args, state, control, **kw):
            if self.blocks and state.global_step >= self.blocks * BLOCK: control.should_training_stop = True
    trainer.add_callback(Toggle())
    trainer.train()
    measured = {e["step"] for e in map(json.loads, w.rundir.event_path(w.rank).read_text().splitlines()) if e["kind"] == "comm"}
    assert all((r[0] in measured) == r[1] for r in [[r[0] + 1, r[1]] for r in rows[BLOCK:]]), "the probe was not on and off as planned"
    Path(path, f"times{w.rank}.json").write_text(json.dumps(rows))


def bench(strategy, home):
    from shardnb.plan.recipe import Recipe
    from shardnb.run.models import resolve_model
    from shardnb.run.planner import plan_run
    from shardnb.run.rundir import RunDir
    model = Path(home, "model")
    if not model.exists():
        model.mkdir()
        for f in Path(resolve_model("tiny")).iterdir():
            if f.name != "config.json": (model / f.name).write_bytes(f.read_bytes())
        (model / "config.json").write_text(json.dumps(SHAPE))
    plan = plan_run(Recipe(model=str(model), dataset="demo", strategy=strategy, nproc=2, micro_batch=1, grad_accum=1, max_length=256, max_steps=100_000, precision="fp32"))
    rundir = RunDir.create(plan.pop("recipe"), plan=plan, home=home)
    log = rundir.log_path("bench")
    with open(log, "w") as f:
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", __file__, "--rank", rundir.path],
                              env=os.environ | plan["env"], stdout=f, stderr=f)
    if done.returncode: sys.exit(log.read_text()[-3000:])
    ranks = [json.loads((rundir.path / f"times{rank}.json").read_text()) for rank in (0, 1)]
    plain = sorted(r[2] for r in ranks[0] if not r[1])
    step = plain[len(plain) // 2]
    out = {name: interval(pairs(ranks, column)) for name, column in (("wall", 2), ("cpu", 3))}
    print(f"{strategy:6} step {step * 1e3:4.0f} ms, {len(ranks[0])} steps: " + ", ".join(f"{n} {m:.3f} (95 %: {lo:.3f} to {hi:.3f}, {(m - 1) * step * 1e3:+.2f} ms)" for n, (m, lo, hi) in out.items()), flush=True)
    worst = max(hi for _, _, hi in out.values())
    return worst <= LIMIT if step >= SHORT else (worst - 1) * step <= SHORT_LIMIT


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]: sys.exit(in_rank(sys.argv[2]))
    with tempfile.TemporaryDirectory() as home:
        kept = [bench(s, home) for s in sys.argv[1:] or STRATEGIES]
    print(f"limit: {LIMIT} for steps of {SHORT * 1e3:.0f} ms and more, {SHORT_LIMIT * 1e3:.0f} ms for shorter ones: {'kept' if all(kept) else 'NOT kept'}")
    sys.exit(not all(kept))
