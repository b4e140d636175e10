"""Warnings that come at most so often."""

import logging

from chorus.server.rare_log import RareLog


def test_one_line_a_minute_tells_how_many_it_stands_for(caplog):
    now = [5.0]
    log = RareLog(logging.getLogger("test"), 60.0, lambda: now[0])
    for _ in range(1000):
        log.warning("refused: %s", "no secret")
    now[0] += 59
    log.warning("refused: %s", "no secret")
    now[0] += 1
    log.warning("refused: %s", "another")
    now[0] += 60
    log.warning("refused")
    assert caplog.messages == ["refused: no secret", "refused: another; 1000 more since the last such line", "refused"]
