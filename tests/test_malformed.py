"""Malformed inputs: each is refused with one clear error that names the field, and no rank starts.

A row is (name, how it is given, input, field that the error must name, text that the error must hold). `{d}` in an input is a temporary folder with the files
that `folder` writes.
"""
import json

import pytest

from shardnb.plan.machine import Machine
from shardnb.plan.fsdp import check_fsdp
from shardnb.plan.override import check_deepspeed
from shardnb.plan.problem import RecipeError
from shardnb.plan.recipe import Recipe
from shardnb.plan.strategy import Strategy

CPU = Machine("a laptop", (), cores=2, host_bytes=16 * 2**30, disk_bytes=100 * 2**30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    d = tmp_path_factory.mktemp("malformed")
    def put(name, content):
        p = d / name
        p.parent.mkdir(parents=True, exist_ok=True)
        p.write_text(content if isinstance(content, str) else json.dumps(content))
    put("recipe.yaml", "model: tiny\ndataset: demo\nstrategy: zero3\n")
    put("broken.yaml", "model: tiny\nstrategy: [zero3\nnproc: 2\n")
    put("tabs.yaml", "model: tiny\n\tstrategy: zero3\n")
    put("twice.yaml", "strategy: zero2\nmodel: tiny\nstrategy: zero3\n")
    put("list.yaml", "- model\n- tiny\n")
    put("object.yaml", "model: !!python/object/apply:os.getcwd []\n")
    (d / "latin.yaml").write_bytes(b"model: t\xefny\n")
    put("ds.json", {"zero_optimization": {"stage": 3}})
    put("comment.json", '{"zero_optimization": {"stage": 3}, // full\n "bf16": {"enabled": true}}')
    put("cut.json", '{"zero_optimization": {"stage": 3')
    put("list.json", [1, 2])
    put("empty.jsonl", "")
    put("rows.jsonl", '{"prompt": "a", "completion": "b"}\n')
    put("broken.jsonl", '{"prompt": "a", "completion": "b"}\n{"prompt": "a", \n')
    put("odd.jsonl", '{"weight": 3}\n')
    put("sheet.xlsx", "x")
    put("not_causal/config.json", {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"], "vocab_size": 99, "dim": 16, "n_heads": 2,
                                   "n_layers": 1})
    put("broken_config/config.json", '{"model_type": "llama", ')
    put("no_type/config.json", {"hidden_size": 64})
    put("no_config/readme.txt", "weights elsewhere")
    return d


def fill(x, d):
    if isinstance(x, str): return x.replace("{d}", str(d))
    if isinstance(x, dict): return {k: fill(v, d) for k, v in x.items()}
    return x


OK = dict(model="tiny", dataset="demo", strategy="zero3", nproc=2, max_steps=2)
KW, YAML, DICT, RES, GPU, DS, FS, STRAT = "Recipe", "from_yaml", "from_dict", "resolve", "resolve on 4 GPUs", "check_deepspeed", "check_fsdp", "Strategy"

TABLE = [
    # types
    ("word for a number", KW, dict(micro_batch="two"), "micro_batch", "a whole number"),
    ("fraction for a count", KW, dict(grad_accum=2.5), "grad_accum", "did you mean '2'"),
    ("true for a number", KW, dict(max_steps=True), "max_steps", "where a number belongs"),
    ("zero rows", KW, dict(micro_batch=0), "micro_batch", "at least 1"),
    ("negative rate", KW, dict(learning_rate=-1e-4), "learning_rate", "above 0"),
    ("dropout of one", KW, dict(lora_dropout=1.0), "lora_dropout", "below 1"),
    ("word for yes or no", KW, dict(packing="sometimes"), "packing", "true or false"),
    ("number for text", KW, dict(model=7), "model", "text"),
    ("mapping for a list", KW, dict(lora_target_modules={"q": 1}), "lora_target_modules", "a list"),
    ("word in a list of numbers", KW, dict(gpus=["first"]), "gpus[0]", "a whole number"),
    ("pairs without equals", KW, dict(env="NCCL_DEBUG"), "env", "name=value"),
    ("broken JSON in an option", KW, dict(lr_scheduler_kwargs='{"min_lr": }'), "lr_scheduler_kwargs", "broken JSON"),
    ("unquoted no in YAML", YAML, "strategy: no\n", "strategy", "not the name of a strategy"),
    # unknown keys and near misses
    ("slip in a name", KW, dict(micro_bacth=2), "micro_bacth", "did you mean 'micro_batch'"),
    ("Transformers' name as a keyword", KW, dict(per_device_train_batch_size=2), "per_device_train_batch_size", "did you mean 'micro_batch'"),
    ("slip in Transformers' name", DICT, dict(gradient_acumulation_steps=2), "gradient_acumulation_steps", "did you mean 'grad_accum'"),
    ("slip inside a section", YAML, "training:\n  model: tiny\n  stratgy: zero3\n", "training.stratgy", "did you mean 'strategy'"),
    ("slip inside lora", YAML, "training:\n  lora: {rnak: 8}\n", "training.lora.rnak", "did you mean 'rank'"),
    ("nothing like it", KW, dict(colour="blue"), "colour", "there is no such option"),
    ("slip in a strategy", KW, dict(strategy="zero4"), "strategy", "did you mean 'zero3'"),
    ("slip in a precision", KW, dict(precision="bf61"), "precision", "did you mean 'bf16'"),
    ("slip in a schedule", KW, dict(lr_scheduler_type="cosin"), "lr_scheduler_type", "did you mean 'cosine'"),
    ("slip in a dtype", KW, dict(dtype="torch.bfloat"), "dtype", "did you mean 'bfloat16'"),
    ("optimizer that is not there", KW, dict(optim="adamw_xla"), "optim", "adamw_torch"),
    ("slip in a machine", "Machine", "4xA100-80G", "machine", "did you mean '4xA100-80GB'"),
    # impossible batches
    ("half a row per rank", GPU, dict(OK, nproc=4, global_batch=8, grad_accum=4), "global_batch", "8 ≠ ? × 4 × 4"),
    ("no whole accumulation", RES, dict(OK, global_batch=10, micro_batch=4), "global_batch", "global_batch 8 or 16"),
    ("three that disagree", RES, dict(OK, micro_batch=2, grad_accum=2, global_batch=16), "global_batch", "grad_accum 4"),
    ("ranks that don't divide", RES, dict(OK, nproc=3, global_batch=8), "global_batch", "did you mean '9'"),
    # contradictions
    ("offload that fsdp lacks", STRAT, "fsdp+optim-cpu", "strategy", "did you mean 'fsdp+param-cpu'"),
    ("offload that ddp lacks", STRAT, "ddp+optim-cpu", "strategy", "did you mean 'zero1+optim-cpu'"),
    ("parameters offloaded at stage 2", STRAT, "zero2+param-cpu", "strategy", "did you mean 'zero3+param-cpu'"),
    ("disk at stage 1", STRAT, "zero1+optim-nvme", "strategy", "did you mean 'zero1+optim-cpu'"),
    ("two places for one part", STRAT, "zero3+optim-cpu+optim-nvme", "strategy", "two places"),
    ("hybrid sharding", STRAT, "hsdp", "strategy", "more than one node axis"),
    ("auto", STRAT, "auto", "strategy", "choose a strategy"),
    ("disk without a path", KW, dict(strategy="zero3+optim-nvme"), "nvme_path", "a folder on a fast disk"),
    ("deepspeed and fsdp", DICT, dict(deepspeed="zero3", fsdp="full_shard auto_wrap"), "fsdp", "can't both shard"),
    ("strategy and other deepspeed", DICT, dict(strategy="zero2", deepspeed="zero3"), "deepspeed", "strategy already says 'zero2'"),
    ("bf16 and fp16", DICT, dict(bf16=True, fp16=True), "fp16", "can't both be on"),
    ("one thing under two names", DICT, dict(micro_batch=2, per_device_train_batch_size=4), "per_device_train_batch_size", "already gives micro_batch as 2"),
    ("fp16 on a CPU", RES, dict(OK, precision="fp16"), "precision", "fp16 needs a GPU"),
    ("fp32 with 16-bit weights", KW, dict(precision="fp32", dtype="bfloat16"), "dtype", "did you mean 'float32'"),
    ("pure bf16 with fp32 norms", KW, dict(precision="bf16-pure", fp32_norms=True), "fp32_norms", "keeps nothing in fp32"),
    ("pure bf16 with optimizer offload", KW, dict(precision="bf16-pure", strategy="zero3+optim-cpu"), "precision", "did you mean 'bf16'"),
    ("warmup said twice", KW, dict(warmup_ratio=.1, warmup_steps=10), "warmup_steps", "one of the two"),
    ("schedule without its number", KW, dict(lr_scheduler_type="cosine_with_min_lr"), "lr_scheduler_kwargs", "needs min_lr"),
    ("more ranks than GPUs named", KW, dict(nproc=4, gpus=[0, 1]), "nproc", "at most 2"),
    ("wrapped and kept", KW, dict(strategy="fsdp", fsdp_wrap=["Block"], fsdp_keep=["Block"]), "fsdp_keep", "both wrapped and kept"),
    ("the launcher's variable", KW, dict(env={"WORLD_SIZE": "4"}), "env.WORLD_SIZE", "set by the launcher"),
    ("flash attention on a CPU", RES, dict(OK, attn_implementation="flash_attn"), "attn_implementation", "did you mean 'sdpa'"),
    ("GPUs where there are none", RES, dict(OK, gpus="0,1"), "gpus", "no GPU on this machine"),
    # broken YAML and JSON, missing files
    ("bracket left open", YAML, "{d}/broken.yaml", "broken.yaml", "broken YAML on line 3"),
    ("tab in YAML", YAML, "{d}/tabs.yaml", "tabs.yaml", "broken YAML on line 2"),
    ("key twice", YAML, "{d}/twice.yaml", "strategy", "given twice, on lines 1 and 3"),
    ("list for a recipe", YAML, "{d}/list.yaml", "list.yaml", "not a mapping"),
    ("YAML that would run code", YAML, "{d}/object.yaml", "object.yaml", "broken YAML on line 1"),
    ("not UTF-8", YAML, "{d}/latin.yaml", "recipe", "can't be read"),
    ("missing recipe", YAML, "{d}/recipes.yaml", "recipe", "did you mean '{d}/recipe.yaml'"),
    ("missing DeepSpeed JSON", RES, dict(OK, deepspeed="{d}/dss.json"), "deepspeed", "did you mean '{d}/ds.json'"),
    ("comment in JSON", RES, dict(OK, deepspeed="{d}/comment.json"), "deepspeed (comment.json)", "JSON has no // comments"),
    ("JSON cut off", RES, dict(OK, deepspeed="{d}/cut.json"), "deepspeed (cut.json)", "broken JSON on line 1"),
    ("JSON that is a list", RES, dict(OK, deepspeed="{d}/list.json"), "deepspeed (list.json)", "not an object"),
    ("missing model folder", RES, dict(OK, model="{d}/no_modle"), "model", "there is no file or folder"),
    ("missing data file", RES, dict(OK, dataset="{d}/row.jsonl"), "dataset", "did you mean '{d}/rows.jsonl'"),
    ("data in a spreadsheet", RES, dict(OK, dataset="{d}/sheet.xlsx"), "dataset", ".jsonl, .json, .csv, .parquet"),
    ("neither hub id nor path", RES, dict(OK, model="my model!"), "model", "neither a hub id"),
    # engine settings
    ("loss scale for bf16", DS, {"bf16": {"enabled": True, "loss_scale": 16384}}, "deepspeed.bf16.loss_scale", "belongs to fp16"),
    ("stage that the strategy isn't", DS, {"zero_optimization": {"stage": 2}}, "deepspeed.zero_optimization.stage", "strategy zero2"),
    ("slip in a ZeRO key", DS, {"zero_optimization": {"stage": 3, "overlap_com": True}}, "deepspeed.zero_optimization.overlap_com",
     "did you mean 'overlap_comm'"),
    ("slip at the top", DS, {"gradient_cliping": 1.0}, "deepspeed.gradient_cliping", "did you mean 'gradient_clipping'"),
    ("batch that the recipe isn't", RES, dict(OK, micro_batch=4, deepspeed={"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}),
     "deepspeed.train_micro_batch_size_per_gpu", "contradicts micro_batch=4"),
    ("FSDP1", FS, {"fsdp_version": 1}, "fsdp_config.version", "FSDP1 is deprecated"),
    ("setting that nothing has", FS, {"keep_low_precision_buffers": False}, "fsdp_config.keep_low_precision_buffers", "no such setting"),
]

# Found with the model and the data at hand, by the same call that prepares every run; it returns before a rank exists
PLANNED = [
    ("no model", dict(OK, model=None), "model", "is needed"),
    ("no dataset", dict(OK, dataset=None), "dataset", "is needed"),
    ("empty dataset", dict(OK, dataset="{d}/empty.jsonl"), "dataset", "the file is empty"),
    ("broken row", dict(OK, dataset="{d}/broken.jsonl"), "dataset", "line 2"),
    ("rows of no known shape", dict(OK, dataset="{d}/odd.jsonl"), "dataset", "weight"),
    ("not a causal LM", dict(OK, model="{d}/not_causal"), "model", "not a causal language model"),
    ("broken config", dict(OK, model="{d}/broken_config"), "model", "config.json"),
    ("config without a type", dict(OK, model="{d}/no_type"), "model", "model_type"),
    ("folder without a config", dict(OK, model="{d}/no_config"), "model", "config.json"),
    ("adapters on modules that aren't there", dict(OK, tuning="lora", lora_target_modules=["query"]), "lora_target_modules", "q_proj"),
    ("layer class that the model lacks", dict(OK, strategy="fsdp", fsdp_wrap=["GPT2Block"]), "fsdp_wrap", "no such layer class"),
    ("dataset that isn't here, offline", dict(OK, dataset="sqaud"), "dataset", "HF_HUB_OFFLINE is set"),
    ("dataset of an owner, offline", dict(OK, dataset="nobody/nothing"), "dataset", "nor in the cache of the hub"),
    ("slip in a built-in dataset", dict(OK, dataset="deom"), "dataset", "did you mean 'demo'"),
    ("slip in a built-in model", dict(OK, model="tinny"), "model", "did you mean 'tiny'"),
    ("tokenizer that isn't here, offline", dict(OK, tokenizer="nobody/nothing"), "tokenizer", "HF_HUB_OFFLINE is set"),
    ("folder without a tokenizer", dict(OK, tokenizer="{d}/no_type"), "tokenizer", "has no tokenizer"),
    ("two at once", dict(OK, dataset="{d}/empty.jsonl", precision="fp16"), "precision", "fp16 needs a GPU"),
]


def give(how, x):
    "Hands `x` in the way `how`"
    if how == KW: Recipe(**x)
    elif how == YAML: Recipe.from_yaml(x)
    elif how == DICT: Recipe.from_dict(x)
    elif how == RES: Recipe(**x).resolve(x.get("nproc", 2))
    elif how == GPU: Recipe(**x).resolve(4, cuda=True, bf16_ok=True)
    elif how == STRAT: Strategy.parse(x)
    elif how == "Machine": Machine.preset(x)
    else:
        problems = check_deepspeed(x, Recipe(), "zero3")[1] if how == DS else check_fsdp(x, Recipe(), "fsdp")[1]
        if problems: raise RecipeError(problems)


def assert_clear(e, field, text, problems=1):
    assert [p.field for p in e.problems].count(field) == 1, str(e)
    assert len(e.problems) == problems, str(e)
    p = next(p for p in e.problems if p.field == field)
    assert text in str(p), str(p)
    assert str(p).startswith(f"{field}: ") and len(str(p)) < 600 and "\n" not in str(p)
    assert "pydantic" not in str(p) and "Traceback" not in str(p)
    assert e._render_traceback_() == [f"RecipeError: {e}"]


def test_there_are_fifty_or_more(): assert len(TABLE) + len(PLANNED) >= 50 and len({t[0] for t in TABLE + PLANNED}) == len(TABLE) + len(PLANNED)


@pytest.mark.parametrize("how,x,field,text", [t[1:] for t in TABLE], ids=[t[0].replace(" ", "_") for t in TABLE])
def test_refused(how, x, field, text, folder):
    with pytest.raises(RecipeError) as e: give(how, fill(x, folder))
    assert_clear(e.value, field, fill(text, folder))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    d = tmp_path_factory.mktemp("home")
    yield d
    from shardnb.run.planner import Planner
    Planner.get().close()


@pytest.mark.parametrize("x,field,text", [t[1:] for t in PLANNED], ids=[t[0].replace(" ", "_") for t in PLANNED])
def test_refused_before_a_rank_starts(x, field, text, folder, home, monkeypatch):
    "`plan_run` says it, and `train` raises the same without making a run"
    from shardnb.run.start import train
    from shardnb.run.planner import plan_run
    monkeypatch.setenv("SHARDNB_HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    r = Recipe(**fill(x, folder))
    with pytest.raises(RecipeError) as e: plan_run(r, machine=CPU)
    assert_clear(e.value, field, fill(text, folder), problems=2 if x.get("precision") == "fp16" else 1)
    with pytest.raises(RecipeError): train(r)
    assert not list((home / "runs").glob("*/logs/rank*.log"))


def test_all_problems_come_together():
    "Six mistakes of six kinds, one error"
    with pytest.raises(RecipeError) as e:
        Recipe(model="tiny", micro_bacth=2, precision="fp61", grad_accum=0, strategy="fsdp+optim-cpu", max_steps=True, warmup_ratio=.1, warmup_steps=3)
    assert {p.field for p in e.value.problems} == {"micro_bacth", "precision", "grad_accum", "strategy", "max_steps", "warmup_steps"}
    assert str(e.value).startswith("6 problems\n")


def problem(f, *args):
    with pytest.raises(RecipeError) as e: f(*args)
    assert len(e.value.problems) == 1
    return str(e.value)


def test_numbers_of_yaml_mean_what_people_read():
    "YAML 1.1 has 010 for 8 and 1:30 for 90"
    steps = lambda text: Recipe.from_yaml(f"max_steps: {text}").max_steps
    assert [steps(t) for t in ("010", "0x10", "1_000", "+7")] == [10, 16, 1000, 7]
    assert "'1:30' is not a whole number" in problem(steps, "1:30")
    assert problem(Recipe.from_yaml, "seed: 5000000000") == "seed: 5000000000 is not at most 4294967295; did you mean '4294967295'?"


def test_a_document_that_unfolds_without_end_and_a_folder():
    lines = ["a: &a [1,1,1,1,1,1,1,1]"] + [f"{b}: &{b} [{','.join([f'*{a}'] * 8)}]" for a, b in zip("abcdefghijklmno", "bcdefghijklmnop", strict=True)]
    assert "unfold to more than" in problem(Recipe.from_yaml, "\n".join(lines))
    assert "'.' is a folder" in problem(Recipe.from_yaml, ".")


def test_the_last_of_an_option_wins_on_a_line():
    "As on any command line, so that the options of an advice can be put behind it; in a file the same is a mistake"
    from shardnb.ui.options import OptionParser, add_recipe_options, parse_options
    told = parse_options(add_recipe_options(OptionParser(prog="x")), "--micro-batch 16 --packing --micro-batch 1 --no-packing".split())
    assert vars(told) == dict(micro_batch="1", packing="false")
    assert "given twice, on lines 1 and 2" in problem(Recipe.from_yaml, "nproc: 2\nnproc: 3")


@pytest.mark.parametrize("what", ["plan", "predict", "pick", "train"])
def test_everybody_takes_a_recipe_in_the_same_forms(what):
    import shardnb
    f = getattr(shardnb, what)
    assert "there is no file or folder 'nothere.yaml'" in problem(f, "nothere.yaml")
    assert "3 is neither a path nor YAML text" in problem(f, 3)
    assert "did you mean 'dataset'" in problem(f, dict(model="tiny", datset="demo"))


def test_what_is_allowed_is_said_even_where_its_letters_stand_in_another_word():
    from shardnb.plan.problem import Problem
    assert str(Problem("out", "b", "the cell makes no b", "a")) == "out: the cell makes no b; allowed: a"


def test_a_run_goes_on_with_its_model(tmp_path):
    from types import SimpleNamespace

    from shardnb.run.resumption import resume_problems
    run = SimpleNamespace(ended=True, plan={}, id="x")
    ckpt = SimpleNamespace(path=tmp_path, strategy="ddp", step=1)
    told = lambda old, new: [p.field for p in resume_problems(run, Recipe(model=old, strategy="ddp", nproc=1), Recipe(model=new, strategy="ddp", nproc=1), ckpt)]
    assert told("tiny", "demo") == ["model"] and told("tiny", "tiny") == told("tiny", str(tmp_path)) == []
