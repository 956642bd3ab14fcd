"What is trained on, token for token, with the chat templates of the common families; and rows of every source"
import copy
import json
import os

import pytest
from trl import chat_template_utils as families

from shardnb.plan.problem import RecipeError
from shardnb.plan.recipe import Recipe
from shardnb.run import data, preview
from shardnb.run.builtin import demo_problems
from shardnb.run.formats import normalise
from shardnb.run.models import load_tokenizer

TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
RECIPE = Recipe(model="tiny", dataset="demo", max_length=4096)


def conversation(*turns, trained=0):
    "Turns as 'role: text', as rows give them"
    return {"messages": [{"role": r, "content": c} for r, c in (t.split(": ", 1) for t in turns)], "trained": trained, "where": "row 1"}


ROWS = {
    "one turn": conversation("user: 1?", "assistant: one"),
    "many turns": conversation("user: 1?", "assistant: one", "user: 2?", "assistant: two\n\nand more ", "user: 3?", "assistant: \n three"),
    "system": conversation("system: be brief", "user: 1?", "assistant: one", "user: 2?", "assistant: two"),
    "empty system": conversation("system: ", "user: 1?", "assistant: one"),
    "same words": conversation("user: one", "assistant: one", "user: one", "assistant: one"),
    "an empty answer": conversation("user: 1?", "assistant: ", "user: 2?", "assistant: zwei ä 😀"),
    "part of the answer in the prompt": conversation("user: 1?", "assistant: one", "user: 2?", "assistant: two", trained=3),
    "a question at the end": conversation("user: 1?", "assistant: one", "user: 2?"),
}
FAMILIES = {  # template, that of TRL with markers, what ends a turn, whether there is a system role
    "llama3": (families.llama3_chat_template, families.llama3_training_chat_template, "<|eot_id|>", True),
    "qwen2.5": (families.qwen2_5_chat_template, families.qwen2_5_training_chat_template, "<|im_end|>\n", True),
    "gemma2": (families.gemma_chat_template, families.gemma_training_chat_template, "<end_of_turn>\n", False),
    "gemma3": (families.gemma3_chat_template, families.gemma3_training_chat_template, "<end_of_turn>\n", True),
}


@pytest.fixture(scope="module")
def tok():
    "The byte tokenizer of `tiny` with the special tokens of all families"
    tok = load_tokenizer(Recipe(model="tiny"))
    tok.add_special_tokens({"additional_special_tokens": TOKENS})
    return tok


def with_template(tok, template, bos="<|begin_of_text|>"):
    tok = copy.deepcopy(tok)
    tok.chat_template, tok.bos_token = template, bos
    return tok


def runs(tok, row):
    "What is trained on, run by run"
    out = data.tokenize(tok, row, RECIPE)
    assert [a for a, b in zip(out["input_ids"], out["labels"]) if b not in (-100, a)] == []
    return [t for t, on in preview._pieces(tok, out["input_ids"], out["labels"]) if on], out


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_those_of_the_template_with_markers(tok, family, row):
    template, marked, end, system = FAMILIES[family]
    plain, truth = with_template(tok, template), with_template(tok, marked)
    case = ROWS[row]
    if case["messages"][0]["role"] == "system" and not system:
        with pytest.raises(ValueError, match="System role not supported"): data.tokenize(plain, case, RECIPE)
        return
    found, out = runs(plain, case)
    expected, right = runs(truth, case)
    assert out["complete"] and out["input_ids"] == right["input_ids"] == tok.apply_chat_template(case["messages"], chat_template=template, bos_token="<|begin_of_text|>", return_dict=False)
    if family == "qwen2.5" and not case["trained"]:   # TRL's markers begin before the line break that ends the prompt for an answer
        assert all(e.startswith("\n") for e in expected)
        expected = [e[1:] for e in expected]
    assert found == expected
    answers = [m["content"] for m in case["messages"][case["trained"]:] if m["role"] == "assistant"]
    assert found == [(a.strip() if family != "qwen2.5" else a) + end for a in answers]
    shown = preview._pieces(plain, out["input_ids"], out["labels"])   # what a preview shows
    assert "".join(t for t, _ in shown) == plain.decode(out["input_ids"])


