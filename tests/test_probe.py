"""What a rank measures beside its states: what is left over, peaks of phases, timelines, collectives, activations; and how much of it is written in a long run."""
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
from marks import slow

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
PHASES = {"forward", "backward", "step"}
MODEL = ranks.LLAMA | dict(hidden_size=520, intermediate_size=1400, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=1003)


def make(top):
    "A Llama with 12.1M parameters and rows of 128 tokens."
    ranks.model_folder(top, MODEL)
    ranks.rows_file(top, [dict(prompt=f"count {i}", completion=" ".join(map(str, range(i % 9, 60)))) for i in range(32)])
    return top


@pytest.fixture(scope="session")
def wide(tmp_path_factory): return make(tmp_path_factory.mktemp("wide"))


def go(wide, home, strategy, cell=None, **kw):
    from shardnb.plan.recipe import Recipe
    recipe = Recipe(**{**dict(model=str(wide), dataset=str(wide / "rows.jsonl"), strategy=strategy, nproc=2, micro_batch=2, grad_accum=1, max_steps=4, max_length=128, precision="fp32",
                              learning_rate=1e-4), **kw})
    return ranks.train(recipe, cell, home=home)


RUNS = {}


@pytest.fixture(params=STRATEGIES)
def run(request, wide, tmp_path_factory):
    "One run of each strategy, shared by the tests."
    if request.param not in RUNS: RUNS[request.param] = go(wide, tmp_path_factory.mktemp(request.param), request.param)
    return RUNS[request.param]


def parts(run, step, moment, rank=0):
    m = run.memory.query(f"step == {step} and moment == '{moment}' and rank == {rank} and place == 'device'")
    return m.set_index("category").bytes.to_dict()


def left_over(run):
    "The largest share that no walk and no rule knows, at the ends of backward and step."
    out = []
    for rank in sorted(set(run.memory["rank"])):
        for step in (2, 3):
            for moment in ("after_backward", "after_step"):
                by = run.memory.query(f"step == {step} and moment == '{moment}' and rank == {rank}").groupby("category").bytes.sum().to_dict()
                out.append((by.get("temp", 0) / sum(by.values()), rank, step, moment))
    return max(out)


def elements(run): return sum(n for _, n, *_ in run.plan["facts"]["params"])


def test_remainder(run): assert left_over(run)[0] < .05, left_over(run)


def test_peaks(run):
    p = run.peaks()
    assert set(p.phase) == PHASES and set(p["rank"]) == {0, 1}
    for rank in (0, 1):
        for step in (2, 3):
            by = p[(p["rank"] == rank) & (p.step == step)].set_index("phase").bytes
            peak = parts(run, step, "peak", rank)
            total = peak.pop("total")
            peak.pop("context")
            assert total == by.max() == sum(peak.values())
            for moment, phase in (("after_forward", "forward"), ("after_backward", "backward"), ("after_step", "step")):
                assert by[phase] >= .99 * sum(parts(run, step, moment, rank).values())
            told = [e for e in run.events("memory", rank) if e["moment"] == "peak" and e["step"] == step]
            assert [e["phase"] for e in told] == [by.idxmax()]


def test_timeline(run):
    for rank in (0, 1):
        t = run.timeline(rank=rank)
        assert t.attrs["step"] == 3 and 30 < t.t.nunique() <= 400
        assert (t.groupby("t").bytes.sum() - t.groupby("t").total.first()).abs().max() == 0
        at = {(phase, state): s for s, phase, state in t.attrs["marks"]}
        order = [at[phase, state] for phase in ("forward", "backward", "optimizer") for state in ("begin", "end")]
        assert order == sorted(order) and t.t.max() <= order[-1] + .01
        by = {c: rows.set_index("t").bytes for c, rows in t.groupby("category")}
        assert by["activations"].idxmax() < at["optimizer", "begin"] and by["activations"].iloc[-1] == 0
        marked = parts(run, 3, "after_forward", rank)
        assert abs(by["activations"].max() - marked["activations"]) < .1 * marked["activations"]
        peak = run.peaks().query(f"rank == {rank} and step == 3").bytes.max()
        assert .97 * peak < t.total.max() <= 1.001 * peak
        if run.plan["strategy"] in ("zero3", "fsdp"): assert by["gathered"].max() > 0
        else: assert by.get("gathered") is None or not by["gathered"].max()
        if run.plan["strategy"] == "fsdp": # up and down with every unit, forward and backward
            ups = (by["gathered"].diff() > 2**20).sum()
            assert ups >= 2 * MODEL["num_hidden_layers"] and by["gathered"].max() < .7 * 4 * elements(run)


