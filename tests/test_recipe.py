"Recipes in every dialect, DeepSpeed JSONs from articles and presets, and each trap that is known of them."
import copy
import json

import pytest

from shardnb.plan import override
from shardnb.plan.fsdp import check_fsdp
from shardnb.plan.override import check_deepspeed, said_by, strategy_of, validate_deepspeed
from shardnb.plan.problem import RecipeError
from shardnb.plan.recipe import Recipe, options_of, recipe_table
from shardnb.plan.strategy import Strategy, settings, variants

SMOL = dict(hidden_size=576, num_hidden_layers=30, vocab_size=49152, largest_layer=3540096, total=134515008, trainable=134515008,
            layer_classes=["LlamaDecoderLayer"])


# Round trips

ARTICLE_YAML = """\
training:
  model: Qwen/Qwen2.5-7B-Instruct
  strategy: deepspeed_zero3
  batch_size_per_gpu: 2
  gradient_accumulation: 8
  lora:
    rank: 8
    alpha: 32
  precision: bf16
"""
FLAT_YAML = """\
model_name_or_path: HuggingFaceTB/SmolLM2-135M-Instruct
dataset_name: data/train.jsonl
torch_dtype: bfloat16
bf16: true
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing: true
learning_rate: 2e-5
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 1e-6}
warmup_ratio: 0.03
num_train_epochs: 3
max_seq_length: 2048
save_total_limit: 2
fsdp: full_shard auto_wrap
use_peft: true
lora_r: 8
lora_target_modules: [q_proj, v_proj]
report_to: none
do_train: true
"""
CANONICAL_YAML = """\
model: tiny
dataset: demo
precision: bf16
strategy: zero3+optim-cpu
nproc: 2
max_steps: 20
env: {NCCL_DEBUG: WARN}
"""


def test_article_yaml_as_it_stands():
    r = Recipe.from_yaml(ARTICLE_YAML)
    assert r.options() == dict(model="Qwen/Qwen2.5-7B-Instruct", precision="bf16", tuning="lora", lora_r=8, micro_batch=2, grad_accum=8, strategy="zero3")
    assert r.lora_alpha == 32


def test_flat_transformers_yaml():
    r = Recipe.from_yaml(FLAT_YAML)
    assert r.options() == dict(model="HuggingFaceTB/SmolLM2-135M-Instruct", dtype="bfloat16", precision="bf16", tuning="lora", lora_r=8,
                               lora_target_modules=["q_proj", "v_proj"], dataset="data/train.jsonl", max_length=2048, micro_batch=4, grad_accum=2,
                               learning_rate=2e-5, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-6}, warmup_ratio=0.03,
                               num_train_epochs=3.0, strategy="fsdp", activation_checkpointing=True)


@pytest.mark.parametrize("text", [ARTICLE_YAML, FLAT_YAML, CANONICAL_YAML])
def test_round_trip(text, tmp_path):
    r = Recipe.from_yaml(text)
    r.to_yaml(tmp_path / "r.yaml")
    assert Recipe.from_yaml(tmp_path / "r.yaml") == r
    assert Recipe.from_yaml(r.to_yaml()).to_yaml() == r.to_yaml()
    words = r.magic_line().split(" ", 1)[1]
    assert "--strategy" in words


def test_round_trip_through_option_text():
    "Every field survives being written as the text of an option"
    import shlex
    r = Recipe.from_yaml(FLAT_YAML).replace(env={"A": "1"}, gpus=[0, 2], out=["model"], assistant_only_loss=False, save_total_limit=None)
    words, got = shlex.split(r.magic_line())[1:], {}
    while words:
        flag = words.pop(0)[2:].replace("-", "_")
        if flag.startswith("no_"): got[flag[3:]] = "false"
        else: got[flag] = words.pop(0) if words and not words[0].startswith("--") else "true"
    assert Recipe(**got) == r


def test_resolved_recipe_is_written_and_read_back():
    r = Recipe.from_yaml(CANONICAL_YAML).resolve(2)
    again = Recipe.from_yaml(r.to_yaml())
    assert again == r and again.resolve(2) == r


def test_options_come_from_the_fields():
    assert [o.name for o in options_of()] == list(Recipe.model_fields) == [row[0] for row in recipe_table()]
    assert next(o for o in options_of() if o.name == "micro_batch").flags == ("--micro-batch", "--micro_batch")
    assert "zero3" in next(o for o in options_of() if o.name == "strategy").meaning


# Precision: fp32 means fp32, and the same word means the same under every engine

