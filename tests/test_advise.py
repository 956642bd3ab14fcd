"What the plan advises: traffic in closed form, verdicts, suggestions that really fit, and the advice for the usual cases. No torch."
import json
import shutil
from dataclasses import replace

import pytest

from shardnb.plan.advise import OFFERED, Plan, advise, choose, communication, step_seconds, verdict
from shardnb.plan.machine import Machine
from shardnb.plan.memory import MemoryBreakdown, states
from shardnb.plan.predict import reserve
from shardnb.plan.problem import PlanError, RecipeError
from shardnb.plan.recipe import Recipe
from shardnb.plan.strategy import STRATEGIES, Strategy, settings

GiB = 2**30
SHAPES = {"llama-8b": (4096, 32, 128256, 14336, 1024), "llama-7b": (4096, 32, 32000, 11008, 4096), "llama-70b": (8192, 80, 128256, 28672, 1024), "small": (576, 30, 49152, 1536, 192)}
_FACTS = {}


def llama(name, tuning="full", r=16):
    "Facts about a model of Llama's shape, as the planner finds them"
    if (name, tuning) in _FACTS: return _FACTS[name, tuning]
    h, layers, vocab, inner, kv = SHAPES[name]
    w = {"q": (h, h), "k": (kv, h), "v": (kv, h), "o": (h, h), "gate": (inner, h), "up": (inner, h), "down": (h, inner)}
    full, ps = tuning == "full", []
    def add(n, unit, shape, train): ps.append([n, shape[0] * (shape[1] if len(shape) > 1 else 1), train, unit, list(shape)])
    add("embed", "embed", (vocab, h), full)
    for i in range(layers):
        for k, s in w.items():
            add(f"layers.{i}.{k}", f"layers.{i}", s, full)
            if not full: add(f"{i}.{k}.a", f"layers.{i}", (r, s[1]), True), add(f"{i}.{k}.b", f"layers.{i}", (s[0], r), True)
        for n in "12": add(f"layers.{i}.norm{n}", f"layers.{i}", (h,), full)
    add("norm", "tail", (h,), full), add("head", "tail", (vocab, h), full)
    _FACTS[name, tuning] = dict(model_type="llama", hidden_size=h, num_hidden_layers=layers, vocab_size=vocab, layer_classes=["LlamaDecoderLayer"], tied=False, moe_classes=[], params=ps,
        total=sum(p[1] for p in ps), trainable=sum(p[1] for p in ps if p[2]), largest_layer=sum(p[1] for p in ps if p[3] == "layers.0"))
    return _FACTS[name, tuning]


def predictor(machine, calls=None):
    "States in closed form and a rule of thumb for activations"
    def predict(recipe, strategy, nproc):
        r = recipe.replace(strategy=strategy, nproc=nproc).resolve(nproc, machine.cuda, machine.bf16)
        if calls is not None: calls.append((strategy, nproc))
        f, s = llama(r.model, r.tuning), Strategy.parse(strategy)
        b = states(f, s, settings(s, r, f, nproc, machine.cuda), r.precision, nproc, r.dtype)
        tokens, h, width = r.micro_batch * r.max_length, f["hidden_size"], 4 if r.precision == "fp32" else 2
        extra = {"activations": tokens * h * width * (f["num_hidden_layers"] * (1 if r.activation_checkpointing else 17) + 17), "logits": tokens * f["vocab_size"] * (width + 8)}
        if "params" in s.shards: extra["gathered"] = (2 * (f["largest_layer"] + f["vocab_size"] * h) if s.reshard else f["total"]) * width
        return MemoryBreakdown({**b.device, **extra}, b.host, "backward", band=reserve(b.peak + sum(extra.values()), b.peak, nproc) if machine.cuda else (0, 0))
    return predict


def case(model, machine, **kw):
    m, r = Machine.preset(machine) if isinstance(machine, str) else machine, Recipe(model=model, **kw)
    return r, m, llama(model, r.tuning), predictor(m)


# Traffic

