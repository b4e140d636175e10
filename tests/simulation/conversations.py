"""Conversations that share a beginning: nothing is evicted, and each turn finds what its last one has computed."""

from __future__ import annotations

import random
from typing import Any

from chorus.core.requests.blocks import Blocks
from chorus.core.requests.request import Request

from .asked import promise
from .checked_engine import CheckedEngine
from .made_up_images import Prompt, with_images
from .made_up_model import MAX_MODEL_LEN, VOCAB

LAYERS: list[tuple[tuple[int | None, ...], int]] = [
    ((None,), 0),
    ((3,), 0),
    ((None, 5), 0),
    ((7, None, 2), 0),
    ((None,), 2),
    ((None, 5), 3),
    ((), 2),
]
"""Windows of layers with attention, and pages of a recurrent state."""


class Conversations:
    """Conversations with one beginning, which begin at once or one after another, and whose turns overlap."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        windows, state_pages = rng.choice(LAYERS)
        kind = rng.choice([None, None, Blocks.IMAGES])
        chunk = rng.choice([16, 64])
        self.checked = CheckedEngine(
            adapters=["adapter"],
            is_async=rng.random() < 0.5,
            windows=windows,
            state_pages=state_pages,
            image_blocks=kind,
            prefix_cache=True,
            num_pages=4000,
            block_tokens=rng.choice([1, 2, 4, 8]),
            max_num_batched_tokens=chunk,
            state_checkpoint_tokens=rng.choice([8, 1024]),
            host_prefix_cache="off",
        )
        adapter = rng.choice([None, "adapter"])
        shared = Prompt([rng.randrange(2, VOCAB) for _ in range(rng.randint(0, 14))])
        if kind is not None:
            shared = with_images(shared.tokens, VOCAB, rng)
        self.prompts = [shared.then(self._words(1, 6)) for _ in range(rng.randint(2, 4))]
        self.last: list[Request | None] = [None] * len(self.prompts)
        self.adapter = adapter
        self.num_hits = 0

    def _words(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(2, VOCAB) for _ in range(self.rng.randint(least, most))]

    def run(self) -> None:
        """Ask turns until no conversation has room for another."""
        while sent := self._ask():
            self.checked.drain()
            for at, request in sent:
                self._check(self.last[at], request)
                self.last[at] = request
                told = self.checked.asked[request.id].tokens
                self.prompts[at] = Prompt(told, self.prompts[at].media).then(self._words(1, 4))

    def _ask(self) -> list[tuple[int, Request]]:
        """The next turns of some conversations, at once or with steps between them."""
        open_ones = [at for at, prompt in enumerate(self.prompts) if len(prompt.tokens) < MAX_MODEL_LEN - 4]
        sent = list[tuple[int, Request]]()
        for at in self.rng.sample(open_ones, self.rng.randint(min(1, len(open_ones)), len(open_ones))):
            prompt, number = self.prompts[at], len(self.checked.asked)
            wanted: dict[str, Any] = {"prompt": prompt.tokens, "media": prompt.media}
            sent.append((at, self.checked.add(f"{number}", self.adapter, **wanted)))
            for _ in range(self.rng.choice([0, 0, 1, 3])):
                self.checked.step()
        return sent

    def _check(self, last: Request | None, request: Request) -> None:
        """Check what a turn found; the first one of a conversation may find nothing."""
        if last is None:
            return
        layout, step = self.checked.engine.executor.layout, self.checked.engine.block_tokens
        end = last.num_prompt_tokens if layout.state_pages else last.num_tokens  # states are kept after prompts
        count = request.blocks.cached((end - 1) // step, step)
        promise(
            request.num_cached_tokens >= count * step,
            "turn {} found {} tokens of {}",
            request,
            request.num_cached_tokens,
            count * step,
        )
        self.num_hits += count > 0


def converse(seed: int) -> int:
    """Run the conversations of a seed; return the number of turns that had something to find."""
    conversations = Conversations(seed)
    conversations.run()
    return conversations.num_hits
