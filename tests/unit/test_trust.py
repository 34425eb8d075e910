"""Rosters, known keys, bans and what the commands do to them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.verifier.border import Candidate, Refusal, Refused
from services.verifier.service import VerifierService
from services.verifier.trust import IDLE_S, Bans, KnownKeys, RosterKeys
from shared.config import load_config
from shared.contracts import subjects
from shared.contracts.senders import Ban, BanList
from shared.identity.keys import SigningKey, is_public_key, load
from shared.identity.roster import RosterEntry, RosterError, parse_roster, read_roster, write_roster
from shared.runtime import FatalError
from swarm_cli.app import app
from swarm_cli.errors import CommandError
from swarm_cli.node_commands import seconds
from tests.unit.test_border import KEY, NOW_S, OTHER_KEY, SUBJECT, THIRD_KEY, border, group, signed, taken_in


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code (of a CommandError where there is one), standard output, and the error's text."""
    outcome = CliRunner().invoke(app, list(arguments))
    if isinstance(outcome.exception, CommandError):
        return outcome.exception.exit_code, outcome.output, str(outcome.exception)
    return outcome.exit_code, outcome.output, ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("beta", "has no key"),
        ("beta UNKEY", "not a public key"),
        (f"Beta {KEY.public_key}", "not a node name"),
        (f"beta {KEY.public_key}\nbeta {OTHER_KEY.public_key}", "line 2: beta is listed twice"),
        (f"beta {KEY.public_key}\ngamma {KEY.public_key}", "line 2: gamma has the key of beta"),
        (f"beta {KEY.public_key[:-1]}{'AB'[KEY.public_key.endswith('A')]}", "not a public key"),
    ],
    ids=["no key", "not a key", "not a name", "a name twice", "a key twice", "a letter of the key changed"],  # keys are made anew
)
def test_a_wrong_roster_is_refused_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(RosterError, match=problem):
        parse_roster(text)


def test_a_roster_reads_back_as_written_and_comments_are_allowed(tmp_path: Path) -> None:
    entries = {"beta": RosterEntry("beta", KEY.public_key, "a friend"), "gamma": RosterEntry("gamma", OTHER_KEY.public_key)}
    write_roster(tmp_path / "deep" / "roster.txt", entries)
    assert read_roster(tmp_path / "deep" / "roster.txt") == entries
    assert parse_roster(f"# ours\n\n  beta   {KEY.public_key}  a friend # x\n") == {"beta": entries["beta"]}


def test_a_verifier_without_a_usable_roster_does_not_start_and_says_what_to_do(tmp_path: Path) -> None:
    def build() -> VerifierService:
        config = load_config(
            overrides={
                "node": {"var_dir": tmp_path},
                "tasks": [{"dataset": "gcd"}],
                "eval": {"tasks": 1},
                "verifier": {"trust": "roster", "roster_file": tmp_path / "roster.txt"},
            }
        )
        return VerifierService(config)

    with pytest.raises(FatalError, match="does not exist: create it with `swarm roster add"):
        build()
    (tmp_path / "roster.txt").write_text("beta nokey\n")
    with pytest.raises(FatalError, match="line 1: 'nokey' is not a public key"):
        build()
    (tmp_path / "roster.txt").write_text("")
    build()


def test_a_roster_admits_the_listed_follows_the_file_and_survives_a_broken_one(tmp_path: Path) -> None:
    file = tmp_path / "roster.txt"
    write_roster(file, {"beta": RosterEntry("beta", KEY.public_key)})
    roster = RosterKeys(file)
    assert roster.bind("beta", KEY.public_key, NOW_S)
    assert not roster.bind("beta", OTHER_KEY.public_key, NOW_S)
    assert not roster.bind("gamma", OTHER_KEY.public_key, NOW_S)
    assert not roster.reload()
    write_roster(file, {"gamma": RosterEntry("gamma", OTHER_KEY.public_key)})
    assert roster.reload()
    assert not roster.may_use("beta", KEY.public_key, NOW_S)
    assert roster.may_use("gamma", OTHER_KEY.public_key, NOW_S)
    file.write_text("torn")
    with pytest.raises(RosterError):
        roster.reload()
    assert roster.may_use("gamma", OTHER_KEY.public_key, NOW_S), "the last good one stays in force"
    file.unlink()
    with pytest.raises(RosterError):
        roster.reload()
    assert len(roster) == 1


def test_the_border_refuses_who_is_not_listed(tmp_path: Path) -> None:
    gate = border(tmp_path)
    file = tmp_path / "roster.txt"
    write_roster(file, {"beta": RosterEntry("beta", KEY.public_key)})
    gate._trust = RosterKeys(file)
    assert isinstance(gate.examine(SUBJECT, signed(group()), NOW_S), Candidate)
    stranger = gate.examine(subjects.rollouts("gamma"), signed(group(node="gamma"), OTHER_KEY), NOW_S)
    assert isinstance(stranger, Refused)
    assert stranger.reason is Refusal.UNKNOWN_KEY