@pytest.mark.parametrize("name", [v for v in variants() if "nvme" not in v])
def test_fp32_is_fp32(name):
    r = Recipe(strategy=name, precision="fp32").resolve(2)
    s = settings(name, r, SMOL, 2)
    assert r.dtype == "float32"
    if s["engine"] == "deepspeed":
        d = s["deepspeed"]
        assert d["bf16"] == d["fp16"] == {"enabled": False} and "torch_autocast" not in d and d["communication_data_type"] == "fp32"
    if s["engine"] == "fsdp": assert s["fsdp"]["param_dtype"] is None and s["fsdp"]["reduce_dtype"] is None


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "zero3+optim-cpu", "fsdp", "fsdp-grad-op"])
def test_bf16_keeps_fp32_masters(name):
    r = Recipe(strategy=name, precision="bf16").resolve(2)
    s = settings(name, r, SMOL, 2)
    assert r.dtype == "float32"
    if s["engine"] == "deepspeed": assert s["deepspeed"]["bf16"] == {"enabled": True}
    if s["engine"] == "fsdp": assert s["fsdp"]["param_dtype"] == "bfloat16" and s["fsdp"]["output_dtype"] is None and s["fsdp"]["sync_each_batch"]


def test_default_precision_follows_the_device():
    r = Recipe()
    assert r.resolve(2).precision == "fp32"
    assert r.resolve(2, cuda=True, bf16_ok=False).precision == "fp32"
    assert r.resolve(2, cuda=True, bf16_ok=True).precision == "bf16"
    with pytest.raises(RecipeError, match="fp16 needs a GPU"): Recipe(precision="fp16").resolve(2)
    assert Recipe(precision="fp16").resolve(2, cuda=True).precision == "fp16"


# Settings: complete, numeric, accepted by DeepSpeed

def all_values(d):
    for v in d.values(): yield from all_values(v) if isinstance(v, dict) else [v]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-pure"])
def test_every_setting_is_a_number_that_deepspeed_accepts(precision, tmp_path):
    done = 0
    for name in variants():
        if Strategy.parse(name).engine != "deepspeed": continue
        if precision == "bf16-pure" and "optim" in Strategy.parse(name).offload:
            with pytest.raises(RecipeError, match="CPU Adam whose moments are bf16"): Recipe(strategy=name, precision=precision, nvme_path="/tmp")
            continue
        r = Recipe(strategy=name, precision=precision, nvme_path=str(tmp_path)).resolve(4, cuda=True, bf16_ok=True)
        d = settings(name, r, SMOL, 4, cuda=True)["deepspeed"]
        assert "auto" not in list(all_values(d)) and None not in list(all_values(d))
        assert not {"optimizer", "scheduler"} & set(d) and d["zero_optimization"]["overlap_comm"] is False
        assert validate_deepspeed(d, 4) == []
        done += 1
    assert done == (5 if precision == "bf16-pure" else 13)


def test_auto_rules_as_transformers_resolves_them():
    "h = 576: reduce h², prefetch int(.9 h²), persistence 10 h; limits scaled to the model"
    s = settings("zero3", Recipe(strategy="zero3").resolve(2), SMOL, 2)
    z = s["deepspeed"]["zero_optimization"]
    assert (z["reduce_bucket_size"], z["stage3_prefetch_bucket_size"], z["stage3_param_persistence_threshold"]) == (331776, 298598, 5760)
    assert z["stage3_max_live_parameters"] == 2 * 3540096 + 49152 * 576 and z["stage3_max_reuse_distance"] == 3540096
    assert any("scaled to the model" in n for n in s["notes"])
    big = dict(SMOL, hidden_size=8192, vocab_size=152064, largest_layer=900_000_000, total=72_000_000_000, trainable=72_000_000_000)
    z = settings("zero3", Recipe(strategy="zero3").resolve(8), big, 8)["deepspeed"]["zero_optimization"]
    assert z["stage3_max_live_parameters"] == 10**9 and z["reduce_bucket_size"] == 8192**2


def test_lora_needs_no_bucket_larger_than_its_adapters():
    s = settings("zero3", Recipe(strategy="zero3", tuning="lora").resolve(2), dict(SMOL, trainable=100_000), 2)
    assert s["deepspeed"]["zero_optimization"]["reduce_bucket_size"] == 100_000


def test_moe_blocks_are_leaves():
    s = settings("zero3", Recipe(strategy="zero3").resolve(2), dict(SMOL, moe_classes=["Qwen3MoeSparseMoeBlock"]), 2)
    assert s["deepspeed"]["zero_optimization"]["leaf_module"] == {"classes": ["Qwen3MoeSparseMoeBlock"]}


