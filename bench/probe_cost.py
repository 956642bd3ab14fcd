"""What measuring a step costs: every step measured (walks at three marks, peaks, collectives, events), against the same run with the probe off.

The probe is toggled every BLOCK steps. A normal run measures one step in many (`shardnb/run/observer`); here each step of a block is. Printed: the ratio of wall and of CPU time
(mean of the ranks), with a bootstrap 95 % interval. The limit is 5 % for steps of 100 ms and more, and 2 ms for shorter ones.

    python bench/probe_cost.py [STRATEGY ...]
"""
import json
import math
import sys
import tempfile

import toggled

BLOCK, LIMIT, SHORT, SHORT_LIMIT = 20, 1.05, .1, .002
SECONDS = dict(ddp=600, zero2=500, zero3=1200, fsdp=500) # until the interval is narrow, as in step_time.py


def in_rank(path):
    "Train in one rank, with every step measured or none."
    from shardnb.run import observer
    observer.SHARE = -1 # no step is measured but by us
    w = toggled.worker_of(path)
    trainer, o = w.build_trainer(w.run_cell()), w.observer

    def switch(on):
        (o.comm.install if on else o.comm.remove)()
        o.always = o.measuring = on
        o._next_deep, o.deep = math.inf, False
        o._look()
    rows = toggled.train_toggled(w, trainer, switch, BLOCK, SECONDS[w.recipe.strategy])
    measured = {e["step"] for e in map(json.loads, w.rundir.event_path(w.rank).read_text().splitlines()) if e["kind"] == "comm"}
    assert all((r[0] + 1 in measured) == r[1] for r in rows[BLOCK:]), "the probe was not on and off as planned"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]: sys.exit(in_rank(sys.argv[2]))
    with tempfile.TemporaryDirectory() as home:
        found = [toggled.report(__file__, s, home, BLOCK) for s in sys.argv[1:] or toggled.STRATEGIES]
    kept = [worst <= LIMIT if step >= SHORT else (worst - 1) * step <= SHORT_LIMIT for step, worst in found]
    print(f"limit: {LIMIT} for steps of {SHORT * 1e3:.0f} ms and more, {SHORT_LIMIT * 1e3:.0f} ms for shorter ones: {'kept' if all(kept) else 'NOT kept'}")
    sys.exit(not all(kept))
