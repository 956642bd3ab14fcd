"""One run in which something is switched on and off every few steps: what a step costs with it, against the same run without it.

Both sides see the same process, the same model and the same noise. A step's time scatters by 15 % on a small machine, so that a bound of a few percent takes minutes of steps.
"""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
SHAPE = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=320, intermediate_size=864, num_hidden_layers=4, num_attention_heads=5, num_key_value_heads=5, vocab_size=264,
             max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def train_toggled(worker, trainer, switch, block, seconds):
    "In a rank: train for about `seconds`, call `switch(on)` every `block` steps, and write [step, on, wall s, CPU s] of every step."
    import torch
    import torch.distributed as dist
    from transformers import TrainerCallback
    rows = []

    class Toggle(TrainerCallback):
        "The last callback: from the start of a step to the start of the next, logging included."
        last, blocks = None, None
        def on_step_begin(self, args, state, control, **kw):
            now, step = (time.perf_counter(), time.process_time()), state.global_step
            if self.last: rows.append([step - 1, self.last[2], now[0] - self.last[0], now[1] - self.last[1]])
            if step == 2 * block:
                mean = torch.tensor(sum(r[2] for r in rows[block:]) / block)
                dist.broadcast(mean, 0)
                self.blocks = 2 * int(seconds / mean / block / 2) + 1
            on = (step // block) % 2 == 1
            if step >= block and step % block == 0: switch(on)
            self.last = time.perf_counter(), time.process_time(), on

        def on_step_end(self, args, state, control, **kw):
            if self.blocks and state.global_step >= self.blocks * block: control.should_training_stop = True
    trainer.add_callback(Toggle())
    trainer.train()
    Path(worker.rundir.path, f"times{worker.rank}.json").write_text(json.dumps(rows))
    return rows


def worker_of(path):
    "In a rank: a prepared worker of a run directory, as shardnb starts it."
    from shardnb.run.rundir import RunDir
    from shardnb.run.worker import Worker
    w = Worker(RunDir(path))
    w.announce()
    w.prepare()
    return w


def run(script, strategy, home):
    "Train under a strategy on two ranks that run `script --rank FOLDER`; returns the rows of each."
    from ranks import model_folder

    from shardnb.plan.recipe import Recipe
    from shardnb.run.planner import plan_run
    from shardnb.run.rundir import RunDir
    recipe = Recipe(model=model_folder(Path(home, "model"), SHAPE), dataset="demo", strategy=strategy, nproc=2, micro_batch=1, grad_accum=1, max_length=256, max_steps=100_000, precision="fp32")
    plan = plan_run(recipe)
    rundir = RunDir.create(plan.pop("recipe"), plan=plan, home=home)
    log = rundir.log_path("bench")
    with open(log, "w") as f:
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", script, "--rank", rundir.path],
                              env=os.environ | plan["env"], stdout=f, stderr=f)
    if done.returncode: sys.exit(log.read_text()[-3000:])
    return [json.loads((rundir.path / f"times{rank}.json").read_text()) for rank in (0, 1)]


def pairs(ranks, column, block):
    "Of every block that was on: (its mean, the mean of the blocks before and after it), over the ranks; a block's first step is left out."
    blocks = {}
    for r in (r for rows in ranks for r in rows):
        if r[0] % block: blocks.setdefault(r[0] // block, []).append(r[column])
    mean = {b: sum(v) / len(v) for b, v in blocks.items()}
    return [(mean[b], (mean[b - 1] + mean[b + 1]) / 2) for b in sorted(mean) if b % 2 and b > 2 and b + 1 in mean]


def interval(found, draws=4000):
    "Ratio of the sums, with its bootstrap 95 % interval over blocks."
    import numpy as np
    a = np.array(found)
    sums = a[np.random.default_rng(0).integers(0, len(a), (draws, len(a)))].sum(1)
    return float(a[:, 0].sum() / a[:, 1].sum()), *map(float, np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5]))


def report(script, strategy, home, block):
    "Run, print the ratios of wall and CPU time, and return (a step's median without it in s, the worst upper bound)."
    ranks = run(script, strategy, home)
    plain = sorted(r[2] for r in ranks[0] if not r[1])
    step = plain[len(plain) // 2]
    out = {name: interval(pairs(ranks, column, block)) for name, column in (("wall", 2), ("cpu", 3))}
    print(f"{strategy:6} step {step * 1e3:4.0f} ms, {len(ranks[0])} steps: " + ", ".join(f"{n} {m:.3f} (95 %: {lo:.3f} to {hi:.3f})" for n, (m, lo, hi) in out.items()), flush=True)
    return step, max(hi for _, _, hi in out.values())