def traffic(strategy, world=4, accum=1, model="llama-8b", **kw):
    r = Recipe(model=model, strategy=strategy, grad_accum=accum, **kw).resolve(world, True, True)
    return communication(strategy, r, llama(model, r.tuning), world)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("accum", [1, 3])
def test_traffic_is_the_papers(world, accum):
    "arXiv:1910.02054 section 7 in the types that travel"
    P, ring = llama("llama-8b")["total"], (world - 1) / world
    tail, layer = sum(p[1] for p in llama("llama-8b")["params"] if p[3] == "tail"), llama("llama-8b")["largest_layer"]
    t = {n: traffic(n, world, accum) for n in STRATEGIES}
    assert t["ddp"].sent == pytest.approx(2 * ring * P * 4)
    assert (t["zero1"].all_reduce, t["zero1"].all_gather) == pytest.approx((2 * ring * P * 2, ring * P * 2))
    assert (t["zero2"].all_reduce, t["zero2"].all_gather) == pytest.approx((accum * 2 * ring * P * 2, ring * P * 2))
    assert t["zero3"].reduce_scatter == pytest.approx(accum * ring * P * 2) and t["zero3"].all_gather == pytest.approx(accum * ring * (2 * P - tail - layer) * 2, rel=1e-3)
    assert t["fsdp"].reduce_scatter == pytest.approx(accum * ring * P * 4) and t["fsdp"].all_gather == pytest.approx(accum * ring * (2 * P - tail) * 2)
    assert t["fsdp-grad-op"].all_gather == pytest.approx(accum * ring * P * 2)


def test_one_rank_sends_nothing(): assert all(traffic(n, 1).sent == 0 for n in OFFERED)


def test_adapters_reduce_little():
    for n in ("ddp", "zero1", "zero2"): assert traffic(n, tuning="lora").sent < .02 * traffic(n).sent
    for n in ("zero3", "fsdp"): assert traffic(n, tuning="lora").all_gather > .9 * traffic(n).all_gather


def test_types_that_travel():
    assert traffic("ddp", reduce_dtype="bfloat16").sent == pytest.approx(traffic("ddp").sent / 2)
    assert traffic("zero3", precision="fp32").sent == pytest.approx(2 * traffic("zero3").sent)
    assert traffic("fsdp", reduce_dtype="bfloat16").reduce_scatter == pytest.approx(traffic("fsdp").reduce_scatter / 2)


@pytest.mark.parametrize("name", [n for n in OFFERED if "+" in n])
def test_offload_is_apart(name):
    t, plain = traffic(name), traffic(name.split("+")[0])
    assert t.sent == plain.sent and t.to_device and t.to_host and not plain.to_device and not t.disk


def test_an_offloaded_gradient_goes_down_after_every_micro_batch():
    "torch's foreach_reduce casts to the parameter's type, then copies"
    P, kw = llama("llama-8b")["total"], dict(reduce_dtype="bfloat16")
    assert [traffic("fsdp+param-cpu", accum=a, **kw).to_host for a in (1, 3)] == pytest.approx([P / 4 * 4, 3 * P / 4 * 4])


# Time

def test_time_of_compute():
    r, m, f, _ = case("llama-8b", "8xH100-80GB", micro_batch=1, grad_accum=1, max_length=2048)
    sec = lambda **kw: step_seconds("ddp", r.replace(**kw).resolve(8, True, True), f, m, 8)["compute"]
    used = f["total"] - 128256 * 4096
    assert sec() == pytest.approx(8 * used * 2048 / (989e12 * .4), rel=1e-4) and sec(activation_checkpointing=False) == pytest.approx(.75 * sec(), rel=1e-4)
    assert sec(micro_batch=2) == pytest.approx(2 * sec()) and sec(precision="fp32") > 10 * sec()


def test_slower_links_cost_more_where_more_is_sent():
    r, _, f, _ = case("llama-7b", "2xRTX4090", tuning="lora")
    for n, worse in (("ddp", 1.1), ("zero3", 1.3)):
        a, b = (step_seconds(n, r.resolve(2, True, True), f, Machine.preset(m), 2) for m in ("2xA100-80GB", "2xA100-80GB-PCIe"))
        assert (b["total"] > worse * a["total"]) == (n == "zero3"), n


