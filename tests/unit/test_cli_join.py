"""What a newcomer's node is called and told, and what `swarm join` says of a machine that will not
do.
"""

from __future__ import annotations

import io
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shared.config import NodeConfig, TaskSpec, load_config
from shared.config.load import CONFIG_FILE_VARIABLE
from shared.contracts.codec import encode
from shared.contracts.control import EvalReport, NodeRecord
from shared.contracts.wire import SWARM_SCHEMA_VERSION, ModelIdentity, is_node_name
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import CheckedStatement, SignatureStatus, sign_statement
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.invitation import Credential, Invitation, Member, OfferedTask
from swarm_cli.invite_command import accepted
from swarm_cli.join import findings
from swarm_cli.join.command import prepare
from swarm_cli.join.hub import HubLook, holder
from swarm_cli.join.newcomer import JoinFolder, base_config, chosen_name, default_name, node_settings, run_name, task_entries
from swarm_cli.observe.node_lines import elsewhere_table
from swarm_cli.observe.snapshot import hub_state
from swarm_cli.observe.status import hub_caption, hub_object, omissions
from swarm_cli.task_probe import begin_deriving
from swarm_cli.toml_view import config_toml
from tests.unit.test_invitation import KEY, SEED, invitation

DEMO = load_config(DEMO_CONFIG)
OTHER = SigningKey(new_seed()).public_key
ACCEPTS = accepted(DEMO)
SECURED: dict[str, Any] = {"url": "tls://hub:4222", "authority": b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"}


@pytest.fixture
def folder(tmp_path: Path) -> JoinFolder:
    return JoinFolder(tmp_path / "joined" / "demo")


@given(st.text(max_size=80))
def test_any_hosts_name_makes_a_nodes_name_that_two_newcomers_do_not_share(hostname: str) -> None:
    mine, theirs = default_name(hostname, KEY), default_name(hostname, OTHER)
    assert is_node_name(mine) and is_node_name(theirs) and mine != theirs


def test_a_key_keeps_the_name_it_came_with(folder: JoinFolder) -> None:
    open_hub, given = invitation(), invitation(url="tls://hub:4222", credential=Credential(user="gamma", seed=SEED))
    assert chosen_name("", open_hub, folder, KEY).endswith(f"-{KEY[-6:].lower()}")
    assert (chosen_name("nova", open_hub, folder, KEY), chosen_name("", given, folder, KEY)) == ("nova", "gamma")
    with pytest.raises(CommandError, match="omit --name, or ask for a token for nova"):
        chosen_name("nova", given, folder, KEY)
    folder.path.mkdir(parents=True)
    folder.config_file.write_text('[node]\nid = "nova"\n')
    assert chosen_name("", open_hub, folder, KEY) == "nova"
    with pytest.raises(CommandError, match="other nodes know its key by that name"):
        chosen_name("other", open_hub, folder, KEY)
    folder.config_file.write_text('[node]\nid = "../x"\n')
    assert folder.known_name() == ""


def test_tasks_are_the_swarms_or_those_that_were_named_with_the_swarms_settings() -> None:
    offered = task_entries("", invitation())
    assert [entry["dataset"] for entry in offered] == [task.dataset for task in DEMO.tasks]
    assert task_entries("gcd, lcm", invitation()) == [offered[1], {"dataset": "lcm"}]


@pytest.mark.parametrize("config", ['{"seed": 1}', "[1]"])
def test_a_token_with_a_task_that_no_node_can_use_is_refused(config: str) -> None:
    offers = msgspec.structs.replace(accepted(load_config(DEMO_CONFIG)), tasks=[OfferedTask(dataset="gcd", config=config)])
    with pytest.raises(CommandError, match="a task in the token"):
        task_entries("", invitation(accepts=offers))


@pytest.mark.parametrize("known", [[{"dataset": "lcm", "weight": 2.0}], [{"source": "file", "path": "rows.jsonl"}]])
def test_a_later_token_does_not_replace_a_nodes_tasks_and_says_how_it_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], known: list[dict[str, Any]]
) -> None:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    monkeypatch.delenv(CONFIG_FILE_VARIABLE, raising=False)
    said, folder = invitation(), JoinFolder(tmp_path / "joined" / "demo")
    first = prepare(said)
    assert [spec.dataset for spec in first.config.tasks] == [task.dataset for task in DEMO.tasks]
    folder.config_file.write_text(config_toml(first.config, ()))
    assert prepare(said).config.tasks == first.config.tasks and capsys.readouterr().err == "", "the same token again"

    own = load_config(DEMO_CONFIG, {"tasks": known})
    folder.config_file.write_text(config_toml(own, ()))
    assert prepare(said).config.tasks == own.tasks
    offered = ",".join(task.dataset for task in DEMO.tasks)
    assert f"--tasks {offered}" in capsys.readouterr().err
    assert prepare(said, tasks=offered).config.tasks == first.config.tasks
    assert prepare(said, config=DEMO_CONFIG).config.tasks == DEMO.tasks


