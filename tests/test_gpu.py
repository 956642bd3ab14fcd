"""The CUDA and NCCL paths: short runs under every engine, started as a notebook starts them. `make gpu` runs them; without a GPU they are skipped."""
import math

import pytest
from waiting import within

import shardnb
from shardnb.plan.machine import Machine

MACHINE = Machine.detect()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not MACHINE.bf16, reason="needs a CUDA device that computes in bf16")]
NPROC = min(2, len(MACHINE.gpus))
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp+param-cpu", "zero3+optim-cpu")


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    "Starts a run in a home of its own; one of each strategy is kept, so that the first can be compared with"
    home, kept = tmp_path_factory.mktemp("gpu"), {}

    def start(strategy, **kw):
        return shardnb.train(shardnb.Recipe(**{**dict(model="tiny", dataset="demo", strategy=strategy, nproc=NPROC, micro_batch=1, grad_accum=1, max_length=64, max_steps=4,
                                                      learning_rate=1e-3, precision="bf16"), **kw}))

    def once(strategy):
        if strategy not in kept: kept[strategy] = start(strategy).wait(timeout=150)
        return kept[strategy]

    with pytest.MonkeyPatch.context() as m:
        m.setenv("SHARDNB_HOME", str(home))
        once.start = start
        yield once


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_short_run_on_cuda(go, strategy):
    run, plain = go(strategy), go("ddp")
    assert run.state == "done"
    assert len(run.events("effective")) == NPROC
    for e in run.events("effective"): assert e["device"].startswith("cuda") and "nccl" in e["backend"]
    losses = run.metrics.loss.tolist()
    assert len(losses) == 4 and all(map(math.isfinite, losses))
    assert losses == pytest.approx(plain.metrics.loss.tolist(), rel=2e-2)
    m = run.memory
    assert set(m["rank"]) == set(range(NPROC))
    assert {"params", "grads", "optimizer", "reserved", "context", "total"} <= set(m.category)
    assert m.query("category == 'context' and place == 'device'").bytes.max() > 0
    if "optim-cpu" in strategy or "param-cpu" in strategy: assert set(m.query("category == 'optimizer' and bytes > 0").place) == {"host"}
    final = run.rundir.checkpoints_path / "final"
    assert (final / "config.json").exists() and list(final.glob("*.safetensors"))


def test_a_graceful_stop_on_cuda(go):
    run = go.start("zero3", max_steps=100_000)
    within(120, .2)(lambda: len(run.metrics) >= 2 or run.ended)
    assert run.stop().wait(timeout=120).state == "stopped"
    assert run.error is None and run.pids == {} and any(c.complete for c in run.checkpoints)