# Verdicts

def test_verdicts():
    m = Machine.preset("4xA100-80GB")
    b = lambda d, h=0: MemoryBreakdown({"optimizer": int(d * GiB), "grads": 1}, {"optimizer": int(h * GiB)} if h else {}, band=(GiB, 6 * GiB))
    assert [verdict(b(*x), m, 4)[0] for x in ((73,), (75,), (79,), (80,), (20, 170), (20, 190))] == ["yes", "tight", "no", "no", "tight", "no"]
    assert "at least 81 GiB" in verdict(b(80), m, 4)[1] and "mostly optimizer, 80 GiB" in verdict(b(80), m, 4)[1] and "host memory" in verdict(b(20, 190), m, 4)[1]


def test_a_verdict_reckons_with_the_upper_end_of_the_range():
    m, b = Machine.preset("4xA100-80GB"), MemoryBreakdown({"activations": 70 * GiB}, band=(GiB, 10 * GiB))
    assert b.worst == 80 * GiB and verdict(b, m, 4)[0] == "tight" and "70 GiB are allocated and 71 to 80 used" in verdict(b, m, 4)[1]
    assert MemoryBreakdown.from_json(b.to_json() | {"margin": 5}) == b # a plan of an older version


def test_what_an_offload_puts_on_a_disk_is_not_on_the_host():
    m, b = Machine.preset("4xA100-80GB"), MemoryBreakdown({"params": 20 * GiB}, {"comm": 10 * GiB}, disk={"optimizer": 200 * GiB})
    fits, why = verdict(b, m, 4)
    assert fits == "yes" and "800 GiB of disk" in why
    fits, why = verdict(b, Machine("a full disk", m.gpus, host_bytes=m.host_bytes, disk_bytes=500 * GiB), 4)
    assert fits == "no" and "800 GiB to files" in why and "500 free" in why


def test_the_disk_that_counts_is_that_of_nvme_path(monkeypatch, tmp_path):
    free = lambda p: shutil._ntuple_diskusage(0, 0, 500 * GiB if str(p).startswith(str(tmp_path)) else 9000 * GiB)
    monkeypatch.setattr("shardnb.plan.machine.shutil.disk_usage", free)
    m, r = Machine.preset("4xA100-80GB"), Recipe(model="llama-8b", strategy="zero3+optim-nvme", nvme_path=str(tmp_path / "swap"))
    (tmp_path / "swap").mkdir()
    def verdict_on(machine):
        predict = lambda recipe, strategy, nproc: MemoryBreakdown({"params": 20 * GiB}, disk={"optimizer": 200 * GiB} if "nvme" in strategy else {})
        return advise(r, machine, llama("llama-8b"), predict).row("zero3+optim-nvme")
    row = verdict_on(replace(m, disk_bytes=9000 * GiB, here=True))
    assert row["fits"] == "no" and "the disk has 500 free" in row["why"]
    assert verdict_on(replace(m, disk_bytes=9000 * GiB))["fits"] == "yes" # a preset's disk isn't here


def test_on_a_cpu_offload_saves_nothing():
    m = Machine("a laptop", (), cores=2, host_bytes=16 * GiB)
    for h in (0, 2, 4): assert verdict(MemoryBreakdown({"params": (7 - h) * GiB}, {"optimizer": h * GiB}), m, 2)[0] == "tight"


# Suggestions

CASES = [("llama-8b", "4xA100-80GB", {}), ("llama-8b", "4xA100-80GB", dict(micro_batch=16, max_length=4096)), ("llama-7b", "4xA100-80GB", dict(tuning="lora", micro_batch=8, max_length=8192)),
         ("llama-8b", "2xRTX4090", {}), ("llama-8b", "2xRTX4090", dict(tuning="lora")), ("llama-7b", "2xRTX4090", dict(tuning="lora", micro_batch=8, max_length=4096)),
         ("llama-70b", "8xH100-80GB", {}), ("llama-70b", "8xH100-80GB", dict(tuning="lora")), ("llama-8b", "1xT4", dict(tuning="lora")), ("small", "cpu", {})]


