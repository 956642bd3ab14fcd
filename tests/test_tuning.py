"Adapters, 4-bit models and optimizers in real runs: they learn, they really shard, what is saved is what was trained, and what can't be done is said"
import json

import pytest
import ranks

from shardnb.plan.problem import RecipeError
from shardnb.plan.recipe import Recipe
from shardnb.run.builtin import demo_problems
from shardnb.run.compiled import is_built
from shardnb.run.models import load_model, load_tokenizer, resolve_model

SMOL = dict(model="demo", dataset="demo", nproc=2, precision="fp32", micro_batch=4, global_batch=8, max_steps=9, max_length=96, eval_share=.08, eval_steps=3,
            learning_rate=1e-3, lora_r=8, lora_dropout=0., warmup_steps=2)


def evals(run): return [e["metrics"]["eval_loss"] if "metrics" in e else e["loss"] for e in run.events("eval")]


def held(run, category):
    "Bytes that each rank holds after an optimizer step"
    return run.memory.query("moment == 'after_step' and category == @category and place == 'device'").groupby("rank").bytes.max()


def answer(model, tok, text="What is a computer?", n=24):
    import torch
    x = tok.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad(): out = model.eval().generate(**x, max_new_tokens=n, do_sample=False, pad_token_id=tok.pad_token_id, use_cache=True)
    return tok.decode(out[0][x["input_ids"].shape[1]:], skip_special_tokens=True)


def logits(model, tok, text="What is a computer?"):
    import torch
    x = tok.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad(): return model.eval()(**x).logits.float()


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    "Runs of SmolLM2 by (tuning, strategy), each once"
    if demo_problems(): pytest.skip("the demo model isn't installed")
    home, done = tmp_path_factory.mktemp("smol"), {}
    def run(tuning, strategy):
        if (tuning, strategy) not in done: done[tuning, strategy] = ranks.train(Recipe(**SMOL, tuning=tuning, strategy=strategy), home=home, timeout=1500)
        return done[tuning, strategy]
    return run


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ("zero3", "fsdp"))
@pytest.mark.parametrize("tuning", ("lora", "qlora"))
def test_smollm2_learns_through_its_adapter(smol, tuning, strategy):
    import torch
    from peft import PeftModel
    run = smol(tuning, strategy)
    seen = evals(run)
    assert len(seen) == 3 and seen[-1] < seen[0] and run.metrics.loss.iloc[-1] < run.metrics.loss.iloc[0], seen
    recipe, final = Recipe(**SMOL, tuning=tuning), run.rundir.checkpoints_path / "final"
    tok, base = load_tokenizer(recipe), load_model(recipe)
    before, plain = answer(base, tok), logits(base, tok)
    adapted = PeftModel.from_pretrained(base, final)
    assert answer(adapted, tok) != before
    after = logits(adapted, tok)
    assert (after - plain).abs().max() > .1
    if tuning == "qlora": return # merging rounds the adapter to 4 bits
    merged = adapted.merge_and_unload()
    assert torch.allclose(logits(merged, tok), after, atol=1e-3) and answer(merged, tok) != before


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ("zero3", "fsdp"))
def test_a_4_bit_model_really_shards(smol, strategy):
    "Each rank holds half of the packed weights, and the whole run less than LoRA's"
    thick, thin = (held(smol(t, strategy), "params") for t in ("lora", "qlora"))
    assert (thin < .55 * thick).all(), (thick, thin)
    peaks = [r.memory.query("moment == 'peak' and category == 'total'").groupby("rank").bytes.max() for r in (smol("lora", strategy), smol("qlora", strategy))]
    print(strategy, "peak of LoRA, QLoRA in MiB:", [(p / 2**20).round().tolist() for p in peaks])
    assert (peaks[1] < peaks[0]).all(), peaks


@pytest.mark.slow
def test_evaluations_leave_a_4_bit_model_alone(smol):
    "The same losses with and without evaluations in between, under every strategy (bitsandbytes 0.50.2 repacks weights on CPUs with AVX512_BF16)"
    for strategy in ("zero3", "fsdp"):
        without = ranks.train(Recipe(**{**SMOL, "eval_steps": 100}, tuning="qlora", strategy=strategy), home=smol("qlora", strategy).rundir.path.parent.parent, timeout=1500)
        assert without.metrics.loss.tolist() == pytest.approx(smol("qlora", strategy).metrics.loss.tolist(), rel=1e-5)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return ranks.rows_file(tmp_path_factory.mktemp("rows"), ranks.counting(i % 9 for i in range(24)))


