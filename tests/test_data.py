"Every format, and malformed files: right rows, or one clear error that names the field and the line"
import gzip
import io
import json
import os
import time

import pytest

from shardnb.plan.problem import RecipeError
from shardnb.plan.recipe import Recipe
from shardnb.run.formats import FORMATS, check_dataset, file_rows, format_of, rows

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


def packed(text): return gzip.compress(text.encode())


def arrow(rows, form="parquet"):
    "Rows as a Parquet file, or in Arrow's file or stream form"
    import pyarrow as pa
    import pyarrow.parquet as pq
    table, out = pa.Table.from_pylist(rows), io.BytesIO()
    if form == "parquet": pq.write_table(table, out)
    else:
        with (pa.ipc.new_file if form == "file" else pa.ipc.new_stream)(out, table.schema) as w: w.write_table(table, 2)
    return out.getvalue()


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "arrow", "stream.arrow", "jsonl.gz", "json.gz", "csv.gz"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix.endswith("arrow"): path.write_bytes(arrow([{"text": "ä"}, {"text": "b\nc"}], "stream" if "stream" in suffix else "file"))
    if suffix.endswith("gz"): path.write_bytes(packed({"jsonl": '{"text": "ä"}\n{"text": "b\\nc"}\n', "json": '[{"text": "ä"}, {"text": "b\\nc"}]', "csv": 'text\nä\n"b\nc"\n'}[suffix[:-3]]))
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
    "nan.jsonl": ('{"text": "a"}\n{"text": NaN}\n', "line 2: text must be a string, not NaN (an empty cell)"),
    "twice.jsonl": ('{"text": "a"}\n{"text": "b", "text": "c"}\n', "line 2: 'text' stands twice in one object"),
    "twice.json": ('[{"text": "a"},\n{"text": "b", "text": "c"}]', "row 2: 'text' stands twice in one object"),
    "twice.csv": ("text,text\na,b\n", "line 1: the header names 'text' twice"),
    "nested.jsonl": ([{"messages": json.dumps(CHAT)}, {"messages": "[{'role': 'user'}]"}], "line 2: messages must be a list of messages, and its text isn't one: broken JSON"),
    "string.jsonl": ([{"messages": json.dumps({"role": "user"})}], "line 1: messages must be a list of messages, not dict"),
    "roles.jsonl": ([{"messages": [{"role": None, "content": "a"}]}], "line 1: messages[0].role: None is no role"),
    "rolelist.jsonl": ([{"messages": [{"role": ["user"], "content": "a"}]}], "messages[0].role: ['user'] is no role"),
    "content.jsonl": ([{"messages": [{"role": "user", "content": None}]}], "line 1: messages[0].content must be a string, not NoneType"),
    "noone.jsonl": ([{"messages": []}], "line 1: messages is empty"),
    "spaces.jsonl": ([{"text": "a"}, {"text": "  "}], "line 2: text is empty"),
    "half.jsonl": ('{"text": "a\\ud83d"}\n', "line 1: text holds half a character (a lone surrogate, \\ud83d)"),
    "deep.jsonl": ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "line 1: lists or objects lie too deep"),
    "digits.jsonl": ('{"text": ' + "1" * 5000 + "}\n", "line 1: Exceeds the limit"),
    "two.jsonl": ('{"text": "a"} {"text": "b"}\n', "broken JSON on line 1, column 15: Extra data"),
    "one.json": ('{\n  "data": [{"text": "a"}]\n}\n', "holds one JSON object over several lines"),
    "open.json": ('[{"text": "a"},\n{"text": "b"}\n', "broken JSON on line 3"),
    "after.json": ('[{"text": "a"}]\n[{"text": "b"}]', "broken JSON on line 2, column 1: Extra data"),
    "latin1.json": ('[{"text": "ä"}]'.encode("latin1"), "not UTF-8 text"),
    "utf16.jsonl": ('{"text": "a"}\n'.encode("utf-16"), "line 1: not UTF-8 text (byte 0)"),
    "utf16.csv": ("text\na\n".encode("utf-16"), "not UTF-8 text (byte 0)"),
    "short.csv": ("instruction,output\na\n", "line 2: output is missing"),
    "semicolon.csv": ("instruction;output\na;b\n", "no known format has the columns 'instruction;output'"),
    "header.csv": ("text\n", "holds no rows"),
    "cut.jsonl.gz": (packed('{"text": "a"}\n' * 1000)[:-20], "not a whole gzip file"),
    "plain.jsonl.gz": ('{"text": "a"}\n', "not a whole gzip file: Not a gzipped file"),
    "cut.parquet": (arrow([{"text": "a"}] * 100)[:-40], "not a readable Parquet file"),
    "hole.parquet": (b"PAR1" + b"x" * 50 + b"PAR1", "not a readable Parquet file"),
    "cut.arrow": (arrow([{"text": "a" * 50}] * 100, "file")[:900], "not a readable Arrow file"),
    "text.arrow": ("text\na\n", "not a readable Arrow file"),
    "null.parquet": (arrow([{"text": "a"}, {"text": None}]), "row 2: text is missing"),
    "type.parquet": (arrow([{"text": 1}, {"text": 2}]), "row 1: text must be a string, not int"),
    "rows.parquet.gz": (gzip.compress(arrow([{"text": "a"}])), "can't be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_file_is_one_clear_problem(tmp_path, name):
    content, expect = BAD[name]
    path = str(tmp_path / name) if content is None else write(tmp_path, name, content)
    problems = check_dataset(Recipe(dataset=path))
    assert len(problems) == 1 and problems[0].field == "dataset"
    assert expect in str(problems[0]) and name in str(problems[0])
    with pytest.raises(RecipeError): list(rows(Recipe(dataset=path)))


FINE = {   # name of the file: content, what its rows say
    "bom.jsonl": (b"\xef\xbb\xbf" + b'{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
    "bom.csv": (b"\xef\xbb\xbf" + b"text\na\nb\n", ["a", "b"]),
    "bom.json": (b"\xef\xbb\xbf" + b'[{"text": "a"}, {"text": "b"}]', ["a", "b"]),
    "crlf.jsonl": ('{"text": "a"}\r\n\r\n{"text": "b"}\r\n', ["a", "b"]),
    "crlf.csv": ("text\r\na\r\nb\r\n", ["a", "b"]),
    "noend.jsonl": ('{"text": "a"}\n{"text": "b"}', ["a", "b"]),
    "huge.jsonl": (json.dumps({"text": "x" * 5_000_000}) + "\n" + json.dumps({"text": "b"}) + "\n", ["x" * 5_000_000, "b"]),
    "huge.json": (json.dumps([{"text": "x" * 5_000_000}, {"text": "b"}], indent=1), ["x" * 5_000_000, "b"]),
    "lines.jsonl": ('{"text": "a\u2028b\u0085c"}\n', ["a\u2028b\u0085c"]),
    "more.jsonl": ('{"text": "a", "id": 1}\n{"id": null, "text": "b", "new": [1]}\n', ["a", "b"]),
    "nul.csv": ('text\n"a\0b"\n', ["a\0b"]),
}


@pytest.mark.parametrize("name", FINE)
def test_an_odd_file_that_can_be_read_gives_its_rows(tmp_path, name):
    content, expect = FINE[name]
    r = Recipe(dataset=write(tmp_path, name, content))
    assert check_dataset(r) == [] and [x["completion"] for x in rows(r)] == expect


def test_lists_that_are_written_as_text(tmp_path):
    "As a CSV file holds them; and ShareGPT's column with messages in it"
    cell = json.dumps(CHAT).replace('"', '""')
    for name, content in (("a.csv", f'id,messages\n1,"{cell}"\n'), ("a.jsonl", [{"messages": json.dumps(CHAT)}]), ("b.jsonl", [{"conversations": CHAT}])):
        r = Recipe(dataset=write(tmp_path, name, content))
        assert check_dataset(r) == [] and list(rows(r))[0]["messages"] == CHAT


def test_an_array_is_read_piece_by_piece(tmp_path, monkeypatch):
    from shardnb.run import formats
    many = [{"text": f"row {i} ä😀 " + "x" * (i % 50), "n": 1.5 * i} for i in range(200)]
    path = write(tmp_path, "a.json", json.dumps(many, indent=2, ensure_ascii=False))
    for size in (1, 7, 100, 1 << 20):
        monkeypatch.setattr(formats, "_CHUNK", size)
        assert [r for _, r in formats.file_rows(path)] == many
    broken = write(tmp_path, "b.json", json.dumps(many, indent=2).replace('"row 150', 'row 150'))
    line = 1 + json.dumps(many, indent=2).split('"row 150')[0].count("\n")
    for size in (7, 1 << 20):
        monkeypatch.setattr(formats, "_CHUNK", size)
        with pytest.raises(formats.RowError, match=f"on line {line}, column 13"): list(formats.file_rows(broken))


def in_memory(rows):
    "The same rows as a cell may hold them"
    import datasets
    import pandas as pd
    return {"list": rows, "tuple": tuple(rows), "Dataset": datasets.Dataset.from_list(rows), "pandas": pd.DataFrame(rows, index=range(5, 5 + len(rows))),
        "columns": {k: [r[k] for r in rows] for k in rows[0]}, "arrow": datasets.Dataset.from_list(rows).data.table}


def test_rows_in_memory():
    from shardnb.run.data import as_dataset, tokenize_rows
    from shardnb.run.models import load_tokenizer
    r = Recipe(model="tiny", dataset="demo")
    tok = load_tokenizer(r)
    for made in map(in_memory, ([{"prompt": "a?", "completion": "b"}, {"prompt": "c?", "completion": "d"}], [{"messages": CHAT}, {"messages": CHAT * 2}])):
        found = {k: tokenize_rows(as_dataset(v), r, tok).to_list() for k, v in made.items()}
        assert len(found["list"]) == 2 and all(v == found["list"] for v in found.values())


ODD = {   # rows that a cell made: what the one message must hold
    "nothing": ([], "holds no rows"),
    "no dicts": ([{"text": "a"}, "b"], "row 2 is str, not a dict"),
    "mixed types": ([{"text": "a"}, {"text": 3}], "row 2: text is int, and in row 1 str"),
    "a missing column": ([{"text": "a"}, {"instruction": "b"}], "row 2: text is missing"),
    "preference pairs": ([{"chosen": "a", "rejected": "b"}], "preference"),
    "uneven columns": ({"text": ["a", "b"], "id": [1]}, "columns"),
    "not rows": (42, "rows of a dataset"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_rows_in_memory_are_one_clear_problem(name):
    from shardnb.run.data import as_dataset, tokenize_rows
    from shardnb.run.models import load_tokenizer
    made, expect = ODD[name]
    r = Recipe(model="tiny")
    with pytest.raises(RecipeError) as e: tokenize_rows(as_dataset(made), r, load_tokenizer(r))
    assert len(e.value.problems) == 1 and expect in str(e.value) and "train_dataset" in str(e.value)


def test_empty_cells_of_a_table_are_missing():
    import datasets
    import pandas as pd
    from shardnb.run.data import as_dataset
    with pytest.raises(RecipeError, match="row 2: output is missing"): list(rows(Recipe(model="tiny"), as_dataset(pd.DataFrame({"instruction": ["a", "b"], "output": ["c", float("nan")]}))))
    with pytest.raises(RecipeError, match="splits train, test: give one of them"): as_dataset(datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a"]}), test=datasets.Dataset.from_dict({"text": ["a"]})))


def test_names_that_are_no_dataset():
    assert "neither a hub id (owner/name) nor a path" in str(check_dataset(Recipe(dataset="two words"))[0])
    assert "nor in the cache of the hub" in str(check_dataset(Recipe(dataset="owner/name"))[0])   # these tests are offline


def test_new_rows_take_the_place_of_old_ones(tmp_path, monkeypatch):
    from shardnb.run.data import load_rows
    from shardnb.run.models import load_tokenizer
    monkeypatch.setenv("SHARDNB_CACHE", str(tmp_path / "cache"))
    r = Recipe(model="tiny", dataset=write(tmp_path, "a.jsonl", [{"text": "hi"}]))
    tok, top, old = load_tokenizer(r), tmp_path / "cache" / "rows", 8 * 24 * 3600   # s
    def used(folder, ago): os.utime(folder, (time.time() - ago,) * 2)
    load_rows(r, tok)
    first = next(p for p in top.iterdir() if p.is_dir())
    for name in ("long ago", "today"):
        (top / name).mkdir(parents=True)
        with open(top / name / "x", "wb") as f: f.truncate(21 << 30)   # takes no disk
    used(first, old)
    used(top / "long ago", old)
    load_rows(r, tok)   # asked for again, so they stay
    load_rows(r.replace(max_length=8), tok)
    assert first.is_dir() and (top / "today").is_dir() and not (top / "long ago").exists()


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


@pytest.mark.parametrize("number", (5, 13, 116))
def test_what_the_system_says_of_a_file_is_not_called_a_damaged_file(tmp_path, monkeypatch, number):
    "EIO, EACCES and ESTALE in the middle of a Parquet file are said as they are; only Arrow's own complaint is about the content"
    import pyarrow as pa
    import pyarrow.parquet as pq
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "completion": ["b"]}), path)

    def fails(*a): raise OSError(number, os.strerror(number))
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fails)
    with pytest.raises(RecipeError) as caught: list(file_rows(str(path)))
    assert os.strerror(number).lower() in str(caught.value).lower() and "not a readable" not in str(caught.value)