def test_a_banned_name_stays_out_with_every_key_and_its_key_with_every_name(tmp_path: Path) -> None:
    gate = border(tmp_path)
    taken_in(gate, SUBJECT, signed(group(draw=1)))
    gate.bans.replace(BanList(bans=[Ban(sender="beta", until=NOW_S + 60, reason="spam")]))
    for subject, payload in (
        (SUBJECT, signed(group())),
        (SUBJECT, b"not even decoded"),
        (SUBJECT, signed(group(), THIRD_KEY)),
        (subjects.rollouts("innocent"), signed(group(node="innocent"))),
    ):
        refused = gate.examine(subject, payload, NOW_S)
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.BANNED
    assert isinstance(gate.examine(SUBJECT, signed(group()), NOW_S + 61), Candidate), "until it has run out"
    assert gate.bans.count(NOW_S) == 1
    assert gate.bans.count(NOW_S + 61) == 0
    gate.bans.replace(BanList(bans=[Ban(sender=KEY.public_key)]))
    for name in ("beta", "innocent"):
        refused = gate.examine(subjects.rollouts(name), signed(group(node=name)), NOW_S)
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.BANNED
    gate.bans.replace(BanList())
    assert isinstance(gate.examine(SUBJECT, signed(group()), NOW_S), Candidate)


def test_a_name_bound_after_its_ban_gives_its_key_away_at_the_next_look(tmp_path: Path) -> None:
    known = KnownKeys(tmp_path / "known", ("alpha", OTHER_KEY.public_key))
    bans = Bans(known)
    bans.replace(BanList(bans=[Ban(sender="beta")]))
    assert bans.ban_for_key(KEY.public_key, 0.0) is None
    known.bind("beta", KEY.public_key, 0.0)
    bans.refresh()
    assert bans.ban_for_key(KEY.public_key, 0.0) is not None
    later_s = IDLE_S + 1
    assert known.bind("beta", THIRD_KEY.public_key, later_s)
    assert known.bind("gamma", KEY.public_key, later_s)
    bans.refresh()
    assert bans.ban_for_key(KEY.public_key, 0.0) is not None, "a key that gives its banned name up stays banned"
    assert bans.ban_for_key(THIRD_KEY.public_key, 0.0) is not None


@pytest.mark.slow
def test_keys_new_show_and_roster_commands_keep_seeds_private_and_refuse_nonsense(tmp_path: Path) -> None:
    file, roster = tmp_path / "beta.nk", str(tmp_path / "roster.txt")
    code, made, _ = run("keys", "new", "--out", str(file), "--name", "beta")
    assert code == 0
    public = load(file).public_key
    assert made.splitlines()[-1] == f"beta {public}"
    assert file.stat().st_mode & 0o777 == 0o600
    seed = file.read_text().strip()
    code, shown, _ = run("keys", "show", str(file))
    assert (code, shown.strip()) == (0, public)
    assert seed not in made + shown
    code, _, problem = run("keys", "new", "--out", str(file))
    assert (code, "is not replaced" in problem, file.read_text().strip()) == (1, True, seed)
    code, printed, _ = run("keys", "new")
    assert SigningKey(printed.split()[0].encode()).public_key == printed.split()[1]

    assert run("roster", "add", "beta", public, "--file", roster, "--note", "a friend")[0] == 0
    assert run("roster", "add", "gamma", KEY.public_key, "--file", roster)[0] == 0
    assert run("roster", "list", "--file", roster)[1].splitlines() == [f"beta {public} a friend", f"gamma {KEY.public_key}"]
    for wrong in (("beta", KEY.public_key), ("delta", KEY.public_key), ("delta", "UX"), ("Delta", OTHER_KEY.public_key)):
        assert run("roster", "add", *wrong, "--file", roster)[0] == 1
    assert run("roster", "remove", "beta", "--file", roster)[0] == 0
    assert run("roster", "remove", "beta", "--file", roster)[0] == 1
    assert list(read_roster(Path(roster))) == ["gamma"]
    assert is_public_key(public)
    assert not is_public_key(seed)


def test_durations_are_read_with_their_unit() -> None:
    assert [seconds(each) for each in ("90s", "30m", "1h", "1.5d")] == [90, 1800, 3600, 129_600]
    for wrong in ("", "1", "h", "-1h", "1y", "0h"):
        with pytest.raises(CommandError, match="is not a duration"):
            seconds(wrong)
