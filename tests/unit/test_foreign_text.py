"""Other nodes' words on a terminal and in logs: seen, never acted on, whatever they are."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

import msgpack
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from services.verifier.border import Refusal, Refused
from services.verifier.figures import Figures
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, NodeRecord, ServiceStatus
from shared.contracts.messages import Completion
from shared.contracts.wire import MessageError, ModelIdentity, is_node_name
from shared.runtime.logs import configure_logging
from shared.runtime.metrics import service_registry
from shared.runtime.status import StatusBoard
from shared.text import HIDDEN, visible, visible_json, visible_lines
from shared.transport.base import ConsumerState, KvEntry, StreamState
from swarm_cli.console import terminal
from swarm_cli.dashboard.server import PAGE
from swarm_cli.local.procfile import ROLES
from swarm_cli.observe.evaluation_log import directory
from swarm_cli.observe.node_state import NodeState, StreamFill
from swarm_cli.observe.progress import row_lines
from swarm_cli.observe.snapshot import SwarmState, chosen, held_out_history, node_state
from swarm_cli.observe.status import as_object, show
from swarm_cli.observe.top import screen

NOW = 1_000_000.0
HOSTILE = (
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[1;1H",
    "\x9b31m",
    "x[/bold]",
    "[red]x",
    "[link=http://evil]",
    ":skull:",
    "\r\nalpha  step 9",
    "a\tb",
    "\u202etxt.exe",
    "\u2066x\u2069",
    "a\u200bb",
    "\ufeffx",
    "\x7f",
    "\x00",
    "\u2028line",
    "e" + "\u0301" * 400,
    "漢" * 512,
    "x" * 512,
    "\U000e0041",
    "\ud800",
    "\u3164",
    "👩\u200d👩\u200d👧",
)
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40), st.text(st.characters(codec=None), max_size=12))
numbers = st.one_of(st.floats(-1e30, 1e30), st.sampled_from([0.0, -0.0, 5e-324, 1e30, -1e30, 1e12]))


def acts(character: str) -> bool:
    """Return whether a terminal may do something else with it than draw it."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


@given(texts)
def test_what_is_shown_is_one_line_in_which_nothing_acts_and_plain_text_is_left_alone(text: str) -> None:
    shown = visible(text)
    assert not any(map(acts, shown))
    assert visible(shown) == shown, "escaping twice changes nothing"
    assert not re.search(rf"[{HIDDEN}]", shown), "what the wire refuses in names is never shown either"
    assert len(visible(text, 20)) <= 20
    assert visible_lines(text).count("\n") == text.count("\n")
    assert not any(map(acts, visible_lines(text).replace("\n", "")))
    whole = json.loads(visible_json([text]))
    assert whole == [text] and visible_json([text]).isascii() and visible_json([text]).isprintable()


def test_names_of_every_script_stay_readable() -> None:
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "日本語モデル", "مدل", "ภาษาไทยที่", "Ünïcödé", r"\frac{1}{2}", "e\u0301"):
        assert visible(name) == name
    assert visible("\x1b[31mred\u202e\n") == r"\x1b[31mred\u202e\n"
    assert visible("e" + "\u0301" * 5) == "e" + "\u0301" * 3 + r"\u0301\u0301"