def test_a_template_that_rewrites_earlier_turns_trains_the_last_and_says_so(tok, tmp_path):
    "Qwen3's, which takes thoughts out of all but the last turn"
    plain = with_template(tok, families.qwen3_chat_template)
    row = conversation("user: 1?", "assistant: <think>\nhm\n</think>\n\none", "user: 2?", "assistant: <think>\nhm\n</think>\n\ntwo")
    found, out = runs(plain, row)
    assert found == ["<think>\nhm\n</think>\n\ntwo<|im_end|>\n"] and not out["complete"]
    rows, notes = save(tmp_path, [row]), []
    data.load_rows(Recipe(model="tiny", dataset=rows), plain, on_note=notes.append)
    assert notes == ["in 1 of 1 conversations only the last answer is trained on: the chat template rewrites earlier turns"]


def save(folder, rows):
    p = folder / "rows.jsonl"
    p.write_text("".join(json.dumps({"messages": r["messages"]}) + "\n" for r in rows))
    return str(p)


BACKWARDS = "{% for m in messages | reverse %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def test_a_template_that_shows_no_answer_is_said(tok, tmp_path, monkeypatch):
    plain, row = with_template(tok, BACKWARDS), conversation("user: 1?", "assistant: one", "user: 2?")
    assert data.tokenize(plain, row, RECIPE)["answered"] is False
    recipe = Recipe(model="tiny", dataset=save(tmp_path, [row] * 3))
    with pytest.raises(RecipeError, match="assistant_only_loss.*doesn't show where the assistant's answers begin"): data.load_rows(recipe, plain)
    ids = data.load_rows(recipe.replace(assistant_only_loss=False), plain)[0]
    assert ids[0]["labels"] == ids[0]["input_ids"]
    monkeypatch.setattr(preview, "load_tokenizer", lambda *a, **kw: plain)
    shown = preview.preview(recipe)
    assert any("WARNING: the tokenizer's chat template doesn't show" in n for n in shown["notes"]) and not any(on for _, on in shown["rows"][0])


def test_templates_without_special_tokens_or_a_prompt_for_an_answer(tok):
    "A BPE tokenizer joins the line breaks between two turns: compared as tokens, the first turn's end would not be found"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<unk>", "Ċ", "ĊĊ", *map(chr, range(33, 127)), "Ġ"])}, merges=[("Ċ", "Ċ")], unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    t.decoder = decoders.ByteLevel()
    joins = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<unk>", pad_token="<unk>")
    assert joins("a\n\n")["input_ids"][-1] != joins("a\n\n#")["input_ids"][-2]
    row = ROWS["many turns"]
    for prompt in ("{% if add_generation_prompt %}### Answer:\n{% endif %}", ""):
        template = "{% for m in messages %}### {{ 'Answer' if m['role'] == 'assistant' else 'Question' }}:\n{{ m['content'] | trim }}\n\n{% endfor %}" + prompt
        for t in (tok, joins):
            found, out = runs(with_template(t, template, bos=t.eos_token), row)
            assert out["complete"] and [f.strip() for f in found] == [m["content"].strip() for m in row["messages"][1::2]], found


@pytest.fixture(scope="module")
def smollm2():
    if bad := demo_problems(): (pytest.fail if os.environ.get("CI") else pytest.skip)(str(bad[0]))   # `make install` brings it, so where everything is tested it must be there
    return load_tokenizer(Recipe(model="demo"))


@pytest.mark.parametrize("row", ROWS)
def test_smollm2(smollm2, row):
    tok, case = smollm2, ROWS[row]
    marked = tok.chat_template.replace("""{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}""", """{{'<|im_start|>' + message['role'] + '
'}}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>
' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>
' }}{% endif %}""")
    assert marked.count("generation %}") == 2
    found, out = runs(tok, case)
    expected, right = runs(with_template(tok, marked, bos=tok.bos_token), case)
    assert found == expected and out["input_ids"] == right["input_ids"] and out["labels"] == right["labels"]


