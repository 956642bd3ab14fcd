"""Real error texts: each function makes a library (or the system) raise, in the way that a person meets it.

`PROVOKE` maps the row of `shardnb.run.translate.KNOWN` that should recognise the text to the functions that provoke it. They take a folder of their own.
What ranks say is provoked in forked ranks, which have this process's imports.
"""
import contextlib
import ctypes
import faulthandler
import http.server
import io
import json
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

PROVOKE = {}


def provoke(name):
    "Put a function down for a row"
    def add(f):
        PROVOKE.setdefault(name, []).append(f)
        return f
    return add


class Said(Exception): "What another process said: the text, type included"


def text_of(e): return str(e) if isinstance(e, Said) else f"{type(e).__name__}: {e}"


@contextlib.contextmanager
def setting(place, name, value):
    "An attribute with another value for a while"
    old = getattr(place, name)
    setattr(place, name, value)
    try: yield
    finally: setattr(place, name, old)


def forked(n, fn, tmp):
    "Fork n ranks that call `fn(rank, tmp)`; raises what the first of them said. One that hangs is ended after 30 s"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pids = []
    for r in range(n):
        if (pid := os.fork()) == 0:
            os.environ.update(RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu")
            faulthandler.dump_traceback_later(25, file=open(tmp / 'log', 'a'))
            signal.alarm(30)
            try:
                fd = os.open(tmp / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(fd, 1), os.dup2(fd, 2)
                fn(r, tmp)
            except BaseException as e: (tmp / f"said{r}").write_text(text_of(e))
            finally: os._exit(0)
        pids.append(pid)
    hung = [r for r, p in enumerate(pids) if os.WIFSIGNALED(os.waitpid(p, 0)[1])]
    if hung: raise Said(f"ranks {hung} hung: {(tmp / 'log').read_text()[-2000:]}")
    if said := sorted(tmp.glob("said*")): raise Said(said[0].read_text())


# --- memory and disk

@provoke("memory")
def cpu_allocator(tmp): torch.empty(1 << 46)

@provoke("memory")
def python_memory(tmp): bytearray(1 << 62)

@provoke("input")
def asking(tmp):
    with setting(sys, "stdin", io.StringIO()): input("how many? ")

@provoke("files")
def open_files(tmp):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
        try:
            while True: held.enter_context(open(os.devnull))
        finally: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

class Deadly(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): os.kill(os.getpid(), signal.SIGKILL)

@provoke("worker")
def data_worker_killed(tmp): list(torch.utils.data.DataLoader(Deadly(), num_workers=1))

def small(folder):
    "Give this process, and no other, 1 MiB on a folder"
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000): raise OSError(ctypes.get_errno(), "unshare")
    for args in (("--make-rprivate", "/"), ("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder))): subprocess.run(["mount", *args], check=True)

def needs_root():
    if os.geteuid() or not sys.platform.startswith("linux") or not shutil.which("mount"): pytest.skip("a small file system needs Linux and root")

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.ones(1 << 20)

@provoke("shm")
def shared_memory(tmp):
    def rank(r, tmp):
        small("/dev/shm")
        list(torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1))
    needs_root()
    forked(1, rank, tmp)

@provoke("disk")
def full_disk_torch(tmp): torch.save(torch.ones(1 << 20), "/dev/full")

@provoke("disk")
def full_disk_python(tmp):
    with open("/dev/full", "w") as f: f.write("x" * 100)

@provoke("disk")
def full_disk_safetensors(tmp):
    from safetensors.torch import save_file
    def rank(r, tmp):
        (d := tmp / "small").mkdir()
        small(d)
        save_file({"a": torch.ones(1 << 20)}, d / "a.safetensors")
    needs_root()
    forked(1, rank, tmp)

@provoke("denied")
def denied(tmp): open("/sys/kernel/shardnb", "w")

@provoke("truncated")
def truncated_torch(tmp):
    torch.save(torch.ones(1000), p := tmp / "a.pt")
    p.write_bytes(p.read_bytes()[:2000])
    torch.load(p)

@provoke("truncated")
def truncated_safetensors(tmp):
    from safetensors.torch import load_file, save_file
    save_file({"a": torch.ones(1000)}, p := tmp / "a.safetensors")
    p.write_bytes(p.read_bytes()[:2000])
    load_file(p)

@provoke("truncated")
def empty_safetensors(tmp):
    from safetensors.torch import load_file
    (p := tmp / "a.safetensors").touch()
    load_file(p)

@provoke("pointer")
def lfs_pointer(tmp):
    from safetensors.torch import load_file
    (p := tmp / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    load_file(p)


# --- checkpoints

@provoke("no-checkpoint")
def no_checkpoint(tmp):
    from transformers.integrations.deepspeed import deepspeed_load_checkpoint
    deepspeed_load_checkpoint(None, str(tmp))

@provoke("sharded-keys")
def sharded_keys(tmp):
    import torch.distributed.checkpoint as dcp
    dcp.save({"a": torch.ones(2)}, checkpoint_id=str(tmp / "c"), no_dist=True)
    dcp.load({"b": torch.ones(2)}, checkpoint_id=str(tmp / "c"), no_dist=True)

@provoke("empty")
def empty_shard(tmp): torch.nn.Linear(2, 2).load_state_dict({"weight": torch.empty(0), "bias": torch.zeros(2)})

@provoke("size")
def size_mismatch(tmp): torch.nn.Linear(2, 2).load_state_dict({"weight": torch.ones(3, 2), "bias": torch.zeros(2)})

@provoke("keys")
def missing_keys(tmp): torch.nn.Linear(2, 2).load_state_dict({"w": torch.ones(2, 2)})

@provoke("weights-only")
def weights_only(tmp):
    torch.save({"a": Path("x")}, tmp / "a.pt")
    torch.load(tmp / "a.pt")

@provoke("adapter")
def no_adapter(tmp):
    from peft import PeftConfig
    PeftConfig.from_pretrained(str(tmp))


# --- DeepSpeed

@provoke("ds-keys")
def keys_of_another_block(tmp):
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    DeepSpeedBF16Config(enabled=True, loss_scale=0, initial_scale_power=16, loss_scale_window=1000, hysteresis=2, min_loss_scale=1)

@provoke("ds-batch")
def batch_sizes(tmp):
    from deepspeed.runtime.config import DeepSpeedConfig
    DeepSpeedConfig({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1})

@provoke("ds-mismatch")
def two_values(tmp):
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
    args, c = TrainingArguments(str(tmp), use_cpu=True, per_device_train_batch_size=2), HfTrainerDeepSpeedConfig({"train_micro_batch_size_per_gpu": 4})
    c.trainer_config_process(args)
    c.trainer_config_finalize(args, None, 10)

def without_tools(tmp): return mock.patch.dict(os.environ, PATH=str(tmp), TORCH_EXTENSIONS_DIR=str(tmp)) # no ninja and no compiler on the PATH, and nothing built

@provoke("ninja")
def no_ninja(tmp):
    from deepspeed.ops.op_builder import CPUAdamBuilder
    with without_tools(tmp): CPUAdamBuilder().jit_load()

@provoke("op")
def no_op(tmp):
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder
    loaded = CPUAdamBuilder._loaded_ops.pop("cpu_adam", None)
    try:
        with without_tools(tmp): DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(2))])
    finally:
        if loaded is not None: CPUAdamBuilder._loaded_ops["cpu_adam"] = loaded