def test_options_without_effect_are_named():
    r = Recipe(strategy="zero2", fsdp_wrap=["Block"], deepspeed=None).resolve(2)
    assert any(n.startswith("fsdp_wrap has no effect under zero2") for n in settings("zero2", r, SMOL, 2)["notes"])
    r = Recipe(strategy="fsdp", deepspeed={"zero_optimization": {"stage": 3}}).resolve(2)
    assert any(n.startswith("deepspeed has no effect under fsdp") for n in settings("fsdp", r, SMOL, 2)["notes"])


# The names that the rules know are DeepSpeed's; a new release that has others shows up here

def test_key_lists_are_deepspeeds():
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
    def names(c): return {f.alias or k for k, f in c.model_fields.items()}
    assert names(DeepSpeedZeroConfig) == override._ANY | override._ONLY3 | override._ONLY12 | set(override._OLD)
    assert names(DeepSpeedBF16Config) == override._BF16 and names(DeepSpeedFP16Config) == override._FP16
    assert names(DeepSpeedZeroOffloadOptimizerConfig) == override._OPT_KEYS and names(DeepSpeedZeroOffloadParamConfig) == override._PARAM_KEYS


# Article A's DeepSpeed JSON

ARTICLE_A = {"train_batch_size": 8, "gradient_accumulation_steps": 4, "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.01}},
             "fp16": {"enabled": True},
             "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "allgather_partitions": True, "allgather_bucket_size": 5e8,
                                   "reduce_scatter": True, "reduce_bucket_size": 5e8},
             "activation_checkpointing": {"enabled": True}}


def test_article_a_two_gpus():
    "Right for two GPUs: accepted, with a note for each entry that does nothing"
    r = Recipe(model="tiny", dataset="demo", deepspeed=ARTICLE_A).resolve(2, cuda=True, bf16_ok=True)
    assert (r.strategy, r.precision, r.micro_batch, r.grad_accum, r.global_batch, r.learning_rate, r.weight_decay) == ("zero3+optim-cpu", "fp16", 1, 4, 8,
            2e-5, 0.01)
    s = settings(r.strategy, r, SMOL, 2, cuda=True)
    z = s["deepspeed"]["zero_optimization"]
    assert z["reduce_bucket_size"] == 500_000_000 and isinstance(z["reduce_bucket_size"], int)
    assert not {"allgather_partitions", "allgather_bucket_size"} & set(z) and "activation_checkpointing" not in s["deepspeed"]
    told = [n for n in s["notes"] if n.startswith("deepspeed.")]
    for word in ("allgather_partitions has no effect", "allgather_bucket_size has no effect", "activation_checkpointing has no effect", "holds 954 MiB",
                 "optimizer is read as optim"):
        assert sum(word in n for n in told) == 1, word
    assert len(told) == 5
    assert validate_deepspeed(s["deepspeed"], 2) == []


@pytest.mark.parametrize("world,near", [(4, "16"), (8, "32")])
def test_article_a_more_gpus(world, near):
    "Its 8 rows and 4 accumulation steps leave half a row for each of 4 GPUs"
    with pytest.raises(RecipeError) as e: Recipe(model="tiny", dataset="demo", deepspeed=ARTICLE_A).resolve(world, cuda=True)
    (p,) = e.value.problems
    assert p.field == "global_batch" and f"8 ≠ ? × 4 × {world}" in p.message and p.nearest == near


def test_article_a_on_a_cpu():
    with pytest.raises(RecipeError, match="fp16 needs a GPU"): Recipe(model="tiny", dataset="demo", deepspeed=ARTICLE_A).resolve(2)


# Article B's DeepSpeed JSON

ARTICLE_B = {"fp16": {"enabled": False}, "bf16": {"enabled": True},
             "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}},
             "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 100}},
             "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}, "overlap_comm": True,
                                   "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                                   "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9},
             "gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "steps_per_print": 100, "train_micro_batch_size_per_gpu": 1,
             "wall_clock_breakdown": False}


def test_article_b_alone():
    "Nothing contradicts it: its numbers move into the recipe, its 'auto' into ours"
    r = Recipe(model="tiny", dataset="demo", deepspeed=ARTICLE_B).resolve(8, cuda=True, bf16_ok=True)
    assert (r.strategy, r.precision, r.micro_batch, r.grad_accum, r.adam_beta2, r.warmup_steps, r.lr_scheduler_type) == ("zero3", "bf16", 1, 4, 0.95, 100,
            "constant_with_warmup")
    s = settings(r.strategy, r, dict(SMOL, hidden_size=8192), 8, cuda=True)
    z = s["deepspeed"]["zero_optimization"]
    assert (z["reduce_bucket_size"], z["stage3_prefetch_bucket_size"], z["stage3_param_persistence_threshold"]) == (67108864, 60397977, 81920)
    assert z["stage3_max_live_parameters"] == 10**9 and z["overlap_comm"] is True and z["stage3_gather_16bit_weights_on_model_save"] is True
    assert any("7188" in n for n in s["notes"]) and validate_deepspeed(s["deepspeed"], 8) == []


