"What a recipe, a JSON or a file says is done, refused, or told not to be done: nothing is lost without a word."
import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardnb.plan.contradiction import _SCHEDULE_KEYS
from shardnb.plan.dialect import canonical
from shardnb.plan.fsdp import check_fsdp
from shardnb.plan.machine import Machine
from shardnb.plan.override import adopt, check_deepspeed, said_by
from shardnb.plan.problem import RecipeError
from shardnb.plan.recipe import Recipe
from shardnb.plan.strategy import settings

SMOL = dict(hidden_size=576, num_hidden_layers=30, vocab_size=49152, largest_layer=3540096, total=134515008, trainable=134515008, layer_classes=["LlamaDecoderLayer"])


def fields(d, strategy="zero3", **kw): return [p.field.removeprefix("deepspeed.") for p in check_deepspeed(d, Recipe(strategy=strategy, **kw), strategy)[1]]


def refused(make):
    "The problems of what `make` raises"
    with pytest.raises(RecipeError) as e: make()
    return e.value.problems


# Precision: one meaning under every engine, whatever else a file says

@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("precision,dtype", [("bf16", "bfloat16"), ("bf16", "float16"), ("fp16", "float16"), ("fp16", "bfloat16")])
def test_weights_that_train_have_fp32_masters(strategy, precision, dtype):
    r = Recipe(strategy=strategy, precision=precision, dtype=dtype).resolve(2, cuda=True, bf16_ok=True)
    assert r.dtype == "float32"
    assert sum(n.startswith(f"dtype {dtype} has no effect") for n in settings(strategy, r, SMOL, 2, True)["notes"]) == 1
    again = Recipe.from_yaml(r.to_yaml()).resolve(2, cuda=True, bf16_ok=True)
    assert again == r and not any("dtype" in n for n in again.notes)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_masters_in_a_real_run(strategy, tmp_path):
    "What ranks hold is what they hold without `dtype`, to the byte, and the losses are the same"
    import ranks
    rows, held = ranks.rows_file(tmp_path, ranks.counting(range(12))), {}
    for dtype in (None, "bfloat16"):
        (tmp_path / str(dtype)).mkdir()
        run = ranks.tiny(rows, tmp_path / str(dtype), strategy, precision="bf16", dtype=dtype, max_steps=3)
        states = run.memory.query("rank == 0 and moment == 'after_step' and step == 2 and category in ['params', 'optimizer']").groupby("category").bytes.sum().to_dict()
        held[dtype] = (run.events("effective")[0]["param_dtypes"], states, run.metrics.loss.tolist())
    assert held["bfloat16"] == held[None] and held[None][1]["optimizer"] > 0


def test_frozen_and_pure_weights_are_loaded_as_they_were_asked_for():
    assert Recipe(precision="bf16", dtype="bfloat16", tuning="lora").resolve(2).dtype == "bfloat16"
    assert Recipe(precision="bf16-pure", dtype="bfloat16").resolve(2).dtype == "bfloat16"
    assert Recipe(precision="bf16-pure").resolve(2).notes == []


def test_the_usual_words_for_bf16_load():
    r = Recipe.from_yaml("torch_dtype: bfloat16\nbf16: true\n").resolve(2)
    assert (r.precision, r.dtype) == ("bf16", "float32") and "has no effect" in r.notes[-1]
    assert Recipe.from_dict(dict(torch_dtype="bfloat16")).resolve(2, True, True).dtype == "float32"


def test_norms_in_fp32_at_fp16():
    for name in ("zero1", "zero2", "zero3"): assert "fp32_norms" in [p.field for p in refused(lambda name=name: Recipe(precision="fp16", fp32_norms=True, strategy=name))]
    for name in ("ddp", "fsdp"): Recipe(precision="fp16", fp32_norms=True, strategy=name).resolve(2, cuda=True)
    autocast = {"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": True, "dtype": "float16"}}
    assert [p.field for p in refused(lambda: Recipe(deepspeed=autocast).resolve(2, cuda=True))] == ["deepspeed (fp32_norms)"]