@provoke("cuda-home")
def cuda_home(tmp):
    from torch.utils import cpp_extension
    if cpp_extension.CUDA_HOME: pytest.skip("there is a CUDA toolkit here")
    cpp_extension.CUDAExtension("x", ["x.cu"])

@provoke("loss-scale")
def loss_scale(tmp):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    DynamicLossScaler(1, 1000, 1, 1, False).update_scale(True)


# --- ranks

@provoke("collective")
def slow_rank(tmp):
    def rank(r, tmp):
        dist.init_process_group("gloo", timeout=timedelta(seconds=1))
        if r: time.sleep(1.5)
        dist.all_reduce(torch.ones(1))
    forked(2, rank, tmp)

@provoke("collective")
def monitored_barrier(tmp):
    def rank(r, tmp):
        dist.init_process_group("gloo")
        if r: time.sleep(1), os._exit(0)
        dist.monitored_barrier(timeout=timedelta(seconds=.5))
    forked(2, rank, tmp)

@provoke("peer")
def dead_rank(tmp):
    def rank(r, tmp):
        dist.init_process_group("gloo")
        if r: os._exit(0)
        dist.all_reduce(torch.ones(1))
    forked(2, rank, tmp)

@provoke("rendezvous")
def nobody_comes(tmp): forked(1, lambda r, tmp: dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(milliseconds=300)), tmp)

