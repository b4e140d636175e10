"""The address on which a process of a cluster listens: the flags that the launcher writes and the process parses."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from .address import CA, CERTIFICATE, KEY, AddressFile, Listening, parse_address
from .stream import read_secret


@dataclass(frozen=True, slots=True)
class Listener:
    """listen: an address. address_file: gets the address once it is open. secret_file, tls: as the flags."""

    listen: str
    secret_file: Path
    address_file: Path | None = None
    tls: Path | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Listener:
        return cls(arguments.listen, arguments.secret_file, arguments.address_file, arguments.tls)

    def flags(self) -> list[str]:
        """The command-line arguments; they name files, and contain no secret."""
        files = {"secret-file": self.secret_file, "address-file": self.address_file, "tls": self.tls}
        given = [(f"--{name}", str(path)) for name, path in files.items() if path is not None]
        return ["--listen", self.listen, *(word for pair in given for word in pair)]

    @property
    def address(self) -> Listening:
        """Raises AddressError, also for an address that needs TLS and has none."""
        return parse_address(self.listen, self.tls)

    @property
    def secret(self) -> bytes:
        return read_secret(self.secret_file)

    def tell(self, address: Listening) -> None:
        """Publish the address: peers may connect from now on."""
        if self.address_file is not None:
            AddressFile(self.address_file).write(str(address))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="unix:PATH or tcp://HOST:PORT")
    parser.add_argument("--address-file", type=Path, metavar="FILE", help="file that gets the address once it is open")
    add_secret_flag(parser, required=True)
    add_tls_flag(parser)


def add_secret_flag(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--secret-file",
        type=Path,
        required=required,
        metavar="FILE",
        help="file with the secret of the cluster's processes: 64 hexadecimal digits",
    )


def add_tls_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help=f"directory of {CERTIFICATE}, {KEY} and {CA}, for connections within the cluster",
    )
