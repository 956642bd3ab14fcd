"Under FSDP one rank of a machine loads the weights: the others never hold a copy, and nothing else changes."
import json
import re
import threading
import time
from pathlib import Path

import pytest
import ranks

LARGE = ranks.LLAMA | dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=5, num_attention_heads=16, num_key_value_heads=16)   # 247 MiB in fp32
TIED = ranks.LLAMA | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True)


def run(folder, home, lean=True, **kw):
    from shardnb.plan.recipe import Recipe
    base = dict(model=folder, dataset=ranks.rows_file(home, ranks.ragged(20)), strategy="fsdp", nproc=2, micro_batch=2, global_batch=4, max_steps=3, max_length=32, precision="fp32")
    done = ranks.train(Recipe(**base | kw, fsdp_config={} if lean else {"cpu_ram_efficient_loading": False}), home=home)
    assert {e["settings"]["cpu_ram_efficient_loading"] for e in done.events("effective")} == {lean and not kw.get("fp32_norms", False)}
    return done


def saved(folder, config, dtype="float32"):
    "A model folder with weights in it"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    top = ranks.model_folder(folder, config)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(top), dtype=getattr(torch, dtype)).save_pretrained(top)
    return top


def same(folder, home, **kw):
    (home / "lean").mkdir(), (home / "whole").mkdir()
    lean, whole = run(folder, home / "lean", **kw), run(folder, home / "whole", lean=False, **kw)
    assert lean.metrics.loss.tolist() == whole.metrics.loss.tolist() and lean.metrics.grad_norm.tolist() == whole.metrics.grad_norm.tolist()


def test_the_same_losses_bit_for_bit(tmp_path): same(saved(tmp_path / "model", TIED), tmp_path, tuning="lora")


@pytest.mark.slow
@pytest.mark.parametrize("kw", [dict(), dict(precision="bf16"), dict(tuning="lora", precision="bf16"), dict(tuning="lora", use_dora=True), dict(strategy="fsdp+param-cpu"), dict(strategy="fsdp-grad-op", nproc=3, global_batch=6),
                                dict(save_only_model=True, save_steps=2), dict(fp32_norms=True, precision="bf16")], ids=str)
@pytest.mark.parametrize("files", [True, False])
def test_in_every_way(tmp_path, kw, files): same((saved if files else ranks.model_folder)(tmp_path / "model", TIED), tmp_path, **kw)


def anonymous(): return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024   # memory of this process alone, without the pages of files


@pytest.fixture
def peaks(tmp_path, monkeypatch):
    "Trains a step, and gives for each rank what it held at most, in copies of the model: when the weights are loaded, and until they are cut"
    from shardnb.run import models
    from shardnb.run.observer import Observer
    load, adopt, told, size = models.load_model, Observer.adopt, {}, 4 * 64_777_216

    def look():
        began = anonymous()
        while "sharded" not in told:
            told["peak"] = max(told.get("peak", 0), (anonymous() - began) / size)
            time.sleep(.001)

    def load_model(*args, **kw):
        threading.Thread(target=look, daemon=True).start()
        model = load(*args, **kw)
        told["loaded"] = told["peak"]
        return model

    def adopting(self, *args):
        told["sharded"] = told["peak"]
        (tmp_path / f"{self.rank}.json").write_text(json.dumps(told))
        facts = adopt(self, *args)
        assert sum(getattr(p, "ds_numel", p.numel()) for _, p in self.engine.full_parameters()) * 4 == size
        return facts
    monkeypatch.setattr(models, "load_model", load_model)
    monkeypatch.setattr(Observer, "adopt", adopting)

    def of(folder, **kw):
        run(folder, tmp_path, max_steps=1, **kw)
        found = [json.loads((tmp_path / f"{r}.json").read_text()) for r in (0, 1)]
        print(kw, [{k: f"{v * size / 2**20:.0f} MiB" for k, v in f.items()} for f in found])
        return found
    return of


@pytest.mark.slow
@pytest.mark.parametrize("files", [True, False])
def test_a_machine_holds_one_copy_while_it_loads(tmp_path, peaks, files):
    folder = saved(tmp_path / "model", LARGE, "bfloat16") if files else ranks.model_folder(tmp_path / "model", LARGE)
    first, other = peaks(folder)
    assert first["loaded"] > .9 and other["loaded"] < .15 and other["sharded"] < 1.1   # its own half, and what is on its way
    assert all(p["loaded"] > .9 and p["sharded"] > 1.3 for p in peaks(folder, lean=False))   # what it was
