"""Loads of a compiled kernel, from its PTX: how they wait for each other, and how many are in flight at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_REGISTER = re.compile(r"%[A-Za-z_]\w*(?:\.[xyz])?")
_STATEMENT = re.compile(r"(?:@(?P<guard>!?%\w+)\s+)?(?P<op>[a-z][\w.:]*)\s*(?P<rest>.*)", re.DOTALL)
_LABEL = re.compile(r"\s*([$\w]+):")
_LABEL_AFTER_SCOPE = re.compile(r"[\s{}]*([$\w]+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+([$\w]+)")
_BITS = re.compile(r"\.[bfus](\d+)$")

#: Instructions that write no register: their first operand is read.
_NO_RESULT = {"st", "red", "bra", "ret", "exit", "bar", "barrier", "cp", "stmatrix", "fence", "membar", "prefetch"}

_WAIT = "griddepcontrol.wait"


@dataclass(slots=True, eq=False)
class _Instruction:
    """op: without its guard. results: registers that it writes. sources: registers that it reads, its guard first.

    address: registers of the global address that it loads from or stores to. num_bytes: bytes that it loads from there;
    0 if it does not load.
    """

    op: str
    block: int
    results: list[str]
    sources: list[str]
    address: list[str]
    num_bytes: int = 0
    target: str = ""


@dataclass(frozen=True)
class Ptx:
    """A kernel's basic blocks, in order."""

    blocks: list[list[_Instruction]]
    labels: dict[str, int]
    _depths: dict[_Instruction, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Ptx:
        """text: a module with one entry."""
        body = _COMMENT.sub("", text)
        body = body[body.index("{", body.index(".entry")) + 1 :]
        targets = set(_BRANCH.findall(body))  # other labels are a debugger's
        blocks: list[list[_Instruction]] = [[]]
        labels: dict[str, int] = {}
        for statement in body.split(";"):
            after_scope = _LABEL_AFTER_SCOPE.match(statement)
            if after_scope and after_scope[1] in targets:  # behind inline assembly
                statement = statement[after_scope.start(1) :]
            while label := _LABEL.match(statement):
                if blocks[-1] and label[1] in targets:
                    blocks.append([])
                labels[label[1]] = len(blocks) - 1
                statement = statement[label.end() :]
            found = _STATEMENT.match(_without_directives(statement))
            if found is None:
                continue
            instruction = _instruction(found, len(blocks) - 1)
            blocks[-1].append(instruction)
            if instruction.op.split(".")[0] in ("bra", "ret", "exit"):
                blocks.append([])
        return cls([*blocks, []], labels)

    @property
    def barriers(self) -> int:
        """Barriers at which all warps of a program wait for each other."""
        return sum(each.op.startswith(("bar.sync", "barrier.sync")) for each in self._all())

    @property
    def bytes_at_once(self) -> int:
        """Most bytes that a thread requests from global memory in one basic block, where no load waits for a branch."""
        return max(sum(each.num_bytes for each in block) for block in self.blocks)

    def loads_before(self, parameter: int) -> int | None:
        """Longest chain of loads that a load through the kernel's pointer `parameter` waits for.

        A load waits for the inputs of its address, its guard and the branches before it. None if nothing is loaded
        through the pointer.
        """
        base = re.compile(rf"_param_{parameter}\b")
        found = [each for each in self._loads() if any(base.search(name) for name in self._origins(each.address))]
        return max((self._depth(each) for each in found), default=None)

    def is_early(self, parameters: Iterable[int]) -> bool:
        """Return whether some path through the kernel reads or writes through one of its pointers, or ends, before it
        has waited for the previous launch; False if the kernel never waits.
        """
        if not any(each.op == _WAIT for each in self._all()):
            return False
        bases = [re.compile(rf"_param_{parameter}\b") for parameter in parameters]

        def touches(each: _Instruction) -> bool:
            return any(base.search(name) for name in self._origins(each.address) for base in bases)

        seen, left = set(), [0]
        while left:  # blocks that are reached without having waited
            block = left.pop()
            if block in seen:
                continue
            seen.add(block)
            for each in self.blocks[block]:
                if each.op == _WAIT:
                    break
                if touches(each):
                    return True
            else:
                if block == len(self.blocks) - 1:
                    return True
                left += self._next[block]
        return False

    def _all(self) -> Iterator[_Instruction]:
        for block in self.blocks:
            yield from block

    def _loads(self) -> Iterator[_Instruction]:
        return (each for each in self._all() if each.num_bytes)

    @cached_property
    def _makers(self) -> dict[str, list[_Instruction]]:
        makers: dict[str, list[_Instruction]] = {}
        for each in self._all():
            for name in each.results:
                makers.setdefault(name, []).append(each)
        return makers

    def _origins(self, registers: Iterable[str]) -> set[str]:
        """Parameters that registers were computed from, other than through memory."""
        seen, left, found = set(), list(registers), set()
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            for maker in self._makers.get(name, ()):
                if maker.op.startswith("ld.param"):
                    found.add(maker.target)
                elif not maker.num_bytes:
                    left += maker.sources
        return found

    def _depth(self, instruction: _Instruction) -> int:
        """Longest chain of loads that an instruction waits for; a load in a loop counts once."""
        if instruction not in self._depths:
            self._depths[instruction] = 0
            waits = instruction.address if instruction.num_bytes else instruction.sources
            guard = instruction.sources[:1] if instruction.num_bytes else []
            makers = [maker for name in [*waits, *guard] for maker in self._makers.get(name, ())]
            makers += self._deciders[instruction.block]
            self._depths[instruction] = max((self._depth(maker) + bool(maker.num_bytes) for maker in makers), default=0)
        return self._depths[instruction]

    @cached_property
    def _next(self) -> list[list[int]]:
        """Blocks that may follow each; the last is the end."""
        end = len(self.blocks) - 1
        following = []
        for index, block in enumerate(self.blocks):
            last = block[-1] if block else None
            kind = last.op.split(".")[0] if last else ""
            targets = []
            if last and kind == "bra":
                targets.append(self.labels[last.target])
            if index < end and (kind not in ("bra", "ret", "exit") or (last and last.sources)):
                targets.append(index + 1)
            following.append(targets or ([end] if index < end else []))
        return following

    @cached_property
    def _deciders(self) -> list[list[_Instruction]]:
        """Branches that decide whether each block runs: it lies on every path out of one side, and not of the other."""
        count = len(self.blocks)
        after = [set(range(count)) for _ in range(count)]  # blocks on every path from here
        after[-1] = {count - 1}
        changed = True
        while changed:
            changed = False
            for index in reversed(range(count - 1)):
                found = {index} | set.intersection(*(after[target] for target in self._next[index]))
                changed |= found != after[index]
                after[index] = found
        deciders: list[list[_Instruction]] = [[] for _ in range(count)]
        for index, targets in enumerate(self._next):
            if len(targets) > 1:
                for block in set.union(*(after[target] for target in targets)) - (after[index] - {index}):
                    deciders[block].append(self.blocks[index][-1])
        return deciders


def _without_directives(statement: str) -> str:
    """Lines without directives: `.reg`, `.loc`, `.pragma` and braces of scopes."""
    lines = (line.strip() for line in statement.splitlines())
    text = " ".join(line for line in lines if line and not line.startswith((".loc", ".file", ".section")))
    while text[:1] in ("{", "}"):
        text = text[1:].strip()
    return "" if text.startswith(".") else text


def _instruction(found: re.Match[str], block: int) -> _Instruction:
    op, guard = found["op"], (found["guard"] or "").lstrip("!")
    kind, operands = op.split(".")[0], _operands(found["rest"])
    names = [_REGISTER.findall(operand) for operand in operands]
    has_result = kind not in _NO_RESULT and not op.startswith(("wgmma.", "griddepcontrol"))
    results = names[0] if has_result and names else []
    sources = [*([guard] if guard else []), *(name for each in names[bool(results) :] for name in each)]
    address: list[str] = []
    num_bytes = 0
    target = ""
    if op.startswith("ld.global"):
        address, num_bytes = names[1], len(results) * _bits(op) // 8
    elif op.startswith("cp.async") and len(operands) > 2:
        address, num_bytes = names[1], int(operands[2], 0)
    elif op.startswith(("st.global", "red.global")):
        address = names[0]
    elif op.startswith("ld.param"):
        target = operands[1].strip("[] ")
    elif kind == "bra":
        target = operands[0]
    if num_bytes:  # its guard first, if it has one
        sources = [guard] if guard else []
    return _Instruction(
        op, block, results=results, sources=sources, address=address, num_bytes=num_bytes, target=target
    )


def _operands(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, level = [""], 0
    for sign in text.strip():
        level += (sign in "[{(") - (sign in "]})")
        if sign == "," and not level:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def _bits(op: str) -> int:
    return int(found[1]) if (found := _BITS.search(op)) else 0
