"""Ranks forked from one process that has already imported the heavy libraries, so that a test run takes seconds rather than tens of them.

The rank itself is the shipped one (`shardnb.run.worker`); only torch elastic and the supervisor are left out, which `test_launch.py` covers.
"""
import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

from shardnb.run.handle import Run
from shardnb.run.planner import plan_run
from shardnb.run.process import die_with_parent
from shardnb.run.rundir import RunDir, write_json

HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "transformers.models.llama.modeling_llama",
         "transformers.models.qwen2.modeling_qwen2", "torch.distributed.fsdp", "torch.distributed.checkpoint", "shardnb.run.worker", "shardnb.run.watch")


def model_folder(top, config):
    "A folder with a model's configuration and the byte tokenizer of 'tiny'; its weights are drawn at random. Returns its path as text."
    from shardnb.run.models import resolve_model
    top = Path(top)
    top.mkdir(parents=True, exist_ok=True)
    for f in Path(resolve_model("tiny")).iterdir():
        if f.name != "config.json": shutil.copy(f, top)
    (top / "config.json").write_text(json.dumps(config))
    return str(top)


LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=264,
             max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
WORDS = "shard gather reduce scatter rank layer bytes state moment bucket".split()


def rows_file(folder, rows):
    "Rows as JSON lines; returns the file's path as text"
    (f := Path(folder) / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(f)


def counting(numbers): return [dict(prompt=f"count to {i}", completion=" ".join(map(str, range(i))) or "none") for i in numbers]


def ragged(n): return [dict(prompt=" ".join(WORDS[: 1 + i % 7]), completion=" ".join(WORDS[i % 5 :: 1 + i % 3])) for i in range(n)]


# The end of a cell with a loop of its own; before it stand `torch`, `model` and `lr`
LOOP = """
opt = torch.optim.AdamW(model.parameters(), lr=lr)
dl = torch.utils.data.DataLoader([torch.arange(3, 35) + i % 5 for i in range(32)], batch_size=2)
model, opt, dl = accelerator.prepare(model, opt, dl)
for i, b in enumerate(dl):
    if i == 4: break
    loss = model(input_ids=b, labels=b).loss
    accelerator.backward(loss)
    opt.step()
    opt.zero_grad()
    log(loss=loss)
"""


LEFT = set()  # process ids of ranks nobody has waited for yet


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _child(rundir, rank, world_size, port, env, parent):
    os.setsid()
    die_with_parent(parent)  # a test run that is killed leaves no ranks behind
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    fd = os.open(rundir.log_path(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for std in (1, 2): os.dup2(fd, std)
    sys.stdout, sys.stderr = os.fdopen(os.dup(1), "w", 1), os.fdopen(os.dup(2), "w", 1) # pytest's own would go to the test's report
    code = 1
    try:
        from shardnb.run.worker import main
        code = main(str(rundir.path))
    finally:
        os._exit(code)


def start(recipe, cell=None, inputs=None, home=None, **plan):
    "Fork the ranks of a run; returns its `Run` and {rank: process id}"
    import importlib

    from shardnb.run.cell import Cell, collect
    for m in HEAVY: importlib.import_module(m)
    parsed = Cell(cell)
    made = plan_run(recipe, parsed) | plan
    rundir = RunDir.create(made.pop("recipe"), cell, collect(parsed, inputs) if inputs else None, made, home)
    n, port = made["world_size"], free_port()
    pids, me = {}, os.getpid()
    for r in range(n):
        pids[r] = os.fork()
        if pids[r] == 0: _child(rundir, r, n, port, made["env"], me)
        LEFT.add(pids[r])
    return Run(rundir), pids


def wait(pids, timeout=120):
    "Wait for forked ranks; those that are still there after `timeout` seconds are killed and returned"
    end, codes = time.time() + timeout, {}
    while len(codes) < len(pids) and time.time() < end:
        for r, pid in pids.items():
            if r not in codes and os.waitpid(pid, os.WNOHANG)[0]: codes[r] = True
        time.sleep(.02)
    left = [r for r in pids if r not in codes]
    LEFT.difference_update(pids[r] for r in codes)
    end_all(pids[r] for r in left)
    return left


def end_all(pids=None):
    "Kill forked ranks; those that nobody has waited for if no others are named"
    for pid in list(LEFT if pids is None else pids):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        LEFT.discard(pid)


def tiny(rows, home, strategy, plan=(), **kw):
    "Train 'tiny' for three steps, or as `kw` says"
    from shardnb.plan.recipe import Recipe
    base = dict(model="tiny", dataset=rows, strategy=strategy, nproc=2, micro_batch=2, global_batch=8, max_steps=3, max_length=64, learning_rate=1e-3, precision="fp32")
    return train(Recipe(**{**base, **kw}), home=home, **dict(plan))


def train(recipe, cell=None, inputs=None, timeout=120, home=None, **plan):
    "Run a recipe on forked ranks and return its `Run`; the end of a failed rank's log is in the error."
    run, pids = start(recipe, cell, inputs, home, **plan)
    left, rundir, n = wait(pids, timeout), run.rundir, len(pids)
    states = [e["state"] for e in run.events("end")]
    if left or "failed" in states or len(states) < n:
        errors = [p.read_text()[-3000:] for p in rundir.errors_path.glob("*.json")]
        raise AssertionError(f"{recipe}: ended {states}, {len(left)} ranks had to be killed\n" + "\n".join(errors or [rundir.log_path(0).read_text()[-2000:]]))
    write_json(rundir.exit_path, dict(v=1, state=states[0], ended_at=time.time(), returncodes={str(r): 0 for r in range(n)}, error=None))
    return run
