"What a hub gives and what it refuses: one of our own on this machine, asked by the clients that ask the real one"
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import ranks

from shardnb.plan.problem import RecipeError
from shardnb.plan.recipe import Recipe
from shardnb.run import hub, models

REFUSED = {"meta/gated": (403, "GatedRepo"), "nobody/nothing": (401, "RepoNotFound"), "owner/kept": (403, "")}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    "owner/net: a model of 2 layers, as one file"
    from transformers import AutoConfig, AutoModelForCausalLM
    top = ranks.model_folder(tmp_path_factory.mktemp("hub") / "net", ranks.LLAMA)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(top)).save_pretrained(top)
    return top


@pytest.fixture
def here(files, tmp_path, monkeypatch):
    "The client of `huggingface_hub` turned to a server of this test's"
    from pathlib import Path

    from huggingface_hub import constants
    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        def log_message(self, *args): pass
        def do_GET(self): self.answer(True)
        def do_HEAD(self): self.answer(False)
        def answer(self, body):
            name, _, rest = self.path.strip("/").removeprefix("api/models/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            name, path = "/".join(name.split("/")[:2]), Path(files) / file
            status, code = REFUSED.get(name) or ((404, "RevisionNotFound") if revision == "other" else (200, "") if file and path.is_file() else (404, "EntryNotFound"))
            data = path.read_bytes() if status == 200 else json.dumps(dict(error=code)).encode()
            self.send_response(status)
            for k, v in {"X-Error-Code": code, "X-Repo-Commit": "c" * 40, "ETag": f'"{file or code}"', "Content-Length": str(len(data))}.items():
                if v: self.send_header(k, v)
            self.end_headers()
            if body: self.wfile.write(data)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = f"http://127.0.0.1:{server.server_port}"
    for n, v in dict(ENDPOINT=at, HUGGINGFACE_CO_URL_TEMPLATE=at + "/{repo_id}/resolve/{revision}/{filename}", HF_HUB_OFFLINE=False, HF_HUB_CACHE=str(tmp_path / "cache")).items(): monkeypatch.setattr(constants, n, v)
    for n in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"): monkeypatch.delenv(n, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield at
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name,revision,words", [("meta/gated", None, "is gated: agree to its terms"), ("nobody/nothing", None, "is not on the hub"), ("owner/kept", None, r"is refused by the hub \(403\)"),
                                                 ("owner/net", "other", "has no such revision")])
def test_what_a_hub_refuses_is_said_in_its_own_words(here, name, revision, words):
    "And not as a network that isn't there"
    with pytest.raises(RecipeError, match=words) as e: models.load_model(Recipe(model=name, revision=revision, precision="fp32"))
    assert len(e.value.problems) == 1 and "check the name, the network" not in str(e.value)


def test_a_download_and_the_reading_of_weights_tell_how_far_they_are(here, files, monkeypatch):
    from safetensors.torch import load_file
    told = []
    monkeypatch.setattr(models, "telling_bar", lambda on_progress: hub.telling_bar(on_progress, delay=0))
    model = models.load_model(Recipe(model="owner/net", precision="fp32"), on_progress=lambda *a: told.append(a))
    want = load_file(f"{files}/model.safetensors")
    assert all(bool((p == want[n]).all()) for n, p in model.named_parameters())
    assert told and told[0][0] == 0 and told[0][2] == "MiB of the model fetched", told


def test_a_conversion_of_the_demo_model_that_is_killed_is_said_in_a_few_words(tmp_path, monkeypatch):
    from shardnb.plan.problem import ShardnbError
    from shardnb.run import builtin
    (python := tmp_path / "python").write_text("#!/bin/sh\necho 'Loading weights:  3%|#'\necho 'last words'\nkill -9 $$\n")
    python.chmod(0o700)
    monkeypatch.setattr(builtin.sys, "executable", str(python))
    with pytest.raises(ShardnbError) as e: builtin._convert_in_subprocess(tmp_path / "out", None)
    assert "killed, mostly for lack of memory" in str(e.value) and str(e.value).endswith("\n  last words") and "%" not in str(e.value)
