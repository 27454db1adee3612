"""Opens connections to an SQLite file, makes the tables in it, and turns SQLite's errors into those of stores.

The invariant: no `sqlite3` exception leaves this package; each becomes an error that names the file and the cure. All tables
are made in one transaction. A file of another schema, or of another program, is refused and not touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning.errors import ConfigError, DataError, LightningError, SchemaError, StoreError, UnavailableError
from lightning.store.schema import STATEMENTS, VERSION, check_version

MEMORY: Final = ":memory:"
PAGE_BYTES: Final = 16384
"""The page size: a transition is about 2 KB, so that pages of this size waste little space at their ends."""
WAL_LIMIT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """The path of the file, and how durable its writes are.

    With `sync="normal"` acknowledged writes survive the death of any process; a power cut may lose the last moments but never
    corrupts the file. With `sync="full"` they survive a power cut too, at the cost of an fsync for each group commit.
    `busy_timeout` is the seconds from its call on for which an operation waits while another process writes.
    """

    path: str
    sync: str = "normal"
    busy_timeout: float = 30.0

    def __post_init__(self) -> None:
        if self.sync not in ("normal", "full"):
            raise ConfigError(f"sync={self.sync!r} is not known for the sqlite store: use normal or full")
        if not 0 <= self.busy_timeout <= 3600:
            raise ConfigError(f"busy_timeout={self.busy_timeout!r} must be seconds between 0 and 3600")

    @property
    def in_memory(self) -> bool:
        """Whether the database is in memory, private to its one connection."""
        return self.path == MEMORY


def moved(settings: Settings) -> StoreError:
    """Return the error for a file that is no longer at its path."""
    return StoreError(
        f"store {settings.path} was moved, removed or replaced while it was open, and nothing is written to it any more: put "
        "the file back together with the one that ends in -wal, or start again where they are now"
    )


def connect(settings: Settings, *, read_only: bool = False, again: bool = False) -> sqlite3.Connection:
    """Open the file in WAL mode; create it and its folder if they are missing. A file that the store opens `again` must still
    exist. Raises `StoreError` or `SchemaError`."""
    if not again and not settings.in_memory:
        try:
            Path(settings.path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot create the folder of store {settings.path}: {error}. Choose another path"
            ) from error
    connection: sqlite3.Connection | None = None
    try:
        if not settings.in_memory and not read_only and not again:
            with contextlib.suppress(
                FileExistsError
            ):  # readable by its owner alone, because it holds the secret that signs agents' keys
                os.close(os.open(settings.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        connection = sqlite3.connect(
            f"{Path(settings.path).as_uri()}?mode=rw" if again else settings.path,
            uri=again,
            timeout=settings.busy_timeout,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        _configure(connection, settings, read_only=read_only)
    except OSError as error:
        raise StoreError(f"cannot create the store {settings.path}: {error}. Choose another path") from error
    except (sqlite3.Error, StoreError) as error:
        if connection is not None:
            connection.close()
        raise translate(error, settings) from error
    return connection


def _configure(connection: sqlite3.Connection, settings: Settings, *, read_only: bool) -> None:
    if read_only:
        connection.execute("PRAGMA query_only = ON")
        return
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    mode = _enter_wal(connection, settings)
    if mode != ("memory" if settings.in_memory else "wal"):
        raise StoreError(
            f"store {settings.path}: this file system does not support SQLite's write-ahead log (journal mode {mode!r}); "
            "put the file on a local disk"
        )
    connection.execute(f"PRAGMA synchronous = {settings.sync}")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")


def _enter_wal(connection: sqlite3.Connection, settings: Settings) -> str:
    """Switch to WAL mode and return the mode. If two processes create the file at the same time, SQLite reports busy without
    waiting, so this function waits."""
    deadline = time.monotonic() + settings.busy_timeout
    while True:
        try:
            return str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether SQLite's error says that another connection holds a lock."""
    return _primary_code(error) == sqlite3.SQLITE_BUSY


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def translate(error: Exception, settings: Settings) -> Exception:
    """Return the error to raise to the caller for an exception of an operation: for SQLite's errors a `StoreError` with the
    cause and the cure."""
    if isinstance(error, LightningError):
        return error
    if isinstance(error, UnicodeEncodeError | OverflowError | sqlite3.InterfaceError | sqlite3.ProgrammingError):
        return DataError(f"store {settings.path} cannot hold this value: {error}")
    if not isinstance(error, sqlite3.Error):
        return error
    where = f"store {settings.path}"
    code = _primary_code(error)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return SchemaError(
            f"{where} is corrupt or not an SQLite database ({error}): restore it from a backup, or rescue what can be read "
            f"with: sqlite3 {settings.path} .recover | sqlite3 rescued.db"
        )
    causes = {
        sqlite3.SQLITE_FULL: "the disk is full: free some space and try again; everything acknowledged is kept",
        sqlite3.SQLITE_IOERR: "the disk refused to read or write (full, over quota or failing): check it and try again; "
        "everything acknowledged is kept",
        sqlite3.SQLITE_BUSY: f"another process kept it locked for {settings.busy_timeout:g} s: "
        "end that process, or raise ?busy_timeout= in the store URL",
        sqlite3.SQLITE_READONLY: "the file or its folder is read-only: change its permissions or choose another path",
        sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: check that the path is a file and its folder is writable",
        sqlite3.SQLITE_PERM: "permission denied: change the file's permissions or choose another path",
    }
    cause = causes.get(code, "SQLite refused the operation")
    passes = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY)
    return (UnavailableError if passes else StoreError)(f"{where}: {cause} ({error})")


