"""A real kernel starts a run and is killed in the middle of it; another one attaches and sees everything."""
import pytest
from waiting import within

until = within(120, .2)
LINE = "--model tiny --dataset demo --strategy fsdp --nproc 2 --micro-batch 1 --grad-accum 1 --max-length 64 --max-steps 100000"


@pytest.mark.parametrize("how", [pytest.param("restart", marks=pytest.mark.slow), "kill"])  # the browser tests restart one too
def test_a_run_outlives_its_kernel(kernels, how):
    k = kernels()
    k.run(f"%load_ext shardnb\nr = get_ipython().run_line_magic('shardtrain', {LINE!r})")
    id = k.run("print(r.id)")
    before = until(lambda: int(k.run("print(len(r.metrics))")))
    assert k.run("print(r.state)") == "running"
    if how == "restart": k.restart()
    else:
        k.kill()
        k = kernels()
    assert k.run(f"import shardnb\nr = shardnb.attach({id!r})\nprint(r.state)") == "running"
    after = until(lambda: (n := int(k.run("print(len(r.metrics))"))) > before and n)
    state, steps, each, finite, ranks = k.run("m = r.stop().wait().metrics\nprint(r.state, len(m), m.step.tolist() == list(range(1, len(m) + 1)), m.loss.notna().all(), sorted(set(r.memory['rank'])), sep='|')", 180).split("|")
    assert (state, each, finite, ranks) == ("stopped", "True", "True", "[0, 1]") and int(steps) >= after
    assert k.run("print([e['step'] for e in r.events('end')] == [len(m)] * 2)") == "True"  # up to the very step at which the ranks have ended
