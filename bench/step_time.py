"""What shardnb adds to a training step, as a ratio to the same job without it.

One run per strategy. Inside it, blocks of steps alternate between the trainer as shardnb runs it (walks, marks, peak sampler, collectives counted, events, stop agreement) and the
trainer as a plain torchrun script would run it: the observer's subclass, callback, hooks and thread are taken off and put back. Printed: the ratio of wall and of CPU time (mean of
the ranks), with a bootstrap 95 % interval.

    python bench/step_time.py [STRATEGY ...]
"""
import sys
import tempfile
import time

import toggled

BLOCK, LIMIT = 8, 1.03
SECONDS = dict(ddp=400, zero2=600, zero3=1300, fsdp=1300)  # until the interval is narrow: a step scatters by 14 %, and those that gather are the longest


def in_rank(path):
    "Train in one rank, taking the observer off and putting it back."
    from shardnb.run.watch import TrainerWatch
    from shardnb.run.probe import PeakSampler
    w = toggled.worker_of(path)
    trainer = w.build_trainer(w.run_cell())
    watched, plain = type(trainer), type(trainer).__mro__[1]
    watch = next(c for c in trainer.callback_handler.callbacks if isinstance(c, TrainerWatch))
    o, probe, engine, kept = w.observer, w.observer.probe, w.engine, {"spent": 0.}

    def switch(on):
        if on == (type(trainer) is watched): return
        if on:
            trainer.__class__, trainer.accelerator.backward = watched, kept["backward"]
            engine._before[:], engine._after[:] = kept["before"], kept["after"]
            trainer.add_callback(watch)
            o.comm.install()
            probe.peaks = PeakSampler(probe.device)
            probe.peaks.spent = kept["spent"]
            o._begun += time.monotonic() - kept["since"] # its share of the time is of its own blocks
        else:
            kept.update(since=time.monotonic(), spent=probe.peaks.spent, backward=trainer.accelerator.backward, before=list(engine._before), after=list(engine._after))
            trainer.__class__ = plain
            del trainer.accelerator.backward
            engine._before.clear(), engine._after.clear()
            trainer.remove_callback(watch)
            o.comm.remove()
            probe.peaks.close()
    toggled.train_toggled(w, trainer, switch, BLOCK, SECONDS[w.recipe.strategy])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]: sys.exit(in_rank(sys.argv[2]))
    with tempfile.TemporaryDirectory() as home:
        worst = max(toggled.report(__file__, s, home, BLOCK)[1] for s in sys.argv[1:] or toggled.STRATEGIES)
    print(f"worst upper bound {worst:.3f}, limit {LIMIT}")
    sys.exit(worst > LIMIT)