@provoke("rendezvous")
def nobody_listens(tmp): forked(1, lambda r, tmp: dist.TCPStore("127.0.0.1", 1, 2, False, timedelta(milliseconds=300)), tmp)

@provoke("port")
def port_of_a_store(tmp):
    def rank(r, tmp):
        first = dist.TCPStore("127.0.0.1", 0, 1, True)
        dist.TCPStore("127.0.0.1", first.port, 1, True)
    forked(1, rank, tmp)

@provoke("port")
def port_of_a_socket(tmp):
    with socket.socket() as s, socket.socket() as t:
        s.bind(("127.0.0.1", 0))
        s.listen()
        t.bind(s.getsockname())

class Shared(torch.nn.Module): # one layer, checkpointed twice
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def forward(self, x):
        from torch.utils.checkpoint import checkpoint
        return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True)

@provoke("ready-twice")
def ready_twice(tmp):
    def rank(r, tmp):
        dist.init_process_group("gloo")
        m = torch.nn.parallel.DistributedDataParallel(Shared(), find_unused_parameters=True)
        m(torch.ones(1, 2, requires_grad=True)).sum().backward()
    forked(1, rank, tmp)

class Half(torch.nn.Module): # half of it has no part in the output
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    def forward(self, x): return self.used(x)

@provoke("unused")
def unused_weights(tmp):
    def rank(r, tmp):
        dist.init_process_group("gloo")
        m = torch.nn.parallel.DistributedDataParallel(Half())
        for _ in range(2): m(torch.ones(1, 2)).sum().backward()
    forked(1, rank, tmp)

@provoke("dtensor")
def sharded_by_fsdp(tmp):
    def rank(r, tmp):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("gloo")
        fully_shard(m := torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        m.weight @ torch.ones(2, 2)
    forked(1, rank, tmp)

def with_deepspeed():
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False # it would be compiled
    deepspeed.init_distributed("gloo")
    return deepspeed

@provoke("gather")
def sharded_by_zero(tmp):
    def rank(r, tmp):
        with with_deepspeed().zero.Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}): m = torch.nn.Embedding(4, 2)
        torch.nn.functional.embedding(torch.tensor([0]), m.weight)
    forked(1, rank, tmp)

def zero1(tmp):
    m = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return with_deepspeed().initialize(model=m, optimizer=torch.optim.AdamW(m.parameters()), config=config)[0]

@provoke("world-size")
def fewer_ranks(tmp):
    forked(2, lambda r, tmp: zero1(tmp).save_checkpoint(str(tmp / "c")), tmp)
    forked(1, lambda r, tmp: zero1(tmp).load_checkpoint(str(tmp / "c")), tmp)

@provoke("device-map")
def device_map_and_zero3(tmp):
    def rank(r, tmp):
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig
        with_deepspeed()
        kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
        AutoModelForCausalLM.from_pretrained(tiny_folder(tmp), device_map="cpu")
        del kept
    forked(1, rank, tmp)

@provoke("device-map")
def device_map_and_ddp(tmp):
    def rank(r, tmp):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        AcceleratorState._reset_state(True) # of the process that was forked
        m = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        m.hf_device_map = {"0": 0, "1": 1} # what from_pretrained leaves
        Accelerator(cpu=True).prepare(m)
    forked(2, rank, tmp)


# --- gradients, devices, precision

@provoke("no-cuda")
def no_cuda(tmp):
    if torch.version.cuda: pytest.skip("this torch is built for CUDA")
    torch.ones(1, device="cuda")

@provoke("no-grad")
def no_grad(tmp): torch.ones(1).sum().backward()

@provoke("recompute")
def recompute(tmp):
    from torch.utils.checkpoint import checkpoint
    calls = []
    def layer(x):
        calls.append(1)
        return (x[:len(calls)] * x[:len(calls)]).sum()
    checkpoint(layer, torch.ones(4, requires_grad=True), use_reentrant=False).backward()

