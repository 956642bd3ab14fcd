"""A checkpoint of one strategy and number of ranks, gone on from under another: the losses are those of a run that nobody interrupted.

What decides them is in the checkpoint: weights, both moments of Adam, the steps that it counts, the schedule and the place in the data. Without any one of these the losses differ in the second or third digit.
"""
import enum
import json
import pickle

import pytest
import ranks

from shardnb.plan.recipe import Recipe

CONFIG = ranks.LLAMA | dict(vocab_size=512, intermediate_size=136, attention_dropout=0., tie_word_embeddings=True)
AT, STEPS = 4, 8 # the checkpoint is of the first step of the second epoch
LORA = dict(tuning="lora", lora_r=4, lora_dropout=0.)
PAIRS = [("ddp", 1, "zero1", 2), ("ddp", 2, "zero3", 4), ("ddp", 4, "fsdp", 2), ("zero1", 2, "zero1", 4), ("zero1", 4, "ddp", 1), ("zero2", 2, "fsdp", 4), ("zero2", 4, "zero3+optim-cpu", 2),
         ("zero3", 2, "zero3", 4), ("zero3", 4, "zero2", 1), ("fsdp", 2, "zero3", 1), ("fsdp", 4, "ddp", 2), ("zero3+optim-cpu", 2, "fsdp", 1)]
LORA_PAIRS = [("zero3", 2, "ddp", 1), ("ddp", 2, "fsdp", 4), ("fsdp", 4, "zero3", 2), ("zero2", 2, "zero3+optim-cpu", 4)]


@pytest.fixture(scope="module")
def top(tmp_path_factory):
    "A model without dropout, and 21 rows: 3 steps of 8 in an epoch, the last one filled up"
    top = tmp_path_factory.mktemp("anywhere")
    ranks.model_folder(top / "model", CONFIG)
    ranks.rows_file(top, ranks.counting(range(1, 22)))
    return top


def recipe(top, strategy, nproc, **kw):
    micro = 2 if nproc == 2 else 1
    return Recipe(**dict(model=str(top / "model"), dataset=str(top / "rows.jsonl"), strategy=strategy, nproc=nproc, max_steps=STEPS, micro_batch=micro, grad_accum=8 // nproc // micro, max_length=64,
                         precision="fp32", learning_rate=5e-3, weight_decay=.1, warmup_steps=2, save_total_limit=5) | kw)


@pytest.fixture(scope="module")
def whole(top):
    "Runs that nobody interrupts, each made once"
    known = {}
    def of(strategy, nproc, **kw):
        key = json.dumps([strategy, nproc, kw], sort_keys=True)
        if key not in known: known[key] = ranks.train(recipe(top, strategy, nproc, save_steps=AT, **kw), home=top / "home", timeout=300)
        return known[key]
    return of


def gone_on(top, run, strategy, nproc, **kw):
    "Go on from the checkpoint of step `AT`; returns (run, largest difference of a loss relative to the uninterrupted run's)"
    from_ = next(c for c in run.checkpoints if c.step == AT)
    rest = ranks.train(recipe(top, strategy, nproc, **kw), home=top / "home", timeout=300, resume_from=str(from_.path))
    want, got = run.metrics.loss.tolist()[AT:], rest.metrics.loss.tolist()
    assert rest.metrics.step.tolist() == list(range(AT + 1, STEPS + 1)) and rest.metrics.lr.tolist() == pytest.approx(run.metrics.lr.tolist()[AT:], rel=1e-9)
    return rest, max(abs(g - w) / w for g, w in zip(got, want, strict=True))


QUICK = [("zero2", 2, "fsdp", 1, {}), ("ddp", 1, "zero3", 2, {}), ("fsdp", 2, "zero1", 1, LORA)]