def test_times(run):
    m = run.metrics.iloc[1:]
    assert (m[["forward_s", "backward_s", "comm_s", "optimizer_s"]] > 0).all().all() and (m.data_s >= 0).all()
    assert (m.forward_s + m.backward_s + m.optimizer_s + m.data_s <= 1.02 * m.step_s).all()
    assert (m.comm_s < m.forward_s + m.backward_s + m.optimizer_s).all()
    told = {e["step"]: e for e in run.events("step")}
    assert "deep" not in told[2] and told[3]["deep"] == 1
    assert run.metrics.set_index("step").tokens_per_s.isna().to_dict() == {1: False, 2: False, 3: True, 4: False}


def test_payload(run):
    "DDP sends P, twice around the ring; ZeRO-3 and FSDP gather P twice and reduce-scatter it once."
    P, strategy = 4 * elements(run), run.plan["strategy"]
    c = run.comm.query("step == 2")
    assert set(c["rank"]) == {0, 1}
    for _, mine in c.groupby("rank"):
        by = mine.set_index("kind")
        print(strategy, {k: (f"{r.bytes / P:.4f} P", r.calls, f"{r.seconds * 1e3:.0f} ms") for k, r in by.iterrows()})
        if strategy == "ddp": assert by.bytes["all_reduce"] == pytest.approx(P, rel=1e-3) and by.bytes.sum() == pytest.approx(P, rel=1e-3)
        if strategy == "fsdp": assert by.bytes["reduce_scatter"] == pytest.approx(P, rel=.01)


SENDING = """
import sys; sys.path.insert(0, {tests!r})
import json, pathlib, ranks, test_probe
top = pathlib.Path({top!r})
(top / "model").mkdir()
wide = test_probe.make(top / "model")
out = {{}}
for strategy in ("ddp", "zero3", "fsdp"):
    run = test_probe.go(wide, top, strategy, test_probe.COUNTING, tokenizer=None)
    sent = run.comm.query("step == 3").groupby("kind").bytes.sum().to_dict()
    lo = [e["values"]["lo"] for e in run.events("log") if e["step"] == 3]
    out[strategy] = dict(bytes=sent, lo=lo[0])
print("RESULT" + json.dumps(out))
"""
COUNTING = """
import time, torch, torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
def lo(): return next(int(l.split(":")[1].split()[8]) for l in open("/proc/net/dev") if l.strip().startswith("lo:"))
def quiet():
    dist.barrier()
    time.sleep(.05)
    return lo()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(recipe.model))
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
dl = torch.utils.data.DataLoader([torch.arange(3, 131) + i % 5 for i in range(32)], batch_size=2)
model, opt, dl = accelerator.prepare(model, opt, dl)
for i, b in enumerate(dl):
    if i == 3: break
    before = quiet()
    loss = model(input_ids=b, labels=b).loss
    accelerator.backward(loss)
    opt.step()
    opt.zero_grad()
    log(lo=quiet() - before)
"""
GLOO = {"all_reduce": 1., "all_gather": .5, "reduce_scatter": 1., "broadcast": .5, "reduce": 1., "barrier": 0.} # what two ranks of Gloo send of a payload, each: it has no reduce-scatter, and all-reduces instead


