"""Predicted against measured memory, on real runs of CPU ranks.

Every run trains a few steps under one strategy, with states of 50 MiB and more. Its prediction was written to `plan.json` before the ranks started; the measured peak is the
highest that any rank's allocator held in a step, from the fourth to the tenth, which is a deep one, beyond what it held before the model was built. Under an offload, device and host
are compared together: on CPU ranks they are one memory, and what is on its way between them belongs to neither. States are compared at the end of backward, every rank.
In one more step, which counts for nothing else, autograd's saved-tensor hooks count what a forward pass saves, gathered weights and other states excluded: that is what the probe's activations are compared with.
Activation checkpointing keeps a layer's arguments for itself, such as the cosines and sines of the positions, where no hook sees those that need no gradient: they are counted as a layer is called.
Taken off the measured side are what lies there unnamed when the forward pass begins (the probe can't tell it from activations when it ends: up to 1.3 MiB under zero3), and
the graph's own nodes, which are no tensors but memory all the same, at `NODE` bytes each.
Printed: predicted and measured device peak, their difference, that of the states and of the activations, and the share of memory that nobody could name at the marks. Worst rows last.

    python bench/memory.py [WORD ...]     only the runs whose line holds a word; a number, or 3-7, is a row's place in the list, from 0

With the variable MEMORY_ROWS, rows are kept in the file that it names, and those that are there aren't run again.
"""
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

ENDS = {"forward": "after_forward", "backward": "after_backward", "step": "after_step"} # phase -> the mark at its end
SETTLED, STEPS = 3, 10 # optimizer steps until libraries have their caches (oneDNN keeps 0.25 MiB of code for each shape of a product in bf16), and those until the last that counts; in one more, autograd's hooks count
LIMITS = dict(peak=.05, median=.02, states=.01, unnamed=.05, activations=.02)
NODE = 650 # bytes that a node of autograd's graph takes itself: 575 nodes of a Llama of four layers with adapters take 0.38 MiB when hooks put an empty tensor in place of each saved one
SMALL = 2**18 # bytes by which activations may differ in any case: a library keeps as much of its own for a new shape
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
ONE = dict(micro_batch=1, max_length=192)
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


def count_saved():
    "In the ranks that are forked from here: measure every step, and in the last one count what autograd saves."
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._pytree import tree_leaves

    from shardnb.run.engine import unwrap
    from shardnb.run.observer import Observer
    from shardnb.run.probe import count_bytes
    from shardnb.run.timeline import layers_of
    begins, ended, backwards = Observer.forward_begins, Observer.forward_ended, Observer.backward
    Observer.always = property(lambda self: True, lambda self, value: None)

    def begin(self):
        begins(self)
        if self.steps < STEPS or not self.adopted: return
        self.saved, self.before = {}, self.probe.now(computing=False)["device"].get("temp", 0)
        saved = self.saved
        def pack(t):
            known = set()
            count_bytes(self.probe.walk(), known)
            s = getattr(t, "_local_tensor", t).untyped_storage()
            if s.data_ptr() not in known: saved[s.data_ptr()] = (StorageWeakRef(s), s.nbytes())
            return t
        self.hooks = contextlib.ExitStack()
        self.hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        def called(layer, args, kw):
            for t in tree_leaves((args, kw)):
                if torch.is_tensor(t): pack(t)
        model = unwrap(self.engine.model)
        for m in layers_of(model) if model.is_gradient_checkpointing else (): self.hooks.callback(m.register_forward_pre_hook(called, with_kwargs=True).remove)

    def end(self, last=True):
        if self.steps < STEPS or not self.adopted: return ended(self, last)
        self.hooks.close()
        if self.engine.settings["engine"] == "deepspeed": # TRL's fused head asks a weight for it in the backward pass, and gets a plain tensor from autograd's hooks
            from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
            torch.Tensor.ds_status = ZeroParamStatus.AVAILABLE
        ended(self, last)
        if last: self.events.write("log", step=self.steps + 1, values={"saved": sum(n for ref, n in self.saved.values() if not ref.expired()), "before": self.before})

    def backward(self, run, loss=None):
        if self.steps >= STEPS and self.adopted:
            nodes, left = set(), [loss.grad_fn]
            while left:
                if (node := left.pop()) is None or node in nodes: continue
                nodes.add(node)
                left += [n for n, _ in node.next_functions]
            self.events.write("log", step=self.steps + 1, values={"nodes": len(nodes)})
            del nodes, node
        return backwards(self, run, loss)

    Observer.forward_begins, Observer.forward_ended, Observer.backward = begin, end, backward


