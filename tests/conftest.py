"""Tiny random models with PEFT adapters, with transformers + peft as the reference, one request at a time."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import re
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any
from zlib import crc32

import certifi
import numpy as np
import pytest
import torch
from _pytest.mark.expression import Expression
from hypothesis import HealthCheck, settings

from . import references
from .greedy import MIN_MARGIN, after_drafts, switched
from .interpreted import InterpretedFile, is_interpreting
from .kept import KeptAnswers, kept_files, locked
from .llama_draft import LlamaDraft

gc.disable()  # until all tests are collected: imports make no garbage worth a search
os.environ["CHORUS_CHECK_STEPS"] = "1"  # before anything of `chorus` is imported
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # no test compiles; bitsandbytes, which peft imports, would import the compiler
torch.set_num_threads(1)
if is_interpreting():  # peft takes what is None for missing, and need not import it, which takes longer than torch
    sys.modules["bitsandbytes"] = None  # pyright: ignore[reportArgumentType]
settings.register_profile(
    "suite",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("thorough", settings.get_profile("suite"), max_examples=400)  # of `make slow`
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def _one_certificate(path: Path) -> None:
    first, end, _ = certifi.contents().partition("-----END CERTIFICATE-----\n")
    (path / "ca.pem").write_text(first + end)


# Each client reads the authorities that it trusts, which takes longer than what most tests of servers ask of it: one is
# enough, since no test asks a public server, also where the machine names authorities of its own.
os.environ["SSL_CERT_FILE"] = str(kept_files("authority", _one_certificate) / "ca.pem")

#: Each process has models and adapters of its own, a gigabyte and a half in all.
MAX_PROCESSES = 8

HERE = Path(__file__).resolve().parent

#: What `pytest --served` tests, and a plain `pytest` leaves to it: servers, clients, tools, and what else starts
#: processes or waits. It takes about as long as the rest.
SERVED = ("attacks", "clients", "core/executors", "core/media", "perf", "server", "simulation")

#: A plain `pytest` runs one of so many cases of a test marked `wide`, and CHORUS_TEST_SHARE says another number.
SHARE = 6

#: The environment's variable of what draws the cases of `wide` tests, by default the commit, so that each runs others.
SEED = "CHORUS_TEST_SEED"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--served", action="store_true", help=f"instead of the others, the tests of {', '.join(SERVED)}")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the processes that run the tests: one for each processor, and one more if many wait for servers; one alone
    where only few tests are named, which end sooner than processes begin, or where a GPU is there to be shared.
    """
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS or torch.cuda.is_available():
        return 0
    waits = bool(config.option.served or config.option.markexpr)
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)) + waits)


def pytest_configure() -> None:
    """Check the environment before a minute of collecting tests. All processes draw the same cases of `wide` tests,
    and the same models for `references`.
    """
    chosen_share()
    os.environ[SEED] = chosen_seed()
    os.environ.setdefault(references.AGAIN, references.commit())
    os.environ.pop("PYTEST_ADDOPTS", None)  # of this run, and not of those that tests start


def pytest_report_header() -> str:
    return _told_share()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell the share where there is no header."""
    if terminalreporter.verbosity < 0 and terminalreporter.stats.get("deselected"):
        terminalreporter.write_line(_told_share())


def _told_share() -> str:
    return (
        f"wide tests: one case in {chosen_share()}, drawn by {SEED}={os.environ[SEED]}, which repeats it; "
        f"reference answers made again: {references.AGAIN}={os.environ[references.AGAIN]}"
    )


def chosen_seed() -> str:
    """The seed of the environment, or the commit that is checked out, or 0 where there is no repository."""
    return os.environ.get(SEED) or references.commit()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't import a file that has no test with the marks that `-m` asks for, or is of the half that a plain `pytest`
    leaves to another. Files that are named are collected.
    """
    expression = config.option.markexpr
    if _is_plain(config) and is_of_other_half(collection_path, is_served=config.option.served):
        return True
    if not expression or not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    if any(Path(argument.partition("::")[0]).resolve() == collection_path for argument in config.args):
        return None
    return None if may_match(expression, marks_of_file(collection_path)) else True


