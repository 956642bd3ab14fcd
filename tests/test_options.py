"""What the recipe's options do in a real run: precision, adapters, checkpointing, units, evaluation, saving, resuming."""
import pytest
import ranks
from marks import slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return ranks.rows_file(tmp_path_factory.mktemp("rows"), ranks.counting(i % 9 for i in range(24)))


def go(*args, **kw): return ranks.tiny(*args, **dict(max_steps=4) | kw)
def fell(run): assert run.metrics.loss.iloc[-1] < run.metrics.loss.iloc[0]


@pytest.mark.parametrize("strategy", (slow("ddp"), slow("zero2"), slow("zero3"), "fsdp"))
def test_bf16_pure_keeps_no_fp32_copy(rows, tmp_path, strategy):
    run = go(rows, tmp_path, strategy, precision="bf16-pure")
    fell(run)
    m = run.memory.query("rank == 0 and moment == 'after_backward' and step == 2").groupby("category").bytes.sum()
    assert m.optimizer <= 3.1 * m.grads # two bf16 moments, and at most a bf16 master beside bf16 gradients
    assert run.events("effective")[0]["param_dtypes"] == ["bfloat16"]


@pytest.mark.parametrize("strategy", (slow("ddp"), slow("zero2"), "zero3", slow("fsdp")))
def test_norms_in_fp32(rows, tmp_path, strategy):
    run = go(rows, tmp_path, strategy, precision="bf16", fp32_norms=True)
    fell(run)
    assert run.events("effective")[0]["norms"] == "float32"


def test_a_kept_unit_stays_gathered(rows, tmp_path):
    held = {}
    for keep in ([], ["embed_tokens"]):
        run = go(rows, tmp_path, "fsdp", fsdp_keep=keep)
        held[bool(keep)] = run.memory.query("rank == 0 and moment == 'after_forward' and category == 'gathered' and step == 2").bytes.sum()
    assert held[True] - held[False] == 264 * 64 * 4 # the embedding


@pytest.mark.parametrize("strategy", (slow("ddp"), slow("zero3"), "fsdp"))
def test_checkpointing_changes_memory_not_losses(tmp_path, strategy):
    rows = ranks.rows_file(tmp_path, [dict(prompt=f"count {i}", completion=" ".join(map(str, range(100)))) for i in range(24)]) # long enough that activations outweigh what checkpointing keeps
    plain, less = (go(rows, tmp_path, strategy, activation_checkpointing=on, max_length=256, micro_batch=4) for on in (False, True))
    held = [r.memory.query("moment == 'after_forward' and category == 'activations' and step == 3").groupby("rank").bytes.sum() for r in (plain, less)]
    assert (held[1] < .9 * held[0]).all(), held
    assert less.metrics.loss.tolist() == pytest.approx(plain.metrics.loss.tolist(), rel=1e-5)


@pytest.mark.parametrize("strategy,checkpointing", [slow("zero3", True), slow("zero3", False), ("fsdp", True), slow("fsdp", False)])
def test_lora_trains_and_saves_a_full_adapter(rows, tmp_path, strategy, checkpointing):
    from safetensors.torch import load_file
    run = go(rows, tmp_path, strategy, tuning="lora", lora_r=4, activation_checkpointing=checkpointing)
    fell(run)
    saved = load_file(run.rundir.checkpoints_path / "final" / "adapter_model.safetensors")
    assert len(saved) == 2 * 7 * 4 and all(t.numel() for t in saved.values())
    assert any(float(t.abs().sum()) > 0 for n, t in saved.items() if "lora_B" in n)


@pytest.mark.parametrize("strategy", (slow("ddp"), "fsdp"))
def test_qlora(rows, tmp_path, strategy): fell(go(rows, tmp_path, strategy, tuning="qlora", lora_r=4, eval_share=.2, eval_steps=2))


@pytest.mark.parametrize("strategy", (slow("zero1"), slow("zero3"), "fsdp"))
def test_saved_model_is_plain_and_resume_goes_on_exactly(rows, tmp_path, strategy):
    import torch
    from transformers import AutoModelForCausalLM
    whole = go(rows, tmp_path, strategy, max_steps=6, save_steps=4, eval_share=.2, eval_steps=3)
    assert len(whole.events("eval")) == 2
    checkpoint = next(e["path"] for e in whole.events("checkpoint") if e["path"].endswith("checkpoint-4"))
    rest = go(rows, tmp_path, strategy, max_steps=6, eval_share=.2, eval_steps=3, plan=dict(resume_from=checkpoint))
    assert rest.metrics.loss.tolist() == whole.metrics.loss.tolist()[4:]
    assert any("the final model is saved in float32" in e["message"] for e in whole.events("note"))
    model = AutoModelForCausalLM.from_pretrained(whole.rundir.checkpoints_path / "final")
    assert sum(p.numel() for p in model.parameters()) == whole.events("effective")[0]["elements"]
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("strategy", (slow("ddp"), slow("zero3"), "fsdp"))
def test_a_checkpoint_of_nan_takes_nobody_s_place(rows, tmp_path, strategy):
    "The first step throws the weights away, the loss of the second is NaN (and DDP's and FSDP's weights after it): what can be gone on from is the checkpoint before that"
    run = go(rows, tmp_path, strategy, learning_rate=1e30, lr_scheduler_type="constant", save_steps=1, save_total_limit=1)
    assert [c.step for c in run.checkpoints if c.path.name != "final"] == [1]
    said = [e for e in run.events("warning") if e["topic"] == "nan" and "was not saved" in e["message"]]
    assert len(said) == 1 and "newest complete checkpoint is that of step 1" in said[0]["message"] and "learning_rate" in said[0]["fix"]