def test_a_preview_shows_what_the_labels_say(tmp_path):
    recipe = Recipe(model="tiny", dataset=save(tmp_path, list(ROWS.values())), max_length=64)
    tok = load_tokenizer(recipe)
    shown, kept = preview.preview(recipe, n=3), data.load_rows(recipe, tok)[0]
    for row, want in zip(shown["rows"], kept):
        assert row == preview._pieces(tok, want["input_ids"], want["labels"])
    lengths = [data.tokenize(tok, normalise({"messages": r["messages"]}, "messages"), recipe)["length"] for r in ROWS.values()]
    assert (shown["lengths"]["min"], shown["lengths"]["max"], shown["lengths"]["cut"]) == (min(lengths), max(lengths), sum(n > 64 for n in lengths))
    assert preview.preview_html(shown).count("<mark>") == sum(on for row in shown["rows"] for _, on in row) and len(shown["rows"]) == 3
    assert f"{sum(n > 64 for n in lengths) / len(lengths):.0%} are cut at 64" in preview.preview_text(shown)


def test_modelscope_names_ask_for_its_package_and_become_folders(monkeypatch, tmp_path):
    "Its package isn't installed here: a stand-in with its signature (modelscope 1.40) hands out a local folder"
    import importlib.machinery
    import importlib.util
    import sys
    from types import ModuleType

    from shardnb.run.formats import check_dataset, rows
    from shardnb.run.models import load_model, model_problems, resolve_model
    tiny = resolve_model("tiny")
    r = Recipe(model="modelscope:owner/net@v1.2", dataset="modelscope:owner/rows", precision="fp32")
    if importlib.util.find_spec("modelscope") is None:
        assert "pip install modelscope" in str(model_problems(r)[0]) and "pip install modelscope" in str(check_dataset(r)[0])
    asked, fake = [], ModuleType("modelscope")
    fake.__spec__ = importlib.machinery.ModuleSpec("modelscope", None)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    def snapshot_download(model_id, revision=None, repo_type=None):
        asked.append((model_id, revision, repo_type))
        return tiny if repo_type == "model" else str(tmp_path)
    fake.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "modelscope", fake)
    assert model_problems(r) == check_dataset(r) == []
    load_model(r)
    assert [x["completion"] for x in rows(r)] == ["a"]
    assert asked == [("owner/net", "v1.2", "model"), ("owner/rows", None, "dataset")]


@pytest.mark.slow
@pytest.mark.parametrize("packing", (False, True))
def test_tokenizing_a_large_file_takes_bounded_memory(tmp_path, packing):
    "Ten times the rows, and at most a few dozen MiB more"
    import os
    import subprocess
    import sys
    code = """
import json, re, sys, threading, time
from pathlib import Path
from shardnb.plan.recipe import Recipe
from shardnb.run import data, models
peak = [0]
def watch():   # memory of the process's own: files that are mapped don't count, the system takes their pages back
    while True:
        peak[0] = max(peak[0], int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024)
        time.sleep(.02)
threading.Thread(target=watch, daemon=True).start()
n, folder, packing = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
path = f"{folder}/{n}.jsonl"
with open(path, "w") as f:
    for i in range(n): f.write(json.dumps({"prompt": f"{i}? " + "why " * 100, "completion": "because " * 100}) + chr(10))
r = Recipe(model="tiny", dataset=path, packing=packing, max_length=2048, eval_share=.01)
train, held = data.load_rows(r, models.load_tokenizer(r))
assert packing or len(train) + len(held) == n
print(peak[0])
"""
    env = dict(os.environ, SHARDNB_CACHE=str(tmp_path / "cache"))
    peaks = [int(subprocess.run([sys.executable, "-c", code, str(n), str(tmp_path), str(packing)], env=env, check=True, capture_output=True, text=True).stdout) for n in (1500, 15_000)]
    print("peak in MiB at 1,500 and 15,000 rows:", peaks)
    assert peaks[1] - peaks[0] < 60
    kept = [p for p in (tmp_path / "cache").rglob("*.arrow")]
    assert all(p.name.startswith("data-") for p in kept), kept   # nothing of the way there is left behind
