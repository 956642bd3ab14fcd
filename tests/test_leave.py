"""Taking a run elsewhere: what it saved loads without shardnb and is the live model, and the exported project trains to the same losses."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

ROOT = Path(__file__).resolve().parent.parent
SHAPE = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=264,
             max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    "A small model with weights on the disk, as a hub would give it"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    top = ranks.model_folder(tmp_path_factory.mktemp("leave") / "base", SHAPE)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(top)).save_pretrained(top)
    return top


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    "An environment in which shardnb can't be imported"
    block = tmp_path_factory.mktemp("block")
    (block / "shardnb.py").write_text("raise ImportError('shardnb is not here')\n")
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDNB", "ACCELERATE_", "FSDP_", "MASTER_")) and k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env = keep | dict(PYTHONPATH=str(block), PYTHON=sys.executable)
    assert "not here" in subprocess.run([sys.executable, "-c", "import shardnb"], env=env, cwd=block, capture_output=True, text=True).stderr
    return env


def rows(top):
    "Rows of different lengths; their number is no multiple of a step's"
    words = "shard gather reduce scatter rank layer bytes state moment bucket".split()
    p = Path(top) / "rows.jsonl"
    p.write_text("\n".join(json.dumps(dict(prompt=" ".join(words[: 1 + i % 7]), completion=" ".join(words[i % 5 :: 1 + i % 3]))) for i in range(27)))
    return str(p)


def recipe(base, top, **kw):
    from shardnb.plan.recipe import Recipe
    return Recipe(**{**dict(model=base, dataset=rows(top), nproc=2, micro_batch=2, grad_accum=2, max_steps=6, max_length=96, learning_rate=1e-3, precision="fp32", seed=7, eval_share=.1, eval_steps=3), **kw})


def go_out(run, folder, env):
    "Export a run, start the project, and compare every loss; returns the largest relative difference"
    from shardnb.run.export import write_project
    told = write_project(str(run.dir), str(folder), run.metrics.loss.tolist())
    text = "".join(p.read_text() for p in folder.glob("*.py"))
    assert "shardnb" not in text.replace("Written by shardnb", "").replace("shardnb isn't needed", "")
    lint = subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9", "--ignore", "F811", str(folder)], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout
    done = subprocess.run(["sh", "run.sh"], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    log, state = folder / "output/log.jsonl", folder / "output/trainer_state.json"
    lines = [json.loads(x) for x in log.read_text().splitlines()] if log.exists() else json.loads(state.read_text())["log_history"]
    got, want = [x["loss"] for x in lines if "loss" in x], run.metrics.loss.tolist()
    got += [x["eval_loss"] for x in lines if "eval_loss" in x]
    want += [e["loss"] for e in run.events("eval")]
    assert len(got) == len(want) and len(want) > 3
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
    assert worst <= 1e-6, f"{worst:.1e}: {got} against {want}"
    return worst, told


def same_weights(a, b):
    from safetensors.torch import load_file
    one, two = ({k: v for p in sorted(Path(d).glob("*.safetensors")) for k, v in load_file(p).items()} for d in (a, b))
    assert one.keys() == two.keys() and all((one[k] - two[k]).abs().max() <= 1e-6 for k in one)


CASES = [("fsdp", {}), *(pytest.param(s, k, marks=slow) for s, k in [
    ("ddp", {}), ("zero3", {}), ("zero2", {}), ("fsdp", dict(tuning="lora")), ("zero3", dict(tuning="lora")), ("ddp", dict(tuning="lora", lora_target_modules=["q_proj", "v_proj"])), ("zero3+optim-cpu", {}), ("fsdp-grad-op", {}),
    ("ddp", dict(precision="bf16")), ("fsdp", dict(precision="bf16")), ("fsdp", dict(precision="bf16", fp32_norms=True)), ("zero3", dict(precision="bf16")), ("fsdp", dict(packing=True, max_steps=4)),
    ("zero1", dict(activation_checkpointing=True, tuning="lora"))])]


@pytest.mark.parametrize("strategy,kw", CASES, ids=lambda x: x if isinstance(x, str) else "-".join(f"{k}={v}" for k, v in x.items()) or "full")
def test_the_project_has_the_losses_of_the_run(base, outside, tmp_path, strategy, kw):
    run = ranks.train(recipe(base, tmp_path, strategy=strategy, **kw), home=tmp_path)
    worst, _ = go_out(run, tmp_path / "project", outside)
    same_weights(tmp_path / "project/output/final", run.rundir.checkpoints_path / "final")
    assert (tmp_path / "project" / ("ds_config.json" if "zero" in strategy else "accelerate.yaml")).exists()
    print(f"{strategy} {kw}: worst relative difference {worst:.1e}")


@slow
@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_a_project_from_random_weights(outside, tmp_path, strategy):
    run = ranks.train(recipe("tiny", tmp_path, strategy=strategy), home=tmp_path)
    print(strategy, go_out(run, tmp_path / "project", outside)[0])


OBJECTS = """# %%shardtrain
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=264, hidden_size=hidden, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4))
train_dataset = [dict(prompt=f"{i} + {i} is", completion=f"{2 * i}") for i in range(30)]
"""
TRAINER = """
import datasets
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, AutoTokenizer, Trainer, TrainingArguments
tok = AutoTokenizer.from_pretrained(base)
ids = [list(range(3, 13 + n % 20)) for n in range(30)]
train = datasets.Dataset.from_list([dict(input_ids=r, labels=r) for r in ids])
args = TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-3, logging_steps=1)
trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(base), args=args, train_dataset=train, data_collator=DataCollatorForSeq2Seq(tok), processing_class=tok)
"""
LOOP = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(base)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
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


@slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp"])
@pytest.mark.parametrize("kind", ["objects", "trainer", "loop"])
def test_a_cell_goes_along(base, outside, tmp_path, kind, strategy):
    from shardnb.plan.recipe import Recipe
    kw = dict(model="tiny", micro_batch=2, grad_accum=1, max_steps=4, learning_rate=1e-3, precision="fp32") if kind == "objects" else {}
    cell = dict(objects=OBJECTS, trainer=TRAINER, loop=LOOP)[kind]
    run = ranks.train(Recipe(strategy=strategy, nproc=2, **kw), cell, dict(hidden=64, base=base), home=tmp_path)
    print(kind, strategy, go_out(run, tmp_path / "project", outside)[0])
    assert "# ---- the cell, as it was run" in (tmp_path / "project/train.py").read_text()


FORMATS = {
    "messages": [dict(messages=[dict(role="user", content=f"{i}?"), dict(role="assistant", content=f"{i}!"), dict(role="user", content="again"), dict(role="assistant", content="no " * i)]) for i in range(1, 12)],
    "sharegpt": [{"conversations": [{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": "yes " * i}]} for i in range(1, 12)],
    "alpaca": [dict(instruction=f"count to {i}", input="" if i % 2 else "slowly", output=" ".join(map(str, range(i)))) for i in range(1, 12)],
    "prompt-completion": [dict(prompt=f"{i} times", completion="x " * i) for i in range(1, 12)],
    "text": [dict(text="word " * i) for i in range(1, 12)],
}


@pytest.mark.parametrize("kw", [{}, dict(packing=True), dict(eval_share=.2, system_prompt="Be short."), dict(assistant_only_loss=False, max_samples=7), dict(max_length=40)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_prepared_rows_are_the_run_s(tmp_path, monkeypatch, fmt, kw):
    "Token for token, in every format, packed and split: prepare.py makes what the ranks trained on"
    import datasets

    from shardnb.plan.recipe import Recipe
    from shardnb.run import data, models
    from shardnb.run.script import prepare_text
    if fmt == "text" and "assistant_only_loss" in kw: kw = dict(max_samples=7)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, FORMATS[fmt])))
    r = Recipe(**{**dict(model="tiny", dataset=str(tmp_path / "rows.jsonl"), max_length=64), **kw})
    tok = models.load_tokenizer(r)
    tok.save_pretrained(tmp_path / "tokenizer")
    ns = dict(__name__="prepare", __file__=str(tmp_path / "prepare.py"))
    exec(compile(prepare_text(r, fmt, 'with open("rows.jsonl") as f: yield from map(json.loads, f)'), "prepare.py", "exec"), ns)
    monkeypatch.chdir(tmp_path)
    ns["main"]()
    for name, want in zip(("train", "eval"), data.load_rows(r, tok), strict=True):
        if want is None: assert not (tmp_path / "rows" / name).exists()
        else: assert datasets.load_from_disk(str(tmp_path / "rows" / name)).to_list() == want.to_list()


LIVE = """
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
seen, tok = {}, AutoTokenizer.from_pretrained(base)
class Live(TrainerCallback):
    def on_train_end(self, args, state, control, **kw):
        trainer.model_wrapped.eval()
        with torch.no_grad(): seen["logits"] = trainer.model_wrapped(input_ids=torch.arange(3, 51)[None].to(args.device)).logits.float().cpu().clone()