def joined_as(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JoinFolder:
    """A node that has joined, and has trained as `name`."""
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    first = prepare(invitation(), name=name)
    first.folder.path.mkdir(parents=True, exist_ok=True)
    first.folder.config_file.write_text(config_toml(first.config))
    (tmp_path / "runs" / run_name("demo") / name / "checkpoints" / "step-00000030").mkdir(parents=True)
    return first.folder


@pytest.mark.parametrize("left", ["", None], ids=["emptied", "lost"])
def test_a_node_whose_configuration_is_gone_is_known_by_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str | None
) -> None:
    folder = joined_as("gamma", tmp_path, monkeypatch)
    folder.config_file.unlink() if left is None else folder.config_file.write_text(left)
    assert prepare(invitation()).config.node.id == "gamma"


@pytest.mark.parametrize("kept", [0.5, 0.95])
def test_a_configuration_that_was_cut_off_is_named_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: float
) -> None:
    folder = joined_as("gamma", tmp_path, monkeypatch)
    text = folder.config_file.read_text()
    end = text.index("[[tasks]]")
    cut = text[: int(kept * end)] if kept < 0.9 else text[:end] + "[[tasks]]\nweight = 1.0\n"
    folder.config_file.write_text(cut if kept > 0.9 else cut + "\n[tasks")
    with pytest.raises(CommandError, match=re.escape(str(folder.config_file))):
        prepare(invitation())


def test_a_configuration_that_names_another_node_than_its_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = joined_as("gamma", tmp_path, monkeypatch)
    folder.config_file.write_text(folder.config_file.read_text().replace('"gamma"', '"delta"'))
    with pytest.raises(CommandError, match="names the node delta, and its run has trained as gamma"):
        prepare(invitation())


def pipe(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.parametrize("name", ["hub.json", "node.nk", "swarm.nk", "hub-ca.pem", "roster.txt", "node.toml"])
@pytest.mark.parametrize(
    "odd", [pipe, huge, Path.mkdir, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "huge", "folder", "device"]
)
def test_what_is_no_file_in_a_join_folder_neither_hangs_nor_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, odd: Callable[[Path], object]
) -> None:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    said = invitation(**SECURED, roster=[Member(node="alpha", public_key=KEY)])
    folder = JoinFolder(tmp_path / "joined" / "demo")
    prepare(said)
    folder.confirm()
    (folder.path / name).unlink(missing_ok=True)
    odd(folder.path / name)
    newer = invitation(**SECURED | {"authority": SECURED["authority"] * 2}, roster=said.roster)
    ended: list[type[BaseException] | None] = []

    def twice() -> None:
        for token in (said, newer):
            try:
                prepare(token)
            except CommandError as error:
                ended.append(type(error))
            else:
                ended.append(None)

    thread = threading.Thread(target=twice, daemon=True)
    thread.start()
    thread.join(30)
    refused_by_each = name in {"hub.json", "node.nk", "swarm.nk", "roster.txt", "node.toml"}
    assert ended == [CommandError if refused_by_each else None, CommandError], "the second token is for another authority"


