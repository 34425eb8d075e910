"""Bans, rosters and floods against running verifiers and a real server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from services.verifier.episodes import without_tokens
from services.verifier.sharing import sign
from services.verifier.swarm_reader import BURST_S
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, encode, pack_ids, pack_logprobs
from shared.contracts.messages import SignedRollouts
from shared.contracts.senders import AbsurdText, KeyReputation, ReputationState, SendersReport, TrainerFindings
from shared.contracts.subjects import BANS_KEY, FINDINGS_KEY, REPUTATION_KEY, SENDERS_PREFIX
from shared.contracts.wire import DEFAULT_SWARM_ID
from shared.identity.keys import SigningKey, new_seed
from shared.identity.roster import RosterEntry, write_roster
from shared.transport.base import Transport
from shared.transport.connect import connect
from swarm_cli.errors import CommandError
from swarm_cli.node_commands import ban, unban
from tests.integration.running_verifier import configured, group, scored, until, verifier
from tests.long_forms import FULL
from tests.nats_server import NatsServer

MakeServer = Callable[..., NatsServer]
BUDGET_PER_S = 10.0
HONEST_PER_S = 2.0
SECONDS = 8.0 if FULL else 5.0


async def share(swarm: Transport, key: SigningKey, node: str, index: int, answers: list[str] | None = None) -> None:
    payload = encode(sign(group(node, index, answers), key))
    subject = subjects.rollouts(node)
    await swarm.publish(subject, payload, stream=subjects.SWARM_ROLLOUTS, message_id=content_id(payload))


async def in_thread(command: Callable[..., None], config: NodeConfig, *arguments: str, **options: str | bool) -> None:
    """A command of the CLI, which has an event loop of its own; `config` is written where it
    looks.
    """
    file = config.node.var_dir / f"{config.node.id}.toml"
    file.write_text(
        f'[node]\nid = "{config.node.id}"\nvar_dir = "{config.node.var_dir}"\n'
        f'[nats]\nnode_url = "{config.nats.node_url}"\nswarm_url = "{config.nats.swarm_url}"\n[[tasks]]\ndataset = "gcd"\n'
    )
    await asyncio.to_thread(command, *arguments, config=file, **options)


async def test_a_ban_acts_within_seconds_on_name_and_key_outlives_a_restart_and_can_be_taken_back(
    nats_server: MakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured("alpha", nats_server().url, tmp_path)
    key = SigningKey(new_seed())
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        await share(alpha.swarm, key, "beta", 0)
        await until(lambda: alpha.status.get("accepted") == 1)
        await in_thread(ban, config, "beta", duration="1h", reason="spam")
        banned_at = time.monotonic()
        await until(lambda: alpha.status.get("senders_banned") == 1)
        assert time.monotonic() - banned_at < 30.0
        await share(alpha.swarm, key, "beta", 1)
        await share(alpha.swarm, key, "delta", 2)
        await until(lambda: alpha.status.get("refused_banned") == 2)
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        await share(alpha.swarm, key, "beta", 3)
        await until(lambda: alpha.status.get("refused_banned") == 1)
        await in_thread(ban, config)
        assert "banned beta for 35" in capsys.readouterr().out
        await in_thread(unban, config, "beta")
        await until(lambda: alpha.status.get("senders_banned") == 0)
        await share(alpha.swarm, key, "beta", 4)
        await until(lambda: alpha.status.get("accepted") == 1)
        assert sorted(each.group.draw for each in await scored(alpha.node, "alpha")) == [0, 4]


async def test_a_list_of_bans_that_nobody_can_read_lets_nobody_in_until_another_is_written(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    config = configured("alpha", nats_server().url, tmp_path)
    banned, other = SigningKey(new_seed()), SigningKey(new_seed())
    bucket = subjects.node_bucket("alpha")
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        await in_thread(ban, config, banned.public_key)
        await until(lambda: alpha.status.get("senders_banned") == 1)
        entry = await alpha.node.kv.get(bucket, BANS_KEY)
        assert entry is not None
        await alpha.node.kv.put(bucket, BANS_KEY, entry.value[:-3])
        await asyncio.sleep(2.5)
        await share(alpha.swarm, banned, "mallory", 0)
        await share(alpha.swarm, other, "beta", 1)
        await until(lambda: alpha.status.get("accepted") == 1)
        assert alpha.status.get("refused_banned") == 1, "the earlier bans stay in force"
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        await share(alpha.swarm, banned, "mallory", 2)
        await share(alpha.swarm, other, "beta", 3)
        await until(lambda: alpha.status.get("refused_banned") == 2)
        with pytest.raises(CommandError, match="--anew"):
            await in_thread(ban, config)
        await in_thread(ban, config, banned.public_key, anew=True)
        await until(lambda: alpha.status.get("senders_banned") == 1)
        await share(alpha.swarm, banned, "mallory", 4)
        await share(alpha.swarm, other, "beta", 5)
        await until(lambda: alpha.status.get("accepted") == 1 and alpha.status.get("refused_banned") == 3)


async def test_a_roster_admits_only_the_listed_and_is_followed_while_running(nats_server: MakeServer, tmp_path: Path) -> None:
    roster = tmp_path / "roster.txt"
    keys = {name: SigningKey(new_seed()) for name in ("beta", "gamma")}
    entries = {name: RosterEntry(name, key.public_key) for name, key in keys.items()}
    write_roster(roster, {"beta": entries["beta"]})
    config = configured("alpha", nats_server().url, tmp_path, trust="roster", roster_file=roster)
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        await share(alpha.swarm, keys["beta"], "beta", 0)
        await share(alpha.swarm, keys["gamma"], "gamma", 0)
        await until(lambda: alpha.status.get("accepted") == alpha.status.get("refused_unknown_key") == 1)
        write_roster(roster, {"gamma": entries["gamma"]})
        await asyncio.sleep(2.5)
        await share(alpha.swarm, keys["beta"], "beta", 1)
        await share(alpha.swarm, keys["gamma"], "gamma", 1)
        await until(lambda: alpha.status.get("accepted") == alpha.status.get("refused_unknown_key") == 2)
        roster.write_text("torn")
        await asyncio.sleep(2.5)
        await share(alpha.swarm, keys["gamma"], "gamma", 2)
        await until(lambda: alpha.status.get("accepted") == 3)


@pytest.mark.parametrize("wanted", [True, False])
async def test_right_answers_alone_are_a_demonstration_only_of_the_rosters_nodes_and_only_where_wanted(
    nats_server: MakeServer, tmp_path: Path, wanted: bool
) -> None:
    roster = tmp_path / "roster.txt"
    keys = {name: SigningKey(new_seed()) for name in ("teacher", "stranger")}
    write_roster(roster, {"teacher": RosterEntry("teacher", keys["teacher"].public_key)})
    config = configured("alpha", nats_server().url, tmp_path, trust="roster", roster_file=roster, demonstrations=wanted)
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        for index in range(2):
            right = str(group("teacher", index).task.answer)
            await share(alpha.swarm, keys["teacher"], "teacher", index, [right, right if index else "wrong"])
        await share(alpha.swarm, keys["stranger"], "stranger", 0, [str(group("stranger", 0).task.answer)] * 2)
        await until(lambda: alpha.status.get("accepted") == 2 and alpha.status.get("refused_unknown_key") == 1)
        found = {each.group.draw: each.demonstration for each in await scored(alpha.node, "alpha")}
        assert found == {0: False, 1: wanted}


async def test_the_worst_senders_are_written_down_by_key_and_a_forger_puts_nobody_there(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    config = configured("alpha", nats_server().url, tmp_path)
    key = SigningKey(new_seed())
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        forged = sign(group("beta", 9), key)
        forged = SignedRollouts(
            swarm=DEFAULT_SWARM_ID, node="beta", public_key=forged.public_key, signature=b"\x07" * 64, body=forged.body
        )
        payload = encode(forged)
        for number in range(20):
            subject = subjects.rollouts("beta")
            await alpha.swarm.publish(subject, payload, stream=subjects.SWARM_ROLLOUTS, message_id=f"forged-{number}")
        made = group("gamma", 0)
        torn = msgspec.structs.replace(
            made, completions=[msgspec.structs.replace(each, token_ids=pack_ids([7])) for each in made.completions]
        )
        signed = encode(sign(torn, key))
        subject = subjects.rollouts("gamma")
        await alpha.swarm.publish(subject, signed, stream=subjects.SWARM_ROLLOUTS, message_id=content_id(signed))
        await until(lambda: alpha.status.get("refused_signature") == 20 and alpha.status.get("refused_malformed") == 1)

        async def reported() -> bool:
            entries = (await alpha.node.kv.newest(subjects.node_bucket("alpha"), 1024, SENDERS_PREFIX))[0]
            return bool(entries) and bool(decode(entries[0].value, SendersReport).worst)

        await until(reported)
        (entry,) = (await alpha.node.kv.newest(subjects.node_bucket("alpha"), 1024, SENDERS_PREFIX))[0]
        (worst,) = decode(entry.value, SendersReport).worst
        assert (worst.name, worst.public_key, worst.refused) == ("gamma", key.public_key, {"malformed": 1})


@pytest.mark.deadline(400)
async def test_a_flood_of_one_sender_leaves_the_others_what_they_had(nats_server: MakeServer, tmp_path: Path) -> None:
    """Honest groups taken in at the same budget: alone, beside 25 times one's traffic, and with
    forgeries in their names.

    What counts is what is lost, not how soon it comes: on a busy machine scoring may take longer
    than sending.
    """
    config = configured("alpha", nats_server().url, tmp_path, intake_groups_per_s=BUDGET_PER_S)
    flood_per_s = 25 * HONEST_PER_S
    async with verifier(config) as alpha:
        publishing = await connect(config.nats.node_url, name="others")
        senders = Senders(publishing)

        async def taken() -> Counter[tuple[str, int]]:
            return Counter((each.group.node, each.group.draw // PHASE) for each in await scored(alpha.node, "alpha"))

        async def settle(phase: int, signatures: int = 0) -> None:
            async def is_settled() -> bool:
                found = await taken()
                honest = all(found[name, phase] == senders.sent[name, phase] for name in ("beta", "gamma"))
                return honest and alpha.status.get("refused_signature") >= signatures

            # Whether it came about is for the end to say.
            with suppress(AssertionError):
                await until(is_settled, timeout_s=120)

        await senders.phase(0)
        await settle(0)
        began = time.monotonic()
        await senders.phase(1, senders.send("mallory", 1, flood_per_s))
        await settle(1)
        await senders.phase(2, senders.forge(2, flood_per_s))
        await settle(2, senders.sent["forger", 2])
        await publishing.close()
        found = await taken()
        lasted_s = time.monotonic() - began  # more is taken in while what was is read
        refused = {reason: alpha.status.get(f"refused_{reason}") for reason in ("flood", "signature")}
    print("taken in by (node, phase):", dict(found), "sent:", dict(senders.sent), "refused:", refused)
    for honest in ("beta", "gamma"):
        calm = found[honest, 0] / senders.sent[honest, 0]
        assert calm > 0.9
        for phase in (1, 2):
            assert found[honest, phase] / senders.sent[honest, phase] >= 0.9 * calm
    # What waited under its name before its key was known counts against the same share.
    assert 0 < found["mallory", 1] <= 0.5 * BUDGET_PER_S * (lasted_s + BURST_S) + 1, "limited itself"
    assert refused["signature"] > 0.9 * senders.sent["forger", 2], "looked at one by one, and all refused"


PHASE = 10_000


class Senders:
    """Two honest nodes and a hostile one, on one connection."""

    def __init__(self, plane: Transport) -> None:
        self._plane = plane
        self._keys = {name: SigningKey(new_seed()) for name in ("beta", "gamma", "mallory")}
        self.sent: Counter[tuple[str, int]] = Counter()

    async def phase(self, phase: int, *flood: Coroutine[None, None, None]) -> None:
        """Honest traffic for `SECONDS`, beside a flood; then what a burst lasts, for what is in
        line.
        """
        honest = (self.send(name, phase, HONEST_PER_S) for name in ("beta", "gamma"))
        await asyncio.gather(*honest, *flood)
        await asyncio.sleep(2.0)

    async def send(self, name: str, phase: int, rate_per_s: float) -> None:
        async for index in self._paced(name, phase, rate_per_s):
            await self.send_one(name, PHASE * phase + index)

    async def send_one(self, name: str, draw: int) -> None:
        """A group like any other."""
        body = group(name, draw)
        await self._publish(name, sign(body, self._keys[name]))

    async def flood(self, name: str, phase: int, rate_per_s: float) -> None:
        """Rubbish under a name of one's own."""
        async for index in self._paced(name, phase, rate_per_s):
            key = self._keys[name].public_key
            await self._publish(
                name, SignedRollouts(swarm=DEFAULT_SWARM_ID, node=name, public_key=key, signature=b"\x07" * 64, body=b"%d" % index)
            )

    async def forge(self, phase: int, rate_per_s: float) -> None:
        """Under both honest nodes' subjects, as a peer can where the server does not stop it."""
        async for index in self._paced("forger", phase, rate_per_s):
            victim = ("beta", "gamma")[index % 2]
            key = self._keys[victim].public_key
            await self._publish(
                victim,
                SignedRollouts(swarm=DEFAULT_SWARM_ID, node=victim, public_key=key, signature=b"\x07" * 64, body=b"%d" % index),
            )

    async def _publish(self, name: str, message: SignedRollouts) -> None:
        payload = encode(message)
        subject = subjects.rollouts(name)
        await self._plane.publish(subject, payload, stream=subjects.SWARM_ROLLOUTS, message_id=content_id(payload))

    async def _paced(self, name: str, phase: int, rate_per_s: float) -> AsyncIterator[int]:
        started = time.monotonic()
        while (due := time.monotonic() - started) < SECONDS:
            while self.sent[name, phase] < due * rate_per_s:
                self.sent[name, phase] += 1
                yield self.sent[name, phase]
            await asyncio.sleep(0.01)