@pytest.mark.parametrize("old, n, new, m, kw", QUICK, ids=[f"{a}-{n}-{b}-{m}{'-lora' if kw else ''}" for a, n, b, m, kw in QUICK])
def test_another_strategy_and_another_number_of_ranks_go_on(top, whole, old, n, new, m, kw):
    rest, off = gone_on(top, whole(old, n, **kw), new, m, **kw)
    print(f"\n{old} on {n} -> {new} on {m}: {off:.1e}")
    assert off < 1e-4
    assert any(f"is of {old} on {n} rank" in e["message"] for e in rest.events("note"))


@pytest.mark.slow
@pytest.mark.parametrize("old, n, new, m, kw", [*((*p, {}) for p in PAIRS), *((*p, LORA) for p in LORA_PAIRS)], ids=lambda v: str(v) if not isinstance(v, dict) else "lora" if v else "full")
def test_every_pair(top, whole, old, n, new, m, kw):
    rest, off = gone_on(top, whole(old, n, **kw), new, m, **kw)
    print(f"\n{old} on {n} -> {new} on {m}, {'lora' if kw else 'full'}: {off:.1e}")
    assert off < 1e-4


@pytest.mark.slow
def test_the_losses_would_tell(top, whole, monkeypatch):
    "Without moments, or with the steps counted anew, they are far off: the pairs above prove something"
    from shardnb.run import transfer
    own = transfer._state_of
    monkeypatch.setattr(transfer, "_state_of", lambda *args: {})
    _, bare = gone_on(top, whole("ddp", 1), "zero3", 2)
    monkeypatch.setattr(transfer, "_state_of", lambda *args: own(*args) | {"step": __import__("torch").tensor(0.)})
    _, anew = gone_on(top, whole("ddp", 1), "zero3", 2)
    print(f"\nwithout moments {bare:.1e}, with steps counted anew {anew:.1e}")
    assert bare > 1e-3 and anew > 1e-3


WHOLE = dict(fsdp_config=dict(state_dict_type="FULL_STATE_DICT"))
QLORA = dict(tuning="qlora", lora_r=4, lora_dropout=0.)
OTHERS = [("zero2", 2, {}, "zero3", 1, {}, dict(precision="bf16"), 1e-3), ("fsdp", 2, WHOLE, "zero1", 1, {}, {}, 1e-4), ("ddp", 2, {}, "fsdp", 1, WHOLE, {}, 1e-4), ("ddp", 2, {}, "ddp", 1, {}, {}, 1e-4),
          ("fsdp", 2, {}, "fsdp-grad-op", 1, {}, {}, 1e-4), ("fsdp", 2, {}, "fsdp+param-cpu", 2, {}, {}, 1e-4), ("zero1", 2, {}, "fsdp+param-cpu", 1, {}, {}, 1e-4), ("zero3+optim-cpu+param-cpu", 2, {}, "zero2+optim-cpu", 1, {}, {}, 1e-4),
          ("zero3", 2, {}, "fsdp", 1, {}, dict(optim="sgd"), 1e-4), ("fsdp", 2, {}, "zero3", 1, {}, dict(optim="sgd"), 1e-4), ("zero2", 2, {}, "ddp", 1, {}, QLORA, 1e-4), ("fsdp", 2, {}, "zero3", 1, {}, QLORA, 1e-4),
          ("ddp", 1, {}, "zero2", 2, {}, dict(precision="bf16-pure"), 5e-2), ("fsdp", 2, {}, "fsdp", 1, {}, LORA, 1e-4), ("ddp", 2, {}, "ddp", 1, {}, LORA, 1e-4)]


@pytest.mark.slow
@pytest.mark.parametrize("old, n, was, new, m, now, kw, near", OTHERS, ids=[f"{a}-{n}-{b}-{m}-{i}" for i, (a, n, _, b, m, *_) in enumerate(OTHERS)])
def test_other_forms_precisions_and_optimizers(top, whole, old, n, was, new, m, now, kw, near):
    _, off = gone_on(top, whole(old, n, **was, **kw), new, m, **now, **kw)
    print(f"\n{old} on {n} {was} -> {new} on {m} {now}, {kw}: {off:.1e}")
    assert off < near


