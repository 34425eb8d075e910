"""Who made a request of JetStream's API, as pure rules. `test_nats_watch.py` shows a real server's
advisories.
"""

from __future__ import annotations

import json

import pytest

from shared.advisories import Requester, judge, parse

OPERATOR = {"acc": "NODE_ALPHA", "kind": "Client", "user": "UABC"}
REPLY = {"acc": "NODE_ALPHA", "svc": "NODE_ALPHA"}


def guest(name: str, of: str = "NODE_ALPHA") -> dict[str, str]:
    return {"acc": name, "svc": of}


CASES = [
    ("NODE_ALPHA", "$JS.API.STREAM.DELETE.NODE_ALPHA_BATCHES", OPERATOR, Requester.OPERATOR),
    ("NODE_ALPHA", "$JS.API.STREAM.DELETE.NODE_ALPHA_BATCHES", REPLY, Requester.UNEXPECTED),
    ("NODE_ALPHA", "$JS.API.STREAM.DELETE.NODE_ALPHA_BATCHES", {}, Requester.UNEXPECTED),
    ("NODE_ALPHA", "$JS.API.STREAM.INFO.NODE_ALPHA_BATCHES", REPLY, Requester.LOOKED),
    ("NODE_ALPHA", "$JS.API.STREAM.PURGE.NODE_ALPHA_SCORED", guest("NODE_ALPHA_SAMPLER"), Requester.USUAL),
    ("NODE_ALPHA", "$JS.hub.API.STREAM.PURGE.NODE_ALPHA_SCORED", guest("NODE_ALPHA_SAMPLER"), Requester.USUAL),
    ("NODE_ALPHA", "$JS.API.STREAM.PURGE.NODE_ALPHA_SCORED", guest("NODE_ALPHA_TRAINER"), Requester.UNEXPECTED),
    ("NODE_ALPHA", "$JS.API.STREAM.PURGE.NODE_ALPHA_SCORED", guest("NODE_ALPHA_STRANGER"), Requester.UNEXPECTED),
    ("NODE_ALPHA", "$JS.API.STREAM.PURGE.NODE_ALPHA_SCORED", guest("NODE_BETA_SAMPLER"), Requester.UNEXPECTED),
    ("NODE_ALPHA", "$JS.API.STREAM.PURGE.NODE_ALPHA_SCORED", REPLY, Requester.UNEXPECTED),
    ("NODE_ALPHA-2", "$JS.API.STREAM.PURGE.NODE_ALPHA-2_SCORED", guest("NODE_ALPHA-2_SAMPLER"), Requester.USUAL),
    ("SWARM", "$JS.API.STREAM.INFO.SWARM_ROLLOUTS", guest("SWARM_ALPHA", "SWARM"), Requester.LOOKED),
    ("SWARM", "$JS.API.CONSUMER.CREATE.SWARM_ROLLOUTS.spy", guest("SWARM_ALPHA", "SWARM"), Requester.UNEXPECTED),
    ("SWARM", "$JS.API.STREAM.UPDATE.SWARM_ROLLOUTS", {**OPERATOR, "acc": "SWARM"}, Requester.OPERATOR),
    ("SWARM", "$JS.API.STREAM.UPDATE.SWARM_ROLLOUTS", {**OPERATOR, "acc": "SWARM", "kind": "Leafnode"}, Requester.UNEXPECTED),
    ("SWARM", "strange", OPERATOR, Requester.UNEXPECTED),
]


@pytest.mark.parametrize(("account", "subject", "client", "verdict"), CASES)
def test_who_asked_is_told_by_the_account_and_the_permissions(
    account: str, subject: str, client: dict[str, str], verdict: Requester
):
    request = parse(json.dumps({"subject": subject, "client": client, "request": "", "type": "x", "id": "1"}).encode())
    assert request is not None
    assert judge(account, request) is verdict


@pytest.mark.parametrize(
    "payload", [b"", b"{}", b"[]", b"null", b"\xff", b'{"subject": 1}', b'{"subject": "a", "client": []}', b"[" * 100_000]
)
def test_what_is_no_advisory_is_none(payload: bytes):
    assert parse(payload) is None
