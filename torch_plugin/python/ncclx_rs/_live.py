"""Shows this process's flight recorders to `ncclx-rs top`, through a Unix socket that only the same user can read.

The socket lies in a folder of the user's own, mode 0700, and the kernel says which user has connected. A connection
gets the dumps of all communicators, one JSON text a line, and its end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import stat
import struct
import tempfile
import threading
from pathlib import Path

from ncclx_rs._load import native

VARIABLE = "NCCLX_RS_TOP"
# How long one connection may keep the others waiting, in seconds.
_LIMIT = 5.0


def folder() -> Path:
    """The folder of this process's socket."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / _name(os.getuid())


def _name(user: int) -> str:
    return f"ncclx_rs-{user}"


def folders() -> dict[Path, int]:
    """The folders that processes of this user may have, and of who has become root by sudo; each with its user.

    Their environment may be another one: logins by ssh and programs started by sudo have no `XDG_RUNTIME_DIR`, or their
    own.
    """
    found = {folder(): os.getuid()}
    caller = os.environ.get("SUDO_UID", "") if os.getuid() == 0 else ""
    for user in (os.getuid(), *([int(caller)] if caller.isdecimal() else [])):
        for place in (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{user}", tempfile.gettempdir(), "/tmp"):
            if place:
                found.setdefault(Path(place) / _name(user), user)
    return found


def own_folder() -> Path:
    """The folder of the sockets, made if it does not exist.

    Raises:
        PermissionError: another user owns the folder, or can enter it.
    """
    path = folder()
    path.mkdir(mode=0o700, exist_ok=True)
    check(path, os.getuid())
    return path


def check(path: Path, user: int) -> None:
    """Raises PermissionError if a folder of sockets belongs to another user than this, or another one can enter it."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not a folder that only this user can enter; remove it")


def is_asked() -> bool:
    """Whether this process is to show its recorders.

    Raises:
        ValueError: the variable has another value than 0 or 1.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"ncclx_rs: {VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


def start() -> None:
    """Serves this process's recorders if `NCCLX_RS_TOP=1` asks for it; a warning says why that cannot be done."""
    from ncclx_rs._logging import warn

    if not is_asked():
        return
    try:
        path = own_folder() / f"{os.getpid()}.sock"
        path.unlink(missing_ok=True)  # of a process that had this number before
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(path))
        path.chmod(0o600)
        server.listen()
    except OSError as error:
        warn(f"{VARIABLE}: `ncclx-rs top` will not see this process: {error}")
        return
    # A child would keep the socket open, and nobody would answer there.
    os.register_at_fork(after_in_child=server.close)
    atexit.register(_remove, path, os.getpid())
    threading.Thread(target=_serve, args=(server,), name="ncclx_rs top", daemon=True).start()


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a child leaves its parent's socket alone
        path.unlink(missing_ok=True)


def _serve(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        # A reader that goes away is no concern of the job's.
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_LIMIT)
            if user_of(connection) in (0, os.getuid()):
                connection.sendall("".join(f"{text}\n" for text in native().dumps("ncclx-rs top")).encode())


def user_of(connection: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(user)


def ask(path: Path) -> list[str]:
    """The dumps of the process with this socket, each as JSON; what a dead process has left behind is removed.

    Raises:
        OSError: the process does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_LIMIT)
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            if path.parent.name == _name(os.getuid()):  # root removes nothing in a folder that another user can change
                path.unlink(missing_ok=True)
            return []
        parts = []
        while part := connection.recv(1 << 20):
            parts.append(part)
    return b"".join(parts).decode().splitlines()
