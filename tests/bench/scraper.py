"""A Prometheus scraper: it fetches `/metrics` repeatedly between two lines of its input, and reports the times.

Run: python -m tests.bench.scraper PORT
"""

import json
import select
import socket
import sys
import time

_ASK = b"GET /metrics HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n"


def page(port: int) -> int:
    """Read one; its lines."""
    lines = 0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(_ASK)
        while piece := connection.recv(1 << 18):
            lines += piece.count(b"\n")
    return lines


def _serve(port: int) -> None:
    print("LISTENING", flush=True)
    while sys.stdin.readline():
        print("begun", flush=True)
        took: list[float] = []
        lines = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            began = time.perf_counter()
            lines = page(port)
            took.append(time.perf_counter() - began)
        sys.stdin.readline()
        print(json.dumps({"seconds": took, "lines": lines}), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