async def test_senders_in_good_standing_are_heard_behind_a_flood_too_large_to_read(nats_server: MakeServer, tmp_path: Path) -> None:
    """4 looks a second at 200 messages a second: chance alone would find about one in fifty of the
    honest groups.
    """
    config = configured("alpha", nats_server().url, tmp_path, intake_groups_per_s=4.0, intake_look_factor=1.0)
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        senders = Senders(alpha.swarm)
        await senders.send_one("beta", 0)
        await until(lambda: alpha.status.get("accepted") == 1)
        await asyncio.gather(senders.send("beta", 1, 1.0), senders.flood("mallory", 1, 200.0))
        # Two seconds are enough on a quiet machine; ten, at four looks a second, are too few for
        # chance.
        for _ in range(20):
            await asyncio.sleep(0.5)
            taken = Counter(each.group.node for each in await scored(alpha.node, "alpha"))
            if taken["beta"] - 1 >= senders.sent["beta", 1] / 2:
                break
    assert taken["beta"] - 1 >= senders.sent["beta", 1] / 2, (dict(taken), dict(senders.sent))


async def test_many_names_of_one_key_and_copies_come_in_once_and_leave_honest_newcomers_room_also_after_a_restart(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    config = configured("alpha", nats_server().url, tmp_path)
    mallory, names = SigningKey(new_seed()), 60
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        for number in range(names):
            await share(alpha.swarm, mallory, f"mallory-{number}", 0)
        await until(lambda: alpha.status.get("accepted") + alpha.status.get("refused") == names)
        assert alpha.status.get("accepted") == 1, "one key, one name"
        assert alpha.status.get("refused_unknown_key") + alpha.status.get("refused_flood") == names - 1
        await asyncio.sleep(2.5)  # the burst that the key has used up
        first = without_tokens((await scored(alpha.node, "alpha"))[0].group)
        for number in range(10):
            copy = msgspec.structs.replace(first, draw=1000 + number, created_at=time.time())
            payload = encode(sign(copy, mallory))
            subject = subjects.rollouts(copy.node)
            await alpha.swarm.publish(subject, payload, stream=subjects.SWARM_ROLLOUTS, message_id=content_id(payload))
        await until(lambda: alpha.status.get("refused_repeated") == 10)
    assert len((tmp_path / "runs" / config.node.run / "alpha" / "known_keys.txt").read_text().split()) == 4, "one line"
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        for number in range(5):
            await share(alpha.swarm, SigningKey(new_seed()), f"honest-{number}", 0)
        await until(lambda: alpha.status.get("accepted") == 5)


async def test_a_sender_in_quarantine_stays_there_when_the_verifier_starts_again_and_the_trainers_findings_reach_it(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    config = configured("alpha", nats_server().url, tmp_path)
    lying, absurd = SigningKey(new_seed()), SigningKey(new_seed())

    async def known(plane: Transport) -> dict[str, KeyReputation]:
        entry = await plane.kv.get(subjects.node_bucket("alpha"), REPUTATION_KEY)
        return {each.name: each for each in decode(entry.value, ReputationState).keys} if entry is not None else {}

    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        for number in range(8):  # seven lies about the tokens are enough
            made = group("mallory", number)
            lie = {"token_count": 2, "token_ids": pack_ids([5]), "behaviour_logprobs": pack_logprobs([-1.0])}
            first = msgspec.structs.replace(made.completions[0], **lie)
            body = msgspec.structs.replace(made, completions=[first, *made.completions[1:]])
            payload = encode(sign(body, lying))
            subject = subjects.rollouts("mallory")
            await alpha.swarm.publish(subject, payload, stream=subjects.SWARM_ROLLOUTS, message_id=content_id(payload))
        await share(alpha.swarm, absurd, "gamma", 0)
        await until(lambda: alpha.status.get("senders_quarantined") == 1 and alpha.status.get("accepted") == 1, 120)

        async def kept() -> bool:
            found = await known(alpha.node)
            return "mallory" in found and "gamma" in found

        await until(kept)
        found = TrainerFindings(
            node="alpha", updated_at=time.time(), found=[AbsurdText(batch=1, sender="gamma", absurd=2, answers=2)]
        )
        await alpha.node.kv.put(subjects.node_bucket("alpha"), FINDINGS_KEY, encode(found))

        async def blamed() -> bool:
            return (await known(alpha.node))["gamma"].refused == {"absurd": 1}

        await until(blamed)
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        await until(lambda: alpha.status.get("senders_quarantined") == 1)
        await share(alpha.swarm, lying, "mallory", 20)
        await until(lambda: alpha.status.get("refused_quarantined") == 1)