def test_pure_bf16_in_a_json_is_not_bf16():
    pure = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    assert fields(pure, precision="bf16") == ["bf16.enabled"] and fields(pure, precision="bf16-pure") == []
    assert fields({"bf16": {"enabled": True}}, precision="bf16-pure") == []
    assert fields({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, precision="fp16") == ["fp16.fp16_master_weights_and_grads"]


@pytest.mark.parametrize("d,want", [({"bf16": {"enabled": False}}, "fp32"), ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, "fp32"), ({"fp16": {"enabled": False}}, None),
    ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, None), ({"bfloat16": {"enabled": True}}, "bf16"), ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "fp16"), ({}, None)])
def test_a_precision_that_a_json_switches_off(d, want): assert said_by(d).get("precision", (None,))[0] == want


def test_a_json_and_the_recipe_on_precision():
    off = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": False}, "fp16": {"enabled": False}}
    assert Recipe(deepspeed=off).resolve(2, True, True).precision == "fp32"
    assert fields(off, precision="bf16") == ["bf16.enabled"] and fields({"fp16": {"enabled": False}}, precision="fp16") == ["fp16.enabled"]
    r = Recipe(strategy="zero2", precision="bf16", fp32_norms=True).resolve(2)   # and what shardnb itself writes comes back as it was
    back = Recipe(deepspeed=settings("zero2", r, SMOL, 2)["deepspeed"]).resolve(2)
    assert (back.precision, back.fp32_norms, back.strategy) == ("bf16", True, "zero2")


def test_loss_scaling_is_kept_where_the_precision_is_left_open():
    d = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto", "loss_scale_window": 500}}
    assert settings("zero2", Recipe(deepspeed=d, precision="fp16").resolve(2, cuda=True), SMOL, 2, True)["deepspeed"]["fp16"]["loss_scale_window"] == 500
    assert "loss_scale_window" not in settings("zero2", Recipe(deepspeed=d, precision="bf16").resolve(2), SMOL, 2)["deepspeed"]["fp16"]


@pytest.mark.parametrize("text,precision,said", [("bf16: false\nfp16: false\n", "fp32", 0), ("bf16: false\n", "fp32", 0), ("fp16: false\n", None, 1), ("fp16: true\nbf16: false\n", "fp16", 0), ("tf32: true\n", None, 1),
    ("tf32: false\n", None, 0), ("mixed_precision: no\n", "fp32", 0), ("mixed_precision: bf16\nfp16: false\n", "bf16", 0)])
def test_flat_words_for_precision(text, precision, said):
    r = Recipe.from_yaml(text)
    assert (r.precision, len(r.notes)) == (precision, said)


def test_flat_words_that_contradict_the_precision():
    assert [p.field for p in refused(lambda: Recipe.from_dict(dict(precision="bf16", bf16=False)))] == ["bf16"]
    assert [p.field for p in refused(lambda: Recipe.from_dict(dict(precision="fp32", bf16=True)))] == ["bf16"]


# Other people's words

@pytest.mark.parametrize("d,save,evals,said", [(dict(save_strategy="epoch", save_steps=50), None, None, "save_strategy epoch is not carried over"), (dict(save_strategy=False, save_steps=50), None, None, None),
    (dict(save_strategy="steps"), 500, None, None), (dict(save_strategy="steps", save_steps=7), 7, None, None), (dict(eval_strategy="epoch"), None, None, "eval_strategy epoch has no effect without eval_share"),
    (dict(eval_strategy="steps", eval_steps=5, val_size=.1), None, 5, None), (dict(evaluation_strategy="steps", logging_steps=3, val_size=.1), None, 3, None), (dict(eval_strategy="epoch", eval_steps=5, val_size=.1), None, None, None),
    (dict(eval_strategy=False, val_size=.1), None, None, "eval_strategy no is not carried over"), (dict(logging_strategy="epoch"), None, None, "logging_strategy epoch is not carried over")])