def test_the_toys_settings_are_taken_for_the_toy_alone(tmp_path: Path) -> None:
    (tmp_path / "base_policy.json").write_text("{}")
    assert base_config(None, "") == base_config(None, str(tmp_path)) == DEMO_CONFIG
    assert base_config(None, "Qwen/Qwen2.5-0.5B-Instruct") is None
    assert base_config(tmp_path / "mine.toml", "") == tmp_path / "mine.toml"


@pytest.mark.parametrize(
    "changes", [{}, SECURED, {"roster": [Member(node="alpha", public_key=KEY)]}], ids=["open", "secured", "roster"]
)
def test_what_joining_decides_is_a_configuration_that_its_file_gives_back(
    tmp_path: Path, folder: JoinFolder, changes: dict[str, Any]
) -> None:
    said = invitation(**changes)
    settings = node_settings(said, folder, "nova", model="", revision="", tasks=task_entries("", said))
    config = load_config(DEMO_CONFIG, settings)
    assert (config.node.id, config.node.run, config.nats.swarm_url, config.nats.swarm_id) == ("nova", "join-demo", said.url, "demo")
    assert config.verifier.signing_key_file == str(folder.signing_key_file)
    assert config.verifier.trust == ("roster" if "roster" in changes else "open")
    secured = said.url.startswith("tls://")
    assert (config.nats.swarm_key_file, config.nats.swarm_ca_file) == (
        (str(folder.hub_key_file), str(folder.authority_file)) if secured else ("", "")
    )
    (tmp_path / "node.toml").write_text(config_toml(config, ()))
    assert load_config(tmp_path / "node.toml") == config


def test_a_roster_grows_by_the_tokens_lines_and_a_changed_key_is_refused(folder: JoinFolder) -> None:
    alpha, beta = Member(node="alpha", public_key=KEY), Member(node="beta", public_key=OTHER)
    assert folder.keep_roster([alpha]) == [alpha] and folder.keep_roster([alpha, beta]) == [beta], "which are told"
    assert [line.split()[:2] for line in folder.roster_file.read_text().splitlines()] == [["alpha", KEY], ["beta", OTHER]]
    with pytest.raises(CommandError, match="another key for alpha than the token"):
        folder.keep_roster([Member(node="alpha", public_key=OTHER)])


