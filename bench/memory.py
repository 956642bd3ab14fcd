"""Predicted against measured memory, on real runs of CPU ranks.

Every run trains a few steps under one strategy, with states of 50 MiB and more. Its prediction was written to `plan.json` before the ranks started; the measured peak is the
highest that any rank's allocator held in a step, from the third on, beyond what it held before the model was built. Under an offload, device and host
are compared together: on CPU ranks they are one memory, and what is on its way between them belongs to neither. States are compared at the end of backward, every rank.
Printed: predicted and measured device peak, their difference, that of the states, and the share of memory that nobody could name at the marks. Worst rows last.

    python bench/memory.py [WORD ...]     only the runs whose line holds a word
"""
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

ENDS = {"forward": "after_forward", "backward": "after_backward", "step": "after_step"} # phase -> the mark at its end
LIMITS = dict(peak=.05, median=.02, states=.01, unnamed=.05)
BASE = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA = BASE | dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=640, intermediate_size=1728, num_hidden_layers=6, num_attention_heads=10, num_key_value_heads=5,
                    vocab_size=264, max_position_embeddings=2048, tie_word_embeddings=False)
SHAPES = {
    "deep llama": LLAMA,
    "wide vocabulary": LLAMA | dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, vocab_size=8000),
    "tied qwen2": LLAMA | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
                               num_key_value_heads=4, vocab_size=8000, tie_word_embeddings=True),
    "gpt2": BASE | dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", n_embd=512, n_inner=2048, n_layer=6, n_head=8, vocab_size=4000, n_positions=1024,
                        resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.),
    "neox": BASE | dict(architectures=["GPTNeoXForCausalLM"], model_type="gpt_neox", hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8,
                        vocab_size=4000, max_position_embeddings=1024, tie_word_embeddings=False),
}
ONE = dict(micro_batch=1, max_length=64)
LORA = dict(tuning="lora", lora_r=64)
RUNS = [
    ("deep llama", "ddp", ONE), ("deep llama", "zero1", ONE), ("deep llama", "zero2", ONE), ("deep llama", "zero3", ONE), ("deep llama", "fsdp", ONE), ("deep llama", "fsdp-grad-op", ONE),
    ("deep llama", "zero1+optim-cpu", ONE), ("deep llama", "zero2+optim-cpu", ONE), ("deep llama", "zero3+optim-cpu", ONE), ("deep llama", "zero3+optim-cpu+param-cpu", ONE), ("deep llama", "fsdp+param-cpu", ONE),
    ("deep llama", "ddp", ONE | dict(precision="bf16")), ("deep llama", "zero2", ONE | dict(precision="bf16")), ("deep llama", "zero3", ONE | dict(precision="bf16")), ("deep llama", "fsdp", ONE | dict(precision="bf16")),
    ("deep llama", "ddp", ONE | dict(grad_accum=2)), ("deep llama", "zero1", ONE | dict(grad_accum=2)), ("deep llama", "zero2", ONE | dict(grad_accum=2)), ("deep llama", "fsdp", ONE | dict(grad_accum=2)),
    ("deep llama", "ddp", dict(micro_batch=2, nproc=1)), ("deep llama", "zero3", ONE | dict(nproc=4)), ("deep llama", "fsdp", ONE | dict(nproc=4)), ("deep llama", "zero1", ONE | dict(nproc=4)),
    ("deep llama", "zero3", dict(micro_batch=4, activation_checkpointing=True, precision="bf16")), ("deep llama", "fsdp", dict(micro_batch=4, activation_checkpointing=True, precision="bf16")),
    ("deep llama", "zero2", dict(micro_batch=4, activation_checkpointing=True)), ("deep llama", "ddp", dict(attn_implementation="eager", micro_batch=2)),
    ("wide vocabulary", "ddp", {}), ("wide vocabulary", "zero2", {}), ("wide vocabulary", "zero3", {}), ("wide vocabulary", "fsdp", {}), ("wide vocabulary", "zero3", dict(packing=True)),
    ("tied qwen2", "ddp", ONE), ("tied qwen2", "zero3", ONE), ("tied qwen2", "fsdp", ONE), ("gpt2", "zero3", ONE), ("gpt2", "fsdp", ONE), ("neox", "ddp", ONE), ("neox", "fsdp", ONE),
    ("wide vocabulary", "ddp", LORA), ("wide vocabulary", "zero3", LORA), ("wide vocabulary", "fsdp", LORA | dict(precision="bf16")), ("wide vocabulary", "zero2", LORA | dict(activation_checkpointing=True)),
    ("demo", "zero3", dict(micro_batch=1, tuning="lora")), ("demo", "fsdp", dict(micro_batch=1, max_length=128)),
]