@provoke("graph")
def graph_twice(tmp):
    y = torch.ones(1, requires_grad=True).exp().sum()
    y.backward(), y.backward()

@provoke("in-place")
def in_place(tmp):
    y = torch.ones(2, requires_grad=True).exp()
    y.add_(1)
    y.sum().backward()

@provoke("meta")
def meta(tmp): torch.nn.Linear(2, 2, device="meta").to("cpu")

@provoke("devices")
def devices(tmp): torch.cat([torch.ones(2), torch.ones(2, device="meta")])

@provoke("shapes")
def shapes(tmp): torch.ones(2, 3) @ torch.ones(2, 3)

@provoke("bf16")
def bf16(tmp):
    if torch.cuda.is_available(): pytest.skip("there is a GPU here")
    from transformers import TrainingArguments
    TrainingArguments(str(tmp), bf16=True, use_cpu=False)

@provoke("unscale")
def unscale(tmp):
    p = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    p.grad, scaler = torch.ones_like(p), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD([p], .1))

@provoke("nan")
def non_finite(tmp):
    p = torch.nn.Parameter(torch.ones(1))
    p.grad = torch.full((1,), float("nan"))
    torch.nn.utils.clip_grad_norm_([p], 1., error_if_nonfinite=True)

@provoke("half")
def half(tmp): torch.linalg.svd(torch.ones(2, 2, dtype=torch.float16))

@provoke("dtypes")
def dtypes(tmp): torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.bfloat16)

@provoke("dtypes")
def dtypes_of_attention(tmp):
    q = torch.ones(1, 1, 2, 2)
    torch.nn.functional.scaled_dot_product_attention(q, q.bfloat16(), q)


# --- data

@provoke("vocabulary")
def vocabulary(tmp): torch.nn.Embedding(4, 2)(torch.tensor([9]))

@provoke("labels")
def labels(tmp): torch.nn.functional.cross_entropy(torch.ones(2, 4), torch.tensor([1, 9]))

@provoke("uneven")
def uneven_tensors(tmp): torch.utils.data.default_collate([torch.ones(3), torch.ones(4)])

@provoke("uneven")
def uneven_lists(tmp): torch.tensor([[1, 2, 3], [1, 2, 3, 4]])

@provoke("uneven")
def uneven_rows(tmp): tiny_tokenizer()(["a", "abc"], return_tensors="pt")

@provoke("no-rows")
def no_rows(tmp): torch.utils.data.DataLoader([], shuffle=True)

def tiny_tokenizer(**kw):
    from shardnb.run.models import resolve_model
    from transformers import AutoTokenizer
    tok = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    for k, v in kw.items(): setattr(tok, k, v)
    return tok

@provoke("pad")
def no_padding_token(tmp): tiny_tokenizer(pad_token=None)(["a", "abc"], padding=True)

@provoke("template")
def no_template(tmp): tiny_tokenizer(chat_template=None).apply_chat_template([{"role": "user", "content": "hello"}])

@provoke("template-marks")
def template_without_marks(tmp):
    from trl.chat_template_utils import get_training_chat_template
    get_training_chat_template(tiny_tokenizer(chat_template="{% for m in messages %}<{{ m.content }}{% endfor %}"))

@provoke("data-files")
def no_data_file(tmp):
    from datasets import load_dataset
    load_dataset("json", data_files=str(tmp / "no.jsonl"))

@provoke("data-format")
def broken_rows(tmp):
    from datasets import load_dataset
    (tmp / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    load_dataset("json", data_files=str(tmp / "a.jsonl"), cache_dir=str(tmp))

def tiny_trainer(tmp, **kw):
    from transformers import Trainer, TrainingArguments
    return Trainer(tiny_model(tmp), TrainingArguments(str(tmp), use_cpu=True, report_to="none"), **kw)

@provoke("columns")
def no_columns(tmp):
    from datasets import Dataset
    tiny_trainer(tmp, train_dataset=Dataset.from_list([{"a": 1}])).get_train_dataloader()

@provoke("no-loss")
def no_loss(tmp):
    t = tiny_trainer(tmp)
    t.compute_loss(t.model, {"input_ids": torch.ones(1, 3, dtype=torch.long, device=t.model.device)})


# --- models, the hub, packages

def tiny_folder(tmp, **kw):
    from shardnb.run.models import resolve_model
    (tmp / "config.json").write_text(json.dumps(json.loads((Path(resolve_model("tiny")) / "config.json").read_text()) | kw))
    return str(tmp)

def tiny_model(tmp, **kw):
    from transformers import AutoConfig, AutoModelForCausalLM
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_folder(tmp)), **kw)

