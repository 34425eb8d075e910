"""A server on loopback that answers the questions which the Hugging Face hub's client asks about a
data set: its commits, its files, and the files' bytes.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

NOT_FOUND, NO_REVISION, GATED = "RepoNotFound", "RevisionNotFound", "GatedRepo"


@dataclass
class HubServer:
    """`data`: of each data set its commits, oldest first, with their files; `tokens`: of a private
    one the token that may read it; `asked`: the paths of all requests.
    """

    data: dict[str, dict[str, dict[str, bytes]]]
    tokens: dict[str, str] = field(default_factory=dict)
    gated: frozenset[str] = frozenset()
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The client's variables."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **more}


def commit_of(files: Mapping[str, bytes]) -> str:
    return hashlib.sha1(json.dumps({name: content.hex() for name, content in files.items()}).encode()).hexdigest()


@contextmanager
def serving(hub: HubServer) -> Iterator[HubServer]:
    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            hub.asked.append(path)
            is_api = path.startswith("api/datasets/")
            owner, name, *rest = path.removeprefix("api/").removeprefix("datasets/").split("/")
            commits = hub.data.get(f"{owner}/{name}")
            token = hub.tokens.get(f"{owner}/{name}")
            if commits is None or (token and self.headers.get("Authorization") != f"Bearer {token}"):
                self._refused(401, NOT_FOUND)
                return
            if f"{owner}/{name}" in hub.gated:
                self._refused(403, GATED)
                return
            commit = rest[1] if len(rest) > 1 and rest[1] != "main" else [*commits][-1]
            if commit not in commits:
                self._refused(404, NO_REVISION)
                return
            files = commits[commit]
            if is_api and rest[:1] == ["tree"]:
                entries = [
                    {"type": "file", "path": each, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for each, content in files.items()
                ]
                self._send(json.dumps(entries).encode())
            elif is_api:
                siblings = [{"rfilename": each} for each in files]
                self._send(json.dumps({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings}).encode())
            elif (content := files.get("/".join(rest[2:]))) is None:
                self._refused(404, "EntryNotFound")
            else:
                self._send(content, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

        def _refused(self, code: int, why: str) -> None:
            self._send(b"{}", {"X-Error-Code": why, "X-Error-Message": why}, code)

        def _send(self, content: bytes, headers: Mapping[str, str] | None = None, code: int = 200) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