def rows(home, batch):
    "Rows of the full length; where several make a batch, every other one is a token shorter, so that there is padding to mask."
    path = Path(home, f"rows{batch > 1}.jsonl")
    if not path.exists(): path.write_text("".join(json.dumps({"text": "word " * 400 if batch == 1 or i % 3 else "word " * 40}) + "\n" for i in range(96)))
    return str(path)


def measure(home, shape, strategy, options):
    "One run: its line of figures."
    from ranks import model_folder, train

    from shardnb.plan.memory import STATES, state_bytes
    from shardnb.plan.recipe import Recipe
    o = dict(nproc=2, micro_batch=2, grad_accum=1, max_length=256, precision="fp32", max_steps=5) | options
    run = train(Recipe(model="demo" if shape == "demo" else model_folder(Path(home, shape.replace(" ", "-")), SHAPES[shape]), dataset=rows(home, o["micro_batch"]), strategy=strategy, **o), home=home)
    plan, m = run.plan, run.memory
    m = m[m.step >= 3]
    predicted, peaks = run.predicted, run.peaks()
    want_peak = predicted.peak + predicted.host_peak
    host = m[m.place == "host"].groupby(["rank", "step", "moment"]).bytes.sum() # what the probe takes off a phase's peak: what lies on the host when it ends
    total = max(p.bytes + host.get((p.rank, p.step, ENDS[p.phase]), 0) for p in peaks[peaks.step >= 3].itertuples())
    back = m[(m.moment == "after_backward") & (m.step == m.step.max())]
    from shardnb.plan.strategy import weights_dtype
    recipe = run.recipe
    held = back[back.category.isin(STATES)].groupby("rank").bytes.sum()
    def want(rank):
        b = state_bytes(plan["facts"], strategy, plan["settings"], recipe.precision, plan["world_size"], weights_dtype(recipe), moment="after_backward", rank=rank)
        return sum(b[c] for c in STATES)
    states = max(abs(n / want(rank) - 1) for rank, n in held.items())
    unnamed = (m[(m.category == "temp") & m.moment.isin(["after_backward", "after_step"])].groupby(["rank", "step", "moment"]).bytes.sum() / total).max()
    return dict(shape=shape, strategy=strategy, options=options, predicted=want_peak, at=predicted.peak_at, measured=int(total), error=want_peak / total - 1,
                states=float(states), unnamed=float(unnamed) if unnamed == unnamed else 0.)


def line(r):
    what = ", ".join(f"{k} {v}" for k, v in r["options"].items())
    return (f"{r['shape']:15} {r['strategy']:25} {what[:62]:62} predicted {r['predicted'] / 2**20:7.1f} MiB ({r['at']:8}) measured {r['measured'] / 2**20:7.1f} "
            f"{r['error']:+7.2%}  states {r['states']:6.2%}  unnamed {r['unnamed']:6.2%}")


if __name__ == "__main__":
    words, out = sys.argv[1:], []
    with tempfile.TemporaryDirectory() as home:
        for run in RUNS:
            if words and not any(w in f"{run[0]} {run[1]} {run[2]}" for w in words): continue
            out.append(measure(home, *run))
            print(line(out[-1]), flush=True)
    errors = sorted(abs(r["error"]) for r in out)
    print(f"\n{len(out)} runs; device peak: median {errors[len(errors) // 2]:.2%}, worst {errors[-1]:.2%}; states: worst {max(r['states'] for r in out):.2%}; unnamed: worst {max(r['unnamed'] for r in out):.2%}\nworst rows:")
    for r in sorted(out, key=lambda r: -abs(r["error"]))[:4]: print(line(r))
    ok = errors[-1] <= LIMITS["peak"] and errors[len(errors) // 2] <= LIMITS["median"] and all(r["states"] <= LIMITS["states"] and r["unnamed"] <= LIMITS["unnamed"] for r in out)
    sys.exit(not ok)
