"""Buffers and arrays over Unix sockets, also between programs that nothing else connects.

What lives here: the message. It has a head of fixed size, the layout of what was sent, and the
descriptor of the memory, which travels with the head's first byte. What does not: the lease that
the descriptor carries (shared).

The kernel keeps the descriptor while the message is under way. So neither side depends on the
other's life: a message of a sender that was killed is received, and the memory of a message that
nobody receives is free when the socket is closed. Nothing has a name that could be left behind.

A message is data alone, no pickle: a peer that lies gets an error, and runs no code here.
"""

from __future__ import annotations

import array
import ast
import errno
import fcntl
import socket
import struct
from typing import Any, Protocol

import numpy as np

from arenapy.base.system_errors import is_of_system
from arenapy.buffer.buffer import Buffer, View
from arenapy.buffer.ndarray import lies_in_itself
from arenapy.linux import vm
from arenapy.memory import shared

__all__ = ["receive", "send"]

MAGIC = b"arenapy1"
#: Magic, what it is, read-only or not, dimensions, bytes of the dtype's text, then of the memory:
#: where the bytes begin in the file, how many they are, and where in them the first item is.
HEAD = struct.Struct("<8sBBHIQQQ")
PLAIN, TYPED, ARRAY = range(3)
#: Added to a kind if the memory is on a device. Then 24 bytes follow the dtype, and say where.
ON_DEVICE = 4
PLACE_BYTES = 24
MAX_DIMS = 64  # NumPy's limit
MAX_DTYPE = 1 << 16
#: The exceptions of a text that is not a dtype.
MALFORMED = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip


class Connection(Protocol):
    """A socket, a connection of multiprocessing's, or anything else with a descriptor."""

    def fileno(self) -> int:
        """Its descriptor."""


def _unix_socket(connection: socket.socket | Connection) -> socket.SocketType:
    """The socket of a connection, blocking or with its timeout. It is closed by `_let_go`."""
    kept: socket.SocketType
    if isinstance(connection, socket.socket):
        kept = connection
    else:
        fileno = getattr(connection, "fileno", None)
        if not callable(fileno):
            raise TypeError(
                f"{connection!r} is no connection: give a Unix socket or multiprocessing's "
                "Connection over one"
            )
        try:
            kept = vm.duplicate_socket(fileno())
        except OSError as error:
            if error.errno != errno.ENOTSOCK:
                raise
            raise ValueError(
                f"{connection!r} is not a socket, and only those carry descriptors (queues and "
                "Pipe(duplex=False) are pipes): use Pipe(), socket.socketpair() or a Unix socket"
            ) from error
    if kept.family != socket.AF_UNIX or kept.type != socket.SOCK_STREAM:
        _let_go(kept, connection)
        raise ValueError(
            f"{connection!r} is not a Unix stream socket: memory is shared within one machine, "
            "over AF_UNIX, SOCK_STREAM; send a copy over others"
        )
    return kept


def _let_go(sock: socket.SocketType, connection: socket.socket | Connection) -> None:
    """Close the socket if it is not the user's own."""
    if sock is not connection:
        sock.close()


def _dtype_text(dtype: np.dtype[Any]) -> bytes:
    """The text of a dtype for `_dtype_of`: its name, or the fields of a structured one."""
    description = _description(dtype)
    text = (description if isinstance(description, str) else repr(description)).encode()
    try:
        found = _dtype_of(text)
        if found == dtype and _are_alike(found, dtype):
            return text
    except ValueError:
        if dtype.hasobject:
            raise
    raise ValueError(
        f"dtype={dtype} cannot be sent, because no text describes it: send a view of bytes "
        "(x.view('u1'))"
    )


def _description(dtype: np.dtype[Any]) -> Any:
    """A dtype in strings, numbers, tuples and dicts, for `_described`."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return _description(base), shape
    if dtype.fields is None or dtype.names is None:
        # The `str` of a type that another package has, such as bfloat16, is that of its bytes.
        return dtype.name if dtype.isbuiltin == 2 else dtype.str
    fields = [dtype.fields[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [_description(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
        "record": dtype.type is np.record,
    }


def _are_alike(found: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Whether the scalars of equal types are of one class; C has several integers of a size."""
    if dtype.subdtype is not None:
        return _are_alike(found.base, dtype.base)
    if found.type is not dtype.type and dtype.kind not in "iu":
        return False
    if found.fields is None or dtype.fields is None:
        return True
    return all(_are_alike(found.fields[name][0], field[0]) for name, field in dtype.fields.items())


def _described(description: Any) -> np.dtype[Any]:
    record = False
    if isinstance(description, tuple):
        base, shape = description
        description = _described(base), shape
    elif isinstance(description, dict):
        record = description.pop("record")
        description["formats"] = [_described(one) for one in description["formats"]]
    found = np.dtype(description)
    return np.dtype((np.record, found)) if record else found


