"""Certificates of a cluster and of strangers, made with the `openssl` command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from chorus.server.cluster.address import CA, CERTIFICATE, KEY

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def new_authority(directory: Path) -> Path:
    """A directory with a CA, and a certificate and key that it has signed; skips without `openssl`."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    directory.mkdir()
    _openssl(
        directory, "req", "-x509", *NEW_KEY, "-keyout", "ca.key", "-out", CA, "-subj", "/CN=authority", "-days", "1"
    )
    _openssl(directory, "req", *NEW_KEY, "-keyout", KEY, "-out", "request", "-subj", "/CN=member")
    _openssl(
        directory,
        "x509",
        "-req",
        "-in",
        "request",
        "-CA",
        CA,
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-out",
        CERTIFICATE,
        "-days",
        "1",
    )
    return directory


def _openssl(directory: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
