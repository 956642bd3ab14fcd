"A rank without torch: rank 1 takes memory until somebody ends it, as far as `plan.json`'s \"test\" lets it."
import os
import sys
import time

from shardnb.run.event import EventWriter
from shardnb.run.process import proc_id
from shardnb.run.rundir import RunDir, read_json

if __name__ == "__main__":
    rundir, rank, held = RunDir(sys.argv[1]), int(os.environ["RANK"]), []
    test = read_json(rundir.plan_path)["test"]
    events = EventWriter(rundir.event_path(rank), rank)
    events.write("start", **proc_id(), node=0, local_rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    events.write("phase", phase="training", state="begin")
    events.write("step", step=2)
    events.write("memory", step=2, moment="after_step", place="device", bytes={"activations": 3 << 27, "params": 1 << 27})
    while rank == 1 and len(held) < test["most"]:
        held.append(b"x" * (32 << 20))
        time.sleep(.01)
    time.sleep(600)
