"""A DNS server on loopback (UDP) whose records a test changes."""

import socket
import threading
from types import TracebackType
from typing import Self

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer:
    """Answers from `records` in a thread of its own. A context manager."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.records: dict[str, dict[str, list[str]]] = {}
        """Texts of records by name and type. A name that is not here does not exist."""
        self.ttl = 0
        self.silent = False
        """Give no answer at all."""
        self.rcode = dns.rcode.NOERROR
        """Other than NOERROR: the answer to everything."""
        self.asked: list[tuple[str, str]] = []
        """Questions in order: name and type."""
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        while True:
            data, client = self._socket.recvfrom(4096)
            if not data:
                return
            query = dns.message.from_wire(data)
            [question] = query.question
            name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
            self.asked.append((name, kind))
            if self.silent:
                continue
            reply = dns.message.make_response(query)
            reply.flags |= dns.flags.RA
            found = self.records.get(name)
            reply.set_rcode(dns.rcode.NXDOMAIN if found is None and self.rcode == dns.rcode.NOERROR else self.rcode)
            texts = (found or {}).get(kind, [])
            if texts and self.rcode == dns.rcode.NOERROR:
                reply.answer.append(dns.rrset.from_text_list(question.name, self.ttl, "IN", kind, texts))
            self._socket.sendto(reply.to_wire(), client)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()
