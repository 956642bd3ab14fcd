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


STEPS = 150 # long enough that the run still goes on when the next kernel is up
LINE = f"--model tiny --dataset demo --strategy fsdp --nproc 2 --micro-batch 1 --grad-accum 1 --max-length 64 --max-steps {STEPS}"


@pytest.mark.parametrize("how", [pytest.param("restart", marks=pytest.mark.slow), "kill"])  # the browser tests restart one too
def test_a_run_outlives_its_kernel(kernels, how):
    km, kc = kernels()
    run(kc, f"%load_ext shardnb\nr = get_ipython().run_line_magic('shardtrain', {LINE!r})")
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
    assert run(kc, f"import shardnb\nr = shardnb.attach({run_id!r})\nprint(r.state)").strip() == "running"
    out = run(kc, f"r.wait()\nm = r.metrics\nprint(r.state, len(m), m.step.tolist() == list(range(1, {STEPS + 1})), m.loss.notna().all(), set(r.memory['rank']))", 180)
    assert out.split("\n")[-2] == f"done {STEPS} True True {{0, 1}}"
