"""SIGKILL of a random rank at a random moment: who it was and why is known within five seconds, no process is left, and the last checkpoint loads.

`make test` kills ranks of a small worker, and one rank of each strategy for real; `make bench` kills a hundred: `SHARDNB_KILLS=30` for fewer."""
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from unruly import ended, family, gone, until

import shardnb
from shardnb.plan.recipe import Recipe
from shardnb.run.process import alive
from shardnb.run.rundir import read_json

SECONDS = 5  # from the kill to exit.json


def kill_one(run, rank):
    "Kill a rank of a run that goes on; (seconds until it is reported, its exit.json, the processes that there were)"
    procs, victim = family(run), read_json(run.rundir.state_path)["ranks"][str(rank)]
    assert alive(victim)
    t = time.monotonic()
    os.kill(victim["pid"], signal.SIGKILL)
    end = ended(run, 30)
    return time.monotonic() - t, end, procs


def reported(run, rank, took, end, procs):
    "Problems with how it was told, [] for none"
    e = run.error
    out = [] if end["state"] == "failed" else [f"state {end['state']}"]
    if e is None or (e.rank, e.cause) != (rank, "SIGKILL"): out.append(f"rank {rank} was killed, and {e and (e.rank, e.cause, e.message[:200])} is told")
    if e is not None and not (e.message and e.fix): out.append("no words")
    if took > SECONDS: out.append(f"told after {took:.1f} s")
    if end["survivors"]: out.append(f"survivors {end['survivors']}")
    try: gone(procs)
    except AssertionError: out.append(f"left over: {[p['pid'] for p in procs if alive(p)]}")
    return out


@pytest.mark.parametrize("seed", range(6))
def test_a_random_kill_of_a_small_rank(start, seed):
    "From before the ranks have met to the middle of training"
    pick = random.Random(seed)
    run = start(nproc=2 + seed % 2)
    until(lambda: len(run.pids) == run.plan["nproc"])
    time.sleep(pick.uniform(0, 1.5))
    rank = pick.randrange(run.plan["nproc"])
    assert reported(run, rank, *kill_one(run, rank)) == []


# The real worker, with checkpoints

STRATEGIES = ("ddp", "zero3", "fsdp")


def launched(strategy, **kw):
    return shardnb.train(Recipe(**dict(model="tiny", dataset="demo", strategy=strategy, nproc=2, micro_batch=1, grad_accum=1, max_length=64, max_steps=100_000, save_steps=4,
                                       save_total_limit=2, precision="fp32") | kw))


def loads(checkpoint, strategy):
    "Read every tensor of a checkpoint with its engine's own reader; returns how many elements the model has"
    import torch
    path = Path(checkpoint.path)
    if strategy == "zero3":
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        state = get_fp32_state_dict_from_zero_checkpoint(str(path))
        for f in path.rglob("*optim_states.pt"): torch.load(f, map_location="cpu", weights_only=False)
    elif strategy == "fsdp":
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        state = {}
        folders = [d for d in path.iterdir() if (d / ".metadata").exists()]
        for d in folders:
            found = {}
            _load_state_dict(found, storage_reader=dcp.FileSystemReader(d), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
            state |= found.get("model", found) if "model" in d.name else {}
        assert len(folders) == 2, f"a model and an optimizer, not {folders}"
    else:
        from safetensors.torch import load_file
        state = load_file(path / "model.safetensors")
        torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
    assert (path / "trainer_state.json").exists() and read_json(path / "trainer_state.json")["global_step"] == checkpoint.step
    tensors = [t for t in state.values() if hasattr(t, "numel")]
    assert tensors and all(torch.isfinite(t.float()).all() for t in tensors)
    return sum(t.numel() for t in tensors)


def trial(strategy, pick, early):
    "One run, one kill, from the ranks' birth on or from the first checkpoint on; (problems, seconds to the report, phase it was in, step of its last checkpoint)"
    run = launched(strategy)
    try:
        until(lambda: run.ended or (len(run.pids) == 2 if early else any(c.complete for c in run.checkpoints)), 120)
        time.sleep(pick.uniform(0, 8 if early else 3))
        rank = pick.randrange(2)
        took, end, procs = kill_one(run, rank)
        problems = reported(run, rank, took, end, procs)
        good = [c for c in run.checkpoints if c.complete]
        if good:
            try: loads(good[-1], strategy)
            except Exception as e: problems.append(f"{good[-1]} doesn't load: {type(e).__name__}: {e}")
        elif (run.error.step or 0) > 8: problems.append(f"no checkpoint after step {run.error.step}")
        return problems, took, run.error.phase, good[-1].step if good else None
    finally:
        if not run.ended: run.kill()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_kill_after_a_checkpoint(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    run = launched(strategy)
    try:
        until(lambda: any(c.complete for c in run.checkpoints) or run.ended, 180)
        assert not run.ended, run.error
        assert reported(run, 1, *kill_one(run, 1)) == []
        assert loads([c for c in run.checkpoints if c.complete][-1], strategy) > 1000
    finally:
        if not run.ended: run.kill()


@pytest.mark.slow
def test_a_hundred_kills(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    n, pick = int(os.environ.get("SHARDNB_KILLS") or 100), random.Random(int(os.environ.get("SHARDNB_SEED") or 4))
    told, seconds, phases, saved, began = [], [], Counter(), 0, time.monotonic()
    for i in range(n):
        strategy = STRATEGIES[i % 3]
        problems, took, phase, step = trial(strategy, pick, early=i % 6 < 3)
        told += [f"trial {i}, {strategy}: {p}" for p in problems]
        seconds.append(took)
        phases[phase] += 1
        saved += step is not None
        for p in problems: print(f"\n  trial {i}, {strategy}: {p}", flush=True)
    bad = len({t.split(":")[0] for t in told})
    where = ", ".join(f"{k or 'before its first word'} {v}" for k, v in phases.most_common())
    print(f"\n{n - bad} of {n} kills reported with rank and cause, 0 pids left, newest checkpoint loads (there was one in {saved}); "
          f"time to report: median {median(seconds):.2f} s, most {max(seconds):.2f} s; killed in: {where}; {time.monotonic() - began:.0f} s in all")
    assert not told, told
