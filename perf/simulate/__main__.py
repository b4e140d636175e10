"""`python -m chorus.perf.simulate` is `chorus simulate`."""

import sys

from ...server.start.flags import Parser, UsageError
from . import command


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m chorus.perf.simulate", description=f"{command.HELP[0].upper()}{command.HELP[1:]}.")
    command.add_flags(parser)
    try:
        return command.run(parser.parse(argv))
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
