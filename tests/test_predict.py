"What a rank is predicted to hold: places, ranges and buffers that need no torch to be checked."
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from shardnb.plan.memory import MemoryBreakdown, state_bytes
from shardnb.plan.predict import context_band, predict_memory, reserve
from shardnb.plan.recipe import Recipe
from shardnb.plan.strategy import settings

H = 64  # hidden size: matrices of 64 x 64
FACTS = dict(hidden_size=H, largest_layer=H * H, vocab_size=H, trainable=4 * H * H, total=4 * H * H, layer_classes=["Layer"], num_hidden_layers=2, embeddings=["emb"],
             params=[[n, H * H, True, u, [H, H]] for n, u in (("emb", "embed"), ("l0", "layers.0"), ("l1", "layers.1"), ("head", "tail"))])
PIECES = ["forward.embed", "forward.0", "forward.1", "forward.tail", "backward.tail", "backward.1", "backward.0", "backward.embed"]
TRACE = dict(events=[[0, 1, 0]] * 4 + [e for _ in range(4) for e in ([0, -1, 0], [1, 4 * H * H, 1])], bases=[[1, 1, 0, 0], [0, 0, 0, 0]], period=1, layers=2,
             segments=[[n, i if i < 4 else 2 * i - 4, i + 1 if i < 4 else 2 * i - 2] for i, n in enumerate(PIECES)])


def at(strategy, n=4, cuda=True, grad_accum=1, **kw):
    "(prediction, recipe) of the model above"
    r = Recipe(model="tiny", dataset="demo", strategy=strategy, micro_batch=1, max_length=100, grad_accum=grad_accum, **{"precision": "bf16", **kw}).resolve(n, cuda, True)
    told = settings(strategy, r, FACTS, n, cuda)
    return predict_memory(FACTS, TRACE, strategy, told, r.precision, n, 1, 100, grad_accum, "float32", r.optim, cuda), told


def test_what_nvme_takes_is_on_a_disk():
    "DeepSpeed's swap_tensor: master, moments and fp32 gradients in files; the host holds gradients and four buffers as long as a sub-group"
    (b, _), mine = at("zero3+optim-nvme", nvme_path="/tmp"), H * H
    assert b.disk == {"grads": 4 * mine, "optimizer": 12 * mine} and b.disk_bytes == 16 * mine and "optimizer" not in b.device | b.host
    assert (b.host["comm"], b.host["grads"]) == (4 * mine * 4, 2 * mine)
    assert MemoryBreakdown.from_json(json.loads(json.dumps(b.to_json()))) == b and "disk" in repr(b)
    both, few = at("zero3+optim-nvme+param-nvme", nvme_path="/tmp")[0], at("zero3+param-nvme", nvme_path="/tmp", deepspeed={"zero_optimization": {"offload_param": {"device": "nvme", "max_in_cpu": 100, "buffer_size": 1000}}})[0]
    assert both.disk["params"] == 2 * mine == both.host["params"]                                     # files, and up to 1e9 elements beside them
    assert few.host["params"] == 200 and few.host["comm"] == (5 * 1000 + mine) * 2 and few.disk == {"params": 2 * mine}


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_bucket_that_overlaps_has_a_second_one(strategy):
    comm = {o: at(strategy, deepspeed={"zero_optimization": {"overlap_comm": o}})[0].phases["backward"]["comm"] for o in (False, True)}
    assert comm[True] == 2 * comm[False] > 0


@pytest.mark.parametrize("strategy", ["zero1+optim-cpu", "zero2+optim-cpu"])
def test_the_updated_slice_waits_on_the_host(strategy):
    "DeepSpeed's param_buffer_of_bit16_for_cpu_offload_groups"
    assert at(strategy, cuda=False)[0].host["comm"] == H * H * 4 + H * H * 2                           # a gradient's buffer, and the slice in bf16