@given(st.one_of(texts, st.from_regex(r"[a-z0-9][a-z0-9-]{0,31}\n?", fullmatch=True)))
def test_only_a_nodes_name_names_a_node_on_subjects_buckets_and_in_messages(text: str) -> None:
    allowed = bool(re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", text))
    assert is_node_name(text) is allowed
    assert subjects.node_of_bucket(f"node_{text}") == (text if allowed else None)
    assert subjects.rollouts_author(subjects.rollouts("x").replace(".x", f".{text}")) == (text if allowed else None)
    figures = {"policy_version": 1, "created_at": 1.0, "n": 1, "pass_rate": 0.5, "mean_reward": 0.5, "per_task": {}, "seconds": 1.0}
    report = {"node": text, **figures}
    if allowed:
        assert decode(msgpack.packb(report), EvalReport).node == text
    else:
        with pytest.raises(MessageError):
            decode(msgpack.packb(report, unicode_errors="surrogatepass"), EvalReport)


def record(node: str = "alpha", model: str = "models/base", software: str = "swarm 1") -> NodeRecord:
    identity = ModelIdentity(name=model, tokenizer_hash="a" * 64)
    return NodeRecord(node=node, public_key="U", model=identity, tasks=["gcd"], policy_version=1, software=software, updated_at=NOW)


@pytest.mark.parametrize("text", [each for each in HOSTILE if re.search(rf"[{HIDDEN}]", each) and "\ud800" not in each], ids=ascii)
def test_an_entry_of_the_directory_with_text_that_acts_is_no_node(text: str) -> None:
    """In the key, the record's name, the model, the software or a task."""
    hostile = [
        KvEntry("alpha", encode(record(model=text)), 1),
        KvEntry("beta", encode(record("beta", software=text)), 2),
        KvEntry(text, encode(record(text)), 3),
        KvEntry("gamma", encode(record("delta")), 4),
        KvEntry("epsilon", text.encode(), 5),
    ]
    found = directory([*hostile, KvEntry("zeta", encode(record("zeta")), 6)], left_out=7)
    assert found.names == ("zeta",) and found.unreadable == 5 and found.left_out == 7


def test_a_decoders_complaint_quotes_the_sender_visibly() -> None:
    with pytest.raises(MessageError) as told:
        decode(msgpack.packb({"text": "", "finish_reason": "\x1b[2J\u202e", "token_count": 0}), Completion)
    assert r"\x1b[2J\u202e" in str(told.value) and not any(map(acts, str(told.value)))


def test_a_statement_in_anothers_name_is_not_taken_for_that_nodes() -> None:
    mine = status("alpha", "trainer", "working", {})
    theirs = status("beta", "trainer", "working", {})
    entries = [
        KvEntry("status.trainer.0", encode(mine), 1),
        KvEntry("status.sampler.0", encode(mine), 2),
        KvEntry("status.trainer.1", encode(theirs), 3),
    ]
    view = node_state("alpha", entries)
    assert view.statuses == (mine,) and view.unreadable == ("status.sampler.0", "status.trainer.1")


def status(node: str, role: str, state: str, figures: dict[str, float], updated_at: float = NOW) -> ServiceStatus:
    return ServiceStatus(
        node=node, role=role, replica="0", pid=1, host="h", state=state, started_at=0.0, updated_at=updated_at, figures=figures  # type: ignore[arg-type]
    )  # fmt: skip


FIGURES = (
    "step", "step_seconds", "wait_share", "publish_share", "reward_local", "staleness_mean", "staleness_max", "groups_generated",
    "shared", "accepted", "refused", "pool_local", "pool_external", "wanted_local", "wanted_external", "outbox",
    "scorers_replaced", "policy_version",
)  # fmt: skip


@st.composite
def snapshots(draw: Any) -> SwarmState:
    nodes = []
    for name in draw(st.lists(texts, min_size=1, max_size=3, unique=True)):
        statuses = tuple(
            status(name, role, draw(texts), {**dict.fromkeys(draw(st.sets(st.sampled_from(FIGURES))), draw(numbers)),
                   f"refused_{draw(texts)}": draw(numbers)}, draw(st.floats(0, 1e11)))
            for role in draw(st.lists(st.sampled_from(ROLES), max_size=4))
        )  # fmt: skip
        count = draw(st.integers(0, 2**62))
        fill = StreamFill(draw(texts), StreamState(0, count, count, count), ConsumerState(count, 0, 0))
        evaluation = EvalReport(
            node=name, policy_version=count, created_at=1.0, n=count, pass_rate=0.5, mean_reward=0.5, per_task={}, seconds=1.0
        )
        nodes.append(
            NodeState(
                name, statuses, None, None, evaluation, (draw(texts),), at=NOW, streams=(fill,), elsewhere=draw(st.booleans()),
                lost=tuple(draw(st.lists(texts, max_size=1))), scores=held_out_history(evaluation, []), run=draw(texts),
            )
        )  # fmt: skip
    return SwarmState(NOW, tuple(nodes), (), draw(st.sampled_from([None, True, False])), draw(st.integers(0, 9)), 3)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(snapshots(), texts, st.sampled_from([40, 80, 160]), st.sampled_from([12, 40, 400]))
def test_status_top_and_the_progress_view_print_any_text_as_text_and_never_raise(
    snapshot: SwarmState, notice: str, width: int, height: int
) -> None:
    console = Console(width=width, file=io.StringIO(), markup=False, emoji=False)
    console.print(screen(snapshot, height=height, headline="nats://here", notice=notice))
    assert all(cell_len(line) <= width for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]
    show(snapshot, console)
    lines = [line for node in snapshot.nodes for line in row_lines(node, 1.0)]
    assert all("\n" not in line for line in lines)
    shown = console.file.getvalue() + "\n".join(lines)  # type: ignore[attr-defined]
    assert not any(map(acts, shown.replace("\n", ""))), [c for c in shown if acts(c)]
    assert visible_json(as_object(snapshot)).isprintable()


def test_long_and_wide_names_leave_a_table_readable() -> None:
    long = "漢" * 512
    fills = tuple(StreamFill(name, StreamState(0, 1, 1, 1)) for name in (long, "x" * 512, "e" + "\u0301" * 512, "plain"))
    console = Console(width=100, file=io.StringIO(), markup=False)
    show(SwarmState(NOW, (NodeState(long, streams=fills),), (), True), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert len(text.splitlines()) < 40, text
    assert "plain" in text and "messages" in text, "the other columns are still there"


def test_the_terminal_of_commands_takes_no_string_for_a_style(capsys: pytest.CaptureFixture[str]) -> None:
    terminal().print("x[/bold] [red]:skull:[/red]")
    assert capsys.readouterr().out == "x[/bold] [red]:skull:[/red]\n"


def test_this_servers_nodes_are_looked_at_before_the_directorys_newest() -> None:
    listed = directory([KvEntry(f"n{i}", encode(record(f"n{i}")), i) for i in range(50, 0, -1)], left_out=3000)
    names, left_out = chosen("mine", {"mine", "zz"}, listed, 10)
    assert names == sorted(["mine", "zz", *(f"n{i}" for i in range(50, 42, -1))])
    assert left_out == 42 + 3000
    assert chosen("mine", set(), directory([]), 10) == ([], 0), "a name from the defaults is no node that is there"


@pytest.fixture
def logs() -> Any:
    root = logging.getLogger()
    handlers, level, before = root.handlers, root.level, structlog.get_config()
    yield
    root.handlers, root.level = handlers, level
    structlog.configure(**before)


@pytest.mark.parametrize("text", HOSTILE[:12], ids=ascii)
def test_console_and_file_logs_show_foreign_words_as_text(text: str, logs: None, tmp_path: Path) -> None:
    """Values, lists, keys, exceptions and the lines of libraries."""
    screen_text, file = io.StringIO(), tmp_path / "role.log"
    configure_logging(level="info", log_format="console", file=file, stream=screen_text)
    log = structlog.get_logger("swarm.test")
    log.info(
        "foreign_group_refused",
        sender=text,
        detail=f"no {text}",
        several=[text],
        by_name={text: 1},
        whole=Refused(Refusal.AUTHOR, text, text),
    )
    logging.getLogger("nats.aio.client").warning("unexpected %s", text)
    try:
        raise ValueError(text)
    except ValueError:
        log.exception("crashed")
    shown = screen_text.getvalue()
    assert "foreign_group_refused" in shown and "Traceback" in shown
    assert not any(map(acts, shown.replace("\n", ""))), shown
    lines = file.read_bytes().decode("ascii").splitlines()
    assert len(lines) == 3 and all(line.isprintable() for line in lines)
    assert json.loads(lines[0])["sender"] == text, "in the file, nothing is lost"


def test_without_a_stream_logs_go_to_standard_output(logs: None, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(level="info", log_format="json")
    structlog.get_logger("swarm.test").info("started")
    assert "started" in capsys.readouterr().out and sys.stdout is not None


@given(texts)
@settings(deadline=None, max_examples=30)
def test_a_metrics_sender_is_a_nodes_name_or_nobody(text: str) -> None:
    """What the border counts a refusal under comes from a subject, whose tokens a peer chooses."""
    registry = service_registry(lambda: True, "demo")
    figures = Figures(registry, StatusBoard("alpha", "verifier", "0"))
    figures.border.refused(
        Refused(Refusal.AUTHOR, subjects.rollouts_author(subjects.rollouts("x").replace(".x", f".{text}")), text)
    )
    senders = {
        sample.labels["sender"]
        for family in registry.collect() if family.name == "swarm_ingest_rejected_by_sender"
        for sample in family.samples
    }  # fmt: skip
    assert all(sender == "_other" or is_node_name(sender) for sender in senders)


def test_the_dashboards_page_puts_text_into_the_document_as_text_alone() -> None:
    for name in ("draw.js", "group.js", "swarm.js"):
        script = (PAGE / name).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|createContextualFragment", script
        )