def test_article_b_with_its_command_line():
    "One message for each of its contradictions"
    r = Recipe(model="tiny", dataset="demo", deepspeed=ARTICLE_B, micro_batch=4, grad_accum=1, weight_decay=0.1, warmup_ratio=0.03,
               lr_scheduler_type="cosine", learning_rate=2e-5)
    with pytest.raises(RecipeError) as e: r.resolve(8, cuda=True, bf16_ok=True)
    assert sorted(p.field for p in e.value.problems) == sorted("deepspeed." + k for k in (
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer.params.weight_decay", "scheduler.params.warmup_num_steps",
        "scheduler.type"))


def test_article_b_remedy_for_nan():
    "bf16.loss_scale does not exist, and the answer says where NaN comes from; with a comment in it, it isn't JSON either"
    d = copy.deepcopy(ARTICLE_B)
    d["bf16"]["loss_scale"] = 16384
    _, (p,), _ = check_deepspeed(d, Recipe(), "zero3")
    assert p.field == "deepspeed.bf16.loss_scale" and p.nearest == "fp16.loss_scale" and "overlap_comm" in p.message and "-100" in p.message
    with pytest.raises(RecipeError, match="line 2, column .*JSON has no // comments"):
        Recipe(deepspeed='{"bf16": {"enabled": true,\n "loss_scale": 16384 // raise it\n}}').resolve(2)


# ms-swift's six presets (its config folder, facts of August 2026)

def preset(stage, optim=None, param=None):
    z = {"stage": stage, "contiguous_gradients": True, "overlap_comm": False, "reduce_scatter": True, "reduce_bucket_size": "auto" if stage == 3 else 2e8}
    if stage < 3: z |= {"allgather_partitions": True, "allgather_bucket_size": 2e8}
    else: z |= {"sub_group_size": 1e9, "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True, "zero_quantized_weights": False,
                "zero_quantized_gradients": False}
    if stage: z["offload_optimizer"] = {"device": optim or "none", "pin_memory": True}
    if stage == 3: z["offload_param"] = {"device": param or "none", "pin_memory": True}
    return {"fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
            "bf16": {"enabled": "auto"}, "zero_optimization": z, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False}


PRESETS = {"zero0": (preset(0), "ddp"), "zero1": (preset(1), "zero1"), "zero2": (preset(2), "zero2"), "zero2_offload": (preset(2, "cpu"), "zero2+optim-cpu"),
           "zero3": (preset(3), "zero3"), "zero3_offload": (preset(3, "cpu", "cpu"), "zero3+optim-cpu+param-cpu")}


@pytest.mark.parametrize("name", PRESETS)
def test_ms_swift_presets_load(name, tmp_path):
    d, want = PRESETS[name]
    (tmp_path / f"{name}.json").write_text(json.dumps(d))
    r = Recipe(model="tiny", dataset="demo", precision="bf16", deepspeed=str(tmp_path / f"{name}.json")).resolve(2, cuda=True, bf16_ok=True)
    assert r.strategy == want == Strategy.parse(name).name
    s = settings(r.strategy, r, SMOL, 2, cuda=True)
    if want == "ddp":
        assert s["engine"] == "ddp" and any("no effect under ddp" in n for n in s["notes"])
        return
    assert "auto" not in json.dumps(s["deepspeed"]) and validate_deepspeed(s["deepspeed"], 2) == []
    assert s["deepspeed"]["bf16"]["enabled"] and not s["deepspeed"]["fp16"]["enabled"] and s["deepspeed"]["steps_per_print"] == 2000
    assert ("stage3_max_live_parameters" in s["deepspeed"]["zero_optimization"]) == (r.strategy[4] == "3")


