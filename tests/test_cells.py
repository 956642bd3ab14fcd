"""The three kinds of cell under each engine: objects for a trainer, a ready trainer, a loop of its own."""
import math

import pytest
import ranks
from waiting import within

STRATEGIES = ("ddp", "zero3", "fsdp")
MODEL = """# %%shardtrain
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4))
"""
ROWS = """
import datasets
rows = [list(range(3, 13 + n % 20)) for n in range(30)]
train_dataset = datasets.Dataset.from_list([dict(input_ids=r, labels=r) for r in rows])
"""
TRAINER = """
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments
args = TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, learning_rate=lr, logging_steps=1)
trainer = Trainer(model=model, args=args, train_dataset=train_dataset, data_collator=DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(tiny)))
"""
LOOP = ranks.LOOP.replace("log(loss=loss)", "log(loss=loss, where=i * 10)") + "answer, ranks_seen = float(loss), world_size\n"
OWN = """# %%shardtrain
import torch
torch.manual_seed(0)
class Block(torch.nn.Module):
    def __init__(self): super().__init__(); self.up, self.down = torch.nn.Linear(32, 96), torch.nn.Linear(96, 32)
    def forward(self, x): return x + self.down(self.up(x).relu())
class Net(torch.nn.Module):
    def __init__(self): super().__init__(); self.blocks, self.head = torch.nn.ModuleList(Block() for _ in range(3)), torch.nn.Linear(32, 1)
    def forward(self, x):
        for b in self.blocks: x = b(x)
        return self.head(x)
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=lr)
g = torch.Generator().manual_seed(1)
dl = torch.utils.data.DataLoader([torch.randn(32, generator=g) for _ in range(32)], batch_size=4)
model, opt, dl = accelerator.prepare(model, opt, dl)
for x in dl:
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    accelerator.backward(loss)
    opt.step()
    opt.zero_grad()
    log(loss=loss)
"""
WRAPPERS = {"ddp": "DistributedDataParallel", "zero3": "DeepSpeedEngine", "fsdp": "FSDPModule"}


@pytest.fixture(scope="module")
def given():
    from shardnb.run.models import resolve_model
    return dict(tiny=resolve_model("tiny"), lr=1e-3)


def go(cell, strategy, given, home, **kw):
    from shardnb.plan.recipe import Recipe
    return ranks.train(Recipe(strategy=strategy, nproc=2, **kw), cell, given, home=home)


KINDS = {  # cell, and what else the run is given
    "objects": (MODEL + ROWS, dict(model="tiny", max_steps=4, micro_batch=2, grad_accum=2, learning_rate=1e-3)),
    "trainer": (MODEL + ROWS + TRAINER, {}),
    "loop": (MODEL + LOOP, dict(out=["answer", "ranks_seen"])),
    "own": (OWN, {}),
}


@pytest.fixture(scope="module")
def made(given, tmp_path_factory):
    "A run of each kind of cell under each strategy, made once"
    known = {}
    def of(kind, strategy):
        cell, kw = KINDS[kind]
        if (kind, strategy) not in known: known[kind, strategy] = go(cell, strategy, given, tmp_path_factory.mktemp(kind), **kw)
        return known[kind, strategy]
    return of


