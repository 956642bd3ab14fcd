"The list of published measurements: complete, typed, and a handful of its rows predicted."
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import published

os.environ.setdefault("DS_ACCELERATOR", "cpu")
NEEDED = "model tuning strategy world_size gpu precision optim micro_batch grad_accum seq_len padding checkpointing attention loss measured measured_gib assumed".split()
BYTES = {"GB": 1e9, "GiB": 2**30, "bytes": 1}


@pytest.fixture(scope="module")
def rows(): return published.read_rows()


@pytest.fixture(scope="module")
def used(rows): return [r for r in rows if not r.excluded]


def test_every_row_is_used_or_says_why_not(rows, used):
    assert (len(rows), len(used)) == (108, 54)
    assert len({r.id for r in rows}) == len(rows) and all(r.source_url.startswith("https://") for r in rows)
    for r in used: assert not [f for f in NEEDED if getattr(r, f) in (None, "")], r.id
    assert not {r.measured for r in used} - {"allocated", "reserved", "nvidia-smi", "unspecified"}


def test_the_measured_number_is_the_printed_one_in_gib(rows):
    for r in rows:
        if r.measured_gib: assert r.measured_gib == pytest.approx(float(r.printed) * BYTES[r.unit] / 2**30, abs=1e-3), r.id


def test_every_used_row_is_a_recipe_on_a_known_machine(used, tmp_path):
    for r in used:
        recipe = published.recipe_of(r, tmp_path).resolve(world_size=r.world_size, cuda=True, bf16_ok=True)
        assert recipe.micro_batch == r.micro_batch and recipe.grad_accum == r.grad_accum and recipe.precision == r.precision, r.id
        assert published.machine_of(r).cuda


@pytest.mark.parametrize("name", ["Llama-2-7B", "Llama-3.2-3B", "Qwen-1.8B", "phi-1.5", "StableLM-alpha-3B", "DeepSpeedExample-6.86B"])
def test_architectures_have_the_published_number_of_parameters(name):
    a = published.architectures()[name]
    assert published.parameters(a["config"])[0] == pytest.approx(a["published_params"], rel=.011) # as precise as it is printed


def test_the_compared_point_depends_on_what_was_measured_alone(used):
    by = {r.measured: r for r in used}
    assert published.compared(by["allocated"], 2**30, (2**28, 2**30)) == 1
    for kind in ("reserved", "nvidia-smi", "unspecified"): assert published.compared(by[kind], 2**30, (2**29, 2**30)) == 1.75


def test_other_estimators_are_asked(used):
    row = next(r for r in used if r.id == "ds-core-api-baseline")
    deepspeed, accelerate = published.rivals(row)
    assert deepspeed == pytest.approx(18 * 6.856e9 / 4 / 2**30 + 4 * 50257 * 4096 / 2**30, rel=.01)  # 18 P / N + 4 bytes of the largest layer
    assert accelerate == pytest.approx(2 * 4 * 6.856e9 / 2**30, rel=.01)


@pytest.mark.parametrize("id", ["litgpt-7b-b1", "litgpt-7b-b2", "litgpt-stablelm-3b", "ds-sdma-qwen3-32b"])
def test_allocated_bytes_of_well_stated_rows_are_met_within_two_percent(used, id):
    line, = published.predict([r for r in used if r.id == id], rival=False)
    assert abs(line["error"]) < .02 and line["peak_at"] == "backward"


def test_a_summary_counts_and_names_what_is_missed(used):
    class Guess: peak, band, peak_at, largest = 20 * 2**30, (0, 2 * 2**30), "backward", "params"
    lines = [published.judge(r, Guess) for r in used[:3]]
    text = published.summary(lines)
    assert "of 3 rows within 10%" in text and text.count("missed: ") == sum(abs(x["error"]) > .1 for x in lines)
    assert all(r.id in published.table(lines) for r in used[:3])
