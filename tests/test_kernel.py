"""A real kernel starts a run and is killed in the middle of it; another one attaches and sees everything."""
import time

import pytest
from jupyter_client.manager import KernelManager


@pytest.fixture
def kernels(tmp_path):
    made = []
    def start():
        km = KernelManager(kernel_name="python3")
        km.start_kernel(cwd=str(tmp_path))
        kc = km.client()
        kc.start_channels()
        kc.wait_for_ready(60)
        made.append((km, kc))
        return km, kc
    yield start
    for km, kc in made:
        kc.stop_channels()
        if km.is_alive(): km.shutdown_kernel(now=True)


def run(kc, code, timeout=60):
    "What the code prints; an error in the cell is an error here."
    said = []
    reply = kc.execute_interactive(code, timeout=timeout, output_hook=lambda m: said.append(m["content"].get("text", "")) if m["msg_type"] == "stream" else None)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(said)


STEPS = 40
CELL = f"""%%shardtrain --model tiny --dataset demo --strategy fsdp --nproc 2 --micro-batch 1 --grad-accum 1 --max-length 64 --max-steps {STEPS}
import transformers, time
class Slow(transformers.TrainerCallback):
    def on_step_begin(self, *args, **kw): time.sleep(.25)
"""


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_run_outlives_its_kernel(kernels, how):
    km, kc = kernels()
    cell = CELL.split("\n", 1)[0].replace("%%", "%") # a line magic: the recipe alone
    run(kc, f"%load_ext shardnb\nr = get_ipython().run_line_magic('shardtrain', {cell.split(' ', 1)[1]!r})\nprint(r.id)")
    run_id = run(kc, "print(r.id)").strip()
    end = time.time() + 120
    while time.time() < end and run(kc, "print(len(r.metrics))").strip() in ("", "0"): time.sleep(.2)
    assert run(kc, "print(r.state)").strip() == "running"
    if how == "restart":
        km.restart_kernel(now=True)
        kc.wait_for_ready(60)
    else:
        km.shutdown_kernel(now=True)
        km, kc = kernels()
    out = run(kc, f"import shardnb\nr = shardnb.attach({run_id!r})\nr.wait()\nm = r.metrics\nprint(r.state, len(m), m.step.tolist() == list(range(1, {STEPS + 1})), m.loss.notna().all(), set(r.memory['rank']))", 180)
    assert out.split("\n")[-2] == f"done {STEPS} True True {{0, 1}}"