@pytest.mark.parametrize("model,machine,kw", CASES)
def test_suggestions_fit_when_predicted_again(model, machine, kw):
    r, m, f, predict = case(model, machine, **kw)
    for row in (p := advise(r, m, f, predict)).rows:
        s = row["suggestion"]
        if row["fits"] == "yes": assert s is None
        if s is None: continue
        again = r.replace(**{"strategy": row["strategy"], "nproc": row["nproc"], **s["changes"]})
        if s["nproc"] > len(m.gpus): m = Machine.preset(machine.replace(str(len(m.gpus)), str(s["nproc"]), 1))
        b = predictor(m)(again, again.strategy, s["nproc"])
        fits = verdict(b, m, s["nproc"])[0]
        assert (b.peak, fits) == (s["peak_bytes"], s["fits"]) and fits != "no", row["label"]
        if s["level"] == 1: assert again.resolve(s["nproc"], m.cuda, m.bf16).global_batch == r.resolve(p.nproc, m.cuda, m.bf16).global_batch


@pytest.mark.parametrize("model,machine,kw", CASES)
def test_a_plan_is_consistent(model, machine, kw):
    r, m, f, predict = case(model, machine, **kw)
    p = advise(r, m, f, predict)
    assert len({x["label"] for x in p.rows}) == len(p) and {x["strategy"] for x in p.rows} >= set(OFFERED)
    for x in p.rows: assert p[x["label"]].peak == x["peak_bytes"]
    assert p.row("ddp")["relative_step_time"] == 1 and "\n" not in p.why and "None" not in p.why
    if p.best:
        assert p.rows[0]["label"] == p.best
        done = r.replace(strategy=p.best, **p.changes)
        assert verdict(predict(done, p.best, done.nproc or p.nproc), m, done.nproc or p.nproc)[0] != "no"
        assert choose(r, m, f, predict) == (p.best, p.changes, p.why)
    else:
        with pytest.raises(PlanError, match="no strategy fits"): choose(r, m, f, predict)
    again = Plan.from_json(json.loads(json.dumps(p.to_json())))
    assert repr(again) == repr(p) and again["ddp"] == p["ddp"] and "<table" in again._repr_html_()


# More of anything never needs less, more ranks never more