def files(folder: JoinFolder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.path.iterdir()}


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "tls://attacker:4222"},
        {"authority": b"-----BEGIN CERTIFICATE-----\nBB==\n-----END CERTIFICATE-----\n"},
        {"authority": b""},
        {"url": "nats://attacker:4222", "authority": b""},
    ],
    ids=["address", "authority", "the system's authorities", "open"],
)
def test_a_token_of_another_hub_gets_neither_the_key_nor_the_folder(
    tmp_path: Path, folder: JoinFolder, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    ours = prepare(invitation(**SECURED))
    assert ours.folder == folder
    folder.confirm()
    before = files(folder)
    assert sorted(before) == ["hub.json", "node.nk", "swarm.nk"], "nothing else before the node is run"
    roster = [Member(node="mallory", public_key=OTHER)]
    with pytest.raises(CommandError, match=r"belongs to tls://hub:4222 .* move .* away or set SWARM_NODE__VAR_DIR"):
        prepare(invitation(**(SECURED | {"roster": roster} | changes)))
    assert files(folder) == before
    assert prepare(invitation(**SECURED)).hub_key == ours.hub_key, "the hub's own token goes on"
    folder.hub_file.unlink()
    with pytest.raises(CommandError, match="names their hub, is missing"):
        prepare(invitation(**SECURED))


def test_looking_leaves_authority_and_roster_to_running(
    tmp_path: Path, folder: JoinFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    said = invitation(**SECURED, roster=[Member(node="alpha", public_key=KEY)])
    newcomer = prepare(said)
    with newcomer._checking() as config:
        temporary = Path(config.nats.swarm_ca_file)
        assert temporary.read_bytes() == said.authority and temporary.parent != folder.path
    assert not temporary.exists() and sorted(files(folder)) == ["hub.json", "node.nk", "swarm.nk"]
    for variable in (CONFIG_FILE_VARIABLE, "SWARM_NODE__RUN", "SWARM_NATS__SWARM_URL"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    newcomer._configure(0)
    assert folder.authority_file.read_bytes() == said.authority and "alpha" in folder.roster_file.read_text()


def test_a_token_without_a_roster_opens_no_node_that_has_one(folder: JoinFolder) -> None:
    folder.keep_roster([Member(node="alpha", public_key=KEY)])
    settings = node_settings(invitation(), folder, "nova", model="", revision="", tasks=[])
    assert settings["verifier"]["trust"] == "roster" and settings["verifier"]["roster_file"] == str(folder.roster_file)


def test_a_key_that_a_configuration_names_for_another_server_is_not_shown_to_an_open_hub(folder: JoinFolder) -> None:
    nats = node_settings(invitation(), folder, "nova", model="", revision="", tasks=[])["nats"]
    assert (nats["swarm_key_file"], nats["swarm_ca_file"]) == ("", "")


@pytest.mark.slow  # it imports reasoning-gym in a fresh process
def test_a_task_that_takes_for_ever_is_a_sentence_and_no_hang() -> None:
    for_ever = {"dataset": "gcd", "config": {"min_numbers": 1_000_000_000, "max_numbers": 1_000_000_000}}
    tasks = load_config(DEMO_CONFIG, {"tasks": [for_ever]}).tasks
    (told,) = begin_deriving(tasks, 0, "name others with --tasks", (), 1.0)().problems
    assert "took longer than 1 s (gcd;" in told and "name others with --tasks" in told


@pytest.mark.slow  # as above
def test_tasks_are_made_apart_with_the_same_verdict(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(99)))
    own = {"source": "file", "path": str(rows), "verifier": "exact"}
    well = load_config(DEMO_CONFIG, {"tasks": [own, *(spec.model_dump() for spec in DEMO.tasks)]})
    assert begin_deriving(well.tasks, well.eval.tasks, "")().problems == []
    (told,) = begin_deriving(load_config(DEMO_CONFIG, {"tasks": [own, {"dataset": "gdc"}]}).tasks, 0, "")().problems
    assert "[[tasks]] 2: gdc: neither reasoning-gym nor an installed package" in told


def look(**changes: Any) -> HubLook:
    return replace(HubLook(streams=True, skew_s=0.1), **changes)


def record(node: str, key: str, **changes: Any) -> NodeRecord:
    given: dict[str, Any] = {
        "node": node,
        "public_key": key,
        "model": ModelIdentity(name="toy", tokenizer_hash="0" * 64),
        "tasks": ["gcd"],
        "policy_version": 3,
        "software": "swarm",
        "updated_at": 100.0,
    }
    return NodeRecord(**(given | changes))


def test_a_name_is_taken_by_a_fresh_entry_that_is_signed_for_this_swarm_and_by_no_other() -> None:
    key = SigningKey(new_seed())
    said = record("nova", key.public_key, updated_at=1000.0)

    def signed(swarm: str = "demo", **changes: Any) -> bytes:
        return encode(sign_statement(msgspec.structs.replace(said, **changes), key, swarm))

    assert holder(signed(), "nova", "demo", 1800.0) == said
    junk = {
        "unsigned": encode(said),
        "another swarm's": signed("other"),
        "long silent": signed(updated_at=800.0),
        "from the future": signed(updated_at=9000.0),
        "another node's": signed(node="alpha"),
        "of a key that did not sign": signed(public_key=OTHER),
        "no entry": b"junk",
    }
    assert [what for what, payload in junk.items() if holder(payload, "nova", "demo", 1800.0) is not None] == []


def connected(seen: HubLook, said: Invitation) -> findings.Finding:
    return findings.connection(seen, said, "nova", OTHER, KEY)


def with_tokens(most: int) -> NodeConfig:
    return DEMO.model_copy(update={"generator": DEMO.generator.model_copy(update={"max_new_tokens": most})})


def with_files(*others: TaskSpec) -> NodeConfig:
    own = TaskSpec.model_validate({"source": "file", "path": "mine/questions.jsonl", "verifier": "exact"})
    return DEMO.model_copy(update={"tasks": [own, *others]})


FAULTS = [
    (findings.software(invitation(swarm_schema=99), "0"), False, "update this machine"),
    (findings.software(invitation(swarm_schema=1), "0"), False, "update the swarm"),
    (findings.software(invitation(), "0.0.1"), False, "pip install reasoning-gym=="),
    (findings.model(DEMO, ["model.path x: no such folder"]), False, "no such folder"),
    (findings.tasks(DEMO, ACCEPTS, "[[tasks]] 1: gcd: no such setting"), False, "no such setting"),
    (findings.tasks(DEMO, msgspec.structs.replace(ACCEPTS, tasks=[]), ""), False, "omit --tasks"),
    (findings.tasks(DEMO, msgspec.structs.replace(ACCEPTS, tasks=ACCEPTS.tasks[:1]), ""), True, "accepts 1 of these 4"),
    (findings.tasks(with_files(), ACCEPTS, ""), None, "groups of questions.jsonl are accepted by those that have the same rows"),
    (findings.tasks(with_files(*DEMO.tasks), ACCEPTS, ""), None, "of the others the swarm accepts 4"),
    (findings.sizes(with_tokens(64), ACCEPTS), None, "generator.max_new_tokens = 32"),
    (connected(look(unreachable="no NATS server answers"), invitation()), False, "whether something on the way"),
    (connected(look(refused="the server wants a key"), invitation()), False, "Send its operator this line"),
    (connected(look(streams=False), invitation(**SECURED)), False, "swarm nats init --plane swarm"),
    (findings.clock(look(skew_s=61.0), ACCEPTS), False, "61.0 s ahead of the server's"),
    (findings.clock(look(skew_s=-1000.0), ACCEPTS), False, "timedatectl set-ntp true"),
    (findings.clock(look(skew_s=-30.0), ACCEPTS), None, "good enough, but better set it"),
    (findings.name(look(holder=record("nova", OTHER)), "nova", KEY, "nova-abc"), False, "--name nova-abc"),
]


@pytest.mark.parametrize(("finding", "ok", "told"), FAULTS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_will_not_do_is_told_with_its_remedy(finding: findings.Finding | None, ok: bool | None, told: str) -> None:
    assert finding is not None and finding.ok is ok and told in finding.told
    assert finding.line.startswith({True: "ok  ", False: "NO  ", None: "--  "}[ok] + finding.what)


def test_what_is_well_is_said_in_a_line() -> None:
    assert findings.tasks(DEMO, ACCEPTS, "").ok and findings.sizes(DEMO, ACCEPTS).ok
    clock = findings.clock(look(), ACCEPTS)
    assert clock is not None and clock.ok and findings.clock(look(skew_s=None), ACCEPTS) is None, (
        "no line without the server's time"
    )
    assert connected(look(), invitation()).ok
    assert findings.name(look(holder=record("nova", KEY)), "nova", KEY, "").ok, "it is this node's own"
    assert "swarm swarm" not in connected(look(), invitation(swarm_id="swarm")).told
    assert connected(look(streams=False), invitation()).ok, "the first node of an open hub makes its streams"


def test_a_swarm_with_a_roster_says_whether_the_newcomer_is_on_it() -> None:
    said = invitation(roster=[Member(node="nova", public_key=KEY)])
    assert findings.admission(invitation(), "nova", KEY) is None
    listed, stranger = findings.admission(said, "nova", KEY), findings.admission(said, "nova", OTHER)
    assert listed is not None and listed.ok
    assert stranger is not None and stranger.ok is None and f"swarm roster add nova {OTHER}" in stranger.told


def report(node: str, version: int, rate: float) -> EvalReport:
    return EvalReport(
        node=node, policy_version=version, created_at=1.0, n=8, pass_rate=rate, mean_reward=rate, per_task={}, seconds=1.0
    )


def test_spectators_are_told_what_nobody_signed_and_not_told_what_is_badly_signed() -> None:
    forged = CheckedStatement(record("alpha", KEY, policy_version=99), SignatureStatus.REFUSED, KEY)
    entries = [
        forged,
        CheckedStatement(record("beta", OTHER), SignatureStatus.UNSIGNED),
        CheckedStatement(record("gamma", KEY), SignatureStatus.SIGNED, KEY),
    ]
    seen = hub_state(130.0, entries, [report("delta", 1, 0.9)], {}, unsigned={"delta"})
    assert {node.node: node.signed for node in seen.nodes} == {"beta": False, "gamma": True, "delta": False}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(elsewhere_table(seen.nodes))
    shown = console.export_text()
    assert "beta (unsigned)" in shown and "delta (unsigned)" in shown and "gamma (unsigned)" not in shown


def test_spectators_see_the_best_first_and_who_shares_nothing() -> None:
    records = [
        CheckedStatement(record(node, key), SignatureStatus.SIGNED, key)
        for node, key in (("alpha", KEY), ("beta", OTHER), ("idle", KEY))
    ]
    reports = [report("alpha", 0, 0.1), report("beta", 0, 0.2), report("alpha", 5, 0.3), report("beta", 5, 0.6)]
    counts = {"swarm.rollouts.v3.alpha": 4, "swarm.rollouts.v3.Not A Node": 9, "swarm.rollouts.v1.old": 3, "anything": 1}
    seen = hub_state(130.0, records, reports, counts, most=2)
    assert [(node.node, round(node.comparison.gain or 0.0, 3), node.shared_window) for node in seen.nodes] == [
        ("beta", 0.4, 0),
        ("alpha", 0.2, 4),
    ]
    assert (seen.left_out, seen.groups) == (1, 4)
    assert hub_object(seen, "nats://hub")["nodes"][0]["seen_s"] == 30.0


def test_status_says_how_many_nodes_speak_which_version_of_the_messages() -> None:
    """An entry of a node that does not say speaks version 2."""
    before = [CheckedStatement(record(node, KEY), SignatureStatus.SIGNED, KEY) for node in ("old", "older")]
    now = CheckedStatement(record("new", OTHER, swarm_schema=SWARM_SCHEMA_VERSION), SignatureStatus.SIGNED, OTHER)
    seen = hub_state(130.0, [*before, now], [], {})
    assert hub_object(seen, "nats://hub")["message_versions"] == {"2": 2, "3": 1}
    assert "2 nodes of version 2, 1 node of version 3" in hub_caption(seen) and omissions(seen)[-1] in hub_caption(seen)
    same = hub_state(130.0, [now], [], {})
    assert "version" not in hub_caption(same) and omissions(same) == []


def test_a_hub_that_never_answered_is_replaced_by_the_next_tokens_and_one_that_answered_is_not(
    tmp_path: Path, folder: JoinFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    mistyped, right = invitation(**(SECURED | {"url": "tls://hbu:4222"})), invitation(**SECURED)
    key = prepare(mistyped).hub_key
    assert prepare(right).hub_key == key, "which no hub has seen"
    folder.confirm()
    with pytest.raises(CommandError, match="belongs to tls://hub:4222"):
        prepare(mistyped)


def test_the_record_of_a_hub_is_json_that_a_person_may_write(
    tmp_path: Path, folder: JoinFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    key = prepare(invitation(**SECURED)).hub_key
    folder.confirm()
    told = json.loads(folder.hub_file.read_text())
    assert told["url"] == "tls://hub:4222" and len(told["authority"]) == 64
    moved = invitation(**(SECURED | {"url": "tls://moved:4222"}))
    folder.hub_file.write_text(json.dumps({"url": "tls://moved:4222", "authority": told["authority"]}))  # as docs/joining.md says
    assert prepare(moved).hub_key == key
    with pytest.raises(CommandError, match="belongs to tls://moved:4222"):
        prepare(invitation(**SECURED))
    for text in ('{"url": 1}', "\x82\xa3url"):
        folder.hub_file.write_text(text)
        with pytest.raises(CommandError, match="does not name a hub"):
            prepare(moved)
