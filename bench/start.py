"""From Shift-Enter to the end of the first optimizer step, as a ratio to the same job as a plain torchrun script, both on two ranks, interleaved.

Warm: the pool has its imports, and a run of this kind was started before. Cold: no process of shardnb lives, and nothing about the model is kept.

    python bench/start.py [REPEATS [STRATEGY ...]]
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
STRATEGIES, REPEATS, COLD_REPEATS, WARM_LIMIT, COLD_LIMIT = ("ddp", "fsdp", "zero3"), 10, 3, .20, 1.10
SHAPE = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, vocab_size=264,
             max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MAKE = """import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(0)
AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).save_pretrained(sys.argv[1])"""


def submit(strategy, model, rows, began=None):
    "Seconds from the call (or from `began`) to the end of the first step, under shardnb."
    import shardnb
    began = float(began or time.time())
    run = shardnb.train(shardnb.Recipe(model=model, dataset=rows, strategy=strategy, nproc=2, micro_batch=1, grad_accum=1, max_length=256, max_steps=2, precision="fp32"), wait=True)
    return run.metrics.time[0] - began


def plain(strategy, model, rows, home):
    "The same of the plain script, from the start of torchrun."
    out, began = Path(home, "first"), time.time()
    env = {k: v for k, v in os.environ.items() if not k.startswith("SHARDNB")} | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(ROOT / "bench/plain_train.py"),
                           strategy, model, rows, str(out)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode: sys.exit(done.stdout[-3000:])
    return float(out.read_text()) - began


def cold(strategy, model, rows, home):
    "The same under shardnb in a new process, with a pool and a cache of its own, none of which exists yet."
    with tempfile.TemporaryDirectory(prefix="s") as top:
        env = os.environ | {"XDG_RUNTIME_DIR": top, "SHARDNB_CACHE": str(Path(home, "cache", str(time.time_ns()))), "SHARDNB_HOME": home}
        began = time.time()
        done = subprocess.run([sys.executable, __file__, "--cold", strategy, model, rows, str(began)], env=env, capture_output=True, text=True)
        if done.returncode: sys.exit(done.stderr[-3000:])
        subprocess.run([sys.executable, "-c", "from shardnb.run.pool import dismiss; dismiss()"], env=env, check=True)
    return float(done.stdout.split()[-1])


def compare(strategy, model, rows, home, repeats):
    "Print and return the ratios (warm, cold)."
    submit(strategy, model, rows)
    submit(strategy, model, rows)
    pairs = [(submit(strategy, model, rows), plain(strategy, model, rows, home)) for _ in range(repeats)]
    colds = [(cold(strategy, model, rows, home), plain(strategy, model, rows, home)) for _ in range(min(repeats, COLD_REPEATS))]
    w, p = (statistics.median(x) for x in zip(*pairs, strict=True))
    c, q = (statistics.median(x) for x in zip(*colds, strict=True))
    print(f"{strategy:6} plain {p:.2f} s, warm {w:.2f} s: {w / p:.2f} (limit {WARM_LIMIT:.2f}); plain {q:.2f} s, cold {c:.2f} s: {c / q:.2f} (limit {COLD_LIMIT:.2f})", flush=True)
    return w / p, c / q


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cold"]:
        print(submit(*sys.argv[2:]))
        sys.exit()
    from ranks import model_folder
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS
    with tempfile.TemporaryDirectory() as home:
        os.environ["SHARDNB_HOME"] = home
        model, rows = model_folder(Path(home, "model"), SHAPE), Path(home, "rows.jsonl")
        subprocess.run([sys.executable, "-c", MAKE, model], check=True, capture_output=True)
        rows.write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"What is {i} + {i}?"}, {"role": "assistant", "content": f"{i} + {i} is {2 * i}."}]}) + "\n" for i in range(64)))
        found = [compare(s, model, str(rows), home, repeats) for s in sys.argv[2:] or STRATEGIES]
    sys.exit(any(w > WARM_LIMIT or c > COLD_LIMIT for w, c in found))
