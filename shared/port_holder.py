"""Names the process that listens on a TCP port of this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shared.text import visible


def port_holder(port: int) -> str:
    """`, which process 123 (python3) has`, of a listening TCP port of this machine; empty if the
    system does not show who has it.
    """
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*") if wanted else ():
        with suppress(OSError):  # it has ended, or is another user's
            if any(os.readlink(each) in wanted for each in (process / "fd").iterdir()):
                name = (process / "comm").read_text().strip()
                return f", which process {process.name} ({visible(name, 40)}) has"
    return ""