def measure(home, shape, strategy, options):
    "One run: its line of figures."
    from ranks import model_folder, train

    from shardnb.plan.memory import STATES, state_bytes
    from shardnb.plan.recipe import Recipe
    o = dict(nproc=2, micro_batch=2, grad_accum=1, max_length=256, precision="fp32", max_steps=STEPS + 1) | options
    run = train(Recipe(model="demo" if shape == "demo" else model_folder(Path(home, shape.replace(" ", "-")), SHAPES[shape]), dataset=rows(home, o["micro_batch"]), strategy=strategy, **o), home=home, timeout=900)
    plan, m = run.plan, run.memory
    saved, before, nodes = ({e["rank"]: e["values"][k] for e in run.events("log") if k in e["values"]} for k in ("saved", "before", "nodes"))
    forward = m[(m.moment == "after_forward") & (m.step > STEPS) & (m.category == "activations")].groupby("rank").bytes.sum()
    activations, seen = max((((forward.get(rank, 0) - before[rank] - NODE * nodes[rank]) / n - 1, n) for rank, n in saved.items()), key=lambda x: abs(x[0]))
    m = m[(m.step > SETTLED) & (m.step <= STEPS)]
    predicted, peaks = run.predicted, run.peaks()
    want_peak = predicted.peak + predicted.host_peak
    host = m[m.place == "host"].groupby(["rank", "step", "moment"]).bytes.sum() # what the probe takes off a phase's peak: what lies on the host when it ends
    total = max(p.bytes + host.get((p.rank, p.step, ENDS[p.phase]), 0) for p in peaks[(peaks.step > SETTLED) & (peaks.step <= STEPS)].itertuples())
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
                states=float(states), activations=float(activations), saved=seen, unnamed=float(unnamed) if unnamed == unnamed else 0.)


def chosen(words):
    "The runs that the command line names; all of them if it names none."
    at = {int(i) for w in words if w.replace("-", "").isdigit() for a, *b in [w.split("-")] for i in range(int(a), int((b or [a])[0]) + 1)}
    words = [w for w in words if not w.replace("-", "").isdigit()]
    return [r for i, r in enumerate(RUNS) if i in at or any(w in f"{r[0]} {r[1]} {r[2]}" for w in words) or not (at or words)]


def line(r):
    what = ", ".join(f"{k} {v}" for k, v in r["options"].items())
    return (f"{r['shape']:15} {r['strategy']:25} {what[:62]:62} predicted {r['predicted'] / 2**20:7.1f} MiB ({r['at']:8}) measured {r['measured'] / 2**20:7.1f} "
            f"{r['error']:+7.2%}  states {r['states']:6.2%}  activations {r['activations']:+7.2%} of {r['saved'] / 2**20:5.1f} MiB  unnamed {r['unnamed']:6.2%}")


if __name__ == "__main__":
    kept = Path(os.environ.get("MEMORY_ROWS") or os.devnull)
    known, out = [json.loads(x) for x in (kept.read_text() if kept.is_file() else "").splitlines()], []
    with tempfile.TemporaryDirectory() as home:
        count_saved()
        for run in chosen(sys.argv[1:]):
            row = next((r for r in known if (r["shape"], r["strategy"], r["options"]) == run), None)
            if row is None:
                row = measure(home, *run)
                with kept.open("a") as f: f.write(json.dumps(row) + "\n")
            out.append(row)
            print(line(row), flush=True)
    errors, far = sorted(abs(r["error"]) for r in out), [abs(r["activations"]) for r in out if abs(r["activations"]) * r["saved"] > SMALL]
    print(f"\n{len(out)} runs; device peak: median {errors[len(errors) // 2]:.2%}, worst {errors[-1]:.2%}; states: worst {max(r['states'] for r in out):.2%}; activations that are off by more than {SMALL / 2**20:g} MiB: {f'worst {max(far):.2%}' if far else 'none'}; unnamed: worst {max(r['unnamed'] for r in out):.2%}\nworst rows:")
    for r in sorted(out, key=lambda r: -abs(r["error"]))[:4]: print(line(r))
    ok = errors[-1] <= LIMITS["peak"] and errors[len(errors) // 2] <= LIMITS["median"] and max(far, default=0) <= LIMITS["activations"] and all(abs(r[k]) <= LIMITS[k] for r in out for k in ("states", "unnamed"))
    sys.exit(not ok)
