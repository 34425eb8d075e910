"""Groups of one swarm count in no other, though both use one server, or somebody carries them
over.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from services.verifier.sharing import sign
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, encode
from shared.contracts.messages import SignedRollouts
from shared.identity.keys import SigningKey, new_seed
from shared.transport.base import Transport
from tests.integration.running_verifier import configured, generate, group, until, verifier
from tests.nats_server import NatsServer

MakeServer = Callable[..., NatsServer]


def in_swarm(config: NodeConfig, swarm_id: str, run: str) -> NodeConfig:
    nats = config.nats.model_copy(update={"swarm_id": swarm_id})
    return config.model_copy(update={"nats": nats, "node": config.node.model_copy(update={"run": run})})


async def publish(swarm: Transport, payload: bytes) -> None:
    subject = subjects.rollouts("beta")
    await swarm.publish(subject, payload, stream=subjects.SWARM_ROLLOUTS, message_id=content_id(payload))


async def test_a_group_of_the_last_run_is_refused_in_the_next_under_a_reason_of_its_own(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    """The same server, node names and key in both runs; the second run's memory of accepted groups
    is new.
    """
    url, key = nats_server().url, SigningKey(new_seed())
    first, second = (in_swarm(configured("alpha", url, tmp_path), run, run) for run in ("monday", "tuesday"))
    body = group("beta", 0)
    recorded = encode(sign(body, key, swarm_id="monday"))
    another = encode(sign(group("beta", 2), key, swarm_id="monday"))
    renamed = msgspec.structs.replace(decode(another, SignedRollouts), swarm="tuesday")
    async with verifier(first) as alpha:
        assert alpha.swarm is not None
        await publish(alpha.swarm, recorded)
        await until(lambda: alpha.status.get("accepted") == 1)
    async with verifier(second) as alpha:
        assert alpha.swarm is not None
        await alpha.swarm.publish(subjects.rollouts("beta"), recorded, stream=subjects.SWARM_ROLLOUTS, message_id="carried-over")
        await publish(alpha.swarm, encode(renamed))
        await until(lambda: alpha.status.get("refused_other_swarm") >= 1 and alpha.status.get("refused_signature") == 1)
        await publish(alpha.swarm, encode(sign(group("beta", 1), key, swarm_id="tuesday")))
        await until(lambda: alpha.status.get("accepted") == 1)


async def test_nodes_that_share_a_server_and_nothing_else_are_one_swarm(nats_server: MakeServer, tmp_path: Path) -> None:
    url = nats_server().url
    same, apart = configured("beta", url, tmp_path), in_swarm(configured("gamma", url, tmp_path), "another", "dev")
    async with verifier(configured("alpha", url, tmp_path)) as alpha, verifier(same) as beta, verifier(apart) as gamma:
        await generate(alpha.node, *(group("alpha", index) for index in range(3)))
        await until(lambda: beta.status.get("accepted") == 3)
        await until(lambda: gamma.status.get("refused_other_swarm") == 3)
        assert gamma.status.get("accepted") == 0