@pytest.mark.parametrize("name", PRESETS)
def test_ms_swift_presets_become_recipes(name, tmp_path):
    "As a file, to the right strategy; complete settings come of it, which DeepSpeed accepts"
    d, strategy = PRESETS[name]
    (tmp_path / f"{name}.json").write_text(json.dumps(d))
    r = Recipe.from_yaml(tmp_path / f"{name}.json")
    assert r.strategy == strategy and any("auto" in n for n in r.notes)
    assert (name == "zero0") == any("stage 0" in n for n in r.notes)
    done = Recipe.from_yaml(r.replace(model="tiny", dataset="demo").to_yaml()).resolve(8, True, True)
    facts = dict(hidden_size=4096, num_hidden_layers=32, vocab_size=128256, largest_layer=218112000, total=8030261248, trainable=8030261248, layer_classes=["LlamaDecoderLayer"])
    full = settings(done.strategy, done, facts, 8, True)
    assert (done.strategy, done.precision) == (strategy, "bf16")
    if name == "zero0": return
    z = full["deepspeed"]["zero_optimization"]
    assert z["stage"] == d["zero_optimization"]["stage"] and not z["overlap_comm"] and "auto" not in json.dumps(full["deepspeed"])
    assert z["stage3_max_live_parameters"] == 10**9 if z["stage"] == 3 else z["reduce_bucket_size"] == z["allgather_bucket_size"] == 2 * 10**8
    assert validate_deepspeed(full["deepspeed"], 8) == []


def test_ms_swift_fsdp2_preset():
    p = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"activation_checkpointing": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": True,
         "fsdp_version": 2, "reshard_after_forward": True, "state_dict_type": "SHARDED_STATE_DICT"}}
    r = Recipe(model="tiny", dataset="demo", strategy="fsdp", fsdp_config=p).resolve(2)
    assert r.activation_checkpointing is True
    f = settings("fsdp", r, SMOL, 2)["fsdp"]
    assert f["cpu_ram_efficient_loading"] and f["state_dict_type"] == "SHARDED_STATE_DICT" and f["activation_checkpointing"] is False


def test_accelerate_s_files_become_recipes(tmp_path):
    import yaml
    common = dict(compute_environment="LOCAL_MACHINE", debug=False, downcast_bf16="no", enable_cpu_affinity=False, machine_rank=0, main_training_function="main", mixed_precision="bf16", num_machines=1, rdzv_backend="static",
                  same_network=True, tpu_env=[], tpu_use_cluster=False, tpu_use_sudo=False, use_cpu=False)
    fsdp = common | dict(distributed_type="FSDP", num_processes=8, fsdp_config=dict(fsdp_version=2, fsdp_reshard_after_forward=True, fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP", fsdp_offload_params=False,
                         fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer", fsdp_state_dict_type="FULL_STATE_DICT", fsdp_cpu_ram_efficient_loading=True, fsdp_activation_checkpointing=False))
    zero = common | dict(distributed_type="DEEPSPEED", num_processes=4, deepspeed_config=dict(zero_stage=3, offload_optimizer_device="none", offload_param_device="none", gradient_accumulation_steps=8, gradient_clipping=1.0,
                         zero3_init_flag=True, zero3_save_16bit_model=True, deepspeed_multinode_launcher="standard"))
    found = {}
    for name, d in dict(fsdp=fsdp, zero=zero).items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(d))
        found[name] = Recipe.from_yaml(str(tmp_path / f"{name}.yaml"))
    a, b = found["fsdp"], found["zero"]
    assert (a.strategy, a.nproc, a.precision, a.fsdp_wrap, a.activation_checkpointing, a.fsdp_config) == ("fsdp", 8, "bf16", ["LlamaDecoderLayer"], False, dict(state_dict_type="FULL_STATE_DICT"))
    assert (b.strategy, b.nproc, b.precision, b.grad_accum, b.max_grad_norm) == ("zero3", 4, "bf16", 8, 1.0)
    for r in (a, b): r.replace(model="tiny", dataset="demo").resolve(8, True, True)
    (tmp_path / "ds.json").write_text(json.dumps(preset(2, "cpu")))
    c = Recipe.from_dict(common | dict(distributed_type="DEEPSPEED", num_processes=2, deepspeed_config=dict(deepspeed_config_file=str(tmp_path / "ds.json"))))
    assert (c.strategy, c.nproc) == ("zero2+optim-cpu", 2) and c.notes
    old = Recipe.from_dict(common | dict(distributed_type="FSDP", fsdp_config=dict(fsdp_sharding_strategy="SHARD_GRAD_OP", fsdp_use_orig_params=True, fsdp_transformer_layer_cls_to_wrap="A,B")))
    assert (old.strategy, old.fsdp_wrap) == ("fsdp-grad-op", ["A", "B"]) and len(old.notes) == 2
    with pytest.raises(RecipeError) as e:
        Recipe.from_dict(common | dict(distributed_type="MEGATRON_LM", num_machines=2, mixed_precision="fp8", fsdp_confg={}))
    assert [p.field for p in e.value.problems] == ["distributed_type", "mixed_precision", "num_machines", "fsdp_confg"]


# Traps, one by one: (JSON entry, strategy, field that is named, words in the message)

TRAPS = [
    ({"bf16": {"enabled": True, "loss_scale": "auto"}}, "zero3", "bf16.loss_scale", "belongs to fp16"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "zero3", "fp16.enabled", "can't both"),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "zero2", "zero_optimization.offload_param", "stage 3 only"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "zero3+optim-nvme", "zero_optimization.offload_optimizer.nvme_path",
     "needs nvme_path"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ""}}}, "zero3+param-nvme",
     "zero_optimization.offload_param.nvme_path", "needs nvme_path"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}}, "zero2+optim-cpu",
     "zero_optimization.offload_optimizer.device", "quietly use the CPU"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "gpu"}}}, "zero3", "zero_optimization.offload_optimizer.device", "not a place"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "zero3+optim-cpu",
     "zero_optimization.offload_optimizer.ratio", "partial"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "zero3", "zero_optimization.offload_optimizer.device",
     "contradicts strategy zero3"),
    ({"zero_optimization": {"stage": 2}}, "zero3", "zero_optimization.stage", "contradicts"),
    ({"zero_optimization": {"stage": 4}}, "zero3", "zero_optimization.stage", "not a stage"),
    ({"zero_optimization": {"stage": 3, "overlap_com": True}}, "zero3", "zero_optimization.overlap_com", "no such key"),
    ({"zero_optimization": {"stage": 3, "max_live_parameters": 1e9}}, "zero3", "zero_optimization.max_live_parameters", "no such key"),
    ({"zero_optimization": {"stage": 3, "cpu_offload": True}}, "zero3", "zero_optimization.cpu_offload", "old name"),
    ({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 15099494.4}}, "zero3", "zero_optimization.stage3_prefetch_bucket_size",
     "not a whole number"),
    ({"zero_optimization": {"stage": 3, "reduce_bucket_size": "5e8"}}, "zero3", "zero_optimization.reduce_bucket_size", "not a number"),
    ({"zero_optimization": True}, "zero3", "zero_optimization", "not an object"),
    ({"zero_optimization": {"stage": 3, "contiguous_gradients": "yes"}}, "zero3", "zero_optimization.contiguous_gradients", "not true or false"),
    ({"stage": 3}, "zero3", "stage", "belongs into zero_optimization"),
    ({"zero_optimisation": {"stage": 3}}, "zero3", "zero_optimisation", "would ignore it"),
    ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "zero3", "optimizer.type", "can't translate"),
    ({"scheduler": {"type": "OneCycle", "params": {}}}, "zero3", "scheduler.type", "can't translate"),
    ({"amp": {"enabled": True}}, "zero3", "amp", "removed"),
    ({"elasticity": {"enabled": True}}, "zero3", "elasticity", "does not drive"),
]


