"""Clients of nats-py itself, as an attacker with a valid key has them."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import nats

from tests.secured_server import SecuredServer


async def raw(server: SecuredServer, key_file: Path, prefix: str, errors: list[str]) -> Any:
    """A client of nats-py itself, as an attacker with this key has it."""

    async def on_error(error: Exception) -> None:
        errors.append(str(error))

    context = ssl.create_default_context(cafile=str(server.ca_file))
    return await nats.connect(server.url, nkeys_seed=str(key_file), tls=context, inbox_prefix=prefix, error_cb=on_error)


async def everything(operator: Any) -> dict[str, Any]:
    """Each stream's settings, fill and consumers, and the newest message of each forbidden subject
    is part of the fill.
    """
    found: dict[str, Any] = {}
    for stream in sorted((json.loads((await operator.request("$JS.API.STREAM.NAMES", b"{}")).data))["streams"]):
        info = json.loads((await operator.request(f"$JS.API.STREAM.INFO.{stream}", b"")).data)
        state = {key: info["state"][key] for key in ("messages", "first_seq", "last_seq", "bytes", "consumer_count")}
        consumers = json.loads((await operator.request(f"$JS.API.CONSUMER.NAMES.{stream}", b"{}")).data)["consumers"]
        found[stream] = (info["config"], state, consumers)
    return found
