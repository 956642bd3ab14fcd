"Every format, and malformed files: right rows, or one clear error that names the field and the line"
import json

import pytest

from shardnb.plan.problem import RecipeError
from shardnb.plan.recipe import Recipe
from shardnb.run.formats import FORMATS, check_dataset, format_of, rows

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
GOOD = {
    "messages": {"messages": CHAT},
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    "alpaca": {"instruction": "hi", "input": "", "output": "yo"},
    "prompt-completion": {"prompt": CHAT[:1], "completion": CHAT[1:]},
}


def write(folder, name, content):
    "A file below `folder`: rows as JSON lines, or the text or bytes as given"
    p = folder / name
    if isinstance(content, list): content = "".join(json.dumps(r) + "\n" for r in content)
    p.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(p)


@pytest.mark.parametrize("fmt", GOOD)
def test_conversations_of_every_format_give_the_same_messages(tmp_path, fmt):
    assert format_of(GOOD[fmt]) == fmt
    r = Recipe(dataset=write(tmp_path, "a.jsonl", [GOOD[fmt]] * 2))
    assert check_dataset(r) == []
    got = list(rows(r))
    assert len(got) == 2 and got[0]["messages"] == CHAT


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl": write(tmp_path, path.name, [{"text": "ä"}, {"text": "b\nc"}])
    if suffix == "json": write(tmp_path, path.name, json.dumps([{"text": "ä"}, {"text": "b\nc"}]))
    if suffix == "csv": write(tmp_path, path.name, 'text\nä\n"b\nc"\n')
    if suffix == "parquet":
        pa = pytest.importorskip("pyarrow.parquet")
        import pyarrow
        pa.write_table(pyarrow.table({"text": ["ä", "b\nc"]}), path)
    r = Recipe(dataset=str(path))
    assert check_dataset(r) == []
    assert [x["completion"] for x in rows(r)] == ["ä", "b\nc"]


BAD = {   # name of the file: content, what the one message must hold
    "missing.jsonl": (None, "there is no file or folder"),
    "empty.jsonl": ("", "the file is empty"),
    "blank.jsonl": ("\n\n", "holds no rows"),
    "none.json": ("[]", "holds no rows"),
    "broken.jsonl": ('{"text": "a"}\n{"text": "b"\n', "broken JSON on line 2"),
    "broken.json": ('[{"text": "a"},\n {"text": }]', "broken JSON on line 2"),
    "list.jsonl": ('{"text": "a"}\n["b"]\n', "line 2: must be an object"),
    "latin1.jsonl": ('{"text": "a"}\n{"text": "ä"}\n'.encode("latin1"), "line 2: not UTF-8"),
    "number.jsonl": ([{"text": "a"}, {"text": 3}], "line 2: text must be a string, not int"),
    "null.jsonl": ([{"instruction": "a", "output": None}], "line 1: output is missing"),
    "columns.jsonl": ([{"question": "a", "answer": "b"}], "no known format has the columns 'question', 'answer'"),
    "near.jsonl": ([{"instructions": "a", "output": "b"}], "'instructions' looks like 'instruction'"),
    "preference.jsonl": ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "preference"),
    "role.jsonl": ([{"messages": CHAT}, {"messages": [{"role": "asistant", "content": "b"}]}], "line 2: messages[0].role: 'asistant' is no role"),
    "mute.jsonl": ([{"messages": CHAT[:1]}], "line 1: messages: the assistant says nothing"),
    "keys.jsonl": ([{"messages": [{"from": "user", "value": "b"}]}], "messages[0] needs 'role' and 'content'"),
    "change.jsonl": ([{"text": "a"}, {"messages": CHAT}], "line 2: text is missing"),
    "wide.csv": ("text\na\nb,c\n", "line 3: has more fields than the header"),
    "quote.csv": ('text\n"a\n', "not valid CSV"),
    "fake.parquet": ("not parquet", "not a readable Parquet file"),
    "rows.jsnl": ([{"text": "a"}], "allowed: .jsonl"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_file_is_one_clear_problem(tmp_path, name):
    content, expect = BAD[name]
    path = str(tmp_path / name) if content is None else write(tmp_path, name, content)
    problems = check_dataset(Recipe(dataset=path))
    assert len(problems) == 1 and problems[0].field == "dataset"
    assert expect in str(problems[0]) and name in str(problems[0])
    with pytest.raises(RecipeError): list(rows(Recipe(dataset=path)))


def test_names_that_are_no_dataset():
    assert "neither a hub id (owner/name) nor a path" in str(check_dataset(Recipe(dataset="two words"))[0])
    assert "nor in the cache of the hub" in str(check_dataset(Recipe(dataset="owner/name"))[0])   # these tests are offline


def test_a_system_prompt_goes_where_there_is_none(tmp_path):
    own = [{"role": "system", "content": "own"}, *CHAT]
    got = list(rows(Recipe(dataset=write(tmp_path, "a.jsonl", [{"messages": CHAT}, {"messages": own}]), system_prompt="given")))
    assert [m["messages"][0]["content"] for m in got] == ["given", "own"]


def test_the_formats_are_told_apart_by_their_columns():
    assert [format_of(cols) for cols in FORMATS.values()] == list(FORMATS)


def test_the_demo_pairs_are_the_pinned_ones():
    from shardnb.run.demo import demo_note, demo_pairs
    assert demo_note() is None and len(demo_pairs()) == 141


@pytest.mark.parametrize("split", ["test", "train[:10]"])
def test_a_split_of_what_has_none_is_refused(tmp_path, split):
    for name in ("demo", write(tmp_path, "a.jsonl", [{"text": "a"}])):
        problems = check_dataset(Recipe(dataset=name, split=split))
        assert [p.field for p in problems] == ["split"] and "allowed: train" in str(problems[0])
        with pytest.raises(RecipeError, match="max_samples"): list(rows(Recipe(dataset=name, split=split)))


def test_splits_of_a_folder_on_disk(tmp_path):
    import datasets
    ds = datasets.Dataset.from_dict({"text": ["a", "b"]})
    ds.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=ds, test=ds).save_to_disk(str(tmp_path / "two"))
    assert check_dataset(Recipe(dataset=str(tmp_path / "one"))) == check_dataset(Recipe(dataset=str(tmp_path / "two"), split="test")) == []
    assert "is one piece" in str(check_dataset(Recipe(dataset=str(tmp_path / "one"), split="test"))[0])
    assert "did you mean 'train'" in str(check_dataset(Recipe(dataset=str(tmp_path / "two"), split="trian"))[0])