@pytest.mark.slow
def test_there_and_back_and_what_the_badges_say(top, monkeypatch):
    "From the notebook, with the real launcher: zero3 on 2 ranks, then fsdp on 1, then ddp on 2; each checkpoint is tried"
    import shardnb
    monkeypatch.setenv("SHARDNB_HOME", str(top / "there"))
    whole = shardnb.train(recipe(top, "zero3", 2, save_steps=2), wait=True)
    first = shardnb.train(recipe(top, "zero3", 2, save_steps=2, max_steps=2), wait=True)
    second = first.resume(strategy="fsdp", nproc=1, max_steps=4, wait=True)
    third = second.resume(strategy="ddp", nproc=2, max_steps=6, wait=True)
    assert (second.recipe.micro_batch, second.recipe.grad_accum, second.recipe.global_batch) == (2, 4, 8)
    got = [x for r in (first, second, third) for x in r.metrics.loss.tolist()]
    # the schedule is that of the length that each run was given
    assert got[:2] == pytest.approx(shardnb.train(recipe(top, "zero3", 2, max_steps=2), wait=True).metrics.loss.tolist(), rel=1e-6) and len(got) == 6
    assert [c.strategy for c in third.checkpoints] == ["ddp", "ddp"] and third.checkpoints[0].global_batch == 8
    for run, kinds in ((whole, ["model"] * 5), (second, [None, "model"]), (third, ["model", "model"])):
        for c, kind in zip(run.checkpoints, kinds, strict=True):
            found = c.test()
            assert (found["model"]["kind"], found["model"]["loads"], found["model"]["shardnb"]) == (kind, kind is not None, False), found
            assert (found["optimizer"] is None) == (c.path.name == "final") and not (found["optimizer"] or {}).get("problems"), found
            print(f"\n{c.strategy}: {c.badge}")
    assert "as a model" in whole.checkpoints._repr_html_() and "tried: loads (20 tensors)" in repr(whole.checkpoints)


CELL = ("from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(recipe.model))\n"
        "rows = [dict(input_ids=(t := [(i * j) % 500 for j in range(1, 9)]), labels=t, attention_mask=[1] * 8) for i in range(1, 13)]\n"
        "args = TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=ACCUM, max_steps=6, logging_steps=1, save_steps=2, eval_strategy='steps', eval_steps=2,\n"
        "    load_best_model_at_end=True, learning_rate=5e-3, warmup_steps=1)\n"
        "trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)\n")


@pytest.mark.slow
def test_a_trainer_of_the_cell(top):
    "It goes on when a step takes as many rows, also with a best model from before; else it says so"
    r = dict(model=str(top / "model"), precision="fp32")
    run = ranks.train(Recipe(strategy="zero2", nproc=2, **r), CELL.replace("ACCUM", "4 // world_size"), home=top / "home")
    from_ = str(next(c.path for c in run.checkpoints if c.step == 2))
    rest = ranks.train(Recipe(strategy="fsdp", nproc=1, **r), CELL.replace("ACCUM", "4 // world_size"), home=top / "home", resume_from=from_)
    assert rest.metrics.loss.tolist() == pytest.approx(run.metrics.loss.tolist()[2:], rel=1e-4)
    with pytest.raises(AssertionError, match="counted in steps of 4 rows, and 1 × 2 × 1 ranks are 2"):
        ranks.train(Recipe(strategy="fsdp", nproc=1, **r), CELL.replace("ACCUM", "2"), home=top / "home", resume_from=from_)


