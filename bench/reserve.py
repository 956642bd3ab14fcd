"""How far nvidia-smi lies above what PyTorch has allocated, in runs that published both: the data behind `plan.predict.reserve_band`.

`reserve.csv` holds the runs on one GPU (A100-80GB, Transformers' Trainer, full, LoRA, bitsandbytes and GPTQ, 1B to 70B) of two tables of fms-acceleration, but for those that filled the card by more than nine tenths, where PyTorch gives its
cache back. Their runs on two GPUs used PyTorch's first FSDP, and aren't here. None of these runs is in `published.csv`. The band was drawn from them, so that how many lie inside it is a fit; `published.py` is where it meets other runs. `moving` is what comes and goes: the peak less what is still allocated when training is over.

    python bench/reserve.py
"""
import csv
from pathlib import Path

GIB, DATA = 2**30, Path(__file__).with_name("reserve.csv")


def pairs(path=DATA): # [(peak, states, nvidia-smi's total)], bytes
    "The published runs."
    with open(path, newline="") as f:
        return [(int(r["peak_allocated"]), int(r["allocated_after"]), int(r["nvidia_smi_mib"]) * 2**20) for r in csv.DictReader(f)]


def line(points, share): # points: [(x, y)]; share: of the points that lie below the line; returns (y at 0, slope)
    "The line through two of the points that has this share of them below it (quantile regression)."
    best = None
    for i, (x1, y1) in enumerate(points):
        for x2, y2 in points[:i]:
            slope = (y1 - y2) / (x1 - x2) if x1 != x2 else -1
            if slope < 0: continue
            loss = sum((share if (r := y - y1 - slope * (x - x1)) > 0 else share - 1) * r for x, y in points)
            if best is None or loss < best[0]: best = loss, y1 - slope * x1, slope
    return best[1:]


def main():
    from shardnb.plan.predict import context_band, reserve_band
    data = pairs()
    points = [((p - s) / GIB, (smi - p) / GIB) for p, s, smi in data]
    for share in (.1, .5, .9): print("{:.0%} of {} runs lie below {:.2f} GiB + {:.3f} × moving".format(share, len(points), *line(points, share)))
    bands = [[c + r for c, r in zip(context_band(1), reserve_band(p, s))] for p, s, _ in data]
    inside = sum(a <= smi - p <= b for (a, b), (p, _, smi) in zip(bands, data))
    print(f"inside the predicted band: {inside} of {len(data)}")


if __name__ == "__main__": main()
