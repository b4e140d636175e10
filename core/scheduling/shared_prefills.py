"""Equal prompts at once: one request computes the prompt, the others start from its cached blocks."""

from __future__ import annotations

from ..requests.request import Request
from .request_memory import RequestMemory
from .waiting import WaitingQueue


class SharedPrefills:
    """Holds back waiting requests while a running one, their leader, computes the same prompt.

    They wait no longer than its prefill takes: whatever delays that, such as a full step, would delay them too. When
    the leader ends, is aborted or is preempted, they are candidates again, and the first of them becomes the leader.
    """

    def __init__(self, memory: RequestMemory, waiting: WaitingQueue, block_tokens: int) -> None:
        self._memory = memory
        self._waiting = waiting
        self._block_tokens = block_tokens
        self._leaders: dict[object, Request] = {}
        self._followers: dict[Request, list[Request]] = {}

    def wait(self, request: Request, num_blocks: int) -> bool:
        """Hold a request back if another is computing its prompt; `num_blocks` of it are cached already."""
        if not self._leaders or self._shareable(request) <= num_blocks * self._block_tokens:
            return False
        leader = self._leaders.get(self._key(request))
        if leader is None or not self._leads(leader) or not _same_prompt(leader, request):
            return False
        self._waiting.hold_back(request)
        self._followers.setdefault(leader, []).append(request)
        return True

    def begin(self, request: Request) -> None:
        """Make an admitted request the leader of its prompt, if there is none."""
        if request.caching and self._leads(request):
            self._leaders.setdefault(self._key(request), request)

    def settle(self) -> None:
        """Release the requests whose leader has computed the prompt, or never will."""
        for key, leader in list(self._leaders.items()):
            if not self._leads(leader):
                del self._leaders[key]
                for request in reversed(self._followers.pop(leader, ())):
                    self._waiting.release(request)

    def __bool__(self) -> bool:
        return bool(self._leaders)

    def _leads(self, leader: Request) -> bool:
        return leader.is_running and leader.caching and leader.num_computed_tokens < self._shareable(leader)

    def _shareable(self, request: Request) -> int:
        """Return how many prompt tokens lie in full blocks that an equal prompt could start from."""
        return (request.num_prompt_tokens - 1) // self._block_tokens * self._block_tokens

    def _key(self, request: Request) -> object:
        if request.prompt_hash is None:
            request.prompt_hash = hash(tuple(request.token_ids[: request.num_prompt_tokens]))
        return request.adapter, self._memory.scope(request), request.prompt_hash


def _same_prompt(one: Request, other: Request) -> bool:
    count = one.num_prompt_tokens
    return count == other.num_prompt_tokens and one.token_ids[:count] == other.token_ids[:count]
