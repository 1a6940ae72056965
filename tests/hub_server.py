"""A model hub on this machine: what huggingface_hub asks for, served from folders by a thread.

Set HF_ENDPOINT to `endpoint` in the environment of the process under test, before huggingface_hub is imported there.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit


class HubServer:
    """Serves `repos`, hub id to folder, under the revision "main".

    `gated` maps ids to the token they demand. `cut` holds names of files whose first download breaks off half-way.
    `requests` lists what was asked for: (method, path, Range header or None).
    """

    def __init__(
        self, repos: dict[str, Path], *, gated: dict[str, str] | None = None, cut: tuple[str, ...] = ()
    ) -> None:
        self.repos = {repo: Path(folder) for repo, folder in repos.items()}
        self.gated = gated or {}
        self.to_cut = set(cut)
        self.requests: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def commit(self, repo: str) -> str:
        """The repository's commit: 40 hex digits that change when a file's name or size does."""
        listing = [(path.name, path.stat().st_size) for path in self.files(repo)]
        return hashlib.sha1(json.dumps([repo, listing]).encode()).hexdigest()

    def files(self, repo: str) -> list[Path]:
        return sorted(path for path in self.repos[repo].rglob("*") if path.is_file())

    def downloaded(self) -> set[str]:
        """Names of the files whose bytes were asked for."""
        return {path.rsplit("/", 1)[-1] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # requests are listed, not printed

    def _answer(self, *, body: bool) -> None:
        hub = self.server_hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        repo = match[1] if match else ""
        if repo not in hub.repos:
            return self._refuse(401, "RepoNotFound")  # the hub does not tell what is private from what is not there
        token = hub.gated.get(repo)
        if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
            return self._refuse(403, "GatedRepo")
        commit = hub.commit(repo)
        revision = (api[3] if api else file[2] if file else None) or "main"
        if revision not in ("main", commit):
            return self._refuse(404, "RevisionNotFound")
        if file:
            return self._send_file(hub.repos[repo] / file[3], commit, body=body)
        assert api is not None
        return self._send_json(self._tree(repo) if api[2] == "tree" else self._info(repo, commit))

    def _info(self, repo: str, commit: str) -> dict[str, Any]:
        siblings = [{"rfilename": entry["path"]} for entry in self._tree(repo)]
        return {"_id": "0", "id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "private": False}

    def _tree(self, repo: str) -> list[dict[str, Any]]:
        folder = self.server_hub.repos[repo]
        return [
            {"type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": _etag(path)}
            for path in self.server_hub.files(repo)
        ]

    def _send_json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_file(self, path: Path, commit: str, *, body: bool) -> None:
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        data = path.read_bytes()
        total, start = len(data), 0
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if span:
            start = int(span[1])
        self.send_response(206 if span else 200)
        if span:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Content-Length", str(total - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if not body:
            return None
        if path.name in self.server_hub.to_cut:
            self.server_hub.to_cut.discard(path.name)
            self.wfile.write(data[start : start + (total - start) // 2])
            self.close_connection = True
            return None
        self.wfile.write(data[start:])
        return None

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"refused: {code}")
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(path: Path) -> str:
    return hashlib.sha1(f"{path.stat().st_size}\0".encode() + path.read_bytes()).hexdigest()
