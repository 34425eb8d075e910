"""Hostile swarm messages, without end and the same for the same seed.

Most are one step from a good one, because random bytes die at the first check: the structure of a
good message with one value swapped for an absurd one, packed and signed again so that the checks
behind the signature see it; bytes flipped inside the signed body; envelopes torn, nested, inflated;
texts that are code or bombs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import zstandard

from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.messages import RolloutGroup, signed_bytes
from shared.contracts.wire import DEFAULT_SWARM_ID, SWARM_SCHEMA_VERSION, Encoding
from shared.identity.keys import SigningKey, new_seed

SENDERS = 10
"""At once. They are replaced by new ones now and then, or quarantine would soon be all that is met.
"""
CANARY = "fuzz-canary"
"""A file of this name appears in the working folder if any text is ever run as code."""

TEXTS = [
    f"__import__('pathlib').Path('{CANARY}').touch()",
    f"<answer>[exec(\"open('{CANARY}','w')\")]</answer>",
    f"eval(compile(\"open('{CANARY}','w')\",'x','exec'))",
    "9**9**9**9",
    "<answer>10**100000000</answer>",
    "(" * 5000 + ")" * 5000,
    "[" * 3000,
    "NaN",
    "-Infinity",
    "1e400",
    "\x00" * 100,
    "\u202e123\u202c",
    "\U0001f4a5" * 200,
    "<answer>" * 500,
    "</answer><answer>",
    "x" * 20_000,
    "-0",
    "\n" * 4000,
    "٣",
    "0x10",
    "1_000",
]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
    0.0,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "../../etc/passwd",
    "alpha",
    "a" * 600,
    b"",
    b"\xff" * 8,
    b"\x00\x00\x80\x7f" * 2,
    b"\x00" * 70_000,
    [],
    [[[[[[]]]]]],
    {},
    {"a": {"a": {"a": {}}}},
    msgpack.ExtType(5, b"x" * 20),
    msgpack.Timestamp(2**33, 5),
]


_PACKED_BOMB = zstandard.compress(bytes(2**27))


@dataclass(frozen=True, slots=True)
class Hostile:
    """A message as the swarm would deliver it."""

    subject: str
    payload: bytes


def envelope(body: bytes, key: SigningKey, node: str, encoding: Encoding = "none") -> bytes:
    """`body` under a good signature."""
    fields = {
        "schema": SWARM_SCHEMA_VERSION,
        "swarm": DEFAULT_SWARM_ID,
        "node": node,
        "public_key": key.public_key,
        "signature": key.sign(signed_bytes(DEFAULT_SWARM_ID, body, encoding)),
        "encoding": encoding,
        "body": body,
    }
    packed: bytes = msgpack.packb(fields)
    return packed


def hostile_messages(seed: int, good: Callable[[str, int], RolloutGroup], renewed_every: int) -> Iterator[Hostile]:
    """Yields for ever. `good(node, number)` makes a group that would be taken in. Senders are new
    after every `renewed_every`.
    """
    rng = random.Random(seed)
    nodes: list[tuple[str, SigningKey]] = []
    bodies: dict[str, list[bytes]] = {}
    for count in itertools.count():
        if count % renewed_every == 0:
            nodes = [(f"n{count // renewed_every}-{number}", SigningKey(new_seed())) for number in range(SENDERS)]
            bodies = {node: [encode(good(node, number)) for number in range(4)] for node, _ in nodes}
        node, key = rng.choice(nodes)
        body = rng.choice(bodies[node])
        subject = subjects.rollouts(node)
        kind = rng.random()
        if kind < 0.40:
            yield Hostile(subject, envelope(_swap(body, rng), key, node))
        elif kind < 0.60:
            yield Hostile(subject, envelope(_flip(body, rng), key, node))
        elif kind < 0.70:
            yield Hostile(subject, _flip(envelope(body, key, node), rng))
        elif kind < 0.78:
            yield Hostile(subject, _swap(envelope(body, key, node), rng))
        elif kind < 0.83:
            whole = envelope(body, key, node)
            yield Hostile(subject, whole[: rng.randrange(len(whole))])
        elif kind < 0.86:
            yield Hostile(subject, rng.randbytes(rng.randrange(400)))
        elif kind < 0.89:
            yield Hostile(subject, envelope(_bomb(rng), key, node))
        elif kind < 0.90:
            yield Hostile(subject, _bomb(rng))
        elif kind < 0.92:
            yield Hostile(subject, envelope(_flip(zstandard.compress(_swap(body, rng)), rng), key, node, "zstd"))
        elif kind < 0.921:
            yield Hostile(subject, envelope(_PACKED_BOMB, key, node, "zstd"))
        elif kind < 0.94:
            yield Hostile(subject, envelope(_with_text(body, rng), key, node))
        elif kind < 0.97:
            other, other_key = rng.choice(nodes)
            yield Hostile(subjects.rollouts(other), envelope(body, other_key, node if other != node else "alpha"))
        else:
            yield Hostile(
                f"swarm.rollouts.v{rng.randrange(12)}.{rng.choice(['alpha', node, 'x' * 60])}{rng.choice(['', '.7'])}", body
            )


def _flip(packed: bytes, rng: random.Random) -> bytes:
    changed = bytearray(packed)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _swap(packed: bytes, rng: random.Random) -> bytes:
    """The same structure with one value replaced, removed, or doubled under an unknown name."""
    tree = msgpack.unpackb(packed)
    places = list(_places(tree))
    holder, name = rng.choice(places)
    action = rng.random()
    if action < 0.75:
        holder[name] = rng.choice(VALUES)
    elif isinstance(holder, dict):
        value = holder.pop(name)
        if action > 0.9:
            holder[f"{name}_"] = value
    else:
        holder += holder[:] * rng.randrange(1, 20)
    swapped: bytes = msgpack.packb(tree)
    return swapped


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in pairs:
        yield tree, name
        yield from _places(value)


def _with_text(body: bytes, rng: random.Random) -> bytes:
    tree = msgpack.unpackb(body)
    for completion in tree["completions"]:
        completion["text"] = rng.choice(TEXTS)
    tree["draw"] = rng.randrange(2**40)
    packed: bytes = msgpack.packb(tree)
    return packed


def _bomb(rng: random.Random) -> bytes:
    """Small messages that claim to be large or deep."""
    return rng.choice(
        (
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff" + b"x" * 50,
            b"\xdb\x7f\xff\xff\xff" + b"x" * 50,
            b"\x91" * rng.randrange(1, 50_000),
            b"\x81\xa1a" * rng.randrange(1, 20_000),
            b"\xc1" * 100,
            b"\xc9\xff\xff\xff\xff\x05",
            b"\x86" + b"\xa6schema\x03" * 6,
        )
    )


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