def test_words_for_how_often(d, save, evals, said):
    r = Recipe.from_dict(d)
    assert (r.save_steps, r.eval_steps) == (save, evals)
    assert [said in n for n in r.notes] == [True] if said else r.notes == []


@pytest.mark.parametrize("d,field,words", [(dict(save_strategy="stpes"), "save_strategy", "did you mean 'steps'"), (dict(stage="dpo"), "stage", "allowed: sft, pt"), (dict(tuning="full", load_in_4bit=True), "load_in_4bit", "don't train in full"),
    (dict(adapter="qlora", load_in_4bit=False), "load_in_4bit", "contradicts"), (dict(train_type="full", use_peft=True), "use_peft", "adapters don't train"), (dict(fsdp=[1]), "fsdp", "is not a strategy")])
def test_what_is_not_dropped_in_silence(d, field, words):
    (p,) = refused(lambda: Recipe.from_dict(d))
    assert p.field == field and words in str(p)


def test_four_bits_and_adapters():
    assert Recipe.from_dict(dict(tuner_type="lora", load_in_4bit=True)).tuning == Recipe.from_dict(dict(load_in_4bit=True)).tuning == "qlora"
    assert Recipe.from_dict(dict(tuner_type="lora", load_in_4bit=False)).tuning == "lora"
    for stage in ("sft", "pt"): assert canonical(dict(stage=stage))[0] == {}


def test_accelerate_beside_its_json(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4}))
    def read(**kw): return Recipe.from_dict(dict(distributed_type="DEEPSPEED", num_processes=2, deepspeed_config=dict(deepspeed_config_file=str(tmp_path / "ds.json"), **kw)))
    r = read(zero_stage=2, offload_optimizer_device="none")
    assert (r.strategy, r.grad_accum) == ("zero3", 4) and sum("deepspeed_config_file says it" in n for n in r.notes) == 2
    assert [p.field for p in refused(lambda: read(gradient_accumulation_steps=8))] == ["deepspeed_config.gradient_accumulation_steps"]
    def plain(**kw): return Recipe.from_dict(dict(distributed_type="DEEPSPEED", num_processes=2, deepspeed_config=kw))
    for kw, field in ((dict(zero_stage=12), "zero_stage"), (dict(zero_stage=2, offload_optimizer_device="gpu"), "offload_optimizer_device")):
        assert [p.field for p in refused(lambda kw=kw: plain(**kw))] == [f"deepspeed_config.{field}"]
    assert [p.field for p in refused(lambda: Recipe.from_dict(dict(distributed_type="FSDP", num_processes=2, fsdp_config="FULL_SHARD")))] == ["fsdp_config"]


# DeepSpeed's and FSDP's own settings

@pytest.mark.parametrize("block,params,field", [("optimizer", dict(learning_rate=1e-4), "learning_rate"), ("optimizer", dict(momentum=.9), "momentum"), ("optimizer", dict(amsgrad=True), "amsgrad"),
    ("scheduler", dict(warmup_min_lr=1e-6), "warmup_min_lr"), ("scheduler", dict(warmup_num_step=5), "warmup_num_step")])
def test_parameters_that_nothing_reads(block, params, field):
    kind = dict(optimizer="AdamW", scheduler="WarmupCosineLR")[block]
    assert fields({block: {"type": kind, "params": params}}) == [f"{block}.params.{field}"]


def test_parameters_that_say_what_happens_anyway():
    d = {"optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto", "torch_adam": True, "adam_w_mode": True, "amsgrad": False}},
         "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 10, "total_num_steps": 100, "warmup_type": "linear"}}}
    _, problems, notes = check_deepspeed(d, Recipe(), "zero3")
    assert problems == [] and sum("the schedule ends with the run" in n for n in notes) == 1 and not any("straight line" in n for n in notes)
    d["scheduler"]["params"].pop("warmup_type")
    assert sum("straight line" in n for n in check_deepspeed(d, Recipe(), "zero3")[2]) == 1


