"""A generator whose tasks are somebody's own file records the file's name in the run's folder, and
`swarm rollouts` and the page call the dataset by it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from shared.run_records import FILE_NAMES_FILE
from swarm_cli.file_names import file_names
from tests.forked import Forked
from tests.integration.page_looker import Looker, written
from tests.integration.page_swarm import ROOT, Dashboard, PageSwarm, group
from tests.nats_server import NatsServer

DEADLINE_S = 240.0
DATASETS = ["file_" + digit * 40 for digit in "12"]


def test_a_generator_that_starts_records_the_name_of_its_file(server: NatsServer, tmp_path: Path) -> None:
    rows = [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "node.toml"
    config.write_text(f'[eval]\ntasks = 1\n[[tasks]]\nsource = "file"\npath = "{tmp_path}/sums.jsonl"\n')
    settings = {
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "SWARM_NODE__ID": "alpha",
        "SWARM_NODE__RUN": "first",
        "SWARM_NODE__VAR_DIR": str(tmp_path / "var"),
        "SWARM_MODEL__PATH": str(ROOT / "models" / "base"),
        "SWARM_HTTP__BASE_PORT": "0",
        "SWARM_NATS__NODE_URL": server.url,
        "SWARM_NATS__SWARM_URL": server.url,
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    log, run = tmp_path / "said", tmp_path / "var" / "runs" / "first"
    service = Forked("services.generator", ["--config", str(config)], environment={**clean, **settings}, cwd=ROOT, log=log)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (run / "alpha" / FILE_NAMES_FILE).is_file():
            assert service.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        (line,) = (run / "alpha" / FILE_NAMES_FILE).read_text().splitlines()
    finally:
        service.kill()
        service.wait(DEADLINE_S)
    told = json.loads(line)
    assert told["file"] == "sums.jsonl" and file_names(run).shown(told["dataset"]) == f"sums.jsonl ({told['dataset'][5:13]})"


def test_the_page_shows_files_by_name_and_tells_two_of_one_name_apart(browser: Any, server: NatsServer, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "dev"
    names = ["questions.jsonl (11111111)", "questions.jsonl (22222222)"]

    async def write() -> None:
        swarm = await PageSwarm.open(server.url, run)
        await swarm.node("alpha", tasks=[*DATASETS, "gcd"])
        for other in ("beta", "gamma"):  # who teaches whom is shown of three nodes or more
            await swarm.node(other, tasks=["gcd"])
        for number, dataset in enumerate([*DATASETS, "gcd"]):
            await swarm.batch("alpha", group("alpha", "alpha", f"What is {number}?", [("0", 1.0), ("1", 0.0)], dataset=dataset))
        await swarm.transport.close()

    written(write())
    lines = [{"dataset": dataset, "file": "questions.jsonl"} for dataset in DATASETS]
    (run / "alpha" / FILE_NAMES_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = Dashboard(server.url, var_dir=tmp_path)
    looker = Looker(browser, 390)
    try:
        shown.until(lambda found: len(found.get("groups", ())) == 3, "all groups")
        page = looker.open(shown.url)
        for selector in ("#dataset", "#texts-of"):
            assert page.locator(f"{selector} option").all_inner_texts() == ["all", "gcd", *names]
        assert page.locator("#nodes tbody tr").get_by_text(f"{', '.join(names)}, gcd").count() == 1
        page.locator("#texts-of").select_option(names[1])
        cards = page.locator("#texts li")
        cards.get_by_text("What is 0?").wait_for(state="detached")
        assert cards.count() == 1 and cards.locator(".facts", has_text=names[1]).count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        cards.locator("a.question").click()
        page.get_by_text(f"questions.jsonl, {DATASETS[1]} seed 4 index 0").wait_for()
        assert page.title() == "questions.jsonl, alpha step 2 · swarm"
        looker.check()
    finally:
        looker.close()
        shown.close()
