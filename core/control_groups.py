"""Control groups that this process is in, which may limit its processors and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")


def control_groups(controller: str, proc: Path = PROC) -> Iterator[tuple[Path, int]]:
    """Directories of the groups that may limit the resource of `controller`, and of all their parents.

    With each the version of its hierarchy, 1 or 2. proc: the process's directory in /proc, or one that looks like it.
    """
    try:
        memberships = (proc / "cgroup").read_text().splitlines()
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    for membership in memberships:
        number, controllers, path = membership.split(":", 2)
        version = 2 if number == "0" else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        for root, at, kind, options in map(_mount, mounts):
            if (kind, version) == ("cgroup2", 2) or (
                kind == "cgroup" and version == 1 and controller in options.split(",")
            ):
                yield from ((group, version) for group in _groups(PurePosixPath(path), root, at))


def _groups(path: PurePosixPath, root: str, at: str) -> Iterator[Path]:
    """The directory of the group at `path`, in a hierarchy mounted at `at` from its `root` on, and its parents."""
    inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
    group = Path(at) / inside
    return (parent for parent in (group, *group.parents) if parent.is_relative_to(at))


def _mount(fields: list[str]) -> tuple[str, str, str, str]:
    """A mount's root within its file system, where it is mounted, its kind and its own options; see proc(5)."""
    after = fields.index("-")
    return fields[3], fields[4], fields[after + 1], fields[after + 3]