def _dtype_of(text: bytes) -> np.dtype[Any]:
    """The dtype of a text of a peer's, which may be anything."""
    try:
        structured = text[:1] in b"[{("
        dtype = _described(ast.literal_eval(text.decode()) if structured else text.decode())
    except MALFORMED as error:  # not Exception: a signal's may come here
        raise ValueError(
            f"dtype={text[:100]!r} cannot be understood; if a package has it (ml_dtypes has "
            "bfloat16), import that first"
        ) from error
    if dtype.hasobject:
        raise ValueError(f"dtype={dtype} holds references to Python objects")
    if not lies_in_itself(dtype):
        raise ValueError(f"dtype={text[:100]!r} has fields that lie outside of it")
    return dtype


def send(connection: socket.socket | Connection, thing: Buffer | np.ndarray[Any, Any]) -> None:
    """Send a Buffer or an array to another process, which then sees the same memory.

    The memory must be of an allocator over :class:`Shared`, or of a Bump or Pool over
    :class:`cuda.Device` with ``grow=True``. It is not reused until the receiver drops it or ends,
    also if the sender drops it. The message outlives the sender. The receiver can read and write
    the whole region that contains the bytes, or the whole pages of 2 MiB of a device. So let only
    programs connect that you trust.

    A Buffer of a device is sent when the streams that were told of it have done their work: this
    thread waits for them.

    Parameters
    ----------
    connection : socket.socket or multiprocessing.connection.Connection
        A connected Unix stream socket, blocking or with a timeout; or a connection of
        multiprocessing, from ``Pipe()`` or from a ``Listener`` or ``Client`` with a path.
    thing : Buffer or numpy.ndarray
        An array may be any view: strided, reversed, read-only. Metadata of its dtype is left out.

    Raises
    ------
    BufferError
        If the bytes are not in memory that can be shared, or there are none. Nothing is sent.
    CudaError
        If a stream that uses the Buffer is being captured into a graph. Nothing is sent.
    TypeError, ValueError
        If `thing` is not a Buffer or an array, or is a closed Buffer, if no text describes its
        dtype, or if the connection cannot carry descriptors. Nothing is sent.
    OSError
        If the other side is gone, no descriptor is free, or too many messages were not received
        yet (``ETOOMANYREFS``). After a timeout in the middle of a message, close the connection.

    Examples
    --------
    >>> import socket
    >>> here, there = socket.socketpair()        # or a socket with a path, in another program
    >>> pool = arenapy.Pool(source=arenapy.Shared())
    >>> x = pool.zeros(4)
    >>> arenapy.send(here, x)
    >>> arenapy.receive(there)[:] = 7            # the same memory
    >>> x
    array([7., 7., 7., 7.])
    >>> here.close(), there.close()
    (None, None)
    """
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype, at, kind, place = b"", 0, PLAIN, b""
    if isinstance(thing, Buffer):
        buffer, readonly = thing, thing.readonly
        if isinstance(thing, View):
            kind, shape, dtype = TYPED, thing.shape, _dtype_text(np.dtype(thing.dtype))
    elif type(thing) is np.ndarray:
        found = shared.bytes_of(thing)
        if found is None:
            raise _not_shared(thing)
        buffer, at = found
        readonly = not thing.flags.writeable
        kind, shape, strides, dtype = ARRAY, thing.shape, thing.strides, _dtype_text(thing.dtype)
    else:
        raise TypeError(
            f"{type(thing).__name__} cannot be sent: give a Buffer or an ndarray; of a subclass "
            "numpy.asarray(x), or the parts of a masked array"
        )
    if len(dtype) > MAX_DTYPE:
        raise ValueError(
            f"a dtype of {len(dtype)} bytes as text is too long, and {MAX_DTYPE} are allowed: send "
            "a view of bytes (x.view('u1')), or fewer fields"
        )
    sock = _unix_socket(connection)
    try:
        if shared.is_on_device(buffer):
            file, place = shared.lend_of_device(buffer)
            kind, offset = kind | ON_DEVICE, 0
        else:
            leased = shared.leased_file(buffer)
            if leased is None:
                raise _not_shared(thing)
            file, offset, _ = leased
        with file:
            message = b"".join(
                (
                    HEAD.pack(
                        MAGIC, kind, readonly, len(shape), len(dtype), offset, buffer.nbytes, at
                    ),
                    struct.pack(f"<{len(shape) + len(strides)}q", *shape, *strides),
                    dtype,
                    place,
                )
            )
            fds = array.array("i", [file.fileno()])
            sent = sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            if sent < len(message):
                sock.sendall(message[sent:])
    finally:
        _let_go(sock, connection)


def _not_shared(thing: Buffer | np.ndarray[Any, Any]) -> BufferError:
    if thing.nbytes == 0:
        return BufferError("there is nothing to share: it has no bytes")
    return BufferError(
        f"{thing.nbytes} bytes are not in memory that can be shared, or the array does not refer "
        "to their Buffer: send a Buffer or an array that empty() or Buffer.array() gave, or copy "
        "them with Pool(source=Shared()).copy(x)"
    )


