"The magics in a real kernel: light to load, clear when wrong, completed by Tab."
import time
import weakref

import pytest
from notebook_kernel import Kernel


@pytest.fixture(scope="module")
def kernel():
    k = Kernel()
    yield k
    k.kill()


def test_loading_is_light(kernel):
    status, out, err = kernel.ask("import time, sys; t = time.perf_counter()\n%load_ext shardnb\nprint(time.perf_counter() - t)\n"
        "print([m for m in ('torch', 'pandas', 'matplotlib', 'ipywidgets', 'transformers', 'deepspeed') if m in sys.modules])")
    assert status == "ok", err
    seconds, heavy = out.split("\n")[:2]
    assert float(seconds) < 0.5 and heavy == "[]"


def test_loading_twice_and_unloading(kernel):
    assert kernel.ask("%reload_ext shardnb\n%load_ext shardnb")[0] == "ok"
    assert kernel.complete("%%shardtrain --strat") == ["--strategy"]
    assert kernel.ask("%unload_ext shardnb")[0] == "ok"
    status, out, err = kernel.ask("ip = get_ipython(); f = ip.display_formatter.ipython_display_formatter\n"
        "print([n for names in ip.magics_manager.magics.values() for n in names if n.startswith('shard')], [t for t in (*f.type_printers, *f.deferred_printers) if 'shardnb' in str(t)])")
    assert out.strip() == "[] []", out + err
    status, out, err = kernel.ask("%shardruns")
    assert status == "error" and "not found" in out + err
    assert kernel.ask("%load_ext shardnb")[0] == "ok"


@pytest.mark.parametrize("line, words", [
    ("%shardtrain --stratgy zero3 --model tiny", ["--stratgy", "did you mean '--strategy'"]),
    ("%shardtrain --model tiny --dataset demo --strategy zero4", ["strategy", "did you mean 'zero3'"]),
    ("%shardtrain --nprocs 2 --lerning-rate 1", ["did you mean '--nproc'", "did you mean '--learning-rate'"]),
    ("%shardtrain --model tiny --dataset demo --lr 1e-4 --epochs 2", ["did you mean '--learning-rate'", "did you mean '--num-train-epochs'"]),
    ("%shardtrain --model tiny --dataset demo --nproc $ranks", ["$ranks"]),
    ("%shardtrain --model 'tiny", ["quote"]),
    ("%shardtrain", ["needs a recipe"]),
    ("%shardtrain missing.yaml", ["missing.yaml"]),
    ("%shardplan", ["model", "is needed"]),
    ("%shardplan --model tiny --tuning lorra --machine 4xA1000", ["2 problems", "did you mean 'lora'", "A100"]),
    ("%%shardtrain --model tiny --dataset demo --nproc many\nx = 1", ["nproc", "many"]),
    ("%shardruns --stopp", ["--stopp", "did you mean '--stop'"]),
    ("%shardruns --delete --yes", ["needs the id of a run"]),
    ("%shardruns 20991231 --stop --resume", ["not allowed with"]),
    ("%shardruns 20991231", ["no run '20991231'"]),
    ("%shardruns ../other --delete", ["is not the id of a run"]),
    ("%shardruns 20991231 --yes", ["--yes", "goes with --delete"]),
    ("%shardpick --wirte", ["did you mean '--write'"]),
])
def test_a_bad_line_is_one_clear_error(kernel, line, words):
    status, out, err = kernel.ask(line)
    assert status == "error" and not out
    assert all(w in err for w in words), err
    assert "Traceback" not in err and "site-packages" not in err and ".py" not in err, "our own traceback says nothing about a slip"


def test_help_lists_the_fields(kernel):
    status, out, _ = kernel.ask("%load_ext shardnb\n%shardtrain --help")
    assert "usage: %shardtrain [recipe.yaml] [options]" in out
    assert status == "ok" and "--micro-batch" in out and "--wait" in out


@pytest.mark.parametrize("code, pos, want", [
    ("%shardtrain --max-st", None, ["--max-steps"]),
    ("%%shardtrain --model tiny --tuning l", None, ["lora"]),
    ("%%shardtrain --strategy zero2+", None, ["zero2+optim-cpu"]),
    ("%shardpick --tun", None, ["--tuning"]),
    ("%%shardtrain 8b-lo", None, ["8b-lora-24gb"]),
    ("%shardpick --wr", None, ["--write"]),
    ("%shardruns --de", None, ["--delete"]),
    ("%shardplan --mach", None, ["--machine"]),
    ("%shardplan --machine 2xRTX4", None, ["2xRTX4090-24GB"]),
])
def test_completion(kernel, code, pos, want):
    assert kernel.complete(code, pos) == want


def test_completion_leaves_the_body_alone(kernel):
    kernel.run("import os")
    found = kernel.complete("%%shardtrain --model tiny\nos.pat")
    assert any("path" in m for m in found) and not any(m.startswith("--") for m in found)


def test_completion_is_quick(kernel):
    kernel.complete("%%shardtrain --s")
    t = time.perf_counter()
    kernel.complete("%%shardtrain --s")
    assert time.perf_counter() - t < 1


def test_what_a_cell_shows_is_known_by_itself():
    "Not by its address, which the next plan may have; and nothing is kept alive for it"
    from shardnb.ui import magics
    class Plan: pass
    one = Plan()
    magics._show(one)
    seen = weakref.ref(one)
    assert magics._shown(one) and not magics._shown(Plan())
    del one
    assert seen() is None and not any(magics._shown(p) for p in [Plan() for _ in range(100)])


@pytest.mark.parametrize("words, said", [
    (["train", "--model", "tiny", "--dataset", "demo", "--cell", "missing.py"], ["--cell", "there is no file or folder 'missing.py'"]),
    (["logs", "no-such-run", "--rank", "x"], ["id: no run 'no-such-run'"]),
    (["delete", "no-such-run", "--yes"], ["id: no run 'no-such-run'"]),
    (["delet", "x"], ["did you mean 'delete'"]),
])
def test_a_bad_word_on_the_command_line_is_one_clear_error(words, said, capsys):
    from shardnb.ui.cli import main
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and all(w in err for w in said), err
