"""Waiting requests with the same prompt as a running one, which compute it only once."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...memory.pages.block import Block
from ..requests.request import Request
from .queues import WaitingQueue
from .request_memory import RequestMemory


@dataclass(eq=False)
class SharedPrefills:
    """Holds back waiting requests while a running one, their leader, computes the same prompt.

    They wait no longer than its prefill takes: anything that delays it, such as a full step, would delay them too. When
    the leader ends, is aborted or is preempted, they are candidates again, and the first of them becomes the leader.
    """

    _memory: RequestMemory
    _waiting: WaitingQueue
    leaders: dict[object, Request] = field(default_factory=dict)
    """By what tells their prompts apart: those that compute one, and those that did until `release_followers`."""
    _followers: dict[Request, list[Request]] = field(default_factory=dict)
    _fetched: dict[Request, list[Request]] = field(default_factory=dict)
    _reading: list[Request] = field(default_factory=list)

    def hold_back(self, request: Request, num_tokens: int) -> bool:
        """Hold a request back if another one computes its prompt. num_tokens: tokens of it that have KV already."""
        if not self.leaders or self._memory.shareable(request) <= num_tokens or request.needs_prompt_states:
            return False
        leader = self.leaders.get(self._key(request))
        if leader is None or not self._leads(leader) or not _has_same_prompt(leader, request):
            return False
        self._waiting.hold_back(request)
        self._followers.setdefault(leader, []).append(request)
        return True

    def wait_for_read(self, request: Request) -> bool:
        """Hold a request back while its prompt's blocks are being read from files, if that is worth it."""
        if request.reading is None or not self._memory.is_read_ahead(request):
            return False
        self._waiting.hold_back(request)
        self._reading.append(request)
        return True

    def wait_for_fetch(self, request: Request, blocks: list[Block]) -> bool:
        """Hold a request back if another one is copying the blocks that it begins with from host memory."""
        other = self._memory.fetched_by(blocks)
        if other is None:
            return False
        self._waiting.hold_back(request)
        self._fetched.setdefault(other, []).append(request)
        return True

    def begin(self, request: Request) -> None:
        """Make an admitted request the leader of its prompt, if there is none."""
        if request.caching and self._leads(request):
            self.leaders.setdefault(self._key(request), request)

    def release_followers(self) -> None:
        """Release a leader's followers once it has computed the prompt, or copied it, or never will."""
        for request in [each for each in self._reading if not self._memory.is_read_ahead(each)]:
            self._reading.remove(request)
            self._waiting.release(request)
        for fetching in [each for each in self._fetched if each.fetch is None]:
            for request in reversed(self._fetched.pop(fetching)):
                self._waiting.release(request)
        for key, leader in list(self.leaders.items()):
            if not self._leads(leader):
                del self.leaders[key]
                for request in reversed(self._followers.pop(leader, ())):
                    self._waiting.release(request)

    def _leads(self, leader: Request) -> bool:
        known = leader.num_known_blocks * self._memory.block_tokens
        return leader.is_running and leader.caching and known < self._memory.shareable(leader)

    def _key(self, request: Request) -> object:
        if request.prompt_hash is None:
            request.prompt_hash = hash(tuple(request.keys(0, request.num_prompt_tokens)))
        return request.adapter, self._memory.scope(request), request.prompt_hash


def _has_same_prompt(one: Request, other: Request) -> bool:
    count = one.num_prompt_tokens
    return count == other.num_prompt_tokens and one.keys(0, count) == other.keys(0, count)
