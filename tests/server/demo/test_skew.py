"""Lines that `chorus demo --skew` prints, over a fake client."""

import asyncio
import io

from rich.console import Console

from chorus.server.demo import skew
from chorus.server.demo.client import Answer
from chorus.server.demo.questions import Question


class SlowClient:
    """Answers at once, and takes seconds to tell of the weights, as a server does whose machine is busy."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.asked = []

    async def ask(self, question):
        self.asked.append(question.model)
        await asyncio.sleep(0.001)
        return Answer(question.text, tokens=1)

    async def weights(self):
        await asyncio.sleep(self.seconds)
        return {"merged_adapter": "one" if self.asked[-1] == "one" else None, "merges": 1, "switches": 2}


def test_every_share_is_shown_however_slow_the_server_is(monkeypatch):
    monkeypatch.setattr(skew, "SHARE_LINES", 2)
    monkeypatch.setattr(skew, "LINE_SECONDS", 0.01)
    client, out, answered = SlowClient(0.05), io.StringIO(), []
    questions = {name: [Question(name, "text")] for name in ("base", "other", "one")}
    console = Console(file=out, width=120)
    asyncio.run(skew.Skew(client, questions, console, lambda *pair: answered.append(pair), seed=0).run())
    heading, *lines = out.getvalue().splitlines()
    assert heading.split()[:2] == ["seconds", "one"]
    shares = ["0%", "50%", "100%", "50%", "0%"]
    assert [line.split()[1] for line in lines] == [share for share in shares for _ in range(2)]
    assert lines[5].split()[2] == "one"
    assert {name: name in client.asked for name in questions} == dict.fromkeys(questions, True)
    assert len(answered) > 50