def same(run, strategy, plain, n=4):
    "It has the losses of the plain run, which are no constant; and the strategy was in force"
    got, want = run.metrics.loss.tolist(), plain.metrics.loss.tolist()
    assert len(got) == n and got == pytest.approx(want, rel=1e-4)
    assert all(map(math.isfinite, want)) and len(set(want)) == n
    assert {e["wrapper"] for e in run.events("effective")} == {WRAPPERS[strategy]}
    for rank in (0, 1):
        moments = set(run.memory.query(f"rank == {rank} and step == 2").moment)
        assert moments == {"after_forward", "after_backward", "after_step", "peak"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_objects(made, strategy): same(made("objects", strategy), strategy, made("objects", "ddp"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trainer(made, strategy): same(made("trainer", strategy), strategy, made("trainer", "ddp"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loop(made, strategy):
    run, plain = made("loop", strategy), made("loop", "ddp")
    same(run, strategy, plain)
    assert [e["values"]["where"] for e in run.events("log")] == [0, 10, 20, 30]
    assert run.result == dict(answer=pytest.approx(plain.metrics.loss.tolist()[-1], rel=1e-4), ranks_seen=2)


def test_plain_cell_runs_on_every_rank(tmp_path, given):
    run = go("# %%shardtrain\nsquares = [rank ** 2 for _ in range(2)]\nprint('hello from', rank)", "ddp", given, tmp_path, out=["squares"])
    assert run.result == dict(squares=[0, 0])
    assert "hello from 1" in run.logs(1)


@pytest.mark.parametrize("cell,line,says,kw", [
    ("# %%shardtrain\nx = 1\n\ny = x / 0\n", 4, "division by zero", {}),
    ("# %%shardtrain\nimport transformers\nargs = transformers.TrainingArguments(fsdp=True)\n", 3, "the strategy option decides it", dict(model="tiny", dataset="demo")),
    (MODEL + "accelerator.state\n", None, "never prepared a model", {}),
], ids=["python error", "sharding in args", "nothing prepared"])
def test_errors_name_the_line(tmp_path, given, cell, line, says, kw):
    with pytest.raises(AssertionError, match=says) as e: go(cell, "ddp", given, tmp_path, **kw)
    if line: assert f'"cell_line": {line}' in str(e.value)


def test_a_rank_that_shards_nothing_is_a_failure(tmp_path, given):
    "Undoing what makes FSDP real must fail the run, although the losses would be right."
    cheat = "# %%shardtrain\nfrom accelerate import PartialState\nfrom accelerate.utils import DistributedType\nPartialState._shared_state['distributed_type'] = DistributedType.MULTI_CPU\n"
    with pytest.raises(AssertionError, match="the strategy is not in force: Accelerate has set up .*MULTI_CPU, not FSDP"):
        go(cheat + (MODEL + ROWS).removeprefix("# %%shardtrain\n"), "fsdp", given, tmp_path, model="tiny", max_steps=2, micro_batch=2, grad_accum=1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_of_one_s_own(made, strategy):
    "A loop over a plain module, not one of transformers: its units and buckets are worked out on the ranks."
    run = made("own", strategy)
    same(run, strategy, made("own", "ddp"))
    settings = run.events("effective")[0]["settings"]
    if strategy == "zero3": assert settings["zero_optimization"]["reduce_bucket_size"] < 10_000
    if strategy == "fsdp": assert settings["transformer_layer_cls_to_wrap"] == ["Block"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_parameters_come_back(tmp_path, given, made, strategy):
    "A sharded parameter is gathered for `--out`, on all ranks; logging on rank 0 alone waits for nobody."
    cell = MODEL + LOOP.replace("    log(loss=loss, where=i * 10)", "    if rank == 0: log(loss=loss)") + "weight = next(p for n, p in model.named_parameters() if 'embed' in n)\n"
    run = go(cell, strategy, given, tmp_path, out=["weight"])
    assert list(run.result["weight"].shape) == [264, 64]
    same(run, strategy, made("loop", "ddp"))


def test_the_cell_s_eval_rows_are_used(tmp_path, given):
    cell = MODEL + ROWS + "eval_dataset = datasets.Dataset.from_list([dict(prompt='a b', completion='c'), dict(prompt='d', completion='e f')])\n"
    run = go(cell, "ddp", given, tmp_path, model="tiny", max_steps=4, micro_batch=2, grad_accum=1, eval_steps=2)
    assert [e["step"] for e in run.events("eval")] == [2, 4]


SLOW_LOOP = """
import time, torch
model = torch.nn.Linear(8, 8)
model, opt = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
for _ in range(60):
    loss = model(torch.ones(2, 8, device=device)).pow(2).mean()
    accelerator.backward(loss)
    time.sleep(1.1)
    opt.step(); opt.zero_grad()
    log(loss=loss)
"""


def test_a_stop_takes_no_more_than_the_step_that_is_going_on(tmp_path, monkeypatch):
    "Between steps of a second or more the ranks wait for the answer whether to stop"
    import shardnb
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    run = shardnb.train(shardnb.Recipe(strategy="ddp", nproc=2), cell=SLOW_LOOP)
    try:
        within(120)(lambda: len(run.metrics) >= 3)
        assert run.stop().wait(60).state == "stopped"
        asked = run.rundir.stop_requested()["t"]
        assert not [e["step"] for e in run.events("step") if e["t"] - e["step_s"] > asked + .5]   # none began later
    finally: run.kill()


def test_objects_that_are_not_what_their_names_say(tmp_path):
    "One clear error in place of an attribute that an int doesn't have"
    from shardnb.plan.recipe import Recipe
    with pytest.raises(AssertionError, match="model: is of the type int in the cell"):
        ranks.train(Recipe(strategy="ddp", nproc=1), "model = 3\ntrain_dataset = [dict(text='a b c')]\n", home=tmp_path)


def test_a_model_from_a_config_and_rows_of_numbers_need_no_tokenizer_where_transformers_trains(given, tmp_path):
    from shardnb.plan.recipe import Recipe
    alone = (MODEL + ROWS).replace("list(range(3, 13 + n % 20))", "list(range(3, 13))") # of one length: nothing has to be padded
    with pytest.raises(AssertionError, match="tokenizer: is needed and not given.*config"): ranks.train(Recipe(strategy="ddp", nproc=2, max_steps=2), alone, given, home=tmp_path)
    args = "from transformers import TrainingArguments\nargs = TrainingArguments(per_device_train_batch_size=2, max_steps=2, learning_rate=lr, logging_steps=1)\n"
    run = ranks.train(Recipe(strategy="ddp", nproc=2), alone + args, given, home=tmp_path)
    assert list(run.metrics.step) == [1, 2]
