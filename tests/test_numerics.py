"""The same seed and data give the same losses under every strategy and number of ranks as one process and a plain loop."""
import pytest
import ranks
from marks import slow

STEPS = 20
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "zero3+optim-cpu", "fsdp", "fsdp-grad-op")
OFTEN = ("ddp", "zero2", "zero3", "zero3+optim-cpu", "fsdp")
SHAPES = {
    "llama": ranks.LLAMA | dict(num_hidden_layers=3),
    "qwen2": ranks.LLAMA | dict(num_hidden_layers=3, architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True),
}


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    "A folder with two tiny models and ragged rows: 43 of them, so that no number of ranks divides the last batch."
    top = tmp_path_factory.mktemp("numerics")
    for name, shape in SHAPES.items(): ranks.model_folder(top / name, shape)
    ranks.rows_file(top, ranks.ragged(43))
    return top


def recipe(work, shape="llama", **kw):
    from shardnb.plan.recipe import Recipe
    base = dict(model=str(work / shape), dataset=str(work / "rows.jsonl"), precision="fp32", global_batch=8, max_steps=STEPS, learning_rate=1e-3, warmup_steps=2,
                weight_decay=.01, lr_scheduler_type="linear", max_length=96, seed=3)
    return Recipe(**{**base, **kw})


def plain_losses(work, shape="llama", steps=STEPS):
    "One process, no Trainer, no Accelerate: the rows of each step at once, one mean over their trained tokens."
    import torch
    from transformers import get_linear_schedule_with_warmup

    from shardnb.run import data, models
    r = recipe(work, shape).resolve(1, False, False)
    tok = models.load_tokenizer(r)
    model = models.load_model(r)
    rows, _ = data.load_rows(r, tok)
    norm = [p for n, p in model.named_parameters() if "norm" in n or n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if not ("norm" in n or n.endswith("bias"))]
    opt = torch.optim.AdamW([dict(params=rest, weight_decay=r.weight_decay), dict(params=norm, weight_decay=0.)], lr=r.learning_rate)
    sched = get_linear_schedule_with_warmup(opt, r.warmup_steps, r.max_steps)
    losses, epoch = [], 0
    while len(losses) < steps:
        order = data.order_indices(len(rows), 0, r.seed, epoch)
        for i in range(0, len(order), 8):
            if len(losses) == steps: break
            opt.zero_grad()
            total, count = 0., 0
            for j in order[i : i + 8]:
                ids, labels = torch.tensor([rows[j]["input_ids"]]), torch.tensor([rows[j]["labels"]])
                logits = model(input_ids=ids).logits[:, :-1].float()
                total = total + torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
                count += int(labels[:, 1:].ne(-100).sum())
            loss = total / count
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), r.max_grad_norm)
            opt.step()
            sched.step()
            losses.append(loss.item())
        epoch += 1
    return losses


@pytest.fixture(scope="session")
def baseline(work): return {shape: plain_losses(work, shape) for shape in SHAPES}


def check(run, want, rel):
    got = run.metrics.loss.tolist()
    assert len(got) == len(want)
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
    assert worst <= rel, f"relative difference {worst:.2e} > {rel:g}: {got} against {want}"
    return worst


def case(work, tmp_path, baseline, strategy, nproc, shape="llama", rel=1e-4, **kw):
    micro = {1: 2, 2: 2, 4: 1}[nproc]
    run = ranks.train(recipe(work, shape, strategy=strategy, nproc=nproc, micro_batch=micro, **kw), home=tmp_path)
    worst = check(run, baseline[shape], rel)
    print(f"{shape:6} {strategy:16} {nproc} ranks: worst relative difference {worst:.1e}")


@pytest.mark.parametrize("strategy", OFTEN)  # the others are in `test_all`
def test_two_ranks(work, tmp_path, baseline, strategy): case(work, tmp_path, baseline, strategy, 2)


@pytest.mark.parametrize("strategy,nproc", [("ddp", 1), ("fsdp", 1), slow("zero3", 4)])  # the others are in `test_all`
def test_one_and_four_ranks(work, tmp_path, baseline, strategy, nproc): case(work, tmp_path, baseline, strategy, nproc)


@pytest.mark.parametrize("strategy", (slow("zero2"), "zero3"))
def test_tied_embeddings(work, tmp_path, baseline, strategy): case(work, tmp_path, baseline, strategy, 2, "qwen2")


@pytest.mark.parametrize("strategy", ("ddp", slow("zero3")))
def test_bf16(work, tmp_path, baseline, strategy): case(work, tmp_path, baseline, strategy, 2, rel=2e-2, precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("nproc", (1, 2, 4))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all(work, tmp_path, baseline, strategy, shape, nproc): case(work, tmp_path, baseline, strategy, nproc, shape)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", (1, 2, 4))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_bf16(work, tmp_path, baseline, strategy, nproc): case(work, tmp_path, baseline, strategy, nproc, rel=2e-2, precision="bf16")
