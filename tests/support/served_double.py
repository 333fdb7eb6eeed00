"""``memserve serve`` with an engine that says "word " forty times: ``python served_double.py PORT``."""

import sys

from api_world import MODEL, TinyModel, says
from fake_engine import FakeEngine
from memserve.cli.main import main
from memserve.host import build

if __name__ == "__main__":
    build.build_engine = lambda options: (FakeEngine(says("word " * 40), step_s=0.01), TinyModel())
    main(["serve", "--in-process", "--port", sys.argv[1], "--served-model-name", MODEL])
