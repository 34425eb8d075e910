"""A program that has its command run by a process of `tests.forked_commands`, and stands for it:
its streams, folder and environment, the signals that it gets, and its end.

`python -I -S forked_client.py SOCKET MODULE [ARGUMENT...]`; it imports little, to start at once.
"""

import json
import os
import signal
import socket
import sys

where, module, *arguments = sys.argv[1:]
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.connect(where)
request = json.dumps([module, arguments, dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
answers = server.makefile("r")
pid = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
ended = int(answers.readline())
if ended < 0:
    signal.signal(-ended, signal.SIG_DFL)
    os.kill(os.getpid(), -ended)
sys.exit(ended)
