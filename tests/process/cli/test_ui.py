"""``memserve ui DIR``: a simulated run, played in Chromium."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx

from browser import browsers
from memserve.cli.main import run

SEEK = """
const slider = document.querySelector('.player input');
slider.value = arguments[0];
slider.dispatchEvent(new Event('input'));
return Number(slider.max);
"""
PROMPTS = "return Number(document.querySelector('[data-metric=memserve_prompt_tokens_total]').dataset.value)"


def test_a_replay_can_be_scrubbed_and_played(tmp_path: Path) -> None:
    workload = ["--workload", "chat", "--sessions", "12", "--rate", "5", "--kv-blocks", "200"]
    assert run(["sim", "run", *workload, "--out", str(tmp_path)]) == 0
    command = [sys.executable, "-m", "memserve", "ui", str(tmp_path), "--port", "0"]
    with browsers() as open_browser, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"1 run: (http://\S+)/ui", server.stdout.readline())
            assert found is not None
            snapshots = httpx.get(f"{found[1]}/ui/runs/0", timeout=30).json()
            assert httpx.get(f"{found[1]}/ui/runs/1", timeout=30).status_code == 404
            assert httpx.get(f"{found[1]}/ui/nothing.js", timeout=30).status_code == 404
            browser = open_browser()
            browser.open(f"{found[1]}/ui")
            browser.until("return document.getElementById('state').textContent === 'recorded'")
            last = browser.run(SEEK, len(snapshots) - 1)
            assert last == len(snapshots) - 1
            at_the_end = browser.run(PROMPTS)
            assert at_the_end == snapshots[-1]["metrics"]["memserve_prompt_tokens_total"][0][1] > 0
            browser.run(SEEK, 100)
            assert browser.run(PROMPTS) == snapshots[100]["metrics"]["memserve_prompt_tokens_total"][0][1] < at_the_end
            drawn = "return [...document.querySelectorAll('[data-node=member]')].map((card) => card.dataset.name)"
            assert browser.run(drawn) == ["p0", "d0"]
            browser.run("document.querySelector('.player button').click()")
            browser.until("return Number(document.querySelector('.player input').value) > 100")
            browser.run("document.querySelector('.player button').click(); location.hash = 'requests'")
            browser.until("return document.querySelectorAll('details').length > 0")
            assert browser.errors() == []
        finally:
            server.terminate()
            server.wait(20)
