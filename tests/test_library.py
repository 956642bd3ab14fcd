"""The recipes of the library: each is read, planned on the machine that it was worked out for, and fits there as it is written.

No hub is reached here, so a model's published shape (its config.json, without weights) stands for it; the arithmetic is the same.
"""
import json
import re

import pytest

import shardnb
from shardnb.plan.library import library
from shardnb.plan.machine import Machine
from shardnb.plan.recipe import Recipe

GiB = 2**30
# From the models' config.json on the hub, with the parameters that their cards state
LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", tie_word_embeddings=False)
QWEN2 = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": (0.494e9, QWEN2 | dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, vocab_size=151936,
                                                         tie_word_embeddings=True, max_position_embeddings=32768)),
    "Qwen/Qwen3-8B": (8.19e9, dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                                   num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False, max_position_embeddings=40960)),
    "NousResearch/Llama-2-13b-chat-hf": (13.0e9, LLAMA | dict(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=40, vocab_size=32000,
                                                              max_position_embeddings=4096)),
    "NousResearch/Meta-Llama-3.1-70B-Instruct": (70.6e9, LLAMA | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
                                                                      max_position_embeddings=131072)),
    "Qwen/Qwen2.5-72B-Instruct": (72.7e9, QWEN2 | dict(hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=152064,
                                                       tie_word_embeddings=False, max_position_embeddings=32768)),
}


@pytest.fixture(scope="module")
def shaped(tmp_path_factory):
    "A library recipe with a folder of its model's shape in place of the hub id"
    top = tmp_path_factory.mktemp("shapes")

    def shaped(name, **changes):
        r = Recipe.from_yaml(name)
        folder = top / r.model.replace("/", "--")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SHAPES[r.model][1]))
        return r.replace(model=str(folder), dataset="demo", split="train", **changes)
    return shaped


def gib(n): return f"{n / GiB:.1f} GiB"


def test_six_recipes_with_a_purpose_and_a_machine():
    found = library()
    assert len(found) == 6 and list(found)[0] == "0.5b-laptop"
    for r in found.values():
        assert r.about and Machine.preset(r.machine) and Recipe.from_yaml(r.name) == Recipe.from_yaml(r.path) == Recipe.from_yaml(r.text)
        assert Recipe.from_yaml(r.name).model in SHAPES


@pytest.mark.parametrize("name", list(library()))
def test_it_fits_as_it_is_written(shaped, name):
    recipe, machine = shaped(name), Machine.preset(library()[name].machine)
    plan = shardnb.plan(recipe, machine=machine)
    row = plan.table.set_index("label" if "label" in plan.table else "strategy").loc[recipe.strategy]
    row = row if row.ndim == 1 else row.iloc[0]
    b = shardnb.predict(recipe, machine=machine)
    print(f"{name}: {recipe.strategy} on {machine.name}: {gib(b.peak)} a rank at {b.peak_at}, host {gib(b.host_peak)} a rank; {row.fits}; recommended {plan.best}")
    assert row.fits in ("yes", "tight"), row.why


def test_72b_does_not_fit_without_offload(shaped):
    "Article B's case: '~35 GB per GPU' is 18 bytes a parameter over eight ranks, 150 GiB"
    name = "72b-full-8x80gb"
    recipe, machine = shaped(name), Machine.preset("8xH100-80GB")
    plan = shardnb.plan(recipe.replace(strategy="auto"), machine=machine)
    plain = {r["strategy"]: r for r in plan.rows if r["label"] == r["strategy"]}
    for s in ("ddp", "zero1", "zero2", "zero3", "fsdp"): assert plain[s]["fits"] == "no", s
    params = SHAPES[Recipe.from_yaml(name).model][0]
    assert plain["zero3"]["peak_bytes"] > 16 * params / 8      # fp32 masters, two moments, gradients and weights
    needs, has = map(float, re.match(r"needs (?:at least )?([\d.]+) GiB where a rank has ([\d.]+);", plain["zero3"]["why"]).groups())
    assert needs == pytest.approx(plain["zero3"]["peak_bytes"] / GiB, rel=.01) and has == pytest.approx(plain["zero3"]["limit_bytes"] / GiB, rel=.01)
    print(f"zero3 without offload: {gib(plain['zero3']['peak_bytes'])} of {gib(plain['zero3']['limit_bytes'])}; what fits: {[r['label'] for r in plan.rows if r['fits'] != 'no']}; best {plan.best}")
    assert any(r["fits"] != "no" for r in plan.rows)


def test_13b_states_alone_are_more_than_a_card():
    "Article A's case: 'under 35 GB measured' can't be a full fine-tune without offload"
    assert 18 * SHAPES["NousResearch/Llama-2-13b-chat-hf"][0] / 4 > 40 * GiB


def test_another_dataset_has_no_split_of_the_recipe_s():
    r = Recipe.from_yaml("8b-lora-24gb")
    assert r.split == "train_sft[:20000]" and r.replace(dataset="mine.jsonl").split == "train" and r.replace(dataset="mine.jsonl", split="test").split == "test" and r.replace(max_steps=3).split == r.split
