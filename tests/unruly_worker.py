"""A rank without a model: gloo, one all-reduce a step, events and the stop file. At step 3 it runs what `plan.json`'s "test" has for it: `do` on rank `rank`, `others` on all others.

What it runs may wait for the test's word: `told()` says whether it was given, `until_told()` waits for it."""
import os
import sys
import time

import torch
import torch.distributed as dist
from waiting import word

from shardnb.run.event import EventWriter
from shardnb.run.explain import write_error
from shardnb.run.process import proc_id
from shardnb.run.rundir import RunDir, read_json


def main():
    rundir, rank, world = RunDir(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    test, step, stopped = read_json(rundir.plan_path)["test"], 0, False
    events = EventWriter(rundir.event_path(rank), rank)
    told = word(rundir).exists

    def until_told():
        while not told(): time.sleep(.01)

    events.write("start", **proc_id(), node=0, local_rank=int(os.environ["LOCAL_RANK"]), world_size=world, port=os.environ["MASTER_PORT"])
    dist.init_process_group("gloo")
    events.write("phase", phase="training", state="begin")
    try:
        while step < test["steps"] and not stopped:
            step += 1
            x = torch.ones(8)
            dist.all_reduce(x)
            assert x[0].item() == world
            events.write("step", step=step, loss=1 / step, total_steps=test["steps"])
            try: rundir.beat(rank, "training", step)
            except OSError as e: print(f"no heartbeat written: {e}")  # a full disk, say
            if step == 3: exec(test.get("do" if rank == test.get("rank", rank) else "others") or "", globals() | locals())
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
