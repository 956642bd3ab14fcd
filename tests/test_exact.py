"""The exact prediction (real engines on fake tensors) against real ranks on CPUs: states to the byte, activations, and the peak of a step."""
import json
import os
import sys

import pytest
import ranks

STATES = ("params", "grads", "optimizer")
SLACK = 2**19 # bytes: the C library's count holds autograd's own objects too


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    "A Llama with 15.7M parameters, and rows that all have more tokens than fit."
    top = tmp_path_factory.mktemp("exact")
    ranks.model_folder(top, ranks.LLAMA | dict(hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=4003))
    ranks.rows_file(top, [dict(prompt=f"count {i}", completion=" ".join(str((i * 7 + j) % 97) for j in range(300))) for i in range(64)])
    return top


def play(recipe, **question):
    "`exact` in a forked child, which has the heavy imports already."
    import importlib
    for m in (*ranks.HEAVY, "torch._subclasses.fake_tensor", "transformers.trainer"): importlib.import_module(m)
    from shardnb.run import exact
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            import torch
            torch.set_num_threads(1)
            answer = exact._answer(dict(recipe=recipe.to_yaml(), strategy=None, nproc=None, cuda=False, bf16=True, padded=None) | question)
            with os.fdopen(write, "w") as f: json.dump(answer, f)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as f: answer = f.read()
    os.waitpid(pid, 0)
    assert answer, "the child gave no answer; its traceback is above"
    return json.loads(answer)


def recipe(model, strategy, **kw):
    from shardnb.plan.recipe import Recipe
    return Recipe(**{**dict(model=str(model), dataset=str(model / "rows.jsonl"), strategy=strategy, nproc=2, micro_batch=1, grad_accum=1, max_steps=3, max_length=256, precision="fp32",
                            learning_rate=1e-4, activation_checkpointing=False, assistant_only_loss=False), **kw})


def check(model, home, strategy, **kw):
    r = recipe(model, strategy, **kw)
    run, e = ranks.train(r, home=home), play(r)
    m = run.memory
    m = m[(m["rank"] == 0) & (m.step == 3)]
    got = lambda moment, place="device": m[(m.moment == moment) & (m.place == place)].groupby("category").bytes.sum().to_dict()
    back, host, peak = got("after_backward"), got("after_backward", "host"), got("peak")
    for c in STATES: assert e["states"][c] == back.get(c, 0) + host.get(c, 0), c
    have, want = got("after_forward")["activations"], e["phases"]["after_forward"]["activations"]
    top, mine = peak.get("total") or sum(n for c, n in peak.items() if c != "context"), e["peak"]
    print(f"{strategy} {kw}: activations {have / 2**20:.2f}, played {want / 2**20:.2f} MiB; peak {top / 2**20:.2f}, played {mine / 2**20:.2f} MiB ({mine / top - 1:+.2%}) at {e['peak_at']}")
    assert abs(want - have) <= max(.02 * have, SLACK)
    assert abs(mine / top - 1) <= .05
    return e


@pytest.mark.parametrize("strategy,kw", [("zero3", {}), pytest.param("fsdp", dict(tuning="lora", activation_checkpointing=True), marks=pytest.mark.slow)])
def test_real_ranks(model, tmp_path, strategy, kw): check(model, tmp_path, strategy, **kw)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op"))
@pytest.mark.parametrize("kw", (dict(), dict(precision="bf16"), dict(precision="bf16", activation_checkpointing=True), dict(tuning="lora")))
def test_more_real_ranks(model, tmp_path, strategy, kw): check(model, tmp_path, strategy, **kw)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ("zero1", "zero2", "zero3", "fsdp"))
def test_accumulation(model, tmp_path, strategy): check(model, tmp_path, strategy, grad_accum=2)


def test_world_of_many(model):
    "States of rank 0 of 64 agree with the closed form, and a timeline has a bounded number of points."
    from shardnb.plan.memory import state_bytes
    from shardnb.plan.strategy import settings
    from shardnb.run.planner import model_facts
    r = recipe(model, "fsdp", nproc=64, precision="bf16")
    e, f = play(r, cuda=True), model_facts(str(model))
    rr = r.resolve(64, True)
    want = state_bytes(f, "fsdp", settings("fsdp", rr, f, 64, True), "bf16", 64, moment="after_backward")
    for c in STATES: assert 0 <= e["states"][c] - want[c] <= 4 * len(f["params"]), c # Adam's step counters
    t = e["timeline"]
    assert 300 < len(t["t"]) <= 450 and all(len(b) == len(t["t"]) for b in t["bytes"].values())
    assert max(map(sum, zip(*t["bytes"].values()))) == e["peak"]


@pytest.mark.parametrize("kw", [dict(tuning="lora", lora_dropout=.05), dict(precision="bf16", optim="adamw_torch_fused")])
def test_the_instant_prediction_knows_what_zero3_holds(model, kw):
    "The input of frozen layers too, and the flat copy of a slice of gradients."
    from shardnb.plan.machine import Machine
    from shardnb.run.forecast import Forecaster
    m = Machine.preset("2xA100-80GB")
    r = recipe(model, "zero3", max_length=32, **kw)
    e, quick = play(r, cuda=True), Forecaster().predict(r, "zero3", 2, m)
    total = lambda b, phase: sum(b[phase].values())
    assert quick.phases["after_forward"]["activations"] == pytest.approx(e["phases"]["after_forward"]["activations"], rel=.01, abs=2**16)
    assert total(quick.phases, "step") == pytest.approx(total(e["phases"], "step"), rel=.005)


def test_accumulating_ddp_needs_gradients_twice(model):
    "Between micro-batches DDP's gradients lie outside its buckets."
    one, two = (play(recipe(model, "ddp", grad_accum=n)) for n in (1, 2))
    grads = one["states"]["grads"]
    assert abs(two["peak"] - one["peak"] - grads) < .01 * grads
