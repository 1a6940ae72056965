"""Hub ids, against a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, Qwen2Config

from streamllm_core.errors import ModelError
from streamllm_core.weights import open_headers, open_source
from tests.hub_server import HubServer

REPO = "Qwen/Qwen2.5-7B-Instruct"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repo")
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    # What repositories also hold, and nobody should wait for.
    for unwanted in ("pytorch_model.bin", "consolidated.safetensors", "model.gguf", "onnx/model.json", "run.py"):
        (folder / unwanted).parent.mkdir(exist_ok=True)
        (folder / unwanted).write_bytes(b"unwanted")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    return tmp_path / "hub"


def use(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point this process's huggingface_hub, which read HF_ENDPOINT when it was imported, at another hub."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_downloads_what_a_model_needs_and_no_more(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    with HubServer({REPO: folder}, cut=(shard.name,)) as hub:
        use(hub, monkeypatch)
        source = open_source(REPO)
        local = open_source(folder)
        assert source.names() == local.names()
        assert all(torch.equal(source.tensor(name), local.tensor(name)) for name in local.names())
        assert source.name == REPO
        assert source.fingerprint == {"hub": REPO, "commit": hub.commit(REPO)}
        shards = {path.name for path in folder.glob("model-*.safetensors")}
        assert hub.downloaded() == shards | {
            "config.json",
            "generation_config.json",
            "model.safetensors.index.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        }
        # The download that broke off was taken up again (in steps of 10 MB, so from the start here).
        assert [path.endswith(shard.name) for method, path, _ in hub.requests if method == "GET"].count(True) == 2
        before = len(hub.requests)
        by_commit = open_source(REPO, revision=hub.commit(REPO))
        assert by_commit.fingerprint == source.fingerprint
        assert not any("/resolve/" in path for _, path, _ in hub.requests[before:])
    # Without the hub, what is in the cache serves, and is the same to a job's fingerprint.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_source(REPO).fingerprint == source.fingerprint


def test_headers_come_without_the_weights(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({REPO: folder}) as hub:
        use(hub, monkeypatch)
        source, local = open_headers(REPO), open_source(folder)
        assert sorted(source.names()) == sorted(local.names())
        assert all(source.header(name) == local.header(name) for name in local.names())
        assert (source.config_dir / "config.json").is_file()
        assert not list(source.config_dir.glob("*.safetensors"))
        with pytest.raises(ModelError, match="only the headers"):
            source.tensor(source.names()[0])
        with pytest.raises(ModelError, match=r"Qwen/Qwen9.*neither"):
            open_headers("Qwen/Qwen9")


def test_unknown_models_and_revisions(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({REPO: folder}) as hub:
        use(hub, monkeypatch)
        with pytest.raises(ModelError, match=r"neither a local folder nor a model on the hub.*HF_TOKEN"):
            open_source("Qwen/Qwen9")
        with pytest.raises(ModelError, match="no revision 'v9'"):
            open_source(REPO, revision="v9")
        with pytest.raises(ModelError, match="neither a local path nor a hub id"):
            open_source("no model at all!")


def test_gated_models_want_a_token(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({REPO: folder}, gated={REPO: "hf_secret"}) as hub:
        use(hub, monkeypatch)
        with pytest.raises(ModelError, match=r"accept its terms.*HF_TOKEN"):
            open_source(REPO)
        assert open_source(REPO, token="hf_secret").fingerprint == {"hub": REPO, "commit": hub.commit(REPO)}


def test_offline_without_a_copy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="hub cannot be reached"):
        open_source(REPO)


def test_hub_that_does_not_answer(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({REPO: folder}) as hub:
        use(hub, monkeypatch)
    with pytest.raises(ModelError, match="hub cannot be reached"):
        open_source(REPO)


def test_repository_without_safetensors(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "config.json").write_text("{}")
    (repo / "pytorch_model.bin").write_bytes(b"pickle")
    with HubServer({"some/pickle": repo}) as hub:
        use(hub, monkeypatch)
        with pytest.raises(ModelError, match=r"some/pickle: no model\.safetensors"):
            open_source("some/pickle")
        assert "pytorch_model.bin" not in hub.downloaded()


def test_environment_of_a_new_process(folder: Path, tmp_path: Path) -> None:
    script = f"""
import json
from streamllm_core.weights import open_headers, open_source
source = open_source({REPO!r})
print(json.dumps([source.fingerprint, str(source.config_dir), len(source.names())]))
"""
    with HubServer({REPO: folder}) as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
        environment.pop("HF_HUB_OFFLINE", None)
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        assert "Fetching" not in ran.stderr  # no bars where there is no terminal
        fingerprint, config_dir, count = json.loads(ran.stdout.splitlines()[-1])
        assert fingerprint == {"hub": REPO, "commit": hub.commit(REPO)}
        assert Path(config_dir).is_relative_to(tmp_path / "home")
        assert count == len(open_source(folder).names())
