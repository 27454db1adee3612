"""What lies under a store's file: SQLite's write-ahead log is safe only where one machine has it.

The invariant: nothing is said where nothing is known (no Linux, no `/proc`).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)
MOUNTS: Final = Path("/proc/self/mountinfo")
SHARED: Final = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
        "virtiofs", "gfs2", "ocfs2", "vboxsf", "prl_fs", "wekafs", "panfs", "orangefs", "pvfs2",
    }
)  # fmt: skip
"""Types of file systems that several machines may have mounted, of `fuse.sshfs` and its like the first word."""
LOCAL: Final = frozenset({"fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.mergerfs"})


def shared_file_system(path: str) -> str:
    """The type of the file system that has this path, where other machines may have it too; empty otherwise."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        place = Path(path).resolve()
    except OSError:
        return ""
    found, depth = "", 0
    for line in lines:
        about, _, source = line.partition(" - ")
        fields = about.split(" ")
        if len(fields) < 5:  # it is not as the kernel's documentation has it
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        if (
            place.is_relative_to(point) and len(point.parts) >= depth
        ):  # of two at one point the later one covers the other
            found, depth = source.split(" ")[0], len(point.parts)
    return found if found not in LOCAL and found.partition(".")[0] in SHARED else ""


def warn_of_shared(path: str) -> None:
    """Say what comes of a database on a file system that other machines may have."""
    if kind := shared_file_system(path):
        logger.warning(
            "store %s is on a file system of the type %s: if processes of two machines open it, SQLite destroys it without "
            "an error. Put it on a local disk, or use PostgreSQL (--store postgresql://...)",
            path,
            kind,
        )
