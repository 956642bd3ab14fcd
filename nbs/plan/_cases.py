"Models and machines that the notebooks about plans try their arithmetic on: no torch, no planner."
from shardnb.plan.machine import Machine
from shardnb.plan.memory import MemoryBreakdown, states
from shardnb.plan.predict import reserve
from shardnb.plan.recipe import Recipe
from shardnb.plan.strategy import Strategy, settings


def llama(hidden, layers, vocab, inner, kv, tuning="full", r=16, tied=False):
    "Facts about a model of Llama's shape, as the planner finds them."
    w = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    full, ps = tuning == "full", []
    add = lambda name, unit, shape, train: ps.append([name, shape[0] * (shape[1] if len(shape) > 1 else 1), train, unit, list(shape)])
    add("embed", "tail" if tied else "embed", (vocab, hidden), full)
    for i in range(layers):
        for k, s in w.items():
            add(f"layers.{i}.{k}", f"layers.{i}", s, full)
            if not full: add(f"layers.{i}.{k}.a", f"layers.{i}", (r, s[1]), True); add(f"layers.{i}.{k}.b", f"layers.{i}", (s[0], r), True)
        for n in "12": add(f"layers.{i}.norm{n}", f"layers.{i}", (hidden,), full)
    add("norm", "tail", (hidden,), full)
    if not tied: add("head", "tail", (vocab, hidden), full)
    layer = sum(p[1] for p in ps if p[3] == "layers.0")
    return dict(model_type="llama", hidden_size=hidden, num_hidden_layers=layers, vocab_size=vocab, layer_classes=["LlamaDecoderLayer"], tied=tied, moe_classes=[], params=ps,
                total=sum(p[1] for p in ps), trainable=sum(p[1] for p in ps if p[2]), largest_layer=layer)


SHAPES = {"llama-8b": (4096, 32, 128256, 14336, 1024), "llama-7b": (4096, 32, 32000, 11008, 4096), "llama-70b": (8192, 80, 128256, 28672, 1024)}
FACTS = {}

def facts_of(name, tuning="full"): return FACTS.setdefault((name, tuning), llama(*SHAPES[name], tuning=tuning))


def predictor(machine):
    "States in closed form and a rule of thumb for the rest: what the planner's predictor is tried without."
    def predict(recipe, strategy, nproc):
        r = recipe.replace(strategy=strategy, nproc=nproc).resolve(nproc, machine.cuda, machine.bf16)
        f, s = facts_of(r.model, r.tuning), Strategy.parse(strategy)
        b = states(f, s, settings(s, r, f, nproc, machine.cuda), r.precision, nproc, r.dtype)
        tokens, h, width = r.micro_batch * r.max_length, f["hidden_size"], 4 if r.precision == "fp32" else 2
        per_layer = 1 if r.activation_checkpointing else 17
        extra = {"activations": tokens * h * width * (f["num_hidden_layers"] * per_layer + 17), "logits": tokens * f["vocab_size"] * (width + 8)}
        if "params" in s.shards: extra["gathered"] = (2 * (f["largest_layer"] + f["vocab_size"] * h) if s.reshard else f["total"]) * width
        return MemoryBreakdown({**b.device, **extra}, b.host, "backward", band=reserve(b.peak + sum(extra.values()), b.peak, nproc) if machine.cuda else (0, 0))
    return predict


GiB = 2**30


def case(model, machine, **kw):
    m, r = Machine.preset(machine), Recipe(model=model, **kw)
    return r, m, facts_of(model, r.tuning), predictor(m)
