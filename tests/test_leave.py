"""Taking a run elsewhere: what it saved loads without shardnb and is the live model, and the exported project trains to the same losses."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

ROOT = Path(__file__).resolve().parent.parent
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    "A small model with weights on the disk, as a hub would give it"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    top = ranks.model_folder(tmp_path_factory.mktemp("leave") / "base", ranks.LLAMA)
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
    return ranks.rows_file(top, ranks.ragged(27))


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
    ("zero1", dict(activation_checkpointing=True, tuning="lora")), ("zero3", dict(lr_scheduler_type="polynomial"))])]


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
""" + ranks.LOOP


@slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp"])
@pytest.mark.parametrize("kind", ["objects", "trainer", "loop"])
def test_a_cell_goes_along(base, outside, tmp_path, kind, strategy):
    from shardnb.plan.recipe import Recipe
    kw = dict(model="tiny", micro_batch=2, grad_accum=1, max_steps=4, learning_rate=1e-3, precision="fp32") if kind == "objects" else {}
    cell = dict(objects=OBJECTS, trainer=TRAINER, loop=LOOP)[kind]
    run = ranks.train(Recipe(strategy=strategy, nproc=2, **kw), cell, dict(hidden=64, base=base, lr=1e-3), home=tmp_path)
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


def test_a_dataset_of_this_folder_is_found_from_the_project(tmp_path, monkeypatch):
    from shardnb.plan.recipe import Recipe
    from shardnb.run import models
    from shardnb.run.export import _same_tokens
    from shardnb.run.script import prepare_text
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, FORMATS["messages"])))
    out, r = tmp_path / "project", Recipe(model="tiny", dataset="rows.jsonl", max_length=64)
    tok = models.load_tokenizer(r)
    tok.save_pretrained(out / "tokenizer")
    text = prepare_text(r, "messages", 'with open("../rows.jsonl") as f: yield from map(json.loads, f)')
    assert _same_tokens(r, tok, text, out) == len(FORMATS["messages"])


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
base, folders, worst, ids = sys.argv[1], sys.argv[2:], {}, torch.arange(3, 51)[None]
with torch.no_grad(): untrained = AutoModelForCausalLM.from_pretrained(base).eval()(input_ids=ids).logits
for f in map(Path, folders):
    if (f / "adapter_config.json").exists():
        from peft import PeftModel
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), f)
        assert all(p.numel() and p.abs().sum() > 0 for n, p in model.named_parameters() if "lora_B" in n)
    else: model = AutoModelForCausalLM.from_pretrained(f)
    with torch.no_grad(): got = model.eval()(input_ids=ids).logits
    live = torch.load(f.parent / "live.pt")
    assert (live - untrained).abs().max() > .1  # so that a folder with what it began with would be found out
    worst[str(f)] = float((got - live).abs().max())
    AutoTokenizer.from_pretrained(f)
    said = (f / "README.md").read_text()
    exec(said.split("```python")[1].split("```")[0], told := dict(folder=f))
    with torch.no_grad(): assert (told["model"].eval()(input_ids=ids).logits - live).abs().max() < 1e-5 and "on 2 ranks" in said and "[More Information Needed]" not in said and "FSDP" not in said
