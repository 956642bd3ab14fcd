"Settings that must be in the environment before torch is imported; and runs and kernels of which nothing is left after a test."
import os
import sys

import pytest

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")


@pytest.fixture(autouse=True)
def nothing_is_left():
    "Ranks of a test that fails half-way would train on beside all the tests after it; and ranks that are forked inherit what it leaves of Accelerate's state"
    yield
    if "ranks" in sys.modules: sys.modules["ranks"].end_all()
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def start(tmp_path, monkeypatch):
    "Starts runs of tests/unruly_worker.py in a home of their own, and leaves no process behind"
    from unruly import Started
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path / "home"))
    started = Started()
    yield started.start
    started.end()


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    "Starts kernels in the test's own folder, where their runs lie too as a notebook's do; leaves none of both"
    from notebook_kernel import Kernel

    from shardnb.run.handle import Run
    from shardnb.run.rundir import RunDir
    monkeypatch.delenv("SHARDNB_HOME", raising=False)
    made = []
    def start():
        made.append(Kernel(tmp_path))
        return made[-1]
    yield start
    for k in made: k.kill()
    for rd in RunDir.list(tmp_path / ".shardnb"): Run(rd).kill()