@provoke("no-model")
def no_model(tmp):
    from transformers import AutoConfig
    AutoConfig.from_pretrained(str(tmp))

@provoke("no-weights")
def no_weights(tmp):
    from transformers import AutoModelForCausalLM
    AutoModelForCausalLM.from_pretrained(tiny_folder(tmp))

@provoke("architecture")
def architecture(tmp):
    from transformers import AutoConfig
    AutoConfig.from_pretrained(tiny_folder(tmp, model_type="quantum9"))

@provoke("remote-code")
def remote_code(tmp):
    from transformers import AutoConfig
    AutoConfig.from_pretrained(tiny_folder(tmp, model_type="quantum9", auto_map={"AutoConfig": "configuration_q.QConfig"}), trust_remote_code=False)

@provoke("tokenizer")
def no_tokenizer(tmp):
    from transformers import AutoTokenizer
    AutoTokenizer.from_pretrained(tiny_folder(tmp))

@provoke("attention")
def no_flash_attention(tmp):
    tiny_model(tmp, attn_implementation="flash_attention_2", dtype=torch.bfloat16)

@provoke("targets")
def no_lora_targets(tmp):
    from peft import LoraConfig, get_peft_model
    get_peft_model(tiny_model(tmp), LoraConfig(target_modules=["query_key_value"]))

@provoke("optimizer")
def unknown_optimizer(tmp):
    from transformers import TrainingArguments
    TrainingArguments(str(tmp), use_cpu=True, optim="adamw_quantum")

@contextlib.contextmanager
def online(server=None):
    "The hub's client, which the tests keep offline, asking this machine"
    import huggingface_hub.constants as c
    from huggingface_hub import HfApi
    with setting(c, "HF_HUB_OFFLINE", False): yield HfApi(endpoint=f"http://127.0.0.1:{server.server_port if server else 1}")

def hub_that_says(code, why):
    "Ask a hub on this machine that answers so"
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(code)
            for k, v in (("X-Error-Code", why), ("X-Error-Message", why), ("Content-Length", "0")): self.send_header(k, v)
            self.end_headers()
        def log_message(self, *args): "Nothing on the test's output"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(.05,), daemon=True).start()
        try:
            with online(server) as api: api.model_info("a/b")
        finally: server.shutdown()

@provoke("gated")
def gated(tmp): hub_that_says(403, "GatedRepo")

@provoke("not-on-hub")
def not_on_the_hub(tmp): hub_that_says(404, "RepoNotFound")

@provoke("not-on-hub")
def not_logged_in(tmp): hub_that_says(401, "")

@provoke("hub-limit")
def too_many_requests(tmp): hub_that_says(429, "")

@provoke("offline")
def hub_refuses(tmp):
    with online() as api: api.model_info("a/b")

@provoke("offline")
def model_offline(tmp):
    from transformers import AutoConfig
    AutoConfig.from_pretrained("nobody/nothing-at-all")

@provoke("offline")
def dataset_offline(tmp):
    from datasets import load_dataset
    load_dataset("nobody/nothing-at-all")

@provoke("pickle")
def lock(tmp):
    import cloudpickle
    cloudpickle.dumps(threading.Lock())

@provoke("pickle")
def local_function(tmp): pickle.dumps(lambda: 1)

@provoke("main")
def function_of_main(tmp): pickle.loads(b"\x80\x04c__main__\nno_such_function\n.")

@provoke("package")
def no_package(tmp): import no_such_package_here # noqa: F401

@provoke("symbol")
def undefined_symbol(tmp):
    if not (cc := shutil.which("cc") or shutil.which("gcc")): pytest.skip("there is no C compiler here")
    (tmp / "a.c").write_text("int nowhere_to_be_found(void); int f(void) { return nowhere_to_be_found(); }")
    subprocess.run([cc, "-shared", "-fPIC", "-o", tmp / "a.so", tmp / "a.c"], check=True)
    ctypes.CDLL(str(tmp / "a.so"), mode=os.RTLD_NOW)