@pytest.mark.parametrize("d,strategy,field,words", TRAPS, ids=[t[2] + "-" + t[3].replace(" ", "_") for t in TRAPS])
def test_trap(d, strategy, field, words):
    _, problems, _ = check_deepspeed(d, Recipe(), strategy)
    assert [p.field for p in problems] == ["deepspeed." + field]
    assert words in problems[0].message
    assert problems[0].allowed or problems[0].nearest


NOTED = [
    ({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9}}, "zero2", "stage3_max_live_parameters has no effect"),
    ({"zero_optimization": {"stage": 2, "allgather_partitions": True}}, "zero2", "allgather_partitions has no effect"),
    ({"zero_optimization": {"stage": 3, "round_robin_gradients": True}}, "zero3", "round_robin_gradients has no effect"),
    ({"zero_optimization": {"stage": 3, "overlap_comm": True}}, "zero3", "overlap_comm is on as asked"),
    ({"zero_optimization": {"stage": 3, "reduce_bucket_size": 1e9}}, "zero3", "GiB per rank"),
    ({"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}}, "zero3", "stays on"),
    ({"zero_force_ds_cpu_optimizer": True}, "zero3", "stays off"),
    ({"activation_checkpointing": {"partition_activations": True}}, "zero3", "Hugging Face models don't call"),
]


@pytest.mark.parametrize("d,strategy,words", NOTED, ids=[n[2].replace(" ", "_") for n in NOTED])
def test_no_effect_is_said(d, strategy, words):
    _, problems, notes = check_deepspeed(d, Recipe(), strategy)
    assert problems == [] and len(notes) == 1 and words in notes[0]


def test_auto_never_reaches_deepspeed():
    d = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu", "pin_memory": "auto"}},
         "train_batch_size": "auto", "bf16": {"enabled": "auto"}}
    r = Recipe(deepspeed=d).resolve(2)
    assert "auto" not in json.dumps(settings(r.strategy, r, SMOL, 2)["deepspeed"])
    assert [p.field for p in validate_deepspeed(d, 2)][:1] == ["deepspeed.zero_optimization.reduce_bucket_size"]


