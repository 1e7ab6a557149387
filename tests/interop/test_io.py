"""Blocks under asyncio: what the guide (docs/io.md) says of it."""

import asyncio
import socket

import pytest

import arenapy
from asv_benches.host.echo_server import BUFFER, OfSlab

# The words of CPython before and since 3.13.
TAKES_BYTES = "data argument must be a bytes(-like object|, bytearray, or memoryview object)"
ITEM = BUFFER


class Sender(OfSlab):
    """Sends back what it reads, and notes how much waited to be sent."""

    def __init__(self, slab):
        self.slab, self.most = slab, 0

    def buffer_updated(self, nbytes):
        super().buffer_updated(nbytes)
        self.most = max(self.most, self.transport.get_write_buffer_size())


def test_a_peer_that_does_not_read_gets_every_byte_as_it_was():
    """What the transport has not sent yet is in items that nobody else gets."""
    slab = arenapy.Slab(ITEM, 4, max_count=1024)
    sender = Sender(slab)

    async def main():
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        transport, _ = await loop.connect_accepted_socket(lambda: sender, ours)
        sent, got = bytearray(), bytearray()
        for number in range(200):
            message = bytes([number]) * (ITEM // 2)
            await loop.sock_sendall(theirs, message)
            sent += message
            await asyncio.sleep(0)
        assert sender.most > 10 * ITEM, "the transport sent all at once"
        while len(got) < len(sent):
            got += await loop.sock_recv(theirs, 1 << 20)
        assert got == sent
        theirs.close()
        transport.abort()
        await asyncio.sleep(0)

    asyncio.run(main())
    del sender.transport
    assert slab.count == 0


def test_a_slab_that_is_full_closes_the_connection_and_no_other():
    slab = arenapy.Slab(ITEM, 1, max_count=1)
    senders = [Sender(slab) for _ in range(2)]
    told = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: told.append(context["exception"]))
        pairs = []
        for sender in senders:
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            pairs.append(theirs)
            await loop.connect_accepted_socket(lambda sender=sender: sender, ours)
        taken = slab.alloc()
        await loop.sock_sendall(pairs[0], b"ping")
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(pairs[0], 10)
        del taken
        await loop.sock_sendall(pairs[1], b"ping")
        assert await loop.sock_recv(pairs[1], 10) == b"ping"
        for sender, theirs in zip(senders, pairs, strict=True):
            sender.transport.abort()
            theirs.close()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert [type(error) for error in told] == [arenapy.OutOfMemory]


def test_what_a_transport_takes():
    """The guide's table; where this fails, asyncio takes Buffers, and the guide is out of date."""
    item = arenapy.Slab(ITEM, 1).alloc()
    memoryview(item)[:4] = b"ping"

    async def main():
        left, right = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=left)
        for buffer in (item, item[:4]):
            with pytest.raises(TypeError, match=TAKES_BYTES):
                writer.write(buffer)
        writer.write(memoryview(item)[:4])
        await writer.drain()
        assert right.recv(100) == b"ping"
        right.sendall(b"pong")
        assert await reader.readexactly(4) == b"pong"
        writer.close()
        await writer.wait_closed()
        right.close()

        loop = asyncio.get_running_loop()
        left, right = socket.socketpair()
        for one in (left, right):
            one.setblocking(False)
        await loop.sock_sendall(left, item[:4])
        assert await loop.sock_recv_into(right, item[4:]) == 4
        assert bytes(item[4:8]) == b"ping"
        left.close()
        right.close()

    asyncio.run(main())


def test_servers_of_http_want_a_memoryview():
    web = pytest.importorskip("aiohttp.web")
    item = arenapy.Slab(ITEM, 1).alloc(4)
    with pytest.raises(ValueError, match="Unsupported body type"):
        web.Response(body=item)
    assert web.Response(body=memoryview(item)).body is not None