def test_a_floor_under_the_cosine_is_taken_over():
    d = {"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "cos_min_ratio": .1}}}
    r = Recipe(deepspeed=d).resolve(2)
    assert (r.lr_scheduler_type, r.lr_scheduler_kwargs, r.warmup_steps) == ("cosine_with_min_lr", {"min_lr_rate": .1}, 10)
    assert refused(lambda: Recipe(deepspeed=d, lr_scheduler_type="linear").resolve(2))


def test_a_disk_is_asked_for_beside_any_json(tmp_path):
    def go(d, **kw): return Recipe(strategy="zero3+optim-nvme", deepspeed=d, **kw).resolve(2)
    for d in ({"zero_optimization": {"stage": 3}}, {"steps_per_print": 7}): assert [p.field for p in refused(lambda d=d: go(d))] == ["nvme_path"]
    def block(path): return {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": path}}}
    assert [p.field for p in refused(lambda: go(block(str(tmp_path / "none"))))] == ["deepspeed.zero_optimization.offload_optimizer.nvme_path"]
    r = go(block(str(tmp_path)))
    assert settings(r.strategy, r, SMOL, 2)["deepspeed"]["zero_optimization"]["offload_optimizer"]["nvme_path"] == str(tmp_path)
    go({"steps_per_print": 7}, nvme_path=str(tmp_path))


def test_fsdp_settings_without_effect_stay_ours():
    d = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10**8}
    assert check_fsdp({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "min_num_params": 0}, Recipe(), "fsdp") == ({}, [], [])
    clean, problems, notes = check_fsdp(d, Recipe(), "fsdp")
    assert (clean, problems) == ({}, []) and [n.split()[0] for n in notes] == ["fsdp_config.auto_wrap_policy", "fsdp_config.min_num_params"]
    f = settings("fsdp", Recipe(strategy="fsdp", fsdp_config=d).resolve(2), SMOL, 2)["fsdp"]
    assert f["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP" and "min_num_params" not in f
    assert check_fsdp({"cpu_ram_efficient_loading": True}, Recipe(tuning="qlora"), "fsdp")[2][0].startswith("fsdp_config.cpu_ram_efficient_loading has no effect")


def test_classes_in_the_settings_are_the_recipe_s():
    assert Recipe(strategy="fsdp", fsdp_config={"transformer_layer_cls_to_wrap": "A,B"}).resolve(2).fsdp_wrap == ["A", "B"]
    assert [p.field for p in refused(lambda: Recipe(strategy="fsdp", fsdp_wrap=["C"], fsdp_config={"transformer_layer_cls_to_wrap": "A"}).resolve(2))] == ["fsdp_config.transformer_layer_cls_to_wrap"]
    assert [p.field for p in adopt(Recipe(strategy="fsdp", fsdp_config={"activation_checkpointing": "perhaps"}))[1]] == ["fsdp_config.activation_checkpointing"]


def test_what_a_json_says_stays_when_it_is_left_away():
    "As a plan does, to compare with strategies that DeepSpeed doesn't run"
    r = adopt(Recipe(deepspeed={"train_batch_size": 32, "zero_optimization": {"stage": 3}}))[0]
    assert r.replace(strategy="ddp", deepspeed=None).resolve(2).global_batch == 32


def test_reduce_dtype_of_ddp():
    def told(cuda, **kw): return settings("ddp", Recipe(**kw).resolve(2, cuda, cuda), SMOL, 2, cuda)
    assert told(True, precision="bf16", reduce_dtype="bfloat16")["ddp"]["comm_hook"] == "bf16"
    cpu = told(False, precision="bf16", reduce_dtype="bfloat16")   # its hook raises a TypeError there
    assert cpu["ddp"]["comm_hook"] is None and "needs NCCL" in cpu["notes"][-1]
    assert any("reduce_dtype float32 has no effect" in n for n in told(False, precision="bf16-pure", reduce_dtype="float32")["notes"])


def test_what_a_device_lacks():
    assert [p.field for p in refused(lambda: Recipe(attn_implementation="flex").resolve(2))] == ["attn_implementation"]
    assert Recipe(attn_implementation="flex").resolve(2, cuda=True).attn_implementation == "flex_attention"
    assert "emulated" in Recipe(precision="bf16").resolve(2, cuda=True, bf16_ok=False).notes[0]
    assert Recipe(precision="bf16").resolve(2, cuda=True, bf16_ok=True).notes == []


# Schedules

def arguments(package, file, name):
    "Of a function or a class's `__init__`, read in the source: importing it takes seconds"
    top = Path(find_spec(package).submodule_search_locations[0])
    f = next(n for n in ast.walk(ast.parse((top / file).read_text())) if getattr(n, "name", None) == name)
    if isinstance(f, ast.ClassDef): f = next(n for n in f.body if getattr(n, "name", None) == "__init__")
    return {a.arg for a in f.args.args} - {"self", "optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}


def test_schedules_take_what_transformers_takes():
    kinds = ast.parse((Path(find_spec("transformers").submodule_search_locations[0]) / "optimization.py").read_text())
    table = next(n.value for n in kinds.body if isinstance(n, ast.Assign) and n.targets[0].id == "TYPE_TO_SCHEDULER_FUNCTION")
    found = {k.attr.lower().replace("reduce_on", "reduce_lr_on"): v.id for k, v in zip(table.keys, table.values)}
    assert set(found) == set(_SCHEDULE_KEYS)
    for kind, function in found.items():
        where = {"greedy": ("transformers", "optimization.py", "GreedyLR"), "reduce_lr_on_plateau": ("torch", "optim/lr_scheduler.py", "ReduceLROnPlateau")}.get(kind, ("transformers", "optimization.py", function))
        assert set(_SCHEDULE_KEYS[kind]) == arguments(*where), kind


@pytest.mark.parametrize("kind,kw,near", [("cosine", dict(min_lr=1e-6), "lr_scheduler_type=cosine_with_min_lr"), ("cosine", dict(num_cycle=2), "num_cycles"), ("linear", dict(lr_end=1e-7), "lr_scheduler_type=polynomial"),
    ("constant", dict(timescale=3), "lr_scheduler_type=inverse_sqrt")])
def test_a_key_that_the_schedule_lacks(kind, kw, near):
    (p,) = refused(lambda: Recipe(lr_scheduler_type=kind, lr_scheduler_kwargs=kw))
    assert p.field == f"lr_scheduler_kwargs.{next(iter(kw))}" and p.nearest == near


def test_no_steps_of_warmup_beside_a_ratio():
    r = Recipe.from_dict(dict(warmup_ratio=.03, warmup_steps=0)).resolve(2)
    assert (r.warmup_ratio, r.warmup_steps) == (.03, None)
    assert Recipe(warmup_steps=0).resolve(2).warmup_steps == 0
    d = {"zero_optimization": {"stage": 3}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}
    assert Recipe(deepspeed=d, warmup_ratio=0).resolve(2).warmup_steps == 100


# The way out and back in

def test_what_was_given_stays_given():
    for r in (Recipe(strategy="ddp", deepspeed={"zero_optimization": {"stage": 3}}), Recipe(strategy="zero3", deepspeed={"gradient_clipping": .5, "zero_optimization": {"stage": 3}}, weight_decay=0.)):
        back = Recipe.from_yaml(r.to_yaml())
        assert back.model_fields_set == r.model_fields_set and back.resolve(2) == r.resolve(2)
        assert Recipe.from_yaml(r.resolve(2).to_yaml()).resolve(2) == r.resolve(2)
    assert "--strategy ddp" in Recipe(strategy="ddp", deepspeed={"zero_optimization": {"stage": 3}}).magic_line()
    assert Recipe(strategy="ddp").options() == {} and Recipe(precision=None, deepspeed={"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}).resolve(2).precision == "bf16"


def test_values_that_are_read_whole():
    assert Recipe(report_to=["none"]).report_to == Recipe(report_to="none").report_to == []
    assert Recipe(env="NCCL_IB_HCA=mlx5_0,mlx5_1,NCCL_DEBUG=INFO").env == {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "NCCL_DEBUG": "INFO"}
    assert Recipe(env="A=1, B = 2,").env == {"A": "1", "B": "2"}
    for bad in (dict(deepspeed=3), dict(fsdp_config=3), dict(learning_rate=float("inf")), dict(deepspeed={1: 2})): assert len(refused(lambda bad=bad: Recipe(**bad))) == 1


@pytest.mark.parametrize("text,words", [('{"zero_optimization": {"stage": 3, "stage": 2}}', "'stage' is given twice"), ('{"zero_optimization": {"stage": 3, "reduce_bucket_size": 1e999}}', "not a number of elements"),
    ('{"zero_optimization": {"stage": 3}, "gradient_clipping": NaN}', "NaN is no number"), ('{"zero_optimization": {"stage": 3}, "train_batch_size": 1e999}', "finite")])
def test_json_that_python_would_take(text, words, tmp_path):
    (tmp_path / "ds.json").write_text(text)
    (p,) = refused(lambda: Recipe(deepspeed=str(tmp_path / "ds.json")).resolve(2))
    assert words in str(p)


def test_values_that_would_be_masked_are_refused(monkeypatch):
    monkeypatch.setenv("S3_KEY", "data/rows.jsonl")
    for kw, field in ((dict(dataset="data/rows.jsonl"), "dataset"), (dict(env={"DATA": "data/rows.jsonl"}), "env.DATA"), (dict(lora_target_modules=["data/rows.jsonl"]), "lora_target_modules")):
        (p,) = refused(lambda kw=kw: Recipe(**kw))
        assert p.field == field and "S3_KEY" in p.message and p.value == "***" and "rows" not in str(p)
    monkeypatch.delenv("S3_KEY")
    assert Recipe(dataset="data/rows.jsonl").dataset == "data/rows.jsonl"


def test_machines_by_name():
    m = Machine.preset("8xA100-80GB")
    assert m.assumed == ("host_bytes", "cores", "disk_bytes") and "1536 GiB of host memory, 96 cores and 1000 GiB of disk are assumed" in m.assumption
    less = Machine.preset("8xA100-80GB@512GB")
    assert (less.host_bytes, less.name) == (512 * 2**30, "8xA100-80GB@512GB") and "host memory," not in less.assumption
    assert Machine.from_json(json.loads(json.dumps(less.to_json()))) == less and Machine.preset(less.name) == less and Machine.detect().assumption is None
    assert refused(lambda: Machine.preset("100xA100-80GB"))[0].nearest == "64xA100-80GB"


def test_a_kept_module_has_to_be_there():
    from shardnb.run.planner import _class_problems
    facts = dict(layer_classes=["LlamaDecoderLayer"], params=[[n, 1, True, u, [1]] for n, u in (("model.embed_tokens.weight", "embed"), ("model.layers.0.mlp.up_proj.weight", "layers.0"), ("lm_head.weight", "tail"))])
    def near(keep, strategy="fsdp"): return [p.nearest for p in _class_problems(Recipe(strategy=strategy, fsdp_keep=keep), facts)]
    assert near(["embed_tokens", "model.embed_tokens", "lm_head", "layers.0", "LlamaDecoderLayer"]) == [] and near(["embed_token"]) == ["embed_tokens"] and near(["embed_token"], "zero3") == []