def test_deepspeeds_own_classes_are_asked():
    "What slips through the rules is caught by DeepSpeed's classes, each block by its own"
    bad = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "bf16": {"enabled": True, "loss_scale": 1},
           "zero_optimization": {"stage": 3, "overlap_com": True}}
    assert {p.field for p in validate_deepspeed(bad, 2)} == {"deepspeed.bf16.loss_scale", "deepspeed.zero_optimization.overlap_com"}
    (p,) = validate_deepspeed({"train_batch_size": 8, "gradient_accumulation_steps": 4}, 4)
    assert "Micro batch size per gpu: 0" in p.message


def test_what_a_json_says():
    assert {k: v for k, (v, _) in said_by(ARTICLE_A).items()} == dict(global_batch=8, grad_accum=4, learning_rate=2e-5, weight_decay=0.01,
            optim="adamw_torch", precision="fp16")
    assert strategy_of({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}) == "zero2+optim-cpu"


@pytest.mark.parametrize("d,field", [({"fsdp_version": 1}, "version"), ({"keep_low_precision_buffers": False}, "keep_low_precision_buffers"),
                                     ({"reshard_after_forward": False}, "reshard_after_forward"),
                                     ({"cpu_offload": True}, "offload_params"), ({"state_dict_type": "LOCAL_STATE_DICT"}, "state_dict_type"),
                                     ({"param_dtype": "fp8"}, "param_dtype")])
def test_fsdp_settings_that_are_wrong(d, field):
    _, problems, _ = check_fsdp(d, Recipe(), "fsdp")
    assert [p.field for p in problems] == [f"fsdp_config.{field}"]


def test_save_only_model_gathers_under_fsdp():
    "The Trainer refuses save_only_model with sharded state"
    f = settings("fsdp", Recipe(strategy="fsdp", save_only_model=True).resolve(2), SMOL, 2)["fsdp"]
    assert f["state_dict_type"] == "FULL_STATE_DICT"


# What ranks get, what is written, and what a cell leaves unread

def test_variables_are_text_as_written():
    assert Recipe.from_yaml("env: {NCCL_P2P_DISABLE: 1, A: true, B: 010, C: 1.10}\n").env == {"NCCL_P2P_DISABLE": "1", "A": "true", "B": "010", "C": "1.10"}
    assert Recipe(env="A=1,B=true").env == {"A": "1", "B": "true"}
    assert Recipe(env={"A": 1}).env == {"A": "1"}
    r = Recipe(env="A=1,B=true")
    assert Recipe.from_yaml(r.to_yaml()).env == r.env
    with pytest.raises(RecipeError, match=r"env\[A\]"): Recipe(env={"A": True})


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"])
def test_secrets_are_refused_and_never_shown(name):
    with pytest.raises(RecipeError, match="ranks inherit it") as e: Recipe(env={name: "hunter2"})
    assert "hunter2" not in str(e.value) and "hunter2" not in repr(e.value.problems)
    past = Recipe().model_copy(update={"env": {name: "hunter2"}})
    assert "hunter2" not in repr(past) and "hunter2" not in str(past) and "hunter2" not in past.magic_line() and "***" in past.magic_line()


def test_names_that_hold_no_secret():
    assert len(Recipe(env={"TOKENIZERS_PARALLELISM": "false", "HF_TOKEN_PATH": "/x", "NCCL_DEBUG": "INFO"}).env) == 3


def test_output_dir_is_absolute_and_its_checkpoints_are_found(tmp_path, monkeypatch):
    from shardnb.run.event import EventWriter
    from shardnb.run.handle import Run
    from shardnb.run.rundir import RunDir
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    r = Recipe(output_dir="kept").resolve(2)
    assert r.output_dir == str(tmp_path / "kept")
    rd = RunDir.create(r.to_yaml(), plan={"strategy": "ddp", "nproc": 2, "world_size": 2})
    (tmp_path / "kept" / "checkpoint-2").mkdir(parents=True)
    EventWriter(rd.event_path(0), 0).write("checkpoint", path=f"{r.output_dir}/checkpoint-2", step=2, complete=True)
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert [c.path for c in Run(rd).checkpoints] == [tmp_path / "kept" / "checkpoint-2"]