peft_config = None
if lora:
    from peft import LoraConfig
    peft_config = LoraConfig(r=8, task_type="CAUSAL_LM", target_modules="all-linear")
args = SFTConfig(per_device_train_batch_size=2, max_steps=3, learning_rate=1e-2, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
rows = [list(range(3, 13 + n % 20)) for n in range(24)]
data = Dataset.from_list([dict(input_ids=r, labels=r) for r in rows])
trainer = SFTTrainer(model=AutoModelForCausalLM.from_pretrained(base), args=args, train_dataset=data, data_collator=DataCollatorForLanguageModeling(pad_token_id=0), processing_class=tok,
                     peft_config=peft_config, callbacks=[Live()])
"""
LOAD = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
base, folders, worst = sys.argv[1], sys.argv[2:], {}
for f in map(Path, folders):
    if (f / "adapter_config.json").exists():
        from peft import PeftModel
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), f)
        assert all(p.numel() and p.abs().sum() > 0 for n, p in model.named_parameters() if "lora_B" in n)
    else: model = AutoModelForCausalLM.from_pretrained(f)
    with torch.no_grad(): got = model.eval()(input_ids=torch.arange(3, 51)[None]).logits
    worst[str(f)] = float((got - torch.load(f.parent / "live.pt")).abs().max())
    AutoTokenizer.from_pretrained(f)
print(json.dumps(worst))
"""
ALL = ("ddp", "zero1", "zero2", "zero3", "zero3+optim-cpu", "fsdp", "fsdp-grad-op")


@pytest.mark.parametrize("wanted", [[("zero3", True), ("fsdp", False)], pytest.param([(s, t) for s in ALL for t in (False, True)], marks=slow)], ids=["some", "all"])
def test_what_is_saved_is_the_live_model(base, outside, tmp_path, wanted):
    "Logits of the sharded model just before the end against those of the folder, loaded by plain Transformers and PEFT where shardnb isn't"
    import torch

    from shardnb.plan.recipe import Recipe
    folders = {}
    for strategy, lora in wanted:
        run = ranks.train(Recipe(strategy=strategy, nproc=2, out=["seen"], precision="fp32"), LIVE, dict(base=base, lora=lora), home=tmp_path)
        final = run.rundir.checkpoints_path / "final"
        torch.save(run.result["seen"]["logits"], final.parent / "live.pt")
        folders[str(final)] = (strategy, lora)
    done = subprocess.run([sys.executable, "-c", LOAD, base, *folders], env=outside, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    worst = {folders[f]: d for f, d in json.loads(done.stdout.splitlines()[-1]).items()}
    print(worst)
    assert len(worst) == len(wanted) and max(worst.values()) <= 1e-5


# ms-swift's presets by the facts of its 4.6 (`swift/config/*.json`): stage, offload, buckets; everything else `auto`
def preset(stage, optim=None, param=None):
    zero = dict(stage=stage, overlap_comm=False, contiguous_gradients=True, reduce_scatter=True, allgather_partitions=True, reduce_bucket_size=2e8, allgather_bucket_size=2e8)
    if stage == 3:
        zero = dict(stage=3, overlap_comm=False, contiguous_gradients=True, sub_group_size=1e9, reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto", stage3_param_persistence_threshold="auto",
                    stage3_max_live_parameters=1e9, stage3_max_reuse_distance=1e9, stage3_gather_16bit_weights_on_model_save=True, zero_quantized_weights=False, zero_quantized_gradients=False)
        zero |= dict(offload_optimizer=dict(device="none", pin_memory=True), offload_param=dict(device="none", pin_memory=True))
    if optim: zero["offload_optimizer"] = dict(device=optim, pin_memory=True)
    if param: zero["offload_param"] = dict(device=param, pin_memory=True)
    return dict(fp16=dict(enabled="auto", loss_scale=0, loss_scale_window=1000, initial_scale_power=16, hysteresis=2, min_loss_scale=1), bf16=dict(enabled="auto"), zero_optimization=zero, gradient_accumulation_steps="auto",
                gradient_clipping="auto", steps_per_print=2000, train_batch_size="auto", train_micro_batch_size_per_gpu="auto", wall_clock_breakdown=False)


PRESETS = {"zero0": (preset(0), "ddp"), "zero1": (preset(1), "zero1"), "zero2": (preset(2), "zero2"), "zero2_offload": (preset(2, "cpu"), "zero2+optim-cpu"), "zero3": (preset(3), "zero3"),
           "zero3_offload": (preset(3, "cpu", "cpu"), "zero3+optim-cpu+param-cpu")}


@pytest.mark.parametrize("name", PRESETS)
def test_ms_swift_s_presets_become_recipes(tmp_path, name):
    "As a file, to the right strategy; complete settings come of it, which DeepSpeed accepts"
    from shardnb.plan.override import validate_deepspeed
    from shardnb.plan.recipe import Recipe
    from shardnb.plan.strategy import settings
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


def test_accelerate_s_files_become_recipes(tmp_path):
    import yaml

    from shardnb.plan.problem import RecipeError
    from shardnb.plan.recipe import Recipe
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


def test_our_own_accelerate_yaml_comes_back(tmp_path):
    "What an export writes, a recipe reads"
    from types import SimpleNamespace

    from shardnb.plan.recipe import Recipe
    from shardnb.plan.strategy import settings
    from shardnb.run.export import _sharding_files
    for strategy in ("fsdp", "fsdp-grad-op", "fsdp+param-cpu", "ddp", "zero3", "zero2+optim-cpu"):
        r = Recipe(model="tiny", dataset="demo", strategy=strategy, nproc=4, precision="bf16").resolve(4, True, True)
        found = settings(strategy, r, dict(hidden_size=64, largest_layer=1000, layer_classes=["LlamaDecoderLayer"], total=5000, trainable=5000), 4, True)
        f = SimpleNamespace(engine=found["engine"], settings=found[found["engine"]], mixed="bf16", n=4, cuda=True)
        _sharding_files(f, tmp_path)
        back = Recipe.from_yaml(tmp_path / ("ds_config.json" if f.engine == "deepspeed" else "accelerate.yaml"))
        assert (back.strategy, back.precision) == (strategy, "bf16"), back


def test_what_a_cell_takes_along(tmp_path, monkeypatch):
    "Short values as text, others in a pickle; a secret and an object of shardnb's stay here, and are named"
    import pickle

    from shardnb.plan.recipe import Recipe
    from shardnb.run.cell import Cell, collect
    from shardnb.run.export import _variables
    from shardnb.run.rundir import RunDir
    token = "hf_" + "aB3" * 12
    monkeypatch.setenv("SOME_TOKEN", token)
    cell = Cell("print(rate, names, table, key, again, recipe.seed)")
    given = dict(rate=1e-3, names=["a", "b"], table={i: b"x" * 90 for i in range(20)}, key=token, again=Recipe())
    rundir = RunDir.create("model: tiny\n", cell.text, collect(cell, given), {"strategy": "ddp"}, tmp_path)
    lines, notes = _variables(cell, Recipe(seed=5), rundir, tmp_path, found := []), found
    ns = {}
    monkeypatch.chdir(tmp_path)
    exec("import cloudpickle\nfrom types import SimpleNamespace\n" + "\n".join(lines), ns)
    assert (ns["rate"], ns["names"], ns["table"], ns["recipe"].seed) == (1e-3, ["a", "b"], given["table"], 5)
    assert {*pickle.loads((tmp_path / "inputs.pkl").read_bytes())} == {"table"} and token not in "\n".join(lines)
    assert sum("key holds what looks like a secret" in n for n in notes) == 1 and sum("again is an object of shardnb's" in n for n in notes) == 1


def test_nothing_is_overwritten(tmp_path):
    from shardnb.plan.problem import RecipeError, ShardnbError
    from shardnb.run.handle import Run
    from shardnb.run.rundir import RunDir
    run = Run(RunDir.create("model: tiny\n", plan={"strategy": "ddp"}, home=tmp_path / "home"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("")
    with pytest.raises(RecipeError, match="is not empty"): run.export(tmp_path / "full")
    with pytest.raises(RecipeError, match="is a file"): run.export(tmp_path / "full/mine")
    with pytest.raises(ShardnbError, match="has saved no model"):
        from shardnb.run.use import model_folder
        model_folder(run)