go = ranks.tiny
needs_bitsandbytes = pytest.mark.skipif(__import__("importlib.util", fromlist=["find_spec"]).find_spec("bitsandbytes") is None, reason="bitsandbytes isn't installed")


@needs_bitsandbytes
def test_an_evaluation_doesn_t_touch_4_bit_weights():
    "Without the fix it does on CPUs with AVX512_BF16; when bitsandbytes no longer repacks in place, this test says that `_keep_4bit_layout` can go"
    import bitsandbytes as bnb
    import torch
    from bitsandbytes.functional import has_avx512bf16

    r = Recipe(model="tiny", tuning="qlora", precision="fp32")
    def weights(model): return [m.weight.data.clone() for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    ids = torch.arange(24)[None]
    for fixed in (True, False):
        model = load_model(r)
        if not fixed:
            for m in model.modules():
                if isinstance(m, bnb.nn.Linear4bit): m.support_avx512bf16_for_cpu = has_avx512bf16() and m.out_features % 32 == 0 and m.in_features % 64 == 0   # else its repacking fails outright
        before, trained = weights(model), model.train()(ids).logits.detach()
        with torch.no_grad(): model.eval()(ids)
        same = all(a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, weights(model)))
        assert same == (fixed or not has_avx512bf16()), fixed
        if fixed: assert torch.equal(model.train()(ids).logits.detach(), trained)


@needs_bitsandbytes
@pytest.mark.parametrize("strategy,optim", [("ddp", "adafactor"), ("zero3", "adamw_8bit"), pytest.param("ddp", "sgd", marks=pytest.mark.slow), pytest.param("ddp", "adamw_8bit", marks=pytest.mark.slow)])
def test_an_optimizer_keeps_the_bytes_that_are_predicted(rows, tmp_path, strategy, optim):
    run = go(rows, tmp_path, strategy, optim=optim, learning_rate=1e-2 if optim == "sgd" else 1e-3)
    assert run.metrics.loss.iloc[-1] < run.metrics.loss.iloc[0]
    predicted = run.plan["state_bytes"]["optimizer"]
    assert held(run, "optimizer").tolist() == pytest.approx([predicted] * 2, rel=.01, abs=64) if predicted else held(run, "optimizer").empty


@pytest.mark.slow
@needs_bitsandbytes
def test_8_bit_moments_are_the_same_under_every_strategy_that_takes_them(rows, tmp_path):
    losses = {s: go(rows, tmp_path, s, optim="adamw_8bit").metrics.loss.tolist() for s in ("ddp", "zero1", "zero2", "zero3", "zero2+optim-cpu", "zero3+optim-cpu")}
    assert all(v == pytest.approx(losses["ddp"], rel=1e-4) for v in losses.values()), losses


CPU_ADAM = {"optim": "deepspeed_cpu_adam"}
needs_cpu_adam = pytest.mark.skipif(not is_built("cpu_adam"), reason="DeepSpeed's operation cpu_adam isn't built: make nvme")


@pytest.mark.slow
@needs_cpu_adam
@pytest.mark.parametrize("strategy,kw", [("zero1+optim-cpu", {}), ("zero2+optim-cpu", {}), ("zero3+optim-cpu", {}), ("zero3+optim-cpu+param-cpu", {}), ("zero3+optim-cpu", dict(precision="bf16")), ("zero3+optim-nvme", {})])
def test_deepspeed_s_cpu_adam_steps_as_pytorch_s_adamw_does(rows, tmp_path, strategy, kw):
    if "nvme" in strategy:
        if not is_built("async_io"): pytest.skip("DeepSpeed's operation async_io isn't built: make nvme")
        kw = kw | dict(nvme_path=str(tmp_path))
    torchs, own = (go(rows, tmp_path, strategy, weight_decay=.1, **kw, **o) for o in ({}, CPU_ADAM))
    assert own.metrics.loss.iloc[-1] < own.metrics.loss.iloc[0]
    assert own.metrics.loss.tolist() == pytest.approx(torchs.metrics.loss.tolist(), rel=2e-4 if kw.get("precision") == "bf16" else 1e-5)
    assert [e["optimizer"] for r in (torchs, own) for e in r.events("effective")] == ["AdamW"] * 2 + ["DeepSpeedCPUAdam"] * 2
    host = lambda run: run.memory.query("moment == 'after_step' and category == 'optimizer'").groupby("rank").bytes.max().tolist()
    assert host(own) == pytest.approx(host(torchs), rel=.01, abs=64)