APPLICATION_ID: Final = 0x4C524C53
"""The application id of a store ("LRLS"), which tells it from other SQLite databases."""


def refuse_foreign(settings: Settings, *, make: bool) -> None:
    """Raise `SchemaError` for a database of another program or another schema, and leave it untouched: `connect` would change
    its journal mode. Without `make` raise `ConfigError` for a missing file, and `SchemaError` for an empty one.

    A file that cannot be opened is left to `connect`, which raises the reason.
    """
    if settings.in_memory:
        return
    if not make and not Path(settings.path).is_file():
        raise ConfigError(
            f"there is no database at {settings.path!r}: give the folder of a run, a database file or a store's URL"
        )
    try:
        # With a log beside the file, a connection that may write would fold it into the file; without one, a connection that
        # may not write would create one.
        mode = "ro" if Path(f"{settings.path}-wal").exists() else "rw"
        connection = sqlite3.connect(
            f"{Path(settings.path).absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=settings.busy_timeout,
            isolation_level=None,
        )
    except (OSError, sqlite3.OperationalError):
        return
    with closing(connection):
        if not _is_made(connection, settings) and not make:
            raise SchemaError(f"store {settings.path} is empty: a store is made in it by whoever writes first")


def make_tables(connection: sqlite3.Connection, settings: Settings) -> None:
    """Make the tables if there are none. Raises `SchemaError` for a database of another program or another schema."""
    if _is_made(connection, settings):
        return
    with connection:
        connection.execute("BEGIN IMMEDIATE")  # another process may be making them: look again with the lock
        if not _is_made(connection, settings):
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            for statement in STATEMENTS:
                connection.execute(statement)


def _is_made(connection: sqlite3.Connection, settings: Settings) -> bool:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "schema_version" not in tables:
        if tables:
            raise SchemaError(
                f"store {settings.path} is an SQLite database of another program (tables {', '.join(sorted(tables)[:5])}): "
                "choose another path"
            )
        return False
    check_version(f"store {settings.path}", connection.execute(VERSION).fetchall())
    return True


logger = logging.getLogger(__name__)
MOUNTS: Final = Path("/proc/self/mountinfo")
SHARED: Final = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
        "virtiofs", "gfs2", "ocfs2", "vboxsf", "prl_fs", "wekafs", "panfs", "orangefs", "pvfs2",
    }
)  # fmt: skip
"""Types of file systems that several machines may have mounted; for a type such as `fuse.sshfs` the part before the point."""
LOCAL: Final = frozenset({"fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.mergerfs"})


def shared_file_system(path: str) -> str:
    """Return the type of the file system of a path if other machines may have mounted it, too; empty otherwise."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        place = Path(path).resolve()
    except OSError:
        return ""
    found, depth = "", 0
    for line in lines:
        about, _, source = line.partition(" - ")
        fields = about.split(" ")
        if len(fields) < 5:  # not a line as the kernel documents it
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        if (
            place.is_relative_to(point) and len(point.parts) >= depth
        ):  # of two mounts at one point, the later covers the earlier
            found, depth = source.split(" ")[0], len(point.parts)
    return found if found not in LOCAL and found.partition(".")[0] in SHARED else ""


def warn_of_shared(path: str) -> None:
    """Log a warning if the database is on a file system that other machines may have mounted."""
    if kind := shared_file_system(path):
        logger.warning(
            "store %s is on a file system of the type %s: if processes of two machines open it, SQLite destroys it without "
            "an error. Put it on a local disk, or use PostgreSQL (--store postgresql://...)",
            path,
            kind,
        )