@pytest.mark.slow
def test_against_the_wire(tmp_path):
    "Bytes counted at the calls, against those that the loopback interface of a network of our own has carried."
    inside = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']
    if subprocess.run([*inside, "true"], capture_output=True).returncode: pytest.skip("no network namespace of one's own here (unshare -rn)")
    code = SENDING.format(tests=str(Path(__file__).parent), top=str(tmp_path))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([*inside, sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=200)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT")), None)
    assert line, done.stderr[-3000:]
    for strategy, r in json.loads(line[6:]).items():
        want = sum(GLOO[k] * n for k, n in r["bytes"].items())
        print(f"{strategy}: {r['lo'] / 2**20:.2f} MiB on the wire, {want / 2**20:.2f} by the calls ({r['lo'] / want - 1:+.2%})")
        assert r["lo"] == pytest.approx(want, rel=.02)


SAVING = """
import gc, torch
from shardnb.run.engine import Engine
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(recipe.model))
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
dl = torch.utils.data.DataLoader([torch.arange(3, 259) + i % 5 for i in range(32)], batch_size=4)
model, opt, dl = accelerator.prepare(model, opt, dl)
engine = next(o for o in gc.get_objects() if isinstance(o, Engine))
def key(t): return t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) else t.data_ptr()
for i, b in enumerate(dl):
    if i == 3: break
    saved = {}
    def pack(t):
        if key(t) not in {key(getattr(w, "_local_tensor", w)) for _, _, w in engine.walk() if w is not None}: saved[key(t)] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t): out = model(input_ids=b, labels=b, use_cache=False)
    saved[key(out.logits)] = out.logits.untyped_storage().nbytes()
    accelerator.backward(out.loss)
    opt.step()
    opt.zero_grad()
    del out
    if rank == 0: log(saved=sum(saved.values()))
"""


@pytest.mark.parametrize("strategy", (slow("ddp"), "zero3", "fsdp"))
def test_activations(wide, tmp_path, strategy):
    "The rest at the end of the forward pass is what autograd saved, weights that were gathered for the moment excluded."
    run = go(wide, tmp_path, strategy, SAVING)
    saved = {e["step"]: e["values"]["saved"] for e in run.events("log")}
    for step in (2, 3):
        got = parts(run, step, "after_forward")["activations"]
        print(f"{strategy} step {step}: {got / 2**20:.2f} MiB measured, {saved[step] / 2**20:.2f} saved ({got / saved[step] - 1:+.2%})")
        assert got == pytest.approx(saved[step], rel=.02)


ASKING = """
import torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
dl = torch.utils.data.DataLoader([torch.arange(3, 35) + i % 5 for i in range(400)], batch_size=2)
model, opt, dl = accelerator.prepare(model, opt, dl)
for i, b in enumerate(dl):
    if i == 4 and rank == 0: (Path(__file__).parent / "snapshot").write_text("{}")
    accelerator.backward(model(input_ids=b, labels=b).loss)
    opt.step()
    opt.zero_grad()
    gone = accelerator.gather(torch.tensor([int(not (Path(__file__).parent / "snapshot").exists())]))[0].item()  # as rank 0 sees it, so that all leave in the same step
    log(loss=1., gone=gone)
    if i > 4 and gone and (done := globals().get("done", 0) + 1) > 4: break
"""


def test_snapshot(tmp_path):
    "A wish during the run is granted once, in the same step of every rank."
    from shardnb.plan.recipe import Recipe
    run = ranks.train(Recipe(strategy="ddp", nproc=2), ASKING, home=tmp_path)
    steps = [sorted(e["step"] for e in run.events("timeline", rank)) for rank in (0, 1)]
    taken = next(e["step"] for e in run.events("log") if e["step"] > 5 and e["values"]["gone"])
    granted = [s for s in steps[0] if taken < s <= taken + 2]   # all hear of it at once, or a step later
    assert steps[0] == steps[1] and len(granted) == 1 and set(steps[0]) - {3, 10, 33, 34, *granted} == set()   # beside the steps that take one in any case
    assert run.timeline(granted[0]).attrs["step"] == granted[0]
    measured = [{e["step"] for e in run.events("comm", rank)} for rank in (0, 1)]
    assert measured[0] == measured[1] # and every other measured step is the same one too


@pytest.mark.parametrize("world_size", (1, 8, 64))
def test_bound(monkeypatch, world_size):
    "100,000 steps of a second: so many are measured, and no more."
    from shardnb.run import observer as o
    now = [0.]
    monkeypatch.setattr(o.time, "monotonic", lambda: now[0])
    obs = SimpleNamespace(_begun=0., _cost=0., _measured_t=0., world_size=world_size, probe=SimpleNamespace(peaks=SimpleNamespace(spent=0.)))
    measured = deep = 0
    following = o.FIRST_STEPS
    for step in range(1, 100_001):
        now[0] += 1.
        if step >= following: deep, following = deep + 1, round(step * o.DEEP_GROWTH)
        if o.Observer._due(obs): obs._measured_t, measured = now[0], measured + 1
    bound = o.THINNING / max(world_size / 8, 1) * (1 + math.log(100_000 / o.THINNING * max(world_size / 8, 1))) + o.FIRST_STEPS
    print(f"{world_size} ranks: {measured} steps measured on each, {measured * world_size} in all; {deep} deep")
    assert measured <= bound and measured * world_size <= 14_000 and deep <= 11


def test_event_sizes(run):
    "What one measured and one deep step write."
    size = {k: max(len(json.dumps(e)) for e in run.events(k)) for k in ("memory", "comm", "timeline")}
    assert size["memory"] < 500 and size["comm"] < 700 and size["timeline"] < 50_000


@pytest.mark.slow
@pytest.mark.parametrize("activation_checkpointing", (False, True))
@pytest.mark.parametrize("grad_accum", (1, 2))
@pytest.mark.parametrize("tuning", ("full", "lora"))
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_remainder_everywhere(wide, tmp_path, strategy, precision, tuning, grad_accum, activation_checkpointing):
    run = go(wide, tmp_path, strategy, precision=precision, tuning=tuning, grad_accum=grad_accum, activation_checkpointing=activation_checkpointing)
    share, *where = left_over(run)
    print(f"{strategy} {precision} {tuning} accumulation {grad_accum} checkpointing {activation_checkpointing}: {share:.2%} at {where}")
    assert share < .05