@pytest.mark.slow
@needs_cpu_adam
def test_a_checkpoint_of_deepspeed_s_cpu_adam_goes_anywhere(rows, tmp_path):
    "Its step is a plain number, PyTorch's a tensor; each gets its own form"
    def way(first, then):
        kw = dict(weight_decay=.1, lr_scheduler_type="constant")
        whole = go(rows, tmp_path, **first, save_steps=3, max_steps=6, **kw)
        rest = go(rows, tmp_path, **then, max_steps=6, **kw, plan=dict(resume_from=str(next(c for c in whole.checkpoints if c.step == 3).path)))
        assert rest.metrics.step.tolist() == whole.metrics.step.tolist()[3:]
        assert rest.metrics.loss.tolist() == pytest.approx(whole.metrics.loss.tolist()[3:], rel=1e-4)
    offloaded = dict(strategy="zero3+optim-cpu", **CPU_ADAM)
    way(offloaded, dict(strategy="fsdp"))
    way(dict(strategy="zero2"), offloaded)
    way(offloaded, offloaded)


def test_an_operation_that_isn_t_built_is_said_before_a_rank_starts(rows, tmp_path, monkeypatch):
    from shardnb.run.planner import plan_run
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("shardnb.run.compiled._package_dir", lambda name: None)
    with pytest.raises(RecipeError, match=r"optim: .*make nvme.*adamw_torch"): plan_run(Recipe(model="tiny", dataset=str(rows), strategy="zero3+optim-cpu", **CPU_ADAM), predict=False)
    with pytest.raises(RecipeError, match=r"strategy: .*libaio-dev.*AsyncIOBuilder"): plan_run(Recipe(model="tiny", dataset=str(rows), strategy="zero3+optim-nvme", nvme_path=str(tmp_path)), predict=False)


REFUSED = [
    (dict(optim="adafactor", strategy="zero2"), "no rows and columns"), (dict(optim="adafactor", strategy="fsdp"), "fails in its first step"),
    (dict(optim="adamw_8bit", strategy="fsdp"), "zero1, zero2 and zero3 shard it"), (dict(optim="adamw_8bit", strategy="zero3+optim-nvme", nvme_path="/tmp"), "fp32 moments only"),
    (dict(optim="deepspeed_cpu_adam", strategy="zero3"), "keeps them on the device"), (dict(optim="cpuadam", strategy="fsdp+param-cpu"), "elsewhere than ZeRO does"),
    (dict(use_dora=True, tuning="qlora", strategy="zero3"), "one type only"), (dict(lr_scheduler_type="cosine_warmup_with_min_lr"), "min_lr"),
]


@pytest.mark.parametrize("kw,why", REFUSED)
def test_what_an_engine_can_t_do_is_said_before(kw, why):
    with pytest.raises(RecipeError) as e: Recipe(model="tiny", **kw)
    assert len(e.value.problems) == 1 and why in str(e.value)


@pytest.mark.slow
@pytest.mark.parametrize("strategy,kw", [("fsdp", dict(optim="adafactor")), ("fsdp", dict(optim="adamw_8bit")), ("zero3", dict(use_dora=True, tuning="qlora"))])
def test_what_is_refused_really_fails(rows, tmp_path, strategy, kw, monkeypatch):
    "When this test fails, a library can do more than it could, and a refusal in plan/contradiction can go"
    from shardnb.plan import contradiction
    from shardnb.run import planner
    monkeypatch.setattr(contradiction, "_tuning_problems", lambda r, s: [])
    monkeypatch.setattr(planner, "_predicted", lambda *a: (None, []))   # the planner's process would refuse it
    with pytest.raises(AssertionError, match="failed"): go(rows, tmp_path, strategy, **kw)


