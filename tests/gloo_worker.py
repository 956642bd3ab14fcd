"""A rank without a model: gloo, one all-reduce a step, events and the stop file. `plan.json`'s "test" says how it misbehaves."""
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from shardnb.run.event import EventWriter
from shardnb.run.explain import write_error
from shardnb.run.launch import proc_id
from shardnb.run.rundir import RunDir, read_json


def main():
    rundir, rank, world = RunDir(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    test = read_json(rundir.plan_path)["test"]
    me = test.get("rank") == rank
    events = EventWriter(rundir.event_path(rank), rank)
    events.write("start", **proc_id(), node=0, local_rank=int(os.environ["LOCAL_RANK"]), world_size=world, port=os.environ["MASTER_PORT"])
    if test.get("noise"):
        for _ in range(2048): os.write(2, b"x" * 1023 + b"\n")
    if me and test["mode"] == "child":
        child = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
        events.write("note", message="child", **proc_id(child))
    if me and test["mode"] == "deaf": signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    events.write("phase", phase="training", state="begin")
    step, stopped = 0, False
    try:
        while step < test["steps"] and not stopped:
            step += 1
            x = torch.ones(8)
            dist.all_reduce(x)
            assert x[0].item() == world
            events.write("step", step=step, loss=1 / step, total_steps=test["steps"])
            if me and step == 3:
                if test["mode"] in ("kill", "child"): os.kill(os.getpid(), signal.SIGKILL)
                if test["mode"] == "raise": raise ValueError("a bad batch")
                if test["mode"] == "exit": os._exit(7)
                if test["mode"] == "deaf": time.sleep(600)
            flag = torch.tensor([float((rundir.stop_requested() or {}).get("how") == "graceful")])  # a kill is the supervisor's business
            dist.all_reduce(flag)
            stopped = flag.item() > 0
            time.sleep(test.get("sleep", .02))
    except Exception as e:
        write_error(rundir, rank, e, "training", step)
        raise
    if stopped: events.write("checkpoint", path=f"checkpoints/checkpoint-{step}", step=step, complete=True)
    events.write("end", state="stopped" if stopped else "done", step=step)
    dist.destroy_process_group()


if __name__ == "__main__": main()
