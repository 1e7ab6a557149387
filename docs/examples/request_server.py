"""Serve requests over TCP. A slab has the requests, and an arena has the temporary arrays.

    python request_server.py [PORT]      # without PORT, sends itself 1,000 requests, and stops

A request is a number n and n values of float32. The answer is the sorted values. The slab limits
the memory of all requests: if all its items are in use, the server refuses the next request.
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


class Handler(socketserver.StreamRequestHandler):  # serves one client, in a thread of its own
    disable_nagle_algorithm = True  # send each answer at once

    def handle(self):
        """Answer requests until the client disconnects, or the server refuses a request."""
        head = bytearray(HEAD.size)
        going_on = True
        while going_on and self.rfile.readinto(head) == HEAD.size:
            with scratch.scope() as arena:  # its end frees the arrays that answer() made
                going_on = self.answer(*HEAD.unpack(head), arena)

    def answer(self, count, arena):
        """Answer one request, and free its item at the end. Return False on failure."""
        try:
            item = requests.alloc(4 * count)
        except (ValueError, arenapy.OutOfMemory):  # invalid size, or no free item
            return self.request.sendall(REFUSED)
        if self.rfile.readinto(item) < item.nbytes:
            return False
        row = arena.copy(item.array(dtype="f4"))
        row.sort()
        self.request.sendall(HEAD.pack(count))
        self.request.sendall(row)
        return True


def ask(stream, row):
    """Send one request as a client, and return the answer."""
    stream.write(HEAD.pack(len(row)) + row.tobytes())
    stream.flush()
    head, answer = bytearray(HEAD.size), np.empty_like(row)
    if stream.readinto(head) < HEAD.size or head == REFUSED:
        raise ConnectionError("the server refused")
    stream.readinto(answer)
    return answer


def main(port=0):
    """Serve forever at a port. Port 0: serve 1,000 requests of this program, and stop."""
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
