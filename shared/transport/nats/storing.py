"""Stores one message in a stream: retries until the server has stored it, or has refused it with an
error that the caller understands.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from shared.transport.base import Conflict, NotConnected, PubAck, StreamFull, TooLarge
from shared.transport.deadline import Deadline
from shared.transport.nats import direct
from shared.transport.nats import jetstream_api as api
from shared.transport.nats.answers import answer_object, count_of, readable
from shared.transport.nats.connection import Connection


async def store(
    connection: Connection, subject: str, payload: bytes, stream: str, headers: Mapping[str, str], deadline: Deadline
) -> PubAck:
    """Store a message that fits the server. `headers` contain its `Nats-Msg-Id`, by which the
    server recognises a second attempt.

    Raises:
        Conflict: the sequence that the headers expect is not the last, or the subject takes one
            message and has it.
        StreamFull: a `discard_new` stream is at its limit.
        TooLarge: the server refuses the size.
        NotConnected: no acknowledgement before the deadline.
        TransportError: the answer cannot be read.
    """
    told, started = {**headers, "Nats-Expected-Stream": stream}, time.perf_counter()
    what = f"publish on {subject} to stream {stream}"
    while True:
        try:
            reply = await connection.request(subject, payload, deadline, headers=told, what=what)
        except NotConnected as unanswered:
            if not connection.connected:
                raise
            hint = "if this persists, see the server's log: with a full disk it stops answering until it is restarted"
            raise NotConnected(f"{unanswered}: {hint}") from None
        answer = answer_object(reply.data, what)
        with readable(what):
            if "error" not in answer:
                connection.counters.stores.add(time.perf_counter() - started)
                return PubAck(count_of(answer["seq"]), bool(answer.get("duplicate", False)))
            error = api.ApiError(what, answer["error"])
        if error.err_code in api.WRONG_LAST_SEQUENCE:
            return await _ours_or_conflict(connection, stream, subject, told, error)
        if error.err_code == api.STORE_FAILED and "per subject exceeded" in error.description:
            raise Conflict(f"{what}: the subject takes one message, and has it")
        if error.err_code == api.STORE_FAILED and "exceeded" in error.description:
            raise StreamFull(f"{what}: {error.description}: the reader is behind, publish again later")
        if error.err_code == api.MESSAGE_TOO_LARGE:
            raise TooLarge(f"{what}: {error.description}: {len(payload)} bytes")
        if not error.passing:
            raise error
        if deadline.left_s < 0.2:
            raise NotConnected(str(error))
        await asyncio.sleep(0.1)


async def _ours_or_conflict(
    connection: Connection, stream: str, subject: str, headers: Mapping[str, str], error: api.ApiError
) -> PubAck:
    """The server compares sequences before it looks for duplicates, so an earlier attempt of this
    call may have caused the conflict.
    """
    expected = headers.get("Nats-Expected-Last-Sequence")
    request = {"last_by_subj": subject} if expected is None else {"seq": int(expected) + 1}
    stored = await direct.get(connection, stream, request, Deadline(api.READ_TIMEOUT_S))
    if stored is not None and stored.headers.get("Nats-Msg-Id") == headers["Nats-Msg-Id"]:
        return PubAck(stored.seq, True)
    raise Conflict(f"{error}: read the newest state and decide again")
