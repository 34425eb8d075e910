"""Gives real trackers three steps, and then makes a call:
`python -m tests.unit.real_trackers FOLDER`.
"""

from __future__ import annotations

import sys
import urllib.request
from contextlib import suppress

import structlog

from services.trainer.tracking.base import open_feeds
from shared.config import load_config


def main() -> None:
    tracking = {"trackers": ["wandb", "trackio", "tensorboard"], "project": "here"}
    config = load_config(None, {"tasks": [{"dataset": "gcd"}], "node": {"var_dir": sys.argv[1]}, "tracking": tracking})
    feeds = open_feeds(config, 0, structlog.get_logger())
    for step in (1, 2, 3):
        feeds.offer({"train/loss": step / 8}, step)
    feeds.close(60.0)
    with suppress(OSError):
        urllib.request.urlopen("https://control.invalid", timeout=5)


if __name__ == "__main__":
    main()
