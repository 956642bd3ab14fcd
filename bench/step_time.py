"""What shardnb adds to a training step, as a ratio to the same job without it.

One run per strategy. Inside it, blocks of steps alternate between the trainer as shardnb runs it (walks, marks, peak sampler, events, stop agreement) and the
trainer as a plain torchrun script would run it: the observer's subclass, callback, hooks and thread are taken off and put back. So both see the same process,
the same model and the same noise. Printed: the ratio of wall and of CPU time (mean of the ranks), with a bootstrap 95 % interval over blocks. A step's time scatters by 15 % on a
small machine, so that a bound of 3 % takes minutes of steps: SECONDS for each strategy.

    python bench/step_time.py [STRATEGY ...]
"""
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK, SECONDS, LIMIT = 8, 330, 1.03
STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
SHAPE = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=320, intermediate_size=864, num_hidden_layers=4, num_attention_heads=5, num_key_value_heads=5, vocab_size=264,
             max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def in_rank(path):
    "Train in one rank, toggling the observer, and write every step's times."
    import torch
    import torch.distributed as dist
    from transformers import TrainerCallback

    from shardnb.run.observer import TrainerWatch
    from shardnb.run.probe import PeakSampler
    from shardnb.run.rundir import RunDir
    from shardnb.run.worker import Worker
    w = Worker(RunDir(path))
    w.announce()
    w.prepare()
    trainer = w.build_trainer(w.run_cell())
    watched, plain = type(trainer), type(trainer).__mro__[1]
    watch = next(c for c in trainer.callback_handler.callbacks if isinstance(c, TrainerWatch))
    probe, engine, rows, kept = w.observer.probe, w.engine, [], {"spent": 0.}

    def switch(on):
        if on == (type(trainer) is watched): return
        if on:
            trainer.__class__, trainer.accelerator.backward = watched, kept["backward"]
            engine._before[:], engine._after[:] = kept["before"], kept["after"]
            trainer.add_callback(watch)
            w.observer.comm.install()
            probe.peaks = PeakSampler(probe.device)
            probe.peaks.spent = kept["spent"]
            w.observer._begun += time.monotonic() - kept["since"] # its share of the time is of its own blocks
        else:
            kept.update(since=time.monotonic(), spent=probe.peaks.spent, backward=trainer.accelerator.backward, before=list(engine._before), after=list(engine._after))
            trainer.__class__ = plain
            del trainer.accelerator.backward
            engine._before.clear(), engine._after.clear()
            trainer.remove_callback(watch)
            w.observer.comm.remove()
            probe.peaks.close()

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
            if step >= BLOCK: switch(on)
            self.last = time.perf_counter(), time.process_time(), on

        def on_step_end(self, args, state, control, **kw):
            if self.blocks and state.global_step >= self.blocks * BLOCK: control.should_training_stop = True
    trainer.add_callback(Toggle())
    trainer.train()
    Path(path, f"times{w.rank}.json").write_text(json.dumps(rows))


def pairs(ranks, column):
    "Of every watched block: (its mean, the mean of the plain blocks before and after it), over the ranks; a block's first step is left out."
    blocks = {}
    for r in (r for rows in ranks for r in rows):
        if r[0] % BLOCK: blocks.setdefault(r[0] // BLOCK, []).append(r[column])
    mean = {b: sum(v) / len(v) for b, v in blocks.items()}
    return [(mean[b], (mean[b - 1] + mean[b + 1]) / 2) for b in sorted(mean) if b % 2 and b > 2 and b + 1 in mean]


def interval(found, draws=4000):
    "Ratio of the sums, with its bootstrap 95 % interval."
    import numpy as np
    a = np.array(found)
    sums = a[np.random.default_rng(0).integers(0, len(a), (draws, len(a)))].sum(1)
    return float(a[:, 0].sum() / a[:, 1].sum()), *map(float, np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5]))


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
    with open(rundir.log_path("bench"), "w") as log:
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", __file__, "--rank", rundir.path],
                       env=os.environ | plan["env"], check=True, stdout=log, stderr=log)
    ranks = [json.loads((rundir.path / f"times{rank}.json").read_text()) for rank in (0, 1)]
    plain = sorted(r[2] for r in ranks[0] if not r[1])
    out = {name: interval(pairs(ranks, column)) for name, column in (("wall", 2), ("cpu", 3))}
    print(f"{strategy:6} step {plain[len(plain) // 2] * 1e3:4.0f} ms, {len(ranks[0])} steps: " + ", ".join(f"{n} {m:.3f} (95 %: {lo:.3f} to {hi:.3f})" for n, (m, lo, hi) in out.items()), flush=True)
    return max(hi for _, _, hi in out.values())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]: sys.exit(in_rank(sys.argv[2]))
    with tempfile.TemporaryDirectory() as home:
        worst = max(bench(s, home) for s in sys.argv[1:] or STRATEGIES)
    print(f"worst upper bound {worst:.3f}, limit {LIMIT}")
    sys.exit(worst > LIMIT)
