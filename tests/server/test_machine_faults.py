"""Faults of the machine: each form in which they come is one line with its cause, numbers and fix."""

import errno
import mmap
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from chorus.memory.pages import hugepages
from chorus.server.machine_faults import fault_of, reason_of, size_text


def raised(action):
    with pytest.raises(Exception) as caught:
        action()
    return caught.value


def test_a_full_disk_names_the_file_and_its_space():
    def write():
        with open("/dev/full", "wb") as file:
            file.write(b"x")

    told = fault_of(raised(write), Path("/dev/full"))
    assert told is not None and told.startswith("/dev/full can't be written: the disk is full: ")
    assert " are free at /dev" in told and told.endswith("; free some space, or name a directory on another disk")
    wrapped = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert "the disk is full" in (fault_of(wrapped, Path("/dev/x")) or "")


def test_a_library_s_error_counts_as_the_system_s(tmp_path):
    """safetensors reports a file that may not grow by an error of its own."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most[1]))
        error = raised(lambda: save_file({"x": torch.zeros(4096)}, tmp_path / "x"))
        told = fault_of(error, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert not isinstance(error, OSError)
    assert told == (
        f"{tmp_path}/x can't be written: the file is larger than ulimit -f, 4 KiB, allows; raise the limit, or name "
        "another disk"
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("unable to mmap 1234 bytes from file </m/model.safetensors>: Cannot allocate memory (12)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
    ids=lambda error: type(error).__name__ + str(error)[:12],
)
def test_no_memory_has_numbers_and_a_way_out(error):
    told = reason_of(error)
    assert told.startswith("out of memory") and str(error) in told
    assert "GiB available" in told or "MiB available" in told
    assert "lower --memory-bytes and --host-cache-bytes, quantise" in told


def test_the_cause_counts_and_its_wrapper_s_advice_does_not():
    """A checkpoint that can't be mapped for want of memory need not be downloaded again."""
    error = ValueError("model.safetensors: cannot be read; download the checkpoint again")
    error.__cause__ = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert "download" not in reason_of(error)


def test_memory_that_is_not_granted_says_how_much_was_wanted():
    error = raised(lambda: hugepages.map_memory(1 << 62))
    assert isinstance(error, OSError) and f"for {1 << 62} bytes" in str(error)
    assert f"for {1 << 62} bytes" in reason_of(error)


def test_places_that_can_not_be_written():
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS), "/store/x")
    assert reason_of(read_only) == (
        "/store/x can't be written: its file system is read-only; name a directory that can be written"
    )
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/store/x")
    assert reason_of(denied).startswith(f"/store/x: permission denied to user {os.geteuid()};")
    quota = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/store/x")
    assert "the disk quota of user" in reason_of(quota)
    files = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/store/x")
    assert reason_of(files) == (
        f"too many open files: this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}; raise ulimit -n"
    )


@pytest.mark.parametrize(
    "error",
    [ValueError("a wrong value"), FileNotFoundError(2, "No such file", "/x"), ConnectionRefusedError(111, "no")],
)
def test_other_errors_keep_their_own_text(error):
    assert fault_of(error) is None and reason_of(error) == str(error)


def test_sizes():
    assert [size_text(each) for each in (0, 1023, 1 << 10, 3 << 19, mmap.PAGESIZE << 20)] == [
        "0 bytes",
        "1023 bytes",
        "1 KiB",
        "1.5 MiB",
        f"{mmap.PAGESIZE >> 10} GiB",
    ]