@pytest.mark.slow
def test_another_model_is_named(top, whole):
    from_ = next(c for c in whole("zero2", 2).checkpoints if c.step == AT)
    ranks.model_folder(top / "other", CONFIG | dict(intermediate_size=128))
    with pytest.raises(AssertionError, match=r"was made with another model: 6 of 20 parameters differ, such as model.layers.0.mlp.gate_proj.weight, \[136, 64\] there and \[128, 64\] here"):
        ranks.train(recipe(top, "fsdp", 1, model=str(top / "other")), home=top / "home", resume_from=str(from_.path))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ("zero3", "fsdp", "fsdp+param-cpu"))
def test_the_final_model_is_written_file_by_file(top, whole, monkeypatch, strategy):
    "No rank has all of it at any time, and it is the same model; when a file can't be written the ranks don't wait for each other"
    from safetensors.torch import load_file

    from shardnb.run import final
    monkeypatch.setattr(final, "FILE", 100_000)
    held, own = [], final.marks_of
    monkeypatch.setattr(final, "marks_of", lambda state: held.append(sum(t.nbytes for t in state.values())) or print(f"held {held[-1]}", flush=True) or own(state))
    run = ranks.train(recipe(top, strategy, 2, max_steps=3), home=top / "home")
    out = run.rundir.checkpoints_path / "final"
    got = {k: v for f in out.glob("*.safetensors") for k, v in load_file(f).items()}
    want = load_file(ranks.train(recipe(top, "ddp", 2, max_steps=3), home=top / "home").rundir.checkpoints_path / "final" / "model.safetensors")
    assert len([*out.glob("*.safetensors")]) > 3 and got.keys() == want.keys() and all((got[k] - want[k]).abs().max() < 1e-5 for k in want)
    sizes = [int(line.split()[1]) for line in run.logs().splitlines() if line.startswith("held ")]
    assert max(sizes) <= max(100_000, *(v.nbytes for v in want.values())) and sum(sizes) == sum(v.nbytes for v in want.values())
    found = run.checkpoints[-1].test()
    assert found["model"]["loads"] and found["model"]["tensors"] == len(want), found

    def full(*args, **kw): raise OSError(28, "No space left on device")
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(AssertionError, match="the final model was not saved: the disk of .* is full"): ranks.train(recipe(top, strategy, 2, max_steps=3), home=top / "home", timeout=60)


MOE = dict(model_type="mixtral", architectures=["MixtralForCausalLM"], vocab_size=512, hidden_size=64, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
           num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256, attention_dropout=0., tie_word_embeddings=False, router_aux_loss_coef=0.)


@pytest.mark.slow
def test_experts(top, whole):
    "Transformers saves them one by one and computes with all of a layer in one tensor; its Trainer (5.24) alone goes on under ddp with those of the beginning"
    model = ranks.model_folder(top / "experts", MOE)
    for old, n, new, m in (("ddp", 1, "ddp", 1), ("ddp", 1, "zero3", 2), ("fsdp", 2, "zero2", 1)):
        _, off = gone_on(top, whole(old, n, model=model), new, m, model=model)
        print(f"\nexperts, {old} on {n} -> {new} on {m}: {off:.1e}")
        assert off < 1e-4


class Old(enum.Enum):
    "Pickled as Python up to 3.11.3 pickles its enumerations, which DeepSpeed's files hold"
    ONE = 1
    def __reduce_ex__(self, proto): return getattr, (type(self), self.name)


class Attribute:
    "Asks for an attribute of a class when it is unpickled"
    def __init__(self, cls): self.cls = cls
    def __reduce_ex__(self, proto): return getattr, (self.cls, "__doc__")


def test_members_of_enumerations_are_read_and_nothing_else_is_looked_up(tmp_path):
    import torch

    from shardnb.run.source import _load
    torch.save(dict(stage=Old.ONE, t=torch.ones(2)), tmp_path / "x.pt")
    assert _load(tmp_path / "x.pt", [Old])["stage"] is Old.ONE
    for cls in (Old, Attribute):
        torch.save(Attribute(cls), tmp_path / "x.pt")
        with pytest.raises((pickle.UnpicklingError, KeyError)): _load(tmp_path / "x.pt", [Old, Attribute])
