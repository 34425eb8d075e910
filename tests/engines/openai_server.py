"""A small server with OpenAI's interface, for tests of what servers do that vLLM does not: it makes
words up, and is no model.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OPENAIS_OWN = {"model", "prompt", "n", "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs"}


@dataclass
class Behaviour:
    """What it does, and what it was asked.

    ids: takes token ids. strict: refuses fields that are not OpenAI's own. many: heeds `n`.
    completions: has the endpoint at all. key: what it asks for.
    instead: the status and content that it answers to a request; None: it answers as usual.
    chat: what it says to a request of the chat interface, as text, or as status and content; None:
    it has no such endpoint.
    """

    ids: bool = False
    strict: bool = True
    many: bool = True
    completions: bool = True
    key: str | None = None
    models: tuple[str, ...] = ("tiny",)
    instead: Callable[[dict[str, Any]], tuple[int, Any] | None] | None = None
    chat: Callable[[dict[str, Any]], str | tuple[int, Any]] | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def openai_server(behaviour: Behaviour, port: int = 0) -> Iterator[str]:
    """Its base URL. `port`: 0 for any free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": name} for name in behaviour.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given = self.headers.get("Authorization", "")
            if behaviour.key is not None and given != f"Bearer {behaviour.key}":
                self._answer(401, {"error": f"Incorrect API key provided: {given.removeprefix('Bearer ')}"})
            elif behaviour.chat is not None and self.path == "/v1/chat/completions":
                behaviour.asked.append(body)
                said = behaviour.chat(body)
                self._answer(*(said if isinstance(said, tuple) else (200, chat_answer(said, body.get("n", 1)))))
            elif not behaviour.completions or self.path != "/v1/completions":
                self._answer(404, {"error": "no such endpoint"})
            elif behaviour.strict and (unknown := sorted(body.keys() - OPENAIS_OWN)):
                self._answer(400, {"error": f"unknown fields {unknown}"})
            elif not behaviour.ids and not isinstance(body["prompt"], str):
                self._answer(422, {"error": "prompt: a string is needed"})
            else:
                behaviour.asked.append(body)
                if behaviour.instead is not None and (answer := behaviour.instead(body)) is not None:
                    self._answer(*answer)
                    return
                drawn = random.Random(body["seed"])
                count = body["n"] if behaviour.many else 1
                self._answer(200, {"choices": [_choice(index, drawn) for index in range(count)]})

        def _answer(self, status: int, content: Any) -> None:
            text = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def chat_answer(text: str, n: int = 1, tokens: int = 100) -> dict[str, Any]:
    """The answer of a chat interface that says the text `n` times."""
    message = {"role": "assistant", "content": text}
    choices = [{"index": index, "finish_reason": "stop", "message": message} for index in range(n)]
    return {"choices": choices, "usage": {"total_tokens": tokens}}


def _choice(index: int, drawn: random.Random) -> dict[str, Any]:
    """An answer of a few digits, which either ended or was cut."""
    text = " ".join(str(drawn.randrange(10)) for _ in range(drawn.randrange(1, 5)))
    return {"index": index, "text": text, "finish_reason": drawn.choice(["stop", "length"])}
