"""Serve requests over TCP: each is received into an item of a slab, with scratch from an arena.

    python request_server.py [PORT]      # by default 1,000 requests of its own, and stop

A request is a count and a row of so many float32; its answer is the row, sorted. All requests
together have the memory of the slab: beyond it, a client is refused at once.
"""

import socket
import socketserver
import struct
import sys
import threading

import numpy as np

import arenapy

HEAD = struct.Struct("<i")
REFUSED = HEAD.pack(-1)
requests = arenapy.Slab(64 << 10, count=32)
scratch = arenapy.PerThread(lambda: arenapy.Bump(1 << 20))


class Handler(socketserver.StreamRequestHandler):  # of one client, in a thread of its own
    disable_nagle_algorithm = True  # an answer does not wait for more to send

    def handle(self):
        """Answer requests until the client goes, or one is refused."""
        head = bytearray(HEAD.size)
        going_on = True
        while going_on and self.rfile.readinto(head) == HEAD.size:
            with scratch.scope() as arena:  # at its end, nobody has the arrays of answer() any more
                going_on = self.answer(*HEAD.unpack(head), arena)

    def answer(self, count, arena):
        """Answer one request; False if that cannot be. Its item is free again at the end."""
        try:
            item = requests.alloc(4 * count)
        except (ValueError, arenapy.OutOfMemory):  # negative, large; all items taken
            return self.request.sendall(REFUSED)
        if self.rfile.readinto(item) < item.nbytes:
            return False
        row = arena.copy(item.array(dtype="f4"))
        row.sort()
        self.request.sendall(HEAD.pack(count))
        self.request.sendall(row)
        return True


def ask(stream, row):
    """The answer to one request, at a client's side."""
    stream.write(HEAD.pack(len(row)) + row.tobytes())
    stream.flush()
    head, answer = bytearray(HEAD.size), np.empty_like(row)
    if stream.readinto(head) < HEAD.size or head == REFUSED:
        raise ConnectionError("the server refused")
    stream.readinto(answer)
    return answer


def main(port=0):
    """Serve for ever at a port; by default, serve requests of this program's own."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", port), Handler) as server:
        if port:
            server.serve_forever()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with (
            socket.create_connection(server.server_address) as connection,
            connection.makefile("rwb") as stream,
        ):
            for number in range(1000):
                ask(stream, np.random.default_rng(number).random(1000, "f4"))
        server.shutdown()
    print(f"1000 requests, at most {requests.stats().peak_bytes >> 10} KiB in use: {requests}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
