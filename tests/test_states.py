"""Bytes of params, grads and optimizer, measured in every rank at the end of backward, against each engine's closed form."""
import pytest
import ranks
from marks import slow

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "zero3+optim-cpu")
STATES = ("params", "grads", "optimizer")


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    "A Llama with 9.0M parameters: 10 bytes each under ZeRO-3 on two ranks in fp32, so at least 85 MiB of states everywhere. 1003 rows of vocabulary don't divide."
    top = tmp_path_factory.mktemp("wide")
    ranks.model_folder(top, ranks.LLAMA | dict(hidden_size=520, intermediate_size=1400, num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=1003))
    ranks.rows_file(top, ranks.counting(i % 9 for i in range(16)))
    return top


def measured(run, rank, step, moment="after_backward"):
    m = run.memory
    m = m[(m["rank"] == rank) & (m.step == step) & (m.moment == moment)]
    return m.groupby("category").bytes.sum().to_dict()


def check(wide, home, strategy, nproc=2, **kw):
    from shardnb.plan.recipe import Recipe
    run = ranks.train(Recipe(**{**dict(model=str(wide), dataset=str(wide / "rows.jsonl"), strategy=strategy, nproc=nproc, micro_batch=1, grad_accum=1, max_steps=3, max_length=48,
                                       precision="fp32", learning_rate=1e-4), **kw}), home=home)
    from shardnb.plan.memory import state_bytes
    from shardnb.run.models import weights_dtype
    r, p = run.recipe, run.plan
    out = []
    for rank in range(nproc):
        got, want = measured(run, rank, 2), state_bytes(p["facts"], p["strategy"], p["settings"], r.precision, nproc, weights_dtype(r), moment="after_backward", rank=rank)
        for c in STATES:
            out.append((strategy, nproc, rank, c, got[c], want[c], got[c] / want[c] - 1))
    total = sum(want[c] for c in STATES)
    print(f"{strategy:16} {nproc} ranks, states {total / 2**20:6.1f} MiB: " + ", ".join(f"{c} {g / 2**20:.2f} of {w / 2**20:.2f} MiB ({e:+.2%})" for _, _, r, c, g, w, e in out if r == 0))
    off = [o for o in out if abs(o[-1]) > .01]
    assert not off, off
    assert total >= 50 * 2**20 or kw.get("tuning") == "lora"
    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_fp32(wide, tmp_path, strategy):
    run = check(wide, tmp_path, strategy)
    gathered = run.memory.query("category == 'gathered'").bytes.max()
    if strategy.startswith(("zero3", "fsdp")): assert gathered > 0
    else: assert not gathered > 0
    if "optim-cpu" in strategy: assert set(run.memory.query("category == 'optimizer'").place) == {"host"}


@pytest.mark.parametrize("strategy", (slow("zero2"), "zero3", slow("fsdp")))
def test_full_bf16(wide, tmp_path, strategy): check(wide, tmp_path, strategy, precision="bf16")


@pytest.mark.parametrize("strategy", ("ddp", "zero3", "fsdp"))
def test_lora(wide, tmp_path, strategy): check(wide, tmp_path, strategy, tuning="lora", lora_r=8)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", (1, 4))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks(wide, tmp_path, strategy, nproc): check(wide, tmp_path, strategy, nproc)


@pytest.mark.parametrize("strategy,precision", [("zero2+optim-cpu", "bf16"), slow("zero3+optim-cpu+param-cpu", "fp32"), ("fsdp+param-cpu", "fp32"), slow("zero3+optim-cpu", "bf16")])
def test_offload(wide, tmp_path, strategy, precision): check(wide, tmp_path, strategy, precision=precision)