@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "fsdp", "zero3+optim-cpu"])
def test_more_ranks_never_raise_a_sharded_peak(name):
    r, _, f, _ = case("llama-8b", "8xH100-80GB")
    peaks = [predictor(Machine.preset(f"{n}xH100-80GB"))(r, name, n).peak for n in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("name", OFFERED)
def test_longer_rows_never_fit_better(name):
    order = {"yes": 0, "tight": 1, "no": 2}
    seen = [advise(*case("llama-8b", "4xA100-80GB", max_length=n)).row(name) for n in (1024, 8192, 65536)]
    assert [order[x["fits"]] for x in seen] == sorted(order[x["fits"]] for x in seen)
    assert [x["peak_bytes"] for x in seen] == sorted(x["peak_bytes"] for x in seen)


# What an experienced engineer would say

def test_8b_full_on_four_a100():
    p = advise(*case("llama-8b", "4xA100-80GB"))
    assert p.row("ddp")["fits"] == "no" and p.best in ("zero1", "zero2", "fsdp", "zero3", "fsdp-grad-op") and "ddp needs 121 GiB, mostly optimizer" in p.why


@pytest.mark.parametrize("model", ["llama-7b", "llama-8b"])
@pytest.mark.parametrize("machine", ["4xA100-80GB", "2xRTX4090"])
def test_adapters_fit_everywhere_so_ddp(model, machine):
    p = advise(*case(model, machine, tuning="lora"))
    assert p.best == "ddp" and "nothing has to be sharded" in p.why and p.row("fsdp")["relative_step_time"] > 1


def test_8b_full_on_two_4090_is_not_for_this_machine():
    p = advise(*case("llama-8b", "2xRTX4090"))
    assert p.best is None and "LoRA" in p.why and "host memory" in p.why and p.row("zero3")["suggestion"]["changes"] == {"tuning": "lora"}


def test_more_host_memory_changes_the_advice():
    r, m, f, predict = case("llama-8b", Machine.preset("2xRTX4090", host_bytes=256 * GiB))
    p = advise(r, m, f, predict)
    assert p.best in ("zero2+optim-cpu", "zero3+optim-cpu") and any("larger global batch" in n for n in p.notes)


def test_70b_on_eight_h100():
    full, lora = (advise(*case("llama-70b", "8xH100-80GB", tuning=t)) for t in ("full", "lora"))
    assert full.best == "zero3+optim-cpu" and full.row("zero3")["fits"] == "no" and any("such GPUs" in n for n in full.notes) and "tuning lora" in full.why
    assert lora.best in ("fsdp", "zero3") and lora.row("ddp")["fits"] == "no"
    rules = [next(x for x in p.rules if "13B" in x["rule"]) for p in (full, lora)]
    assert rules[0]["agrees"] and rules[1]["applies"] and not rules[1]["agrees"] and "GiB" in rules[1]["says"] and "less time" in rules[1]["says"]


def test_a_small_model_needs_no_sharding():
    p = advise(*case("small", "8xH100-80GB"))
    assert p.best == "ddp" and next(x for x in p.rules if "under 7B" in x["rule"])["agrees"] is False


def test_one_gpu_can_fit_what_two_do_not():
    "Two ranks that need more each than one rank alone: ms-swift's issue 2293"
    r, m, f, predict = case("llama-7b", "2xA100-80GB")
    def heavier(recipe, strategy, nproc): return MemoryBreakdown({"optimizer": (60 if nproc == 1 else 82) * GiB})
    p = advise(r, m, f, heavier)
    assert (p.best, p.changes["nproc"]) == ("ddp", 1) and "2 ranks do not fit" in p.why
    assert any("one rank needs 60 GiB, less than" in n and "zero2" in n for n in p.notes)


def test_one_gpu_is_not_advised_where_two_fit():
    assert "nproc" not in advise(*case("small", "2xRTX4090")).changes


def test_a_measured_link_counts():
    r, m, f, predict = case("llama-8b", "4xA100-80GB")
    slow, fast = (advise(r, m, f, predict, measured_link=x).row("fsdp")["seconds"]["communication"] for x in (1e9, 200e9))
    assert slow > 20 * fast and any("as measured" in n for n in advise(r, m, f, predict, 1e9).notes)


def test_checkpointing_is_the_persons_when_said():
    for said in (True, False):
        p = advise(*case("llama-8b", "4xA100-80GB", activation_checkpointing=said))
        assert all(x["checkpointing"] is said for x in p.rows) and "activation_checkpointing" not in p.changes


def test_a_resolved_recipe_gives_the_same_plan():
    r, m, f, predict = case("llama-8b", "4xA100-80GB")
    assert repr(advise(r.resolve(4, True, True), m, f, predict)) == repr(advise(r, m, f, predict))


# Refusals

def test_what_a_recipe_rules_out_has_no_row():
    p = advise(*case("llama-7b", "4xA100-80GB", precision="bf16-pure"))
    assert "zero3+optim-cpu" not in list(p) and any(n.startswith("zero3+optim-cpu is left out") for n in p.notes)


def test_what_cannot_be_predicted_is_a_plan_error():
    r, m, f, _ = case("llama-7b", "4xA100-80GB")
    def broken(*a): raise PlanError("no such model")
    with pytest.raises(PlanError, match="no strategy can be planned.*no such model"): advise(r, m, f, broken)


def test_more_ranks_than_gpus():
    with pytest.raises(RecipeError, match="8 ranks need as many GPUs; 4xA100-80GB has 4.*did you mean '4'"): advise(*case("llama-7b", "4xA100-80GB", nproc=8))


def test_each_way_is_predicted_once():
    calls = []
    r, m, f, _ = case("llama-70b", "8xH100-80GB")
    advise(r, m, f, predictor(m, calls))
    assert len(calls) < 150