def receive(connection: socket.socket | Connection) -> Buffer | np.ndarray[Any, Any]:
    """Receive a Buffer or an array that :func:`send` sent at the other end of a connection.

    Parameters
    ----------
    connection : socket.socket or multiprocessing.connection.Connection
        As for :func:`send`.

    Returns
    -------
    Buffer or numpy.ndarray
        It has the same shape, strides and type, over the same memory, whose pages are faulted in.
        It keeps the memory until it is dropped. The `allocator` of a Buffer is None.

    Raises
    ------
    EOFError
        If the other side closed the connection, or ended in the middle of a message.
    ValueError
        If the data is not a whole message of :func:`send`, or no imported package has the type:
        ``ml_dtypes`` has ``bfloat16``, for instance. Close the connection.
    OutOfMemory, OSError
        If no address space or descriptor is left, or the connection fails or times out.
    cuda.Unavailable
        If the memory is a GPU's, and CUDA cannot be used here.

    Examples
    --------
    >>> import socket
    >>> here, there = socket.socketpair()
    >>> arenapy.send(here, arenapy.Bump(1 << 16, arenapy.Shared()).alloc(100))
    >>> arenapy.receive(there).nbytes
    100
    >>> here.close(), there.close()
    (None, None)
    """
    sock = _unix_socket(connection)
    try:
        return _received(sock)
    finally:
        _let_go(sock, connection)


def _received(sock: socket.SocketType) -> Buffer | np.ndarray[Any, Any]:
    head, file = _first(sock)
    with file:
        return _made(sock, head, file)


def _made(
    sock: socket.SocketType, head: bytes, file: vm.Descriptor
) -> Buffer | np.ndarray[Any, Any]:
    """The Buffer or array of a message. Its memory takes the descriptor over."""
    # Now: to wait for more of what is no message may be to wait for ever.
    if not MAGIC.startswith(head[: len(MAGIC)]):
        raise _no_message(head)
    if file.fileno() < 0:
        raise ValueError("the message has no descriptor of shared memory; close the connection")
    head += _exactly(sock, HEAD.size - len(head))
    magic, kind, readonly, ndim, n_dtype, offset, nbytes, at = HEAD.unpack(head)
    if (
        magic != MAGIC
        or kind & ~ON_DEVICE > ARRAY
        or kind == ARRAY | ON_DEVICE
        or readonly > 1
        or ndim > MAX_DIMS
        or n_dtype > MAX_DTYPE
        or not 0 < nbytes < 1 << 62
        or offset >= 1 << 62
        or at >= nbytes
    ):
        raise _no_message(head)
    n = 2 * ndim if kind == ARRAY else ndim
    rest = _exactly(sock, 8 * n + n_dtype)
    layout = struct.unpack_from(f"<{n}q", rest)
    if kind & ON_DEVICE:
        typed = (layout, _dtype_of(rest[8 * n :])) if kind & TYPED else None
        place = _exactly(sock, PLACE_BYTES)
        return shared.receive_of_device(file, place, nbytes, bool(readonly), typed)
    _check_memory(file.fileno(), offset, nbytes)
    page_size = vm.huge_page(file.fileno()) or vm.PAGE_SIZE
    received = (file, None, offset, nbytes, page_size, bool(readonly))
    if kind == PLAIN:
        return shared.receive_buffer(*received, None)
    dtype = _dtype_of(rest[8 * n :])
    if kind == TYPED:
        return shared.receive_buffer(*received, (layout, dtype))
    return shared.receive_array(
        received, layout[:ndim], layout[ndim:], at, dtype, writeable=not readonly
    )


def _no_message(head: bytes) -> ValueError:
    return ValueError(
        f"{head[:16]!r} is not the head of a message of arenapy.send(): the other side sends "
        "something else, or another version; close the connection"
    )


def _first(sock: socket.SocketType) -> tuple[bytes, vm.Descriptor]:
    """Of the head what there is, and the descriptor that comes with its first byte."""
    while True:
        sock.recv(1, socket.MSG_PEEK)  # waits as long as the socket's timeout says
        try:
            head, file, lost = vm.receive(sock.fileno(), HEAD.size)
        except BlockingIOError:  # another thread was faster
            continue
        break
    if lost:
        raise OSError(
            errno.EMFILE,
            "the descriptor of a message was lost: this process has none free (RLIMIT_NOFILE); "
            "drop some, and close the connection",
        )
    if not head:
        raise EOFError("the other side has closed the connection")
    return head, file


def _exactly(sock: socket.SocketType, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise EOFError("the other side ended in the middle of a message")
        data += part
    return bytes(data)


def _check_memory(fd: int, offset: int, nbytes: int) -> None:
    """Refuse what would kill whoever touches it: memory that its owner can cut off."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:  # not a memfd
        if not is_of_system(error):
            raise
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError(
            "the descriptor of the message is not shared memory of fixed size; close the connection"
        )
    there = vm.file_nbytes(fd)
    if offset + nbytes > there:
        raise ValueError(
            f"the message names {nbytes} bytes at {offset} of a memory of {there}; "
            "close the connection"
        )