print(json.dumps(worst))
"""
ALL = ("ddp", "zero1", "zero2", "zero3", "zero3+optim-cpu", "fsdp", "fsdp-grad-op")


@pytest.mark.parametrize("wanted", [[("zero3", True)], pytest.param([(s, t) for s in ALL for t in (False, True)], marks=slow)], ids=["some", "all"])
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


def test_rows_whose_answer_the_template_hides_are_in_no_project(tmp_path):
    from shardnb.plan.recipe import Recipe
    from shardnb.run import export, models
    from shardnb.run.script import prepare_text
    user, assistant = (lambda t: dict(role="user", content=t)), (lambda t: dict(role="assistant", content=t))
    shown, hidden = [user("1?"), assistant("one")], [user("1?"), assistant("one"), user("2?")]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(dict(messages=m)) for m in (hidden, shown, hidden)))
    r = Recipe(model="tiny", dataset=str(tmp_path / "rows.jsonl"))
    tok = models.load_tokenizer(r)
    tok.chat_template = "{% for m in messages | reverse %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    tok.save_pretrained(tmp_path / "tokenizer")
    text = prepare_text(r, "messages", 'with open("rows.jsonl") as f: yield from map(json.loads, f)')
    assert export._same_tokens(r, tok, text, tmp_path) == 1


def test_requirements_name_what_the_options_need(tmp_path):
    from importlib import metadata
    from types import SimpleNamespace

    from shardnb.plan.recipe import Recipe
    from shardnb.run.export import _requirements
    r = Recipe(model="tiny", report_to=["mlflow"], optim="adamw_8bit", use_liger_kernel=True).model_copy(update=dict(attn_implementation="flash_attention_2"))
    _requirements(SimpleNamespace(engine="ddp", peft=None, given=[], cell=None, quantization=None, libraries=("gptqmodel", "optimum"), recipe=r), tmp_path)
    lines = (tmp_path / "requirements.txt").read_text().splitlines()
    names = {line.partition("==")[0] for line in lines}
    assert names >= {"mlflow", "bitsandbytes", "liger-kernel", "gptqmodel", "optimum"} and names & {"flash-attn", "kernels"} and f"torch=={metadata.version('torch').split('+')[0]}" in lines


def test_requirements_name_what_the_cell_imports(tmp_path):
    "Its packages and its arguments' trackers, once each; of a module that no package brings the README speaks, so that pip asks nobody for its name"
    from types import SimpleNamespace

    from shardnb.plan.recipe import Recipe
    from shardnb.run.export import _lost, _requirements
    cell = "import os, yaml\nfrom ruff.x import y\nfrom my_own_rows import rows\nfrom trl import SFTConfig\nargs = SFTConfig(report_to=['tensorboard'])"
    f = SimpleNamespace(engine="ddp", kind="objects", peft=None, given=["args"], cell=cell, quantization=None, libraries=(), recipe=Recipe(), notes=[], plan={}, model=None)
    _requirements(f, tmp_path)
    names = [line.partition("==")[0] for line in (tmp_path / "requirements.txt").read_text().splitlines()]
    assert {"ruff", "tensorboard", "pyyaml"} <= {*names} and len(names) == len({*names}) and not any("my" in n or n == "os" for n in names)
    assert any("my_own_rows" in n and "beside train.py" in n for n in _lost(f))


@pytest.mark.parametrize("asked,recipe_s,want", [("tensorboard", [], ["tensorboard"]), ("tensorboard", ["mlflow"], ["mlflow"]), (None, [], []), ("none", ["mlflow"], ["mlflow"])])
def test_a_cell_s_own_trackers_go_along(asked, recipe_s, want):
    "As the ranks have it: the recipe's, and where it names none the cell's"
    import transformers
    from transformers import TrainingArguments

    from shardnb.run.script import _CELL_ARGS, _reports
    plain = TrainingArguments.__post_init__
    try:
        exec(_CELL_ARGS.format(kw="{}", report=_reports(recipe_s), plugin=""), dict(TrainingArguments=TrainingArguments, transformers=transformers))
        got = TrainingArguments(use_cpu=True, **({"report_to": asked} if asked else {})).report_to
    finally: TrainingArguments.__post_init__ = plain
    assert [n for n in got if n != "none"] == want


def test_a_json_s_loss_scaling_comes_along(tmp_path):
    "What an 'auto' fp16 block says otherwise than we would: it counts at fp16, and at a precision that the JSON names it is said to have no effect"
    from shardnb.plan.override import merge_override
    from shardnb.plan.recipe import Recipe
    from shardnb.plan.strategy import Strategy, settings
    d = dict(zero_optimization=dict(stage=2), fp16=dict(enabled="auto", loss_scale=0, loss_scale_window=500, initial_scale_power=12, min_loss_scale=1), bf16=dict(enabled="auto"))
    (tmp_path / "ds.json").write_text(json.dumps(d))
    (tmp_path / "bf16.json").write_text(json.dumps(d | dict(bf16=dict(enabled=True))))
    r, bf16 = Recipe.from_yaml(tmp_path / "ds.json"), Recipe.from_yaml(tmp_path / "bf16.json")
    assert r.deepspeed == dict(fp16=dict(enabled="auto", loss_scale_window=500, initial_scale_power=12)) and bf16.deepspeed is None
    assert sum("has no effect: precision is bf16" in n for n in bf16.notes) == 2
    facts = dict(hidden_size=64, largest_layer=1000, layer_classes=["LlamaDecoderLayer"], total=5000, trainable=5000)
    for precision, want in (("fp16", (True, 500, 12)), ("bf16", (False, None, None))):
        q = r.replace(model="tiny", dataset="demo", precision=precision).resolve(2, True, True)
        block = merge_override(settings(q.strategy, q, facts, 2, True), q, Strategy.parse(q.strategy))["deepspeed"]["fp16"]
        assert (block["enabled"], block.get("loss_scale_window"), block.get("initial_scale_power")) == want


def test_liger_s_package_is_asked_for_where_there_is_a_gpu():
    from importlib.util import find_spec

    from shardnb.plan.problem import RecipeError
    from shardnb.plan.recipe import Recipe
    from shardnb.run.models import liger_problems
    r = Recipe(model="tiny", dataset="demo", strategy="ddp", use_liger_kernel=True)
    assert len(liger_problems(r, True)) == (find_spec("liger_kernel") is None) and liger_problems(r, False) == liger_problems(Recipe(), True) == []
    assert all("pip install liger-kernel" in p.message for p in liger_problems(r, True))
    with pytest.raises(RecipeError, match="Liger's kernels need a GPU"): r.resolve(2)


MADE = "train_dataset = [dict(prompt='1 + 1 is', completion='2')] * 8"
OWN = MADE + "\nfrom transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained(base)"


def ended(tmp_path, recipe, cell, **inputs):
    "A run as its ranks would leave it: with a checkpoint whose adapter, or model, isn't the one that it began with"
    import torch

    from shardnb.run.cell import Cell
    from shardnb.run.checkpoint import whole_folder
    from shardnb.run.handle import Run
    from shardnb.run.models import apply_peft, load_model, load_tokenizer
    from shardnb.run.planner import plan_run
    from shardnb.run.rundir import RunDir, write_json
    plan = plan_run(recipe, Cell(cell), predict=False)
    rundir = RunDir.create(plan["recipe"], cell, None, plan, tmp_path)
    write_json(rundir.exit_path, dict(v=1, state="done", error=None))
    model = apply_peft(load_model(recipe), recipe)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad: p += .02 * torch.randn_like(p)
    with whole_folder(rundir.checkpoints_path / "checkpoint-3", 3, run=rundir.id) as part:
        model.save_pretrained(part)
        load_tokenizer(recipe).save_pretrained(part)
    return Run(rundir), model.eval()


@pytest.mark.parametrize("tuning", ["lora", "full", pytest.param("qlora", marks=slow)])
def test_a_cell_that_only_makes_rows_trains_the_recipe_s_model(tmp_path, monkeypatch, capsys, tuning):
    "So it can be loaded again as the recipe says it: with random weights of its seed, in 4 bits, and before training too"
    import torch

    from shardnb.plan.problem import ShardnbError
    from shardnb.plan.recipe import Recipe
    from shardnb.run import use
    run, model = ended(tmp_path, Recipe(model="tiny", tuning=tuning, strategy="ddp", nproc=1, precision="fp32", lora_r=4), MADE)
    assert run.plan["kind"] == "objects" and use.recipe_model(run)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    ids = torch.arange(3, 35)[None]
    with torch.no_grad(): assert torch.allclose(use.load_trained(run)(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)
    before, after = (use._answer(str(run.dir), [[dict(role="user", content="1 + 1?")]], 8, 0, 0, b) for b in (True, False))
    assert before != after
    if tuning == "lora":
        use._merge(str(run.dir), tmp_path / "merged")
        assert (tmp_path / "merged" / "model.safetensors").exists()
    if tuning == "full":
        from shardnb.ui.cli import main
        with pytest.raises(ShardnbError, match="there is no adapter"): use._merge(str(run.dir), tmp_path / "merged")
        monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
        assert main(["merge", run.id, str(tmp_path / "merged")]) and "there is no adapter to merge" in capsys.readouterr().err and not (tmp_path / "merged").exists()


def test_a_model_that_merging_would_change_is_not_written(tmp_path, monkeypatch):
    from shardnb.plan.problem import ShardnbError
    from shardnb.plan.recipe import Recipe
    from shardnb.run import use
    run, _ = ended(tmp_path, Recipe(model="tiny", tuning="lora", strategy="ddp", nproc=1, precision="fp32", lora_r=4), MADE)
    monkeypatch.setattr(use, "_NEAR", dict(float32=-1.))
    with pytest.raises(ShardnbError, match="nothing was written: merged, the model differs"): use._merge(str(run.dir), tmp_path / "merged")
    assert not [p for p in tmp_path.iterdir() if "merged" in p.name]


def test_a_model_of_the_cell_s_own_is_not_taken_for_the_recipe_s(base, tmp_path):
    from shardnb.plan.problem import ShardnbError
    from shardnb.plan.recipe import Recipe
    from shardnb.run import use
    full, _ = ended(tmp_path, Recipe(model="tiny", strategy="ddp", nproc=1, precision="fp32"), OWN)
    assert not use.recipe_model(full)
    with pytest.raises(ShardnbError, match="the model before training was made by the cell"): use._loaded(str(full.dir), True)
    lora, _ = ended(tmp_path, Recipe(model=base, tuning="lora", strategy="ddp", nproc=1, precision="fp32"), OWN)
    assert type(use.load_trained(lora).get_base_model()).__name__ == "LlamaForCausalLM"
    said = json.loads((use.model_folder(lora) / "adapter_config.json").read_text())
    with pytest.raises(ShardnbError, match="made by the cell, and can't be loaded from 'nobody/has-it'"):
        (tmp_path / "adapter_config.json").write_text(json.dumps(said | dict(base_model_name_or_path="nobody/has-it")))
        use._base(lora, tmp_path)


def test_an_interrupt_while_a_run_is_waited_for_stops_it(tmp_path, monkeypatch, capsys):
    "Also between two waits; a second one is passed on. And the wait reads what is new, not the whole file again"
    import socket
    import time

    from shardnb.run import use
    from shardnb.run.event import EventWriter
    from shardnb.run.handle import Run
    from shardnb.run.rundir import RunDir, write_json
    rundir = RunDir.create("model: tiny\n", plan={"strategy": "ddp"}, home=tmp_path)
    write_json(rundir.state_path, dict(state="running", host=socket.gethostname(), heartbeat=time.time() + 60, supervisor=None, ranks={}))
    EventWriter(rundir.event_path(0), 0).write("step", step=3, total_steps=9, loss=1.25)
    run = Run(rundir)
    monkeypatch.setattr(Run, "events", None)
    assert use._far(run) == f"waiting for {run.id}: running, step 3 of 9, loss 1.25"
    def interrupted(run): raise KeyboardInterrupt
    monkeypatch.setattr(use, "_far", interrupted)
    with pytest.raises(KeyboardInterrupt): use.wait_in_words(run)
    assert rundir.stop_requested() and capsys.readouterr().out.count("Stopping") == 1