def _is_plain(config: pytest.Config) -> bool:
    """True where neither tests nor marks are named."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr


def is_of_other_half(path: Path, *, is_served: bool) -> bool:
    """True for a folder or a file of tests that runs with `--served`, or without, unlike this run."""
    if any(path.is_relative_to(HERE / folder) for folder in SERVED):
        return not is_served
    return is_served and path.is_file()


@cache
def marks_of_file(path: Path) -> frozenset[str]:
    """Words of a test file, and the marks that this module and `interpreted.py` add to its tests: whatever its tests
    may be marked with, as `pytest_collection_modifyitems` checks.
    """
    words = set(re.findall(r"\w+", path.read_text()))
    if path.stem.endswith("_interpreted"):
        words.add("triton")
    return frozenset(words)


def may_match(expression: str, marks: Collection[str]) -> bool:
    """True if a test with some of `marks` matches an expression of `-m`."""
    asked = sorted(set(re.findall(r"\w+", expression)) & set(marks))
    chosen = itertools.chain.from_iterable(itertools.combinations(asked, count) for count in range(len(asked) + 1))
    compiled = Expression.compile(expression)

    def matches(some: Collection[str]) -> bool:
        return compiled.evaluate(lambda name, /, **_: name in some)

    return any(map(matches, chosen))


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> InterpretedFile | None:
    """Have files of interpreted tests run by processes that interpret."""
    if module_path.stem.endswith("_interpreted") and not is_interpreting():
        return InterpretedFile.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let one process at a time import a file. The first one compiles its modules; the others read the result."""
    if not isinstance(collector, pytest.Module) or "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with locked(f"compiled/{collector.nodeid}.lock"):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests, those of GPU kernels, and most cases of `wide` tests, unless they are named, by themselves
    or by a marker; a share that the environment says is drawn of named ones, too. Where the native library is there,
    leave out comparisons of PyTorch's operators, too: `make plain` runs them without it. A session at one ISA level
    leaves out cases whose parameter `level` is another; in any other session they run at all that are built. Tests that
    may take long come first, so that none is left alone at the end.
    """
    if unnamed := _unnamed_marks(items, {line.partition(":")[0] for line in config.getini("markers")}):
        raise pytest.UsageError(f"marks that the files of tests don't name, so that -m may miss them: {unnamed}")
    left_out: set[pytest.Item] = set()
    is_plain = _is_plain(config)
    if is_plain:
        left_out |= {item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("triton")}
    if is_plain or is_of_one_level(config.option.markexpr):
        left_out |= {item for item in items if _is_of_the_other_kernels(item)}
    if is_of_one_level(config.option.markexpr):
        isa = os.environ["CHORUS_CPU_ISA"]
        left_out |= {item for item in items if _params(item).get("level", isa) != isa}
    if is_plain or "CHORUS_TEST_SHARE" in os.environ:
        rest = [item for item in items if item not in left_out]
        left_out |= beyond_share(rest, chosen_share(), os.environ[SEED])
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def is_of_one_level(expression: str) -> bool:
    """True where `-m` chooses tests for the ISA level that the environment names."""
    return bool(expression) and "CHORUS_CPU_ISA" in os.environ


def _unnamed_marks(items: list[pytest.Item], names: set[str]) -> list[str]:
    """Marks of ours which `marks_of_file` doesn't find in a test's file: `-m` would not collect it."""
    found = {(item.path, mark.name) for item in items for mark in item.iter_markers() if mark.name in names}
    return sorted(f"{path.name}: {name}" for path, name in found if name not in marks_of_file(path))


def chosen_share() -> int:
    """The share of the environment, or SHARE. Raises UsageError where it is not a positive integer."""
    value = os.environ.get("CHORUS_TEST_SHARE", str(SHARE))
    if not value.isdecimal() or int(value) < 1:
        raise pytest.UsageError(
            f"CHORUS_TEST_SHARE is {value!r}, but must be a positive integer N, to run one in N cases of wide tests; "
            f"unset it for one in {SHARE}"
        )
    return int(value)


def beyond_share(items: list[pytest.Item], share: int, seed: str) -> set[pytest.Item]:
    """Cases of tests marked `wide` that are left out where one in `share` runs, at least one of each test, drawn by
    `seed`; and, for less than half of the cases, single tests that have the mark themselves.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("wide"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    beyond: set[pytest.Item] = set()
    for name, cases in tests.items():
        if hasattr(cases[0], "callspec"):
            beyond |= {*cases} - {*_drawn(cases, share, random.Random(f"{seed} {name}"))}
        elif share > 2 and any(node is cases[0] for node, _ in cases[0].iter_markers_with_node("wide")):
            beyond |= {*cases}
    return beyond


def _drawn(cases: list[pytest.Item], share: int, rng: random.Random) -> list[pytest.Item]:
    """Draw one in `share` cases of a test, with as many values of its parameters as they can have. With
    `wide(each=NAMES)` draw covers instead: few cases in which each of the parameters of these names has each of its
    values. A plain share is one cover; one N times as large, N of them.
    """
    left, marker = rng.sample(cases, len(cases)), cases[0].get_closest_marker("wide")
    names = marker.kwargs.get("each", ()) if isinstance(marker, pytest.Mark) else ()
    if share == 1:
        return cases
    if not names:
        cover, left = _cover(left, tuple(_params(cases[0])))
        return [*cover, *left][: max(1, round(len(cases) / share))]
    drawn: list[pytest.Item] = []
    for _ in range(max(1, SHARE // share)):
        cover, left = _cover(left, names)
        drawn += cover
    return drawn


def _cover(cases: list[pytest.Item], names: tuple[str, ...]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Cases, each with a value of a parameter that none before it has, and the others."""
    cover, rest, seen = [], [], set[tuple[str, int]]()
    for case in cases:
        own = {(name, id(_params(case).get(name))) for name in names}  # not all values have a hash
        (cover if own - seen else rest).append(case)
        seen |= own
    return cover, rest


def _is_of_the_other_kernels(item: pytest.Item) -> bool:
    from chorus.ops.library import native_library

    mark = item.get_closest_marker("native")
    is_other = mark is not None and not _is_needed(mark) and _params(item).get("kernels") == "torch"
    return is_other and native_library.why_unavailable(torch.float32) is None


def _is_needed(mark: pytest.Mark) -> bool:
    return bool(mark.kwargs.get("needed", True))


def pytest_collection_finish() -> None:
    """Freeze all objects that tests share: `gc.collect`, which many call, need not go through a million objects each
    time. Garbage is collected from now on, all of it after a million new objects: engines are large, but seldom in
    circles. Adapters are saved without PEFT's model card, which takes longer than all the rest. A process that
    interprets patches Triton's language once.
    """
    if peft := sys.modules.get("peft"):
        peft.PeftModel.create_or_update_model_card = lambda self, output_dir: None
    if is_interpreting() and find_spec("triton"):
        from .ops.bf16_interpreter import hasten

        hasten()
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 10)
    gc.enable()


class TimeIsUp(BaseException):
    """A test has run for as long as it may. Hypothesis would take pytest's own failure, as any `Exception`, for a
    counterexample, run it again, and say that a strategy is flaky where it was drawing when the time was up.
    """


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer() -> Generator[None, object, object]:
    """Have pytest-timeout's signal raise `TimeIsUp`."""
    is_set = yield
    fail = signal.getsignal(signal.SIGALRM)
    if callable(fail):

        def end(number: int, frame: FrameType | None) -> None:
            try:
                fail(number, frame)
            except pytest.fail.Exception as error:
                raise TimeIsUp(error.msg) from None

        signal.signal(signal.SIGALRM, end)
    return is_set


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed what a test draws, by its name. Skip a test that needs the native library, by its mark or with `native` as
    its kernels, by the reason why it can't be used. One marked `triton` is skipped where triton is missing.
    """
    from chorus.ops.library import native_library

    _seed(item.nodeid)
    if item.get_closest_marker("triton") and find_spec("triton") is None:
        pytest.skip("triton is not installed; pip install chorus-lora[kernels]")
    mark = item.get_closest_marker("native")
    is_native = (mark is not None and _is_needed(mark)) or _params(item).get("kernels") == "native"
    if is_native and (reason := native_library.why_unavailable(torch.float32)):
        pytest.skip(f"no native library: {reason}")


def _params(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Seed what a fixture of several tests draws, by its name, whichever test asks first."""
    if fixturedef.scope == "function":
        return (yield)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    _seed(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]")
    try:
        return (yield)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _seed(name: str) -> None:
    """Seed the generators that a test without its own draws from."""
    number = crc32(name.encode())
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.fixture(autouse=True)
def _settings_of_the_process() -> Iterator[None]:
    """Restore the tensor library's threads, which an executor sets, and the logging levels, which a command sets, for
    the next test of the process.
    """
    yield
    torch.set_num_threads(1)
    logging.getLogger("chorus").setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a tiny Llama checkpoint."""

    seed: int
    hidden: int = 64
    ffn: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    vocab: int = 160
    tied: bool = False
    positions: int = 256


MODELS = {
    "gqa": ModelSpec(seed=1, layers=3),
    "mha": ModelSpec(seed=2, hidden=48, ffn=80, heads=3, kv_heads=3, vocab=131),
    "tied": ModelSpec(seed=3, hidden=32, ffn=56, heads=4, kv_heads=1, tied=True),
    "wide_heads": ModelSpec(seed=4, hidden=40, ffn=72, heads=2, kv_heads=2, head_dim=32, vocab=300),
}

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

#: name → (rank, alpha, targets, rsLoRA). One base model serves all of them at once.
ADAPTERS: dict[str, tuple[int, float, list[str], bool]] = {
    "r1-all": (1, 4, ATTENTION + MLP, False),
    "r2-qv": (2, 8, ["q_proj", "v_proj"], False),
    "r3-mlp": (3, 6, MLP, False),
    "r5-ko": (5, 7, ["k_proj", "o_proj"], True),
    "r8-attention": (8, 16, ATTENTION, False),
    "r16-down": (16, 64, ["down_proj"], False),
    "r33-all": (33, 12, ATTENTION + MLP, True),
    "r64-qkv-up": (64, 128, ["q_proj", "k_proj", "v_proj", "up_proj"], False),
}


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and notices of transformers and peft."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@quiet()
def save_model(spec: ModelSpec, path: Path) -> None:
    """Write a checkpoint whose greedy outputs are varied: weights are larger than Llama's own initialisation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        tie_word_embeddings=spec.tied,
        max_position_embeddings=spec.positions,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        rms_norm_eps=1e-5,
    )
    torch.manual_seed(spec.seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path)


@quiet()
def save_adapter(
    model: Path,
    path: Path,
    rank: int,
    alpha: float,
    targets: list[str],
    rslora: bool = False,
    seed: int = 0,
    **more: Any,
) -> None:
    """Write a random adapter with peft itself; B is not zero, so it changes the model's output."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType] - peft takes fractions, too
        target_modules=targets,
        use_rslora=rslora,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **more,
    )
    get_peft_model(LlamaForCausalLM.from_pretrained(model), config).save_pretrained(str(path))


@dataclass
class Subject:
    """A base model and its adapters, with the reference answers: the greedy tokens of transformers and peft in
    float32.
    """

    model: Path
    adapters: dict[str, Path]
    _peft: Any = None
    _drafts: dict[str | None, LlamaDraft] = field(default_factory=dict)
    kept: KeptAnswers = field(default_factory=KeptAnswers)

    @cached_property
    def vocab_size(self) -> int:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model).vocab_size

    def greedy(self, adapter: str | None, prompt: list[int], count: int) -> list[int]:
        """The `count` tokens that follow `prompt`, past any end-of-sequence token."""
        return self._run(adapter, prompt, count)[0]

    def prompt(self, adapter: str | None, length: int, count: int, seed: int) -> list[int]:
        """A random prompt whose `count` greedy tokens are all clear choices."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            prompt = torch.randint(3, self.vocab_size, (length,), generator=generator).tolist()
            if self._run(adapter, prompt, count)[1] >= MIN_MARGIN:
                return prompt

    def is_clear(self, adapter: str | None, prompt: list[int], count: int) -> bool:
        return self._run(adapter, prompt, count)[1] >= MIN_MARGIN

    def logits(self, adapter: str | None, tokens: list[int]) -> torch.Tensor:
        """Logits `[len(tokens), vocab]`."""
        model = self.use(adapter)  # loaded outside of inference mode, where its parameters could not be switched
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0]

    def _run(self, adapter: str | None, prompt: list[int], count: int) -> tuple[list[int], float]:
        tokens, margin = self.kept.get([adapter, prompt, count], lambda: self._generate(adapter, prompt, count))
        return tokens, margin

    def _generate(self, adapter: str | None, prompt: list[int], count: int) -> tuple[list[int], float]:
        if adapter not in self._drafts:
            model = self.use(adapter)
            self._drafts[adapter] = LlamaDraft(model.get_base_model() if self.adapters else model)
        return after_drafts(partial(self.logits, adapter), self._drafts[adapter].tokens, prompt, count)

    @quiet()
    def _reference(self) -> Any:
        if self._peft is None:
            from peft import PeftModel
            from transformers import LlamaForCausalLM

            base = LlamaForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
            model: Any = base
            for name, path in self.adapters.items():
                if model is base:
                    model = PeftModel.from_pretrained(base, path, adapter_name=name)
                else:
                    model.load_adapter(path, adapter_name=name)
            self._peft = model.eval()
        return self._peft

    def use(self, adapter: str | None) -> Any:
        """The reference with this adapter."""
        model = self._reference()
        return switched(model, adapter) if self.adapters else model


@pytest.fixture(scope="session")
def subject() -> Callable[[str], Subject]:
    """`subject("gqa")`: one of MODELS with all of ADAPTERS, made once in a process."""

    def save(name: str, root: Path) -> None:
        save_model(MODELS[name], root / "model")
        for seed, (adapter, recipe) in enumerate(ADAPTERS.items()):
            save_adapter(root / "model", root / "adapters" / adapter, *recipe, seed=100 * MODELS[name].seed + seed)

    @cache
    def make(name: str) -> Subject:
        root = kept_files(name, lambda root: save(name, root))
        adapters = {adapter: root / "adapters" / adapter for adapter in ADAPTERS}
        return Subject(root / "model", adapters, kept=KeptAnswers(root))

    return make


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Models and prompts that are not part of the repository; tests that need them skip without."""
    default = Path(__file__).resolve().parents[2] / "shared"
    path = Path(os.environ.get("CHORUS_SHARED", default)) / "data"
    if not (path / "models" / "stories260K-hf" / "model.safetensors").is_file():
        pytest.skip(f"no shared data in {path}; set CHORUS_SHARED")
    return path


@pytest.fixture(scope="session")
def stories(shared_data: Path) -> Subject:
    """stories260K with two trained adapters."""
    adapters = {
        name: shared_data / "adapters" / f"trained-stories260K-{name}" for name in ("dolly-r4-all", "gsm8k-r8-qv")
    }
    return Subject(shared_data / "models" / "stories260K-hf", adapters)