def test_schedules_that_follow_evaluations_need_some(rows):
    from shardnb.run.planner import plan_run
    for name in ("reduce_lr_on_plateau", "greedy"):
        with pytest.raises(RecipeError, match="follows the loss of evaluations"): plan_run(Recipe(model="tiny", dataset=rows, nproc=2, lr_scheduler_type=name))


def test_the_recipe_knows_every_schedule_of_transformers():
    from transformers import SchedulerType

    from shardnb.plan.recipe import _choices
    assert set(_choices("lr_scheduler_type")) == {s.value for s in SchedulerType}


NEEDS = {"cosine_with_min_lr": dict(min_lr=1e-5), "cosine_warmup_with_min_lr": dict(min_lr=1e-5), "warmup_stable_decay": dict(num_decay_steps=1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt", "warmup_stable_decay", "reduce_lr_on_plateau", "greedy"])
def test_every_schedule_runs(rows, tmp_path, name):
    run = go(rows, tmp_path, "zero2", lr_scheduler_type=name, lr_scheduler_kwargs=NEEDS.get(name, {}), eval_share=.2, eval_steps=1)
    assert len(run.metrics) == 3 and run.metrics.lr.notna().all()


@pytest.mark.slow
def test_dora_and_rslora(rows, tmp_path):
    "The adapter's own configuration says so; DoRA's lengths are parameters that the plan counts; the same losses where weights are taken apart as where they aren't"
    tight = dict(zero_optimization=dict(stage3_max_live_parameters=1, stage3_max_reuse_distance=1, stage3_param_persistence_threshold=1))  # nothing stays gathered by chance
    runs = {s: go(rows, tmp_path, s, tuning="lora", use_dora=True, use_rslora=True, lora_r=4, lora_dropout=0., deepspeed=tight if s == "zero3" else None) for s in ("ddp", "zero3")}
    assert runs["zero3"].metrics.loss.tolist() == pytest.approx(runs["ddp"].metrics.loss.tolist(), rel=1e-5)
    facts = runs["ddp"].plan["facts"]
    assert any("lora_magnitude_vector" in p[0] for p in facts["params"]) and runs["ddp"].events("effective")[0]["trainable"] == facts["trainable"]
    saved = json.loads((runs["zero3"].rundir.checkpoints_path / "final" / "adapter_config.json").read_text())
    assert saved["use_dora"] and saved["use_rslora"]


def test_missing_embeddings_are_added_and_saved(rows, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tok = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    tok.add_tokens([f"<new {i}>" for i in range(10)])
    tok.save_pretrained(tmp_path / "tok")
    run = go(rows, tmp_path, "zero3", tokenizer=str(tmp_path / "tok"))
    assert any("5 rows were added" in e["message"] for e in run.events("note"))
    model = AutoModelForCausalLM.from_pretrained(run.rundir.checkpoints_path / "final")
    assert model.get_input_embeddings().weight.shape == model.get_output_embeddings().weight.shape == (269, 64)
    with pytest.raises(AssertionError, match="wouldn't learn with tuning lora"): go(rows, tmp_path, "ddp", tokenizer=str(tmp_path / "tok"), tuning="lora")


MIXTRAL = dict(model_type="mixtral", architectures=["MixtralForCausalLM"], hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    num_local_experts=4, num_experts_per_tok=2, vocab_size=264, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def test_experts_are_leaf_modules_under_zero3(rows, tmp_path):
    "Ranks send their tokens to different experts; a block of them is gathered as a whole"
    folder = ranks.model_folder(tmp_path / "moe", MIXTRAL)
    runs = {s: go(rows, tmp_path, s, model=folder) for s in ("ddp", "zero3")}
    assert runs["zero3"].plan["settings"]["deepspeed"]["zero_optimization"]["leaf_module"]["classes"] == runs["zero3"].plan["facts"]["moe_classes"] != []
    assert runs["zero3"].metrics.loss.tolist() == pytest.approx(runs["ddp"].metrics.loss.tolist(), rel=1e-5)


def quantized(folder, **kw):
    "`tiny` as a checkpoint that is quantized already"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    load_model(Recipe(model="tiny", precision="fp32")).save_pretrained(folder / "plain")
    AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=BitsAndBytesConfig(**kw), dtype=torch.float32).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(resolve_model("tiny")).save_pretrained(folder / "model")
    return str(folder / "model")


@pytest.mark.slow
@needs_bitsandbytes
@pytest.mark.parametrize("kw,strategies", [(dict(load_in_8bit=True), ("ddp", "zero2")), (dict(load_in_4bit=True), ("ddp",))])
def test_adapters_on_a_quantized_checkpoint(rows, tmp_path, kw, strategies):
    folder = quantized(tmp_path, **kw)
    for s in strategies:
        run = go(rows, tmp_path, s, model=folder, tuning="lora", lora_r=4)
        assert run.metrics.loss.iloc[-1] < run.metrics.loss.iloc[0] and any("is quantized already" in e["message"] for e in run.events("note"))
    from shardnb.run.models import model_problems
    assert [p.field for p in model_problems(Recipe(model=folder, tuning="lora", strategy="fsdp"))] == ["strategy"]
    assert [p.field for p in model_problems(Recipe(model=folder))] == ["tuning"]


@pytest.mark.parametrize("attention", ("sdpa", "eager"))
def test_packed_documents_have_the_losses_that_they_have_alone(tmp_path, attention):
    "24 rows of one length, packed into two, in a real run"
    f = ranks.rows_file(tmp_path, [dict(prompt=f"count to {i % 9}", completion=f"{i % 9} {i % 7} {i % 5}") for i in range(24)])
    kw = dict(max_steps=2, attn_implementation=attention, warmup_steps=1)
    single = go(f, tmp_path, "ddp", max_length=512, micro_batch=12, global_batch=24, **kw)
    tokens = int(single.metrics.tokens[0])
    packed = go(f, tmp_path, "ddp", packing=True, max_length=tokens // 2, micro_batch=1, global_batch=2, **kw)
    assert tokens % 24 == 0 and packed.metrics.tokens.tolist() == single.metrics.tokens.tolist()
    assert packed.metrics.loss.tolist() == pytest.approx(single.metrics.loss.tolist(), rel=1e-5)
    assert any(f"attention is {attention}" in e["message"] for e in packed.events("note"))


def test_a_cell_s_model_that_doesn_t_keep_documents_apart_is_refused(rows, tmp_path):
    cell = """
from transformers import MambaConfig, MambaForCausalLM
model = MambaForCausalLM(MambaConfig(vocab_size=264, hidden_size=32, num_hidden_layers=2, state_size=4))
"""
    with pytest.raises(AssertionError, match="packed documents would see each other"):
        ranks.train(Recipe(model="tiny", dataset=rows, strategy="ddp", nproc=1, packing=True, max_length=64, micro_batch=1, max_steps=1, precision="fp32"), cell, home=tmp_path)


def test_a_model_of_its_own_code_is_drawn_at_random(tmp_path, monkeypatch):
    "Where it is trusted: its size is asked of the same code. Where not, that is said"
    from transformers import dynamic_module_utils
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "twice.py").write_text("from transformers import LlamaConfig, LlamaForCausalLM\nclass TwiceConfig(LlamaConfig): model_type = 'twice'\nclass TwiceForCausalLM(LlamaForCausalLM): config_class = TwiceConfig\n")
    own = dict(model_type="twice", architectures=["TwiceForCausalLM"], auto_map=dict(AutoConfig="twice.TwiceConfig", AutoModelForCausalLM="twice.TwiceForCausalLM"))
    folder = ranks.model_folder(tmp_path, ranks.LLAMA | own)
    said = []
    assert type(load_model(Recipe(model=folder, precision="fp32", trust_remote_code=True), on_note=said.append)).__name__ == "TwiceForCausalLM" and "parameters are drawn at random" in said[0]
    with pytest.raises(RecipeError, match="set trust_remote_code"): load_model(Recipe(model=folder, precision="fp32"))