def test_pinned_memory_comes_in_powers_of_two():
    "ATen/core/CachingHostAllocator.h"
    up = lambda n: 1 << (n - 1).bit_length()
    assert "reserved" not in at("zero3+optim-cpu", 3, cuda=False)[0].host
    mine = 4 * -(-H * H // 3)
    assert at("zero3+optim-cpu", 3)[0].host["reserved"] == sum(up(n) - n for n in (2 * mine, 4 * mine))
    rows = -(-H // 3) * H * 4                                                                           # fp32 shards, and their gradients
    for a, tensors in ((1, 8), (2, 4)): assert at("fsdp+param-cpu", 3, grad_accum=a)[0].host["reserved"] == tensors * (up(rows) - rows), a


def test_embeddings_are_known_by_what_they_are():
    "Transformers leaves every nn.Embedding in 32 bits, whatever its name; GPT-NeoX's embed_out is none"
    facts = dict(params=[["wpe.weight", 8192, True, "root", [128, 64]], ["embed_out.weight", 8192, True, "tail", [128, 64]]], embeddings=["wpe.weight"])
    assert state_bytes(facts, "ddp", optim="adamw_8bit")["optimizer"] == 8 * 8192 + 2 * (8192 + 4 * 8192 // 256)


def test_the_exact_tier_has_a_range_too():
    from shardnb.run.exact import breakdown, report
    held = {("device", c): 2**30 for c in ("params", "grads", "optimizer")}
    found = dict(phases=dict.fromkeys(("loaded", "forward", "backward", "step", "after_backward"), held), load_peak=0, line=[], marks=[], ops=0, held={}, seconds=0, rss=0)
    gpu, cpu = (breakdown(report(found, cuda, "zero2", 2)) for cuda in (True, False))
    assert gpu.band == reserve(3 * 2**30, 3 * 2**30, 2) and gpu.worst > gpu.peak + context_band(2)[1] and tuple(cpu.band) == (0, 0)


def test_new_arithmetic_is_not_answered_with_old_numbers(tmp_path, monkeypatch):
    from shardnb.run.kept import kept
    (tmp_path / "model").mkdir(), (tmp_path / "run").mkdir(), (tmp_path / "plan").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    for f in ("run/planner", "run/trace", "run/models", "run/forecast", "plan/predict"): (tmp_path / f"{f}.py").write_text("1")
    monkeypatch.setenv("SHARDNB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "run/planner.py")))
    recipe = SimpleNamespace(model=str(tmp_path / "model"), trust_remote_code=False)
    asked = []
    def ask(kind): return kept(kind, recipe, ["key"], lambda: asked.append(kind) or len(asked))
    assert [ask("predictions"), ask("facts"), ask("predictions"), ask("facts")] == [1, 2, 1, 2]
    (tmp_path / "plan/predict.py").write_text("2")
    assert (ask("predictions"), ask("facts")) == (3, 2)


SIDE_BY_SIDE = """
import os, sys
import shardnb.run.forecast as f, shardnb.run.trace as t
from shardnb.plan.machine import Machine
plain, facts, me, mine, asked = t.trace_model, f.model_facts, os.getpid(), [], []
t.trace_model = lambda *a, **kw: mine.append(os.getpid()) or plain(*a, **kw)
def told(**kw):
    "The facts; a child dies over them once traces can be made"
    asked.append(os.getpid())
    if plans and os.getpid() != me: os.kill(os.getpid(), 9)
    return facts(**kw)
f.model_facts = told
recipe, machine, plans = f.Recipe(model="tiny", dataset="demo", nproc=2, max_length=128).to_yaml(), Machine.preset("2xT4").to_json(), []
def plan(how):
    "How many traces this process had to make itself"
    mine.clear()
    os.environ["SHARDNB_CACHE"] = os.path.join(sys.argv[1], how)
    f._forecaster = f.Forecaster()
    plans.append(f.answer_plan(recipe, machine))
    assert len(f._forecaster._traces) > 1, "there was nothing to share"
    return len(mine)
assert plan("together") == 0
assert not asked, "the facts were not found beside the imports"
del sys.modules["trl.trainer.utils"] # as if there were something to import
for p in f._helpers()._processes: os.kill(p, 9)
assert plan("killed") > 0
assert asked == [me]
assert plan("helped again") == 0
f._helpers = lambda: None
assert plan("one after another") > 1
assert all(p == plans[0] for p in plans)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores: traces are made one after another elsewhere")
def test_traces_made_side_by_side_are_the_same(tmp_path):
    "Also when a helper was killed"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    p = subprocess.run([sys.executable, "-c", SIDE_BY_SIDE, tmp_path], env=env, capture_output=True, text=True, timeout=300)
    assert p.returncode == 0, p.stderr[-3000:]