def test_one_rule_for_the_loaded_dtype():
    r = Recipe(precision="bf16", tuning="lora", fp32_norms=True)
    assert r.resolve(2).dtype == "float32" and r.replace(fp32_norms=False).resolve(2).dtype == "bfloat16"


@pytest.mark.parametrize("kind,assigned,text,silent", [
    ("loop", [], "accelerator.clip_grad_norm_(p, 1)", {"learning_rate", "max_grad_norm", "report_to", "logging_steps"}),
    ("trainer", ["trainer"], "", {"learning_rate", "max_grad_norm", "logging_steps", "micro_batch"}),
    ("objects", ["args"], "", {"learning_rate", "max_grad_norm", "logging_steps", "micro_batch"}),
    ("loop", [], "lr = recipe.learning_rate", {"max_grad_norm", "report_to", "logging_steps"}),
    ("recipe", [], "", set())])
def test_what_a_cell_leaves_unread_is_said_once(kind, assigned, text, silent):
    from shardnb.plan.effect import no_effect
    r = Recipe(learning_rate=1e-4, max_grad_norm=.5, report_to=["all"], logging_steps=2, micro_batch=2, seed=3, precision="fp32", timeout=60, out=["x"])
    said = [n.split()[0] for n in no_effect(r, kind, assigned, text)]
    assert sorted(said) == sorted(silent)
    if kind == "loop" and "clip" in text: assert not any("max_grad_norm" in n for n in no_effect(r.replace(strategy="zero2"), kind, assigned, text))


def test_configuration_of_what_has_none():
    from shardnb.plan.effect import no_effect
    assert no_effect(Recipe(dataset="demo", dataset_config="x")) == ["dataset_config has no effect: demo has no configurations"]
    assert no_effect(Recipe(dataset="owner/name", dataset_config="x")) == []


def test_trackers():
    import importlib.util
    with pytest.raises(RecipeError, match="did you mean 'tensorboard'"): Recipe(report_to="tensorbord")
    if importlib.util.find_spec("dvclive") is None:
        with pytest.raises(RecipeError, match="pip install dvclive"): Recipe(report_to="dvclive").resolve(2)
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    from shardnb.plan.contradiction import _TRACKERS
    assert set(_TRACKERS) == set(INTEGRATION_TO_CALLBACK)


def test_two_faults_of_one_value_are_both_said():
    from shardnb.plan.problem import Problem
    from shardnb.run.planner import _distinct
    a, b = Problem("model", "demo", "needs one package"), Problem("model", "demo", "needs another")
    assert _distinct([a, b, a], 0) == [a, b]
    assert _distinct([Problem("model", "./x", "there is no file"), Problem("model", "./x", "is not a folder")], 1) == [Problem("model", "./x", "there is no file")]
    assert _distinct([Problem("nproc", 9, "one"), Problem("nproc", 9, "two")], 1) == [Problem("nproc", 9, "one"), Problem("nproc", 9, "two")]


def test_resuming_starts_from_what_was_written(tmp_path, monkeypatch):
    from shardnb.plan.machine import Machine
    from shardnb.run.handle import Run
    from shardnb.run.planner import plan_run
    from shardnb.run.resumption import resumed_recipe
    from shardnb.run.rundir import RunDir
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    plan = plan_run(Recipe(model="tiny", dataset="demo", global_batch=8, nproc=2), machine=Machine("a laptop", (), cores=2, host_bytes=16 * 2**30, disk_bytes=100 * 2**30))
    run = Run(RunDir.create(plan.pop("recipe"), plan=plan))
    assert (run.recipe.micro_batch, run.recipe.grad_accum) == (1, 4)
    new = resumed_recipe(Recipe.from_yaml(run.plan["given"]), run.recipe, {"micro_batch": 2}).resolve(2)
    assert (new.micro_batch, new.grad_accum, new.global_batch, new.nproc) == (2, 2, 8, 2)


def test_a_result_of_another_user_is_not_unpickled(tmp_path, monkeypatch):
    import os
    import pickle

    from shardnb.plan.problem import ShardnbError
    from shardnb.run.handle import Run
    from shardnb.run.rundir import RunDir, write_json
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    rd = RunDir.create("model: tiny\n", plan={"strategy": "ddp", "nproc": 2})
    write_json(rd.exit_path, {"state": "done", "error": None})
    rd.result_path.write_bytes(pickle.dumps({"x": 1}))
    assert Run(rd).result == {"x": 1}
    if os.getuid() != 0: pytest.skip("only root can give a file away")
    os.chown(rd.result_path, 12345, -1)
    with pytest.raises(ShardnbError, match="uid 12345"): print(Run(rd).result)
